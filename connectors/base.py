"""The KVConnector interface: the plug point between an engine and a KV transport.

A connector has two sides. The scheduler side decides, per request, what comes from outside and what is sent; it holds
no tensor, never blocks and answers from state in memory. The worker side (one per rank) moves bytes between KV blocks
and the transport; transfers run on threads of its own and are reported in `get_finished`.

This module owns every type that crosses the interface, so that a connector imports nothing of the engine.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Flag, auto
from itertools import islice
from math import gcd
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple, overload

import msgspec

from pdkv.base.clock import MONOTONIC, Clock
from pdkv.base.options import Options
from pdkv.connectors.block_table import BlockTable
from pdkv.connectors.plan import NO_PLAN, ConnectorPlan
from pdkv.connectors.step_done import StepDone
from pdkv.wire.kv import ChecksumMode, EngineCard, KVHandoff, KVLayout, KVTerms
from pdkv.wire.reports import ConnectorStats
from pdkv.wire.tiers import CacheAnswer, CacheOrder, TierEvents

if TYPE_CHECKING:
    import torch


class TransferKey(NamedTuple):
    """The name of one transfer, or of one part of it.

    A hand-off keeps the attempt that computed it. A later attempt of the request may read that KV in a transfer of its
    own: a pull and a store find it by `RequestView.source_key`, and a push is sent again for every ticket until the
    lease ends.
    """

    transfer_id: str
    attempt: int
    lent: bool = False  # KV that an engine lends out of its cache for the transfer's prompt
    part: int = 0  # number of a part of a transfer in several; 0: all of it
    child: int | None = None  # the child of `multi` that reports it


Direction = Literal["send", "receive"]
"""The direction of a transfer, seen from its engine: what it borrows for a prompt and what it hands over of it have one
key.
"""


class Cancel(NamedTuple):
    """A transfer that the engine gives up."""

    key: TransferKey
    direction: Direction


LoadMode = Literal["async", "layerwise"]


# --- what the engine shows a connector ----------------------------------------------------------------------------


class RequestView(msgspec.Struct, frozen=True):
    """One request as a connector sees it."""

    request_id: str
    attempt: int
    transfer_id: str
    kv: Literal["local", "handoff", "await_peer"]
    num_tokens: int  # prompt + output so far
    num_wanted: int  # KV of tokens [0, num_wanted) is useful; the next token is computed here
    block_keys: Sequence[bytes]  # one per full hash block of the tokens so far
    handoff: KVHandoff | None = None  # where the KV is; await_peer: all of it; handoff: what another engine lends
    ticket: bytes | None = None  # handoff: where decode wants the KV
    kv_ready: bool | None = None  # await_peer: the content of KVReady; None = nothing yet
    num_local_hit: int = 0  # tokens of the local hit at the start of its blocks, once it has blocks
    prompt_token_ids: Sequence[int] = ()  # not empty if only requests with its salt or adapter may find its KV
    kv_terms: KVTerms | None = None  # terms on which its KV is kept where it is stored
    num_handed_over: int = 0  # number of its first tokens that another engine has computed and handed over
    lent: bool = False  # nothing is computed for it: the cached KV is handed off to another engine

    @property
    def transfer_key(self) -> TransferKey:
        """The name of the transfer that the request hands off or loads."""
        return TransferKey(self.transfer_id, self.attempt, self.lent)

    @property
    def source_key(self) -> TransferKey:
        """The name of the request's KV at the source: it keeps its attempt even if a later attempt reads it."""
        return TransferKey(self.transfer_id, self.attempt if self.handoff is None else self.handoff.attempt)


BlockTables = Sequence[Sequence[int]]
"""A request's block tables, one per KV group of the layout, all equally long.

-1 stands for a block that the request gave up or never had, since no later token sees it. Such entries begin the table
of a group with a window; they are never sent, and nothing is loaded into them.
"""


class BlockIds(Sequence[int]):
    """The first blocks of a growing table: a snapshot that copies only the entries that are read.

    Once the request gives a block up, its entry is -1 here too; only entries that were read, and blocks that are held,
    stay.
    """

    __slots__ = ("_block_ids", "_length")

    def __init__(self, block_ids: list[int]) -> None:
        """`block_ids` may be appended to, and entries from the first on may become -1."""
        self._block_ids = block_ids
        self._length = len(block_ids)

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        if isinstance(index, slice):
            span = range(self._length)[index]
            if span.step == 1:
                return self._block_ids[span.start : span.stop]
            return [self._block_ids[i] for i in span]
        return self._block_ids[range(self._length)[index]]

    def __iter__(self) -> Iterator[int]:
        return islice(self._block_ids, self._length)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    def __repr__(self) -> str:
        return repr(list(self))


class ScheduledRange(msgspec.Struct, frozen=True):
    """A request's tokens [start, stop) are computed in this step into `block_tables` (its complete tables)."""

    request: RequestView
    start: int
    stop: int
    block_tables: BlockTables
    may_be_void: bool = False  # a layerwise load of earlier tokens has not ended: if it fails, all behind it is redone


class ConfirmedRange(msgspec.Struct, frozen=True):
    """A request's tokens [start, stop) are final in its blocks: computed and confirmed, loaded, or cached hits.

    Only these may be made visible. A push may send a ScheduledRange, too, once its layers are computed, unless it may
    be void (docs/transfers.md). `last` marks the end of a hand-off, which includes the partial tail.
    A range is shown again from 0 when the request's ticket arrives, and after a preemption; the connector must not send
    tokens twice.
    """

    request: RequestView
    start: int
    stop: int
    block_tables: BlockTables
    last: bool


class Shown(Flag):
    """The requests for which a connector is shown what happens to their tokens."""

    NONE = 0
    HANDOFFS = auto()  # requests that will be handed off
    LAYERWISE_LOADS = auto()  # requests for which a layerwise load begins in the step
    OTHERS = auto()
    ALL = HANDOFFS | LAYERWISE_LOADS | OTHERS


class Observed(NamedTuple):
    """What a connector must be shown each step. Nothing else is gathered, so steps with many requests stay cheap."""

    scheduled: Shown = Shown.ALL
    confirmed: Shown = Shown.ALL
    waiting_keys: bool = True
    confirmed_tokens: int = 1
    """A request's confirmed tokens are shown when their number passes a multiple of this, or of the block size if that
    is larger; at once at a hand-off's end, and when its ticket arrives."""
    confirmed_steps: int = 1
    """Steps by which a decode's confirmed tokens may be shown late, together with others': each showing has a cost."""

    def __or__(self, other: "Observed") -> "Observed":
        """What either of the two needs."""
        units = [o.confirmed_tokens for o in (self, other) if o.confirmed]
        steps = [o.confirmed_steps for o in (self, other) if Shown.OTHERS in o.confirmed]
        return Observed(
            self.scheduled | other.scheduled,
            self.confirmed | other.confirmed,
            self.waiting_keys or other.waiting_keys,
            gcd(*units) or 1,
            min(steps, default=1),
        )


OBSERVES_NOTHING = Observed(Shown.NONE, Shown.NONE, waiting_keys=False)


class SchedulerView(msgspec.Struct, frozen=True):
    """What happened since the last step, and what this step does, as far as the connector observes it.

    A connector must not change it.
    """

    step_id: int
    scheduled: Sequence[ScheduledRange]
    confirmed: Sequence[ConfirmedRange]
    preempted: Sequence[TransferKey]
    finished: Sequence[TransferKey]
    aborted: Sequence[TransferKey]
    waiting_keys: Sequence[Sequence[bytes]]  # block keys of the first waiting requests, for a store to prefetch
    cancelled: Sequence[TransferKey] = ()  # loads that the engine gave up: the workers cancel them in this step
    waiting_terms: Sequence[KVTerms | None] = ()  # of each of `waiting_keys`; empty: none has any


# --- what a connector answers -------------------------------------------------------------------------------------


class MatchedTokens(NamedTuple):
    """The number of tokens beyond the local hit that can be loaded from outside."""

    num_tokens: int
    mode: LoadMode = "async"
    ask_again: bool = False  # not known yet: `notify` will be called when it is
    # found by its own lookup: what the request's hand-off names, if it has one, is not used
    without_handoff: bool = False


NO_MATCH = MatchedTokens(0)
ASK_AGAIN = MatchedTokens(0, ask_again=True)


class BlockHold(NamedTuple):
    """Blocks that a transfer reads; the engine holds them until `get_finished` reports `key` as sent or failed.

    A transfer in several batches names each by a part of its key, so that its blocks are freed batch by batch.
    """

    key: TransferKey
    block_ids: Sequence[int]
    owner: TransferKey  # the transfer's request: it is not preempted while it is read


class KVConnectorMetadata(msgspec.Struct, kw_only=True):
    """One step's orders from a connector's scheduler side to its worker side; backends subclass it. Plain data."""

    step_id: int
    needs_layer_hooks: bool = False  # False: no wait_for_layer_load / save_kv_layer in this step
    holds: list[BlockHold] = []  # saves that begin here and read blocks beyond this step
    # Set by the runner; never on the wire. None: the step's results are in its blocks when it returns.
    # to be awaited before confirmed KV is read, or a block is written that had another owner
    earlier_steps: StepDone | None = None
    this_step: StepDone | None = None  # to be awaited before this step's results are read


class FinishDecision(NamedTuple):
    """What happens to a finished request's blocks."""

    hold_blocks: bool  # True: a lease keeps them until Release (pull) or the end of the transfer (push)
    payload: bytes | None = None  # the payload of the KVHandoff, if the request is handed off
    until_release: bool = False  # the end of a sending is reported, and does not end the lease


class TransferOutcome(NamedTuple):
    """How one transfer ended on one rank."""

    code: str = ""  # a TransferError's code, empty when it succeeded
    num_bytes: int = 0
    seconds: float = 0.0
    num_tokens: int = 0  # of a failed load: the number of its first tokens that are in their blocks all the same
    num_damaged: int = 0  # stored values that did not match what was saved under their keys: treated as misses
    notes: tuple[bytes, ...] = ()  # private to the connector, from all ranks
    num_expired: int = 0  # expired stored values: also misses
    ends_at: int = 0  # unix time at which the first of the loaded stored values expires; 0: never


class TransferResults(NamedTuple):
    """Transfers that ended since the last call; the four maps are disjoint."""

    finished_sending: Mapping[TransferKey, TransferOutcome]
    failed_sending: Mapping[TransferKey, TransferOutcome]
    finished_receiving: Mapping[TransferKey, TransferOutcome]
    failed_receiving: Mapping[TransferKey, TransferOutcome]

    def __bool__(self) -> bool:
        return bool(self[0] or self[1] or self[2] or self[3])

    @property
    def has_sends(self) -> bool:
        """Whether a transfer from this engine is among them."""
        return bool(self.finished_sending or self.failed_sending)


NO_TRANSFERS = TransferResults({}, {}, {}, {})

Stats = Mapping[str, ConnectorStats]
"""Counts since a side was made, by part of the connector: "" is the connector itself, other names are children or
tiers.
"""


# --- the interface ------------------------------------------------------------------------------------------------


class ConnectorConfig(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The configuration of a connector in one process."""

    engine: str
    epoch: str
    layout: KVLayout  # of one rank
    num_blocks: int
    plan: ConnectorPlan = NO_PLAN
    model: str = ""  # identity digest, as in the EngineCard; empty: peers' models are not compared
    rank: int = 0  # the rank that this process is
    tp: int = 1  # ranks of the engine
    kv_checksum: ChecksumMode = "on"  # the hand-offs that have digests
    kv_shards: int = 1  # number of parts that stored KV heads are cut into: a multiple of every engine's tp
    device: str = "cpu"  # where the KV pool will be: torch's type of device
    clock: Clock = MONOTONIC  # for all its deadlines; another clock cannot be encoded
    block_table: BlockTable | None = None  # written by the pool unless Built names another; None: by nothing
    reserves_pool: bool = True  # whether the memory of a pool of its own is taken at start; False: as it is used


class Tiers(ABC):
    """A scheduler side's interface to tiers below the engine's cache. No method blocks."""

    @abstractmethod
    def take_events(self) -> Sequence[TierEvents]:
        """What entered and left the tiers since the last call, for the routers' choice of engines.

        Called after every step, and before the first: it then lists the tiers, without keys. Only keys that any request
        may find by content are reported, each at most once per call.
        """

    @abstractmethod
    def order(self, order: CacheOrder) -> int:
        """Take an operator's order, to be carried out by the workers of the next step.

        Returns:
            The number of answers to this order that `take_answers` will return: one for each part of the connector with
            tiers.
        """

    @abstractmethod
    def take_answers(self) -> Sequence[CacheAnswer]:
        """Answers that have come since the last call; `notify` announces them. Tiers are named as in the stats."""

    @property
    @abstractmethod
    def problem(self) -> str:
        """Why the medium of KV cannot be used now; empty: no problem is known. For /topology.

        `notify` announces a change.
        """


class SchedulerConnector(ABC):
    """The side in the scheduler's process. Idempotent, without tensors; no method blocks."""

    observes: Observed = Observed()
    """Which of `scheduled`, `confirmed` and `waiting_keys` the view has. Constant: the engine reads it once."""

    tiers: Tiers | None = None
    """Set for a store, or a connector with one among its parts. Constant, too."""

    def get_num_new_matched_tokens(self, request: RequestView, num_computed_tokens: int) -> MatchedTokens:
        """The number of tokens beyond the local hit that can be loaded from outside. Mutates nothing; may be called
        often.
        """
        return NO_MATCH

    def update_state_after_alloc(
        self, request: RequestView, block_tables: BlockTables, num_external_tokens: int
    ) -> bytes | None:
        """Blocks are allocated for the request's whole wanted range; the load may begin with the next metadata.

        Args:
            block_tables: the request's block tables, local hits first. A group with a window has only the blocks that
                the token after the loaded ones attends to.
            num_external_tokens: tokens to load, from request.num_local_hit on; 0: nothing is loaded.

        Returns:
            The ticket to be forwarded to the peer, for a connector whose peer writes (push).
        """
        return None

    @abstractmethod
    def build_connector_meta(self, view: SchedulerView) -> KVConnectorMetadata:
        """This step's orders for the workers. Called once per step, including empty steps."""

    def request_finished(self, request: RequestView, block_tables: BlockTables) -> FinishDecision:
        """Note that a request has ended; for kv="handoff" the answer says where its KV can be read."""
        return FinishDecision(hold_blocks=False)

    def name_confirmed(self, request: RequestView, block_tables: BlockTables, num_tokens: int) -> bytes | None:
        """The payload of a hand-off of `num_tokens` tokens, which are the first of these blocks, whole ones, while the
        rest of a prompt is computed. None: nothing is read before the end.

        A reader whose connector answers so gets one hand-off after the other, all but the last one with `more`: each
        comes with another `update_state_after_alloc` for the same load, and with the payloads so far, joined.
        """
        return None

    def resolve_results(self, results: TransferResults) -> TransferResults:
        """The results that the engine should act on, given the reports of all ranks. Called with the results of every
        step, including empty ones.
        """
        return results

    def update_connector_output(self, results: TransferResults) -> None:
        """Take the results of all ranks, resolved, before the engine acts on them."""

    def update_peers(self, cards: Sequence[EngineCard]) -> None:
        """Set the engines now known, without this one."""

    def get_stats(self) -> Stats:
        """Counts of this side, without those of its workers. For /metrics; called a few times a second."""
        return {}

    def must_hear_end(self, key: TransferKey) -> bool:
        """Whether an extra step must run just to report that a request or a hand-off has ended."""
        return True

    @property
    def has_pending_work(self) -> bool:
        """Whether empty steps must run, because progress is due that no result will announce."""
        return False

    def shutdown(self) -> None:
        """Release everything. Idempotent."""


class WorkerConnector(ABC):
    """The side next to one rank's KV cache.

    Calls of one step, in order: start_load_kv, per layer wait_for_layer_load and save_kv_layer, wait_for_save,
    get_finished, which is also called between two steps. No call posts a transfer or waits for the transport on the
    step thread. Code that reads KV computed here, to save or to send it, first waits for `meta.earlier_steps` or
    `meta.this_step` on its own stream.
    """

    metadata_type: ClassVar[type[KVConnectorMetadata]] = KVConnectorMetadata
    """The type of the scheduler side's orders, as which the other ranks decode them."""

    def register_kv_caches(self, kv_cache: "torch.Tensor") -> None:
        """Take the rank's KV pool, `layout.pool_shape(num_blocks)`, for good."""

    def handshake(self) -> bytes:
        """This rank's part of the EngineCard: what a peer needs to reach its KV."""
        return b""

    @abstractmethod
    def start_load_kv(self, meta: KVConnectorMetadata) -> None:
        """Begin this step's loads. Called before any block of the step is written."""

    def wait_for_layer_load(self, layer: int) -> None:
        """Return when layerwise loads of `layer` have arrived or failed; limited by the connector's deadline."""

    def save_kv_layer(self, layer: int, kv_cache: "torch.Tensor", meta: KVConnectorMetadata) -> None:
        """Note that `layer` of the step's tokens is in its blocks; kv_cache is the whole pool."""

    def wait_for_save(self) -> None:
        """Return when every block of the step is copied out or held. Never waits for the transport."""

    @abstractmethod
    def get_finished(self) -> TransferResults:
        """Transfers that ended since the last call."""

    def get_stats(self) -> Stats:
        """Counts of this rank's side. Called in steps in which transfers ended, after get_finished."""
        return {}

    def cancel(self, key: TransferKey, direction: Direction) -> None:
        """Stop receiving or sending a transfer; answered by failed_receiving or failed_sending."""

    def update_peers(self, added: Sequence[EngineCard], removed: Sequence[EngineCard]) -> None:
        """Between steps: connect lazily to `added`, tear down everything of `removed` incarnations."""

    def shutdown(self) -> None:
        """Stop threads and release everything. Idempotent."""


def _nothing() -> None:
    """The default `close` of a connector that owns nothing."""


class Built(NamedTuple):
    """A connector in one process of an engine. Each side, and the pool, is made at most once, where it is needed.

    Rank 0 makes both sides, the other ranks make their worker side. Shared objects are made before.
    """

    scheduler: Callable[[], SchedulerConnector]
    worker: Callable[[], WorkerConnector]  # of the rank that the configuration names
    block_table: BlockTable | None = None  # the table that the engine's block pool must write, for peers to read
    kv_cache: "Callable[[], torch.Tensor | None]" = _nothing
    """The KV pool of a transport that shares its memory with peers; None: the engine allocates its own."""
    shutdown: Callable[[], None] = _nothing
    """Called after both sides: release what they shared. Idempotent."""


class KVConnector(ABC):
    """The plug point: the target of a registry name or an entry point. It is never instantiated."""

    declares: ClassVar[ConnectorPlan]  # the part of its plan that holds with any options
    options_type: ClassVar[type[Options]] = Options  # the keys of --connector-config: its fields

    @classmethod
    def plan(cls, options: Mapping[str, str]) -> ConnectorPlan:
        """The plan with these options. Raises ConfigError for an unknown name or an invalid value."""
        cls.options_type.parse(options)
        return cls.declares

    @classmethod
    @abstractmethod
    def build(cls, config: ConnectorConfig, notify: Callable[[], None]) -> Built:
        """Build the connector of a process. Raises ConfigError if that is not possible, and then leaves nothing behind.

        `notify` is thread-safe and wakes the engine's loop, which then calls get_finished and asks again about requests
        whose match was not known; a step is made only if a request may go on.
        """
