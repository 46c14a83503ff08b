"""The router as a process over real sockets: scripted engines listen on ipc, a client speaks HTTP."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import httpx
import pytest
import small_tokenizers
from scripted_engine import ScriptedEngine, expected_output, make_card, make_request

from pdkv.wire.engine_server import EngineServer, RouterJoined, RouterLeft

TIMEOUT_S = 60.0

PROGRAM = """
import os, resource, sys
from pathlib import Path
from pdkv.router.process import EngineEndpoint, run_router

listen_fd, lifeline_fd, ready_fd, model, run_dir, open_files = sys.argv[1:7]
if int(open_files):
    resource.setrlimit(resource.RLIMIT_NOFILE, (int(open_files) // 2, int(open_files)))
code = run_router(
    router_id="r",
    listen_fd=int(listen_fd),
    engines=[EngineEndpoint(n, n.partition("-")[0], f"ipc://{run_dir}/{n}") for n in ("prefill-0", "decode-0")],
    model=Path(model),
    served_model_name="small",
    lifeline_fd=int(lifeline_fd),
    on_ready=lambda: os.write(int(ready_fd), b"1"),
)
assert "torch" not in sys.modules
sys.exit(code)
"""

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 512,
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "intermediate_size": 8,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 1,
    "torch_dtype": "float32",
}


class EngineThread:
    """A scripted engine behind a real socket."""

    def __init__(self, name: str, run_dir: Path) -> None:
        self.engine = ScriptedEngine(name)
        self._changed = threading.Condition()
        self._server = EngineServer(f"ipc://{run_dir}/{name}", make_card(name, name.partition("-")[0]))
        self._stop_read, self._stop_write = os.pipe()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        server, engine = self._server, self.engine
        while not _readable(self._stop_read):
            server.poll(0.0 if engine.runnable() else None, self._stop_read)
            for _, message in server.receive():
                match message:
                    case RouterJoined() | RouterLeft():
                        pass
                    case _:
                        engine.receive(message)
            for key in engine.runnable():
                engine.step(key)
            if engine.outbox:
                said, engine.outbox = engine.outbox, []
                server.send("r", said)
            with self._changed:
                self._changed.notify_all()
        server.close()

    def wait_released(self) -> None:
        """Return when no lease is left."""
        with self._changed:
            assert self._changed.wait_for(lambda: not self.engine.leases, TIMEOUT_S)

    def stop(self) -> None:
        """The engine is gone, as after a kill: its socket closes without a word."""
        if self._thread.is_alive():
            os.write(self._stop_write, b"x")
            self._thread.join()
            os.close(self._stop_read)
            os.close(self._stop_write)


def _readable(fd: int) -> bool:
    import select

    return bool(select.select([fd], [], [], 0)[0])


class RouterProcess:
    """`run_router` in a process of its own, on a socket that this process made."""

    def __init__(self, model: Path, run_dir: Path, open_files: int = 0) -> None:
        """`open_files`: its hard limit on descriptors, the soft one being half of it; 0: this process's."""
        self.run_dir = run_dir
        self.lifeline_read, self.lifeline_write = os.pipe()
        self._ready_read, ready_write = os.pipe()
        with closing(socket.create_server(("127.0.0.1", 0))) as listener:
            self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            fds = [listener.fileno(), self.lifeline_read, ready_write]
            arguments = [*map(str, fds), str(model), str(run_dir), str(open_files)]
            self.process = subprocess.Popen([sys.executable, "-c", PROGRAM, *arguments], pass_fds=fds)
        os.close(ready_write)
        self.client = httpx.Client(base_url=self.url, timeout=TIMEOUT_S)

    def wait_ready(self) -> None:
        assert os.read(self._ready_read, 1) == b"1"

    def close(self) -> None:
        self.client.close()
        self.process.kill()
        self.process.wait()
        for fd in (self.lifeline_read, self.lifeline_write, self._ready_read):
            os.close(fd)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    small_tokenizers.byte_level_backend().save(str(path / "tokenizer.json"))
    (path / "config.json").write_text(json.dumps(CONFIG))
    return path


@pytest.fixture
def router(model_dir: Path, tmp_path: Path) -> Iterator[RouterProcess]:
    router = RouterProcess(model_dir, tmp_path)
    yield router
    router.close()


@pytest.fixture
def engines() -> Iterator[dict[str, EngineThread]]:
    engines: dict[str, EngineThread] = {}
    yield engines
    for engine in engines.values():
        engine.stop()


def complete(router: RouterProcess, num_prompt: int) -> httpx.Response:
    body = {"model": "small", "prompt": list(range(num_prompt)), "max_tokens": 5, "return_token_ids": True, "seed": 1}
    return router.client.post("/v1/completions", json=body)


def test_router_serves_over_real_sockets_survives_a_death_and_stops_on_sigterm(
    router: RouterProcess, engines: dict[str, EngineThread]
) -> None:
    assert router.client.get("/health").status_code == 503
    assert complete(router, 20).status_code == 503
    for name in ("prefill-0", "decode-0"):
        engines[name] = EngineThread(name, router.run_dir)
    router.wait_ready()
    assert router.client.get("/health").status_code == 200
    for num_prompt in (1, 16, 20):
        response = complete(router, num_prompt)
        assert response.status_code == 200, response.text
        assert response.json()["choices"][0]["token_ids"] == expected_output(make_request(num_prompt))
        assert response.headers["x-pd-prefill-engine"] == "prefill-0"
        assert response.headers["x-pd-decode-engine"] == "decode-0"
    engines["prefill-0"].wait_released()
    engines["decode-0"].stop()
    while router.client.get("/health").status_code == 200:  # its death is an event: each answer lets it come in
        pass
    states = {e["name"]: e["state"] for e in router.client.get("/topology").json()["engines"]}
    assert states == {"prefill-0": "ready", "decode-0": "dead"}
    engines["decode-0"] = EngineThread("decode-0", router.run_dir)
    while router.client.get("/health").status_code == 503:
        pass
    assert complete(router, 20).json()["choices"][0]["token_ids"] == expected_output(make_request(20))
    router.process.send_signal(signal.SIGTERM)
    assert router.process.wait(TIMEOUT_S) == 0


def test_stream_in_progress_ends_with_an_error_when_the_router_is_stopped(
    router: RouterProcess, engines: dict[str, EngineThread]
) -> None:
    for name in ("prefill-0", "decode-0"):
        engines[name] = EngineThread(name, router.run_dir)
    engines["decode-0"].engine.receive = lambda message: None  # type: ignore[method-assign]
    router.wait_ready()
    body = {"model": "small", "prompt": [1, 2, 3], "max_tokens": 5, "stream": True, "ignore_eos": True}
    with router.client.stream("POST", "/v1/completions", json=body) as response:
        lines = response.iter_lines()
        assert next(lines).startswith("data: {")
        router.process.send_signal(signal.SIGTERM)
        rest = list(lines)
    assert any("shutting down" in line for line in rest)
    assert not any("[DONE]" in line for line in rest)
    assert router.process.wait(TIMEOUT_S) == 0


def test_router_ends_with_its_launcher(router: RouterProcess) -> None:
    assert router.client.get("/health").status_code == 503
    router.process.send_signal(signal.SIGINT)  # Ctrl-C is the launcher's business
    assert router.client.get("/health").status_code == 503
    os.close(router.lifeline_write)
    router.lifeline_write = os.dup(router.lifeline_read)
    assert router.process.wait(TIMEOUT_S) == 0


def test_idle_connections_do_not_make_the_router_unreachable(
    model_dir: Path, tmp_path: Path, engines: dict[str, EngineThread]
) -> None:
    """400 of them at 256 descriptors: those that say nothing make room, and an engine can still come back."""
    router = RouterProcess(model_dir, tmp_path, open_files=256)
    address = ("127.0.0.1", int(router.url.rpartition(":")[2]))
    idle: list[socket.socket] = []
    try:
        for name in ("prefill-0", "decode-0"):
            engines[name] = EngineThread(name, router.run_dir)
        router.wait_ready()
        router.client.close()
        for _ in range(400):
            idle.append(socket.create_connection(address, TIMEOUT_S))
        while (reply := ask(router, "/health")).status_code != 200:
            assert (reply.status_code, reply.json()["error"]["code"]) == (503, "server_busy")
        engines["decode-0"].stop()
        while ask(router, "/health").status_code == 200:
            pass
        engines["decode-0"] = EngineThread("decode-0", router.run_dir)
        while ask(router, "/health").status_code == 503:
            pass
    finally:
        for connection in idle:
            connection.close()
        router.close()


def ask(router: RouterProcess, path: str) -> httpx.Response:
    """On a connection of its own."""
    return httpx.get(router.url + path, timeout=TIMEOUT_S)
