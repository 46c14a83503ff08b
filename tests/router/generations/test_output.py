"""Tokens that pile up are given in parts: a reader that was away for long does not get them all in one callback."""

import asyncio
from typing import Any

import msgspec
import pytest

from pdkv.router.generations.flow import RequestFlow
from pdkv.router.generations.generation import Generation
from pdkv.router.generations.output import MAX_TAKEN, Output
from pdkv.router.request import Delta, GenerateRequest
from pdkv.router.routing.route_chooser import Route
from pdkv.sampling.params import SamplingParams
from pdkv.wire.messages import Finished, TokenLogprob, Tokens
from pdkv.wire.reports import SourceCounts


def request(max_tokens: int) -> GenerateRequest:
    return GenerateRequest(prompt_token_ids=[1, 2], params=SamplingParams(max_tokens=max_tokens), timeout_s=9.0)


def tokens(position: int, count: int) -> Tokens:
    token_ids = list(range(position, position + count))
    logprobs = [TokenLogprob(token_id=i, logprob=-1.0, rank=1) for i in token_ids]
    return Tokens(request_id="r", attempt=0, position=position, token_ids=token_ids, logprobs=logprobs)


def test_a_long_pile_is_taken_in_parts_and_the_end_comes_with_the_last() -> None:
    output = Output(request(3 * MAX_TAKEN))
    for position in range(0, 2 * MAX_TAKEN + 8, 8):
        output.add(tokens(position, 8))
    deltas: list[Delta] = []
    while (delta := output.take("length", 7)) is not None:
        deltas.append(delta)
        assert output.piles_up == (delta.finish_reason is None)
    assert [len(delta.token_ids) for delta in deltas] == [MAX_TAKEN, MAX_TAKEN, 8]
    assert [delta.finish_reason for delta in deltas] == [None, None, "length"]
    assert [delta.stop_token_id for delta in deltas] == [None, None, 7]
    assert [i for delta in deltas for i in delta.token_ids] == list(range(2 * MAX_TAKEN + 8))
    assert [p.token_id for delta in deltas for p in delta.logprobs or ()] == list(range(2 * MAX_TAKEN + 8))


def test_an_engine_that_leaves_out_what_is_to_be_pooled_is_at_fault() -> None:
    params = SamplingParams(max_tokens=1, pooling="last")
    output, message = Output(GenerateRequest(prompt_token_ids=[1], params=params, timeout_s=9.0)), tokens(0, 1)
    assert output.fault_of(message) == "0 bytes of pooled float32 numbers"
    message = msgspec.structs.replace(message, pooled=bytes(8))
    assert output.fault_of(message) == ""
    output.add(message)
    delta = output.take("length", None)
    assert delta is not None
    assert delta.pooled == bytes(8)


@pytest.mark.parametrize(
    ("lie", "fault"),
    [
        ({}, ""),
        ({"sources": SourceCounts(1, 1, 1)}, "sources of 3 prompt tokens for 2"),
        ({"accepted_guesses": 2**62}, f"({2**62}, 0) guesses"),
        ({"rejected_guesses": 65}, "(0, 65) guesses"),
    ],
)
def test_what_is_charged_and_told_of_an_end_is_possible(lie: dict[str, Any], fault: str) -> None:
    end = msgspec.structs.replace(Finished("r", 0, "stop", SourceCounts(2)), **lie)
    assert Output(request(4)).fault_of_end(end) == fault


def test_a_message_s_own_list_is_left_as_it_is() -> None:
    output = Output(request(8))
    first = tokens(0, 2)
    output.add(first)
    output.add(tokens(2, 2))
    assert first.logprobs is not None
    assert len(first.logprobs) == 2


def test_others_have_their_turn_between_two_parts() -> None:
    async def main() -> list[str]:
        flow = RequestFlow(
            request(10 * MAX_TAKEN), Route("d", "d"), request_id="r", transfer_id="t", loan_id="loan", now=0.0
        )
        flow.output.add(tokens(0, 3 * MAX_TAKEN))
        generation = Generation(flow, on_end=lambda *_: None)
        seen: list[str] = []
        loop = asyncio.get_running_loop()
        for number in range(3):
            loop.call_soon(seen.append, f"before {number}")
            await anext(generation)
            seen.append(f"part {number}")
        return list(seen)

    assert asyncio.run(main()) == ["part 0", "before 0", "before 1", "part 1", "before 2", "part 2"]
