"""One timed transfer between two engines of the kit, and the world that they run in."""

from collections.abc import Sequence
from typing import ClassVar, NamedTuple

from pdkv.connector_kit.bench.aged_pools import PATTERNS
from pdkv.connector_kit.bench.timed_rank import TimedRank
from pdkv.connector_kit.rig import protocol as p
from pdkv.connector_kit.rig.engine import Engine
from pdkv.connector_kit.rig.handover import Handover
from pdkv.connector_kit.rig.rank import HostedRank
from pdkv.connector_kit.rig.world import Violation, World, require
from pdkv.connectors.base import TransferKey

_ON_SCHEDULER = frozenset({"get_num_new_matched_tokens", "update_state_after_alloc", "build_connector_meta"})
_BETWEEN_STEPS = frozenset({"update_peers"})


class Span(NamedTuple):
    """The first beginning and the last end over all ranks, by the monotonic clock."""

    began: float
    ended: float


class Timing(NamedTuple):
    """The times of one transfer; for a store, its saves precede it."""

    transfer_s: float  # from the step that begins it to its report on all of the reader's ranks
    scheduler_s: float  # allocation and metadata, where it begins
    producer_step_s: float  # CPU time of all of the connector's calls on the step thread of rank 0, on both sides
    consumer_step_s: float
    save_s: float | None  # store: from the step that begins it to its report on the writer

    @property
    def seconds(self) -> float:
        """Seconds of the whole transfer."""
        return self.transfer_s + self.scheduler_s


class TimedEngine(Engine):
    """An engine with ranks that time the connector's calls."""

    rank: ClassVar[type[HostedRank]] = TimedRank
    step_cpu_s = 0.0  # of rank 0, in all calls so far

    def overwrite(self) -> list[int]:
        """No blocks: free ones keep their content, since nothing else writes here."""
        return []

    def await_ends(self, keys: Sequence[TransferKey]) -> None:
        """Tell all ranks to wait for the ends of transfers; `take_executed` must follow."""
        for host in self.hosts:
            host.send(self.name, TimedRank.await_ends, list(keys), self.timeout_s)

    def take_span(self) -> Span:
        """The span of the last step or wait. Raises Violation if a transfer has not ended in time."""
        return self._span(self.take_executed())

    def run_and_await(self, plan: p.StepPart, keys: Sequence[TransferKey]) -> Span:
        """Run a step, then wait for the ends of the transfers that it begins."""
        self.send_part(plan)
        self.await_ends(keys)
        step, waited = self.take_executed(settle=False), self.take_executed(settle=False)
        self.settle(step)
        self.settle(waited)
        return Span(self._span(step).began, self._span(waited).ended)

    def run_timed(self, plan: p.StepPart) -> Span:
        """Run one step, timed."""
        self.send_part(plan)
        return self.take_span()

    def take_cost(self) -> float:
        """Seconds of the scheduler side's calls since the last time."""
        taken = self.ask(TimedRank.take_calls)
        self.step_cpu_s += sum(record.cpu_s for record in taken if record.name not in _BETWEEN_STEPS)
        return sum(record.cpu_s + record.blocked_s for record in taken if record.name in _ON_SCHEDULER)

    def digest(self, tokens: p.TokenRange) -> dict[int, int]:
        """A number for the content of each KV head of the model, at the place of `tokens`."""
        digests: dict[int, int] = {}
        for rank, values in enumerate(self.ask_all(TimedRank.digest, tokens)):
            total, tp = self.layout.kv_heads_of_all_ranks, len(self.hosts)
            first = rank * total // tp
            digests.update({first + i: value for i, value in enumerate(values)})
        return digests

    def _span(self, executed: Sequence[p.Executed]) -> Span:
        if any(not rank.ended for rank in executed):
            raise Violation(f"not within {self.timeout_s:g} s: {self.describe_rest()}")
        return Span(min(rank.began for rank in executed), max(rank.ended for rank in executed))


class BenchWorld(World):
    """Timed engines, with blocks in a chosen order."""

    engine_type: ClassVar[type[Engine]] = TimedEngine

    def scatter(self, pattern: str) -> None:
        """Allocate requests' blocks in that pattern from now on. All engines must be idle."""
        for number, engine in enumerate(self.engines.values()):
            assert engine.is_idle, engine.describe_rest()
            engine.use(PATTERNS[pattern](engine.layout, engine.pool.num_blocks, engine.table, number + 1))

    @property
    def writer(self) -> TimedEngine:
        """The engine that computes prompts."""
        return _timed(self.producer)

    @property
    def reader(self) -> TimedEngine:
        """The engine that loads."""
        return _timed(self.consumer)


def _timed(engine: Engine) -> TimedEngine:
    assert isinstance(engine, TimedEngine)
    return engine


class TimedTransfer(Handover):
    """The transfer of one prompt's whole KV from the producer to the consumer."""

    def __init__(self, world: BenchWorld, num_tokens: int, *, chunk: int = 0) -> None:
        super().__init__(world, num_tokens, check=False, chunk=chunk)
        self.writer, self.reader = world.writer, world.reader

    def measure(self, *, compare: bool = False) -> Timing:
        """Run it, and let both sides come to rest.

        Raises:
            Violation: it fails or, with `compare`, the received KV differs from what was sent.
        """
        began = self._step_cpu_s()
        timing = self._push() if self.is_push else self._pull()
        outcome = self.wait()
        require(not outcome.code, f"load of {self.describe()} failed: {outcome.code}")
        if compare:
            self._compare()
        self.receiver.num_confirmed = self.num_tokens
        self.reader.kv.commit(self.receiver)  # what is cached is reused last, so that transfers go round the pool
        if self.is_push:
            self.world.until(
                lambda: self.key in self.producer.sent, f"the end of sending {self.describe()} is reported"
            )
        self.end()
        self.world.until(lambda: self.writer.is_idle and self.reader.is_idle, "both sides come to rest")
        producer, consumer = (after - before for before, after in zip(began, self._step_cpu_s(), strict=True))
        return timing._replace(producer_step_s=producer, consumer_step_s=consumer)

    def _step_cpu_s(self) -> tuple[float, float]:
        """CPU seconds of the step threads of writer and reader so far."""
        for engine in (self.writer, self.reader):
            engine.take_cost()
        return self.writer.step_cpu_s, self.reader.step_cpu_s

    @property
    def tables(self) -> tuple[Sequence[int], Sequence[int]]:
        """Blocks of the producer and of the consumer; only known while they are held."""
        return self._source_ids, self._target_ids

    def _pull(self) -> Timing:
        self.begin_prefill()
        for start in range(0, self.num_tokens, self.chunk):
            self.compute(start)
        self.hand_off()
        save_s = self._save() if self.producer.card.kind == "store" else None
        self.find()
        self.reader.take_cost()
        self.allocate()
        self._remember()
        self.post()
        plan = self.consumer.plan()
        cost = self.reader.take_cost()
        span = self.reader.run_and_await(plan, [self.key])
        return Timing(span.ended - span.began, cost, 0.0, 0.0, save_s)

    def _save(self) -> float:
        span = self.writer.run_and_await(self.producer.plan(), [self.key])
        return span.ended - span.began

    def _push(self) -> Timing:
        """Push. The ticket comes last if possible, so that nothing is sent during steps that are not timed."""
        is_late = "concurrent" in self.producer.card.orders
        if is_late:
            self.prefill()
        self.find()
        self.allocate()
        self.start()
        self.bring_ticket()
        if not is_late:
            self.prefill()
        self._remember()
        self.writer.take_cost()
        plan = self.producer.plan()
        cost = self.writer.take_cost()
        # One process that serves both does one thing after the other.
        is_shared = self.writer.hosts[0].pid == self.reader.hosts[0].pid
        if not is_shared:
            self.reader.await_ends([self.key])
        began = self.writer.run_timed(plan).began
        if is_shared:
            self.reader.await_ends([self.key])
        return Timing(self.reader.take_span().ended - began, cost, 0.0, 0.0, None)

    def _remember(self) -> None:
        self._source_ids, self._target_ids = list(self.leased), list(self.receiver.block_ids)

    def _compare(self) -> None:
        text = list(self.sender.text)
        ranges = [p.TokenRange(text, 0, self.num_tokens, [list(blocks)]) for blocks in self.tables]
        sent, received = self.writer.digest(ranges[0]), self.reader.digest(ranges[1])
        wrong = [head for head in sent if sent[head] != received[head]]
        require(not wrong, f"KV heads {wrong} differ between producer and consumer: {self.describe()}")
