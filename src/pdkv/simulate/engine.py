"""One engine of a simulation: the real `EngineCore` and step loop. A step computes nothing and lasts as its curve says.

Steps in which nothing changes are one event: the scheduler plans them as one step with drafts, all of which are right.
What arrives in the meantime ends the run with the step under way, and the drafts behind it turn out wrong.
"""

import asyncio
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from math import inf
from typing import Any, NamedTuple

from pdkv.assemble.core import build_core
from pdkv.base.block_keys import HASH_BLOCK_SIZE
from pdkv.config import HandoffConfig
from pdkv.connectors.base import (
    NO_TRANSFERS,
    ConnectorConfig,
    Direction,
    KVConnectorMetadata,
    TransferKey,
    TransferOutcome,
    TransferResults,
    WorkerConnector,
)
from pdkv.connectors.block_table import LocalBlockTable
from pdkv.connectors.peer.cards import PeerCards
from pdkv.connectors.peer.pull_scheduler import BlockLoad, PullMetadata, PullScheduler
from pdkv.connectors.plan import INTERFACE, NO_PLAN, ConnectorPlan
from pdkv.engine.plan import SampledTokens, StepOutput, StepPlan
from pdkv.engine.scheduler import SchedulerLimits
from pdkv.engine.step_loop import Ahead
from pdkv.engine.worker.executor import Ended, Executor
from pdkv.engine.worker.step_queue import Result, StepQueue
from pdkv.errors import PeerGone, TransferCancelled
from pdkv.router.engines.engine_client import EngineListener
from pdkv.simulate.loop import VirtualTime
from pdkv.testing.paced import Profile
from pdkv.wire.kv import EngineCard, KVLayout
from pdkv.wire.messages import EngineToRouter, RouterToEngine, Tokens
from pdkv.wire.messages import Peers as PeersMessage
from pdkv.wire.step_watch import StepTimes

TOKEN = 2
"""Every token of every answer."""

MAX_RUN_S = 0.5
"""Seconds after which a run of steps is told, so that the router does not judge by what is long over."""

_PLAN = ConnectorPlan(interface=INTERFACE, kind="pull", name="simulated", lends=True)
_ROUTER = "router"


class EngineOptions(NamedTuple):
    """What all engines of a simulation have in common."""

    profile: Profile
    kv_tokens: int = 0  # that its pool holds; 0: the profile's
    block_size: int = 16
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    max_steps_ahead: int = 2
    in_turn_below_s: float = 0.05  # as in EngineConfig
    hop_s: float = 0.0003  # of a message between two processes
    runs: bool = True  # take steps in which nothing changes at once

    @property
    def num_blocks(self) -> int:
        """Blocks of a pool."""
        return (self.kv_tokens or self.profile.kv_tokens) // self.block_size

    @property
    def max_model_len(self) -> int:
        """Most tokens of a request."""
        return min(self.profile.max_model_len, self.num_blocks * self.block_size)


class SimulatedWorker(WorkerConnector):
    """Reads that take their time on both engines' links, one at a time on each, and move nothing."""

    def __init__(self, engine: "SimulatedEngine") -> None:
        self._engine = engine
        self._loads: dict[TransferKey, list[BlockLoad]] = {}  # by transfer, the parts that have not landed
        self._done: dict[TransferKey, TransferOutcome] = {}
        self._failed: dict[TransferKey, TransferOutcome] = {}

    def start_load_kv(self, meta: KVConnectorMetadata) -> None:
        assert isinstance(meta, PullMetadata)
        loop, profile = self._engine.loop, self._engine.options.profile
        for load in meta.loads:
            if load.continues and load.key not in self._loads:
                continue  # an earlier part has failed
            self._loads.setdefault(load.key, []).append(load)
            source = self._engine.peers.get(load.engine)
            ends_of = [self._engine, source or self._engine]
            began = max(loop.clock.now(), *(engine.link_free_at for engine in ends_of))
            for engine in ends_of:
                engine.link_free_at = began + (load.stop - load.start) * profile.transfer_token_s
            lands = self._engine.link_free_at + profile.transfer_s
            loop.call_at(lands, self._land, load, lands - loop.clock.now())

    def _land(self, load: BlockLoad, seconds: float) -> None:
        parts = self._loads.get(load.key, [])
        if not any(each is load for each in parts):
            return
        parts.remove(load)
        source = self._engine.peers.get(load.engine)
        if source is None or source.card.epoch != load.epoch:
            del self._loads[load.key]
            self._failed[load.key] = TransferOutcome(PeerGone.code)
        elif not (parts or load.more):  # they land in order
            del self._loads[load.key]
            num_bytes = (load.stop - load.start) * self._engine.token_bytes
            self._done[load.key] = TransferOutcome(num_bytes=num_bytes, seconds=seconds)
        self._engine.wake()

    def cancel(self, key: TransferKey, direction: Direction) -> None:
        if direction == "receive" and self._loads.pop(key, None) is not None:
            self._failed[key] = TransferOutcome(TransferCancelled.code)

    def get_finished(self) -> TransferResults:
        if not (self._done or self._failed):
            return NO_TRANSFERS
        results = TransferResults({}, {}, self._done, self._failed)
        self._done, self._failed = {}, {}
        return results


class Peers(PullScheduler):
    """The scheduler side of a pull from any engine of the simulation, all of which have one layout."""

    def __init__(self, config: ConnectorConfig, table: LocalBlockTable, peers: Mapping[str, "SimulatedEngine"]) -> None:
        super().__init__(config, table, PeerCards(config))
        self._engines = peers

    def source_block_size(self, engine: str, epoch: str) -> int | None:
        source = self._engines.get(engine)
        return self.block_size if source is not None and source.card.epoch == epoch else None

    def update_peers(self, cards: Sequence[EngineCard]) -> None:
        """No effect: the simulation knows who is there."""


class CurveTimes(StepTimes):
    """Predicts steps by the curve that they follow."""

    def __init__(self, profile: Profile) -> None:
        super().__init__()
        self._profile = profile

    def predict_s(self, num_tokens: int) -> float:
        return self._profile.seconds(0, num_tokens, 0)

    def note(self, num_tokens: int, seconds: float) -> None:
        """No effect: the curve is known."""


class Device(StepQueue, Executor):
    """Runs steps one after the other; each ends when the clock shows its time. The core's executor, too, but for
    `execute`, which nothing calls.
    """

    execute: Any = None

    def __init__(
        self, loop: VirtualTime, profile: Profile, worker: SimulatedWorker | None, on_end: Callable[[], None]
    ) -> None:
        super().__init__(self, on_end)
        self._loop, self._profile, self._worker, self._on_end = loop, profile, worker, on_end
        self._plans: deque[StepPlan] = deque()
        self._found: list[Result] = []
        self._ends: list[float] = []  # of the step, or the steps of a run, under way
        self._timer: asyncio.TimerHandle
        self.stamps: Sequence[float] = ()
        """When the tokens of the step that ended last were drawn."""

    @property
    def is_done(self) -> bool:
        """Always False: no step is run by the loop itself."""
        return False

    def submit(self, plan: StepPlan) -> None:
        self._plans.append(plan)
        if len(self._plans) == 1:
            self._begin()

    def ask_finished(self) -> None:  # type: ignore[override]
        if self._worker is not None and (results := self._worker.get_finished()):
            self._found.append(Ended(results))

    def ask_report(self) -> None:
        self._found.append(Ended(NO_TRANSFERS, is_report=True))

    def update_peers(self, added: Sequence[EngineCard], removed: Sequence[EngineCard]) -> None:
        """No effect."""

    def shutdown(self) -> None:
        """No effect."""

    def collect(self) -> list[Result]:
        found, self._found = self._found, []
        return found

    def cut(self) -> None:
        """End a run with the step that is under way."""
        if len(self._ends) > 1:
            left = bisect_left(self._ends, self._loop.clock.now()) + 1
            if left < len(self._ends):
                del self._ends[left:]
                self._timer.cancel()
                self._timer = self._loop.call_at(self._ends[-1], self._end)

    def close(self) -> None:
        """Run nothing more."""
        self._plans.clear()
        self._found = []
        if self._ends:
            self._timer.cancel()

    def _begin(self) -> None:
        plan = self._plans[0]
        if self._worker is not None:
            for cancel in plan.cancels:
                self._worker.cancel(*cancel)
            if plan.kv_meta is not None:
                self._worker.start_load_kv(plan.kv_meta)
        self._ends = self._durations(plan)
        self._timer = self._loop.call_at(self._ends[-1], self._end)

    def _durations(self, plan: StepPlan) -> list[float]:
        """When the step ends or, of a run, each of its steps."""
        now = self._loop.clock.now()
        if not plan.scheduled:
            return [now]
        decodes = rest = context = prompts = 0
        count = MAX_RUN_STEPS
        for share in plan.scheduled:
            num_own = share.num_scheduled - share.num_drafts
            context += share.num_computed + num_own
            if num_own == 1:
                decodes += 1
                count = min(count, share.num_drafts + 1)
            else:
                rest, count, prompts = rest + num_own, 1, prompts + share.samples
        profile = self._profile
        first = profile.seconds(decodes, rest, context) + profile.prompt_s * prompts
        more = profile.context_token_s * decodes
        return list(accumulate((first + i * more for i in range(count)), initial=now))[1:]

    def _end(self) -> None:
        plan, self.stamps, self._ends = self._plans.popleft(), self._ends, []
        sampled = {
            share.key: SampledTokens([TOKEN] * len(self.stamps), None) for share in plan.scheduled if share.samples
        }
        results = NO_TRANSFERS if self._worker is None else self._worker.get_finished()
        self._found.append(StepOutput(plan.step_id, sampled, {}, results))
        if self._plans:
            self._begin()
        self._on_end()


MAX_RUN_STEPS = 1024


class Steps(Ahead):
    """The engine's step loop, which plans as one step what only decodes until a request ends."""

    def __init__(self, engine: "SimulatedEngine") -> None:
        options = engine.options
        super().__init__(engine.core, engine.device, max(options.max_steps_ahead, 1), options.in_turn_below_s or inf)
        self._limits = engine.core.scheduler.limits
        self._step_s = options.profile.step_s
        # Behind longer ones others are planned, whatever arrives meanwhile.
        self._runs = options.runs and self._step_s < (options.in_turn_below_s or inf)

    def plan(self, now: float) -> bool:
        count = self._num_steps(now) if self._runs else 1
        limits = self._limits
        if count > 1:
            limits = limits._replace(num_draft_tokens=count - 1, max_num_batched_tokens=1 << 30)
        self._core.scheduler.limits = limits
        runs_here = super().plan(now)
        if count > 1:
            self._most = 1
        return runs_here

    def _num_steps(self, now: float) -> int:
        """Steps until the first running request ends, if nothing but decoding is to be done until then. A run takes its
        blocks at its beginning: a quarter of those that are free at most, so that none is missed elsewhere.
        """
        scheduler = self._core.scheduler
        if not self.is_idle or (scheduler.waiting and scheduler.queues.has_place):
            return 1
        until = min(self._core.next_deadline() or inf, now + MAX_RUN_S)
        num_free = scheduler.kv.pool.num_available * self._core.card.layout.block_size // 4
        count = min(MAX_RUN_STEPS, int((until - now) / self._step_s), num_free // max(len(scheduler.running), 1))
        for request in scheduler.running:
            if request.num_planned - request.num_computed != 1 or request.stands_still:
                return 1
            count = min(count, request.end_at - request.num_tokens)
        return count


class SimulatedEngine:
    """A `Backend` of the dispatcher.

    Args:
        peers: all engines that are there, by name; it enters itself.
        stamped: told of each token message, and when its tokens were drawn.
    """

    def __init__(
        self,
        loop: VirtualTime,
        name: str,
        role: str,
        options: EngineOptions,
        peers: dict[str, "SimulatedEngine"],
        stamped: Callable[[Tokens, Sequence[float]], None],
        *,
        connected: bool,
    ) -> None:
        self.name, self.role, self.options, self.loop, self.peers = name, role, options, loop, peers
        self.num_dropped = 0
        self.link_free_at = 0.0
        self._stamped, self._connected = stamped, connected
        self._listener: EngineListener | None = None
        self._epoch = 0
        self._wakes_at = inf
        self._build()

    def _build(self) -> None:
        """A new incarnation."""
        options, profile = self.options, self.options.profile
        layout = KVLayout(profile.num_layers, profile.num_kv_heads, profile.head_size, options.block_size, "float32", 4)
        self.token_bytes = layout.block_bytes // options.block_size
        num_blocks = options.num_blocks
        table, plan = LocalBlockTable(num_blocks), _PLAN if self._connected else NO_PLAN
        self._epoch += 1
        self.card = EngineCard(
            engine=self.name, epoch=f"{self.name}.{self._epoch}", role=self.role, pid=0, **plan.on_card(),
            model="simulated", layout=layout, hash_block_size=HASH_BLOCK_SIZE, num_blocks=num_blocks,
            max_model_len=options.max_model_len,
            max_num_seqs=options.max_num_seqs, max_num_batched_tokens=options.max_num_batched_tokens,
            peer_changes=True, reads_parts=True,
        )  # fmt: skip
        worker = SimulatedWorker(self) if self._connected else None
        config = ConnectorConfig(
            engine=self.name, epoch=self.card.epoch, layout=layout, num_blocks=num_blocks, plan=plan, kv_checksum="off"
        )
        self.device = Device(self.loop, profile, worker, self.turn)
        self.core = build_core(
            card=self.card,
            executor=self.device,
            connector=Peers(config, table, self.peers) if self._connected else None,
            block_table=table,
            handoff=HandoffConfig(),
            limits=SchedulerLimits(options.max_num_seqs, options.max_num_batched_tokens),
            eos_token_ids=(),
            vocab_size=profile.vocab_size,
            shutdown=lambda: None,
        )
        self.core.watch.clock, self.core.watch.times = self.loop.clock, CurveTimes(profile)
        self.steps = Steps(self)
        self.peers[self.name] = self

    # --- the dispatcher's side ------------------------------------------------------------------------------------

    def connect(self, listener: EngineListener) -> None:
        """Come up."""
        self._listener = listener
        listener.engine_up(self.name, self.card)
        self.core.router_joined(_ROUTER, "1")
        self.turn()

    def send(self, message: RouterToEngine) -> None:
        """Pass a message on, which takes a hop. Of its peers it has no need to be told."""
        if not isinstance(message, PeersMessage):
            self.loop.call_later(self.options.hop_s, self._receive, self.core, message)

    def close(self) -> None:
        """Disconnect."""
        self._listener = None

    def die(self) -> None:
        """End as a process does that is killed: all that it had is lost."""
        self.device.close()
        self.peers.pop(self.name, None)
        if self._listener is not None:
            self._listener.engine_down(self.name, "it was killed by the simulation")

    def come_back(self) -> None:
        """Come up again, with nothing."""
        self._build()
        if self._listener is not None:
            self.connect(self._listener)

    # --- the engine's loop ----------------------------------------------------------------------------------------

    def _receive(self, core: object, message: RouterToEngine) -> None:
        if core is self.core and self.name in self.peers:
            self.core.handle_guarded(_ROUTER, message, self.loop.clock.now())
            self.device.cut()
            self.turn()

    def wake(self) -> None:
        """Act on a transfer that has ended."""
        if self.name in self.peers:
            self.device.cut()
            self.steps.wake()
            self.turn()

    def turn(self) -> None:
        """Do what can be done now, send what is to be said, and come back when the next deadline passes."""
        self.steps.turn()
        for _, messages in self.core.take_messages(self.loop.clock.now()):
            self.loop.call_later(self.options.hop_s, self._deliver, self.core, messages, self.device.stamps)
        self._sleep()

    def _sleep(self) -> None:
        wait_s = self.steps.wait_s()
        if wait_s is not None and self.loop.clock.now() + wait_s < self._wakes_at:
            self._wakes_at = self.loop.clock.now() + wait_s
            self.loop.call_at(self._wakes_at, self._alarm)

    def _alarm(self) -> None:
        self._wakes_at = inf
        if self.name in self.peers:
            self.turn()

    def _deliver(self, core: object, messages: Sequence[EngineToRouter], stamps: Sequence[float]) -> None:
        if core is not self.core or self._listener is None or self.name not in self.peers:
            return
        for message in messages:
            if isinstance(message, Tokens):
                self._stamped(message, stamps)
        self._listener.engine_messages(self.name, messages)
