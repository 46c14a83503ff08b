"""`pd launch --prefill 2 --decode 4` with the embedded model until its first healthy answer, against `import torch`; a
host's second engine against its first one, which reads its weights from disk.
"""

import contextlib
import os
import re
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

from benchmarks.models import find_model
from benchmarks.report import Claim, Context
from benchmarks.servers import START_TIMEOUT_S, free_port, pdkv, running

LIMIT = 4.0
SECOND_LIMIT = 0.5
_PD = (sys.executable, "-P", "-m", "pdkv.cli")
_SMALL_POOL = ("--kv-cache-memory", "256MiB", "--log-level", "info")
_READY = re.compile(r"ready after ([\d.]+) s: (.+)")


def run(context: Context) -> list[Claim]:
    """One claim; imports and launches take turns."""
    rounds = 1 if context.quick else 5
    _import_torch()  # the page cache is warm for both
    imports, launches = [], []
    for _ in range(rounds):
        imports.append(_import_torch())
        with pdkv(None, prefill=2, decode=4) as server:
            launches.append(server.start_s)
    ready, base = median(launches), median(imports)
    return [Claim("2P4D ready", ready / base, LIMIT, "lower", {"ready s": ready, "import torch s": base})]


def _import_torch() -> float:
    """Seconds of a process that imports torch and ends."""
    start = time.perf_counter()
    subprocess.run([sys.executable, "-P", "-c", "import torch"], check=True)
    return time.perf_counter() - start


def run_second(context: Context) -> list[Claim]:
    """Two claims, by the seconds in the engines' own logs: `pd scale` adds the second, or `pd engine` runs it."""
    model = find_model(context.models, "tiny" if context.quick else "large")
    rounds = range(1 if context.quick else 3)
    return [
        _second("pd scale", [_scaled(model) for _ in rounds]),
        _second("pd engine", [_hosted(model) for _ in rounds]),
    ]


def _second(name: str, rounds: list[list[dict[str, float]]]) -> Claim:
    """The round with the median ratio, with the phases of both starts."""
    first, second = sorted(rounds, key=lambda pair: pair[1]["all"] / pair[0]["all"])[len(rounds) // 2]
    figures = {
        f"{which}, {phase} s": s for which, pair in (("first", first), ("second", second)) for phase, s in pair.items()
    }
    return Claim(f"second engine ready / first, {name}", second["all"] / first["all"], SECOND_LIMIT, "lower", figures)


def _scaled(model: Path) -> list[dict[str, float]]:
    """A launch's first engine, and the one that is added to it."""
    _drop_pages(model)
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        with pdkv(model, prefill=0, decode=1, options=_SMALL_POOL, log=log) as server:
            subprocess.run([*_PD, "scale", "--decode", "2", server.url], check=True, stdout=subprocess.DEVNULL)
            return [_starts(log)[0], _starts(log)[1]]


def _hosted(model: Path) -> list[dict[str, float]]:
    """Two of `pd engine`, each a process tree of its own, the second while the first runs."""
    _drop_pages(model)
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        return [stack.enter_context(_engine(model, Path(folder), name)) for name in ("a", "b")]


@contextlib.contextmanager
def _engine(model: Path, folder: Path, name: str) -> Iterator[dict[str, float]]:
    key, log = folder / "key", folder / f"{name}.log"
    if not key.exists():
        key.touch(0o600)
        key.write_text(secrets.token_hex(32))
    listen = f"tcp://127.0.0.1:{free_port()}"
    place = ("--name", name, "--role", "any", "--listen", listen, "--cluster-key-file", str(key))
    with running(
        [*_PD, "engine", *place, "--model", str(model.resolve()), *_SMALL_POOL], listen, wait=False, log=log
    ) as engine:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not (found := _starts(log)):
            if engine.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"pd engine {name} did not become ready")
            time.sleep(0.1)
        yield found[0]


def _starts(log: Path) -> list[dict[str, float]]:
    """The seconds of each engine's start by phase, and all together."""
    return [_phases(f"all {total} s, {parts}") for total, parts in _READY.findall(log.read_text())]


def _phases(text: str) -> dict[str, float]:
    pairs = (part.rpartition(" ") for part in text.removesuffix(" s").split(" s, "))
    return {name: float(seconds) for name, _, seconds in pairs}


def _drop_pages(model: Path) -> None:
    """Have the model's files read from disk again."""
    for path in model.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
