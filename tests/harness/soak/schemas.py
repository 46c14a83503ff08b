"""The JSON Schema Test Suite's schemas through real engines: what is answered fulfils them, the rest is a 400.

    python -m soak.schemas

One prefill and one decode engine of a random model whose tokens are bytes. A bias towards closing quotes, brackets and
the end stands for a model that ends its answers.
"""

import argparse
import asyncio
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import httpx
import msgspec
from deployments import NO_AUTHORITIES, Running
from schema_judge import why_wrong
from schema_suite import Group, groups

from pdkv.text import Tokenizer
from soak.report import RESULTS, write_json
from soak.small_launch import launched

MAX_TOKENS = 1024
ANSWER_BOUND_S = 300.0
FLAGS = ("--kv-cache-memory", "64MiB", "--max-num-seqs", "32")
_AT_ONCE = 16
_BIAS = {'"': 4.0, "]": 4.0, "}": 4.0, " ": -4.0}
_EOS, _EOS_BIAS = 1, 8.0


class Result(msgspec.Struct, kw_only=True):
    """What a run saw."""

    schemas: int = 0
    refused: dict[str, int] = {}  # with a 400, by keyword or by the beginning of what was said
    answered: int = 0
    complete: int = 0  # of the answers, within MAX_TOKENS
    violations: list[str] = []  # complete and wrong, or neither answered nor refused

    @property
    def share_complete(self) -> float:
        """Of the answers."""
        return self.complete / max(self.answered, 1)


def ask_all(deployment: Running, suite: Sequence[Group], model: Path) -> Result:
    """One answer for each schema."""
    tokenizer = Tokenizer.from_dir(model)
    bias = {str(tokenizer.encode(text, add_special_tokens=False)[0]): value for text, value in _BIAS.items()}
    return asyncio.run(_ask_all(deployment.url, suite, bias | {str(_EOS): _EOS_BIAS}))


async def _ask_all(url: str, suite: Sequence[Group], bias: dict[str, float]) -> Result:
    result, refused, gate = Result(), Counter[str](), asyncio.Semaphore(_AT_ONCE)
    async with httpx.AsyncClient(timeout=ANSWER_BOUND_S, verify=NO_AUTHORITIES) as client:

        async def ask(number: int, group: Group) -> None:
            body = {
                "model": "served",
                "prompt": [5, 6, 7],
                "max_tokens": MAX_TOKENS,
                "seed": number,
                "logit_bias": bias,
            }
            async with gate:
                shape = {"structured_outputs": {"json": group.schema}}
                reply = await client.post(f"{url}/v1/completions", json=body | shape)
            result.schemas += 1
            if reply.status_code == 400:
                refused[_reason(reply.json()["error"]["message"])] += 1
            elif reply.status_code == 200:
                _judge(result, group, reply.json()["choices"][0])
            else:
                result.violations.append(f"{group.name}: {reply.status_code} {reply.text[:300]}")

        await asyncio.gather(*(ask(number, group) for number, group in enumerate(suite)))
    result.refused = dict(refused.most_common())
    return result


def _reason(message: str) -> str:
    """The keyword that a refusal names."""
    _, found, behind = message.partition("the keyword '")
    return behind.partition("'")[0] if found else message[:60]


def _judge(result: Result, group: Group, choice: dict[str, str]) -> None:
    result.answered += 1
    if choice["finish_reason"] != "stop":
        return
    result.complete += 1
    if error := why_wrong(group.schema, choice["text"]):
        result.violations.append(f"{group.name}: {choice['text']!r}: {error}")


def summary(result: Result) -> str:
    """Some lines for people."""
    refused = ", ".join(f"{count} {name}" for name, count in result.refused.items())
    lines = [
        f"{result.schemas} schemas: {result.answered} answered, {result.complete} of them complete within {MAX_TOKENS} "
        f"tokens ({result.share_complete:.1%}), {sum(result.refused.values())} refused: {refused}"
    ]
    return "\n".join([*lines, *(f"  VIOLATION {text[:600]}" for text in result.violations)])


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser("soak.schemas", description=__doc__)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the report")
    options = parser.parse_args(arguments)
    with launched(*FLAGS, max_position_embeddings=2048) as (deployment, model):
        result = ask_all(deployment, list(groups()), model)
    write_json("schemas", result, options.out)
    print(summary(result), flush=True)
    return 1 if result.violations or result.share_complete < 0.8 else 0


if __name__ == "__main__":
    sys.exit(main())
