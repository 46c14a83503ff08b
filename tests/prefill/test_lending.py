"""What one engine has cached is read by another one that runs a longer prompt: leased, counted, or computed after all.

The stand-in's tokens depend on the KV in the blocks, so a wrong byte is a wrong token.
"""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from typing import Any

import msgspec
import pytest
from state_machine.standin_store import STAND_IN_STORE, store_of

from pdkv.config import HandoffConfig
from pdkv.connectors.base import TransferKey
from pdkv.connectors.memory.fabric import MemoryFabric
from pdkv.connectors.multi.wire import decode_handoff
from pdkv.engine.scheduler import SchedulerLimits
from pdkv.testing.engine import at_rest, make_core, of_type, output_of, run, submit
from pdkv.testing.standin import expected_tokens
from pdkv.wire.kv import KVGroup, KVHandoff
from pdkv.wire.messages import (
    Allocated,
    EngineToRouter,
    Failed,
    HandedOff,
    KVReady,
    KVTicket,
    Loaded,
    Peers,
    Release,
    Submit,
)
from pdkv.wire.reports import SourceCounts

FIRST = list(range(100, 110))
ANSWER = expected_tokens(FIRST, 10)
SECOND = [*FIRST, *ANSWER, *range(120, 125)]
"""The next turn: 25 tokens, of which the first engine has 16 in whole blocks of 4: its last token has no KV."""
NUM_LENT = 16
NAMES = (f"lending-{i}" for i in count())

MODES = ["pull", "push", "pull+store", "store+push"]
"""One connector, or several as one; a store is the engine's alone, so what others have is not found there."""


def options_of(mode: str, fabric: str, engine: str) -> dict[str, str]:
    """Those of a connector, or of `multi`."""
    children = mode.split("+")
    if len(children) == 1:
        return {"fabric": fabric, "mode": mode}
    options = {"connectors": ",".join(STAND_IN_STORE if child == "store" else "memory" for child in children)}
    for i, child in enumerate(children):
        options[f"{i}.mode"] = child
        options[f"{i}.fabric"] = f"{fabric}-{engine}" if child == "store" else fabric
    return options


class Turns:
    """An engine that has run the first turn, and one that gets the second and has nothing of it."""

    def __init__(
        self, mode: str, num_blocks: int = 16, limits: SchedulerLimits | None = None, groups: tuple[KVGroup, ...] = ()
    ) -> None:
        self.now = 1.0
        self.name = next(NAMES)
        self.fabric = MemoryFabric(manual=True, clock=lambda: self.now)
        MemoryFabric.bind(self.name, self.fabric)
        handoff = HandoffConfig(connector="memory", kv_load_timeout_s=5.0, lease_timeout_s=20.0)
        make = partial(
            make_core,
            connector="multi" if "+" in mode else "memory",
            handoff=handoff,
            num_blocks=num_blocks,
            groups=groups,
            max_model_len=60 if groups else None,
        )
        self.make = lambda name, **own: make(name=name, options=options_of(mode, self.name, name), **own)
        self.lender, self.borrower = self.make("d", limits=limits), self.make("p")
        for core in (self.lender, self.borrower):
            core.handle("r", Peers([self.lender.card, self.borrower.card]), 0.0)
        self.lender.handle("r", submit(FIRST, request_id="first", max_tokens=10), 0.0)
        assert groups or output_of(self.run_lender(), "first") == ANSWER
        self.run_lender()

    def run_lender(self) -> list[EngineToRouter]:
        return run(self.lender, self.now)

    def ask(self, prompt: list[int] = SECOND, **fields: object) -> list[EngineToRouter]:
        """The router asks the lender; what that says."""
        self.lender.handle("r", self.question(prompt, **fields), self.now)
        return self.run_lender()

    def question(self, prompt: list[int], **fields: object) -> Submit:
        """Of the router."""
        asked = submit(prompt, request_id="loan", until="cached", kv="handoff", **fields)
        return msgspec.structs.replace(asked, transfer_id="t-a")

    def lend(self, prompt: list[int] = SECOND) -> KVHandoff:
        """What it hands off of the second turn."""
        (handed,) = of_type(self.ask(prompt), HandedOff)
        return handed.handoff

    def borrow(self, handoff: KVHandoff, prompt: list[int] = SECOND, **fields: object) -> list[EngineToRouter]:
        """The second turn comes to the borrower; the router passes its ticket on."""
        asked: Submit = submit(prompt, until="first_token", kv="handoff", handoff=handoff, **fields)
        self.borrower.handle("r", asked, self.now)
        said = run(self.borrower, self.now)
        for message in said:
            if isinstance(message, Allocated) and message.ticket is not None:
                self.lender.handle("r", KVTicket("loan", 0, message.ticket), self.now)
        return said

    def finish(self) -> list[EngineToRouter]:
        """All that is under way arrives; what the borrower says to its end."""
        said: list[EngineToRouter] = []
        for _ in range(4):
            for answer in self.run_lender():
                if isinstance(answer, KVReady) and not answer.ok:
                    self.borrower.handle("r", KVReady("a", 0, ok=False, code=answer.code), self.now)
            while self.fabric.under_way:
                self.fabric.deliver(0)
            for core in (self.lender, self.borrower):
                core.wake()
            said += run(self.borrower, self.now)
        return said

    def check_second(self, said: list[EngineToRouter], sources: SourceCounts) -> None:
        """The right first token, counted by source; nothing is left when both leases are over."""
        assert output_of(said, "a") == expected_tokens(SECOND, 1)
        (handed,) = of_type(said, HandedOff)
        assert handed.sources == sources
        self.lender.handle("r", Release("t-a", 0, lent=True), self.now)
        self.borrower.handle("r", Release("t-a", 0), self.now)
        self.run_lender()
        run(self.borrower, self.now)
        assert at_rest(self.lender)
        assert at_rest(self.borrower)


@pytest.fixture
def make_turns() -> Iterator[Callable[..., Turns]]:
    made: list[Turns] = []

    def make(mode: str, **options: Any) -> Turns:
        made.append(Turns(mode, **options))
        return made[-1]

    yield make
    for turns in made:
        MemoryFabric.unbind(turns.name)


@pytest.mark.parametrize("mode", MODES)
def test_the_next_turn_computes_what_is_new_and_reads_the_rest(make_turns: Callable[..., Turns], mode: str) -> None:
    turns = make_turns(mode)
    handoff = turns.lend()
    assert (handoff.engine, handoff.num_tokens) == ("d", NUM_LENT)
    assert turns.lender.scheduler.kv.pool.counts().leased == NUM_LENT // 4
    said = turns.borrow(handoff) + turns.finish()
    (loaded,) = of_type(said, Loaded)
    assert loaded.ok
    turns.check_second(said, SourceCounts(computed=len(SECOND) - NUM_LENT, store=NUM_LENT))


def test_a_store_has_no_part_in_a_loan(make_turns: Callable[..., Turns]) -> None:
    """What was evicted from it is not saved again, and the hand-off has nothing for it."""
    turns = make_turns("pull+store")
    store = store_of(MemoryFabric.named(f"{turns.name}-d"))
    for name, _ in store.blocks():
        store.discard(name)
    handoff = turns.lend()
    lent, stored = decode_handoff(handoff.payload, 2) or ()
    assert lent
    assert stored is None
    assert not of_type(turns.run_lender(), KVReady)
    assert len(store) == 0


def stored_too(turns: Turns, num_blocks: int, reader: str = "p") -> None:
    """The borrower's store has the first blocks of what the lender computed."""
    blocks = store_of(MemoryFabric.named(f"{turns.name}-d")).blocks()
    for name, content in blocks[:num_blocks]:
        store_of(MemoryFabric.named(f"{turns.name}-{reader}")).put(name, content)


def evict(turns: Turns) -> None:
    """All that the lender had."""
    turns.lender.handle("r", Release("t-a", 0, lent=True), turns.now)
    turns.lender.handle("r", submit(list(range(200, 255)), request_id="other", max_tokens=4), turns.now)
    turns.run_lender()


@pytest.mark.parametrize("num_stored", [12, NUM_LENT], ids=["less than was lent", "as much"])
def test_a_loan_whose_load_fails_leaves_what_a_store_has(make_turns: Callable[..., Turns], num_stored: int) -> None:
    """The store is asked anew: its load is not the lender's, of which only the failure is told."""
    turns = make_turns("pull+store")
    stored_too(turns, num_stored // 4)
    handoff = turns.lend()
    evict(turns)
    said = turns.borrow(handoff) + turns.finish()
    (loaded,) = of_type(said, Loaded)
    assert not loaded.ok
    turns.check_second(said, SourceCounts(store=num_stored, recomputed=len(SECOND) - num_stored))


def test_a_loan_that_ends_when_it_was_given_up_does_not_cancel_the_load_after_it(
    make_turns: Callable[..., Turns],
) -> None:
    """Its end comes before the cancel was sent; the store's load has the same name."""
    turns = make_turns("pull+store")
    stored_too(turns, 3)
    said = turns.borrow(turns.lend(), load_timeout_s=0.5)
    turns.now += 0.6
    turns.borrower.expire(turns.now)
    turns.fabric.deliver(0)
    turns.borrower.wake()
    said += turns.finish()
    turns.check_second(said, SourceCounts(store=12, recomputed=len(SECOND) - 12))


def test_a_store_that_is_read_instead_has_its_own_deadline_and_outlives_the_lender(
    make_turns: Callable[..., Turns],
) -> None:
    turns = make_turns("store+pull")
    slow = MemoryFabric(manual=True, clock=lambda: turns.now)
    MemoryFabric.bind(f"{turns.name}-q", slow)
    turns.borrower = turns.make("q")
    for core in (turns.lender, turns.borrower):
        core.handle("r", Peers([turns.lender.card, turns.borrower.card]), turns.now)
    stored_too(turns, 4, "q")
    said = turns.borrow(turns.lend(), load_timeout_s=0.5)
    turns.now += 0.6
    turns.borrower.expire(turns.now)
    turns.borrower.handle("r", KVReady("a", 0, ok=False, code="peer_gone"), turns.now)
    while slow.under_way:
        slow.deliver(0)
    turns.borrower.wake()
    said += turns.finish()
    assert of_type(said, Loaded) == [], "it is no load of the lender's"
    turns.check_second(said, SourceCounts(computed=len(SECOND) - NUM_LENT, store=NUM_LENT))
    MemoryFabric.unbind(f"{turns.name}-q")


def test_where_nothing_is_lent_a_store_is_asked(make_turns: Callable[..., Turns]) -> None:
    """The borrower does not know the lender; its store has what the lender computed."""
    turns = make_turns("pull+store")
    stored_too(turns, 4)
    handoff = msgspec.structs.replace(turns.lend(), epoch="another")
    sources = SourceCounts(computed=len(SECOND) - NUM_LENT, store=NUM_LENT)
    turns.check_second(turns.borrow(handoff) + turns.finish(), sources)


@pytest.mark.parametrize(
    ("mode", "code"),
    [
        ("pull", "stale_generation"),
        ("push", "kv_not_found"),
        ("store+pull", "stale_generation"),
        ("push+store", "kv_not_found"),
    ],
)
def test_what_was_evicted_meanwhile_is_a_counted_miss(make_turns: Callable[..., Turns], mode: str, code: str) -> None:
    turns = make_turns(mode)
    handoff = turns.lend()
    evict(turns)
    said = turns.borrow(handoff) + turns.finish()
    (loaded,) = of_type(said, Loaded)
    assert (loaded.ok, loaded.code) == (False, code)
    assert turns.borrower.decode.counts().num_failures + turns.borrower.decode.counts().num_partial == 1
    turns.check_second(said, SourceCounts(recomputed=len(SECOND)))


@pytest.mark.parametrize("mode", MODES)
def test_a_load_that_takes_longer_than_the_router_allows_is_computed(
    make_turns: Callable[..., Turns], mode: str
) -> None:
    turns = make_turns(mode)
    turns.borrow(turns.lend(), load_timeout_s=0.5)
    turns.now += 0.6  # far less than any load's deadline
    turns.borrower.expire(turns.now)
    said = turns.finish()
    (loaded,) = of_type(said, Loaded)
    assert (loaded.ok, loaded.code) == (False, "transfer_timeout")
    turns.check_second(said, SourceCounts(recomputed=len(SECOND)))


def test_a_loan_that_is_given_up_leaves_what_its_borrower_hands_over_alone(make_turns: Callable[..., Turns]) -> None:
    """Both have the name of the request's attempt. The borrower's own hit is on its way when the loan's time is up."""
    turns = make_turns("push")
    reader = turns.make("e")
    for core in (turns.lender, turns.borrower, reader):
        core.handle("r", Peers([c.card for c in (turns.lender, turns.borrower, reader)]), turns.now)
    turns.borrower.handle("r", submit(FIRST, request_id="hit", max_tokens=1), turns.now)
    run(turns.borrower, turns.now)
    reader.handle("r", submit(SECOND, kv="await_peer"), turns.now)
    (wanted,) = of_type(run(reader, turns.now), Allocated)
    assert wanted.ticket is not None
    said = turns.borrow(turns.lend(), load_timeout_s=0.5)
    turns.borrower.handle("r", KVTicket("a", 0, wanted.ticket), turns.now)
    said += run(turns.borrower, turns.now)
    assert turns.borrower.external.has_saves(TransferKey("t-a", 0))
    turns.now += 0.6
    turns.borrower.expire(turns.now)
    said += turns.finish()
    (loaded,) = of_type(said, Loaded)
    assert loaded.code == "transfer_timeout"
    assert [m.ok for m in of_type(said, KVReady) if isinstance(m, KVReady)] == [True]
    hit = len(FIRST) // 4 * 4
    turns.check_second(said, SourceCounts(recomputed=len(SECOND) - hit, local_hit=hit))


def test_an_engine_that_does_not_know_the_lender_computes(make_turns: Callable[..., Turns]) -> None:
    for mode in MODES:
        turns = make_turns(mode)
        handoff = msgspec.structs.replace(turns.lend(), epoch="another")
        turns.check_second(turns.borrow(handoff) + turns.finish(), SourceCounts(computed=len(SECOND)))


def test_a_loan_ends_by_itself_sooner_than_other_leases(make_turns: Callable[..., Turns]) -> None:
    turns = make_turns("pull")
    turns.lender.handle("r", submit(FIRST, request_id="b", until="first_token", kv="handoff"), turns.now)
    turns.run_lender()
    turns.ask(timeout_s=3.0)
    assert turns.lender.next_deadline() == turns.now + 3.0
    turns.lender.step(turns.now + 3.0)
    assert turns.lender.prefill.holds(TransferKey("t-b", 0))
    assert not turns.lender.prefill.holds(TransferKey("t-a", 0, lent=True))


@pytest.mark.parametrize("mode", ["push", "push+store"])
def test_a_borrower_hears_that_the_lease_ended_before_all_was_sent(make_turns: Callable[..., Turns], mode: str) -> None:
    turns = make_turns(mode)
    (handed,) = of_type(turns.ask(timeout_s=3.0), HandedOff)
    said = turns.borrow(handed.handoff)
    turns.run_lender()  # sends, and nothing arrives
    turns.now += 3.0
    turns.lender.step(turns.now)
    said += turns.finish()
    (loaded,) = of_type(said, Loaded)
    assert (loaded.ok, loaded.code) == (False, "transfer_timeout")
    turns.check_second(said, SourceCounts(recomputed=len(SECOND)))


@pytest.mark.parametrize(
    ("prompt", "num_blocks", "is_leasing", "reason"),
    [
        (list(range(60, 80)), 16, False, "nothing of it"),
        (SECOND, 7, True, "too much is leased"),
        (SECOND, 7, False, "too much is leased"),
    ],
    ids=["not cached", "beside another lease", "too long by itself"],
)
def test_what_cannot_be_lent_is_said_at_once(
    make_turns: Callable[..., Turns], prompt: list[int], num_blocks: int, is_leasing: bool, reason: str
) -> None:
    """Half of the blocks may be leased."""
    turns = make_turns("pull", num_blocks=num_blocks)
    if is_leasing:
        turns.lender.handle("r", submit([7, 8], request_id="b", until="first_token", kv="handoff"), turns.now)
        turns.run_lender()
    (failed,) = of_type(turns.ask(prompt), Failed)
    assert failed.code == "kv_not_found"
    assert reason in failed.message


def test_what_is_confirmed_of_a_prompt_is_lent_while_the_rest_is_computed(make_turns: Callable[..., Turns]) -> None:
    turns = make_turns("pull", limits=SchedulerLimits(8, 8))
    prompt = list(range(60, 90))
    turns.lender.handle("r", submit(prompt, request_id="long", max_tokens=2), turns.now)
    for _ in range(2):
        turns.lender.step(turns.now)
    turns.lender.take_messages(turns.now)
    turns.lender.handle("r", turns.question(prompt), turns.now)
    said = [message for _, sent in turns.lender.take_messages(turns.now) for message in sent]
    assert of_type(said, HandedOff)


@pytest.mark.parametrize("change", [{"transfer_id": "t-b"}, {"lent": False}], ids=["transfer", "lent"])
def test_a_hand_off_must_be_one_that_was_lent_to_this_request(
    make_turns: Callable[..., Turns], change: dict[str, object]
) -> None:
    turns = make_turns("pull")
    foreign = msgspec.structs.replace(turns.lend(), **change)
    (failed,) = of_type(turns.borrow(foreign), Failed)
    assert failed.param == "handoff"


@pytest.mark.parametrize(
    "groups", [(KVGroup((0,)), KVGroup((1,), 6)), (KVGroup((0, 1), 6),)], ids=["full+window", "window"]
)
@pytest.mark.parametrize("mode", ["pull", "push"])
def test_of_layers_with_a_window_what_the_next_token_sees_is_lent(
    make_turns: Callable[..., Turns], mode: str, groups: tuple[KVGroup, ...]
) -> None:
    windows = [next(group.window for group in groups if layer in group.layers) for layer in range(2)]
    turns = make_turns(mode, num_blocks=40, groups=groups)
    second = [*FIRST, *expected_tokens(FIRST, 10, windows), *range(120, 125)]
    said = turns.borrow(turns.lend(second), second) + turns.finish()
    assert output_of(said, "a") == expected_tokens(second, 1, windows)
    (handed,) = of_type(said, HandedOff)
    assert handed.sources == SourceCounts(computed=len(second) - NUM_LENT, store=NUM_LENT)
