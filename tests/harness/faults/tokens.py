"""Decode killed in the step of a certain token, of requests that ask for everything at once."""

import asyncio
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from deployments import Launch, Running
from soak.backends import choose, extra_flags
from traffic import wait_for_engines, wait_for_rest

from faults.replies import CASES, NUM_OUTPUT, PROMPT, SAMPLED, STREAM, Reply, ask_each, compare
from faults.run import CONNECTOR, Outcome, counters_of

AT_TOKEN = "kill at a token"
EVERYTHING = {"prompt": PROMPT, "n": 4, "logprobs": 2, "echo": True, "frequency_penalty": 0.4, **SAMPLED, **STREAM}
MOMENTS = {"token 1": 1, "the middle": NUM_OUTPUT // 2, "the last but one": NUM_OUTPUT - 1}
"""Output tokens that are computed when decode dies; those that it had not sent die with it."""

Cases = Mapping[str, dict[str, Any]]


def cut_by_token(
    launch: Launch, backend: str, directory: Path, *, rounds: int, beside: Cases = CASES
) -> Iterator[Outcome]:
    """For each moment `rounds` kills amid EVERYTHING and as many amid a stop string that begins before it.

    `beside`: what is asked at the same time. A deployment of one prefill and two decode engines.
    """
    switch = directory / "die"
    with choose(backend, directory) as chosen:
        flags = ["--prefill", "1", "--decode", "2", *chosen.flags, *extra_flags(backend)]
        at = flags.index("--connector") + 1
        flags += ["--connector-config", f"of={flags[at]}", "--connector-config", f"switch={switch}"]
        flags[at] = "dying:Dying"
        running = launch(*flags, environment={"PYTHONPATH": str(CONNECTOR)})
        try:
            alone = {**beside, "sampled": CASES["sampled"], "everything": EVERYTHING}
            expected = _undisturbed(running, alone, "undisturbed")
            text = expected["sampled"].texts[0]
            assert len(text) == NUM_OUTPUT
            for moment, num_tokens in MOMENTS.items():
                first = min(max(0, num_tokens - 6), NUM_OUTPUT - 12)
                stop = {**CASES["sampled"], "stop": [text[first : first + 12]]}
                assert first <= num_tokens < text.index(text[first : first + 12]) + 12, moment
                expected |= _undisturbed(running, {"stop": stop}, f"before {moment}")
                assert expected["stop"].reasons == {0: "stop"}
                outcome = Outcome(backend=backend, kind=AT_TOKEN, place=f"decode, {moment}", rate=0.0, stop_s=0.0)
                for number in range(2 * rounds):
                    name, fields = ("everything", EVERYTHING) if number % 2 else ("stop", stop)
                    switch.write_text(str(len(PROMPT) + num_tokens - 1))
                    _kill_amid(running, {name: fields, **beside}, f"{moment} {number}", expected, outcome)
                    outcome.there += not switch.exists()
                yield outcome
            wait_for_rest(running)
        finally:
            assert running.stop() == 0, running.log


def _undisturbed(running: Running, cases: Cases, salt: str) -> dict[str, Reply]:
    replies = asyncio.run(ask_each(running, cases, salt))
    failures = [reply for reply in replies.values() if not isinstance(reply, Reply)]
    assert not failures, failures
    return {name: reply for name, reply in replies.items() if isinstance(reply, Reply)}


def _kill_amid(running: Running, cases: Cases, salt: str, expected: Mapping[str, Reply], outcome: Outcome) -> None:
    """Ask, and count what was not as it is when nothing happens."""
    before, began = counters_of(running), time.monotonic()
    replies = asyncio.run(ask_each(running, cases, salt))
    outcome.longest_s = round(max(outcome.longest_s, time.monotonic() - began), 2)
    for name, reply in replies.items():
        outcome.requests += 1
        outcome.streamed += "stream" in cases[name]
        if not isinstance(reply, Reply):
            outcome.hung += isinstance(reply, TimeoutError)
            outcome.failed += not isinstance(reply, TimeoutError)
            outcome.errors.append(f"{name}: {reply!r}"[:300])
            continue
        try:
            compare({name: reply}, {name: expected[name]})
        except AssertionError as error:
            outcome.wrong += 1
            outcome.errors.append(f"{name}: {error}"[:300])
    wait_for_engines(running)
    after = counters_of(running)
    for counter, count in after.items():
        outcome.counters[counter] = outcome.counters.get(counter, 0) + max(0, count - before[counter])
