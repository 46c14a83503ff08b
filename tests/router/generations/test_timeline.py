"""What is written down of a generation's way: legs, transfers and times; and that every process hears its names."""

import itertools
import logging

import pytest
from dispatch_rig import System, check_right, collect, live
from scripted_engine import make_request

from pdkv.errors import RequestTimeout
from pdkv.router.generations.timeline import MAX_LEGS, Timeline
from pdkv.wire.messages import Failed, Loaded, Submit

TRACEPARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


def ticking(**options: object) -> System:
    """Every look at the clock is a second later than the last."""
    seconds = itertools.count(100.0)
    return System(1, 1, clock=lambda: next(seconds), **options)


async def test_a_prefill_a_transfer_and_a_decode() -> None:
    async with live(ticking()) as system:
        generation = await check_right(system, make_request())
        timeline = generation.timeline
        assert [(leg.part, leg.engine, leg.attempt, leg.outcome) for leg in timeline.legs] == [
            ("prefill", "prefill-0", 0, "handed_off"),
            ("decode", "decode-0", 0, "length"),
        ]
        prefill, decode = timeline.legs
        (transfer,) = timeline.transfers
        assert (transfer.source, transfer.target, transfer.code) == ("prefill-0", "decode-0", "")
        assert timeline.first_token is not None
        assert prefill.ended is not None
        assert decode.ended is not None
        assert timeline.ended is not None
        assert timeline.began < prefill.began < prefill.ended < decode.began < transfer.ended < decode.ended
        assert prefill.began < timeline.first_token <= prefill.ended
        assert decode.ended <= timeline.ended
        delays = system.dispatcher.delays
        for histogram in (delays.balancing, delays.transfer, delays.transfer_bytes, delays.queue, delays.inference):
            assert histogram.count == 1


async def test_a_retry_is_a_leg_of_its_own_and_its_log_line_names_the_client(caplog: pytest.LogCaptureFixture) -> None:
    async with live(System(2, 1)) as system:
        system.backends["prefill-0"].held = True
        generation = system.dispatcher.start(make_request(label="client-7", traceparent=TRACEPARENT))
        with caplog.at_level(logging.INFO, logger="pdkv"):
            system.backends["prefill-0"].die()
            await collect(generation)
        request = "request client-7 (attempt 0, trace 4bf92f3577b34da6a3ce929d0e0e4736)"
        assert f"{request} continues elsewhere after 0 tokens: " in caplog.text
        assert generation.num_attempts == 2
        assert [(leg.engine, leg.attempt, leg.outcome) for leg in generation.timeline.legs] == [
            ("prefill-0", 0, ""),
            ("prefill-1", 1, "handed_off"),
            ("decode-0", 1, "length"),
        ]
        (submit,) = system.backends["prefill-1"].heard(Submit)
        assert (submit.label, submit.traceparent) == ("client-7", TRACEPARENT)


async def test_a_failed_load_is_logged_with_the_clients_name(caplog: pytest.LogCaptureFixture) -> None:
    async with live(System(1, 1)) as system:
        system.backends["decode-0"].held = True
        generation = system.dispatcher.start(make_request(label="client-7"))
        await anext(generation)
        request_id = generation.request_id
        system.backends["decode-0"].say(Loaded(request_id, 0, False, "stale_generation"))
        system.backends["decode-0"].say(Failed(request_id, 0, RequestTimeout.code, "late", False))
        with pytest.raises(RequestTimeout):
            await collect(generation)
        assert "KV load from prefill-0 to decode-0 for request client-7 (attempt 0) failed" in caplog.text
        assert [t.code for t in generation.timeline.transfers] == ["stale_generation"]
        assert generation.timeline.legs[1].outcome == RequestTimeout.code
        assert system.dispatcher.delays.transfer.count == 0
        system.backends["decode-0"].engine.tasks.clear()


def test_what_is_kept_is_bounded() -> None:
    timeline = Timeline(0.0)
    submit = Submit(request_id="q", transfer_id="t", attempt=0, prompt_token_ids=[1], params=make_request().params)
    for _ in range(10 * MAX_LEGS):
        timeline.sent("e", submit, 1.0)
    assert len(timeline.legs) == MAX_LEGS
