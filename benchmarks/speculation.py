"""Guessing tokens beside not guessing, in tokens a second: a text recited from the prompt, text that cannot be guessed,
a proposer that is right with a known probability, and a small model that drafts for a wide one of its own function.

python -m benchmarks.run speculation
python -m benchmarks.run speculation_vllm       beside vLLM's own n-grams
"""

import json
import random
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks.linears import peak_flops
from benchmarks.models import find_wide
from benchmarks.peers import vllm
from benchmarks.report import Claim, Context
from benchmarks.servers import Server, post
from benchmarks.support import recall_module
from pdkv import LLM, SamplingParams
from pdkv.base.options import option
from pdkv.config import DEFAULT_MODEL
from pdkv.connector_kit.bench.turns import Spread
from pdkv.engine.proposers.base import Asked, Place
from pdkv.engine.proposers.registry import make_proposer
from pdkv.proposers import NewRequest, ProposerOptions, TokenProposer

FACTS = 28
RECITED = 7 * FACTS + 3
"""Tokens that name so many facts."""

NUM_WORDS_SAID, _EOS = 96, 1
NUM_STEPS = 72
"""Tokens that steps of 1, 2, 3, 4, 6 and 9 rows of a request make without a rest."""

TYPICAL = 210_000
"""The seed, of 400, with which 1 to 8 guesses come closest to the tokens a step that are expected at 0.6, 0.8 and 0.9:
within 4, 8 and 10 %. So few steps have luck otherwise: with 8 guesses at 0.9, 10 % more steps than expected.
"""

WIDTH, TIMES = 7_680, 16
"""Neurons added to each layer, and what the hidden size is multiplied by: then a step reads as many bytes as one of the
random model "mid", in layers of shapes that models have.
"""

NOISE = 0.48
"""Standard deviation for which the wide model draws four of five tokens as the embedded one does."""

BESIDE = (1, 8)
"""Requests at once beside vLLM."""

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
        draw = random.Random(TYPICAL + start).random  # the same on each rank
        return [
            token_id if draw() < self.options.acceptance else token_id ^ 1 for token_id in coming[start : start + most]
        ]


class Load(NamedTuple):
    """What is generated in one turn."""

    prompts: Sequence[list[int]]
    params: Sequence[SamplingParams]

    @classmethod
    def recital(cls, llm: LLM, at_once: int, turn: int) -> "Load":
        """Facts that are to be repeated, which the embedded model does."""
        make_recital = recall_module().make_recital
        recitals = [make_recital(1000 * turn + i, FACTS) for i in range(at_once)]
        prompts = [llm.get_tokenizer().encode(recital.prompt) for recital in recitals]
        return cls(prompts, _params(at_once, RECITED, temperature=0.0))

    @classmethod
    def words(cls, llm: LLM, at_once: int, turn: int) -> "Load":
        """What the model says behind words in any order."""
        texts = (" ".join(random.Random(1000 * turn + i).choices(_WORDS, k=40)) for i in range(at_once))
        prompts = [llm.get_tokenizer().encode(text) for text in texts]
        return cls(prompts, _params(at_once, NUM_WORDS_SAID, temperature=1.0, seed=turn))

    @classmethod
    def noise(cls, at_once: int, num_tokens: int, turn: int, temperature: float = 50.0) -> "Load":
        """Random prompts, and outputs drawn from a nearly flat distribution."""
        draw = random.Random(turn)
        prompts = [[draw.randrange(260, 500) for _ in range(64)] for _ in range(at_once)]
        return cls(prompts, _params(at_once, num_tokens, temperature=temperature, seed=1000 * turn))


def run(context: Context) -> list[Claim]:
    """Ratios of tokens a second, each from one run in turns."""
    rounds, width, times = (1, 1024, 1) if context.quick else (3, WIDTH, TIMES)
    wide = find_wide(context.models, width, 0.0, times=times)
    claims = [
        _compare(
            f"{name}, recital, {at_once} at once, ngram / without",
            path, NGRAM, partial(_recital, at_once), least, rounds,
        )
        for name, path in (("embedded", DEFAULT_MODEL), ("wide", wide))
        for at_once, least in ((1, 2.5), (8, 1.8))
    ]  # fmt: skip
    at_once, stranger = 4 if context.quick else 64, find_wide(context.models, 256, 20.0)
    for config, temperature in ((NGRAM, 50.0), (SUFFIX, 50.0), ({"model": str(stranger)}, 1.0)):
        name = f"{at_once} at once that cannot be guessed, {config.get('method', 'draft_model')} / without"
        make = partial(_noise, at_once, temperature)
        claims.append(_compare(name, DEFAULT_MODEL, config, make, 0.98, 3 * rounds))
    claims.append(_proposing())
    if context.quick:
        return claims
    recital = next(claim for claim in claims if claim.name.startswith("wide, recital, 8 at once"))
    claims.append(_allowed(recital, wide))
    steps = _Steps.of(wide, 1)
    claims += _oracle(wide, steps)
    claims.append(_draft_model(context, steps))
    return claims


def _compare(
    name: str, path: Path, config: Mapping[str, Any], make: Callable[[LLM, int], Load], least: float, rounds: int
) -> Claim:
    without, with_guesses = _llm(None, path), _llm(config, path)
    ratios = _in_turns(without, with_guesses, lambda turn: make(without, turn), rounds)
    prompts, rest = _seconds(without, make(without, 0))
    figures = {**_counts(with_guesses), "prompts' share without": prompts / (prompts + rest)}
    _end(without, with_guesses)
    return Claim.of(name, Spread.of(ratios), least, "higher", figures)


def _seconds(llm: LLM, load: Load) -> tuple[float, float]:
    """The time of the load's prompts, and of the steps behind them."""
    first = load._replace(params=_params(len(load.prompts), 1, temperature=0.0))
    prompts, whole = (min(_time(llm, each)[1] for _ in range(2)) for each in (first, load))
    return prompts, whole - prompts


def _counts(llm: LLM) -> dict[str, float]:
    counts = {metric.name.rpartition("spec_decode_num_")[2]: metric.value for metric in llm.get_metrics()}
    return {name: float(counts[name]) for name in ("draft_tokens", "accepted_tokens")}


def _noise(at_once: int, temperature: float, _: LLM, turn: int) -> Load:
    return Load.noise(at_once, 64, turn, temperature)


def _in_turns(without: LLM, with_guesses: LLM, make: Callable[[int], Load], rounds: int) -> list[float]:
    """Tokens a second with guesses / without, each first in every second turn, after a turn of each to warm up."""
    ratios, llms = [], (without, with_guesses)
    for i in range(rounds + 1):
        load = make(i)
        took = {llm: _time(llm, load) for llm in (llms if i % 2 else llms[::-1])}
        (outputs, slow), (same, fast) = took[without], took[with_guesses]
        if outputs != same:
            raise AssertionError("guesses changed tokens")
        ratios.append(slow / fast)
    return ratios[1:]


def _proposing() -> Claim:
    """256 requests that say 4000 tokens again and again, beside a step of as many short ones."""
    proposer, num = make_proposer({**NGRAM, "num_speculative_tokens": "8"}), 256
    assert proposer is not None
    proposer.attach(Place(DEFAULT_MODEL, 512, num, 4200))
    token_ids = np.tile(np.random.default_rng(0).integers(0, 512, (num, 400), np.int32), (1, 11))
    asked = [NewRequest((str(i), 0), 0, [], [], SamplingParams(), [[]]) for i in range(num)]
    for slot, request in enumerate(asked):
        proposer.add(slot, request)
    seconds, slots = [], np.arange(num)
    for known in range(4000, 4060):
        begin = perf_counter()
        proposer.propose(Asked(asked, slots, token_ids, np.full(num, known), np.full(num, 8)))
        seconds.append(perf_counter() - begin)
    llm = _llm(None)
    step_s = min(_time(llm, Load.noise(num, 32, turn))[1] for turn in range(2)) / 32
    _end(llm)
    figures = {"proposing ms": median(seconds) * 1e3, "step ms": step_s * 1e3}
    name = f"{num} requests of 4k tokens, proposing with n-grams / a step of the embedded model"
    return Claim(name, median(seconds) / step_s, 0.03, "lower", figures)


class _Steps(NamedTuple):
    """What the wide model says to some requests at once, and how long its steps take."""

    load: Load
    share: float  # of the prompts, without guesses
    seconds: float  # of a step of one row of each request
    with_guesses: Mapping[int, float]  # of a step of that many rows more of each

    @classmethod
    def of(cls, path: Path, at_once: int) -> "_Steps":
        num = NUM_STEPS + 1  # the first token comes with the prompts
        load = Load.noise(at_once, num, 0)._replace(params=_params(at_once, num, temperature=0.0))
        llm = _llm(None, path)
        Oracle.known = dict(zip(map(tuple, load.prompts), _time(llm, load)[0], strict=True))
        prompts, rest = _seconds(llm, load)
        _end(llm)
        with_guesses = {k: _step_seconds(path, load, k) for k in (1, 2, 3, 5, 8)}
        return cls(load, prompts / (prompts + rest), rest / NUM_STEPS, with_guesses)

    def allowed(self, acceptance: float, guess_s: float = 0.0) -> float:
        """The best speedup at that acceptance a token, where each guess takes that long."""
        tokens = {k: sum(acceptance**i for i in range(k + 1)) for k in self.with_guesses}
        return self.of_all(max(tokens[k] * self.seconds / (s + k * guess_s) for k, s in self.with_guesses.items()))

    def of_all(self, gain: float) -> float:
        """The speedup of prompts and steps where that of steps is `gain`, or 1 at least."""
        return 1 / (self.share + (1 - self.share) / max(gain, 1.0))


def _allowed(recital: Claim, path: Path) -> Claim:
    """A recital's gain over what its prompts and steps of such sizes allow, where every guess is right.

    Beside that, what they would allow if a row took no longer than its products do at the processor's peak.
    """
    steps = _Steps.of(path, 8)._replace(share=recital.figures["prompts' share without"])
    weights = (path / "model.safetensors").stat().st_size / 2
    by_peak = steps.seconds * peak_flops(torch.get_num_threads()) / (8 * 2 * weights)
    times = {f"{8 * (k + 1)} rows ms": s * 1e3 for k, s in ({0: steps.seconds} | dict(steps.with_guesses)).items()}
    figures = {"allowed": steps.allowed(1.0), "allowed by arithmetic": steps.of_all(by_peak), **times}
    name = "wide, recital, 8 at once, ngram / allowed"
    return Claim(name, recital.ratio / figures["allowed"], 0.9, "higher", figures)


def _oracle(path: Path, steps: _Steps) -> list[Claim]:
    claims = []
    without = _llm(None, path)
    for acceptance in (0.6, 0.8, 0.9):
        with_guesses = _llm({"method": f"{__name__}:Oracle", "acceptance": acceptance}, path)
        ratio, allowed = median(_in_turns(without, with_guesses, lambda _: steps.load, 3)), steps.allowed(acceptance)
        _end(with_guesses)
        figures = {"speedup": ratio, "allowed": allowed, "step ms": steps.seconds * 1e3}
        claims.append(Claim(f"wide, oracle of {acceptance} / allowed", ratio / allowed, 0.9, "higher", figures))
    _end(without)
    return claims


def _draft_model(context: Context, steps: _Steps) -> Claim:
    """The embedded model drafts for a wide one that agrees with it as often as NOISE makes it."""
    path = find_wide(context.models, WIDTH, NOISE, times=TIMES)
    config = {"model": str(DEFAULT_MODEL), "num_speculative_tokens": 8}
    drafter, first = _llm(None), _llm({**config, "num_speculative_tokens": 1, "adaptive": False}, path)
    guess_s = min(_time(drafter, Load.words(drafter, 1, turn))[1] for turn in range(3)) / NUM_WORDS_SAID
    for turn in range(4):
        _time(first, Load.words(first, 1, turn))
    counts = _counts(first)
    _end(drafter, first)
    without, with_guesses = _llm(None, path), _llm(config, path)
    ratio = median(_in_turns(without, with_guesses, lambda turn: Load.words(without, 1, turn), 3))
    _end(without, with_guesses)
    agreement = counts["accepted_tokens"] / counts["draft_tokens"]
    allowed = steps.allowed(agreement, guess_s)
    figures = {"speedup": ratio, "allowed": allowed, "agreement": agreement, "drafter's step ms": guess_s * 1e3}
    return Claim("wide, the embedded model drafts for it / allowed", ratio / allowed, 0.85, "higher", figures)


def _step_seconds(path: Path, load: Load, k: int) -> float:
    """Seconds of a step of k + 1 rows of each request, all of them right."""
    llm = _llm({"method": f"{__name__}:Oracle", "num_speculative_tokens": k, "adaptive": False}, path)
    seconds = _seconds(llm, load)[1] / (NUM_STEPS / (k + 1))
    _end(llm)
    return seconds


def run_beside(context: Context) -> list[Claim]:
    """Our gain / that of vLLM's own n-grams, with the same model and texts."""
    assert context.vllm is not None
    path = find_wide(context.models, WIDTH, 0.0, times=TIMES)
    llm = _llm(None, path)
    loads = {at_once: [Load.recital(llm, at_once, turn).prompts for turn in range(4)] for at_once in BESIDE}
    _end(llm)
    config = {**NGRAM, "num_speculative_tokens": 8, "prompt_lookup_max": 5, "prompt_lookup_min": 2}
    seconds: dict[int, list[float]] = {at_once: [] for at_once in loads}
    for options in ((), ("--speculative-config", json.dumps(config))):
        with vllm(context.vllm, path, options=options) as server:
            for at_once, turns in loads.items():
                seconds[at_once].append(median([_complete(server, prompts) for prompts in turns][1:]))
    claims = []
    for at_once, (without, with_guesses) in seconds.items():
        own = _compare("", path, NGRAM, partial(_recital, at_once), 0.0, 3)
        theirs = without / with_guesses
        figures = {"our gain": own.ratio, "vLLM's gain": theirs, "vLLM s without": without, **own.figures}
        name = f"wide, recital, {at_once} at once, our gain / vLLM's"
        claims.append(Claim(name, own.ratio / theirs, 1.0, "higher", figures))
    return claims


def _recital(at_once: int, llm: LLM, turn: int) -> Load:
    return Load.recital(llm, at_once, turn)


def _complete(server: Server, prompts: Sequence[list[int]]) -> float:
    """Seconds until the server has completed all prompts, sent at once."""
    fixed = {"model": server.model, "max_tokens": RECITED, "temperature": 0, "ignore_eos": True}
    begin = perf_counter()
    with ThreadPoolExecutor(len(prompts)) as pool:
        list(pool.map(lambda prompt: post(f"{server.url}/v1/completions", fixed | {"prompt": prompt}), prompts))
    return perf_counter() - begin


def _params(count: int, num_tokens: int, *, temperature: float, seed: int = 0) -> list[SamplingParams]:
    fields: dict[str, Any] = {"max_tokens": num_tokens, "temperature": temperature, "logit_bias": {_EOS: -100.0}}
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
