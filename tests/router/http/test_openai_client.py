"""The official client against the application on a real socket."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest
import uvicorn
import uvloop
from fake_dispatcher import FakeDispatcher, say, tokens
from small_app import MODEL, eos, ids, make_app
from starlette.types import ASGIApp

from pdkv.config import HttpApi
from pdkv.errors import EngineDied, EngineUnavailable

if TYPE_CHECKING:
    from openai import AsyncOpenAI

event_loop = uvloop.new_event_loop  # the router's kind


@asynccontextmanager
async def serve(app: ASGIApp) -> AsyncIterator["AsyncOpenAI"]:
    """A server on a free port, and a client that does not retry."""
    from openai import AsyncOpenAI

    config = uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error", lifespan="off", ws="none")
    server = uvicorn.Server(config)
    config.load()
    server.lifespan = config.lifespan_class(config)
    await server.startup()
    port = server.servers[0].sockets[0].getsockname()[1]
    client = AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, timeout=20)
    try:
        yield client
    finally:
        await client.close()
        await server.shutdown()


async def test_completions_streaming_and_not() -> None:
    dispatcher = FakeDispatcher(say([*ids("hé"), eos()]))
    dispatcher.num_cached_tokens = dispatcher.num_lossy_tokens = 1
    async with serve(make_app(dispatcher)) as client:
        whole = await client.completions.create(model=MODEL, prompt="x", n=2, logprobs=1)
        assert [choice.text for choice in whole.choices] == ["hé", "hé"]
        assert whole.choices[0].logprobs is not None
        assert whole.usage is not None
        assert whole.usage.prompt_tokens_details is not None
        assert whole.usage.prompt_tokens_details.cached_tokens == 1
        assert whole.usage.prompt_tokens_details.model_extra == {"lossy_tokens": 1}
        text, usage = "", None
        options = {"include_usage": True}
        async for chunk in await client.completions.create(
            model=MODEL, prompt="x", stream=True, stream_options=options
        ):
            text += chunk.choices[0].text if chunk.choices else ""
            usage = chunk.usage
        assert text == "hé"
        assert usage == whole.usage.model_copy(update={"completion_tokens": 4, "total_tokens": 5})


async def test_logprobs_may_name_tokens_by_their_ids() -> None:
    async with serve(make_app(FakeDispatcher(say([*ids("hé"), eos()])))) as client:
        extra = {"return_tokens_as_token_ids": True, "return_token_ids": True}
        (text,) = (await client.completions.create(model=MODEL, prompt="x", logprobs=1, extra_body=extra)).choices
        assert text.logprobs is not None
        assert text.logprobs.tokens == [f"token_id:{i}" for i in (text.model_extra or {})["token_ids"]]
        messages: list[Any] = [{"role": "user", "content": "hi"}]
        stream = await client.chat.completions.create(
            model=MODEL, messages=messages, logprobs=True, stream=True, extra_body=extra
        )
        tokens = [t.token for c in [c async for c in stream] if (p := c.choices[0].logprobs) for t in p.content or []]
        assert tokens == text.logprobs.tokens


async def test_chat_streaming_and_not() -> None:
    async with serve(make_app(FakeDispatcher(say([*ids("hé"), eos()])))) as client:
        messages: list[Any] = [{"role": "user", "content": "hi"}]
        whole = await client.chat.completions.create(model=MODEL, messages=messages, logprobs=True, top_logprobs=2)
        assert whole.choices[0].message.content == "hé"
        assert whole.choices[0].logprobs is not None
        messages += [whole.choices[0].message, {"role": "user", "content": "again"}]
        text, reason = "", None
        extra = {"top_k": 5, "min_p": 0.1, "ignore_eos": False, "return_token_ids": True}
        async for chunk in await client.chat.completions.create(
            model=MODEL, messages=messages, stream=True, n=2, extra_body=extra
        ):
            [choice] = chunk.choices
            text += (choice.delta.content or "") if choice.index == 1 else ""
            reason = choice.finish_reason or reason
        assert (text, reason) == ("hé", "stop")


async def test_responses_streaming_and_not() -> None:
    import openai

    async with serve(make_app(FakeDispatcher(say([*ids("hé"), eos()])))) as client:
        whole = await client.responses.create(model=MODEL, input="hi", instructions="Be brief.", store=False)
        assert (whole.output_text, whole.status, whole.usage and whole.usage.output_tokens) == ("hé", "completed", 4)
        history: list[Any] = [{"role": "user", "content": "hi"}, *whole.output, {"role": "user", "content": "again"}]
        text = ""
        async for event in await client.responses.create(model=MODEL, input=history, stream=True):
            text += event.delta if event.type == "response.output_text.delta" else ""
        assert text == "hé"
        async with client.responses.stream(model=MODEL, input=history) as stream:
            kinds = [event.type async for event in stream]
            final = await stream.get_final_response()
        assert (kinds[0], kinds[-1], final.output_text) == ("response.created", "response.completed", "hé")
        with pytest.raises(openai.BadRequestError) as stateful:
            await client.responses.create(model=MODEL, input="x", previous_response_id=whole.id)
        assert stateful.value.param == "previous_response_id"


async def test_calls_of_functions_and_thoughts_by_responses() -> None:
    text = '<think>hm</think>I see.<tool_call>{"name": "f", "arguments": {"x": "é"}}</tool_call>'
    tools: list[Any] = [{"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": True}]
    api = HttpApi(tool_parser="hermes", reasoning_parser="qwen3")
    async with serve(make_app(FakeDispatcher(say([*ids(text), eos()])), api=api, max_model_len=2000)) as client:
        whole = await client.responses.create(model=MODEL, input="hi", tools=tools)
        async with client.responses.stream(model=MODEL, input="hi", tools=tools) as stream:
            arguments = [e.snapshot async for e in stream if e.type == "response.function_call_arguments.delta"]
            final: Any = await stream.get_final_response()
        assert arguments[-1] == '{"x": "é"}'
        assert final.output[-1].parsed_arguments == {"x": "é"}
        for output in (whole.output, final.output):
            thoughts, message, called = output
            assert (thoughts.content[0].text, message.content[0].text) == ("hm", "I see.")  # type: ignore[union-attr]
            result = {"type": "function_call_output", "call_id": called.call_id, "output": "1"}  # type: ignore[union-attr]
            again: list[Any] = [{"role": "user", "content": "hi"}, *output, result]
            assert (await client.responses.create(model=MODEL, input=again, tools=tools)).status == "completed"


async def test_models_and_headers() -> None:
    import openai

    async with serve(make_app(FakeDispatcher(say(ids("a"))))) as client:
        assert [model.id async for model in client.models.list()] == [MODEL]
        assert (await client.models.retrieve(MODEL)).id == MODEL
        with pytest.raises(openai.NotFoundError):
            await client.models.retrieve("other")
        raw = await client.completions.with_raw_response.create(
            model=MODEL, prompt="x", extra_headers={"x-request-id": "mine"}
        )
        assert raw.headers["x-request-id"] == "mine"
        raw = await client.completions.with_raw_response.create(
            model=MODEL, prompt="x", extra_headers={"x-request-id": ""}
        )
        assert raw.headers["x-request-id"]  # one of our own
        assert raw.headers["x-pd-decode-engine"] == "decode-1"


async def test_errors_are_the_clients_own_types() -> None:
    import openai

    async with serve(make_app(FakeDispatcher(lambda _: [EngineUnavailable("none")]))) as client:
        with pytest.raises(openai.BadRequestError) as bad:
            await client.completions.create(model=MODEL, prompt="x", best_of=3)
        assert bad.value.param == "best_of"
        with pytest.raises(openai.NotFoundError) as unknown:
            await client.completions.create(model="other", prompt="x")
        assert unknown.value.code == "model_not_found"
        with pytest.raises(openai.InternalServerError) as unavailable:
            await client.completions.create(model=MODEL, prompt="x")
        assert unavailable.value.status_code == 503


async def test_a_broken_stream_is_an_error_for_the_client() -> None:
    import openai

    died = EngineDied("engine decode-1 died", request_id="r")
    async with serve(make_app(FakeDispatcher(lambda _: [tokens(*ids("a")), died]))) as client:
        stream = await client.completions.create(model=MODEL, prompt="x", stream=True)
        assert (await anext(stream)).choices[0].text == "a"
        with pytest.raises(openai.APIError, match="decode-1 died"):
            await anext(stream)
        response = await client.responses.create(model=MODEL, input="x", stream=True)
        with pytest.raises(openai.APIError, match="decode-1 died") as raised:
            [event async for event in response]
        assert raised.value.code == "engine_died"


async def test_closing_a_stream_aborts() -> None:
    dispatcher = FakeDispatcher(lambda _: [tokens(*ids("a"))])
    async with serve(make_app(dispatcher)) as client:
        stream = await client.completions.create(model=MODEL, prompt="x", stream=True)
        async for _ in stream:
            break
        await stream.close()
        [generation] = dispatcher.generations
        await generation.over.wait()
        assert generation.aborted
