"""`pd launch --prefill 1 --decode 1` on one card, KV handed over by NIXL: the answers are those from the CPU."""

from collections.abc import Iterator

from benchmarks.report import Claim
from benchmarks.servers import Server, pdkv, post

PROMPTS = ["The first token", "waits for the prompt,", "and every further one", "for its turn: " * 40]
NUM_TOKENS = 24


def run(device: str, smoke: bool) -> Iterator[Claim]:
    """One claim: the share of prompts that get another answer."""
    answers = {}
    for where in ("cpu", device):
        options = ["--device", where, "--dtype", "float32", "--connector", "nixl", "--kv-cache-memory", "64MiB"]
        with pdkv(None, prefill=1, decode=1, options=options) as server:
            answers[where] = [_complete(server, prompt) for prompt in PROMPTS]
            figures = {"start s": server.start_s}
    wrong = sum(one != other for one, other in zip(answers["cpu"], answers[device], strict=True))
    yield Claim(f"1P1D over nixl, {device} against cpu: other answers", wrong / len(PROMPTS), 0.0, "lower", figures)


def _complete(server: Server, prompt: str) -> list[int]:
    body = {"model": server.model, "prompt": prompt, "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}
    answer = post(server.url + "/v1/completions", body | {"return_token_ids": True})
    tokens: list[int] = answer["choices"][0]["token_ids"]
    return tokens
