"""`pd launch --router-fronts`: streams outlive the process that serves them."""

import asyncio
import json
import re
import shutil
import signal
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from deployments import Running, launches
from traffic import wait_until_true

from pdkv.testing.resuming import Streamed, read_stream

NUM_STREAMS, NUM_BY_CURL = 90, 10
PATH = "/v1/completions"
PROFILE = """
step_s = 0.015
row_s = 0.0004
prompt_token_s = 0
context_token_s = 0
num_layers = 1
num_kv_heads = 1
head_size = 8
max_model_len = 512
vocab_size = 4096
"""
"""A hundred streams last for four seconds: none ends before all are heard, though a process stands still for one."""


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    profile = tmp_path_factory.mktemp("profile") / "served.toml"
    profile.write_text(PROFILE)
    options = ("--max-num-batched-tokens", "4096", "--max-num-seqs", "400", "--no-check-finite")
    with launches(Path(f"paced:{profile}")) as launch:
        yield launch("--prefill", "0", "--router-fronts", "2", *options)


def body_of(number: int) -> dict[str, Any]:
    """A request; every fifth with logprobs, and every fifth with several choices."""
    body: dict[str, Any] = {"prompt": [number + 2] * 8, "max_tokens": 60, "seed": number, "return_token_ids": True}
    return body | ({"logprobs": 2} if number % 5 == 1 else {}) | ({"n": 3} if number % 5 == 2 else {})


def choices_of(events: list[dict[str, Any]]) -> dict[int, tuple[list[int], str, list[float]]]:
    """Tokens, text and logprobs of each choice."""
    found: dict[int, tuple[list[int], str, list[float]]] = {}
    for event in events:
        for choice in event["choices"]:
            token_ids, text, logprobs = found.get(choice["index"], ([], "", []))
            told = choice["logprobs"]["token_logprobs"] if choice["logprobs"] else []
            found[choice["index"]] = (token_ids + choice["token_ids"], text + choice["text"], logprobs + told)
    return found


def fronts(deployment: Running) -> list[psutil.Process]:
    children = psutil.Process(deployment.process.pid).children()
    return [child for child in children if child.name().startswith("pd front")]


class Curl:
    """A stream by plain curl, into a file."""

    def __init__(self, url: str, body: dict[str, Any], file: Path) -> None:
        self._url, self._file, self._head = url + PATH, file, file.with_suffix(".head")
        self._begin("-D", str(self._head), "-H", "content-type: application/json", "-d", json.dumps(body))

    def _begin(self, *arguments: str) -> None:
        with self._file.open("ab") as out:
            self._process = subprocess.Popen(["curl", "-sN", self._url, *arguments], stdout=out)

    def resume(self) -> list[dict[str, Any]]:
        """Wait for its end, and go on after the last whole event until there is none. Returns all data."""
        for _ in range(20):
            self._process.wait(timeout=60)
            *events, _ = self._file.read_text().split("\n\n")
            data = [json.loads(event[6:]) for event in events if event != "data: [DONE]"]
            if len(data) < len(events):
                return data
            self._file.write_text("".join(f"{event}\n\n" for event in events))
            of_choice = Counter(event["choices"][0]["index"] for event in data)
            position = ",".join(str(of_choice[index]) for index in range(max(of_choice) + 1))
            [resume_id] = re.findall(r"x-pd-resume-id: (\S+)", self._head.read_text())
            self._begin("-X", "POST", "--fail", "--retry", "20", "-H", f"x-pd-resume-id: {resume_id}:{position}")
        raise AssertionError(self._file.read_text())


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_a_killed_front_loses_and_doubles_no_token_of_a_hundred_streams(deployment: Running, tmp_path: Path) -> None:
    async def stream(number: int, heard: asyncio.Event | None = None) -> Streamed:
        async with asyncio.timeout(60):
            return await read_stream(deployment.url, PATH, body_of(number), heard=heard)

    async def main() -> None:
        expected = await asyncio.gather(*map(stream, range(NUM_STREAMS)))
        heard = [asyncio.Event() for _ in range(NUM_STREAMS)]
        tasks = [asyncio.create_task(stream(number, event)) for number, event in enumerate(heard)]
        curls = [Curl(deployment.url, body_of(i) | {"stream": True}, tmp_path / f"{i}") for i in range(NUM_BY_CURL)]
        await asyncio.gather(*(event.wait() for event in heard))
        for front in fronts(deployment):  # so that each stream loses one
            front.send_signal(signal.SIGKILL)
            await asyncio.sleep(0.1)
        seen = await asyncio.gather(*tasks)
        assert sum(each.num_resumed > 0 for each in seen) > NUM_STREAMS // 2, "most had ended before a front was killed"
        for number in range(NUM_STREAMS):
            assert choices_of(seen[number].events) == choices_of(expected[number].events), number
        by_curl = await asyncio.gather(*(asyncio.to_thread(curl.resume) for curl in curls))
        assert [choices_of(events) for events in by_curl] == [choices_of(e.events) for e in expected[:NUM_BY_CURL]]

    asyncio.run(main())


def test_a_dead_dispatcher_is_replaced_beneath_its_fronts(deployment: Running) -> None:
    async def read(number: int) -> Streamed:
        async with asyncio.timeout(60):
            return await read_stream(deployment.url, PATH, body_of(number))

    assert asyncio.run(read(0)).num_resumed == 0
    before = {front.pid for front in fronts(deployment)}
    psutil.Process(deployment.child_pid("pd router")).send_signal(signal.SIGKILL)
    deployment.wait_for_line("router is ready again")
    both = "pdkv_fronts 2.0\n"  # each connects by itself, and answers 503 until then
    wait_until_true(lambda: both in deployment.get("/metrics").text, "both fronts have found the new dispatcher")
    assert len(choices_of(asyncio.run(read(1)).events)) == 1
    assert {front.pid for front in fronts(deployment)} == before
