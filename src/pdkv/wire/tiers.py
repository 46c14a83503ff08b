"""Tiers below an engine's cache: their events, operators' orders about them, and the answers."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from pdkv.wire.kv import KVTerms
from pdkv.wire.types import MAX_CONNECTOR_PARTS, MAX_PROBLEM_CHARS, BlockKeys, Count, Id, Message, Seconds, Size, Text

CacheAction = Literal["lookup", "clear", "pin", "unpin", "prefetch", "move"]

MAX_MEDIUM_CHARS = 128
"""Longest name of a tier below the cache."""


def names_tier(name: str, tier: str) -> bool:
    """Whether a tier, such as "multi/1-store/0-host", has this name: in full, by its last part or its kind, "host"."""
    last = tier.rpartition("/")[2]
    return name in (tier, last, last.partition("-")[2])


class CacheOrder(Message, frozen=True, kw_only=True):
    """An operator's query or order about cached KV; answered by a CacheAnswer."""

    order_id: Id
    action: CacheAction
    keys: BlockKeys | None = None  # of a prompt's full hash blocks, in order; None: everything
    tier: Text = ""  # its name, "multi/1-store/0-host", the last part of that, or its kind, "host"; empty: all
    ttl_s: Seconds | None = None  # of pins; None: until they are removed
    timeout_s: Seconds = 10.0  # tiers that have not answered by then are late
    kv_terms: KVTerms | None = None  # prefetch, move: of the prompt's requests
    source: Text = ""  # move: the source tier, named like `tier`, which is the destination
    copy: bool = False  # move: keep the values in the source, too

    def failed(self, code: str, problem: str) -> "CacheAnswer":
        """The answer of an engine none of whose tiers gives one."""
        return CacheAnswer(self.order_id, [TierAnswer("", code=code, problem=problem)])

    def within(self, name: str) -> "CacheOrder":
        """The same order, addressed to the part of that name."""
        tier, source = self.tier.removeprefix(f"{name}/"), self.source.removeprefix(f"{name}/")
        return msgspec.structs.replace(self, tier=tier, source=source)

    def is_about(self, tier: str) -> bool:
        """Whether the order names this tier, such as "0-host", of the part that it was sent to."""
        return not self.tier or names_tier(self.tier, tier)

    def is_from(self, tier: str) -> bool:
        """Whether the order takes values out of that tier."""
        return names_tier(self.source, tier)


class TierPart(msgspec.Struct, frozen=True, omit_defaults=True):
    """One of the stores that a tier consists of."""

    name: Text  # name in LoadReport.connectors, after the connector's name; empty: the tier is this store alone
    capacity: Count | None = None  # this engine's keys that fit into it; None: it is not known to evict any

    def under(self, name: str) -> "TierPart":
        """The same store as a part of `name`."""
        return TierPart(f"{name}/{self.name}" if self.name else name, self.capacity)


class TierEvents(Message, frozen=True):
    """Keys that can be loaded from a tier below the engine's cache, and keys that no longer can (docs/kv-stores.md).

    These are hints, without numbers: a wrong or missing key only costs a load or a computation. Without keys it only
    says that the engine reaches the tier.
    """

    medium: Annotated[str, Meta(min_length=1, max_length=MAX_MEDIUM_CHARS)]  # the tier's name, such as "disk"
    shared: bool  # one engine's events hold for all that name it and its scope; otherwise it is private to this engine
    tokens_per_key: Size  # a key is the block key at the end of this many tokens; other ends are not reported
    removed: BlockKeys = []
    stored: BlockKeys = []
    parts: Annotated[list[TierPart], Meta(max_length=MAX_CONNECTOR_PARTS)] = []  # fastest first; empty: not known
    value_bytes: Count = 0  # bytes that a rank reads for a key; 0: not known
    scope: Annotated[str, Meta(max_length=MAX_MEDIUM_CHARS)] = ""  # distinguishes media of one name, as of two hosts

    def under(self, name: str) -> "TierEvents":
        """The same events, of a tier that is a part of `name`."""
        medium = f"{name}/{self.medium}"[:MAX_MEDIUM_CHARS]
        return msgspec.structs.replace(self, medium=medium, parts=[part.under(name) for part in self.parts])


class TierAnswer(msgspec.Struct, frozen=True, omit_defaults=True):
    """The result of a CacheOrder in one tier of an engine; for a failure, the reason."""

    tier: Text
    num_tokens: Count = 0  # tokens from the prompt's beginning that the tier has, or that were pinned there
    num_values: Count = 0  # blocks of a pool, or values of a store, that it affected
    code: Id = ""
    problem: Annotated[str, Meta(max_length=MAX_PROBLEM_CHARS)] = ""


class CacheAnswer(Message, frozen=True):
    """The result of a CacheOrder on one engine."""

    order_id: Id
    tiers: Annotated[list[TierAnswer], Meta(max_length=MAX_CONNECTOR_PARTS)] = []  # those that the order names
    known: Annotated[list[Text], Meta(max_length=MAX_CONNECTOR_PARTS)] = []  # all existing ones

    def under(self, name: str) -> "CacheAnswer":
        """The same answer, about tiers that are parts of `name`."""
        tiers = [msgspec.structs.replace(tier, tier=f"{name}/{tier.tier}") for tier in self.tiers]
        return CacheAnswer(self.order_id, tiers, [f"{name}/{tier}" for tier in self.known])
