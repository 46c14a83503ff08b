"""Jinja as Hugging Face's chat templates expect it, in a sandbox; also a program, for untrusted templates.

The program renders one template within limits of time and memory. It imports nothing of the project, so that it starts
at once.
"""

import json
import os
import resource
import signal
import sys
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

CPU_S, WALL_S, MEMORY_BYTES, MAX_CHARS = 2, 20, 512 << 20, 16 << 20
"""Limits of the program: processor seconds, seconds, memory, and the longest prompt."""

REFUSALS = (
    jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError,
    MemoryError,
)  # fmt: skip
"""Exceptions that a template may raise, deliberately or by mistake."""

Render = Callable[[Mapping[str, Any]], str]
"""A compiled template: renders the text for values of its variables. Raises REFUSALS."""


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}…{% endgeneration %}` marks an assistant's text for training; to serve, it is just its body."""

    tags = {"generation"}  # noqa: RUF012 (jinja2's own attribute)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON: jinja2's own filter escapes HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def compile_template(source: str, now: Callable[[], datetime]) -> Render:
    """Compile a template with that clock for `strftime_now`. Raises REFUSALS for a broken one."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda format: now().strftime(format)
    return environment.from_string(source).render


def main() -> None:
    """Answer each JSON line on stdin: the first is the template's source and the time, every later one a set of
    variables to render.
    """
    signal.alarm(WALL_S)
    for limit, value in (
        (resource.RLIMIT_CPU, CPU_S), (resource.RLIMIT_AS, MEMORY_BYTES), (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0), (resource.RLIMIT_NOFILE, 16),
    ):  # fmt: skip
        resource.setrlimit(limit, (value, value))
    render: Render | None = None
    for line in sys.stdin.buffer:
        answer: dict[str, str] = {}
        try:
            if render is None:
                source, now = json.loads(line)
                render = compile_template(source, lambda now=now: datetime.fromtimestamp(now))  # type: ignore[misc]
            else:
                answer["text"] = render(json.loads(line))
                if len(answer["text"]) > MAX_CHARS:
                    raise ValueError(f"the prompt has more than {MAX_CHARS} characters")
        except REFUSALS as error:
            answer = {"error": f"{error}" or type(error).__name__}
        os.write(1, json.dumps(answer).encode() + b"\n")


if __name__ == "__main__":
    main()
