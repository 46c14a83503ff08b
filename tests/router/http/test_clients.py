"""Other people's clients: no request of theirs is refused."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from asgi_client import call
from asgi_client import run as run_in_process
from client_bodies import BODIES
from client_programs import python_with, run_program
from deployments import link_text_model
from fake_dispatcher import FakeDispatcher, say
from http_server import serving
from small_app import MODEL, eos, ids, make_app
from vllm_peers import vllm_python

from pdkv.config import HttpApi


@pytest.mark.parametrize(
    ("client", "path", "body"), [(client, path, body) for client, sent in BODIES.items() for path, body in sent]
)
def test_what_clients_send_is_served(client: str, path: str, body: dict[str, Any]) -> None:
    dispatcher = FakeDispatcher(say([*ids("ab"), eos()]))
    reply = run_in_process(call(make_app(dispatcher), "POST", path, body))
    assert reply.status == 200, (client, reply.json())
    if body.get("stream"):
        assert reply.events()[-1] == "[DONE]"
        assert all("error" not in event for event in reply.events()[:-1])
    assert dispatcher.requests


def with_server(use: Callable[[int], Awaitable[Any]]) -> Any:
    """Run `use` with the port of a server that answers everything."""

    async def main() -> Any:
        api = HttpApi(tool_parser="hermes")
        app = make_app(FakeDispatcher(say([*ids("ab"), eos()])), max_model_len=4096, api=api)
        async with serving(app) as server:
            return await use(server.port)

    return asyncio.run(main())


LITELLM = """
import sys, litellm
HI, at = [{"role": "user", "content": "hi"}], {"api_base": sys.argv[1], "api_key": "x"}
call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
history = [*HI, {"role": "assistant", "content": None, "tool_calls": [call]},
           {"role": "tool", "tool_call_id": "c", "name": "f", "content": "3"}]
for provider in ("openai", "hosted_vllm"):
    def ask(messages=HI, **fields):
        return litellm.completion(model=f"{provider}/small", messages=messages, **at, **fields)
    first = ask()
    texts = [
        first.choices[0].message.content,
        ask(temperature=0.3, max_tokens=3, n=2, seed=1, user="u", logprobs=True, top_logprobs=1,
            response_format={"type": "text"}).choices[1].message.content,
        ask(history).choices[0].message.content,
        ask([*HI, first.choices[0].message.model_dump(), *HI]).choices[0].message.content,
        "".join(c.choices[0].delta.content or "" for c in ask(stream=True, stream_options={"include_usage": True})
                if c.choices),
    ]
    assert texts == ["ab"] * 5, texts
text = litellm.text_completion(model="text-completion-openai/small", prompt="hi", best_of=1, echo=True, **at)
assert text.choices[0].text == "hiab", text
said = litellm.responses(model="openai/small", input="hi", instructions="s", **at)
assert said.output[-1].content[0].text == "ab", said
kinds = [event.type for event in litellm.responses(model="openai/small", input="hi", stream=True, **at)]
assert kinds[-1] == "response.completed", kinds
"""

LANGCHAIN = """
import sys
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_openai import ChatOpenAI, OpenAI
at = {"model": "small", "base_url": sys.argv[1], "api_key": "x"}
chat = ChatOpenAI(**at)
called = AIMessage("", tool_calls=[{"name": "f", "args": {"x": 1}, "id": "c"}])
history = [SystemMessage("s"), HumanMessage("q"), called, ToolMessage("3", tool_call_id="c")]
texts = [
    chat.invoke("hi").content,
    chat.invoke(history).content,
    chat.invoke([HumanMessage("q"), chat.invoke("hi"), HumanMessage("again")]).content,
    "".join(chunk.content for chunk in ChatOpenAI(stream_usage=True, **at).stream("hi")),
    ChatOpenAI(temperature=0.2, max_tokens=3, n=2, seed=3, logprobs=True, top_logprobs=2, **at).invoke("hi").content,
    OpenAI(**at).invoke("hi"),
    "".join(OpenAI(**at).stream("hi")),
    OpenAI(n=2, best_of=2, **at).generate(["a"]).generations[0][1].text,
    ChatOpenAI(use_responses_api=True, **at).invoke(history).text,
    "".join(chunk.text for chunk in ChatOpenAI(use_responses_api=True, **at).stream("hi")),
    ChatOpenAI(use_responses_api=True, verbosity="low", reasoning={"summary": "auto"}, **at).invoke("hi").text,
]
assert texts == ["ab"] * 11, [str(text) for text in texts]
"""

AGENTS = """
import asyncio, sys
from agents import Agent, ModelSettings, Runner, WebSearchTool, function_tool, set_tracing_disabled
from agents.models.openai_chatcompletions import OpenAIChatCompletionsModel
from agents.models.openai_responses import OpenAIResponsesModel
from openai import AsyncOpenAI
set_tracing_disabled(True)
client = AsyncOpenAI(base_url=sys.argv[1], api_key="x")

@function_tool
def weather(city: str, days: int = 1) -> str:
    "The weather of a city."
    return "sunny"

async def main():
    for kind, tools in ((OpenAIChatCompletionsModel, [weather]), (OpenAIResponsesModel, [weather, WebSearchTool()])):
        model = kind(model="small", openai_client=client)
        settings = ModelSettings(temperature=0.2, max_tokens=9, parallel_tool_calls=False)
        agent = Agent(name="a", instructions="s", model=model, tools=tools, model_settings=settings)
        first = await Runner.run(agent, "hi")
        assert first.final_output == "ab", first
        again = await Runner.run(agent, [*first.to_input_list(), {"role": "user", "content": "more"}])
        assert again.final_output == "ab", again
        streamed = Runner.run_streamed(agent, "hi")
        kinds = [event.type async for event in streamed.stream_events()]
        assert streamed.final_output == "ab" and kinds, streamed
asyncio.run(main())
"""


@pytest.mark.clients
@pytest.mark.parametrize(
    ("package", "program"), [("litellm", LITELLM), ("langchain_openai", LANGCHAIN), ("agents", AGENTS)]
)
def test_a_client_library_is_served(package: str, program: str) -> None:
    python = python_with(package)

    async def use(port: int) -> None:
        base = f"http://127.0.0.1:{port}/v1"
        await run_program(python, "-c", program, base, LITELLM_LOCAL_MODEL_COST_MAP="True")

    with_server(use)


@pytest.mark.clients
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_guidellm_is_served(path: str, tmp_path: Path, tiny_model_dir: Path) -> None:
    python = python_with("guidellm")
    link_text_model(tiny_model_dir, tmp_path)  # clients make prompts of so many tokens
    report = tmp_path / "report.json"

    async def use(port: int) -> None:
        backend = f"kind=openai_http,target=http://127.0.0.1:{port},model={MODEL},request_format={path}"
        flags = ["--backend", backend, "--tokenizer", f"kind=hf_auto,model={tmp_path}", "--disable-console"]
        flags += ["--data", "kind=synthetic_text,prompt_tokens=8,output_tokens=4", "--profile", "kind=synchronous"]
        flags += ["--constraint", "kind=max_requests,count=3", "--output", f"kind=json,path={report}"]
        await run_program(python, "-m", "guidellm", "run", *flags, HF_HUB_OFFLINE="1")

    with_server(use)
    totals = json.loads(report.read_text())["benchmarks"][0]["metrics"]["request_totals"]
    assert (totals["successful"], totals["errored"]) == (3, 0)


@pytest.mark.clients
@pytest.mark.vllm
@pytest.mark.parametrize(("backend", "path"), [("openai", "/v1/completions"), ("openai-chat", "/v1/chat/completions")])
def test_vllms_benchmark_is_served(backend: str, path: str, tmp_path: Path, tiny_model_dir: Path) -> None:
    python = vllm_python()
    link_text_model(tiny_model_dir, tmp_path)  # clients make prompts of so many tokens

    async def use(port: int) -> None:
        flags = ["--backend", backend, "--endpoint", path, "--base-url", f"http://127.0.0.1:{port}", "--model", MODEL]
        flags += ["--tokenizer", str(tmp_path), "--dataset-name", "random", "--random-input-len", "8"]
        flags += ["--random-output-len", "4", "--num-prompts", "3", "--ignore-eos", "--save-result"]
        flags += ["--result-dir", str(tmp_path), "--result-filename", "result.json"]
        await run_program(python, "-m", "vllm.entrypoints.cli.main", "bench", "serve", *flags)

    with_server(use)
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["completed"], result.get("failed", 0)) == (3, 0)
