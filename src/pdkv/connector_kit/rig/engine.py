"""An engine without a model: the kit drives a connector as the real engine does, in the same order.

Freed blocks are overwritten at once by "another request", as under load: a late reader gets garbage, and their
generations have changed.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, ClassVar, Concatenate, ParamSpec, TypeVar

from pdkv.base.block_keys import HASH_BLOCK_SIZE
from pdkv.base.clock import MONOTONIC
from pdkv.connector_kit.rig import protocol as p
from pdkv.connector_kit.rig.block_counts import Books
from pdkv.connector_kit.rig.host import Host
from pdkv.connector_kit.rig.news import News
from pdkv.connector_kit.rig.processes import HostProcess
from pdkv.connector_kit.rig.rank import HostedRank
from pdkv.connector_kit.rig.request import Request
from pdkv.connectors.base import (
    BlockHold,
    Cancel,
    ConfirmedRange,
    ConnectorConfig,
    Direction,
    ScheduledRange,
    TransferKey,
    TransferOutcome,
)
from pdkv.connectors.plan import ConnectorPlan
from pdkv.connectors.transfer.aggregator import TransferAggregator
from pdkv.connectors.transfer.planning import first_seen_block
from pdkv.wire.kv import ChecksumMode, EngineCard, KVHandoff, KVLayout

P = ParamSpec("P")
Result = TypeVar("Result")


@dataclass(frozen=True)
class StepPlan:
    """A step that is planned and not executed yet."""

    step_id: int
    meta: bytes | None
    cancels: list[Cancel]
    writes: list[p.TokenRange]
    garbage: list[int]


class Engine:
    """An engine of one incarnation; `hosts` has one process per rank."""

    rank: ClassVar[type[HostedRank]] = HostedRank  # the class of its ranks

    def __init__(
        self,
        name: str,
        epoch: str,
        hosts: Sequence[HostProcess],
        *,
        plan: ConnectorPlan,
        layout: KVLayout,
        num_blocks: int,
        kv_shards: int,
        timeout_s: float,
        kv_checksum: ChecksumMode = "on",
    ) -> None:
        """Build all ranks. Raises ConfigError if the connector refuses the shape."""
        self.name = name
        self.epoch = epoch
        self.hosts = hosts
        self.layout = layout
        self.block_size = layout.block_size
        self.books = Books(num_blocks, seed=len(epoch))
        self.num_reuses: Counter[int] = Counter()  # of each block: what its generation counts
        self.received: dict[TransferKey, TransferOutcome] = {}
        self.sent: dict[TransferKey, TransferOutcome] = {}
        self.wrong: dict[TransferKey, str] = {}  # finished loads with wrong content
        self.leases: dict[TransferKey, list[int]] = {}
        self._until_release: set[TransferKey] = set()  # leases that do not end with a sending
        self.loading: dict[TransferKey, Sequence[int]] = {}  # blocks that a load may write
        self.quarantine: dict[TransferKey, Sequence[int]] = {}
        self.on_sent: list[Callable[[TransferKey, bool], None]] = []  # KVReady leaves
        self._holds: dict[TransferKey, BlockHold] = {}
        self._news = News()
        self._aggregator = TransferAggregator(len(hosts))
        self._peers: list[EngineCard] = []
        self._next_step_id = 0
        self._last_step = 0.0
        self.timeout_s = timeout_s
        built = []
        for rank, host in enumerate(hosts):
            config = ConnectorConfig(
                engine=name, epoch=epoch, layout=layout, num_blocks=num_blocks, plan=plan, model="conformance",
                rank=rank, tp=len(hosts), kv_shards=kv_shards, kv_checksum=kv_checksum,
            )  # fmt: skip
            built.append(
                host.ask("", Host.build, timeout_s, name, f"{self.rank.__module__}:{self.rank.__name__}", config)
            )
        self.built = built[0]
        self.card = EngineCard(
            engine=name, epoch=epoch, role="any", pid=hosts[0].pid, connector=plan.name, kind=plan.kind,
            content_addressed=plan.content_addressed, orders=list(plan.orders), model="conformance",
            layout=layout, hash_block_size=HASH_BLOCK_SIZE, num_blocks=num_blocks, max_model_len=1 << 20,
            max_num_seqs=256, tp=len(hosts), rank_blobs=[rank.blob for rank in built],
            kv_checksum=kv_checksum,
        )  # fmt: skip

    # --- where it stands ------------------------------------------------------------------------------------------

    @property
    def is_live(self) -> bool:
        """Whether it can run a step: no rank is stopped or dead."""
        return not any(host.stopped or host.dead for host in self.hosts)

    @property
    def is_idle(self) -> bool:
        """Whether no load, hold, lease or quarantine is left, and nothing is to be told."""
        return not (self.loading or self.quarantine or self._holds or self.leases or self._news)

    def is_read(self, key: TransferKey) -> bool:
        """Whether a transfer reads the request's blocks, so that it must not be preempted."""
        return any(hold.owner == key for hold in self._holds.values())

    def describe_rest(self) -> str:
        """What is not at rest, in words; empty if everything is."""
        return (
            f"engine {self.name}: loading {list(self.loading)}, quarantined {list(self.quarantine)}, "
            f"I/O holds {list(self._holds)}, leases {list(self.leases)}, {self.books.num_held} blocks held"
        )

    def ask(self, method: Callable[Concatenate[Any, P], Result], *args: P.args, **kwargs: P.kwargs) -> Result:
        """Call a method of rank 0, and return its answer."""
        return self.hosts[0].ask(self.name, method, self.timeout_s, *args, **kwargs)

    def ask_all(self, method: Callable[Concatenate[Any, P], Result], *args: P.args, **kwargs: P.kwargs) -> list[Result]:
        """Call a method of all ranks at once, and return their answers."""
        for host in self.hosts:
            host.send(self.name, method, *args, **kwargs)
        return [host.receive(method, self.timeout_s) for host in self.hosts]

    def close(self) -> None:
        """Shut the connector down on all ranks."""
        for host in self.hosts:
            host.send("", Host.close, self.name)
        for host in self.hosts:
            host.receive(Host.close, self.timeout_s)

    # --- steps ----------------------------------------------------------------------------------------------------

    def step_if_needed(self, poll_s: float) -> None:
        """Run an empty step if the engine's loop would; while something is open, every `poll_s`."""
        woken = [host.take_woken(self.name) for host in self.hosts]
        due = MONOTONIC.now() >= self._last_step + poll_s and not self.is_idle
        if any(woken) or due or self._news or self.ask(HostedRank.is_pending):
            self.step()

    def step(self, *scheduled: tuple[Request, int, int]) -> None:
        """Schedule (request, start, stop), execute, update."""
        self.execute(self.plan(*scheduled))

    def plan(self, *scheduled: tuple[Request, int, int]) -> StepPlan:
        """Build the view and the metadata; holds are taken before finished requests release their blocks."""
        step_id, self._next_step_id = self._next_step_id, self._next_step_id + 1
        garbage = self.books.take_dirty()
        if garbage:
            self.reuse(garbage)
        news, self._news = self._news, News()
        observed = self.built.observes_scheduled
        ranges = [ScheduledRange(r.view(), a, b, _copy(r.block_tables)) for r, a, b in scheduled if observed]
        planned = self.ask(HostedRank.plan, news.view(step_id, ranges), len(self.hosts) > 1)
        for key, block_ids, owner in planned.holds:
            assert key not in self._holds, f"the hold {key} is taken twice"
            self.books.hold(block_ids)
            self._holds[key] = BlockHold(key, block_ids, owner)
        for kept in news.kept:
            self.books.release(kept)
        writes = [p.TokenRange(r.content, a, b, _copy(r.block_tables)) for r, a, b in scheduled]
        return StepPlan(step_id, planned.meta, news.cancels, writes, garbage)

    def execute(self, plan: StepPlan) -> None:
        """Run a planned step on all ranks, and act on its results."""
        self.run_part(plan)

    def run_part(
        self, plan: StepPlan, *, begin: bool = True, layers: tuple[int, int] | None = None, end: bool = True
    ) -> None:
        """Run a part of a step, so that something else can happen in the middle of a forward pass."""
        self.send_part(plan, begin=begin, layers=layers, end=end)
        self.take_executed(settle=end)

    def send_part(
        self, plan: StepPlan, *, begin: bool = True, layers: tuple[int, int] | None = None, end: bool = True
    ) -> None:
        """Give a part of a step to all ranks; `take_executed` must follow."""
        self._last_step = MONOTONIC.now()
        for rank, host in enumerate(self.hosts):
            step = p.StepPart(
                step_id=plan.step_id, meta=plan.meta if rank and begin else None, cancels=plan.cancels,
                writes=plan.writes, garbage=plan.garbage, begin=begin, layers=layers, end=end,
            )  # fmt: skip
            host.send(self.name, HostedRank.execute, step)

    def take_executed(self, *, settle: bool = True) -> list[p.Executed]:
        """Take the answers of all ranks, on which the engine acts."""
        executed = [host.receive(HostedRank.execute, self.timeout_s) for host in self.hosts]
        for rank in executed:
            self.wrong.update(rank.wrong)
        if settle:
            self.settle(executed)
        return executed

    def settle(self, executed: Sequence[p.Executed]) -> None:
        """Pass the results to the connector; release holds, quarantines and leases that ended."""
        merged = self._aggregator.add([rank.results for rank in executed])
        results = self.ask(HostedRank.settle, p.as_dicts(merged))
        for key, outcome in (*results.finished_sending.items(), *results.failed_sending.items()):
            self.sent[key] = outcome
            hold = self._holds.pop(key, None)
            if hold is not None:
                self.books.release(hold.block_ids)
            self._sending_ended(key, not outcome.code)
        for key, outcome in (*results.finished_receiving.items(), *results.failed_receiving.items()):
            assert key not in self.received, f"the load {key} has ended twice"
            self.received[key] = outcome
            self.loading.pop(key, None)
            self.books.release(self.quarantine.pop(key, ()))

    # --- a prompt that is handed off ------------------------------------------------------------------------------

    def confirm(self, request: Request, *, last: bool = False, again: bool = False) -> None:
        """Note that tokens up to num_confirmed are final in their blocks."""
        blocks = request.take_full_blocks()
        if blocks:
            self.ask(HostedRank.publish, blocks)
        self._give_up_unseen(request)
        if self.built.observes_confirmed:
            start = 0 if again else request.num_reported
            request.num_reported = request.num_confirmed
            tables = _copy(request.block_tables)
            range_ = ConfirmedRange(request.view(), start, request.num_confirmed, tables, last)
            self._news.confirmed.append(range_)

    def _give_up_unseen(self, request: Request) -> None:
        """Free and overwrite blocks before the window of the token after the confirmed ones."""
        for window, table in zip(self.layout.windows, request.block_tables, strict=True):
            seen = range(min(first_seen_block(window, request.num_confirmed, self.block_size), len(table)))
            self.books.release([table[i] for i in seen if table[i] >= 0])
            table[: len(seen)] = [-1] * len(seen)

    def hand_off(self, request: Request) -> KVHandoff:
        """End the confirmed prompt here: its blocks pass to a lease."""
        self.confirm(request, last=True)
        self._news.finished.append(request.transfer_key)
        if self.built.observes_confirmed:
            self.books.hold(request.block_ids)
            self._news.kept.append(request.block_ids)
        ended = self.ask(HostedRank.finish_request, request.view(), _copy(request.block_tables))
        leased = request.block_ids if ended.hold_blocks else []
        self.books.hold(leased)
        self.leases[request.transfer_key] = leased
        if ended.until_release:
            self._until_release.add(request.transfer_key)
        self.free(request)
        known = self.sent.get(request.transfer_key)
        if known is not None:
            self._sending_ended(request.transfer_key, not known.code)
        return KVHandoff(
            request_id=request.request_id, attempt=request.attempt, transfer_id=request.transfer_id, engine=self.name,
            epoch=self.epoch, num_tokens=request.num_confirmed, payload=ended.payload or b"",
        )  # fmt: skip

    def late_ticket(self, request: Request, block_tables: Sequence[Sequence[int]]) -> None:
        """A ticket that came after the hand-off: the leased blocks are shown once more."""
        range_ = ConfirmedRange(request.view(), 0, request.num_confirmed, _copy(block_tables), True)
        self._news.confirmed.append(range_)

    def release(self, key: TransferKey) -> None:
        """Handle a Release: the lease ends, and reads of it are cancelled."""
        if key in self.leases:
            self.books.release(self.leases.pop(key))
            self.tell_aborted(key)

    def abort(self, request: Request) -> None:
        """Give the request up, at any stage."""
        self.end_load(request)
        self.tell_aborted(request.transfer_key)
        self.free(request)

    def preempt(self, request: Request) -> None:
        """Take the request's blocks; it will come again."""
        self._news.retract(request.transfer_key)
        self._news.preempted.append(request.transfer_key)
        self.free(request)

    def tell_aborted(self, key: TransferKey) -> None:
        """Report the abort in the next view; a transfer from here is cancelled."""
        self._news.retract(key)
        self._news.aborted.append(key)
        if self.is_read(key):
            self.cancel(key, "send")

    def free(self, request: Request) -> None:
        """Free the request's blocks."""
        self.books.release(request.block_ids)
        request.lose_blocks()

    def _sending_ended(self, key: TransferKey, ok: bool) -> None:
        lease = self.leases.get(key)
        if lease is None:
            return
        is_over = key not in self._until_release and bool(lease or not ok)
        if is_over:
            self.books.release(self.leases.pop(key))
        for listener in self.on_sent:
            listener(key, ok)
        if is_over and not ok:
            self.tell_aborted(key)

    def reuse(self, block_ids: Sequence[int]) -> None:
        """Make the content of these blocks void from now on."""
        self.num_reuses.update(block_ids)
        self.ask(HostedRank.reuse, list(block_ids))

    def mimic(self, other: "Engine", block_ids: Sequence[int]) -> None:
        """Take the blocks that another incarnation has used, and reuse each as often as that one did."""
        self.books.take(block_ids)
        for block in block_ids:
            self.reuse([block] * (other.num_reuses[block] - self.num_reuses[block]))

    # --- a load ---------------------------------------------------------------------------------------------------

    def allocate(self, request: Request, num_tokens: int, *, hit: Sequence[int] = (), resume_at: int = 0) -> None:
        """Allocate blocks for the first tokens of a request, starting with `hit`.

        Args:
            resume_at: the first token that is computed here; in a group with a window, only the blocks that it attends
                to are allocated.
        """
        assert not (hit and self.layout.groups), "the kit supports local hits without KV groups only"
        stop = -(-num_tokens // self.block_size)
        firsts = [first_seen_block(window, resume_at, self.block_size) for window in self.layout.windows]
        new = self.books.allocate(sum(stop - first for first in firsts) - len(hit))
        if new:
            self.reuse(new)
        self.books.hold(hit)
        own = iter([*hit, *new])
        request.block_tables = [[-1] * first + list(islice(own, stop - first)) for first in firsts]
        request.num_local_hit = len(hit) * self.block_size

    def start_load(self, request: Request, num_external: int, *, check: bool = True) -> bytes | None:
        """Begin the load with the next step; returns the ticket."""
        start = request.num_local_hit
        key = request.transfer_key
        exposed = request.blocks_from(start // self.block_size)
        tables = _copy(request.block_tables)
        if num_external:
            wanted = p.TokenRange(list(request.text), start, start + num_external, tables)
            self.ask_all(HostedRank.expect, key, exposed, wanted if check else None)
            self.loading[key] = exposed
            self.received.pop(key, None)
        return self.ask(HostedRank.allocate, request.view(), tables, num_external)

    def step_with_load(self, request: Request, num_tokens: int, *, is_layerwise: bool) -> bool:
        """Run the step that begins a load. A layerwise load is given up unless its end is reported in that step;
        returns False then.
        """
        if not is_layerwise:
            self.step()
            return True
        self.step((request, num_tokens, num_tokens + 1))  # the next token is computed with it
        if request.transfer_key in self.received:
            return True
        self.end_load(request)
        return False

    def end_load(self, request: Request) -> None:
        """Give a load up: blocks that may still be written are quarantined until its end is reported."""
        key = request.transfer_key
        exposed = self.loading.pop(key, None)
        if exposed is not None:
            self.books.hold(exposed)
            self.quarantine[key] = exposed
            self.cancel(key, "receive")

    def cancel(self, key: TransferKey, direction: Direction) -> None:
        """Tell the workers to cancel, even keys of which the engine has no load."""
        self._news.cancel(Cancel(key, direction))

    # --- peers ----------------------------------------------------------------------------------------------------

    def update_peers(self, cards: Sequence[EngineCard]) -> list[str]:
        """Send a peer change to all ranks; returns the refusals that were logged. Raises IncompatiblePeers if a rank
        raises it.
        """
        others = [card for card in cards if card.engine != self.name]
        added = [card for card in others if card not in self._peers]
        removed = [card for card in self._peers if card not in others]
        self._peers = others
        refusals = self.ask_all(HostedRank.update_peers, others, added, removed)
        return [message for rank in refusals for message in rank]

    def share_written(self, request: Request) -> float:
        """The share of a request's load that has arrived, 0 to 1."""
        return self.ask(HostedRank.written, request.block_ids)

    def wait_written(self, request: Request, timeout_s: float) -> None:
        """Wait until a part of a request's load has arrived, with no step in between, or the time is over."""
        deadline = MONOTONIC.now() + timeout_s
        while not self.share_written(request) and MONOTONIC.now() < deadline:
            pass

    def foreign_writes(self) -> list[int]:
        """Blocks of any rank that were written from outside although no load owned them."""
        return sorted({block for rank in self.ask_all(HostedRank.foreign_writes) for block in rank})


def _copy(block_tables: Sequence[Sequence[int]]) -> list[list[int]]:
    return [list(table) for table in block_tables]
