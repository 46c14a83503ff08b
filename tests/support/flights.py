"""KV that is damaged between two engines: over each transport, between engines of equal and unequal ranks.

A trial hands one prompt over, of a length, in an order and in chunks that its seed draws, and damages it once on its
way. Its load must fail with an error's code, or what has arrived must be right: the damage was beside what was loaded.
"""

import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

import msgspec
from relay import Relay

from pdkv.connector_kit.rig import protocol as p
from pdkv.connector_kit.rig.engine import Engine
from pdkv.connector_kit.rig.handover import Handover, legal_orders
from pdkv.connector_kit.rig.processes import Zygote
from pdkv.connector_kit.rig.world import Setting, Shape, World
from pdkv.connectors.base import TransferOutcome
from pdkv.connectors.p2p.wire import Address, read_address
from pdkv.wire.messages import EngineCard

MAX_TOKENS = 130
NUM_OTHERS = 3
"""Prompts of others whose KV lies in the producer's pool meanwhile."""

RANKS: Sequence[tuple[int, int]] = ((1, 1), (1, 2), (2, 1))
"""Of the producer and the consumer."""


class Way(NamedTuple):
    """How KV travels."""

    connector: str
    options: Mapping[str, str] = {}
    one_process: bool = False
    is_pull: bool = False
    digests_as_it_copies: bool = False  # in one pass: then nothing can be digested that has not arrived
    relayed: bool = False  # the peer is found by an address that a relay can stand in for


WAYS: Mapping[str, Way] = {
    "memory pull": Way("memory", {"mode": "pull"}, one_process=True, is_pull=True),
    "memory push": Way("memory", {"mode": "push"}, one_process=True),
    "shared_memory": Way("shared_memory", is_pull=True, digests_as_it_copies=True),
    **{
        f"nixl pull {path}": Way("nixl", {"mode": "pull", "path": path}, is_pull=True, digests_as_it_copies=True)
        for path in ("arena", "cma", "ucx")
    },
    **{f"nixl push {path}": Way("nixl", {"mode": "push", "path": path}) for path in ("arena", "cma", "ucx")},
    **{f"p2p {sockets}": Way("p2p", {"sockets": sockets}, relayed=True) for sockets in ("unix", "tcp")},
}

DAMAGES: Sequence[str] = ("flip", "swap", "foreign", "lost", "stale", "wire flip", "wire cut")
"""One bit; two hash blocks of the transfer in each other's place; one in that of another prompt's; an end that is said
to have arrived and has not; a block that the source has reused behind the hand-off; a bit of all that the sender says
on its sockets, frames and greetings too; the end of a connection anywhere."""


def damages_of(way: Way) -> list[str]:
    """Those that there can be."""
    there = {
        "lost": not way.digests_as_it_copies, "stale": way.is_pull, "wire flip": way.relayed, "wire cut": way.relayed,
    }  # fmt: skip
    return [damage for damage in DAMAGES if there.get(damage, True)]


class FlightReport(msgspec.Struct):
    """What has become of the trials of one kind of damage on one way between engines of some ranks."""

    way: str
    ranks: tuple[int, int]
    damage: str
    num_trials: int = 0  # in which something was damaged
    found: Counter[str] = msgspec.field(default_factory=Counter)  # by the code of the load's failure
    num_beside: int = 0  # the load ended well, with the right bytes
    num_sound: int = 0  # trials without damage, all of which must end well
    violations: list[str] = []

    def __str__(self) -> str:
        codes = ", ".join(f"{code} {count}" for code, count in sorted(self.found.items()))
        verdict = f"{len(self.violations)} VIOLATIONS: {self.violations[:3]}" if self.violations else "no wrong byte"
        return (
            f"{self.way} TP{self.ranks[0]}→TP{self.ranks[1]} {self.damage}: {self.num_trials} damaged, found "
            f"{self.found.total()} ({codes}), {self.num_beside} beside what was loaded; {self.num_sound} sound; "
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
            address = read_address(blob)
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
        self._rng = random.Random(f"{seed} {name} {ranks}")
        for engine in world.engines.values():
            engine.ask_all(p.Instrument(False), p.Done)  # what it would find out has a case of its own
        self._others = [Handover(world, 48, order=self._first_order()) for _ in range(NUM_OTHERS)]
        for other in self._others:
            other.run() if other.is_push else other.prefill()

    def _first_order(self) -> str:
        return legal_orders(self._world)[0]

    def run(self, damage: str, num_trials: int) -> FlightReport:
        """Damage until so many trials had some; each fifth one has none."""
        report = FlightReport(self._name, self._ranks, damage)
        most = 3 * num_trials + 10
        for number in range(most):
            if report.num_trials >= num_trials or len(report.violations) >= 5:
                return report
            self._trial(report, damage if number % 5 else "")
        report.violations.append(f"only {report.num_trials} of {most} trials were damaged")
        return report

    def close(self) -> None:
        """All blocks come back."""
        for other in self._others:
            other.end()

    def _trial(self, report: FlightReport, damage: str) -> None:
        rng, world = self._rng, self._world
        num_tokens = rng.randint(1, MAX_TOKENS)
        num_hit = rng.choice([0, 0, rng.randint(0, (num_tokens - 1) // world.consumer.block_size)])
        transfer = Handover(
            world, num_tokens, order=rng.choice(legal_orders(world)), chunk=rng.choice([0, 16, 48, 64]),
            num_hit_blocks=num_hit, is_told=WAYS[self._name].is_pull,
        )  # fmt: skip
        with self._damaged(damage, transfer) as count:
            transfer.take()
            outcome = self._wait(transfer)
            num_done = count()
        what = f"{transfer.describe()}, chunks of {transfer.chunk}: {outcome.code!r}"
        if transfer.wrong and not outcome.code:
            report.violations.append(f"{what} and {transfer.wrong}")
        elif not num_done and outcome.code:
            report.violations.append(f"without any damage {what}")
        elif outcome.code not in ("", *transfer.consumer.built.error_codes) or outcome.code == "transfer_error":
            report.violations.append(f"{what} is no type")
        report.num_trials += bool(num_done)
        report.num_sound += not num_done
        report.num_beside += bool(num_done and not outcome.code and not transfer.wrong)
        report.found.update([outcome.code] if num_done and outcome.code else [])
        transfer.end()

    def _wait(self, transfer: Handover) -> TransferOutcome:
        """The load's end. Where the sending has failed the load is given up, as the router has it."""
        if not transfer.num_external:
            return transfer.wait()
        sent = transfer.producer.sent
        what = f"an end of {transfer.describe()}"
        self._world.until(lambda: transfer.ended or bool(sent.get(transfer.key, TransferOutcome()).code), what)
        if not transfer.ended:
            transfer.consumer.end_load(transfer.receiver)
        return transfer.wait()

    @contextmanager
    def _damaged(self, damage: str, transfer: Handover) -> Iterator[Callable[[], int]]:
        """The transfer is damaged once; the function says how often it was."""
        if damage.startswith("wire"):
            with self._meddling(damage) as count:
                yield count
        elif damage == "stale":
            yield self._reuse_later(transfer)
        elif damage:
            engine = self._world.consumer if damage == "lost" else self._world.producer
            with self._spoilt(engine, damage) as count:
                yield count
        else:
            yield lambda: 0

    @contextmanager
    def _spoilt(self, engine: Engine, damage: str) -> Iterator[Callable[[], int]]:
        rank = self._rng.randrange(len(engine.hosts))
        engine.ask(p.Spoil(damage, self._rng.getrandbits(32)), p.Done, rank=rank)  # type: ignore[arg-type]
        yield lambda: engine.ask(p.Unspoil(), p.Spoilt, rank=rank).count

    @contextmanager
    def _meddling(self, damage: str) -> Iterator[Callable[[], int]]:
        assert isinstance(self._world, RelayedWorld)
        relays = self._world.relays
        before = sum(relay.num_done for relay in relays)
        most = 8 * self._world.consumer.layout.token_bytes * MAX_TOKENS
        for relay in relays:
            relay.arm("flip" if damage == "wire flip" else "cut", self._rng.randrange(most))
        yield lambda: sum(relay.num_done for relay in relays) - before
        for relay in relays:
            relay.disarm()

    def _reuse_later(self, transfer: Handover) -> Callable[[], int]:
        """Behind the hand-off a block of it is another request's, in another generation."""
        done: list[int] = []
        hand_off = transfer.hand_off

        def hand_off_and_reuse() -> None:
            hand_off()
            producer, block = transfer.producer, self._rng.choice(transfer.leased)
            producer.reuse([block])
            producer.ask_all(p.Fill(p.TokenRange([], 0, producer.block_size, [[block]])), p.Done)
            done.append(block)

        transfer.hand_off = hand_off_and_reuse  # type: ignore[method-assign]
        return lambda: len(done)


@contextmanager
def flights(name: str, ranks: tuple[int, int], *, zygote: Zygote, directory: Path, seed: int) -> Iterator[Flight]:
    """Two engines on one of WAYS. Raises Refused where the connector refuses such ranks."""
    way = WAYS[name]
    setting = Setting(
        zygote=zygote, directory=directory, connector=way.connector, options=dict(way.options),
        one_process=way.one_process,
    )  # fmt: skip
    world_type = RelayedWorld if way.relayed else World
    shapes = [Shape(tp=tp, num_blocks=96, num_layers=2) for tp in ranks]
    with ExitStack() as stack:
        world = stack.enter_context(world_type(setting, *shapes))
        flight = Flight(name, world, ranks, seed)
        yield flight
        flight.close()
