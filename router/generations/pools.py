"""A router's engines by the model they have: the launch's own, and pools (docs/membership.md)."""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pdkv.base.limits import clip
from pdkv.base.options import did_you_mean
from pdkv.errors import ConfigError
from pdkv.router.request import PoolNews

if TYPE_CHECKING:
    from pdkv.router.generations.dispatch import Dispatcher


def read_split(given: Mapping[str, float | str], pools: Collection[str]) -> dict[str, float]:
    """Percent by pool. Raises ConfigError for what is no such number, unknown, or too much."""
    shares: dict[str, float] = {}
    for name, text in given.items():
        try:
            percent = float(text)
        except ValueError:
            percent = math.nan
        if name not in pools or not 0.0 <= percent <= 100.0:
            known = f"POOL=PERCENT, 0 to 100 of one of {', '.join(pools) or 'no pools (--pool)'}"
            raise ConfigError(f"split: {known} was expected, got {clip(f'{name}={text}')}")
        shares[name] = percent
    if sum(shares.values()) > 100.0:
        raise ConfigError(f"split: at most 100 percent in all was expected, got {shares}")
    return shares


class Pools:
    """All dispatchers of a router, and the split between them."""

    def __init__(self, own: "Dispatcher") -> None:
        self.others: dict[str, Dispatcher] = {}  # by pool
        self.shares: dict[str, float] = {}  # percent of the requests for the launch's own model, by pool
        self._names: dict[str, Sequence[str]] = {}
        self._own = own

    def add(self, name: str, names: Sequence[str], dispatcher: "Dispatcher") -> None:
        """Add a pool, whose model has these names."""
        self.others[name], self._names[name] = dispatcher, names

    def __iter__(self) -> "Iterator[Dispatcher]":
        yield self._own
        yield from self.others.values()

    def at(self, name: str) -> "Dispatcher":
        """The dispatcher of a pool; of "", the launch's own. Raises ConfigError for an unknown one."""
        if name and name not in self.others:
            known = did_you_mean(name, self.others) or f"; known: {', '.join(self.others) or 'none'} (--pool)"
            raise ConfigError(f"there is no pool {name!r}{known}")
        return self.others.get(name, self._own)

    def holder(self, engine: str) -> "Dispatcher":
        """The dispatcher that has an engine; of an unknown one, the launch's own."""
        return next((each for each in self.others.values() if engine in each.fleet.engines), self._own)

    def split(self, shares: Mapping[str, float]) -> None:
        """Change the percent of some pools. Raises ConfigError; then nothing has changed."""
        wanted = read_split({**self.shares, **shares}, self.others)
        self.shares = {name: percent for name, percent in wanted.items() if percent}

    def news(self) -> PoolNews:
        """What requests are prepared by."""
        down = (name for name, each in self.others.items() if each.is_down())
        return PoolNews(tuple(each.max_model_len for each in self), tuple(self.shares.items()), tuple(down))

    @property
    def faults(self) -> dict[str, str]:
        """Why pools run no request now."""
        return {name: each.fault for name, each in self.others.items() if each.fault}

    def add_to(self, topology: dict[str, Any]) -> dict[str, Any]:
        """The topology of the launch's own engines with those of pools."""
        if not self.others:
            return topology
        rows = [engine | {"pool": ""} for engine in topology["engines"]]
        for name, other in self.others.items():
            theirs = other.topology()
            rows += [engine | {"pool": name} for engine in theirs["engines"]]
            topology["pairs"] += theirs["pairs"]
        return topology | {"engines": rows, "pools": [self._describe(name) for name in self.others]}

    def _describe(self, name: str) -> dict[str, Any]:
        other = self.others[name]
        told = {"name": name, "models": list(self._names[name]), "split_percent": self.shares.get(name, 0.0)}
        return told | {"max_model_len": other.max_model_len, "fault": other.fault, "requests": other.num_running}
