"""Counters of an engine and its connectors, and the report that takes them to the router."""

from collections import Counter
from collections.abc import Mapping
from typing import Annotated

import msgspec
from msgspec import Meta

from pdkv.wire.types import MAX_CARDS, MAX_CONNECTOR_PARTS, MAX_PROBLEM_CHARS, Count, Id, KVOwner, Message, Seconds

MAX_KV_OWNERS = 1024
"""The most owners with separately counted KV in one tier of an engine."""

MAX_DRAFTS = 64
"""The most guesses of a request in one step."""


class SourceCounts(msgspec.Struct, frozen=True, omit_defaults=True):
    """Prompt tokens of one choice on one engine by the source of their KV; they sum to the prompt's length."""

    computed: Count = 0
    recomputed: Count = 0  # computed again after a preemption or a failed load
    local_hit: Count = 0
    remote: Count = 0  # through a hand-off
    store: Count = 0  # content-addressed, from a store or another engine's cache


class BlockCounts(msgspec.Struct, frozen=True):
    """The ownership equation: free + cached + active + leased + quarantined = total."""

    total: Count
    free: Count
    cached: Count
    active: Count
    leased: Count
    quarantined: Count


class TierHeld(msgspec.Struct, frozen=True):
    """An engine's current values in a tier of a store, summed over its ranks; zeros if the tier does not know."""

    values: Count = 0
    num_bytes: Count = 0
    capacity: Count = 0  # bytes
    evicted: Count = 0  # values evicted to make room for others since the start
    owned: Annotated[dict[KVOwner, Count], Meta(max_length=MAX_KV_OWNERS)] = {}  # bytes by owner, of KV with terms

    def __add__(self, other: "TierHeld") -> "TierHeld":
        return TierHeld(
            self.values + other.values,
            self.num_bytes + other.num_bytes,
            self.capacity + other.capacity,
            self.evicted + other.evicted,
            largest_owners(Counter(self.owned) + Counter(other.owned)),
        )


def largest_owners(owned: Mapping[int, int]) -> dict[int, int]:
    """The owners with the most bytes, as many as a TierHeld may have."""
    return dict(Counter(owned).most_common(MAX_KV_OWNERS))


class ConnectorStats(msgspec.Struct, frozen=True):
    """Counts of a connector, or of one part of it, since its start, summed over an engine's ranks.

    A transfer counts on each rank that moved bytes for it.
    """

    saves: Count = 0  # successful transfers out of this engine
    loads: Count = 0  # successful transfers into it
    saved_bytes: Count = 0
    loaded_bytes: Count = 0
    failed_saves: Count = 0  # cancelled transfers do not count as failed
    failed_loads: Count = 0
    failed_lookups: Count = 0
    timeouts: Count = 0  # saves, loads and lookups: also failures
    fallbacks: Count = 0  # loads that another part took over when this one failed
    tier_hits: Count = 0  # values read from a tier
    tier_failures: Count = 0  # calls of a tier that failed, or were skipped after a failure
    read_bytes: Count = 0  # bytes found in a store, or in a tier of one
    read_seconds: Seconds = 0.0  # seconds in which a rank was reading from it
    damaged_values: Count = 0  # stored values that did not match what was saved
    corrupted_transfers: Count = 0  # failed: the received data did not match what the peer sent
    paths: Annotated[dict[Id, Id], Meta(max_length=MAX_CARDS)] = {}  # the path by which KV of these peers is read
    held: TierHeld | None = None  # of a tier; None: it is not a tier
    load_seconds: Seconds = 0.0  # seconds of threads spent on loads
    hidden_load_seconds: Seconds = 0.0  # the part of these in which the step thread computed and did not wait
    save_seconds: Seconds = 0.0
    hidden_save_seconds: Seconds = 0.0
    late_saves: Count = 0  # values not saved: too much was in transit before their blocks were reused

    def __add__(self, other: "ConnectorStats") -> "ConnectorStats":
        names = [name for name in self.__struct_fields__ if name not in ("paths", "held")]
        total = ConnectorStats(**{name: getattr(self, name) + getattr(other, name) for name in names})
        paths = dict(self.paths)
        for peer, path in other.paths.items():  # ranks may differ
            paths[peer] = "+".join(sorted({*paths.get(peer, path).split("+"), *path.split("+")}))
        held = self.held + other.held if self.held and other.held else self.held or other.held
        return msgspec.structs.replace(total, paths=paths, held=held)


class DraftCounts(msgspec.Struct, frozen=True, omit_defaults=True):
    """Guesses at tokens to come that an engine verified."""

    drafts: Count = 0  # requests in steps with guesses
    tokens: Count = 0
    accepted: Count = 0
    accepted_at: Annotated[list[Count], Meta(max_length=MAX_DRAFTS)] = []  # by position behind the last token
    seconds: Seconds = 0.0  # in which tokens were guessed
    found_tokens: Count = 0  # of prompts, whose KV a draft model found beside that of the served one
    computed_tokens: Count = 0  # of prompts, computed by a draft model


class LoadReport(Message, frozen=True):
    """The engine's load, and its counters since the start."""

    waiting: Count
    running: Count
    blocks: BlockCounts
    sources: SourceCounts = SourceCounts()
    preemptions: Count = 0
    load_failures: Count = 0
    bytes_received: Count = 0
    dropped_messages: Count = 0
    transfer_seconds: Seconds = 0.0
    steps: Count = 0
    damaged_values: Count = 0
    partial_loads: Count = 0
    non_finite_requests: Count = 0
    connectors: Annotated[dict[Id, ConnectorStats], Meta(max_length=MAX_CONNECTOR_PARTS)] = {}  # by name, as NAME/PART
    connector_problem: Annotated[str, Meta(max_length=MAX_PROBLEM_CHARS)] = ""  # why it cannot be used now
    answers: Count = 0  # the number of the latest answered AskReport of the router; 0: none
    drafts: DraftCounts = DraftCounts()
