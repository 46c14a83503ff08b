"""The router as a process over real sockets: scripted engines listen on ipc, a client speaks HTTP."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import httpx
import pytest
import small_tokenizers
from scripted_engine import ScriptedEngine, expected_output, make_card, make_request

from pdkv.config import ModelFiles
from pdkv.router.process import model_of
from pdkv.router.spec import RouterSpec
from pdkv.wire.engine_server import EngineServer, RouterJoined, RouterLeft

TIMEOUT_S = 60.0

PROGRAM = """
import os, resource, sys
from pathlib import Path
from pdkv.config import ModelFiles
from pdkv.router.engines.address import EngineAddress
from pdkv.router.process import run_router
from pdkv.router.spec import RouterSpec

listen_fd, lifeline_fd, ready_fd, model, run_dir, open_files, drain_s = sys.argv[1:8]
if int(open_files):
    resource.setrlimit(resource.RLIMIT_NOFILE, (int(open_files) // 2, int(open_files)))
spec = RouterSpec(
    router_id="r",
    engines=[EngineAddress(n, n.partition("-")[0], f"ipc://{run_dir}/{n}") for n in ("prefill-0", "decode-0")],
    model=ModelFiles(model=Path(model)),
    served_model_names=["small"],
    drain_s=float(drain_s),
)
code = run_router(
    spec,
    listen_fd=int(listen_fd),
    lifeline_fd=int(lifeline_fd),
    admin_socket=Path(run_dir, "admin.sock"),
    marks_file=Path(run_dir, "engines.json"),
    on_ready=lambda: os.write(int(ready_fd), b"1"),
)
assert "torch" not in sys.modules
assert sys.getswitchinterval() < 0.001  # no thread keeps the interpreter from the event loop for longer
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

    def __init__(self, model: Path, run_dir: Path, open_files: int = 0, drain_s: float = 0.0) -> None:
        """`open_files`: its hard limit on descriptors, the soft one being half of it; 0: this process's."""
        self.run_dir = run_dir
        self.lifeline_read, self.lifeline_write = os.pipe()
        self._ready_read, ready_write = os.pipe()
        with closing(socket.create_server(("127.0.0.1", 0))) as listener:
            self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            self.listener = listener.dup()
            fds = [listener.fileno(), self.lifeline_read, ready_write]
            arguments = [*map(str, fds), str(model), str(run_dir), str(open_files), str(drain_s)]
            self.process = subprocess.Popen([sys.executable, "-c", PROGRAM, *arguments], pass_fds=fds)
        os.close(ready_write)
        self.client = httpx.Client(base_url=self.url, timeout=TIMEOUT_S)

    def wait_ready(self) -> None:
        assert os.read(self._ready_read, 1) == b"1"

    def close(self) -> None:
        self.client.close()
        self.listener.close()
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


@contextmanager
def stuck_stream(router: RouterProcess, engines: dict[str, EngineThread]) -> Iterator[Iterator[str]]:
    """The lines of a stream behind the first one; its decode engine does nothing."""
    for name in ("prefill-0", "decode-0"):
        engines[name] = EngineThread(name, router.run_dir)
    engines["decode-0"].engine.receive = lambda message: None  # type: ignore[method-assign]
    router.wait_ready()
    body = {"model": "small", "prompt": [1, 2, 3], "max_tokens": 5, "stream": True, "ignore_eos": True}
    with router.client.stream("POST", "/v1/completions", json=body) as response:
        lines = response.iter_lines()
        assert next(lines).startswith("data: {")
        yield lines


def test_stream_in_progress_ends_with_an_error_when_the_router_is_stopped(
    router: RouterProcess, engines: dict[str, EngineThread]
) -> None:
    with stuck_stream(router, engines) as lines:
        router.process.send_signal(signal.SIGTERM)
        rest = list(lines)
    assert any("shutting down" in line for line in rest)
    assert not any("[DONE]" in line for line in rest)
    assert router.process.wait(TIMEOUT_S) == 0


@pytest.fixture
def draining_router(model_dir: Path, tmp_path: Path) -> Iterator[RouterProcess]:
    """It may take a minute to answer what has begun when it is asked to stop."""
    router = RouterProcess(model_dir, tmp_path, drain_s=60.0)
    yield router
    router.close()


def hold(engine: ScriptedEngine) -> threading.Event:
    """The engine does nothing until this is set."""
    go, step = threading.Event(), engine.step

    def held(key: tuple[str, int]) -> None:
        go.wait(TIMEOUT_S)
        step(key)

    engine.step = held  # type: ignore[method-assign]
    return go


def test_what_has_begun_is_answered_after_sigterm_and_nothing_begins(
    draining_router: RouterProcess, engines: dict[str, EngineThread]
) -> None:
    """Finding 8 of the router's review; one answer is streamed, one is not."""
    router = draining_router
    for name in ("prefill-0", "decode-0"):
        engines[name] = EngineThread(name, router.run_dir)
    go = hold(engines["decode-0"].engine)
    router.wait_ready()
    body = {"model": "small", "prompt": list(range(20)), "max_tokens": 5, "ignore_eos": True, "return_token_ids": True}
    whole: list[httpx.Response] = []
    asks = threading.Thread(target=lambda: whole.append(router.client.post("/v1/completions", json=body | {"seed": 1})))
    with (
        httpx.Client(base_url=router.url, timeout=TIMEOUT_S) as other,
        other.stream("POST", "/v1/completions", json=body | {"stream": True}) as response,
    ):
        lines = response.iter_lines()
        assert next(lines).startswith("data: {")
        asks.start()
        while ask(router, "/topology").json()["engines"][1]["requests"] < 2:  # each answer lets it come in
            pass
        router.process.send_signal(signal.SIGTERM)
        while (health := ask(router, "/health")).status_code == 200:
            pass
        assert health.json()["error"]["code"] == "draining"
        refused = httpx.post(router.url + "/v1/completions", json=body, timeout=TIMEOUT_S)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
        assert refused.headers["retry-after"] == "1"
        assert refused.headers["connection"] == "close"
        go.set()
        rest = list(lines)
        asks.join()
    assert rest[-2] == "data: [DONE]"
    assert len(whole[0].json()["choices"][0]["token_ids"]) == 5
    assert router.process.wait(TIMEOUT_S) == 0


def test_a_second_sigterm_cuts_what_still_runs(
    draining_router: RouterProcess, engines: dict[str, EngineThread]
) -> None:
    router = draining_router
    with stuck_stream(router, engines) as lines:
        router.process.send_signal(signal.SIGTERM)
        while ask(router, "/health").status_code == 200:
            pass
        router.process.send_signal(signal.SIGTERM)
        assert any("shutting down" in line for line in lines)
    assert router.process.wait(TIMEOUT_S) == 0


def test_as_many_connections_wait_as_the_launcher_has_asked_for(router: RouterProcess) -> None:
    """Finding 18 of the router's review: uvicorn listens anew, and by itself for half as many."""
    assert router.client.get("/health").status_code == 503
    info = router.listener.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 32)
    allowed = int(Path("/proc/sys/net/core/somaxconn").read_text())
    assert int.from_bytes(info[28:32], sys.byteorder) == min(4096, allowed)  # tcpi_sacked of a listening socket


def test_operators_are_served_on_their_socket_only(router: RouterProcess, engines: dict[str, EngineThread]) -> None:
    for name in ("prefill-0", "decode-0"):
        engines[name] = EngineThread(name, router.run_dir)
    router.wait_ready()
    assert router.client.get("/admin/engines").status_code == 404
    transport = httpx.HTTPTransport(uds=str(router.run_dir / "admin.sock"))
    with httpx.Client(transport=transport, base_url="http://admin", timeout=TIMEOUT_S) as admin:
        names = [e["name"] for e in admin.get("/admin/engines").json()["engines"]]
        assert names == ["prefill-0", "decode-0"]
        for method, path, json_body, status, message in (
            ("POST", "/decode-0/drain", None, 409, "would leave no engine that can decode"),
            ("POST", "/decode-7/drain", None, 404, "there is no engine 'decode-7' (did you mean 'decode-0'?)"),
            ("POST", "/decode-0/role", {"role": "chef"}, 400, "role must be one of prefill, decode, any, got 'chef'"),
            ("POST", "/decode-0/role", {"rôle": "any"}, 400, "role: Field required"),
            ("POST", "/decode-0/drain?wait_s=nan", None, 400, "wait_s: Input should be a finite number, got 'nan'"),
            ("GET", "/decode-0?until=done", None, 400, "until: Input should be 'ready' or 'drained', got 'done'"),
            (
                "GET",
                "/decode-0?until=ready&pid=-1",
                None,
                400,
                "pid: Input should be greater than or equal to 0, got '-1'",
            ),
            ("DELETE", "/decode-0?force=yes", None, 400, "force: Input should be a valid boolean, got 'yes'"),
            ("DELETE", "/decode-0?forced=true", None, 400, "forced: Extra inputs are not permitted, got 'true'"),
            ("PUT", "/decode-0", {"role": "any"}, 400, "endpoint: Field required"),
        ):
            answer = admin.request(method, "/admin/engines" + path, json=json_body)
            assert (answer.status_code, message in answer.json()["error"]["message"]) == (status, True), answer.text
        drained = admin.post("/admin/engines/decode-0/drain?force=true&wait_s=20").json()
        assert (drained["draining"], drained["drained"]) == (True, True)
        assert router.client.get("/health").status_code == 503
        assert admin.post("/admin/engines/decode-0/resume").json()["draining"] is False
        assert router.client.get("/health").status_code == 200
        engines["decode-1"] = EngineThread("decode-1", router.run_dir)
        body = {"role": "decode", "endpoint": f"ipc://{router.run_dir}/decode-1"}
        assert admin.put("/admin/engines/decode-1", json=body).status_code == 200
        added = admin.get("/admin/engines/decode-1?until=ready&wait_s=20").json()
        assert (added["state"], added["role"]) == ("ready", "decode")
        assert {complete(router, 20 + i).headers["x-pd-decode-engine"] for i in range(4)} == {"decode-0", "decode-1"}
        assert admin.delete("/admin/engines/decode-0").json() == {"removed": "decode-0"}
        assert complete(router, 30).headers["x-pd-decode-engine"] == "decode-1"


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


def test_paced_engines_have_no_embeddings() -> None:
    spec = RouterSpec(router_id="r", engines=[], model=ModelFiles(model=Path("paced:h100")), served_model_names=["m"])
    assert model_of(spec).lacks == {"pooling": "paced:h100"}
