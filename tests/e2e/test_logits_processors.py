"""Logits processors over a hand-off and two ranks, beside an engine without; a fault is one request's."""

import asyncio
import shutil
from pathlib import Path
from typing import Any

import processors
import pytest
from deployments import Launch, Running
from faults.replies import PROMPT, SAMPLED, STREAM, ask_all, check_kill
from oracle import oracle
from traffic import Answer, Ask, client_of, send_all, wait_for_rest

WINDOW = 6
NUM_OUTPUT = 16
PROCESSORS = "no_repeat:NoRepeat,processors:Faulty"


BROKEN_ON_ONE = """
from pathlib import Path

from pdkv.logits_processors import LogitsProcessor


class Broken(LogitsProcessor):
    def __init__(self, arguments, model):
        pass

    def is_argmax_invariant(self):
        return False

    def apply(self, logits, prompt, output):
        if Path("/proc/self/comm").read_text().strip() == "pd prefill-0":
            raise RuntimeError("this host has another library")
        return logits
"""


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Of who has the modules on its path."""
    site = tmp_path_factory.mktemp("site")
    (site / "no_repeat.py").write_text(processors.example_source())
    for needed in ("processors", "oracle"):
        shutil.copy(Path(processors.__file__).with_name(f"{needed}.py"), site)
    (site / "broken.py").write_text(BROKEN_ON_ONE)
    return {"PYTHONPATH": str(site)}


@pytest.fixture(scope="module")
def deployment(module_launch: Launch, environment: dict[str, str]) -> Running:
    ranks = ("--prefill", "1", "--decode", "1", "--decode-tp", "2")
    flags = ("--policy", "round_robin", "--logits-processors", PROCESSORS)
    return module_launch(*ranks, *flags, environment=environment, engine=())


def test_each_token_of_a_request_went_through_its_processor(deployment: Running, served_model: Path) -> None:
    prompts = [list(range(5 + i, 30 + 2 * i)) for i in range(10)]
    num_clear = num_refused = 0
    for prompt in prompts:
        expected = oracle(served_model).generate(prompt, NUM_OUTPUT, processors.without_repeats(WINDOW))
        fields = {"max_tokens": NUM_OUTPUT, "ignore_eos": True, "return_token_ids": True, "temperature": 0}
        reply = deployment.complete(prompt, logits_processors={"no_repeat:NoRepeat": {"window": WINDOW}}, **fields)
        if reply.status_code == 400:  # by decode-b, which was started without
            assert "'no_repeat:NoRepeat' is unknown; this server has none" in reply.json()["error"]["message"]
            num_refused += 1
            continue
        assert reply.status_code == 200, reply.text
        if expected is not None:
            num_clear += 1
            assert reply.json()["choices"][0]["token_ids"] == expected
    assert num_clear >= 2
    assert num_refused >= 2


@pytest.fixture(scope="module")
def fleet(module_launch: Launch, environment: dict[str, str]) -> Running:
    """Prefill engines of which the first has a processor that always fails."""
    flags = ("--prefill", "3", "--decode", "2", "--logits-processors", f"{PROCESSORS},broken:Broken")
    return module_launch(*flags, environment=environment)


def test_no_reply_shows_that_decode_was_killed(fleet: Running) -> None:
    """Whoever goes on makes another object, and replays nothing but tokens."""
    letters = {"allowed_token_ids": list(range(67, 79)), "logits_processors": {"no_repeat:NoRepeat": {"window": 5}}}
    cases: dict[str, dict[str, Any]] = {
        "greedy": {"prompt": PROMPT, "temperature": 0, **STREAM, **letters},
        "sampled": {"prompt": PROMPT, "n": 2, **SAMPLED, **STREAM, **letters},
    }
    expected = asyncio.run(ask_all(fleet, cases, "undisturbed"))
    for text in (text for reply in expected.values() for text in reply.texts.values()):
        assert len(text) > 50
        assert all(len({*text[i : i + 6]}) == 6 for i in range(len(text) - 5))
    wait_for_rest(fleet)
    check_kill(fleet, cases, expected, kill_at=5)


@pytest.mark.parametrize(
    ("asked", "status", "code", "text"),
    [
        ({"processors:Faulty": {"how": "raise"}}, 500, "logits_processor_failed", "RuntimeError: out of luck"),
        ({"processors:Faulty": {"how": "refuse"}}, 400, None, "processors:Faulty: not today"),
        ({"no_repeat:NoRepeat": {"window": 0}}, 400, None, "no_repeat:NoRepeat: window must be in [1, 1024], got 0"),
        ({"no_repeat": {}}, 400, None, "'no_repeat' is unknown; this server has no_repeat:NoRepeat, processors:Faulty"),
    ],
)
def test_what_goes_wrong_is_said(
    deployment: Running, asked: dict[str, object], status: int, code: str | None, text: str
) -> None:
    reply = deployment.complete([5, 6, 7], logits_processors=asked, max_tokens=4)  # prefill draws first
    assert reply.status_code == status, reply.text
    error = reply.json()["error"]
    assert text in error["message"]
    assert error["code"] == code
    assert deployment.complete([5, 6, 7], max_tokens=4).status_code == 200


def test_an_engine_that_fails_everything_costs_no_request(fleet: Running) -> None:
    """It said that another engine would fail them, too, was believed, and had a third of all requests for ever."""
    asks = [Ask([5 + i, *range(20, 40)], 4, fields={"logits_processors": {"broken:Broken": {}}}) for i in range(60)]

    async def send() -> list[Answer]:
        async with client_of(fleet) as client:
            return await send_all(client, asks, at_once=6)

    answers = asyncio.run(send())
    assert [answer.error for answer in answers if answer.error is not None] == []
    engines = fleet.get("/topology").json()["engines"]
    assert [engine["name"] for engine in engines if engine["ejected"]] == ["prefill-0"]
