"""One engine of a simulation: the real `EngineCore` and step loop. A step computes nothing and lasts as its curve says.

Steps in which nothing changes are one event: the scheduler plans them as one step with drafts, all of which are right.
What arrives in the meantime ends the run with the step under way, and the drafts behind it turn out wrong.
"""

import asyncio
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from math import inf
from typing import Any, NamedTuple

from pdkv.assemble.core import build_core
from pdkv.base.block_keys import HASH_BLOCK_SIZE
from pdkv.config import HandoffConfig
from pdkv.connectors.base import NO_TRANSFERS, ConnectorConfig, SchedulerConnector, WorkerConnector
from pdkv.connectors.block_table import LocalBlockTable
from pdkv.connectors.multi.connector import compose
from pdkv.connectors.multi.scheduler import MultiScheduler
from pdkv.connectors.multi.worker import MultiWorker
from pdkv.connectors.plan import NO_PLAN, ConnectorPlan
from pdkv.engine.plan import SampledTokens, StepOutput, StepPlan
from pdkv.engine.scheduler import SchedulerLimits
from pdkv.engine.step_loop import Ahead
from pdkv.engine.worker.executor import Ended, Executor
from pdkv.engine.worker.step_queue import Result, StepQueue
from pdkv.router.engines.engine_client import EngineListener
from pdkv.simulate.loop import VirtualTime
from pdkv.simulate.transfers import (
    HOST,
    PULL,
    PUSH,
    HostMemory,
    Pulls,
    PullWorker,
    Pushes,
    PushWorker,
    SimulatedWorker,
    host_sides,
)
from pdkv.testing.paced import Profile
from pdkv.wire.heartbeat import next_beat
from pdkv.wire.kv import EngineCard, KVLayout
from pdkv.wire.messages import EngineToRouter, RouterToEngine, Tokens
from pdkv.wire.messages import Peers as PeersMessage
from pdkv.wire.step_watch import StepTimes

TOKEN = 2
"""Every token of every answer."""

MAX_RUN_S = 0.5
"""Seconds after which a run of steps is told, so that the router does not judge by what is long over."""

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
    push: bool = False  # hand-offs go into blocks that decode engines name
    host_tokens: int = 0  # that its host memory holds; 0: it has none
    beats: bool = False  # it beats, so that the router notices if it stands still

    @property
    def num_blocks(self) -> int:
        """Blocks of a pool."""
        return (self.kv_tokens or self.profile.kv_tokens) // self.block_size

    @property
    def layout(self) -> KVLayout:
        """The layout of the KV."""
        made = self.profile
        return KVLayout(made.num_layers, made.num_kv_heads, made.head_size, self.block_size, "float32", 4)

    @property
    def max_model_len(self) -> int:
        """Most tokens of a request."""
        return min(self.profile.max_model_len, self.num_blocks * self.block_size)


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

    def __init__(self, engine: "SimulatedEngine", worker: WorkerConnector | None) -> None:
        super().__init__(self, engine.turn)
        self._loop, self._profile, self._worker = engine.loop, engine.options.profile, worker
        self._on_end, self._stands_still = engine.turn, engine.stands_still
        self._plans: deque[StepPlan] = deque()
        self._found: list[Result] = []
        self._ends: list[float] = []  # of the step, or the steps of a run, under way
        self.slowness = 1.0
        self._timer: asyncio.TimerHandle
        self.stamps: Sequence[float] = ()
        """When the tokens of the step that ended last were drawn."""

    @property
    def step_ends(self) -> float:
        """When the step under way ends."""
        return self._ends[-1]

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
        self._ends = self._durations(plan)
        if self._worker is not None:
            for cancel in plan.cancels:
                self._worker.cancel(*cancel)
            if plan.kv_meta is not None:
                self._worker.start_load_kv(plan.kv_meta)
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
        first = (profile.seconds(decodes, rest, context) + profile.prompt_s * prompts) * self.slowness
        more = profile.context_token_s * decodes * self.slowness
        return list(accumulate((first + i * more for i in range(count)), initial=now))[1:]

    def _end(self) -> None:
        if self._stands_still(self._end):
            return
        self._ends[-1] = self._loop.clock.now()
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
        self._runs = options.runs and not options.beats and self._step_s < (options.in_turn_below_s or inf)

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
        memory: host memory that it saves to; None: none.
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
        memory: HostMemory | None = None,
    ) -> None:
        self.name, self.role, self.options, self.loop, self.peers = name, role, options, loop, peers
        self.num_dropped = 0
        self.link_free_at = 0.0
        self.transfers: SimulatedWorker | None = None
        self._stamped, self._connected, self._memory = stamped, connected, memory
        self._goes_on_at = 0.0
        self._listener: EngineListener | None = None
        self._epoch = 0
        self._wakes_at = inf
        self._build()

    def _build(self) -> None:
        """A new incarnation."""
        options, profile, layout = self.options, self.options.profile, self.options.layout
        self.token_bytes = layout.token_bytes
        num_blocks = options.num_blocks
        table, plans = LocalBlockTable(num_blocks), self._plans()
        plan = compose(plans) if len(plans) > 1 else next(iter(plans), NO_PLAN)
        self._epoch += 1
        self.card = EngineCard(
            engine=self.name, epoch=f"{self.name}.{self._epoch}", role=self.role, pid=0, **plan.on_card(),
            model="simulated", layout=layout, hash_block_size=HASH_BLOCK_SIZE, num_blocks=num_blocks,
            max_model_len=options.max_model_len,
            max_num_seqs=options.max_num_seqs, max_num_batched_tokens=options.max_num_batched_tokens,
            peer_changes=True, reads_parts=not options.push, beats="ipc://simulated" if options.beats else "",
        )  # fmt: skip
        config = ConnectorConfig(
            engine=self.name, epoch=self.card.epoch, layout=layout, num_blocks=num_blocks, plan=plan,
            kv_checksum="off", clock=self.loop.clock, block_table=table,
        )  # fmt: skip
        sides = [*self._link(config), *self._host(config)]
        schedulers, workers = [side[0] for side in sides], [side[1] for side in sides]
        connector = MultiScheduler(config, schedulers) if len(sides) > 1 else next(iter(schedulers), None)
        worker = MultiWorker(plans, workers) if len(sides) > 1 else next(iter(workers), None)
        self.device = Device(self, worker)
        self.core = build_core(
            card=self.card,
            executor=self.device,
            connector=connector,
            block_table=table,
            handoff=HandoffConfig(),
            limits=SchedulerLimits(options.max_num_seqs, options.max_num_batched_tokens),
            eos_token_ids=(),
            vocab_size=profile.vocab_size,
            shutdown=lambda: None,
            hit_tokens=plan.hit_tokens,
        )
        self.core.watch.clock, self.core.watch.times = self.loop.clock, CurveTimes(profile)
        self.steps = Steps(self)
        self.peers[self.name] = self

    def _plans(self) -> list[ConnectorPlan]:
        link = [PUSH if self.options.push else PULL] if self._connected else []
        return link if self._memory is None else [*link, HOST]

    def _link(self, config: ConnectorConfig) -> Iterator[tuple[SchedulerConnector, SimulatedWorker]]:
        if self._connected:
            self.transfers = PushWorker(self) if self.options.push else PullWorker(self)
            yield Pushes(config, self.peers) if self.options.push else Pulls(config, self.peers), self.transfers

    def _host(self, config: ConnectorConfig) -> Iterator[tuple[SchedulerConnector, WorkerConnector]]:
        if self._memory is not None:
            yield host_sides(self, config, self._memory)

    # --- the dispatcher's side ------------------------------------------------------------------------------------

    def connect(self, listener: EngineListener) -> None:
        """Come up."""
        self._listener = listener
        listener.engine_up(self.name, self.card)
        self.core.router_joined(_ROUTER, "1")
        if self.options.beats:
            self._beat(self.core)
        self.turn()

    def send(self, message: RouterToEngine) -> None:
        """Pass a message on, which takes a hop. Of its peers it has no need to be told."""
        if not isinstance(message, PeersMessage):
            self.loop.call_later(self.options.hop_s, self._receive, self.core, message)

    def close(self) -> None:
        """Disconnect."""
        self._listener = None

    def die(self) -> None:
        """End as a process does that is killed: all that it had is lost, but not its host memory."""
        self.device.close()
        self.peers.pop(self.name, None)
        if self._listener is not None:
            self._listener.engine_down(self.name, "it was killed by the simulation")

    def come_back(self) -> None:
        """Come up again, with nothing in its pool."""
        self._goes_on_at = 0.0
        self._build()
        if self._listener is not None:
            self.connect(self._listener)

    def stop(self, seconds: float) -> None:
        """Stand still as a stopped process does: what should happen meanwhile happens after these seconds; 0: never.
        The step under way ends, and is noticed then.
        """
        self.device.cut()
        self._goes_on_at = self.loop.clock.now() + seconds if seconds else inf

    def slow(self, slowness: float) -> None:
        """Have all further steps take so many times what their curve says."""
        self.device.slowness = slowness

    def stands_still(self, call: Callable[..., object], *args: Any) -> bool:
        """Whether its process is stopped; if so, the call is made when it goes on."""
        if self.loop.clock.now() >= self._goes_on_at:
            return False
        if self._goes_on_at < inf:
            self.loop.call_at(self._goes_on_at, call, *args)
        return True

    # --- the engine's loop ----------------------------------------------------------------------------------------

    def _beat(self, core: object) -> None:
        if core is not self.core or self._listener is None or self.stands_still(self._beat, core):
            return
        beat, wait_s = next_beat(self.core.watch, self.card.epoch, self.loop.clock.now())
        self.loop.call_later(self.options.hop_s, self._deliver, core, [beat], ())
        self.loop.call_later(wait_s, self._beat, core)

    def _receive(self, core: object, message: RouterToEngine) -> None:
        if core is self.core and self.name in self.peers and not self.stands_still(self._receive, core, message):
            self.core.handle_guarded(_ROUTER, message, self.loop.clock.now())
            self.device.cut()
            self.turn()

    def wake(self) -> None:
        """Act on a transfer that has ended."""
        if self.name in self.peers and not self.stands_still(self.wake):
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
        if self.name in self.peers and not self.stands_still(self._alarm):
            self.turn()

    def _deliver(self, core: object, messages: Sequence[EngineToRouter], stamps: Sequence[float]) -> None:
        if core is not self.core or self._listener is None or self.name not in self.peers:
            return
        for message in messages:
            if isinstance(message, Tokens):
                self._stamped(message, stamps)
        self._listener.engine_messages(self.name, messages)
