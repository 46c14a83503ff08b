"""A whole deployment in a simulation: clients, admission, the real dispatcher, and its engines."""

import random
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from pdkv.bench.client import Reply
from pdkv.bench.report import Run, Sent
from pdkv.bench.serve import Conversation, Pace, send_by
from pdkv.bench.workload import Session, Turn
from pdkv.config import AutoscaleConfig, ReuseConfig
from pdkv.errors import ConfigError, PdkvError
from pdkv.router.admission.admission_queue import Admission
from pdkv.router.engines.fleet import ORDERS
from pdkv.router.generations.dispatch import Dispatcher, Generation
from pdkv.router.request import GenerateRequest
from pdkv.router.routing.policies import DEFAULT_POLICY
from pdkv.sampling.params import SamplingParams
from pdkv.simulate.engine import EngineOptions, SimulatedEngine
from pdkv.simulate.loop import VirtualTime
from pdkv.simulate.scaling import ScaledLaunch
from pdkv.simulate.transfers import HostMemory
from pdkv.wire.kv import Order
from pdkv.wire.messages import Tokens


class Failure(NamedTuple):
    """An engine that is killed, stands still or becomes slow, and recovers after a time; 0: never."""

    engine: str
    at_s: float
    back_s: float = 0.0
    kind: str = "kill"  # as the option is called: kill, stop or slow
    slowness: float = 1.0  # of slow steps: how many times longer they take


class Topology(NamedTuple):
    """What is simulated."""

    engine: EngineOptions
    prefill: int = 0  # 0: all engines do both
    decode: int = 1
    policy: str = DEFAULT_POLICY
    orders: Sequence[Order] = ORDERS
    failures: Sequence[Failure] = ()
    autoscale: AutoscaleConfig | None = None  # None: engines are as many as they are
    start_s: float = 20.0  # of an engine that the autoscaler starts
    reuse: ReuseConfig = ReuseConfig()
    others: Mapping[str, EngineOptions] = {}  # of engines that are not like the rest, by name

    @property
    def roles(self) -> Sequence[tuple[str, str]]:
        """(name, role) of each engine, named as `pd launch` names them."""
        roles = [("prefill", self.prefill), ("decode" if self.prefill else "any", self.decode)]
        return [(f"{'engine' if role == 'any' else role}-{i}", role) for role, count in roles for i in range(count)]


class Simulation:
    """One run of a topology under a load; `run` is called once.

    Args:
        on_event: told of (time, name, what) when a request arrives, begins to answer or ends, and when engines fail or
            recover.
    """

    def __init__(
        self,
        topology: Topology,
        *,
        seed: int = 0,
        on_event: Callable[[float, str, str], None] = lambda time, name, what: None,
    ) -> None:
        """Raises ConfigError: a policy or an engine to be killed is unknown."""
        if any(failure.kind != "kill" for failure in topology.failures):
            others = {name: options._replace(beats=True) for name, options in topology.others.items()}
            topology = topology._replace(engine=topology.engine._replace(beats=True), others=others)
        self._loop = loop = VirtualTime()  # type: ignore[abstract]  # what else a loop has is not for simulations
        self._on_event, self._failures = on_event, topology.failures
        self._stamps: dict[str, array[float]] = {}  # of each generation's tokens, by request_id
        self._hop_s = topology.engine.hop_s
        # Measured from outside, what a request takes has the four messages on the way to its first token in it.
        self._arrival_s = max(topology.engine.profile.request_s - 3 * self._hop_s, self._hop_s)
        self.dispatcher = Dispatcher(
            policy=topology.policy, orders=topology.orders, reuse=topology.reuse,
            clock=loop.clock.now, rng=random.Random(seed),
        )  # fmt: skip
        self._admission = Admission(self.dispatcher, clock=loop.clock.now)
        peers: dict[str, SimulatedEngine] = {}
        self._memory: list[HostMemory] = []

        def make(name: str, role: str) -> SimulatedEngine:
            options, connected = topology.others.get(name, topology.engine), topology.prefill > 0
            memory = None
            if options.host_tokens:
                num_bytes = options.host_tokens * options.layout.token_bytes
                memory = HostMemory(f"{id(self)}/{name}", num_bytes, self._memory)
                self._memory.append(memory)
            return SimulatedEngine(loop, name, role, options, peers, self._stamped, connected=connected, memory=memory)

        self.engines = {name: make(name, role) for name, role in topology.roles}
        for failure in topology.failures:
            if failure.engine not in self.engines and topology.autoscale is None:  # which may add one of that name
                known = ", ".join(list(self.engines)[:8])
                raise ConfigError(f"--{failure.kind} {failure.engine}: an engine's name was expected: {known}")
        for engine in self.engines.values():
            self.dispatcher.add_backend(engine, engine.role)
        self.launch: ScaledLaunch | None = None
        if topology.autoscale is not None:
            self.launch = ScaledLaunch(
                topology.autoscale, topology.start_s, self.dispatcher, self._admission, loop.clock, self.engines, make
            )

    def run(self, sessions: Sequence[Session], pace: Pace, progress: Callable[[Sent], None] = lambda sent: None) -> Run:
        """Have all sessions answered."""
        return self._loop.run(self._run(sessions, pace, progress))

    async def _run(self, sessions: Sequence[Session], pace: Pace, progress: Callable[[Sent], None]) -> Run:
        self.dispatcher.connect()
        await self._loop.clock.pause(WARM_S)
        for failure in self._failures:
            self._loop.call_later(failure.at_s, self._fail, failure)
        scaling = self._loop.create_task(self.launch.run()) if self.launch is not None else None
        try:
            return await send_by(self._ask, sessions, pace, progress, clock=self._loop.clock)
        finally:
            if scaling is not None:
                scaling.cancel()
            for memory in self._memory:
                memory.close()

    def _fail(self, failure: Failure) -> None:
        if (engine := self.engines.get(failure.engine)) is None:  # there is none at the moment
            return
        self._on_event(self._loop.clock.now(), failure.engine, _WHAT[failure.kind])
        if failure.kind == "kill":
            engine.die()
        elif failure.kind == "stop":
            engine.stop(failure.back_s)
        else:
            engine.slow(failure.slowness)
        if failure.back_s:
            self._loop.call_later(failure.back_s, self._recover, failure)

    def _recover(self, failure: Failure) -> None:
        if (engine := self.engines.get(failure.engine)) is not None:
            self._on_event(self._loop.clock.now(), failure.engine, "back")
            if failure.kind == "kill":
                engine.come_back()
            else:
                engine.slow(1.0)

    async def _ask(self, ahead: Conversation, turn: Turn, reply: Reply) -> None:
        """One request, from the client's point of view."""
        loop = self._loop
        reply.sent = loop.clock.now()
        prompt = ahead.token_ids
        name = f"request of {len(prompt)}"
        self._on_event(loop.clock.now(), name, "arrives")
        params = SamplingParams(temperature=0.0, max_tokens=turn.max_tokens, seed=0, ignore_eos=True)
        request = GenerateRequest(prompt_token_ids=prompt, params=params, timeout_s=_TIMEOUT_S, priority=turn.priority)
        await loop.clock.pause(self._arrival_s)
        try:
            generation = await self._answer(request, reply)
        except PdkvError as error:
            reply.error = f"{error.code}: {error}"
            self._on_event(loop.clock.now(), name, error.code)
            return
        reply.num_prompt_tokens, reply.num_cached_tokens = len(prompt), generation.num_cached_tokens
        reply.has_usage = True
        self._on_event(loop.clock.now(), name, f"{generation.prefill_engine} {generation.decode_engine}")

    async def _answer(self, request: GenerateRequest, reply: Reply) -> Generation:
        """As the router's front does it. Raises what that answers as errors."""
        admission = self._admission
        with admission.arrive(admission.anonymous) as visit:
            visit.hold([len(request.prompt_token_ids)], 1, request.params.max_tokens, stream=True)
            generation = await visit.start(request, self._began)
            try:
                async for delta in generation:
                    reply.num_tokens += len(delta.token_ids)
                    visit.came(len(delta.token_ids))
                    if reply.keep_text:
                        reply.token_ids += delta.token_ids
            finally:
                reply.stamps = self._stamps.pop(generation.request_id)  # type: ignore[assignment]
                generation.abort()
            visit.used(len(request.prompt_token_ids) + reply.num_tokens)
        return generation

    def _began(self, generation: Generation) -> None:
        self._stamps[generation.request_id] = array("d")

    def _stamped(self, message: Tokens, stamps: Sequence[float]) -> None:
        """Note when a client hears of new tokens."""
        known = self._stamps.get(message.request_id)
        if known is not None and (first := len(known) - message.position) >= 0:
            own = stamps[-len(message.token_ids) :][first:]
            known.extend(stamp + 2 * self._hop_s for stamp in own)


_WHAT = {"kill": "killed", "stop": "stopped", "slow": "slow"}

_TIMEOUT_S = 600.0
"""Deadline of each request."""

WARM_S = 1.0
"""Seconds before the first request, in which engines are told of each other."""
