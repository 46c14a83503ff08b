"""Measures an engine from outside, and fits the curves of a profile to what was measured."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from statistics import median
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pdkv.base.options import options_of
from pdkv.bench.client import Reply
from pdkv.bench.datasets import Maker
from pdkv.bench.serve import Pace, Target, run_loop, send
from pdkv.bench.workload import one_turn
from pdkv.errors import StartupError
from pdkv.testing.paced import Profile

ROWS, CONTEXTS, PROMPTS, BURST = (1, 4, 16, 32), (32, 512, 1024), (16, 128, 512, 1024, 1536), 8
"""Requests that decode together, tokens that each of them has, tokens of prompts that are alone, and of these the
shortest that come together.
"""

NUM_TOKENS, REPEATS = 24, 3
"""Tokens of an answer to a prompt that is alone, and measurements of each."""


class Times(NamedTuple):
    """Seconds of requests that were sent together."""

    first_s: float  # to the first token of the first that had one
    last_s: float  # to that of the last
    second_s: float  # from there to its second
    step_s: float | None  # between two tokens while all decode; None: they never did


Ask = Callable[[Sequence[list[int]], int], Times]
"""Has prompts answered together, with this many tokens."""


def server(target: Target) -> Ask:
    """A server, by requests; its prompts and answers are token ids. Raises StartupError: a request failed."""

    def ask(prompts: Sequence[list[int]], num_tokens: int) -> Times:
        run = run_loop(send(target, [one_turn(prompt, num_tokens) for prompt in prompts], Pace()))
        failed = [sent.reply.error for sent in run.requests if not sent.reply.ok or len(sent.reply.stamps) < 2]
        if failed:
            raise StartupError(f"{target.url}: a request failed: {failed[0] or 'it has a single event'}")
        return _times([sent.reply for sent in run.requests])

    return ask


def _times(replies: Sequence[Reply]) -> Times:
    first = min(replies, key=lambda reply: reply.stamps[0])
    begin, end = max(r.stamps[0] for r in replies), min(r.stamps[-1] for r in replies)
    gaps = [b - a for r in replies for a, b in zip(r.stamps, r.stamps[1:], strict=False) if a >= begin and b <= end]
    return Times(
        first.ttft,
        max(reply.ttft for reply in replies),
        first.stamps[1] - first.stamps[0],
        median(gaps) if gaps else None,
    )


class Fit(NamedTuple):
    """A profile, and how far it is from what it was fitted to."""

    profile: Profile
    errors: Sequence[float]  # of each measurement, as shares of it


def fit(ask: Ask, like: Profile, *, seed: int = 0, say: Callable[[str], None] = lambda text: None) -> Fit:
    """Measure and fit. The shape of the KV, and what is not measured, are those of `like`."""
    make = Maker(seed, as_text=False, vocabulary=min(like.vocab_size, 500))
    longest = like.max_model_len - NUM_TOKENS
    ask([make.units(min(64, longest))], NUM_TOKENS)  # warm
    firsts, handoffs = [], []
    for length in (length for length in PROMPTS if length <= longest):
        tries = [ask([make.units(length)], NUM_TOKENS) for _ in range(REPEATS)]
        first_s, alone_s = median(t.first_s for t in tries), median(t.step_s or 0.0 for t in tries)
        say(f"prompt of {length} tokens: {1e3 * first_s:.2f} ms")
        firsts.append((length, first_s))
        handoffs.append(((1.0, length), median(t.second_s for t in tries) - alone_s))
    (_, token_s), _ = solve([((1.0, length), first_s) for length, first_s in firsts])
    bursts = [ask([make.units(PROMPTS[0]) for _ in range(BURST)], NUM_TOKENS).last_s for _ in range(REPEATS)]
    rows: list[tuple[Sequence[float], float]] = []
    for count in ROWS:
        for length in CONTEXTS:
            # so many that the first answer lasts until the last prompt is over, and some more
            num_tokens = NUM_TOKENS + int(count * length * token_s / max(alone_s, 1e-6))
            if length + num_tokens <= longest:
                found = ask([make.units(length) for _ in range(count)], num_tokens)
                say(f"{count} x {length} tokens: {1e3 * (found.step_s or 0.0):.2f} ms a step")
                if found.step_s:
                    rows.append(((1.0, count, count * (length + num_tokens / 2)), found.step_s))
    (step_s, row_s, context_s), errors = solve(rows)
    (constant_s, token_s), more = solve([((1.0, n), max(first_s - context_s * n, 1e-6)) for n, first_s in firsts])
    # One of a burst has a step, and all others the next one.
    each_s = (median(bursts) - firsts[0][1] - step_s) / (BURST - 1) - PROMPTS[0] * token_s
    prompt_s = min(max(each_s, 0.0), max(constant_s - step_s, 0.0))
    transfer_s, transfer_token_s = transfers(handoffs)
    made = replace(
        like, step_s=max(step_s, 1e-6), row_s=row_s, context_token_s=context_s, prompt_token_s=token_s,
        transfer_s=transfer_s, transfer_token_s=transfer_token_s,
        prompt_s=prompt_s, request_s=max(constant_s - step_s - prompt_s, 0.0),
    )  # fmt: skip
    return Fit(made, [*errors, *more])


Measured = Sequence[tuple[Sequence[float], float]]
"""Factors of each coefficient, and the seconds that came of them."""


def solve(measured: Measured) -> tuple[list[float], list[float]]:
    """Coefficients of at least 0 with the smallest squared relative errors, and those errors."""
    factors = np.array([row for row, _ in measured])
    seconds = np.array([value for _, value in measured])
    scaled = factors / seconds[:, None]
    kept = list(range(factors.shape[1]))
    found: npt.NDArray[np.float64] = np.zeros(factors.shape[1])
    while kept:
        part = np.linalg.lstsq(scaled[:, kept], np.ones(len(seconds)), rcond=None)[0]
        if part.min() >= 0:
            found[kept] = part
            break
        kept.pop(int(part.argmin()))
    return found.tolist(), ((factors @ found - seconds) / seconds).tolist()


def transfers(measured: Measured) -> tuple[float, float]:
    """Seconds of a hand-off, and of each of its tokens, from how much longer than a step second tokens took."""
    if median(value for _, value in measured) <= 0:
        return 0.0, 0.0
    factors, seconds = np.array([row for row, _ in measured]), np.array([value for _, value in measured])
    constant, token = np.linalg.lstsq(factors, seconds, rcond=None)[0].tolist()
    return (max(constant, 0.0), token) if token > 0 else (float(seconds.mean()), 0.0)


def as_toml(found: Fit, source: str) -> Iterator[str]:
    """The lines of a profile's file."""
    errors = sorted(map(abs, found.errors))
    yield f"# Fitted by `pd profile` to {len(errors)} measurements of {source}: half of them within"
    yield f"# {median(errors):.1%}, the worst {errors[-1]:.1%} off."
    for name, item in options_of(Profile).items():
        value = getattr(found.profile, name)
        yield f"{name} = {value:.4g}  # {item.help}" if isinstance(value, float) else f"{name} = {value}  # {item.help}"
