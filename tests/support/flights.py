"""KV that is damaged between two engines: over each transport, between engines of equal and unequal ranks.

A trial hands one prompt over, of a length, in an order and in chunks that its seed draws, and damages it once on its
way, where it is read. Its load must fail with an error's code. Trials fly together (flight_batch.py): those that are
not damaged must end well beside the others. What can come too late to do harm, or be made good, may also end well.
"""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

import msgspec
from flight_batch import Batch
from relay import Relay

from pdkv.connector_kit.rig import protocol as p
from pdkv.connector_kit.rig.handover import Handover, legal_orders
from pdkv.connector_kit.rig.processes import Zygote
from pdkv.connector_kit.rig.rank import HostedRank
from pdkv.connector_kit.rig.world import Setting, Shape, World
from pdkv.connectors.base import TransferOutcome
from pdkv.connectors.p2p.wire import Address
from pdkv.wire.kv import EngineCard

MAX_TOKENS = 130
NUM_BLOCKS = 320
BATCH = 24
"""Trials that fly together."""

FRAMES_BYTES = 256
"""About so much beside a prompt's KV: greetings, offers, ends."""

NUM_OTHERS = 3
"""Prompts of others whose KV lies in the producer's pool meanwhile."""

Struck = Sequence[Handover]

RANKS: Sequence[tuple[int, int]] = ((1, 1), (1, 2), (2, 1))
"""Of the producer and the consumer."""


class Way(NamedTuple):
    """How KV travels."""

    connector: str
    options: Mapping[str, str] = {}
    one_process: bool = False
    is_pull: bool = False
    relayed: bool = False  # the peer is found by an address that a relay can stand in for


WAYS: Mapping[str, Way] = {
    "memory pull": Way("memory", {"mode": "pull"}, one_process=True, is_pull=True),
    "memory push": Way("memory", {"mode": "push"}, one_process=True),
    "shared_memory": Way("shared_memory", is_pull=True),
    **{f"nixl pull {path}": Way("nixl", {"mode": "pull", "path": path}, is_pull=True) for path in ("arena", "ucx")},
    **{f"nixl push {path}": Way("nixl", {"mode": "push", "path": path}) for path in ("arena", "ucx")},
    **{f"p2p {sockets}": Way("p2p", {"sockets": sockets}, relayed=True) for sockets in ("unix", "tcp")},
}

DAMAGES: Sequence[str] = ("flip", "swap", "foreign", "lost", "stale", "stale late", "wire flip", "wire cut")
"""One bit; two hash blocks of the transfer in each other's place; one in that of another prompt's; an end that is said
to have arrived and has not; a block that the source has reused behind the hand-off, or while it may be read; a bit of
all that the sender says on its sockets, frames and greetings too; the end of a connection anywhere."""

MAY_END_WELL = ("stale late", "wire flip", "wire cut")
"""What was reused may have been read by then; a connection may break when all has arrived, or be made anew."""


def damages_of(way: Way) -> list[str]:
    """Those that there can be."""
    there = {"stale": way.is_pull, "wire": way.relayed}
    return [damage for damage in DAMAGES if there.get(damage.split()[0], True)]


class FlightReport(msgspec.Struct):
    """What has become of the trials of one kind of damage on one way between engines of some ranks."""

    way: str
    ranks: tuple[int, int]
    damage: str
    seed: int = 0
    num_trials: int = 0  # in which something was damaged
    found: dict[str, int] = {}  # by the code of the load's failure
    num_right: int = 0  # the load ended well, with the right bytes
    num_sound: int = 0  # trials without damage, all of which must end well
    violations: list[str] = []

    @property
    def num_found(self) -> int:
        """Loads that failed with an error's code."""
        return sum(self.found.values())

    @property
    def name(self) -> str:
        """Of what was tried."""
        return f"{self.way} TP{self.ranks[0]}→TP{self.ranks[1]} {self.damage}"

    def __str__(self) -> str:
        codes = ", ".join(f"{code} {count}" for code, count in sorted(self.found.items()))
        verdict = f"{len(self.violations)} VIOLATIONS: {self.violations[:3]}" if self.violations else "no wrong byte"
        return (
            f"{self.name}: {self.num_trials} damaged, found "
            f"{self.num_found} ({codes}), {self.num_right} right all the same; {self.num_sound} sound; "
            f"{verdict}"
        )


class RelayedWorld(World):
    """A world whose engines find each other's p2p ranks behind relays."""

    relays: list[Relay]

    def introduce(self) -> None:
        self.relays = getattr(self, "relays", [])
        for engine in self.engines.values():
            engine.card = self._behind_relays(engine.card)
        super().introduce()

    def _behind_relays(self, card: EngineCard) -> EngineCard:
        """The card with addresses of relays."""
        blobs = []
        for blob in card.rank_blobs:
            address = msgspec.msgpack.decode(blob, type=Address)
            relay = Relay(f"\0{address.unix_name}" if self._uses_unix else (address.host, address.port))
            relay.__enter__()
            self.relays.append(relay)
            blobs.append(msgspec.msgpack.encode(_moved(address, relay)))
        return msgspec.structs.replace(card, rank_blobs=blobs)

    @property
    def _uses_unix(self) -> bool:
        return self.setting.options["sockets"] == "unix"

    def kill_all(self) -> None:
        super().kill_all()
        for relay in getattr(self, "relays", ()):
            relay.__exit__()


def _moved(address: Address, relay: Relay) -> Address:
    if isinstance(relay.address, str):
        return msgspec.structs.replace(address, unix_name=relay.address[1:])
    host, port = relay.address
    return msgspec.structs.replace(address, host=host, port=port)


class Flight:
    """Trials on one way, between engines of some ranks. Made by `flights`."""

    def __init__(self, name: str, world: World, ranks: tuple[int, int], seed: int) -> None:
        self._name = name
        self._world = world
        self._ranks = ranks
        self._seed = seed
        for engine in world.engines.values():
            engine.ask_all(HostedRank.instrument, False)  # what it would find out has a case of its own
        self._others = [Handover(world, 48, order=self._first_order()) for _ in range(NUM_OTHERS)]
        for other in self._others:
            other.run() if other.is_push else other.prefill()

    def _first_order(self) -> str:
        return legal_orders(self._world)[0]

    def run(self, damage: str, num_trials: int) -> FlightReport:
        """Damage until so many trials had some; each tenth one has none."""
        report = FlightReport(self._name, self._ranks, damage, self._seed)
        self._rng = random.Random(f"{self._seed} {report.name}")
        most, number = 3 * num_trials + 10, 0
        while report.num_trials < num_trials and len(report.violations) < 5 and number < most:
            count = 1 if damage.startswith("wire") else min(BATCH, num_trials - report.num_trials + 1)
            self._fly(report, damage, [(number + i) % 10 > 0 for i in range(count)])
            number += count
        if report.num_trials < num_trials and not report.violations:
            report.violations.append(f"only {report.num_trials} of {number} trials were damaged")
        return report

    def close(self) -> None:
        """All blocks come back."""
        for other in self._others:
            other.end()

    def _fly(self, report: FlightReport, damage: str, are_damaged: Sequence[bool]) -> None:
        """So many trials at once, in one order and one length of chunks."""
        order, chunk = self._rng.choice(legal_orders(self._world)), self._rng.choice([0, 16, 48, 64])
        trials = [self._trial(order) for _ in are_damaged]
        batch = Batch(trials, chunk=chunk or MAX_TOKENS, is_told=WAYS[self._name].is_pull)
        victims = [trial for trial, is_damaged in zip(trials, are_damaged, strict=True) if is_damaged]
        with self._damaged(damage, batch, victims) as struck:
            batch.take()
            outcomes = self._wait(batch)
            hit = struck()
        for trial, outcome in zip(trials, outcomes, strict=True):
            self._judge(report, damage, trial, f"chunks of {chunk}: {outcome.code!r}", outcome, trial in hit)
            trial.end()

    def _trial(self, order: str) -> Handover:
        num_tokens = self._rng.randint(1, MAX_TOKENS)
        num_hit = self._rng.choice([0, 0, self._rng.randint(0, (num_tokens - 1) // self._world.consumer.block_size)])
        return Handover(self._world, num_tokens, order=order, num_hit_blocks=num_hit)

    def _judge(
        self, report: FlightReport, damage: str, trial: Handover, what: str, outcome: TransferOutcome, is_hit: bool
    ) -> None:
        what = f"{trial.describe()}, {what}"
        codes = set(trial.consumer.built.error_codes) - {"transfer_error"}
        if trial.wrong and not outcome.code:
            report.violations.append(f"{what} and {trial.wrong}")
        elif not is_hit and outcome.code:
            report.violations.append(f"without any damage {what}")
        elif outcome.code and outcome.code not in codes:
            report.violations.append(f"{what} is no type")
        elif is_hit and not outcome.code and damage not in MAY_END_WELL:
            report.violations.append(f"{what}: nobody has met the damage")
        report.num_trials += is_hit
        report.num_sound += not is_hit
        report.num_right += is_hit and not outcome.code and not trial.wrong
        if is_hit and outcome.code:
            report.found[outcome.code] = report.found.get(outcome.code, 0) + 1

    def _wait(self, batch: Batch) -> list[TransferOutcome]:
        """The loads' ends. Where the sending has failed a load is given up, as the router has it."""
        sent = self._world.producer.sent
        loads = [trial for trial in batch.trials if trial.num_external]

        def ends(trial: Handover) -> bool:
            return trial.ended or bool(sent.get(trial.key, TransferOutcome()).code)

        self._world.until(lambda: all(map(ends, loads)), "all loads, or what is sent to them, have ended")
        for trial in loads:
            if not trial.ended:
                trial.consumer.end_load(trial.receiver)
        return [trial.wait() for trial in batch.trials]

    @contextmanager
    def _damaged(self, damage: str, batch: Batch, victims: Sequence[Handover]) -> Iterator[Callable[[], Struck]]:
        """These are damaged once each; the function says which really were."""
        if not victims:
            yield lambda: ()
        elif damage.startswith("wire"):
            with self._meddling(damage, victims) as struck:
                yield struck
        elif damage.startswith("stale"):
            late = damage == "stale late"
            batch.after("start" if late else "hand_off", lambda: self._reuse(victims))
            yield lambda: victims
        else:
            with self._spoilt(damage, batch, victims) as struck:
                yield struck

    @contextmanager
    def _spoilt(self, damage: str, batch: Batch, victims: Sequence[Handover]) -> Iterator[Callable[[], Struck]]:
        """The source's blocks of what is read or, where it gets lost, those that it is read into."""
        is_lost = damage == "lost"
        engine = self._world.consumer if is_lost else self._world.producer
        step = "begin_prefill" if not is_lost else "reserve" if batch.order == "decode_first" else "allocate"
        ask, seed = self._rng.choice(engine.hosts).ask, self._rng.getrandbits(32)

        def spoil() -> None:
            requests = [trial.receiver if is_lost else trial.sender for trial in victims]
            targets = [
                list(request.held_blocks(trial.num_hit_blocks))
                for trial, request in zip(victims, requests, strict=True)
            ]
            ask(engine.name, HostedRank.spoil, engine.timeout_s, damage, seed, targets)  # type: ignore[arg-type]

        batch.after(step, spoil)
        yield lambda: [victims[i] for i in ask(engine.name, HostedRank.unspoil, engine.timeout_s).targets]

    @contextmanager
    def _meddling(self, damage: str, victims: Sequence[Handover]) -> Iterator[Callable[[], Struck]]:
        assert isinstance(self._world, RelayedWorld)
        relays = self._world.relays
        before = sum(relay.num_done for relay in relays)
        (trial,) = victims
        num_tokens = trial.num_tokens - trial.num_hit_blocks * self._world.consumer.block_size
        most = 8 * (self._world.consumer.layout.token_bytes * num_tokens + FRAMES_BYTES)
        for relay in relays:
            relay.arm("flip" if damage == "wire flip" else "cut", self._rng.randrange(most))
        yield lambda: victims if sum(relay.num_done for relay in relays) > before else ()
        for relay in relays:
            relay.disarm()

    def _reuse(self, victims: Sequence[Handover]) -> None:
        """Behind the hand-off a block of each that is read is another request's, in another generation."""
        producer = self._world.producer
        blocks = [self._rng.choice(trial.leased[trial.num_hit_blocks :]) for trial in victims]
        producer.table.reuse_all(blocks)
        everything = p.TokenRange([], 0, len(blocks) * producer.block_size, [blocks])
        producer.ask_all(HostedRank.fill, everything)


@contextmanager
def flights(name: str, ranks: tuple[int, int], *, zygote: Zygote, directory: Path, seed: int) -> Iterator[Flight]:
    """Two engines on one of WAYS. Raises Refused where the connector refuses such ranks."""
    way = WAYS[name]
    setting = Setting(
        zygote=zygote, directory=directory, connector=way.connector, options=dict(way.options),
        one_process=way.one_process,
    )  # fmt: skip
    world_type = RelayedWorld if way.relayed else World
    shapes = [Shape(tp=tp, num_blocks=NUM_BLOCKS, num_layers=2) for tp in ranks]
    with ExitStack() as stack:
        world = stack.enter_context(world_type(setting, *shapes))
        flight = Flight(name, world, ranks, seed)
        yield flight
        flight.close()
