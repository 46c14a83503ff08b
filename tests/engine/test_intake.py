"""Messages keep their order while a thread hashes long prompts; what it found is what the engine would have found."""

import threading
from functools import partial

import pytest

from pdkv.engine.intake import MIN_TOKENS, Arrival, Intake, Prepared, prepare
from pdkv.errors import InvalidRequest
from pdkv.testing.engine import make_core, output_of, run, submit
from pdkv.wire.messages import Abort, Failed, Submit

LONG = submit([5] * MIN_TOKENS, request_id="long")
SHORT = submit([5] * 8, request_id="short")
PREPARED = Prepared(b"root", [b"key"], 5, 5)
WAIT_S = 20.0


class Gate:
    """Prepares a Submit when it is let."""

    def __init__(self) -> None:
        self.opened = threading.Event()
        self.notified = threading.Semaphore(0)
        self.intake = Intake(self.prepare, self.notified.release)

    def prepare(self, submit: Submit) -> Prepared:
        assert self.opened.wait(WAIT_S)
        if submit.request_id == "poison":
            raise ValueError("cannot be prepared")
        return PREPARED

    def open(self, num_arrivals: int) -> None:
        """Let it, and wait until that many arrivals are through."""
        self.opened.set()
        for _ in range(num_arrivals):
            assert self.notified.acquire(timeout=WAIT_S)


def test_what_is_short_goes_through_at_once() -> None:
    gate = Gate()
    gate.intake.put("r", SHORT)
    assert gate.intake.take() == [Arrival("r", SHORT)]
    assert gate.intake.is_empty
    gate.intake.close()


def test_nothing_overtakes_a_prompt_that_is_being_hashed() -> None:
    gate = Gate()
    gate.intake.put("r", SHORT)
    gate.intake.put("r", LONG)
    gate.intake.put("r", Abort("long", 0))
    gate.intake.put("s", SHORT)
    assert gate.intake.take() == [Arrival("r", SHORT)]
    assert not gate.intake.is_empty
    gate.open(3)
    assert gate.intake.take() == [Arrival("r", LONG, PREPARED), Arrival("r", Abort("long", 0)), Arrival("s", SHORT)]
    assert gate.intake.is_empty
    gate.intake.put("r", SHORT)
    assert gate.intake.take() == [Arrival("r", SHORT)]
    gate.intake.close()


def test_a_prompt_that_cannot_be_hashed_ahead_comes_as_it_is() -> None:
    gate = Gate()
    poison = submit([5] * MIN_TOKENS, request_id="poison")
    gate.intake.put("r", poison)
    gate.intake.put("r", LONG)
    gate.open(2)
    assert gate.intake.take() == [Arrival("r", poison), Arrival("r", LONG, PREPARED)]
    gate.intake.close()


def test_closing_drops_what_is_under_way() -> None:
    gate = Gate()
    gate.intake.put("r", LONG)
    gate.opened.set()
    gate.intake.close()
    gate.intake.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "intake"]


def test_prepared_or_not_a_prompt_finds_and_brings_the_same() -> None:
    prompt = [7 * i % 1000 for i in range(42)]
    core = make_core(num_blocks=32)
    first = submit(prompt, request_id="a", output_token_ids=[3, 1])
    core.handle("r", first, 0.0, prepare(core.card, first))
    messages = run(core)
    again = submit(prompt, request_id="b", output_token_ids=[3, 1])
    core.handle("r", again, 0.0)
    hit = core.requests["b", 0]
    core.step(0.0)
    assert hit.num_local_hit == 40
    messages += run(core)
    assert output_of(messages, "a") == output_of(messages, "b") != []


@pytest.mark.parametrize("token_id", [-1, 10**6])
def test_a_token_out_of_range_is_refused_prepared_or_not(token_id: int) -> None:
    core = make_core()
    request = submit([1, 2, token_id, 4])
    for prepared in (prepare(core.card, request), None):
        core.handle("r", request, 0.0, prepared)
        (failed,) = [
            m for m in run(core) + [m for _, sent in core.take_messages(0.0) for m in sent] if isinstance(m, Failed)
        ]
        assert (failed.code, failed.param) == (InvalidRequest.code, "prompt")


def test_a_token_beyond_int32_is_the_engines_to_refuse() -> None:
    with pytest.raises(OverflowError):
        partial(prepare, make_core().card)(submit([2**40]))
