"""An engine without a model: the kit drives a connector with an engine's own bookkeeping, in its order.

Freed blocks are overwritten at once by "another request", as under load: a late reader gets garbage, and their
generations have changed.
"""

import random
from collections import Counter
from collections.abc import Callable, Sequence
from math import inf
from typing import Any, ClassVar, Concatenate, ParamSpec, TypeVar, cast

import msgspec

from pdkv.base.block_keys import HASH_BLOCK_SIZE
from pdkv.base.clock import MONOTONIC
from pdkv.connector_kit.rig import protocol as p
from pdkv.connector_kit.rig.host import Host
from pdkv.connector_kit.rig.processes import HostProcess
from pdkv.connector_kit.rig.rank import HostedRank
from pdkv.connector_kit.rig.request import ROUTER, TextRequest
from pdkv.connectors.base import (
    Cancel,
    ConnectorConfig,
    Direction,
    KVConnectorMetadata,
    Observed,
    SchedulerConnector,
    SchedulerView,
    Shown,
    TransferKey,
    TransferOutcome,
    TransferResults,
)
from pdkv.connectors.block_table import BlockTable
from pdkv.connectors.plan import ConnectorPlan
from pdkv.connectors.transfer.aggregator import TransferAggregator
from pdkv.engine.kv.block_pool import BlockPool, Holder
from pdkv.engine.kv.kv_cache_manager import KVCacheManager, PrefixHit
from pdkv.engine.outside.external import ExternalKV, KVLoad
from pdkv.engine.outside.swap import SwapRule
from pdkv.prefill.leases import LeaseTable
from pdkv.prefill.role import PrefillRole
from pdkv.wire.kv import ChecksumMode, EngineCard, KVHandoff, KVLayout
from pdkv.wire.messages import EngineToRouter, HandedOff, KVReady, KVTicket, Release
from pdkv.wire.types import RequestKey

F = TypeVar("F", bound=Callable[..., Any])
P = ParamSpec("P")
Result = TypeVar("Result")


class RemoteTable(BlockTable):
    """The block table in rank 0's process. What is written here gets there before that process is asked anything."""

    def __init__(self) -> None:
        self.unsent: list[p.TableEntry] = []
        self.num_reuses: Counter[int] = Counter()  # of each block: what its generation counts
        self.used: set[int] = set()  # not overwritten by the kit since

    def generation(self, block_id: int) -> int:
        return self.num_reuses[block_id]

    def reuse(self, block_id: int) -> None:
        self.num_reuses[block_id] += 1
        self.used.add(block_id)
        self.unsent.append(p.TableEntry(block_id, None))

    def publish(self, block_id: int, keys: list[bytes]) -> None:
        self.unsent.append(p.TableEntry(block_id, keys))


class ScatteredPool(BlockPool):
    """Allocates free blocks in random order, so that no block table is contiguous."""

    def __init__(self, layout: KVLayout, num_blocks: int, table: BlockTable, seed: int) -> None:
        super().__init__(num_blocks, table, keys_per_block=layout.block_size // HASH_BLOCK_SIZE)
        self._random = random.Random(seed)

    def choose(self, num_blocks: int) -> list[int]:
        """Free blocks to allocate, of which there are enough."""
        free = [block for block in range(self.num_blocks) if not self.is_held(block)]
        return self._random.sample(free, num_blocks)

    def allocate(self, num_blocks: int) -> list[int] | None:
        if num_blocks > self.num_available:
            return None
        chosen = self.choose(num_blocks)
        self.drop_cached(chosen)
        self.hold(chosen, Holder.ACTIVE)
        self.table.reuse_all(chosen)
        return chosen


class RemoteMetadata(KVConnectorMetadata):
    """Orders whose rest is in rank 0's process; `encoded` for the other ranks."""

    encoded: bytes | None = None


def _remote(method: F) -> F:
    """A method of the scheduler side that is called in rank 0's process."""

    def call(side: "RemoteScheduler", *arguments: Any) -> Any:
        return side.engine.ask(method, *arguments)

    return cast(F, call)


class RemoteScheduler(SchedulerConnector):
    """The scheduler side in rank 0's process. `sent` and `received`: the transfers that ended."""

    def __init__(self, engine: "Engine", observes: p.Observes) -> None:
        self.observes = Observed(Shown(observes[0]), Shown(observes[1]), *observes[2:])
        self.engine = engine
        self.sent: dict[TransferKey, TransferOutcome] = {}
        self.received: dict[TransferKey, TransferOutcome] = {}

    get_num_new_matched_tokens = _remote(SchedulerConnector.get_num_new_matched_tokens)
    update_state_after_alloc = _remote(SchedulerConnector.update_state_after_alloc)
    request_finished = _remote(SchedulerConnector.request_finished)
    resolve_results = _remote(SchedulerConnector.resolve_results)

    @property
    def has_pending_work(self) -> bool:
        return self.engine.ask(HostedRank.is_pending)

    def build_connector_meta(self, view: SchedulerView) -> RemoteMetadata:
        planned = self.engine.ask(HostedRank.plan, view, len(self.engine.hosts) > 1)
        return RemoteMetadata(step_id=view.step_id, holds=planned.holds, encoded=planned.meta)

    def update_connector_output(self, results: TransferResults) -> None:
        self.engine.ask(SchedulerConnector.update_connector_output, results)
        for sent in (results.finished_sending, results.failed_sending):
            self.sent.update(sent)
        for received in (results.finished_receiving, results.failed_receiving):
            twice = self.received.keys() & received.keys()
            assert not twice, f"the loads {twice} have ended twice"
            self.received.update(received)


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
        self.table = RemoteTable()
        self.wrong: dict[TransferKey, str] = {}  # finished loads with wrong content
        self.on_ready: dict[RequestKey, Callable[[bool], None]] = {}  # for the KVReady of a request
        self._handoff: KVHandoff | None = None  # the last one
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
        self.scheduler = RemoteScheduler(self, self.built.observes)
        self.sent, self.received = self.scheduler.sent, self.scheduler.received
        self.use(ScatteredPool(layout, num_blocks, self.table, len(epoch)))

    def use(self, pool: BlockPool) -> None:
        """Keep the books of all blocks in this pool, all of which are free."""
        layout = self.layout
        self.pool = pool
        self.kv = KVCacheManager(
            pool, block_size=layout.block_size, hash_block_size=HASH_BLOCK_SIZE, windows=layout.windows
        )
        self.external = ExternalKV(
            self.scheduler, pool, SwapRule("recompute", float, 1), block_size=layout.block_size,
            num_groups=layout.num_groups,
        )  # fmt: skip
        self.prefill = PrefillRole(
            engine=self.name, epoch=self.epoch, leases=LeaseTable(pool), external=self.external, send=self._heard,
            max_leased_blocks=pool.num_blocks, lease_timeout_s=inf, num_promised_blocks=lambda: 0,
        )  # fmt: skip

    # --- where it stands ------------------------------------------------------------------------------------------

    @property
    def is_live(self) -> bool:
        """Whether it can run a step: no rank is stopped or dead."""
        return not any(host.stopped or host.dead for host in self.hosts)

    @property
    def is_idle(self) -> bool:
        """Whether no load, hold, lease or quarantine is left."""
        return self.external.is_idle and not self.prefill.leases

    @property
    def num_held(self) -> int:
        """Blocks with at least one holder."""
        return self.pool.num_blocks - self.pool.num_available

    @property
    def has_quarantine(self) -> bool:
        """Whether a load that was given up may still write its blocks."""
        return self.pool.counts().quarantined > 0

    def describe_rest(self) -> str:
        """What is not at rest, in words; empty if everything is."""
        return f"engine {self.name}: loading {list(self.external.loads)}, blocks: {self.pool.counts()}"

    def ask(self, method: Callable[Concatenate[Any, P], Result], *args: P.args, **kwargs: P.kwargs) -> Result:
        """Call a method of rank 0, and return its answer."""
        self._send_table()
        return self.hosts[0].ask(self.name, method, self.timeout_s, *args, **kwargs)

    def ask_all(self, method: Callable[Concatenate[Any, P], Result], *args: P.args, **kwargs: P.kwargs) -> list[Result]:
        """Call a method of all ranks at once, and return their answers."""
        self._send_table()
        for host in self.hosts:
            host.send(self.name, method, *args, **kwargs)
        return [host.receive(method, self.timeout_s) for host in self.hosts]

    def _send_table(self) -> None:
        if unsent := self.table.unsent:
            self.table.unsent = []
            self.hosts[0].ask(self.name, HostedRank.write_table, self.timeout_s, unsent)

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
        if any(woken) or due or self.external.has_news:
            self.step()

    def step(self, *scheduled: tuple[TextRequest, int, int]) -> None:
        """Schedule (request, start, stop), execute, update."""
        self.execute(self.plan(*scheduled))

    def plan(self, *scheduled: tuple[TextRequest, int, int]) -> p.StepPart:
        """Build the view and the metadata; holds are taken before finished requests release their blocks."""
        step_id, self._next_step_id = self._next_step_id, self._next_step_id + 1
        garbage = self.overwrite()
        for request, start, _ in scheduled:
            request.num_computed = start
        ranges = self.external.show_scheduled(step_id, [(request, stop - start) for request, start, stop in scheduled])
        meta, cancels, _ = self.external.build_meta(step_id, ranges, ())
        assert isinstance(meta, RemoteMetadata)
        writes = [p.TokenRange(r.content, start, stop, _copy(r.block_tables)) for r, start, stop in scheduled]
        self.kv.end_step(step_id)
        return p.StepPart(step_id=step_id, meta=meta.encoded, cancels=cancels, writes=writes, garbage=garbage)

    def overwrite(self) -> list[int]:
        """Free blocks that were in use, whose content is void from now on: another request writes them."""
        self.pool.drop_cached()
        free = sorted(block for block in self.table.used if not self.pool.is_held(block))
        self.table.reuse_all(free)
        self.table.used.difference_update(free)
        return free

    def execute(
        self, plan: p.StepPart, *, begin: bool = True, layers: tuple[int, int] | None = None, end: bool = True
    ) -> None:
        """Run a planned step, or a part of it, on all ranks, and act on its results."""
        self.send_part(plan, begin=begin, layers=layers, end=end)
        self.take_executed(settle=end)

    def send_part(
        self, plan: p.StepPart, *, begin: bool = True, layers: tuple[int, int] | None = None, end: bool = True
    ) -> None:
        """Give a part of a step to all ranks; `take_executed` must follow."""
        self._send_table()
        self._last_step = MONOTONIC.now()
        part = msgspec.structs.replace(plan, begin=begin, layers=layers, end=end)
        for rank, host in enumerate(self.hosts):
            host.send(self.name, HostedRank.execute, part if rank else msgspec.structs.replace(part, meta=None))

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
        settled = self.external.settle(self._aggregator.add([rank.results for rank in executed]))
        for send in settled.sends:
            self.prefill.sending_ended(*send)
        for ended in settled.loads:
            self.external.end_load(ended.load.request.transfer_key, transfer_ended=True)

    # --- a prompt that is handed off ------------------------------------------------------------------------------

    def confirm(self, request: TextRequest, *, last: bool = False, again: bool = False) -> None:
        """Note that tokens up to num_confirmed are final in their blocks."""
        self.kv.commit(request)
        self.external.report_confirmed(request, last=last, again=again)

    def hand_off(self, request: TextRequest) -> KVHandoff:
        """End the confirmed prompt here: its blocks pass to a lease."""
        self.confirm(request, last=True)
        self.prefill.handed_off(request, self.external.finished(request), MONOTONIC.now())
        self.kv.free(request)
        assert self._handoff is not None
        return self._handoff

    def late_ticket(self, request: TextRequest, ticket: bytes) -> None:
        """A ticket that came after the hand-off: the leased blocks are shown once more."""
        self.prefill.handle(ROUTER, KVTicket(*request.key, ticket))

    def release(self, key: TransferKey) -> None:
        """Handle a Release: the lease ends, and reads of it are cancelled."""
        self.prefill.handle(ROUTER, Release(key.transfer_id, key.attempt))

    def abort(self, request: TextRequest) -> None:
        """Give the request up, at any stage."""
        self.end_load(request)
        self.tell_aborted(request.transfer_key)
        self.kv.free(request)

    def preempt(self, request: TextRequest) -> None:
        """Take the request's blocks; it will come again."""
        self.external.preempted(request)
        self.kv.free(request)
        request.restart()

    def tell_aborted(self, key: TransferKey) -> None:
        """Report the abort in the next view; a transfer from here is cancelled."""
        self.external.aborted(key, cancel_sending=True)

    def mimic(self, other: "Engine", block_ids: Sequence[int]) -> None:
        """Take the blocks that another incarnation has used, and reuse each as often as that one did."""
        self.pool.hold(block_ids, Holder.ACTIVE)
        for block in block_ids:
            self.table.reuse_all([block] * (other.table.num_reuses[block] - self.table.num_reuses[block]))

    def _heard(self, _: str, message: EngineToRouter) -> None:
        if isinstance(message, HandedOff):
            self._handoff = message.handoff
        elif isinstance(message, KVReady) and (tell := self.on_ready.get((message.request_id, message.attempt))):
            tell(message.ok)

    # --- a load ---------------------------------------------------------------------------------------------------

    def allocate(self, request: TextRequest, num_tokens: int, *, hit: Sequence[int] = (), resume_at: int = 0) -> None:
        """Allocate blocks for the first tokens of a request, starting with `hit`.

        Args:
            resume_at: the first token that is computed here; in a group with a window, only the blocks that it attends
                to are allocated.
        """
        assert not (hit and self.layout.groups), "the kit supports local hits without KV groups only"
        tables = [list(hit) for _ in self.layout.windows]
        has_room = self.kv.admit(request, PrefixHit(len(hit) * self.block_size, tables), num_tokens, resume_at)
        assert has_room, f"the kit's pool has no blocks for {num_tokens} tokens"

    def start_load(
        self, request: TextRequest, num_external: int, *, is_layerwise: bool = False, check: bool = True
    ) -> bytes | None:
        """Begin the load with the next step; returns the ticket."""
        start, key = request.num_local_hit, request.transfer_key
        step = self._next_step_id if is_layerwise else None
        load = KVLoad(request, start, start + num_external, inf, layerwise_step=step)
        if num_external:
            wanted = p.TokenRange(list(request.text), start, load.stop, _copy(request.block_tables))
            exposed = list(request.held_blocks(start // self.block_size))
            self.ask_all(HostedRank.expect, key, exposed, wanted if check else None)
            self.received.pop(key, None)
        self.external.add_load(load)
        ticket = self.external.start(load)
        if load.done:
            self.external.end_load(key, transfer_ended=True)
        return ticket

    def step_with_load(self, request: TextRequest, num_tokens: int, *, is_layerwise: bool) -> bool:
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

    def end_load(self, request: TextRequest) -> None:
        """Give a load up: blocks that may still be written are quarantined until its end is reported."""
        if request.transfer_key in self.external.loads:
            self.external.end_load(request.transfer_key, transfer_ended=False)

    def cancel(self, key: TransferKey, direction: Direction) -> None:
        """Tell the workers to cancel, even keys of which the engine has no load."""
        self.external._cancels.append(Cancel(key, direction))

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

    def share_written(self, request: TextRequest) -> float:
        """The share of a request's load that has arrived, 0 to 1."""
        return self.ask(HostedRank.written, request.block_ids)

    def wait_written(self, request: TextRequest, timeout_s: float) -> None:
        """Wait until a part of a request's load has arrived, with no step in between, or the time is over."""
        deadline = MONOTONIC.now() + timeout_s
        while not self.share_written(request) and MONOTONIC.now() < deadline:
            pass

    def foreign_writes(self) -> list[int]:
        """Blocks of any rank that were written from outside although no load owned them."""
        return sorted({block for rank in self.ask_all(HostedRank.foreign_writes) for block in rank})


def _copy(block_tables: Sequence[Sequence[int]]) -> list[list[int]]:
    return [list(table) for table in block_tables]
