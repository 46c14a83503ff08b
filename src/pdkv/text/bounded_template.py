"""Templates that requests bring: compiled and rendered by a process of their own, which may take little."""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

import jinja2

from pdkv.base.clock import unix_time
from pdkv.text import sandbox


class BoundedTemplate:
    """One template in its process, which ends by itself at its bounds (`sandbox.main`). A context manager."""

    def __init__(self, source: str) -> None:
        """Raises jinja2.TemplateError: it is broken, or takes too much."""
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-s", sandbox.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={name: os.environ[name] for name in ("PYTHONPATH", "TZ") if name in os.environ},
        )
        try:
            self._ask([source, unix_time()])
        except BaseException:
            self.close()
            raise

    def render(self, variables: Mapping[str, Any]) -> str:
        """Raises jinja2.TemplateError: the template refuses them, or takes too much."""
        return self._ask(variables)["text"]

    def _ask(self, value: Any) -> dict[str, str]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(value).encode() + b"\n")
            self._process.stdin.flush()
            answer: dict[str, str] = json.loads(self._process.stdout.readline())
        except (OSError, ValueError):  # it has ended
            raise jinja2.TemplateError(
                f"it took more than {sandbox.CPU_S} s of a processor or {sandbox.MEMORY_BYTES >> 20} MiB of memory"
            ) from None
        if "error" in answer:
            raise jinja2.TemplateError(answer["error"])
        return answer

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        with contextlib.suppress(BrokenPipeError), self._process:
            pass

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()
