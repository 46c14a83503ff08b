"""vLLM's API servers with pdkv inside, as processes. They need a Python that has both: VLLM_PYTHON, or this one."""

import contextlib
import functools
import importlib.util
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

START_BOUND_S = 300.0
REPLY_BOUND_S = 120.0
STOP_BOUND_S = 30.0
READY = "Application startup complete"
_SOURCE = re.compile(r'vllm:prompt_tokens_by_source_total\{.*source="(\w+)".*\} (\S+)')


@functools.cache
def vllm_python() -> str:
    """The interpreter, or the test is skipped."""
    python = os.environ.get("VLLM_PYTHON") or (sys.executable if importlib.util.find_spec("vllm") else "")
    if not python:
        pytest.skip("needs vLLM: set VLLM_PYTHON to a Python that has vllm and pdkv (docs/vllm.md)")
    check = subprocess.run([python, "-c", "import vllm, pdkv"], capture_output=True, text=True, check=False)
    if check.returncode:
        pytest.skip(f"{python} lacks vllm or pdkv: {check.stderr.strip().splitlines()[-1]}")
    return python


class VllmServer:
    """One server on the CPU, one core; a context manager that ends it with all its processes."""

    def __init__(self, model: Path, *, role: str, cpu: int, extra: Mapping[str, Any]) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="pdkv-")  # a short name: sockets lie there
        self._address = f"{self._directory.name}/api"
        transfer = {
            "kv_connector": "PdkvConnector",
            "kv_connector_module_path": "pdkv.vllm.adapter",
            "kv_role": role,
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": extra,
        }
        flags = {
            "model": model, "served-model-name": "served", "uds": self._address, "dtype": "float32",
            "max-model-len": 1024, "block-size": 32, "kv-transfer-config": json.dumps(transfer),
        }  # fmt: skip
        command = [vllm_python(), "-m", "vllm.entrypoints.openai.api_server", "--enforce-eager"]
        command += [text for name, value in flags.items() for text in (f"--{name}", str(value))]
        environment = {
            "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": str(cpu), "VLLM_HOST_IP": "127.0.0.1",
            "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "TMPDIR": self._directory.name,
        }  # fmt: skip
        self.process = subprocess.Popen(
            command,
            env={**os.environ, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        transport = httpx.HTTPTransport(uds=self._address)
        self._client = httpx.Client(transport=transport, base_url="http://vllm", timeout=REPLY_BOUND_S)
        self.lines: list[str] = []
        self._settled = threading.Event()  # it is ready, or it has ended
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)
            if READY in line:
                self._settled.set()
        self._settled.set()

    def __enter__(self) -> "VllmServer":
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()
        self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(STOP_BOUND_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(STOP_BOUND_S)
        self._reader.join(STOP_BOUND_S)
        assert self.process.stdout is not None
        self.process.stdout.close()
        self._directory.cleanup()

    def wait_ready(self) -> None:
        """Return when the server answers. Raises AssertionError with its log's end if it does not."""
        ready = self._settled.wait(START_BOUND_S) and self.process.poll() is None
        deadline = time.monotonic() + STOP_BOUND_S
        while ready and not self._listens():  # it says that it is ready a moment before
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(0.05)
            ready = time.monotonic() < deadline and self.process.poll() is None
        assert ready, "".join(self.lines[-60:])

    def _listens(self) -> bool:
        with socket.socket(socket.AF_UNIX) as probe:
            return probe.connect_ex(self._address) == 0

    def complete(self, prompt: Sequence[int], num_output: int, **fields: object) -> list[int]:
        """Greedy output tokens."""
        body = {
            "model": "served", "prompt": list(prompt), "max_tokens": num_output, "temperature": 0, "ignore_eos": True,
            "return_token_ids": True, **fields,
        }  # fmt: skip
        reply = self._client.post("/v1/completions", json=body)
        assert reply.status_code == 200, reply.text
        tokens: list[int] = reply.json()["choices"][0]["token_ids"]
        return tokens

    def prompt_tokens(self) -> dict[str, int]:
        """vLLM's own count of prompt tokens by where their KV came from."""
        return {source: int(float(count)) for source, count in _SOURCE.findall(self._client.get("/metrics").text)}


@contextlib.contextmanager
def vllm_pair(model: Path, extra: Mapping[str, Any]) -> Iterator[tuple[VllmServer, VllmServer]]:
    """A producer and a consumer that share whatever `extra` says."""
    with (
        VllmServer(model, role="kv_producer", cpu=0, extra=extra) as producer,
        VllmServer(model, role="kv_consumer", cpu=1, extra=extra) as consumer,
    ):
        producer.wait_ready()
        consumer.wait_ready()
        yield producer, consumer
