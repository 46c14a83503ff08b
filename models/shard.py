"""Which part of a model one rank holds; sizes of weights, heads and caches are derived from it."""

from typing import NamedTuple

from pdkv.errors import ConfigError


class Shard(NamedTuple):
    """Rank `rank` of `size` in tensor parallelism."""

    rank: int = 0
    size: int = 1

    def part(self, total: int, what: str) -> slice:
        """This rank's range of `total` items.

        Raises:
            ConfigError: they cannot be divided evenly.
        """
        if total % self.size:
            raise ConfigError(f"{total} {what} cannot be divided among {self.size} ranks")
        each = total // self.size
        return slice(self.rank * each, (self.rank + 1) * each)

    def heads(self, total: int) -> slice:
        """This rank's range of `total` KV heads. With more ranks than heads, neighbouring ranks hold the same one.

        Raises:
            ConfigError: neither number divides the other.
        """
        if self.size <= total or self.size % total:
            return self.part(total, "key-value heads")
        head = self.rank * total // self.size
        return slice(head, head + 1)

    def padded_part(self, total: int) -> slice:
        """This rank's range of `total` items that need not divide evenly: the last ranks have fewer, possibly none."""
        each = -(-total // self.size)
        return slice(min(self.rank * each, total), min((self.rank + 1) * each, total))


WHOLE = Shard()
