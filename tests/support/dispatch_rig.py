"""A dispatcher over scripted engines, in one event loop."""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Callable, Collection
from typing import Any, TypeVar

from coroutines import clock
from scripted_engine import ScriptedEngine, Task, expected_output, make_card

from pdkv.router.engines.books import Books
from pdkv.router.engines.engine_client import EngineListener
from pdkv.router.generations.dispatch import Delta, Dispatcher, GenerateRequest, Generation
from pdkv.wire.kv import EngineCard
from pdkv.wire.messages import EngineToRouter, RouterToEngine, Trial
from pdkv.wire.types import RequestKey

S = TypeVar("S", bound="System")


class InProcessBackend:
    """A backend around a scripted engine: what it has to say comes in later turns of the event loop."""

    def __init__(self, engine: ScriptedEngine) -> None:
        self.name = engine.name
        self.num_dropped = 0
        self.engine = engine
        self.listener: EngineListener | None = None
        self.up = False
        self.held = False  # the engine does nothing for now

    def connect(self, listener: EngineListener) -> None:
        self.listener = listener

    def send(self, message: RouterToEngine) -> None:
        assert self.up, "a message to an engine that is not up"
        self.engine.receive(message)
        asyncio.get_running_loop().call_soon(self.pump)

    def pump(self) -> None:
        if not self.up or self.held or self.listener is None:
            return
        for key in self.engine.runnable()[:1]:
            self.engine.step(key)
        said, self.engine.outbox = self.engine.outbox, []
        if said:
            self.listener.engine_messages(self.name, said)
        if self.engine.runnable():
            asyncio.get_running_loop().call_soon(self.pump)

    def release(self) -> None:
        self.held = False
        self.pump()

    def say(self, *messages: Any) -> None:
        assert self.listener is not None
        self.listener.engine_messages(self.name, messages)

    def start(self, card: EngineCard) -> None:
        assert self.listener is not None
        self.up = True
        self.listener.engine_up(self.name, card)

    def die(self, suspects: Collection[RequestKey] = ()) -> None:
        assert self.listener is not None
        self.up = False
        self.engine = ScriptedEngine(self.name, self.engine.kind)
        self.listener.engine_down(self.name, "killed", suspects)

    def close(self) -> None:
        self.listener = None

    def heard(self, kind: type) -> list[Any]:
        return [m for m in self.engine.received if isinstance(m, kind)]


class PoisonedBackend(InProcessBackend):
    """An engine that computes all of its tasks in each step, and dies in the step that has a poisonous one.

    It runs suspects alone, as engines do (`engine/trials.py`), and comes back in a later turn of the event loop. What
    it said last is lost with it.
    """

    def __init__(self, engine: ScriptedEngine) -> None:
        super().__init__(engine)
        self.is_poison: Callable[[Task], bool] = lambda task: False
        self.num_deaths = 0
        self._said: list[EngineToRouter] = []
        self._on_trial: RequestKey | None = None
        self._trial_is_open = False
        self._tried: dict[RequestKey, int] = {}  # tokens that suspects got alone

    def send(self, message: RouterToEngine) -> None:
        if isinstance(message, Trial) and (message.request_id, message.attempt) == self._on_trial:
            self._trial_is_open = message.begins
            self._on_trial = self._on_trial if message.begins else None
        super().send(message)

    def pump(self) -> None:
        if not self.up or self.held or self.listener is None:
            return
        keys = self._choose()
        tasks = [self.engine.tasks[key] for key in keys]
        if any(self.is_poison(task) for task in tasks):
            self._end()
            return
        said, self._said = self._said, []
        for key, task in zip(keys, tasks, strict=True):
            before = len(task.output)
            self.engine.step(key)
            self._tried[key] = self._tried.get(key, 0) + len(task.output) - before
        self._said, self.engine.outbox = self._said + self.engine.outbox, []
        if self._trial_is_open and self._on_trial is not None and not self._is_suspect(self._on_trial):
            self._trial_is_open = False
            self._said.append(Trial(*self._on_trial, begins=False))
        if said:
            self.listener.engine_messages(self.name, said)
        if self._said or keys:
            asyncio.get_running_loop().call_soon(self.pump)

    def _choose(self) -> list[RequestKey]:
        """The tasks of the next step."""
        keys = self.engine.runnable()
        if self._on_trial is None:
            self._on_trial = next((key for key in keys if self._is_suspect(key)), None)
            if self._on_trial is None:
                return keys
            self._said.append(Trial(*self._on_trial, begins=True))
        if self._on_trial not in self.engine.tasks and self._trial_is_open:  # it was aborted
            self._trial_is_open = False
            self._said.append(Trial(*self._on_trial, begins=False))
        return [key for key in keys if key == self._on_trial and self._trial_is_open]

    def _is_suspect(self, key: RequestKey) -> bool:
        task = self.engine.tasks.get(key)
        return task is not None and self._tried.get(key, 0) < task.submit.trial_tokens

    def _end(self) -> None:
        self.num_deaths += 1
        self._said, self._on_trial, self._trial_is_open = [], None, False
        self._tried.clear()
        self.die()
        asyncio.get_running_loop().call_soon(self.come_back)

    def come_back(self) -> None:
        if self.listener is not None:
            kind = self.engine.kind
            self.start(make_card(self.name, self.name.partition("-")[0], kind, epoch=f"e{self.num_deaths}"))


class System:
    """A dispatcher and its scripted engines, prefill-0 …, decode-0 … or engine-0 …"""

    def __init__(
        self,
        num_prefill: int,
        num_decode: int,
        *,
        kind: str = "pull",
        backend: type[InProcessBackend] = InProcessBackend,
        **options: Any,
    ) -> None:
        defaults: dict[str, Any] = {"policy": "round_robin"}
        with contextlib.suppress(RuntimeError, AttributeError):  # no loop runs, or it has the machine's time
            defaults["clock"] = clock().now
        self.dispatcher = Dispatcher(rng=random.Random(0), **(defaults | options))
        roles = {"prefill": num_prefill, "decode" if num_prefill else "any": num_decode}
        self.backends: dict[str, InProcessBackend] = {}
        self.kind = kind
        for role, num in roles.items():
            for i in range(num):
                name = f"{role}-{i}"
                self.backends[name] = backend(ScriptedEngine(name, kind))  # type: ignore[arg-type]
                self.dispatcher.add_backend(self.backends[name], role)

    def card(self, name: str, **changes: Any) -> EngineCard:
        return make_card(name, name.partition("-")[0], self.kind, **changes)  # type: ignore[arg-type]

    def start(self) -> None:
        self.dispatcher.connect()
        for name, backend in self.backends.items():
            backend.start(self.card(name))

    def check_rest(self) -> None:
        """Nothing is left of any request."""
        assert self.dispatcher.num_running == 0
        assert self.dispatcher.driver.transfers == {}
        assert len(self.dispatcher.recovery.parked) == 0
        assert self.dispatcher.recovery.trials.suspects == {}
        assert self.dispatcher.recovery.trials._alone == {}
        assert {e.name: e.books for e in self.dispatcher.fleet.engines.values() if e.books != Books()} == {}
        for backend in self.backends.values():
            assert not backend.engine.tasks
            assert not backend.engine.leases


@contextlib.asynccontextmanager
async def live(system: S, *, start: bool = True) -> AsyncIterator[S]:
    """Its engines are up; at the end nothing is left of any request."""
    if start:
        system.start()
    yield system
    system.check_rest()
    system.dispatcher.close()


async def until(condition: Callable[[], bool]) -> None:
    """Let the engines go on until it holds."""
    while not condition():
        await asyncio.sleep(0)


async def collect(generation: Generation) -> tuple[list[int], Delta]:
    """All tokens and the last delta."""
    tokens: list[int] = []
    async for delta in generation:
        tokens += delta.token_ids
    return tokens, delta


async def check_right(system: System, request: GenerateRequest) -> Generation:
    generation = system.dispatcher.start(request)
    tokens, last = await collect(generation)
    assert tokens == expected_output(request)
    assert last.finish_reason is not None
    return generation
