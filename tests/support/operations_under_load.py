"""What operators do, under load (`make operations`), and the loss of a whole role: what its requests came to.

Requests come at a fixed rate, whether or not others are done, half of them streamed. After a third of them something is
done, and they go on until it is over. None may fail, be wrong or hang. Only behind a stop they are refused, with 503
and the code `draining`, or because nobody listens any more; what came before it is answered.
"""

import argparse
import asyncio
import datetime
import functools
import json
import os
import signal
import sys
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
from deployments import Running, launches, write_tokenizer
from faults.load import PROMPTS
from faults.run import is_well
from kills import FEW_TOKENS
from prometheus_client.parser import text_string_to_metric_families
from small_models import make_hf_model
from soak.backends import choose, extra_flags, select
from soak.report import RESULTS
from traffic import Answer, Ask, client_of, send, send_all, stopped, wait_for_rest, wait_until_true

from pdkv.launch.control import Restart, Scale, give_order
from pdkv.launch.router_admin import RouterAdmin

DRAIN_S = 60.0
GONE_S = 5.0
NUM_TOKENS = 60
NUM_TOKENS_AT_STOP = 300
MAX_REQUESTS = 4000
"""Of a cell: an operation that is not over then takes too long."""


class Cell(msgspec.Struct, kw_only=True):
    """What became of the requests of one operation."""

    backend: str
    operation: str
    requests: int = 0
    streamed: int = 0
    failed: int = 0
    wrong: int = 0
    hung: int = 0
    refused: int = 0  # after a stop
    running: int = 0  # when the operation began
    seconds: float = 0.0  # of the operation

    @property
    def name(self) -> str:
        """Of the cell, for people."""
        return f"{self.backend}: {self.operation}"

    def count(self, ask: Ask, answer: Answer | BaseException, expected: list[int], *, late: bool = False) -> None:
        """One more request; `late`: it came after a stop."""
        if late and isinstance(answer, Answer) and (answer.broken or (answer.error or {}).get("code") == "draining"):
            self.refused += 1
            return
        self.requests += 1
        self.streamed += ask.stream
        if isinstance(answer, BaseException):
            self.hung += 1
        elif answer.token_ids is None:
            self.failed += 1
            print(f"  failed: {answer}", file=sys.stderr)
        else:
            self.wrong += answer.token_ids != expected

    @property
    def num_lost(self) -> int:
        """Those that were not answered as they should."""
        return self.failed + self.wrong + self.hung

    def row(self) -> str:
        """Of the table."""
        counts = (self.requests, self.streamed, self.running, self.failed, self.wrong, self.hung, self.refused)
        return f"| {self.backend} | {self.operation} | {' | '.join(map(str, counts))} | {self.seconds:.1f} s |"


HEAD = (
    "| backend | operation | requests | streamed | running when it began | failed | wrong | hung "
    "| refused after a stop | took |\n"
    "|---|---|---|---|---|---|---|---|---|---|"
)


class Known(NamedTuple):
    """What is asked for, and the right answers."""

    asks: Sequence[Ask]
    answers: Sequence[list[int]]


def _know(deployment: Running, max_tokens: int) -> Known:
    """When nothing happens."""
    pool = [Ask(prompt, max_tokens, fields=FEW_TOKENS) for prompt in PROMPTS]

    async def ask_all() -> list[Answer]:
        async with client_of(deployment) as client:
            return await send_all(client, pool, at_once=4)

    answers = [answer.token_ids or [] for answer in asyncio.run(ask_all())]
    assert {len(token_ids) for token_ids in answers} == {max_tokens}
    return Known(pool, answers)


Operation = Callable[[Running], Awaitable[None]]


async def _drain(deployment: Running) -> None:
    """Each engine in turn."""
    router = RouterAdmin(deployment.run_dir)
    for engine in await router.engines():
        drained = await router.drain(engine["name"], DRAIN_S)
        assert drained["drained"], drained
        await router.resume(engine["name"])


async def _flip(deployment: Running) -> None:
    """One engine of each role does the other's work, and then its own again."""
    router = RouterAdmin(deployment.run_dir)
    for name, role, other in (("decode-1", "decode", "prefill"), ("prefill-1", "prefill", "decode")):
        for new in (other, role):
            await router.set_role(name, new)
            await asyncio.sleep(2.0)


async def _scale(deployment: Running) -> None:
    """Up and down, each role."""
    for prefill, decode in ((None, 3), (None, 2), (3, None), (2, None)):
        await give_order(deployment.run_dir, Scale(prefill, decode, DRAIN_S), lambda text: None)


async def _restart(deployment: Running) -> None:
    await give_order(deployment.run_dir, Restart(DRAIN_S), lambda text: None)


async def _restart_at_once(deployment: Running) -> None:
    """What runs is moved."""
    await give_order(deployment.run_dir, Restart(0.0), lambda text: None)


async def _gone(deployment: Running, role: str) -> None:
    """All engines of a role are killed while the launcher, which would start them again, is stopped."""
    victims = [pid for name, pid in deployment.pids().items() if name.startswith(role)]
    with stopped(deployment.process.pid):
        for pid in victims:
            os.kill(pid, signal.SIGKILL)
        await asyncio.sleep(GONE_S)
    await asyncio.to_thread(wait_until_true, lambda: is_well(deployment), "all engines are back")


async def _stop(deployment: Running) -> None:
    deployment.process.send_signal(signal.SIGTERM)
    assert await asyncio.to_thread(deployment.finish) == 0, deployment.log


STOP = f"SIGTERM, --drain-s {DRAIN_S:g}"
OPERATIONS: dict[str, Operation] = {
    "drain and resume": _drain,
    "role flip": _flip,
    "scale up and down": _scale,
    "rolling restart": _restart,
    "rolling restart, --drain-s 0": _restart_at_once,
    f"all prefill engines gone for {GONE_S:g} s": functools.partial(_gone, role="prefill"),
    f"all decode engines gone for {GONE_S:g} s": functools.partial(_gone, role="decode"),
    STOP: _stop,
}
"""The stop is the last one."""


async def run_cell(deployment: Running, cell: Cell, known: Known, num: int, rate: float) -> None:
    """The load of one cell, and its operation."""
    loop = asyncio.get_running_loop()
    pending: list[tuple[Ask, bool, asyncio.Task[Answer]]] = []
    operation: asyncio.Task[None] | None = None
    began = first = loop.time()
    pool, before = known.asks, sum(_counts(deployment))
    async with client_of(deployment) as client:
        while len(pending) < num or operation is None or not operation.done():
            assert len(pending) < MAX_REQUESTS, f"{cell.name}: not over after {loop.time() - began:.0f} s"
            number = len(pending)
            if number == _begins_at(cell, num):
                cell.running = await _all_have_come(deployment, before + number)
                began = loop.time()
                operation = asyncio.create_task(OPERATIONS[cell.operation](deployment))
                await asyncio.sleep(0)
            ask = pool[number % len(PROMPTS)]._replace(stream=number // len(PROMPTS) % 2 == number % 2)
            late = operation is not None and cell.operation == STOP
            pending.append((ask, late, asyncio.create_task(send(client, ask))))
            if operation is not None and operation.done() and not cell.seconds:
                cell.seconds = round(loop.time() - began, 2)
            await asyncio.sleep(max(first + (number + 1) / rate - loop.time(), 0.0))
        answers = await asyncio.gather(*(task for _, _, task in pending), return_exceptions=True)
    await operation
    cell.seconds = cell.seconds or round(loop.time() - began, 2)
    for number, ((ask, late, _), answer) in enumerate(zip(pending, answers, strict=True)):
        cell.count(ask, answer, known.answers[number % len(PROMPTS)], late=late)


async def _all_have_come(deployment: Running, number: int) -> int:
    """Wait until the router has read the headers of so many requests; returns how many of them still run."""
    while True:
        ended, running = await asyncio.to_thread(_counts, deployment)
        if ended + running >= number:
            return running


def _counts(deployment: Running) -> tuple[int, int]:
    """Requests that ended since the router's start, and those that run."""
    families = text_string_to_metric_families(deployment.get("/metrics").text)
    samples = [sample for family in families for sample in family.samples]
    ended, running = (
        sum(sample.value for sample in samples if sample.name == name)
        for name in ("pdkv_requests_total", "pdkv_requests_in_flight")
    )
    return int(ended), int(running)


def _begins_at(cell: Cell, num: int) -> int:
    """The request at which the operation begins: a stop, when enough have come that must be answered."""
    return num if cell.operation == STOP else num // 3


def run_backend(model: Path, backend: str, operations: Sequence[str], num: int, rate: float) -> list[Cell]:
    """All cells of one backend, on one deployment."""
    cells = [Cell(backend=backend, operation=operation) for operation in operations]
    with (
        tempfile.TemporaryDirectory(prefix="operations-") as directory,
        choose(backend, Path(directory)) as chosen,
        launches(model) as launch,
    ):
        flags = ("--prefill", "2", "--decode", "2", "--drain-s", f"{DRAIN_S:g}")
        deployment = launch(*flags, *chosen.flags, *extra_flags(backend))
        short, long = (_know(deployment, max_tokens) for max_tokens in (NUM_TOKENS, NUM_TOKENS_AT_STOP))
        for cell in cells:
            wait_until_true(lambda: is_well(deployment), "all engines")
            wait_for_rest(deployment)
            asyncio.run(run_cell(deployment, cell, long if cell.operation == STOP else short, num, rate))
            print(cell.row(), flush=True)
    return cells


def save(cells: Sequence[Cell], folder: Path) -> None:
    """Merge into today's files."""
    day = datetime.datetime.now(datetime.UTC).date().isoformat()
    path = folder / f"operations-{day}.json"
    document = json.loads(path.read_text()) if path.exists() else {}
    document |= {cell.name: msgspec.to_builtins(cell) for cell in cells}
    path.write_text(json.dumps(document, indent=2) + "\n")
    rows = [msgspec.convert(value, Cell) for value in document.values()]
    total = f"{sum(row.requests for row in rows)} requests, {sum(row.num_lost for row in rows)} lost."
    head = f"# Operations under load, {day}\n\nTwo prefill and two decode engines; `make operations`. {total}\n\n"
    path.with_suffix(".md").write_text(head + "\n".join([HEAD, *(row.row() for row in rows)]) + "\n")


def main() -> int:
    """Run it; the exit status is 1 where a request was lost."""
    parser = argparse.ArgumentParser(prog="operations_under_load", description=__doc__)
    parser.add_argument("--backends", nargs="*", default=[], help="absent: all")
    parser.add_argument("--operations", nargs="*", default=list(OPERATIONS), choices=list(OPERATIONS))
    parser.add_argument("--requests", type=int, default=100, help="per cell, at least")
    parser.add_argument("--rate", type=float, default=15.0, help="requests a second")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the report")
    options = parser.parse_args()
    print(HEAD, flush=True)
    cells: list[Cell] = []
    with tempfile.TemporaryDirectory(prefix="operations-model-") as directory:
        model = make_hf_model(Path(directory) / "served", "llama", "float32")
        write_tokenizer(model)
        for backend in select(options.backends):
            cells += run_backend(model, backend, options.operations, options.requests, options.rate)
            save(cells, options.out)
    lost = sum(cell.num_lost for cell in cells)
    print(f"{sum(cell.requests for cell in cells)} requests, {lost} lost")
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main())
