"""What cannot work at the start is one clear error that names the value."""

import json
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from deployments import Launch

from pdkv.cli.main import main
from pdkv.launch import launcher

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
    """Changes fields of config.json."""

    def change(path: Path) -> None:
        config = json.loads((path / "config.json").read_text()) | fields
        (path / "config.json").write_text(json.dumps(config))

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
        ("generate", truncate("model.safetensors"), ["model.safetensors", "cannot be read"]),
        ("generate", configure(intermediate_size=128), ["gate_proj.weight", "(160, 64)", "(128, 64)"]),
        ("generate", remove("tokenizer.json"), ["broken", "tokenizer.json is missing"]),
        ("generate", truncate("tokenizer.json"), ["tokenizer.json", "broken"]),
    ],
)
def test_a_broken_model_is_named(
    refused: Callable[..., None], broken_copy: Callable[[Break], Path], command: str, break_it: Break, words: list[str]
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


def test_a_port_in_use_is_named(refused: Callable[..., None]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        refused("launch", "--port", str(port), words=[f"127.0.0.1:{port}", "in use"])


@pytest.mark.parametrize(
    ("break_it", "flags", "words"),
    [
        pytest.param(
            lambda _: None,
            ["--connector", "memory"],
            ["'memory' connects only engines in one process"],
            id="in an engine",
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
