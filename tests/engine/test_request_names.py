"""What an engine logs about a request names it as its client does, and what it reports says how long it took."""

import logging

import pytest

from pdkv.errors import RequestTimeout
from pdkv.testing.engine import make_core, of_type, run, submit
from pdkv.wire.messages import Finished, HandedOff, Submit

PROMPT = list(range(100, 110))
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
NAME = f"client-7 (attempt 2, trace {TRACE})"


def named(**fields: object) -> Submit:
    """A Submit of a client that named its request and has a trace."""
    traceparent = f"00-{TRACE}-00f067aa0ba902b7-01"
    return submit(PROMPT, attempt=2, label="client-7", traceparent=traceparent, **fields)


def test_a_deadline_that_passes(caplog: pytest.LogCaptureFixture) -> None:
    core = make_core()
    with caplog.at_level(logging.INFO):
        core.handle("r", named(timeout_s=0.5), 1.0)
        core.expire(2.0)
    assert f"request {NAME} failed: {RequestTimeout.code}: the deadline of 0.5 s passed" in caplog.messages


def test_a_message_that_cannot_be_handled(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    core = make_core()
    monkeypatch.setattr(core._book, "submit", lambda *_: 1 // 0)
    core.handle_guarded("r", named(), 1.0)
    assert f"dropped a Submit from router r about {NAME}: " in caplog.text


def test_a_load_that_fails(caplog: pytest.LogCaptureFixture) -> None:
    core = make_core(options={"fabric": "names-load"})
    core.handle("r", named(kv="await_peer", output_token_ids=[7]), 1.0)
    run(core, 1.0)
    core.expire(100.0)
    assert f"KV load of request {NAME} (transfer t-a) failed: transfer_timeout" in caplog.text


def test_a_lease_that_nobody_fetches(caplog: pytest.LogCaptureFixture) -> None:
    core = make_core(options={"fabric": "names-lease"})
    core.handle("r", named(until="first_token", kv="handoff"), 1.0)
    run(core, 1.0)
    core.expire(1000.0)
    assert f"the lease of request {NAME} (transfer t-a) expired" in caplog.text


def test_a_preemption_and_of_many_not_each(caplog: pytest.LogCaptureFixture) -> None:
    core = make_core(num_blocks=9, max_model_len=36)
    with caplog.at_level(logging.INFO):
        core.handle("r", named(max_tokens=24), 0.0)
        core.handle("r", submit(list(range(200, 210)), request_id="b", max_tokens=24, priority=-1), 0.0)
        while core.has_work:
            core.step(0.0)
    assert core.scheduler.num_preemptions > 0
    said = [text for text in caplog.messages if "waits again" in text]
    assert len(said) == 1
    assert said[0].startswith(f"request {NAME} waits again: no KV block was left for more urgent ones (preemption 1 ")


def test_how_long_it_waited_and_ran_is_reported_with_its_end() -> None:
    core = make_core(options={"fabric": "names-times"})
    core.handle("r", named(until="first_token", kv="handoff"), 1.0)
    core.handle("r", submit(PROMPT, request_id="b", max_tokens=1), 2.0)
    output = core.begin_step(3.5)
    core.finish_step(output, 7.5)
    messages = [message for _, sent in core.take_messages(7.5) for message in sent]
    (handed,), (finished,) = of_type(messages, HandedOff), of_type(messages, Finished)
    assert isinstance(finished, Finished)
    assert (handed.queued_s, handed.ran_s) == (2.5, 4.0)
    assert (finished.queued_s, finished.ran_s) == (1.5, 4.0)
