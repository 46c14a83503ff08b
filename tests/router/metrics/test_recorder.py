"""Recordings as `pd replay` reads them, of requests through a real dispatcher over scripted engines."""

import asyncio
import base64
import contextlib
import hashlib
import json
import logging
import os
import resource
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from asgi_client import begin, call
from dispatch_rig import System, live
from no_threads import no_threads
from small_app import MODEL, ids, served
from starlette.types import ASGIApp

from pdkv.base.block_keys import extend_keys, root_key
from pdkv.base.trace_format import BLOCK_SIZE, TraceRequest
from pdkv.bench.trace import Trace, read_trace
from pdkv.config import ObservabilityConfig
from pdkv.errors import ConfigError, ServerBusy
from pdkv.router.admission.api_keys import KeyRing, make_key
from pdkv.router.http.app import create_app
from pdkv.router.metrics import recorder as recorders
from pdkv.router.metrics.recorder import Ended, Recorder, begin_recording

MARKER = "xylophone-4711"
PROMPT = f"{MARKER} " * 9 + "!" * 9  # two blocks and a rest


@pytest.fixture
def recorder(tmp_path: Path) -> Iterator[Recorder]:
    recorder = Recorder(tmp_path / "trace.jsonl", 1 << 20, MODEL)
    yield recorder
    recorder.close()


def serving(system: System, recorder: Recorder, keys: KeyRing | None = None) -> ASGIApp:
    options: dict[str, Any] = {"recorder": recorder, "keys": keys}
    return create_app(system.dispatcher, served(1000), **options)


async def complete(app: ASGIApp, headers: dict[str, str] | None = None, **body: Any) -> Any:
    asked = {"model": MODEL, "max_tokens": 4, "ignore_eos": True, **body}
    exchange = await call(app, "POST", "/v1/completions", asked, headers)
    return exchange.events() if body.get("stream") else exchange.json()


def read(recorder: Recorder) -> Trace:
    recorder.close()
    return read_trace(recorder.path)


def test_a_recorder_for_which_there_is_no_thread_leaves_no_open_file(tmp_path: Path) -> None:
    before = os.listdir("/proc/self/fd")
    with no_threads(), pytest.raises(ServerBusy, match="no thread for pdkv-recorder"):
        Recorder(tmp_path / "trace.jsonl", 1 << 20, MODEL)
    assert os.listdir("/proc/self/fd") == before


async def test_lengths_outcomes_and_times_are_recorded(recorder: Recorder) -> None:
    async with live(System(1, 1)) as system:
        app = serving(system, recorder)
        slo = {"x-slo-ttft-ms": "250", "x-slo-tpot-ms": "50"}
        await complete(app, slo, prompt=PROMPT, n=2, priority=3, stream=True)
        await complete(app, prompt="y" * 2000)
        system.backends["prefill-0"].held = True
        exchange, task = begin(app, "POST", "/v1/completions", {"model": MODEL, "prompt": [5] * 64})
        while not system.backends["prefill-0"].engine.tasks:
            await asyncio.sleep(0)
        exchange.disconnect()
        await task
    trace = read(recorder)
    first, sibling, refused, left = trace.requests
    assert trace.model == MODEL
    assert (first.prompt_tokens, first.output_tokens, first.max_tokens, len(first.blocks)) == (len(PROMPT), 4, 4, 2)
    assert (first.priority, first.slo_ttft_ms, first.slo_tpot_ms, first.stream) == (3, 250.0, 50.0, True)
    assert (first.outcome, refused.outcome, left.outcome) == ("length", "error:context_length_exceeded", "abort")
    assert (sibling.blocks, sibling.session, sibling.t) == (first.blocks, first.session, first.t)
    assert (refused.prompt_tokens, refused.blocks, refused.ttft_s) == (0, (), None)
    assert (left.prompt_tokens, left.output_tokens, left.ttft_s, len(left.blocks)) == (64, 0, None, 1)
    assert first.ttft_s is not None
    assert 0 < first.ttft_s <= first.e2e_s
    assert first.t <= refused.t <= left.t


async def test_the_choices_of_one_prompt_hold_it_once(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorders, "MAX_WAITING_TOKENS", 2 * len(PROMPT))
    async with live(System(1, 1)) as system:
        await complete(serving(system, recorder), prompt=PROMPT, n=8)
    assert len(read(recorder).requests) == 8


async def test_equal_beginnings_have_equal_blocks_and_a_conversation_is_one_session(recorder: Recorder) -> None:
    async with live(System(1, 1)) as system:
        app = serving(system, recorder)
        await complete(app, prompt=PROMPT)
        await complete(app, prompt=PROMPT + "the answer, and the next question" * 3)
        await complete(app, prompt=PROMPT)  # the same again: nothing of an answer is in it
        await complete(app, prompt=PROMPT, cache_salt="of another")
        await complete(app, prompt="short", prompt_cache_key="a")
        await complete(app, prompt="other", prompt_cache_key="a")
    first, second, again, salted, *named = read(recorder).requests
    assert second.blocks[:2] == first.blocks == again.blocks
    assert not set(salted.blocks) & set(first.blocks)
    assert first.session == second.session
    assert len({first.session, again.session, salted.session}) == 3
    assert named[0].session == named[1].session


async def test_nothing_that_was_said_is_in_a_recording(recorder: Recorder, tmp_path: Path) -> None:
    key, lines = make_key(f"alice-{MARKER}")
    keys = tmp_path / "keys.toml"
    keys.write_text(lines)
    keys.chmod(0o600)
    async with live(System(1, 1)) as system:
        app = serving(system, recorder, KeyRing(keys))
        headers = {"authorization": f"Bearer {key}", "x-request-id": f"id-{MARKER}"}
        names = {"prompt_cache_key": f"talk-{MARKER}", "cache_salt": f"salt-{MARKER}", "user": f"bob-{MARKER}"}
        answer = await complete(app, headers, prompt=PROMPT, max_tokens=24, return_token_ids=True, **names)
        messages = [{"role": "user", "content": PROMPT}]
        await call(app, "POST", "/v1/chat/completions", {"model": MODEL, "messages": messages, **names}, headers)
        assert read(recorder).requests[0].key == 0
    written = recorder.path.read_bytes().lower()
    secrets = [MARKER, key, hashlib.sha256(key.encode()).hexdigest(), answer["choices"][0]["text"], answer["id"]]
    for secret in secrets:
        assert not [form for form in encodings(secret) if form.lower() in written], secret
    for numbers in (ids(MARKER), answer["choices"][0]["token_ids"]):
        forms = [", ".join(map(str, numbers)), ",".join(map(str, numbers)), " ".join(map(str, numbers))]
        assert not [form for form in forms if form.encode() in written]
    for salt in ("", f"salt-{MARKER}"):
        plain: list[bytes] = []
        extend_keys(plain, root_key(model="", layout="", cache_salt=salt), ids(PROMPT), hash_block_size=BLOCK_SIZE)
        assert not [block for block in plain if block.hex()[:16].encode() in written]


def encodings(text: str) -> Iterator[bytes]:
    plain = text.encode()
    for data in (plain, plain[::-1], text.encode("utf-16-le")):
        yield data
        yield data.hex().encode()
        for skipped in range(3):  # wherever it stands in what is encoded
            yield base64.b64encode(data[skipped : skipped + 3 * ((len(data) - skipped) // 3)])
        yield json.dumps(list(data))[1:-1].encode()


async def test_two_recordings_of_one_prompt_have_no_block_in_common(tmp_path: Path) -> None:
    found = []
    for _ in range(2):
        recorder = Recorder(tmp_path / "trace.jsonl", 1 << 20, MODEL)
        async with live(System(1, 1)) as system:
            await complete(serving(system, recorder), prompt=PROMPT)
        found.append(read(recorder).requests[0].blocks)
    assert (tmp_path / "trace.jsonl.1").exists()  # nothing is overwritten
    assert not set(found[0]) & set(found[1])
    assert stat.S_IMODE(recorder.path.stat().st_mode) == 0o600


def ended(number: int, num_tokens: int = 200) -> Ended:
    line = TraceRequest(
        t=number, session=0, key=0, prompt_tokens=num_tokens, output_tokens=1, outcome="stop", e2e_s=0.5
    )
    return Ended(line, [number] * num_tokens, num_tokens, "", "", "")


def test_a_pool_is_named_and_shares_no_block_with_others(recorder: Recorder) -> None:
    own = ended(1)
    for pool in ("", "next", ""):
        recorder.add(own._replace(line=msgspec.structs.replace(own.line, pool=pool), prompt=list(own.prompt)))
    first, other, again = read(recorder).requests
    assert [line.pool for line in (first, other, again)] == ["", "next", ""]
    assert first.blocks == again.blocks
    assert not {*first.blocks} & {*other.blocks}, "its model has another vocabulary"


def test_a_recording_ends_at_its_size(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    recorder = Recorder(tmp_path / "trace.jsonl", 50_000, MODEL)
    with caplog.at_level(logging.ERROR):
        for number in range(2000):
            recorder.add(ended(number))
        found = read(recorder).requests
    assert recorder.path.stat().st_size <= 50_000
    assert recorder.counts == {"written": len(found), "dropped": 2000 - len(found)}
    assert len(found) > 200
    assert len([record for record in caplog.records if "ends after" in record.message]) == 1
    assert [family.samples[0].value for family in recorder.metrics() if family.name == "pdkv_recording"] == [0]


def test_a_full_disk_ends_a_recording_behind_its_last_whole_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = Recorder(tmp_path / "trace.jsonl", 1 << 20, MODEL)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))  # the kernel's own refusal, after a part was written
    try:
        for number in range(2000):
            recorder.add(ended(number))
        recorder.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert recorder.counts["written"] == len(read_trace(recorder.path).requests) > 200
    assert recorder.path.read_bytes().endswith(b"\n")
    assert "File too large" in caplog.text
    recorder.add(ended(0))
    assert sum(recorder.counts.values()) == 2000
    assert not recorder._waiting  # prompts of what is not written are not held


def test_a_disk_that_does_not_answer_costs_lines_and_no_wait(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorders, "MAX_WAITING_TOKENS", 10_000)
    monkeypatch.setattr(recorders, "CLOSE_S", 0.1)
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with contextlib.suppress(BlockingIOError):
        while os.write(writer, bytes(1 << 16)):
            pass
    os.set_blocking(writer, True)
    os.dup2(writer, recorder._file)  # each write to the recording waits from now on
    os.close(writer)
    for number in range(500):
        recorder.add(ended(number))
    assert recorder.counts == {"written": 0, "dropped": 449}
    recorder.close()
    assert recorder.is_on  # its thread is still at it
    monkeypatch.undo()
    while len(os.read(reader, 1 << 16)) == 1 << 16:
        pass
    recorder.close()
    os.close(reader)
    assert recorder.counts["written"] == 51


def test_a_folder_is_refused_and_nothing_is_left_beside_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--record-trace: .* is no file"):
        Recorder(tmp_path, 1, MODEL)
    assert not tmp_path.with_name(f"{tmp_path.name}.1").exists()


def test_a_folder_that_is_not_there_is_refused_unless_the_router_starts_again(tmp_path: Path) -> None:
    options = ObservabilityConfig(record_trace=tmp_path / "none" / "trace")
    with pytest.raises(ConfigError, match=r"--record-trace: .*none/trace: No such file or directory"):
        begin_recording(options, MODEL, is_restart=False)
    assert begin_recording(options, MODEL, is_restart=True) is None
