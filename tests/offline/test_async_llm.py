"""AsyncLLM over a small random model: the tokens of LLM, streamed; whatever ends a request leaves nothing behind."""

import asyncio
import gc
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Iterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import warm
from oracle import oracle
from traffic import wait_until_true

from pdkv import LLM, AsyncLLM, RequestOutputKind, SamplingParams
from pdkv.engine.core import EngineCore
from pdkv.engine.plan import StepPlan
from pdkv.engine.worker.pending import PendingStep
from pdkv.errors import ConfigError, EngineDied, EngineUnavailable, InvalidRequest, RequestAborted
from pdkv.offline import engine_thread
from pdkv.offline.outputs import RequestOutput

EXAMPLE = Path(__file__).parents[2] / "examples" / "async_llm" / "run.py"
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
ENDLESS = msgspec.structs.replace(GREEDY, max_tokens=None)  # up to the model's length: long enough to be caught
DELTA = RequestOutputKind.DELTA
OPTIONS: dict[str, Any] = {"kv_cache_memory": 8 << 20, "threads": 1, "device": "cpu"}


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[AsyncLLM]:
    engine = AsyncLLM(model, **OPTIONS)
    yield engine
    engine.shutdown()


@pytest.fixture
def llm(engine: AsyncLLM) -> Iterator[AsyncLLM]:
    yield engine
    wait_until_true(lambda: is_at_rest(engine), "the engine's thread settles behind its last message")


def core_of(llm: AsyncLLM) -> EngineCore:
    return llm._engine._engine.core


def is_at_rest(llm: AsyncLLM) -> bool:
    """Whether no request is left, in the engine and in event loops that live, and no block is held."""
    counts = core_of(llm).scheduler.kv.pool.counts()
    streams = [streams for loop, streams in llm._streams.items() if not loop.is_closed()]
    live = [
        core_of(llm).requests,
        llm._engine._listeners,
        *(s._streams for s in streams),
        *(s._in_flight for s in streams),
    ]
    return not any(live) and counts.free + counts.cached == counts.total


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 60.0))


async def outputs_of(stream: AsyncIterator[RequestOutput]) -> list[RequestOutput]:
    return [output async for output in stream]


async def last_of(stream: AsyncIterator[RequestOutput]) -> RequestOutput:
    outputs = await outputs_of(stream)
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    return outputs[-1]


def joined(outputs: list[RequestOutput], index: int = 0) -> tuple[str, list[int], list[Any]]:
    """Text, tokens and logprobs of one choice's deltas."""
    pieces = [choice for output in outputs for choice in output.outputs if choice.index == index]
    return (
        "".join(piece.text for piece in pieces),
        [token_id for piece in pieces for token_id in piece.token_ids],
        [entry for piece in pieces for entry in piece.logprobs or ()],
    )


async def test_concurrent_requests_have_the_tokens_of_transformers(llm: AsyncLLM, model: Path) -> None:
    prompts = [list(range(5 + i, 25 + 2 * i)) for i in range(12)]
    expected = [oracle(model).generate(prompt, 10) for prompt in prompts]
    before = core_of(llm).counters.steps
    streams = [llm.generate(prompt, msgspec.structs.replace(GREEDY, max_tokens=10)) for prompt in prompts]
    found = await asyncio.gather(*map(last_of, streams))
    clear = [(f.outputs[0].token_ids, e) for f, e in zip(found, expected, strict=True) if e is not None]
    assert len(clear) >= 6
    assert [f for f, _ in clear] == [e for _, e in clear]
    assert core_of(llm).counters.steps - before < 12 * 10 / 2  # they were batched


async def test_pieces_join_to_what_the_offline_llm_gives(llm: AsyncLLM, model: Path) -> None:
    letters = llm.tokenizer.encode("abcdefghijklmnopqrstuvwxyz")
    likely = dict.fromkeys(letters, 100.0)
    params = [
        SamplingParams(n=3, seed=5, max_tokens=15, ignore_eos=True, logprobs=1, prompt_logprobs=1),
        SamplingParams(seed=1, max_tokens=80, logit_bias=likely, stop=("ab", *"defghijkl"), ignore_eos=True),
        SamplingParams(temperature=0, max_tokens=9, bad_words=("a",)),
    ]
    prompts = ["hello there", "The quick brown fox", "x"]
    with LLM(model, **OPTIONS) as offline:
        wholes = offline.generate(prompts, params, use_tqdm=False)
    asked = [msgspec.structs.replace(p, output_kind=DELTA) for p in params]
    streams = [llm.generate(prompt, p) for prompt, p in zip(prompts, asked, strict=True)]
    for whole, outputs in zip(wholes, await asyncio.gather(*map(outputs_of, streams)), strict=True):
        assert outputs[-1].finished
        for choice in whole.outputs:
            entries = [{i: pytest.approx(e[i].logprob, abs=1e-3) for i in e} for e in choice.logprobs or ()]
            text, token_ids, logprobs = joined(outputs, choice.index)
            assert (text, token_ids) == (choice.text, choice.token_ids)
            assert [{i: entry[i].logprob for i in entry} for entry in logprobs] == entries
            [last] = [c for o in outputs for c in o.outputs if c.index == choice.index and c.finish_reason]
            assert (last.finish_reason, last.stop_reason) == (choice.finish_reason, choice.stop_reason)
        told = [output.prompt_logprobs for output in outputs if output.prompt_logprobs is not None]
        assert len(told) == (whole.prompt_logprobs is not None)
    assert wholes[1].outputs[0].finish_reason == "stop"


async def test_the_kinds_of_outputs(llm: AsyncLLM) -> None:
    async def ask(kind: RequestOutputKind) -> list[RequestOutput]:
        params = msgspec.structs.replace(GREEDY, output_kind=kind)
        return await outputs_of(llm.generate("hello", params, request_id=f"a {kind.value} one"))

    cumulative, delta, final = [await ask(kind) for kind in RequestOutputKind]
    for _ in range(50):  # a reader that is late gets the outputs of several steps as one
        if len(cumulative) > 2:
            break
        cumulative = await ask(RequestOutputKind.CUMULATIVE)
    assert len(final) == 1
    assert cumulative[-1].outputs == final[0].outputs
    assert [o.outputs[0].token_ids for o in cumulative] == [
        final[0].outputs[0].token_ids[: len(o.outputs[0].token_ids)] for o in cumulative
    ]
    assert len(cumulative) > 2
    assert joined(delta)[:2] == (final[0].outputs[0].text, final[0].outputs[0].token_ids)
    assert {o.request_id for o in cumulative} == {"a cumulative one"}


async def test_what_a_slow_reader_leaves_comes_at_once(llm: AsyncLLM) -> None:
    params = msgspec.structs.replace(GREEDY, output_kind=DELTA, max_tokens=200)
    async with aclosing(llm.generate("hello", params)) as stream:
        outputs = [await anext(stream)]
        while core_of(llm).requests:
            await asyncio.sleep(0.01)
        outputs += await outputs_of(stream)
    assert len(outputs) == 2
    assert len(joined(outputs)[1]) == 200


async def test_a_chat_is_that_of_the_offline_llm(llm: AsyncLLM) -> None:
    messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hello"}]
    output = await last_of(llm.chat(messages, GREEDY))
    text = await last_of(llm.generate("[system]Be kind.[user]Hello[assistant]", GREEDY))
    assert output.outputs == text.outputs
    with pytest.raises(InvalidRequest, match="a list of messages with a role"):
        await last_of(llm.chat([], GREEDY))


async def begin(llm: AsyncLLM, request_id: str | None = None, n: int = 1) -> AsyncGenerator[RequestOutput, None]:
    """A stream with its first output taken, far from its end."""
    stream = llm.generate("hello", msgspec.structs.replace(ENDLESS, n=n, seed=1), request_id)
    await anext(stream)
    return stream


async def gone(llm: AsyncLLM) -> None:
    """Within a few steps, long before the model's length ends anything."""
    before = core_of(llm).counters.steps
    await asyncio.to_thread(wait_until_true, lambda: is_at_rest(llm), "nothing runs")
    assert core_of(llm).counters.steps - before < core_of(llm).card.max_model_len / 4


async def test_a_cancelled_task_and_a_closed_stream_give_their_blocks_back(llm: AsyncLLM) -> None:
    for n in (1, 3):
        task = asyncio.create_task(last_of(llm.generate("hello", msgspec.structs.replace(ENDLESS, n=n))))
        while not core_of(llm).scheduler.running:
            await asyncio.sleep(0.002)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await gone(llm)
        stream = await begin(llm, n=n)
        await stream.aclose()
        await gone(llm)
    stream = await begin(llm)
    del stream  # asyncio closes what is collected
    gc.collect()
    await gone(llm)


async def test_an_aborted_request_ends_as_it_stands(llm: AsyncLLM) -> None:
    stream, other = await begin(llm, "mine", n=2), await begin(llm, "other")
    await llm.abort(["mine", "unknown"])
    output = await last_of(stream)
    assert [choice.finish_reason for choice in output.outputs] == ["abort", "abort"]
    assert 1 <= len(output.outputs[0].token_ids) < 1000
    assert not (await anext(other)).finished
    await llm.abort("other")
    assert (await last_of(other)).outputs[0].finish_reason == "abort"
    assert (await last_of(llm.generate("hello", GREEDY, "mine"))).outputs[0].finish_reason == "length"


@pytest.mark.parametrize(
    ("prompt", "params", "request_id", "message"),
    [
        ("x", SamplingParams(temperature=-1), None, "temperature"),
        ("x", SamplingParams(output_kind="half"), None, "output_kind='half'"),  # type: ignore[arg-type]
        ("x", SamplingParams(seed=1.5), None, "seed must be a whole number"),  # type: ignore[arg-type]
        ("x", SamplingParams(temperature="0"), None, "temperature=.0.: Expected `float`"),  # type: ignore[arg-type]
        ({"text": "x"}, GREEDY, None, "a mapping of prompt or prompt_token_ids"),
        ("", GREEDY, None, "prompt must not be empty"),
        (None, GREEDY, None, "expected a prompt as a text or a list of token ids, .* got None"),
        ([100_000], GREEDY, None, "token ids"),
        ("x", SamplingParams(seed=1, logit_bias={100_000: 1.0}), None, "logit_bias: token 100000"),
        ("x", GREEDY, "", "request_id must be a text of 1 to"),
        ("x", GREEDY, "taken", "request_id must be unique: 'taken' is running"),
    ],
)
async def test_what_can_never_work_is_an_error_of_its_caller_alone(
    llm: AsyncLLM, prompt: Any, params: SamplingParams, request_id: str | None, message: str
) -> None:
    async with aclosing(await begin(llm, "taken")) as other:
        with pytest.raises(InvalidRequest, match=message):
            await last_of(llm.generate(prompt, params, request_id))
        assert not (await anext(other)).finished


async def test_parameters_that_only_the_engine_finds_wrong_fail_their_request_alone(
    llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = msgspec.structs.replace(GREEDY, seed=1.5)
    checked = SamplingParams.checked
    monkeypatch.setattr(SamplingParams, "checked", lambda self: self if self is wrong else checked(self))
    async with aclosing(await begin(llm, "other")) as other:
        with pytest.raises(InvalidRequest, match="the sampling parameters cannot be served: TypeError"):
            await last_of(llm.generate("x", wrong))
        assert not (await anext(other)).finished
    assert (await last_of(llm.generate("x", GREEDY))).finished


def test_a_wrong_field_is_a_config_error(model: Path) -> None:
    with pytest.raises(ConfigError, match="AsyncLLM: unknown option 'max_num_seq'"):
        AsyncLLM(model, max_num_seq=2)
    threads = threading.active_count()
    with pytest.raises(ConfigError, match="tp=2 needs one process per rank"):  # on the engine's thread
        AsyncLLM(model, tp=2)
    wait_until_true(lambda: threading.active_count() <= threads, "its thread has ended")


@asynccontextmanager
async def fresh(model: Path) -> AsyncIterator[AsyncLLM]:
    async with await asyncio.to_thread(AsyncLLM, model, **OPTIONS) as llm:
        yield llm
        thread = llm._engine._thread
    assert not thread.is_alive()


@pytest.mark.parametrize("kind", [MemoryError, SystemExit])
async def test_an_engine_that_fails_fails_everybody(
    model: Path, kind: type[BaseException], caplog: pytest.LogCaptureFixture
) -> None:
    def fail(plan: object) -> None:
        raise kind("no more")

    async with fresh(model) as llm:
        streams = [await begin(llm, name) for name in ("a", "b")]
        core_of(llm).executor.launch = fail  # type: ignore[assignment, method-assign]
        for name, stream in zip("ab", streams, strict=True):
            with pytest.raises(EngineDied, match=f"the engine failed: {kind.__name__}: no more") as died:
                await last_of(stream)
            assert died.value.request_id == name
        with pytest.raises(EngineUnavailable, match="no more"):
            await last_of(llm.generate("x", GREEDY))
    assert "the engine stops after an error" in caplog.text


async def test_a_shutdown_ends_requests_in_flight(model: Path) -> None:
    async with fresh(model) as llm:
        stream = await begin(llm)
        waiting = asyncio.create_task(last_of(await begin(llm)))
        llm.shutdown()
        llm.shutdown()
        for ended in (last_of(stream), waiting):
            with pytest.raises(RequestAborted, match="shut down"):
                await ended
        with pytest.raises(EngineUnavailable, match="shut down"):
            await last_of(llm.generate("x", GREEDY))
        assert not core_of(llm).requests


async def test_all_choices_of_a_request_are_given_up_though_the_engine_has_ended(model: Path) -> None:
    llm = AsyncLLM(model, **OPTIONS)
    stream = llm.generate(list(range(5, 30)), msgspec.structs.replace(ENDLESS, n=3), "mine")
    while not all(choice.token_ids for choice in (await anext(stream)).outputs):
        pass
    llm.shutdown()
    await llm.abort("mine")
    last = await last_of(stream)
    assert [choice.finish_reason for choice in last.outputs] == ["abort"] * 3
    [streams] = llm._streams.values()
    assert not streams._in_flight


async def test_a_step_that_does_not_end_does_not_hold_a_shutdown_for_ever(
    model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(engine_thread, "STOP_TIMEOUT_S", 0.0)
    llm = AsyncLLM(model, **OPTIONS)
    launch, begun, may_end = core_of(llm).executor.launch, threading.Event(), threading.Event()

    def hang(plan: StepPlan) -> PendingStep:
        begun.set()
        assert may_end.wait(60.0)
        return launch(plan)

    core_of(llm).executor.launch = hang  # type: ignore[method-assign]
    task = asyncio.create_task(last_of(llm.generate("hello", ENDLESS)))
    await asyncio.to_thread(begun.wait, 60.0)
    await asyncio.to_thread(llm.shutdown)
    assert "has not ended within 0 s" in caplog.text
    may_end.set()
    with pytest.raises(RequestAborted, match="shut down"):
        await task
    llm._engine._thread.join(60.0)
    assert not llm._engine._thread.is_alive()


async def test_two_of_them_in_a_process_do_not_meet(model: Path) -> None:
    async with fresh(model) as first, fresh(model) as second:
        streams = [llm.generate("hello", GREEDY, "same name") for llm in (first, second)]
        one, other = await asyncio.gather(*map(last_of, streams))
        assert one.outputs == other.outputs
        stream = await begin(second)
        await asyncio.to_thread(first.shutdown)
        assert not (await anext(stream)).finished
        await stream.aclose()


def test_a_loop_that_is_closed_early_takes_its_requests_with_it(llm: AsyncLLM) -> None:
    loop = asyncio.new_event_loop()
    stream = loop.run_until_complete(begin(llm, "left"))
    assert core_of(llm).requests
    loop.close()
    asyncio.run(gone(llm))
    assert stream.ag_running is False

    async def test() -> None:
        assert (await last_of(llm.generate("hello", GREEDY, "left"))).finished

    run(test())


def test_an_async_llm_that_nobody_holds_any_more_ends(model: Path) -> None:
    llm = AsyncLLM(model, **OPTIONS)
    thread = llm._engine._thread
    run(_generate_once(llm))
    del llm
    gc.collect()
    thread.join(60.0)
    assert not thread.is_alive()


def test_the_example(tmp_path: Path) -> None:
    done = warm.run([*warm.PYTHON, str(EXAMPLE)], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    last = dict(line.split(": ") for line in done.stdout.splitlines())
    assert last == {"fox": "4821", "hat": "0937", "bell": "6245"}


async def _generate_once(llm: AsyncLLM) -> None:
    await last_of(llm.generate("hello", GREEDY))
