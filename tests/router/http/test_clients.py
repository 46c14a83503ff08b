"""Other people's clients: no request of theirs is refused."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from asgi_client import call
from client_bodies import BODIES
from client_programs import python_with, run_program
from coroutines import run as run_in_process
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
