"""What the one engine of tests promises: it waits for news, and for the time only where its clock moves by itself."""

import pytest

from pdkv.config import HandoffConfig
from pdkv.testing import VirtualClock, engine
from pdkv.testing.engine import InProcessEngine, SideBySide, of_type, output_of, submit
from pdkv.testing.standin import expected_tokens
from pdkv.wire.messages import Failed, HandedOff, Loaded

PROMPT = list(range(100, 110))


@pytest.mark.parametrize("mode", ["pull", "push"])
def test_two_engines_hand_a_request_over(mode: str) -> None:
    sides = [InProcessEngine.of_stand_in(name=f"over-{role}", options={"mode": mode}) for role in ("p", "d")]
    messages = SideBySide(*sides).hand_over(submit(PROMPT))
    assert [loaded.ok for loaded in of_type(messages, Loaded)] == [True]
    assert output_of(messages, "a") == expected_tokens(PROMPT, 4)[1:]


def test_a_deadline_passes_when_the_test_says_so() -> None:
    clock = VirtualClock()
    handoff = HandoffConfig(connector="memory", kv_load_timeout_s=5.0)
    decode = InProcessEngine.of_stand_in(clock, options={"fabric": "no-peer", "mode": "push"}, handoff=handoff)
    decode.tell(submit(PROMPT, kv="await_peer", timeout_s=60.0))
    assert not of_type(decode.sent, Failed)
    clock.advance(61.0)
    assert [failed.code for failed in of_type(decode.run(), Failed)] == ["timeout"]


def test_what_does_not_come_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "REAL_LIMIT_S", 0.01)
    alone = InProcessEngine.of_stand_in()
    with pytest.raises(TimeoutError, match="engine e0 does not get there"):
        alone.tell_until(HandedOff, submit(PROMPT))
    assert alone.generate([PROMPT]) == [expected_tokens(PROMPT, 4)]
