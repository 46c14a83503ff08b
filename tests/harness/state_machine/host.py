"""A deterministic host: engines over the memory connector, a router's flows, and every order of events.

Real parts: EngineCore with scheduler, cache, roles and leases; the memory connector; the router's RequestFlow. Only
the forward pass may be a stand-in. A schedule is a string of bytes: every decision takes the next one, and when they
are used up everything is delivered and must come to rest.
"""

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from held_grammars import HeldStore

from pdkv.assemble.core import build_core
from pdkv.base.block_keys import root_key
from pdkv.config import HandoffConfig
from pdkv.connectors.base import Built, ConnectorConfig, TransferKey, WorkerConnector
from pdkv.connectors.block_table import LocalBlockTable
from pdkv.connectors.memory.fabric import MemoryFabric
from pdkv.connectors.multi.worker import MultiWorker
from pdkv.connectors.plan import ConnectorPlan
from pdkv.connectors.registry import build_connector, plan_connector
from pdkv.engine.core import EngineCore
from pdkv.engine.kv.kv_groups import num_held_at_once
from pdkv.engine.scheduler import SchedulerLimits
from pdkv.engine.step_loop import Ahead
from pdkv.engine.worker.step_queue import StepQueue
from pdkv.kernels.block_keys import keys_behind
from pdkv.prefill.leases import LeaseTable
from pdkv.prefill.role import PrefillRole
from pdkv.router.generations.flow import RequestFlow, Sends
from pdkv.router.request import GenerateRequest, Route
from pdkv.sampling.params import SamplingParams
from pdkv.sampling.shape import Grammar
from pdkv.wire.kv import EngineCard, Order
from pdkv.wire.messages import (
    BlockStored,
    EngineToRouter,
    Failed,
    Finished,
    Loaded,
    Peers,
    Release,
    RouterToEngine,
    Tokens,
)
from pdkv.wire.types import RequestKey
from state_machine.forward import MAX_OUTPUT, NUM_FAMILIES, NUM_LENGTHS, Forward
from state_machine.standin import StandIn
from state_machine.standin_store import STAND_IN_STORE, BlockStore, ReadStore, StoreName, share_store, store_of

STAND_IN = StandIn()
MAX_ATTEMPTS = 3
NUM_GRAMMARS = 2
MAX_DRAIN_ROUNDS = 1000


class Chooser:
    """Decisions from a string of bytes; behind its end, from a generator that it seeds."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._next = 0
        self._rest = random.Random(data)

    @property
    def exhausted(self) -> bool:
        """Whether all bytes are used."""
        return self._next >= len(self._data)

    def below(self, bound: int) -> int:
        """A number in [0, bound)."""
        if self.exhausted:
            return self._rest.randrange(bound)
        self._next += 1
        return self._data[self._next - 1] % bound


@dataclass
class Engine:
    """One incarnation of an engine and its two message queues."""

    name: str
    core: EngineCore
    worker: WorkerConnector
    woken: list[bool]  # one flag: the connector has called notify
    steps: Ahead | None  # None: strictly in turn
    orders: StepQueue
    grammars: HeldStore
    inbox: deque[RouterToEngine] = field(default_factory=deque)
    outbox: deque[EngineToRouter] = field(default_factory=deque)
    ended: set[RequestKey] = field(default_factory=set)

    @property
    def is_idle(self) -> bool:
        """Whether nothing that was ordered is under way."""
        return self.steps is None or (self.steps.is_idle and not self.orders.num_orders)

    @property
    def is_full(self) -> bool:
        """Whether a step must end before another one is planned."""
        return self.steps is not None and self.steps.is_full


@dataclass
class Client:
    """One request, what it should get and what it got."""

    flow: RequestFlow
    prompt: list[int]
    expected: list[int]
    got: list[int] = field(default_factory=list)
    aborted: bool = False
    deadline: float = 0.0


class World:
    """Engines, fabric, router and clients under one virtual clock.

    Args:
        lag: steps that may be planned ahead of the oldest that has not ended; None: the schedule says.
        num_drafts: the most that a proposer, who is often wrong, proposes for a request and step; None: the same.
    """

    hit_tokens = 0  # of the connector

    def __init__(
        self,
        chooser: Chooser,
        *,
        mode: str,
        order: Order,
        load: str = "async",
        forward: Forward = STAND_IN,
        lag: int | None = None,
        num_drafts: int | None = None,
    ) -> None:
        self.forward = forward
        self.chooser = chooser
        self.mode = mode
        self.order = order
        self.now = 0.0
        self.fabric_name = f"world-{id(self)}"
        store_capacity = (None, 6)[chooser.below(2)]
        self.fabric = MemoryFabric(manual=True, clock=lambda: self.now)
        share_store(self.fabric, BlockStore(store_capacity))
        MemoryFabric.bind(self.fabric_name, self.fabric)
        self.load = load
        self.block_size = forward.block_sizes[chooser.below(3)]
        pool = chooser.below(3)
        chosen = chooser.below(3)
        self.max_lag = chosen if lag is None else lag
        chosen = (0, 1, 3)[chooser.below(3)]
        self.num_drafts = chosen if num_drafts is None else num_drafts
        self.limits = SchedulerLimits(
            max_num_seqs=(4, 2, 8)[chooser.below(3)],
            max_num_batched_tokens=(16, 5, 64)[chooser.below(3)] * forward.scale,
            long_prefill_token_threshold=(0, 3)[chooser.below(2)] * forward.scale,
            kv_load_timeout_s=5.0,
            num_draft_tokens=self.num_drafts,
        )
        windows, most = forward.layout(self.block_size).windows, self.limits.max_num_batched_tokens
        longest = num_held_at_once(windows, forward.max_model_len, self.block_size, most, self.hit_tokens)
        self.num_blocks = max((12, 10, 2 * longest + 8)[pool], longest + 2)
        lease_timeout_s = (12.0, 5.5)[chooser.below(2)]
        policy = "fail" if chooser.below(8) == 1 else "recompute"
        self.handoff = HandoffConfig(
            connector="memory", kv_load_timeout_s=5.0, lease_timeout_s=lease_timeout_s, kv_load_failure_policy=policy
        )
        self.engines: dict[str, Engine] = {}
        self.clients: list[Client] = []
        self.num_restarts = 0
        self.num_resumed = 0
        self.num_early = 0  # decode engines that began to read a prompt before its end
        self.num_late = 0  # masks that came when a step had gone on without them
        self.losses = 0
        self.most_ahead = 0  # steps that compute, planned beyond the oldest of those that had not ended
        for index in range(2 + chooser.below(2)):
            self.boot(f"e{index}")
        self.tell_peers()

    # --- engines --------------------------------------------------------------------------------------------------

    def boot(self, name: str) -> None:
        """Start an engine, or its next incarnation."""
        epoch = f"{name}.{self.num_restarts}"
        layout = self.forward.layout(self.block_size)
        table = LocalBlockTable(self.num_blocks)
        config = ConnectorConfig(
            engine=name, epoch=epoch, layout=layout, num_blocks=self.num_blocks, plan=self.make_plan(),
            kv_checksum="off", block_table=table,
        )  # fmt: skip
        woken = [False]

        def notify() -> None:
            woken[0] = True

        connector = self.make_connector(config, notify)
        worker = connector.worker()
        card = EngineCard(
            engine=name,
            epoch=epoch,
            role="any",
            pid=0,
            connector="memory",
            rank_blobs=[worker.handshake()],
            kind=config.plan.kind,
            content_addressed=config.plan.content_addressed,
            orders=list(config.plan.orders),
            model="stand-in",
            layout=layout,
            hash_block_size=self.block_size,
            num_blocks=self.num_blocks,
            max_model_len=self.forward.max_model_len,
            max_num_seqs=self.limits.max_num_seqs,
        )
        num_words = -(-self.forward.vocab_size // 32)
        grammars = HeldStore(num_words, lambda: self.chooser.below(8) == 1)
        executor = self.forward.make_executor(
            layout,
            self.num_blocks,
            max_num_seqs=self.limits.max_num_seqs,
            worker=worker,
            proposer=self.forward.proposer(self.num_drafts, seed=self.chooser.below(256)),
            grammars=grammars,
        )
        core = build_core(
            card=card,
            executor=executor,
            connector=connector.scheduler(),
            block_table=connector.block_table or table,
            handoff=self.handoff,
            limits=self.limits,
            eos_token_ids=sorted(self.forward.eos),
            vocab_size=self.forward.vocab_size,
            shutdown=executor.shutdown,
            hit_tokens=self.hit_tokens,
            local_prefill_tokens=2 * self.block_size,
            grammars=grammars,
        )
        if self.num_blocks < 16:
            core.scheduler.kv.max_committed_blocks = 1  # as for prompts of thousands of blocks
        orders = StepQueue(executor, lambda: None)
        steps = Ahead(core, orders, self.max_lag) if self.max_lag else None
        self.engines[name] = Engine(name, core, worker, woken, steps, orders, grammars)
        self.forward.watch(executor, core.scheduler.kv.pool)
        core.router_joined("router", "1")

    def make_connector(self, config: ConnectorConfig, notify: Callable[[], None]) -> Built:
        """An engine's, of `make_plan`."""
        return build_connector(config, notify)

    def make_plan(self) -> ConnectorPlan:
        """The memory connector in one mode or the stand-in's store, or `multi` of several ("store+pull").

        On the fabric the last child stands for its engine: all have the pool, and tables that count alike.
        """
        modes = self.mode.split("+")
        names = [STAND_IN_STORE if mode == "store" else "memory" for mode in modes]
        own = [self.options_of(mode) for mode in modes]
        if len(modes) == 1:
            return plan_connector(names[0], own[0])
        options = {f"{i}.{name}": value for i, texts in enumerate(own) for name, value in texts.items()}
        options |= {"connectors": ",".join(names)}
        return plan_connector("multi", options)

    def options_of(self, mode: str) -> dict[str, str]:
        """--connector-config of the connector in that mode."""
        options = {"mode": mode, "fabric": self.fabric_name, "transfer_timeout_s": "4"}
        return {**options, "load": self.load} if mode == "store" else options

    def restart(self, name: str) -> None:
        """kill -9 and a new incarnation: queues, blocks and everything under way from it are gone."""
        self.num_restarts += 1
        worker = self.engines[name].worker
        for endpoint in worker.workers if isinstance(worker, MultiWorker) else [worker]:
            self.fabric.unregister(endpoint)  # type: ignore[arg-type]
        self.boot(name)
        for client in self.clients:
            if name in (client.flow.route.prefill, client.flow.route.decode):
                self.send(client.flow.engine_died(name))
                self.maybe_retry(client)
        self.tell_peers()

    def tell_peers(self) -> None:
        """The router distributes cards."""
        cards = [engine.core.card for engine in self.engines.values()]
        for engine in self.engines.values():
            engine.inbox.append(Peers(cards))

    def wake(self, engine: Engine) -> None:
        """Tell an engine that its connector has news, if it has; whether a step follows is the engine's to say."""
        if engine.woken[0]:
            engine.woken[0] = False
            (engine.core if engine.steps is None else engine.steps).wake()
            self.collect(engine)

    def step(self, engine: Engine) -> None:
        """One step in turn; or the model gets on with what was ordered, the loop hears of it, or it plans a step. Then
        check who owns what.
        """
        core, steps = engine.core, engine.steps
        self.wake(engine)
        if steps is None:
            core.finish_step(core.begin_step(self.now), self.now)
        else:
            self.run_orders(engine, self.chooser.below(engine.orders.num_orders + 1))
            if self.chooser.below(2) or (steps.is_full and not engine.orders.num_orders):
                steps.take_in(self.now)
            if not steps.is_full:
                steps.plan(self.now)
            else:
                steps.begin_loads(self.now)
            self.most_ahead = max(self.most_ahead, core.watch.num_computing - 1)
        self.check_books(engine)

    def run_orders(self, engine: Engine, count: int) -> None:
        """The thread of the model runs some of what the loop ordered; the loop does not know yet."""
        for _ in range(count):
            engine.orders.run_next()

    def rest(self, engine: Engine) -> None:
        """The model ends all that was ordered, and the loop hears of it."""
        if engine.steps is not None:
            self.run_orders(engine, engine.orders.num_orders)
            engine.steps.take_in(self.now)
            self.check_books(engine)

    def check_books(self, engine: Engine) -> None:
        """Who owns what."""
        core = engine.core
        self.collect(engine)
        core.scheduler.kv.pool.check_integrity()
        core.scheduler.queues.check_integrity()

    def leases(self, name: str) -> LeaseTable:
        """The leases of an engine."""
        role = self.engines[name].core.prefill
        assert isinstance(role, PrefillRole)
        return role.leases

    def check_loads(self, messages: Sequence[EngineToRouter]) -> None:
        """A load may find its source reused only when the lease on it has ended."""
        for message in messages:
            if isinstance(message, Loaded) and message.code == "stale_generation":
                client = next(c for c in self.clients if c.flow.request_id == message.request_id)
                flow = client.flow
                lease = self.leases(flow.route.prefill).get(TransferKey(flow.transfer_id, flow.prefill_attempt))
                assert lease is None, f"{message.request_id}: leased blocks were reused"

    def check_ends(self, engine: Engine, messages: Sequence[EngineToRouter]) -> None:
        """Of a request that an engine has ended it says nothing more."""
        for message in messages:
            if isinstance(message, Tokens | Finished | Failed):
                key = (message.request_id, message.attempt)
                assert key not in engine.ended, f"{message} comes behind the end"
                if not isinstance(message, Tokens):
                    engine.ended.add(key)

    def collect(self, engine: Engine) -> None:
        """Messages leave the engine."""
        for _, messages in engine.core.take_messages(self.now):
            engine.outbox.extend(messages)
            self.check_loads(messages)
            self.check_ends(engine, messages)

    # --- router ---------------------------------------------------------------------------------------------------

    def send(self, sends: Sends) -> None:
        """Messages of a flow on their way to engines."""
        for name, message in sends:
            self.engines[name].inbox.append(message)
            if isinstance(message, Release) and self.chooser.below(4) == 1:
                self.engines[name].inbox.append(message)  # said twice

    def submit(self) -> None:
        """A client comes."""
        chooser = self.chooser
        length = 1 + chooser.below(NUM_LENGTHS)
        family = chooser.below(NUM_FAMILIES)
        prompt = self.forward.prompt(family, length, changed=chooser.below(3) == 0)
        num_output = 1 + chooser.below(MAX_OUTPUT)
        grammar = self.grammar()
        self.ask(prompt, num_output, (0, 0, -1, 1)[chooser.below(4)], grammar)

    def ask(self, prompt: list[int], num_output: int, priority: int = 0, grammar: Grammar | None = None) -> None:
        """A client comes with this request."""
        expected = self.forward.expected(prompt, num_output)
        stop = next((i + 1 for i, t in enumerate(expected) if t in self.forward.eos), len(expected))
        prediction, middle = list(expected), len(expected) // 2
        prediction[middle] = (prediction[middle] + 1) % self.forward.vocab_size
        request = GenerateRequest(
            prompt_token_ids=prompt,
            prediction_token_ids=prediction,
            params=SamplingParams(temperature=0.0, max_tokens=num_output, seed=1, grammar=grammar),
            timeout_s=60.0,
            priority=priority,
        )
        name = f"r{len(self.clients)}"
        flow = RequestFlow(
            request, self.route(), request_id=name, transfer_id=f"t{name}", loan_id=f"l{name}", now=self.now
        )
        self.clients.append(Client(flow, prompt, expected[:stop]))
        self.send(flow.start(self.now))

    def grammar(self) -> Grammar | None:
        """Of a new request: one that it waits for, and that allows what is drawn."""
        number = self.chooser.below(8)
        return Grammar("text", f"{number}") if number < NUM_GRAMMARS else None

    def compile(self, engine: Engine) -> None:
        """A grammar that an engine's requests wait for is there, or a mask."""
        held, missing = engine.grammars.held, engine.grammars.missing
        if missing:
            engine.grammars.bring(self.chooser.below(len(missing)))
            self.num_late += 1
        elif held:
            engine.grammars.settle(held[self.chooser.below(len(held))])

    def route(self) -> Route:
        """Two engines, any two; now and then one for both parts."""
        names = list(self.engines)
        first = names[self.chooser.below(len(names))]
        if self.chooser.below(12) == 1:
            return Route(first, first)
        others = [name for name in names if name != first]
        is_open = self.order == "prefill_first" and self.chooser.below(2) == 0
        return Route(first, "" if is_open else others[self.chooser.below(len(others))], self.order)

    def receive(self, engine: Engine) -> None:
        """The router takes one message of an engine."""
        message = engine.outbox.popleft()
        for client in self.clients:
            flow = client.flow
            if isinstance(message, Release):
                ours = message.transfer_id == flow.transfer_id
            else:
                ours = getattr(message, "request_id", None) == flow.request_id
            if ours and flow.accepts(engine.name, message):  # type: ignore[arg-type]
                self.send(flow.handle(engine.name, message, self.now))
                self.take(client)
                self.maybe_retry(client)

    def take(self, client: Client) -> None:
        """Tokens reach the client: each must be right at once."""
        delta = client.flow.take_delta()
        if delta is not None:
            client.got += delta.token_ids
            assert client.got == client.expected[: len(client.got)], (
                f"wrong token for {client.flow.request_id}: got {client.got}, expected {client.expected}"
            )

    def maybe_retry(self, client: Client) -> None:
        """After a failure: what prefill did is for another decode engine, or all begins again behind the tokens."""
        flow = client.flow
        if flow.failure is not None and flow.retryable and not client.aborted:
            if flow.attempt >= MAX_ATTEMPTS:
                self.send(flow.give_up())
            elif flow.can_resume and self.chooser.below(4):
                self.num_resumed += 1
                self.send(flow.resume())
            else:
                self.send([*flow.reset(), *flow.begin(self.route(), self.now)])
        if flow.awaits_decode or flow.may_bind_decode:
            self.num_early += flow.may_bind_decode
            others = [name for name in self.engines if name != flow.route.prefill]
            self.send(flow.bind_decode(others[self.chooser.below(len(others))], self.now))

    # --- what happens next ----------------------------------------------------------------------------------------

    def act(self) -> None:
        """One random event."""
        choice = self.chooser.below(67)
        names = list(self.engines)
        engine = self.engines[names[self.chooser.below(len(names))]]
        if choice < 4:
            self.wake(engine)
        elif choice < 20:
            self.step(engine)
        elif choice < 32 and engine.inbox:
            engine.core.handle("router", engine.inbox.popleft(), self.now)
        elif choice < 42 and engine.outbox:
            self.receive(engine)
        elif choice < 48 and self.fabric.under_way:
            self.fabric.deliver(self.chooser.below(len(self.fabric.under_way)))
        elif 48 <= choice < 56 and len(self.clients) < 12:
            self.submit()
        elif choice in (56, 64, 65):
            self.abort()
        elif choice == 57 and self.num_restarts < 2:
            self.restart(engine.name)
        elif choice == 58:
            self.lose()
        elif choice == 59 and self.fabric.under_way:
            self.duplicate()
        elif choice in (62, 63) and (engine.grammars.held or engine.grammars.missing):
            self.compile(engine)
        elif choice in (61, 66) and "store" in self.mode:
            self.make_hole()
        else:
            self.now += (0.1, 0.5, 2.0)[self.chooser.below(3)]
            self.expire_clients()

    def abort(self) -> None:
        """A client goes away."""
        live = [client for client in self.clients if not client.flow.ended]
        if live:
            client = live[self.chooser.below(len(live))]
            client.aborted = True
            self.send(client.flow.abort())

    def lose(self) -> None:
        """Data that is under way never arrives. (A cancel is local and cannot get lost.)"""
        if not self.fabric.under_way:
            self.losses += 1
            self.fabric.num_losses_due = 1
            return
        index = self.chooser.below(len(self.fabric.under_way))
        if hasattr(self.fabric.under_way[index], "content"):
            self.losses += 1
            self.fabric.lose(index)

    def duplicate(self) -> None:
        """A write that is under way arrives twice."""
        operation = self.fabric.under_way[self.chooser.below(len(self.fabric.under_way))]
        if getattr(operation, "content", None) is not None:
            twin = object.__new__(type(operation))
            twin.__dict__.update(operation.__dict__)
            self.fabric.post(twin)

    def make_hole(self) -> None:
        """A stored block is gone, or is not what was saved: one that a load under way wants, if there is a load. What
        was read already comes up to some block only.
        """
        store = store_of(self.fabric)
        blocks = store._blocks
        names = list(blocks)
        reads = [operation for operation in self.fabric.under_way if isinstance(operation, ReadStore)]
        if reads:
            read = reads[self.chooser.below(len(reads))]
            if read.content is not None:
                del read.content[self.chooser.below(len(read.load.names)) :]
                return
            names = [name for name in read.load.names if name in blocks]
        if names:
            name = names[self.chooser.below(len(names))]
            if self.chooser.below(2):
                blocks[name] = blocks[name]._replace(digest=b"of something else")
            else:
                store.discard(name)

    def expire_clients(self) -> None:
        """Deadlines at the router."""
        for client in self.clients:
            if not client.flow.ended and client.flow.deadline <= self.now:
                self.send(client.flow.expire(self.now))

    def run(self) -> None:
        """The whole schedule: random events, then everything comes to rest, then the books are checked."""
        try:
            self.submit()
            while not self.chooser.exhausted:
                self.act()
            self.drain()
            self.check_rest()
        finally:
            MemoryFabric.unbind(self.fabric_name)

    def drain(self) -> None:
        """Deliver everything, let time pass where nothing moves, until nothing is left."""
        quiet = 0
        for _ in range(MAX_DRAIN_ROUNDS):
            moved = self.drain_once()
            if all(client.flow.ended for client in self.clients) and not moved:
                quiet += 1
                if quiet > 20:  # all deadlines are over
                    return
            if not moved:
                self.now += 1.0
                self.expire_clients()
        stuck = [client.flow.request_id for client in self.clients if not client.flow.ended]
        raise AssertionError(f"does not come to rest: {stuck or 'engines stay busy'}")

    def drain_once(self) -> bool:
        """One round of deliveries and steps. Returns whether anything moved."""
        moved = bool(self.fabric.under_way)
        if moved and self.chooser.below(2):
            self.fabric.deliver(self.chooser.below(len(self.fabric.under_way)))
        if self.chooser.below(20) == 1 and self.now < 30.0:
            self.abort()
        for engine in list(self.engines.values()):
            core = engine.core
            while engine.inbox:
                core.handle("router", engine.inbox.popleft(), self.now)
            self.compile(engine)
            self.wake(engine)
            deadline = core.next_deadline()
            is_due = core.has_work or (deadline is not None and deadline <= self.now)
            moved = moved or core.has_work or not engine.is_idle
            if is_due and not engine.is_full:
                self.step(engine)
            else:
                self.rest(engine)
            self.collect(engine)
            while engine.outbox:
                moved = True
                self.receive(engine)
        return moved

    def check_rest(self) -> None:
        """Every request ended as it should, and every block is back."""
        for client in self.clients:
            flow = client.flow
            self.take(client)
            if flow.finish_reason is not None:
                assert client.got == client.expected, f"{flow.request_id}: {client.got} != {client.expected}"
            else:
                assert flow.failure is not None
                assert client.aborted or flow.failure.code != "timeout", f"{flow.request_id} was forgotten"
                may_fail = flow.attempt == MAX_ATTEMPTS or self.handoff.kv_load_failure_policy == "fail"
                assert client.aborted or may_fail, f"{flow.request_id} failed: {flow.failure!r}"
        for engine in self.engines.values():
            core = engine.core
            counts = core.scheduler.kv.pool.counts()
            assert counts.free + counts.cached == counts.total, f"{engine.name}: {counts}"
            assert core.external.is_idle, f"{engine.name}: loads, holds or quarantine left"
            assert not core.requests
            assert all(ticket.is_closed for ticket in engine.grammars.tickets)
            assert not len(self.leases(engine.name))
            self.check_published(engine)

    def check_published(self, engine: Engine) -> None:
        """Whatever can be found, here or in the store, is KV of tokens that a client got, or should have got."""
        card, size = engine.core.card, self.block_size
        root = root_key(model=card.model, layout=card.layout.identity, adapter="", cache_salt="")
        right: dict[StoreName, list[int]] = {}
        for client in self.clients:
            tokens = [*client.prompt, *client.expected]
            keys = keys_behind(root, tokens[:-1], hash_block_size=size)
            right.update((key, tokens[: i * size]) for i, key in enumerate(keys, 1))
        pool, blocks = getattr(engine.core.executor, "pool", None), engine.core.scheduler.kv.pool
        stored = [event for event in blocks.snapshot_events() if isinstance(event, BlockStored)]
        for key in [key for event in stored for key in event.keys]:
            assert key in right, f"{engine.name} offers what no client got"
            block_id = blocks.lookup(key)
            assert block_id is not None
            if pool is not None:
                self.forward.check_block(pool[block_id], right[key], size)
        for name, block in store_of(self.fabric).blocks():
            if isinstance(name, bytes):  # else a tail of a hand-off
                assert name in right, "the store has what no client got"
                self.forward.check_block(block[0], right[name], size)


PAIRS: Sequence[tuple[str, Order, str]] = (
    ("pull", "prefill_first", "async"),
    ("pull", "decode_first", "async"),
    ("push", "concurrent", "async"),
    ("push", "needs_peer_first", "async"),
    ("push", "decode_first", "async"),
    ("store", "prefill_first", "async"),
    ("store", "decode_first", "async"),
    ("store", "prefill_first", "layerwise"),
    ("store", "decode_first", "layerwise"),
)
"""Every legal (mode, order), and the kind of load."""

MULTI_PAIRS: Sequence[tuple[str, Order, str]] = (
    ("pull+store", "prefill_first", "async"),
    ("store+pull", "prefill_first", "async"),
    ("store+pull", "decode_first", "async"),
    ("store+pull", "prefill_first", "layerwise"),
    ("store+push", "concurrent", "async"),
    ("store+push", "needs_peer_first", "async"),
    ("store+push", "decode_first", "async"),
)
"""Every kind of mixture, in the orders that are legal with it."""


def run_schedule(data: bytes, pair: tuple[str, Order, str], make_world: Callable[..., World] = World) -> World:
    """Run one schedule; raises AssertionError where a contract is broken."""
    mode, order, load = pair
    world = make_world(Chooser(data), mode=mode, order=order, load=load)
    world.run()
    return world
