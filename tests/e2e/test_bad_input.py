"""What cannot work is one clear error that names the value, and does no harm: over HTTP and at the start."""

import json
import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from deployments import NO_AUTHORITIES, Launch, Running
from serving_checks import SOURCES
from traffic import wait_until_true

from pdkv.cli.main import main
from pdkv.launch import launcher

MAX_MODEL_LEN = 1024
VOCABULARY = 384
CLIENT: dict[str, Any] = {"verify": NO_AUTHORITIES, "timeout": 60}
USER = [{"role": "user", "content": "x"}]


@pytest.fixture(scope="module")
def deployment(module_launch: Launch) -> Iterator[Running]:
    deployment = module_launch("--prefill", "1", "--decode", "1")
    wait_until_true(lambda: len(steps_taken(deployment)) == 2 * len(SOURCES), "both engines have reported")
    before = deployment.pids(), steps_taken(deployment)
    yield deployment
    assert (deployment.pids(), steps_taken(deployment)) == before, "a bad request reached an engine"
    assert deployment.complete("x").status_code == 200


def steps_taken(deployment: Running) -> list[str]:
    """The engines' counters of steps that had tokens to compute."""
    lines = deployment.get("/metrics").text.splitlines()
    return [line for line in lines if line.startswith("pdkv_engine_prompt_tokens_total")]


def error_of(reply: httpx.Response, status: int) -> dict[str, Any]:
    """The error of a reply, which has OpenAI's shape."""
    assert reply.status_code == status, reply.text
    assert reply.headers["content-type"] == "application/json"
    [(name, error)] = reply.json().items()
    assert name == "error"
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert error["message"]
    return dict(error)


@pytest.mark.parametrize(
    ("path", "fields", "status", "param", "words"),
    [
        ("completions", {"model": "other"}, 404, "model", "'other'"),
        ("completions", {"model": 7}, 400, "model", "int"),
        ("completions", {"prompt": ""}, 400, "prompt", "empty"),
        ("completions", {"prompt": ["a", ""]}, 400, "prompt", "empty"),
        ("completions", {"prompt": []}, 400, "prompt", "empty"),
        ("completions", {"prompt": {"a": 1}}, 400, "prompt", "object"),
        ("completions", {"prompt": [5, VOCABULARY]}, 400, "prompt", str(VOCABULARY)),
        ("completions", {"prompt": [-1]}, 400, "prompt", "-1"),
        ("completions", {"prompt": "x" * MAX_MODEL_LEN}, 400, "prompt", f"{MAX_MODEL_LEN} tokens"),
        ("completions", {"prompt": "x" * 100_000}, 400, "prompt", "100000 characters"),
        ("completions", {"prompt": "x" * 1000, "max_tokens": 25}, 400, "max_tokens", "max_tokens is 25"),
        ("completions", {"max_tokens": "many"}, 400, "max_tokens", "str"),
        ("completions", {"max_tokens": -1}, 400, "max_tokens", "-1"),
        ("completions", {"temperature": -9}, 400, "temperature", "9"),
        ("completions", {"n": 1000}, 400, "n", "1000"),
        ("completions", {"stop_token_ids": [VOCABULARY]}, 400, "stop_token_ids", str(VOCABULARY)),
        ("completions", {"logit_bias": {"9999": 1}}, 400, "logit_bias", "9999"),
        ("completions", {"stream": "yes"}, 400, "stream", "str"),
        ("completions", {"best_of": 3}, 400, "best_of", "must be n (1)"),
        ("completions", {"colour": "red"}, 400, "colour", "not a known field"),
        ("chat/completions", {"model": "other"}, 404, "model", "'other'"),
        ("chat/completions", {"messages": []}, 400, "messages", "empty"),
        ("chat/completions", {"messages": "hi"}, 400, "messages", "array"),
        ("chat/completions", {"messages": [{"role": "king", "content": "x"}]}, 400, "messages[0].role", "king"),
        ("chat/completions", {"messages": [{"role": "user"}]}, 400, "messages[0].content", "required"),
        ("chat/completions", {"messages": [{**USER[0], "content": "x" * 2000}]}, 400, "messages", "tokens"),
        ("chat/completions", {"tools": [{"type": "function"}]}, 400, "tools[0].function", "an object with a name"),
    ],
)  # fmt: skip
def test_a_request_that_cannot_work_names_its_field(
    deployment: Running, path: str, fields: dict[str, Any], status: int, param: str, words: str
) -> None:
    body = {"model": "served", **({"prompt": "x"} if path == "completions" else {"messages": USER}), **fields}
    error = error_of(httpx.post(f"{deployment.url}/v1/{path}", json=body, **CLIENT), status)
    assert error["param"] == param
    assert words in error["message"]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b'{"model": "served", "prompt": "x"', "not valid JSON"),
        (b'{"model": "served", "prompt": "\xff"}', "not valid JSON"),
        (b'{"prompt": ' + b"[" * 100_000, "lists"),
        (b"[]", "object"),
        (b'"x"', "object"),
        (b"{}", "prompt is required"),
    ],
)
def test_a_body_that_is_no_request_is_refused(deployment: Running, content: bytes, words: str) -> None:
    headers = {"content-type": "application/json"}
    reply = httpx.post(f"{deployment.url}/v1/completions", content=content, headers=headers, **CLIENT)
    assert words in error_of(reply, 400)["message"]


@pytest.mark.parametrize(
    ("method", "path", "headers", "status", "words"),
    [
        ("POST", "/v1/embeddings", {}, 404, "/v1/embeddings"),
        ("GET", "/v1/completions", {}, 405, "GET"),
        ("GET", "/v1/models/other", {}, 404, "'other'"),
        ("POST", "/v1/completions", {"content-type": "text/plain"}, 415, "'text/plain'"),
        ("POST", "/v1/completions", {"x-pd-timeout-s": "soon"}, 400, "'soon'"),
        ("POST", "/v1/completions", {"x-request-id": "i" * 1000}, 400, "x-request-id"),
    ],
)
def test_a_wrong_path_method_or_header_is_named(
    deployment: Running, method: str, path: str, headers: dict[str, str], status: int, words: str
) -> None:
    body = json.dumps({"model": "served", "prompt": "x"}) if method == "POST" else None
    headers = {"content-type": "application/json", **headers}
    reply = httpx.request(method, deployment.url + path, content=body, headers=headers, **CLIENT)
    assert words in error_of(reply, status)["message"]


def test_a_body_that_is_too_large_is_refused_before_it_is_read(deployment: Running) -> None:
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {64 << 20}\r\n\r\n"
    host, port = deployment.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        connection.sendall(head.encode())
        assert connection.recv(100).startswith(b"HTTP/1.1 413 ")


def test_what_is_no_http_is_refused(deployment: Running) -> None:
    host, port = deployment.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        connection.sendall(b"\x16\x03\x01 hello\r\n\r\n")
        assert connection.recv(100).startswith(b"HTTP/1.1 400 ")


# --- at the start -------------------------------------------------------------------------------------------------

Break = Callable[[Path], object]


@pytest.fixture
def broken_copy(served_model: Path, tmp_path: Path) -> Callable[[Break], Path]:
    """Makes a copy of the model and breaks it."""

    def make(break_it: Break) -> Path:
        path = tmp_path / "broken"
        shutil.copytree(served_model, path)
        break_it(path)
        return path

    return make


def remove(name: str) -> Break:
    return lambda path: (path / name).unlink()


def write(name: str, text: str) -> Break:
    return lambda path: (path / name).write_text(text)


def truncate(name: str) -> Break:
    def cut(path: Path) -> None:
        data = (path / name).read_bytes()
        (path / name).write_bytes(data[: len(data) // 2])

    return cut


def configure(**fields: Any) -> Break:
    """Changes fields of config.json; None removes one."""

    def change(path: Path) -> None:
        config = json.loads((path / "config.json").read_text()) | fields
        kept = {name: value for name, value in config.items() if value is not None}
        (path / "config.json").write_text(json.dumps(kept))

    return change


@pytest.fixture
def refused(
    served_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., None]:
    """Runs a `pd` command that starts nothing: exit code 2, and its only line says what is wrong."""

    def must_not_start(*_: object) -> None:
        raise AssertionError("it starts")

    monkeypatch.setattr(launcher, "run_supervised", must_not_start)

    def run(command: str, *flags: str, words: list[str]) -> None:
        own = {"launch": ["--port", "0"], "generate": ["x"]}[command]
        memory = ["--kv-cache-memory", "8MiB", "--threads", "1"]
        assert main([command, "--model", str(served_model), *memory, *own, *flags]) == 2
        (line,) = [x for x in capsys.readouterr().err.splitlines() if x.startswith("pd")]
        assert line.startswith("pd: error: ")
        for word in words:
            assert word in line

    return run


@pytest.mark.parametrize(
    ("command", "break_it", "words"),
    [
        ("launch", shutil.rmtree, ["broken does not exist"]),
        ("launch", remove("config.json"), ["config.json", "no such file"]),
        ("launch", truncate("config.json"), ["config.json", "JSON"]),
        ("launch", write("config.json", "[]"), ["config.json", "object"]),
        ("launch", configure(architectures=["MambaForCausalLM"]), ["'MambaForCausalLM'", "LlamaForCausalLM"]),
        ("launch", configure(hidden_size=None), ["config.json", "'hidden_size' is missing"]),
        ("launch", configure(hidden_size="64"), ["config.json", "'hidden_size'", "'64'"]),
        ("launch", configure(num_key_value_heads=3), ["4 attention heads", "3 key-value heads"]),
        ("launch", configure(rope_scaling={"rope_type": "mrope", "factor": 4.0}), ["'mrope'", "linear"]),
        ("launch", configure(rope_parameters={"rope_type": "mrope", "factor": 4.0}), ["'mrope'", "linear"]),
        ("generate", truncate("model.safetensors"), ["model.safetensors", "cannot be read"]),
        ("generate", configure(intermediate_size=128), ["gate_proj.weight", "(160, 64)", "(128, 64)"]),
        ("generate", remove("tokenizer.json"), ["broken", "tokenizer.json is missing"]),
        ("generate", truncate("tokenizer.json"), ["tokenizer.json", "broken"]),
    ],
)
def test_a_broken_model_is_named(
    refused: Callable[..., None],
    broken_copy: Callable[[Break], Path],
    command: str,
    break_it: Break,
    words: list[str],
) -> None:
    refused(command, "--model", str(broken_copy(break_it)), words=words)


@pytest.mark.parametrize(
    ("command", "flags", "words"),
    [
        ("generate", ["--kv-cache-memory", "1KiB"], ["kv_cache_memory", "1024 bytes"]),
        (
            "generate",
            ["--kv-cache-memory", "512KiB", "--max-model-len", "1024"],
            ["holds", "1024 (max_model_len)", "--kv-cache-memory", "--max-model-len"],
        ),
        (
            "launch",
            ["--kv-cache-memory", "1000GiB"],
            ["1 KV pool of 1000.0 GiB and 1", "--kv-cache-memory", "available"],
        ),
        ("launch", ["--device", "cuda:99"], ["cuda:99"]),
    ],
)
def test_a_bad_flag_is_named(refused: Callable[..., None], command: str, flags: list[str], words: list[str]) -> None:
    """`tests/cli/test_commands.py` has more of them."""
    refused(command, *flags, words=words)


def test_pools_that_fit_alone_and_not_together_are_refused_before_anything_is_allocated(
    refused: Callable[..., None],
) -> None:
    memory = str(psutil.virtual_memory().available * 6 // 10)
    refused(
        "launch", "--kv-cache-memory", memory, "--connector", "p2p", words=["KV pool", "--kv-cache-memory", "available"]
    )


def test_a_port_in_use_is_named(refused: Callable[..., None], deployment: Running) -> None:
    port = deployment.url.rpartition(":")[2]
    refused("launch", "--port", port, words=[f"127.0.0.1:{port}", "in use"])
    assert deployment.get("/health").status_code == 200


@pytest.mark.parametrize(
    ("break_it", "flags", "words"),
    [
        pytest.param(
            lambda _: None, ["--connector", "memory"], ["'memory' joins engines of one process only"], id="in an engine"
        ),
        pytest.param(write("chat_template.jinja", "{% for x in %}"), [], ["chat template"], id="in the router"),
        pytest.param(
            lambda _: None, ["--decode-dtype", "bfloat16"], ["KV layout", "prefill-0", "decode-0"], id="between engines"
        ),
        pytest.param(lambda _: None, ["--cpu-bind", "9999"], ["9999"], id="of the host"),
    ],
)
def test_what_is_only_seen_when_it_starts_ends_the_launch(
    launch: Launch, broken_copy: Callable[[Break], Path], break_it: Break, flags: list[str], words: list[str]
) -> None:
    deployment = launch("--model", str(broken_copy(break_it)), *flags, wait=False)
    assert deployment.finish() == 2
    assert "Traceback" not in deployment.log
    line = deployment.lines[-1]
    assert line.startswith("pd: error: ")
    for word in words:
        assert word in line
