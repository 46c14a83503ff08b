"""Guessing tokens beside not guessing, in tokens a second: a text recited from the prompt, text that cannot be guessed,
and a proposer that is right with a known probability.

python -m benchmarks.run speculation
"""

import random
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np

from benchmarks.models import find_model
from benchmarks.report import Claim, Context
from pdkv import LLM, SamplingParams
from pdkv.base.options import option
from pdkv.config import DEFAULT_MODEL
from pdkv.proposers import NewRequest, ProposerOptions, TokenProposer

RECITED = 200
NGRAM, SUFFIX = {"method": "ngram"}, {"method": "suffix"}
_WORDS = (
    *("the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "and", "runs", "away", "from", "seven"),
    *("wild", "cats", "that", "sleep", "under", "old", "trees"),
)


class OracleOptions(ProposerOptions):
    """Keys of the oracle."""

    acceptance: float = option(1.0, "how likely each guess is right")


class Oracle(TokenProposer):
    """Knows the outputs, and is wrong as often as wanted."""

    options_type = OracleOptions
    known: Mapping[tuple[int, ...], Sequence[int]] = {}

    def guess(self, request: NewRequest, token_ids: Any, most: int) -> list[int]:
        start, coming = len(token_ids) - len(request.prompt_token_ids), self.known[tuple(request.prompt_token_ids)]
        draw = random.Random(start).random  # the same on each rank
        return [
            token_id if draw() < self.options.acceptance else token_id ^ 1 for token_id in coming[start : start + most]
        ]


class Load(NamedTuple):
    """What is generated in one turn."""

    prompts: Sequence[list[int]]
    params: Sequence[SamplingParams]

    @classmethod
    def recital(cls, llm: LLM, at_once: int, turn: int) -> "Load":
        """Prompts that say a text twice and begin it again."""
        prompts = []
        for i in range(at_once):
            words = random.Random(1000 * turn + i).choices(_WORDS, k=RECITED)
            ids = llm.get_tokenizer().encode(" ".join(words))[:RECITED]
            prompts.append([*ids, *ids, *ids[:20]])
        return cls(prompts, _params(at_once, RECITED - 20, temperature=0.0))

    @classmethod
    def noise(cls, at_once: int, num_tokens: int, turn: int) -> "Load":
        """Random prompts, and outputs drawn from a nearly flat distribution."""
        draw = random.Random(turn)
        prompts = [[draw.randrange(260, 500) for _ in range(64)] for _ in range(at_once)]
        return cls(prompts, _params(at_once, num_tokens, temperature=50.0, seed=1000 * turn))


def run(context: Context) -> list[Claim]:
    """Ratios of tokens a second, each from one run in turns."""
    rounds = 1 if context.quick else 5
    claims = [
        _compare(f"recital, {at_once} at once, ngram / without", NGRAM, at_once, least, rounds)
        for at_once, least in ((1, 2.5), (8, 1.8))
    ]
    at_once = 4 if context.quick else 64
    for config in (NGRAM, SUFFIX):
        name = f"{at_once} at once that cannot be guessed, {config['method']} / without"
        claims.append(_compare(name, config, at_once, 0.98, rounds))
    return claims if context.quick else [*claims, *_oracle(context)]


def _compare(name: str, config: Mapping[str, Any], at_once: int, least: float, rounds: int) -> Claim:
    without, with_guesses = _llm(None), _llm(config)
    ratios = _in_turns(
        without,
        with_guesses,
        lambda i: Load.noise(at_once, 64, i) if "cannot" in name else Load.recital(without, at_once, i),
        rounds,
    )
    counts = {metric.name.rpartition("spec_decode_num_")[2]: metric.value for metric in with_guesses.get_metrics()}
    figures = {name: float(counts[name]) for name in ("draft_tokens", "accepted_tokens")}
    _end(without, with_guesses)
    return Claim(name, median(ratios), least, "higher", figures)


def _in_turns(without: LLM, with_guesses: LLM, make: Callable[[int], Load], rounds: int) -> list[float]:
    """Tokens a second with guesses / without, after a turn of each to warm up."""
    ratios = []
    for i in range(rounds + 1):
        load = make(i)
        (outputs, slow), (same, fast) = _time(without, load), _time(with_guesses, load)
        if outputs != same:
            raise AssertionError("guesses changed tokens")
        ratios.append(slow / fast)
    return ratios[1:]


def _oracle(context: Context) -> list[Claim]:
    path, load = find_model(context.models, "mid"), Load.noise(1, 96, 0)
    load = load._replace(params=_params(1, 96, temperature=0.0))
    without = _llm(None, path)
    Oracle.known = {tuple(load.prompts[0]): _time(without, load)[0][0]}
    seconds = min(_time(without, load)[1] for _ in range(2)) / 96
    forced = {k: _step_seconds(path, load, k) for k in (1, 2, 4, 8)}
    claims = []
    for acceptance in (0.6, 0.8, 0.9):
        allowed = max(_tokens(acceptance, k) * seconds / step_s for k, step_s in forced.items())
        with_guesses = _llm({"method": f"{__name__}:Oracle", "acceptance": acceptance}, path)
        ratio = median(_in_turns(without, with_guesses, lambda _: load, 3))
        _end(with_guesses)
        figures = {"speedup": ratio, "allowed": allowed, "step ms": seconds * 1e3}
        claims.append(Claim(f"mid, oracle of {acceptance} / allowed", ratio / max(allowed, 1), 0.9, "higher", figures))
    _end(without)
    return claims


def _step_seconds(path: Any, load: Load, k: int) -> float:
    """Seconds of a step of k + 1 rows, all of them right."""
    llm = _llm({"method": f"{__name__}:Oracle", "num_speculative_tokens": k, "adaptive": False}, path)
    seconds = min(_time(llm, load)[1] for _ in range(2)) / np.ceil(96 / (k + 1))
    _end(llm)
    return float(seconds)


def _tokens(acceptance: float, k: int) -> float:
    """Expected tokens of a step with k guesses."""
    return sum(acceptance**i for i in range(k + 1))


def _params(count: int, num_tokens: int, *, temperature: float, seed: int = 0) -> list[SamplingParams]:
    fields: dict[str, Any] = {"max_tokens": num_tokens, "temperature": temperature, "ignore_eos": True}
    return [SamplingParams(**fields, seed=seed + i, detokenize=False) for i in range(count)]


def _llm(config: Mapping[str, Any] | None, model: Any = DEFAULT_MODEL) -> LLM:
    more = {} if config is None else {"speculative_config": dict(config)}
    return LLM(model, max_model_len=2048, kv_cache_memory="256MiB", enable_prefix_caching=False, **more)


def _end(*llms: LLM) -> None:
    for llm in llms:
        llm.close()


def _time(llm: LLM, load: Load) -> tuple[list[Sequence[int]], float]:
    begin = perf_counter()
    prompts = [{"prompt_token_ids": ids} for ids in load.prompts]
    outputs = llm.generate(prompts, list(load.params), use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs], perf_counter() - begin
