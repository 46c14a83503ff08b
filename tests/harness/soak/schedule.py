"""Which events come when: drawn from a seed before anything runs."""

import random
from collections.abc import Sequence
from typing import NamedTuple

PROMPTLY_S = (0.05, 0.5)
"""How long a stop below every deadline lasts."""

LATE_S = (5.0, 7.0)
"""How long one above every deadline lasts; see the deadlines in backends.py."""


GONE_S = 5.0
"""For how long no engine of a role is there."""

OPERATIONS = ("drain engine", "flip engine", "scale role", "restart engines")
"""What an operator does, one after the other."""


class Event(NamedTuple):
    """One thing that goes wrong."""

    at_s: float  # from the round's beginning
    kind: str
    target: str = ""  # an engine ("decode-0"), another rank of one ("decode-0.1"), a role, "router", "fork-server"
    seconds: float = 0.0  # how long it lasts

    def __str__(self) -> str:
        lasts = f" for {self.seconds:.2f} s" if self.seconds else ""
        return f"{self.kind} {self.target}".rstrip() + lasts


class Site(NamedTuple):
    """What there is to be broken."""

    engines: Sequence[str]
    other_ranks: Sequence[str]  # process names of ranks behind the first
    has_server: bool = False
    has_files: bool = False
    has_links: bool = False  # connections between engines, or to a store
    spared: Sequence[str] = ()  # nothing happens to these: "router"


def deck(site: Site) -> list[str]:
    """Every kind of event that the site can have, the likelier ones more than once."""
    return [kind for kind in _whole_deck(site) if not set(kind.split()[1:2]) & set(site.spared)]


def _whole_deck(site: Site) -> list[str]:
    kinds = ["kill engine", "kill engine", "stop engine", "stop engine late", "garbage", "garbage", "burst"]
    kinds += ["kill router", "stop router", "kill fork-server", "stop fork-server late", "full shared memory"]
    kinds += ["cut engine", "refuse transfers", "gone role", "rude clients", *OPERATIONS]
    if site.has_links:
        kinds += ["cut peers"]
    if site.other_ranks:
        kinds += ["kill rank", "stop rank", "stop rank late"]
    if site.has_server:
        kinds += ["kill server", "stop server", "stop server late", "full server"]
    if site.has_files:
        kinds += ["full disk", "full disk"]
    return kinds


def draw(rng: random.Random, site: Site, seconds: float, gap_s: float) -> list[Event]:
    """Events of one round, on average one per `gap_s`: all of the deck before any of it comes again."""
    events: list[Event] = []
    rest: list[str] = []
    at_s = rng.uniform(0.2, gap_s)
    while at_s < seconds:
        if not rest:
            rest = rng.sample(kinds := deck(site), len(kinds))
        events.append(_event(rng, site, at_s, rest.pop()))
        at_s += rng.uniform(0.2, 1.8) * gap_s
    return events


def _event(rng: random.Random, site: Site, at_s: float, kind: str) -> Event:
    verb, _, what = kind.partition(" ")
    names = {
        "engine": site.engines,
        "peers": site.engines,
        "transfers": site.engines,
        "rank": site.other_ranks,
        "role": ["prefill", "decode"],
        "router": ["router"],
        "fork-server": ["fork-server"],
    }
    target = rng.choice(names.get(what.removesuffix(" late"), [""]))
    seconds = 0.0
    if verb == "stop":
        seconds = rng.uniform(*(LATE_S if kind.endswith("late") else PROMPTLY_S))
    elif verb in ("full", "garbage", "refuse", "drain", "flip", "scale"):
        seconds = rng.uniform(1.0, 3.0)
    elif verb == "rude":
        seconds = rng.uniform(1.0, 8.0)
    elif verb == "gone":
        seconds = GONE_S
    if kind == "full shared memory":
        target = rng.choice(site.engines)  # which has to start again meanwhile
    return Event(at_s, kind, target, seconds)
