"""Faults under load (`make faults`): each kind, at each role, over each backend, and what its requests came to.

Requests come at a fixed rate, whether or not others are done, half of them streamed. After a third of them one engine
is killed, stopped for some seconds, or loses its connections to the router. None may fail, be wrong or hang.
"""

import argparse
import asyncio
import contextlib
import ctypes
import os
import signal
import socket
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
from deployments import Running, launches, write_tokenizer
from kills import FEW_TOKENS
from small_models import make_hf_model
from soak.backends import choose, extra_flags, select
from traffic import Answer, Ask, client_of, send, send_all, stopped, wait_for_rest, wait_until_true

KINDS = ("kill", "stop", "cut")
ROLES = ("prefill", "decode")
NUM_PROMPTS = 12
STOP_S = 5.0

_PIDFD_GETFD = 438


@dataclass
class Cell:
    """What became of the requests of one fault."""

    backend: str
    kind: str
    role: str
    requests: int = 0
    failed: int = 0
    wrong: int = 0
    hung: int = 0

    def count(self, answer: Answer | BaseException, expected: list[int]) -> None:
        """One more request."""
        self.requests += 1
        if isinstance(answer, BaseException):
            self.hung += 1
        elif answer.token_ids is None:
            self.failed += 1
            print(f"  failed: {answer}", file=sys.stderr)
        else:
            self.wrong += answer.token_ids != expected

    def row(self) -> str:
        """Of the table."""
        counts = (self.requests, self.failed, self.wrong, self.hung)
        return f"| {self.backend} | {self.kind} | {self.role} | {' | '.join(map(str, counts))} |"


def asks(num: int) -> list[Ask]:
    """Prompts in turn, of several lengths."""
    prompts = [f"Fault {i}: " + "and so on, " * (i % 4 * 10) for i in range(NUM_PROMPTS)]
    return [Ask(prompts[i % NUM_PROMPTS], 60, stream=bool(i % 2), fields=FEW_TOKENS) for i in range(num)]


def connections_of(pid: int, name: str) -> Iterator[socket.socket]:
    """Copies of an engine's connected sockets at its endpoint."""
    libc, pidfd = ctypes.CDLL(None, use_errno=True), os.pidfd_open(pid)
    try:
        for entry in os.listdir(f"/proc/{pid}/fd"):
            fd = libc.syscall(_PIDFD_GETFD, pidfd, int(entry), 0)
            if fd < 0:
                continue
            with contextlib.ExitStack() as stack:
                stack.callback(os.close, fd)
                if not os.readlink(f"/proc/self/fd/{fd}").startswith("socket:"):
                    continue
                stack.pop_all()
                connection = socket.socket(fileno=fd)
                with connection, contextlib.suppress(OSError):
                    connection.getpeername()
                    own = connection.getsockname()
                    if isinstance(own, str) and Path(own).name.startswith(name):
                        yield connection
    finally:
        os.close(pidfd)


async def inject(kind: str, name: str, pid: int) -> None:
    """Do it, and undo what has an end."""
    match kind:
        case "kill":
            os.kill(pid, signal.SIGKILL)
        case "stop":
            with stopped(pid):
                await asyncio.sleep(STOP_S)
        case "cut":
            num = 0
            for connection in connections_of(pid, name):
                connection.shutdown(socket.SHUT_RDWR)
                num += 1
            assert num, f"{name} has no connection"


async def run_cell(deployment: Running, cell: Cell, expected: Sequence[list[int]], num: int, rate: float) -> None:
    """The load of one cell, and its fault."""
    name = f"{cell.role}-0"
    pid = deployment.pids()[name]
    tasks: list[asyncio.Task[Answer]] = []
    fault: asyncio.Task[None] | None = None
    async with client_of(deployment) as client:
        for number, ask in enumerate(asks(num)):
            if number == num // 3:
                fault = asyncio.create_task(inject(cell.kind, name, pid))
            tasks.append(asyncio.create_task(send(client, ask)))
            await asyncio.sleep(1 / rate)
        answers = await asyncio.gather(*tasks, return_exceptions=True)
    assert fault is not None
    await fault
    for number, answer in enumerate(answers):
        cell.count(answer, expected[number % NUM_PROMPTS])


async def right_answers(deployment: Running) -> list[list[int]]:
    """To all prompts, when nothing happens."""
    async with client_of(deployment) as client:
        answers = await send_all(client, asks(NUM_PROMPTS), at_once=4)
    return [answer.token_ids or [] for answer in answers]


def is_well(deployment: Running) -> bool:
    """Whether every engine is there."""
    with contextlib.suppress(httpx.TransportError):
        return all(deployment.pids().values()) and deployment.get("/health").status_code == 200
    return False


def run_backend(model: Path, backend: str, kinds: Sequence[str], num: int, rate: float) -> list[Cell]:
    """All cells of one backend, on one deployment."""
    cells = [Cell(backend, kind, role) for kind in kinds for role in ROLES]
    with (
        tempfile.TemporaryDirectory(prefix="faults-") as directory,
        choose(backend, Path(directory)) as chosen,
        launches(model) as launch,
    ):
        deployment = launch("--prefill", "2", "--decode", "2", *chosen.flags, *extra_flags(backend))
        expected = asyncio.run(right_answers(deployment))
        for cell in cells:
            wait_until_true(lambda: is_well(deployment), "all engines")
            asyncio.run(run_cell(deployment, cell, expected, num, rate))
            print(cell.row(), flush=True)
            wait_until_true(lambda: is_well(deployment), "all engines are back")
            wait_for_rest(deployment)
    return cells


def main() -> int:
    """Run it; the exit status is 1 where a request was lost."""
    parser = argparse.ArgumentParser(prog="faults", description=__doc__)
    parser.add_argument("--backends", nargs="*", default=[], help="absent: all")
    parser.add_argument("--kinds", nargs="*", default=list(KINDS), choices=KINDS)
    parser.add_argument("--requests", type=int, default=100, help="per cell")
    parser.add_argument("--rate", type=float, default=15.0, help="requests a second")
    options = parser.parse_args()
    print("| backend | fault | at | requests | failed | wrong | hung |\n|---|---|---|---|---|---|---|", flush=True)
    cells: list[Cell] = []
    with tempfile.TemporaryDirectory(prefix="faults-model-") as directory:
        model = make_hf_model(Path(directory) / "served", "llama", "float32")
        write_tokenizer(model)
        for backend in select(options.backends):
            cells += run_backend(model, backend, options.kinds, options.requests, options.rate)
    lost = sum(cell.failed + cell.wrong + cell.hung for cell in cells)
    print(f"{sum(cell.requests for cell in cells)} requests, {lost} lost")
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main())
