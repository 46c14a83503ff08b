"""Load on a running deployment from clients that behave and clients that do not, and what must hold at rest."""

import asyncio
import contextlib
import json
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import httpx
import psutil
from deployments import NO_AUTHORITIES, Running

from pdkv.testing.deployment import shared_memory_files

BOUND_S = 60.0
"""A client that waits longer has been left hanging."""

End = Literal["read", "close", "drop", "deadline"]
"""The client reads to the end; closes a stream early; goes away without an answer; sets a tiny deadline."""


class Ask(NamedTuple):
    """One completion request, seeded (a greedy text repeats itself); `amount` is events before a close, or seconds."""

    prompt: str | Sequence[int]
    max_tokens: int
    stream: bool = False
    end: End = "read"
    amount: float = 0.0
    fields: Mapping[str, Any] = MappingProxyType({})  # of the body, beside or instead of those below

    def body(self) -> dict[str, Any]:
        """What is posted."""
        return {
            "model": "served",
            "prompt": self.prompt,
            "max_tokens": self.max_tokens,
            "seed": 1,
            "ignore_eos": True,
            "return_token_ids": True,
            "stream": self.stream,
            **self.fields,
        }


class Answer(NamedTuple):
    """How a request ended: with all tokens, with an error of the server, or by the client's own doing."""

    status: int | None = None  # None: the connection broke, or the client left before
    token_ids: list[int] | None = None  # where the end was reached
    error: dict[str, Any] | None = None  # OpenAI's shape, of a status or of the last event
    prefill: str = ""
    decode: str = ""
    broken: bool = False  # the connection ended without an end
    begun: Sequence[int] = ()  # tokens of a stream whose end was not reached

    @property
    def failed_clearly(self) -> bool:
        """Whether the server said what is wrong, in OpenAI's shape."""
        return self.error is not None and bool(self.error["message"]) and self.error["type"] == "server_error"


def client_of(deployment: Running, bound_s: float = BOUND_S) -> httpx.AsyncClient:
    """An asynchronous client with room for everything at once, which waits for so long for each part of a reply."""
    limits = httpx.Limits(max_connections=None)
    return httpx.AsyncClient(base_url=deployment.url, timeout=bound_s, limits=limits, verify=NO_AUTHORITIES)


async def send(
    client: httpx.AsyncClient, ask: Ask, on_event: Callable[[int], None] = lambda number: None, bound_s: float = BOUND_S
) -> Answer:
    """Send one request and do to it what it says. `on_event(n)` is called at the n-th event of a stream.

    Raises:
        TimeoutError: the server let it hang, for `bound_s`.
    """
    headers = {"x-pd-timeout-s": str(ask.amount)} if ask.end == "deadline" else {}
    async with asyncio.timeout(bound_s):
        try:
            if ask.stream:
                return await _stream(client, ask, headers, on_event)
            async with asyncio.timeout(ask.amount if ask.end == "drop" else None):
                reply = await client.post("/v1/completions", json=ask.body(), headers=headers)
            return _whole(reply)
        except TimeoutError:
            if ask.end != "drop":
                raise
            return Answer()
        except httpx.TransportError:
            return Answer(broken=True)


def _whole(reply: httpx.Response) -> Answer:
    if reply.status_code != 200:
        return Answer(reply.status_code, error=reply.json()["error"])
    return Answer(200, reply.json()["choices"][0]["token_ids"], None, *_engines(reply))


async def _stream(
    client: httpx.AsyncClient, ask: Ask, headers: dict[str, str], on_event: Callable[[int], None]
) -> Answer:
    async with client.stream("POST", "/v1/completions", json=ask.body(), headers=headers) as reply:
        if reply.status_code != 200:
            await reply.aread()
            return _whole(reply)
        token_ids: list[int] = []
        number = 0
        async for line in reply.aiter_lines():
            if ask.end == "close" and number >= ask.amount:
                return Answer(200, None, None, *_engines(reply), begun=token_ids)
            if not line.startswith("data: "):  # empty, or a comment after 15 s of silence
                continue
            data = line.removeprefix("data: ")
            if data == "[DONE]":
                return Answer(200, token_ids, None, *_engines(reply))
            event = json.loads(data)
            if "error" in event:
                return Answer(200, None, event["error"], *_engines(reply), begun=token_ids)
            token_ids += event["choices"][0]["token_ids"]
            number += 1
            on_event(number)
        return Answer(200, None, None, *_engines(reply), broken=True, begun=token_ids)


def _engines(reply: httpx.Response) -> tuple[str, str]:
    headers = reply.headers
    return headers.get("x-pd-prefill-engine", ""), headers.get("x-pd-decode-engine", "")  # they may be chosen later


async def send_all(client: httpx.AsyncClient, asks: Iterable[Ask], *, at_once: int) -> list[Answer]:
    """Send them all, so many at a time."""
    turns = asyncio.Semaphore(at_once)

    async def one(ask: Ask) -> Answer:
        async with turns:
            return await send(client, ask)

    return await asyncio.gather(*map(one, asks))


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    """All threads of the process are stopped (SIGSTOP) for the block."""
    try:
        stop_process(pid)
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def stop_process(pid: int) -> None:
    """SIGSTOP; returns when all threads of the process have stopped: until then another one may still answer.

    Raises:
        ProcessLookupError: there is no such process.
    """
    os.kill(pid, signal.SIGSTOP)
    tasks = Path(f"/proc/{pid}/task")
    wait_until_true(lambda: all(map(_has_stopped, tasks.iterdir())), f"a stop of process {pid}")


def _has_stopped(task: Path) -> bool:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it ended before it could stop: ask again
        return (task / "stat").read_text().rpartition(")")[2].split()[0] == "T"
    return False


def wait_until_true(check: Callable[[], Any], what: str, bound_s: float = BOUND_S) -> Any:
    """Ask again and again (nobody reports what is looked at here) until the answer is true; return it."""
    deadline = time.monotonic() + bound_s
    while not (answer := check()):
        assert time.monotonic() < deadline, f"not within {bound_s} s: {what}"
        time.sleep(0.03)  # leaves the processor to what is waited for
    return answer


def wait_for_engines(deployment: Running, killed: Container[int] = ()) -> None:
    """Return when every engine is ready, and none of them is one of the killed processes: the router may not have
    missed them yet.
    """
    wait_until_true(lambda: engines_are_there(deployment, killed), "all engines are there")


def engines_are_there(deployment: Running, killed: Container[int] = ()) -> bool:
    """Whether every engine is ready and its process runs and is none of the killed ones."""
    engines = deployment.get("/topology").json()["engines"]
    return all(e["state"] == "ready" and e["pid"] not in killed and _runs(e["pid"]) for e in engines)


def _runs(pid: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    return False


def wait_for_rest(deployment: Running) -> None:
    """Return when every engine is ready, idle and has all its blocks back, and the router has no request left."""
    wait_until_true(lambda: not unrest(deployment), "all engines at rest")
    in_flight = "pdkv_requests_in_flight 0.0"
    wait_until_true(lambda: in_flight in deployment.get("/metrics").text.splitlines(), "no request in flight")


def unrest(deployment: Running) -> list[dict[str, Any]]:
    """The engines that are not at rest, as /topology describes them."""
    engines: list[dict[str, Any]] = deployment.get("/topology").json()["engines"]
    return [engine for engine in engines if not _rests(engine)]


def _rests(engine: dict[str, Any]) -> bool:
    blocks = engine["blocks"]
    idle = engine["state"] == "ready" and engine["waiting"] == engine["running"] == 0
    return bool(idle and blocks["free"] + blocks["cached"] == blocks["total"])


def connections(deployment: Running) -> list[int]:
    """Ports of the clients to which the router has a connection that it has not closed."""
    router = psutil.Process(deployment.child_pid("pd router"))
    found = router.net_connections("tcp")
    return [connection.raddr.port for connection in found if connection.status != psutil.CONN_LISTEN]


class Holdings(NamedTuple):
    """What the processes of a deployment hold, by process."""

    resident: dict[str, int]  # bytes
    descriptors: dict[str, int]
    mappings: dict[str, Counter[str]]  # of anonymous shared memory, by name
    shared_memory_files: set[str]  # of this project


def holdings(deployment: Running) -> Holdings:
    """Read them from /proc."""
    launcher = psutil.Process(deployment.process.pid)
    processes = {f"{p.name()} {p.pid}": p for p in (launcher, *launcher.children(recursive=True))}
    return Holdings(
        {name: process.memory_info().rss for name, process in processes.items()},
        {name: process.num_fds() for name, process in processes.items()},
        {name: _shared_mappings(process.pid) for name, process in processes.items()},
        shared_memory_files(),
    )


def _shared_mappings(pid: int) -> Counter[str]:
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    paths = (line.split(maxsplit=5)[-1] for line in lines if "/memfd:" in line)
    return Counter(paths)


class ProcessHoldings(NamedTuple):
    """Of this process."""

    descriptors: int
    threads: int
    shared_mappings: int  # of named shared memory

    def within(self, other: "ProcessHoldings") -> bool:
        """Whether none is more. A thread that was joined may stand in /proc for a moment longer: ask again."""
        return all(mine <= theirs for mine, theirs in zip(self, other, strict=True))


def held_by_process() -> ProcessHoldings:
    """Read from /proc."""
    num_descriptors, num_threads = (len(os.listdir(f"/proc/self/{name}")) for name in ("fd", "task"))
    return ProcessHoldings(num_descriptors, num_threads, Path("/proc/self/maps").read_text().count("/dev/shm/"))


def wait_until_within(bound: ProcessHoldings) -> None:
    """Return when this process holds no more than that."""
    wait_until_true(lambda: held_by_process().within(bound), f"no more than {bound}")
