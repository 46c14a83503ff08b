"""`pd launch --prefill 1 --decode 1` on one card, KV handed over by NIXL: the answers are those from the CPU, those too
for which KV comes back from host memory.
"""

from collections.abc import Iterator

from benchmarks.report import Claim
from benchmarks.servers import Server, metric, pdkv, post

PROMPTS = ["The first token", "waits for the prompt,", "and every further one", "for its turn: " * 40]
LONG_PROMPTS = [f"{number}: " + "the next one waits for its turn. " * 20 for number in range(6)]
NUM_TOKENS = 24

_POOL = ["--kv-cache-memory", "64MiB"]
_SMALL_POOL = ["--kv-cache-memory", "4MiB", "--max-model-len", "1000"]
"""Room for 1,024 tokens, which is less than two of the long prompts and their outputs."""

_TIER = ["--kv-host-memory", "64MiB", "--connector-config", "store.min_hit_tokens=1"]


def launches(device: str, scale: str) -> list[tuple[int, int, list[str]]]:
    """Numbers of prefill and decode engines, and other options, of what is started; the same at every scale."""
    return [(1, 1, _options(device, *_POOL)), (1, 1, _options(device, *_SMALL_POOL, *_TIER))]


def run(device: str, scale: str) -> Iterator[Claim]:
    """The shares of prompts that get another answer; of the long ones in both passes, the second from host memory."""
    answers, start_s = {}, 0.0
    for where in ("cpu", device):
        with pdkv(None, prefill=1, decode=1, options=launches(where, scale)[0][2]) as server:
            answers[where] = [_complete(server, prompt) for prompt in (*PROMPTS, *LONG_PROMPTS)]
            start_s = server.start_s
    expected = answers["cpu"]
    wrong = _num_different(expected, answers[device])
    name = f"1P1D over nixl, {device} against cpu: other answers"
    yield Claim(name, wrong / len(expected), 0.0, "lower", {"start s": start_s})
    with pdkv(None, prefill=1, decode=1, options=launches(device, scale)[1][2]) as server:
        twice = [_complete(server, prompt) for prompt in LONG_PROMPTS * 2]
        tokens = {
            source: metric(server, "pdkv_engine_prompt_tokens_total", role="prefill", source=source)
            for source in ("computed", "store")
        }
    wrong = _num_different(expected[len(PROMPTS) :] * 2, twice)
    name = f"with a pool too small and host memory, {device} against cpu: other answers"
    yield Claim(name, wrong / len(twice), 0.0, "lower", {"start s": server.start_s})
    share = tokens["store"] / sum(tokens.values())
    figures = {f"tokens {source}": number for source, number in tokens.items()}
    yield Claim("prompt tokens from host memory / those and computed ones", share, 0.4, "higher", figures)


def _options(device: str, *more: str) -> list[str]:
    return ["--device", device, "--dtype", "float32", "--connector", "nixl", *more]


def _complete(server: Server, prompt: str) -> list[int]:
    body = {"model": server.model, "prompt": prompt, "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}
    answer = post(server.url + "/v1/completions", body | {"return_token_ids": True})
    tokens: list[int] = answer["choices"][0]["token_ids"]
    return tokens


def _num_different(one: list[list[int]], other: list[list[int]]) -> int:
    return sum(a != b for a, b in zip(one, other, strict=True))
