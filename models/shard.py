"""Which part of a model one rank holds; sizes of weights, heads and caches are derived from it."""

from typing import NamedTuple

from pdkv.errors import ConfigError


class Shard(NamedTuple):
    """Rank `rank` of `size` in tensor parallelism."""

    rank: int = 0
    size: int = 1

    def part(self, total: int, what: str) -> slice:
        """This rank's range of `total` things.

        Raises:
            ConfigError: they cannot be divided evenly.
        """
        if total % self.size:
            raise ConfigError(f"{total} {what} cannot be divided among {self.size} ranks")
        each = total // self.size
        return slice(self.rank * each, (self.rank + 1) * each)


WHOLE = Shard()
