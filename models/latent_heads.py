"""One layer's queries over latent rows (MLA): they are brought to the latents, or these become keys and values."""

from typing import NamedTuple

import torch


class LatentHeads(NamedTuple):
    """One layer's queries in a step, and its weights, of this rank's heads."""

    queries: torch.Tensor  # (n, heads, plain + turned), rotated
    keys: torch.Tensor  # (heads, plain, rank)
    values: torch.Tensor  # (heads, rank, value)

    def absorb(self, rows: torch.Tensor, which: torch.Tensor | slice) -> None:
        """Bring some queries to the latents' size, in rows (n, heads + 1, row) that have what is rotated of them, and
        each token's own row behind its heads.
        """
        heads, plain, rank = self.keys.shape
        queries = self.queries[which, :, :plain]
        rows[which, :heads, :rank] = torch.bmm(queries.transpose(0, 1), self.keys).transpose(0, 1)

    def results(self, sums: torch.Tensor) -> torch.Tensor:
        """Sums of latents (m, heads, rank) -> (m, heads * value)."""
        return torch.bmm(sums.transpose(0, 1), self.values).transpose(0, 1).flatten(1)

    def expand(self, rows: torch.Tensor) -> torch.Tensor:
        """Latent rows (t, row) -> keys, and values with zeros behind them (t, 2, heads, plain + turned)."""
        (heads, plain, rank), value = self.keys.shape, self.values.shape[2]
        kv, latents = rows.new_zeros(len(rows), 2, *self.queries.shape[1:]), rows[:, :rank]
        kv[:, 0, :, :plain] = (latents @ self.keys.flatten(0, 1).t()).view(-1, heads, plain)
        kv[:, 0, :, plain:] = rows[:, None, rank:]
        kv[:, 1, :, :value] = (latents @ self.values.transpose(0, 1).flatten(1)).view(-1, heads, value)
        return kv
