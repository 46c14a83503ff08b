"""Templates from requests: compiled and rendered in a separate process with limits."""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import jinja2

from pdkv.base.clock import unix_time
from pdkv.text import sandbox
from pdkv.text.sandbox import Render


@contextlib.contextmanager
def bounded_template(source: str) -> Iterator[Render]:
    """A template in its process, which ends by itself at its limits (`sandbox.main`).

    This and the yielded function raise jinja2.TemplateError: it is broken, refuses its variables, or takes too long.
    """
    environment = {name: os.environ[name] for name in ("PYTHONPATH", "TZ") if name in os.environ}
    process = subprocess.Popen(
        [sys.executable, "-P", "-s", sandbox.__file__],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment,
    )  # fmt: skip
    try:
        _ask(process, [source, unix_time()])
        yield lambda variables: str(_ask(process, variables)["text"])
    finally:
        process.kill()
        with contextlib.suppress(BrokenPipeError), process:
            pass


def _ask(process: "subprocess.Popen[bytes]", value: Any) -> dict[str, str]:
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(json.dumps(value).encode() + b"\n")
        process.stdin.flush()
        answer: dict[str, str] = json.loads(process.stdout.readline())
    except (OSError, ValueError):  # it has ended
        bounds = f"{sandbox.CPU_S} s of a processor or {sandbox.MEMORY_BYTES >> 20} MiB of memory"
        raise jinja2.TemplateError(f"it took more than {bounds}") from None
    if "error" in answer:
        raise jinja2.TemplateError(answer["error"])
    return answer
