"""Outputs of every kind of request with each proposer, compared with those of one engine without any.

python -m guesses: each cell of a cover in which every two of proposer, connector, topology, ranks, mishap and way of
choosing meet answers all requests twice, the second time from its caches. Text, token ids, reasons and tool calls must
be equal, and logprobs within 1e-5 of those of an engine of as many ranks. Exit code 1 where an output differs or there
are fewer outputs than --outputs. --part 2/5 runs the second fifth of the cells. With --dtype bfloat16 all compute in
that, by the same-bits rule (docs/failures.md): a row's bits do not depend on the rows beside it. They do depend on
whether a token was a prompt's or an output's, so no request finds KV that was another's output.
"""

import argparse
import asyncio
import os
import re
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from deployments import Running, launches
from faults.replies import Reply, ask_all, ask_all_and_move
from matrix_rows import BACKENDS
from traffic import wait_for_engines, wait_for_rest

from benchmarks.models import find_wide
from guesses.asks import all_asks, predicted
from guesses.cells import Cell, cover
from pdkv.config import DEFAULT_MODEL

MISHAP_AT = 150
"""The number of the event, over all streams, with which something happens."""

ACCEPTED = "vllm:spec_decode_num_accepted_tokens"
COUNTERS = {"preemption": "pdkv_engine_preemptions", "migration": "pdkv_migrations", "kill": "pdkv_migrations"}
"""Names in /metrics of what shows that it has happened."""

DRAFTER_NOISE = 2.0
BLOCK_BYTES = {"float32": 4 * 2 * 4 * 32 * 16 * 4, "bfloat16": 4 * 2 * 4 * 32 * 16 * 2}
"""Of the embedded model, by dtype: layers, sides, heads, their size, tokens, bytes of a number."""


def asks_in(dtype: str) -> dict[str, dict[str, Any]]:
    """All requests; in bfloat16 each with a cache of its own."""
    return {name: {**ask, **({"cache_salt": name} if dtype == "bfloat16" else {})} for name, ask in all_asks().items()}


def differences(mine: Reply, right: Reply) -> list[str]:
    """What of a reply is not as it should be."""
    found = [
        f"{name} {theirs} != {own}"
        for name in ("texts", "reasons", "tokens", "token_ids")
        if (own := getattr(mine, name)) != (theirs := getattr(right, name))
    ]
    if mine.logprobs.keys() != right.logprobs.keys():
        return [*found, "logprobs are missing"]
    apart = [
        max(map(abs, map(float.__sub__, values, mine.logprobs[index])), default=0.0)
        for index, values in right.logprobs.items()
    ]
    return [*found, *(f"logprobs are {most:g} apart" for most in apart if most > 1e-5)]


def disturbed(deployment: Running, cell: Cell, asks: dict[str, Any]) -> dict[str, Reply]:
    """The answers to all requests at once, and what the cell has happen amid them."""
    pids = deployment.pids()
    name = next(name for name in pids if not name.startswith("prefill"))
    if cell.mishap == "migration":
        return ask_all_and_move(deployment, asks, "guesses", name, MISHAP_AT)

    def happen(number: int) -> None:
        if number == MISHAP_AT and cell.mishap == "kill":
            os.kill(pids[name], signal.SIGKILL)

    replies = asyncio.run(ask_all(deployment, asks, "guesses", happen))
    wait_for_engines(deployment, [pids[name]] if cell.mishap == "kill" else ())
    return replies


def right_answers(ranks: int, dtype: str) -> dict[str, Reply]:
    """Those of one engine that guesses nothing."""
    flags = ["--tp", str(ranks), "--kv-cache-memory", str(1600 * BLOCK_BYTES[dtype]), "--dtype", dtype]
    with launches(DEFAULT_MODEL) as launch:
        plain = launch("--prefill", "0", "--decode", "1", *flags)
        return asyncio.run(ask_all(plain, asks_in(dtype), "guesses"))


def run_cell(cell: Cell, drafter: Path, right: dict[str, Reply], dtype: str) -> tuple[int, list[str]]:
    """How many outputs there were, and those that differ."""
    count, found = 0, list[str]()
    asks = asks_in(dtype)
    asks |= {name: predicted(ask, right[name].texts[0]) for name, ask in asks.items() if "chat" in name}
    with (
        tempfile.TemporaryDirectory(prefix="guesses-") as folder,
        BACKENDS[cell.backend](directory=folder) as chosen,
        launches(DEFAULT_MODEL) as launch,
    ):
        deployment = launch(*cell.flags(drafter, BLOCK_BYTES[dtype]), "--dtype", dtype, *chosen.flags)
        for _ in range(2):
            for name, reply in disturbed(deployment, cell, asks).items():
                count += len(reply.reasons)
                found += [f"{name}: {text}" for text in differences(reply, right[name])]
        wait_for_rest(deployment)
        metrics = deployment.get("/metrics").text
    for name in (ACCEPTED, COUNTERS.get(cell.mishap, ACCEPTED)):
        if not sum(map(float, re.findall(rf"^{name}_total(?:\{{.*\}})? (.*)$", metrics, re.MULTILINE))):
            found.append(f"no {name}")
    return count, found


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="guesses", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--outputs", type=int, default=0, help="exit code 1 where there are fewer")
    parser.add_argument("--part", default="1/1", help="of the cells, such as 2/5")
    parser.add_argument("--dtype", choices=BLOCK_BYTES, default="float32", help="in which is computed")
    options = parser.parse_args(arguments)
    part, parts = map(int, options.part.split("/"))
    cells = cover()[part - 1 :: parts]
    total = num_wrong = 0
    with tempfile.TemporaryDirectory(prefix="guesses-model-") as folder:
        drafter = find_wide(Path(folder), 256, DRAFTER_NOISE, options.dtype)
        right = {ranks: right_answers(ranks, options.dtype) for ranks in {cell.ranks for cell in cells}}
        for number, cell in enumerate(cells, 1):
            started = time.monotonic()
            try:
                count, wrong = run_cell(cell, drafter, right[cell.ranks], options.dtype)
            except Exception:  # the others are compared all the same
                traceback.print_exc()
                count, wrong = 0, ["it failed"]
            total, num_wrong = total + count, num_wrong + len(wrong)
            seconds = time.monotonic() - started
            print(
                f"{number} of {len(cells)}: {cell}: {count} outputs, {len(wrong)} differ ({seconds:.0f} s)", flush=True
            )
            print(*(f"  {text[:300]}" for text in wrong[:5]), sep="\n", end="\n" if wrong else "", flush=True)
    print(f"{total} outputs, {num_wrong} differ")
    return 1 if num_wrong or total < options.outputs else 0


if __name__ == "__main__":
    sys.exit(main())
