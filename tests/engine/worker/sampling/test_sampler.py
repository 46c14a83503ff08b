"""The batched sampler against a plain per-request reference in float64, and each parameter by hand."""

import math
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from no_descriptors import no_descriptors
from numpy.typing import NDArray
from reference_sampler import uniform

from pdkv.engine.plan import NewRequest, SampledTokens
from pdkv.engine.worker.sampling.checks import check_for_vocab
from pdkv.engine.worker.sampling.logit_processors import TokenMasks, apply_masks
from pdkv.engine.worker.sampling.sampler import SamplingState
from pdkv.errors import InvalidRequest
from pdkv.kernels import host
from pdkv.sampling.params import SamplingParams

CPU = torch.device("cpu")
MAX_LEN = 64


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def request(
    params: SamplingParams, prompt: Sequence[int] = (1, 2, 3), output: Sequence[int] = (), choice: int = 0
) -> NewRequest:
    return NewRequest(("r", 0), choice, list(prompt), list(output), params, [])


def sample(
    logits: torch.Tensor,
    requests: Sequence[NewRequest],
    eos: Sequence[int] = (),
    slots: Sequence[int] | None = None,
    bitmask: torch.Tensor | None = None,
) -> list[SampledTokens]:
    """Run one batch, on the logits' device, whose i-th row is requests[i] in slots[i] of a fresh state."""
    slots = range(len(requests)) if slots is None else slots
    num_slots = max(slots) + 1
    state = SamplingState(num_slots, logits.shape[1], eos, read=_read)
    token_ids = np.full((num_slots, MAX_LEN), -1, np.int32)
    num_tokens = []
    for slot, new in zip(slots, requests, strict=True):
        tokens = new.prompt_token_ids + new.output_token_ids
        token_ids[slot, : len(tokens)] = tokens
        num_tokens.append(len(tokens))
        state.add(slot, new)
    return sample_from(state, logits, slots, token_ids, num_tokens, bitmask)


def _read(tensors: Sequence[torch.Tensor]) -> list[NDArray[Any]]:
    return [tensor.cpu().numpy() for tensor in tensors]


def sample_from(
    state: SamplingState,
    logits: torch.Tensor,
    slots: Sequence[int],
    token_ids: NDArray[np.int32],
    num_tokens: Sequence[int],
    bitmask: torch.Tensor | None = None,
) -> list[SampledTokens]:
    """Tokens and logprobs of one batch."""
    masks = None if bitmask is None else TokenMasks(np.arange(len(slots)), bitmask)
    tokens = state.choose(logits, np.array(slots), token_ids, np.array(num_tokens), masks)
    logprobs = state.logprobs(logits, np.array(slots), tokens)
    return [
        SampledTokens([token] if token >= 0 else [], [logprobs[i]] if i in logprobs else None)
        for i, token in enumerate(tokens.tolist())
    ]


def test_a_step_opens_no_file() -> None:
    """An engine without descriptors ended at the first token that it drew: the compiled draw was loaded then."""
    new = request(SamplingParams(temperature=0.7, seed=3))
    logits = torch.linspace(-1, 1, 50).reshape(1, 50)
    expected = tokens_of(sample(logits, [new]))
    host._sampler.cache_clear()
    state = SamplingState(1, 50, ())
    state.add(0, new)
    token_ids = np.array([new.prompt_token_ids], np.int32)
    with no_descriptors():
        sampled = sample_from(state, logits, [0], token_ids, [3])
    assert tokens_of(sampled) == expected


def tokens_of(sampled: Sequence[SampledTokens]) -> list[int]:
    return [token for s in sampled for token in s.token_ids]


def params(**values: Any) -> SamplingParams:
    return SamplingParams(**{"seed": 0, **values})


GREEDY = params(temperature=0.0)


# --- a plain reference ---------------------------------------------------------------------------------------------


def processed_logits(logits: torch.Tensor, new: NewRequest, eos: Sequence[int]) -> list[float]:
    p, x = new.params, logits.double().tolist()
    if len(new.output_token_ids) < p.min_tokens:
        for token in {*eos, *p.stop_token_ids}:
            x[token] = -math.inf
    if p.allowed_token_ids is not None:
        x = [value if token in p.allowed_token_ids else -math.inf for token, value in enumerate(x)]
    for *before, last in p.bad_words_token_ids:
        output = new.output_token_ids
        if len(before) <= len(output) and output[len(output) - len(before) :] == before:
            x[last] = -math.inf
    for token, bias in p.logit_bias.items():
        x[token] += bias
    for token in set(new.prompt_token_ids + new.output_token_ids):
        x[token] = x[token] / p.repetition_penalty if x[token] > 0 else x[token] * p.repetition_penalty
        count = new.output_token_ids.count(token)
        x[token] -= p.frequency_penalty * count + p.presence_penalty * (count > 0)
    return x


def probabilities(x: Sequence[float], p: SamplingParams) -> list[float]:
    """Filtered and normalised."""
    best = max(x)
    weights = [math.exp((v - best) / p.temperature) for v in x]
    weights = [w if w >= p.min_p else 0.0 for w in weights]
    if 0 < p.top_k < len(x):
        kth = sorted(weights, reverse=True)[p.top_k - 1]
        weights = [w if w >= kth else 0.0 for w in weights]
    total = math.fsum(weights)
    if p.top_p < 1.0:
        weights = [w if math.fsum(v for v in weights if v > w) < p.top_p * total else 0.0 for w in weights]
    total = math.fsum(weights)
    return [w / total for w in weights]


def expected_token(logits: torch.Tensor, new: NewRequest, eos: Sequence[int]) -> int | None:
    """The reference's token; None where rounding may decide."""
    x = processed_logits(logits, new, eos)
    if new.params.greedy:
        return x.index(max(x))
    place = new.params.seed or 0, new.choice, len(new.output_token_ids)
    times = [
        (-math.log(uniform(*place, token)) / probability, token)
        for token, probability in enumerate(probabilities(x, new.params))
        if probability > 0.0
    ]
    first, second = sorted([*times, (math.inf, -1)])[:2]
    return first[1] if second[0] > first[0] * (1 + 1e-6) else None


def random_words(
    rng: np.random.Generator, prompt: list[int], output: list[int], vocab_size: int
) -> tuple[tuple[int, ...], ...]:
    """Sequences that go on from the end of the text, from a place before it, or from the prompt."""
    text = prompt + output
    words = []
    for last in rng.choice(vocab_size, vocab_size // 3, replace=False).tolist():
        before = text[len(text) - int(rng.integers(0, 5)) :] if rng.random() < 0.5 else output[:2]
        words.append((*before, last))
    return tuple(words)


def random_request(rng: np.random.Generator, vocab_size: int) -> NewRequest:
    def maybe(value: Any, default: Any) -> Any:
        return value if rng.random() < 0.4 else default

    p = params(
        temperature=maybe(0.0, float(rng.uniform(0.3, 1.8))),
        top_k=maybe(int(rng.integers(1, vocab_size + 10)), -1),
        top_p=maybe(float(rng.uniform(0.05, 1.0)), 1.0),
        min_p=maybe(float(rng.uniform(0.0, 0.5)), 0.0),
        repetition_penalty=maybe(float(rng.uniform(0.5, 2.0)), 1.0),
        presence_penalty=maybe(float(rng.uniform(-2, 2)), 0.0),
        frequency_penalty=maybe(float(rng.uniform(-2, 2)), 0.0),
        logit_bias=maybe({int(t): float(rng.uniform(-5, 5)) for t in rng.integers(0, vocab_size, 3)}, {}),
        min_tokens=maybe(int(rng.integers(1, 12)), 0),
        max_tokens=None,
        stop_token_ids=maybe(tuple(rng.integers(0, vocab_size, 2).tolist()), ()),
        allowed_token_ids=maybe(tuple(rng.integers(0, vocab_size, vocab_size // 2).tolist()), None),
        seed=int(rng.integers(-(2**63), 2**63)),
        logprobs=maybe(3, None),
    )
    prompt = rng.integers(0, vocab_size, rng.integers(1, 20)).tolist()
    output = rng.integers(0, vocab_size, rng.integers(0, 20)).tolist()
    if rng.random() < 0.4:
        p = msgspec.structs.replace(p, bad_words_token_ids=random_words(rng, prompt, output, vocab_size))
    return request(p, prompt, output, choice=int(rng.integers(0, 4)))


@pytest.mark.parametrize("vocab_size", [40, 64, 130])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mixed_batches_equal_the_reference(vocab_size: int, dtype: torch.dtype) -> None:
    rng = np.random.default_rng(vocab_size)
    eos = [2, 7]
    requests = [random_request(rng, vocab_size) for _ in range(400)]
    logits = torch.from_numpy(rng.normal(0, 3, (len(requests), vocab_size))).to(dtype)
    expected = [expected_token(row, new, eos) for row, new in zip(logits, requests, strict=True)]
    decided = [i for i, token in enumerate(expected) if token is not None]
    assert len(decided) > 390
    drawn = tokens_of(sample(logits, requests, eos))
    assert [drawn[i] for i in decided] == [expected[i] for i in decided]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_gpu_draws_what_the_cpu_draws() -> None:
    rng = np.random.default_rng(1)
    requests = [random_request(rng, 1500) for _ in range(300)]
    logits = torch.from_numpy(rng.normal(0, 3, (300, 1500))).float()
    bitmask = torch.from_numpy(rng.integers(-(2**31), 2**31, (300, 47), dtype=np.int32))
    here = sample(logits, requests, [2], bitmask=bitmask)
    there = sample(logits.cuda(), requests, [2], bitmask=bitmask)
    assert tokens_of(there) == tokens_of(here)
    for a, b in zip(here, there, strict=True):
        for x, y in zip(a.logprobs or [], b.logprobs or [], strict=True):
            assert (x.token_id, x.rank, [t for t, _ in x.top]) == (y.token_id, y.rank, [t for t, _ in y.top])
            assert x.logprob == pytest.approx(y.logprob, abs=1e-5)


@pytest.mark.parametrize("top_k", [[-1] * 6, [40] * 6, [-1, 40, 1400] * 2], ids=["off", "some", "mixed"])
def test_top_p_beyond_the_first_candidates_equals_the_reference(top_k: list[int]) -> None:
    """A flat distribution over a large vocabulary: more tokens are kept than are looked at first."""
    rng = np.random.default_rng(3)
    logits = torch.from_numpy(rng.normal(0, 0.3, (6, 1500)))
    requests = [request(params(top_p=0.9, top_k=k, seed=i)) for i, k in enumerate(top_k)]
    expected = [expected_token(row, new, ()) for row, new in zip(logits, requests, strict=True)]
    assert tokens_of(sample(logits, requests)) == expected


# --- drawing -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "values",
    [{}, {"temperature": 0.5}, {"top_k": 6}, {"top_p": 0.8}, {"min_p": 0.2}, {"top_k": 9, "top_p": 0.7, "min_p": 0.05}],
    ids=str,
)
def test_draws_follow_the_distribution(values: dict[str, Any]) -> None:
    count, vocab_size = 6_000, 20
    row = torch.from_numpy(np.random.default_rng(11).normal(0, 1.2, vocab_size))
    requests = [request(params(seed=seed, **values)) for seed in range(count)]
    drawn = tokens_of(sample(row.expand(count, -1), requests))
    expected = np.array(probabilities(row.tolist(), params(**values))) * count
    observed = np.bincount(drawn, minlength=vocab_size)
    possible = expected > 0
    assert observed[~possible].sum() == 0
    statistic = ((observed - expected)[possible] ** 2 / expected[possible]).sum()
    degrees = possible.sum() - 1
    limit = degrees * (1 - 2 / (9 * degrees) + 3.09 * math.sqrt(2 / (9 * degrees))) ** 3  # 99.9 %, Wilson-Hilferty
    assert statistic < limit


def test_result_does_not_depend_on_the_batch() -> None:
    rng = np.random.default_rng(5)
    requests = [random_request(rng, 50) for _ in range(60)]
    logits = torch.from_numpy(rng.normal(0, 2, (60, 50))).float()
    together = sample(logits, requests, [2])
    order = rng.permutation(60)
    shuffled = sample(logits[order], [requests[i] for i in order], [2], slots=rng.permutation(60).tolist())
    alone = [sample(logits[i : i + 1], [requests[i]], [2], slots=[i % 5])[0] for i in range(60)]
    assert tokens_of(together) == tokens_of(alone)
    assert tokens_of(shuffled) == [tokens_of(together)[i] for i in order]


def test_a_continued_request_draws_what_the_first_engine_would_have_drawn() -> None:
    rng = np.random.default_rng(6)
    p = params(seed=99, top_p=0.95, repetition_penalty=1.3, frequency_penalty=0.4, min_tokens=6, max_tokens=None)
    logits = torch.from_numpy(rng.normal(0, 1, (10, 30))).float()
    state = SamplingState(1, 30, [4])
    state.add(0, request(p, [1, 2]))
    tokens = np.array([[1, 2, *[0] * 10]], np.int32)
    for i in range(10):
        tokens[0, 2 + i] = state.choose(logits[i : i + 1], np.array([0]), tokens, np.array([2 + i]))[0]
    output = tokens[0, 2:].tolist()
    for i in range(10):
        continued = sample(logits[i : i + 1], [request(p, [1, 2], output[:i])], [4])
        assert tokens_of(continued) == [output[i]]


def test_choices_and_seeds_draw_differently() -> None:
    logits = torch.zeros(3, 1000)
    drawn = sample(logits, [request(params(seed=1)), request(params(seed=1), choice=1), request(params(seed=2))])
    assert len(set(tokens_of(drawn))) == 3


# --- single parameters ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_greedy_takes_the_lowest_of_equals(dtype: torch.dtype) -> None:
    logits = torch.tensor([[0.0, 5.0, 5.0, 1.0], [3.0, 3.0, 3.0, 3.0]], dtype=dtype)
    assert tokens_of(sample(logits, [request(GREEDY), request(GREEDY)])) == [1, 0]


@pytest.mark.parametrize(("temperature", "chosen"), [(0.0, {1}), (9.9e-6, {1}), (1e-5, {1, 2})])
def test_below_vllms_epsilon_nothing_is_drawn(temperature: float, chosen: set[int]) -> None:
    logits = torch.tensor([[0.0, 5.0, 5.0, 1.0]]).repeat(20, 1)
    requests = [request(params(temperature=temperature, seed=seed)) for seed in range(20)]
    assert set(tokens_of(sample(logits, requests))) == chosen


@pytest.mark.parametrize("temperature", [2.5, 100.0, 1e300])
def test_any_finite_temperature_is_one(temperature: float) -> None:
    """The hotter, the more alike: at these all four tokens come up."""
    p = params(temperature=temperature)
    p.validate()
    logits = torch.tensor([[0.0, 2.0, 1.0, 1.0]]).repeat(200, 1)
    drawn = tokens_of(sample(logits, [request(params(temperature=temperature, seed=seed)) for seed in range(200)]))
    assert set(drawn) == {0, 1, 2, 3}


@pytest.mark.parametrize("temperature", [-0.1, math.nan, math.inf, -math.inf])
def test_what_is_no_temperature_is_refused(temperature: float) -> None:
    with pytest.raises(InvalidRequest, match="temperature must be a number of at least 0"):
        params(temperature=temperature).validate()


def test_penalties_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompt 0, 1; output 1, 1, 2; repetition 2, presence 0.5, frequency 0.25."""
    seen: list[torch.Tensor] = []

    def watch(logits: torch.Tensor) -> torch.Tensor:
        seen.append(logits.clone())
        return logits.argmax(-1)

    monkeypatch.setattr("pdkv.engine.worker.sampling.sampler.argmax", watch)
    p = params(temperature=0.0, repetition_penalty=2.0, presence_penalty=0.5, frequency_penalty=0.25)
    logits = torch.tensor([[4.0, -4.0, 3.0, 3.0], [1.0, 2.0, 3.0, 4.0]])
    sample(logits, [request(p, [0, 1], [1, 1, 2]), request(GREEDY, [3], [3])])
    assert seen[0].tolist() == [[4 / 2, -4 * 2 - 0.5 - 0.25 * 2, 3 / 2 - 0.5 - 0.25, 3.0], [1.0, 2.0, 3.0, 4.0]]


def test_logit_bias_moves_the_choice() -> None:
    logits = torch.tensor([[1.0, 2.0, 3.0]] * 3)
    biased = [request(params(temperature=0.0, logit_bias=bias)) for bias in ({0: 2.5}, {2: -100.0}, {})]
    assert tokens_of(sample(logits, biased)) == [0, 1, 2]


def test_min_tokens_forbids_eos_and_stop_tokens_until_reached() -> None:
    logits = torch.tensor([[1.0, 2.0, 3.0, 4.0]])
    p = params(temperature=0.0, min_tokens=2, stop_token_ids=(2,))
    chosen = [tokens_of(sample(logits, [request(p, [1], [1] * done)], [3])) for done in range(3)]
    assert chosen == [[1], [1], [3]]


def test_only_allowed_tokens_are_drawn() -> None:
    logits = torch.tensor([[1.0, 2.0, 3.0, 4.0]]).repeat(3, 1)
    rows = [params(temperature=0.0, allowed_token_ids=ids) for ids in ((0, 1), (2, 0, 2), None)]
    assert tokens_of(sample(logits, [request(p) for p in rows])) == [1, 2, 3]
    drawn = [request(params(seed=i, temperature=50.0, allowed_token_ids=(0, 2))) for i in range(200)]
    assert set(tokens_of(sample(logits[:1].expand(200, -1), drawn))) == {0, 2}


@pytest.mark.parametrize(
    ("words", "output", "chosen"),
    [
        ([[3]], [], 2),
        ([[3], [2]], [], 1),
        ([[1, 3]], [], 3),  # nothing of the word is there
        ([[1, 3]], [1], 2),
        ([[1, 3]], [1, 0], 3),
        ([[0, 1, 3], [1, 2]], [0, 1], 1),
        ([[0, 1, 3]], [1], 3),  # the word began in the prompt
        ([[1] * 70 + [3]], [1], 3),  # longer than anything so far
    ],
)
def test_the_last_token_of_a_bad_word_never_follows_its_others(
    words: list[list[int]], output: list[int], chosen: int
) -> None:
    logits = torch.tensor([[1.0, 2.0, 3.0, 4.0]]).repeat(2, 1)
    bad = params(temperature=0.0, bad_words_token_ids=tuple(map(tuple, words)))
    rows = [request(GREEDY, [0], output), request(bad, [0], output)]
    assert tokens_of(sample(logits, rows, slots=[2, 0])) == [3, chosen]


def test_what_allows_nothing_gives_no_token() -> None:
    logits = torch.tensor([[1.0, 2.0, 3.0, 4.0]])
    nothing = params(temperature=0.0, allowed_token_ids=(1, 2), bad_words_token_ids=((1,), (2,)))
    assert [s.token_ids for s in sample(logits, [request(nothing)])] == [[]]


def test_without_min_tokens_eos_can_be_drawn_even_if_ignored() -> None:
    logits = torch.tensor([[1.0, 9.0]])
    assert tokens_of(sample(logits, [request(params(temperature=0.0, ignore_eos=True))], [1])) == [1]


def test_an_eos_outside_the_vocabulary_is_harmless() -> None:
    logits = torch.tensor([[1.0, 9.0]])
    assert tokens_of(sample(logits, [request(params(temperature=0.0, min_tokens=1))], [1, 5000])) == [0]


def test_top_k_and_min_p_keep_equals() -> None:
    logits = torch.tensor([[2.0, 5.0, 5.0, 1.0]]).expand(200, -1)
    for values in ({"top_k": 1}, {"min_p": 1.0}, {"top_p": 1e-6}):
        drawn = tokens_of(sample(logits, [request(params(seed=i, **values)) for i in range(200)]))
        assert set(drawn) == {1, 2}


def test_a_row_without_a_choice_gets_no_token() -> None:
    """All forbidden by min_tokens or a bitmask, or a penalty that overflows, beside rows that go on."""
    logits = torch.tensor([[3.0, 1.0, 2.0]]).repeat(6, 1)
    stops = {"min_tokens": 1, "stop_token_ids": [0, 2]}
    overflows = {"repetition_penalty": 1e-45}
    requests = [
        request(params(temperature=0.0, **stops)),
        request(params(**stops)),
        request(params(temperature=0.0, **overflows), prompt=[0, 1, 2]),
        request(params(**overflows), prompt=[0, 1, 2]),
        request(GREEDY),
        request(params(temperature=0.0, min_tokens=1, stop_token_ids=[0])),
    ]
    assert [s.token_ids for s in sample(logits, requests, [1])] == [[], [], [], [], [0], [2]]
    bitmask = torch.tensor([[0], [0], [7], [7], [7], [2]], dtype=torch.int32)
    sampled = sample(logits, [request(params(logprobs=1)), *[request(GREEDY)] * 5], bitmask=bitmask)
    assert [s.token_ids for s in sampled] == [[], [], [0], [0], [0], [1]]
    assert sampled[0].logprobs is None


@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "torch"])
@pytest.mark.parametrize("vocab_size", [20, 64, 1000])
def test_masks_touch_only_their_rows_and_forbid_only_their_tokens(
    vocab_size: int, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that allow nearly all, nearly nothing, one of two, all, and none."""
    if not compiled:
        monkeypatch.setattr(host, "can_draw", lambda: False)
    rng = np.random.default_rng(vocab_size)
    logits = torch.from_numpy(rng.normal(size=(12, vocab_size)).astype(np.float32))
    chances = np.repeat([0.98, 0.02, 0.5, 1.0, 0.0], 2)
    allowed = rng.random((10, vocab_size)) < chances[:, None]
    padded = np.pad(allowed, ((0, 0), (0, -vocab_size % 32)), constant_values=True)
    bits = torch.from_numpy(np.packbits(padded, axis=1, bitorder="little").view(np.int32))
    rows = np.array([0, 1, 2, 4, 5, 6, 7, 8, 10, 11])
    masked = logits.clone()
    apply_masks(masked, TokenMasks(rows, bits))
    expected = logits.clone()
    expected[torch.from_numpy(rows)] = expected[torch.from_numpy(rows)].masked_fill(
        ~torch.from_numpy(allowed), -torch.inf
    )
    assert torch.equal(masked, expected)


def test_bitmask_allows_only_its_bits() -> None:
    vocab_size = 70
    logits = torch.arange(vocab_size).float().expand(3, -1)
    bitmask = torch.zeros(3, 3, dtype=torch.int32)
    bitmask[0, 0] = -(2**31)  # token 31
    bitmask[1, 1] = 1  # token 32
    bitmask[2] = -1
    drawn = sample(logits, [request(GREEDY), request(params()), request(GREEDY)], bitmask=bitmask)
    assert tokens_of(drawn) == [31, 32, 69]
    with pytest.raises(ValueError, match=r"int32 of shape \(3, 3\)"):
        sample(logits, [request(GREEDY)] * 3, bitmask=bitmask[:, :2])


# --- logprobs ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logprobs_are_those_of_the_raw_logits(dtype: torch.dtype) -> None:
    rng = np.random.default_rng(8)
    logits = torch.from_numpy(rng.normal(0, 3, (6, 300))).to(dtype)
    asked = [None, 0, 1, 5, 20, 2]
    requests = [
        request(params(seed=i, logprobs=k, temperature=0.7, repetition_penalty=1.5, logit_bias={3: 2.0}))
        for i, k in enumerate(asked)
    ]
    result = sample(logits, requests)
    reference = torch.log_softmax(logits.double(), dim=-1)
    assert result[0].logprobs is None
    for row, k, sampled in zip(reference[1:], asked[1:], result[1:], strict=True):
        assert sampled.logprobs is not None
        (entry,) = sampled.logprobs
        assert [entry.token_id] == sampled.token_ids
        assert entry.logprob == pytest.approx(float(row[entry.token_id]), abs=1e-5)
        assert entry.rank == 1 + int((row > row[entry.token_id]).sum())
        order = sorted(range(300), key=lambda t: (-float(row[t]), t))[:k]
        assert [token for token, _ in entry.top] == order
        assert [value for _, value in entry.top] == pytest.approx([float(row[t]) for t in order], abs=1e-5)


def test_equal_alternatives_come_in_id_order() -> None:
    logits = torch.tensor([[0.0, -0.0, -3.0, 0.0, -torch.inf]])
    (entry,) = sample(logits, [request(params(temperature=0.0, logprobs=5))])[0].logprobs or []
    assert [token for token, _ in entry.top] == [0, 1, 3, 2, 4]
    assert (entry.token_id, entry.rank) == (0, 1)


def test_logprobs_without_alternatives() -> None:
    logits = torch.tensor([[0.0, 1.0, -1.0]])
    (entry,) = sample(logits, [request(params(temperature=0.0, logprobs=0))])[0].logprobs or []
    assert (entry.token_id, entry.rank, entry.top) == (1, 1, ())


def test_prompt_logprobs() -> None:
    logits = torch.randn(7, 90, generator=torch.Generator().manual_seed(1))
    targets = np.array([3, 0, 89, 5, 5, 60, 1])
    entries = SamplingState(1, 90).prompt_logprobs(logits, targets, 4)
    reference = torch.log_softmax(logits.double(), dim=-1)
    assert [e.token_id for e in entries] == targets.tolist()
    assert [e.logprob for e in entries] == pytest.approx(reference[range(7), targets].tolist(), abs=1e-5)
    for row, entry in zip(reference, entries, strict=True):
        assert [token for token, _ in entry.top] == row.topk(4).indices.tolist()
        assert entry.rank == 1 + int((row > row[entry.token_id]).sum())


# --- state ---------------------------------------------------------------------------------------------------------


def test_a_reused_slot_forgets_its_former_request() -> None:
    state = SamplingState(2, 4, [3])
    first = params(
        logit_bias={0: 100.0},
        min_tokens=5,
        repetition_penalty=9.0,
        top_k=1,
        logprobs=2,
        allowed_token_ids=(0,),
        bad_words_token_ids=((3,),),
    )
    state.add(1, request(first, [3]))
    state.remove(1)
    state.remove(1)
    state.add(1, request(GREEDY, [3]))
    logits = torch.tensor([[1.0, 2.0, 3.0, 4.0]])
    sampled = sample_from(state, logits, [1], np.full((2, 4), 3, np.int32), [1])
    assert sampled == [SampledTokens([3], None)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_arguments_stay_as_they_were(dtype: torch.dtype) -> None:
    rng = np.random.default_rng(9)
    requests = [random_request(rng, 40) for _ in range(50)]
    logits = torch.from_numpy(rng.normal(0, 2, (50, 40))).to(dtype)
    before = logits.clone()
    bitmask = torch.full((50, 2), -1, dtype=torch.int32)
    sample(logits, requests, [2], bitmask=bitmask)
    assert torch.equal(logits, before)
    assert bool((bitmask == -1).all())


def test_logits_of_another_shape_are_refused() -> None:
    with pytest.raises(ValueError, match=r"logits must be \(1, 4\)"):
        SamplingState(1, 4).choose(torch.zeros(1, 5), np.array([0]), np.zeros((1, 4), np.int32), np.array([1]))


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"logit_bias": {50: 1.0}}, "logit_bias"),
        ({"stop_token_ids": (-1,)}, "stop_token_ids"),
        ({"allowed_token_ids": (3, 50)}, "allowed_token_ids"),
        ({"allowed_token_ids": (3,), "stop_token_ids": (3,), "min_tokens": 1}, "min_tokens"),
        ({"bad_words_token_ids": ((3, 50),)}, "bad_words"),
        ({"bad_words": ("text",)}, "bad_words"),
        ({"seed": None}, "seed"),
    ],
)
def test_parameters_that_this_vocabulary_cannot_serve_are_refused(values: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        check_for_vocab(params(**values), 50)
    assert error.value.param == field


@pytest.mark.parametrize("values", [{"seed": 1.5}, {"temperature": "hot"}, {"logit_bias": {50: 1.0}}, {"seed": None}])
def test_parameters_that_cannot_be_served_fail_their_own_request(values: dict[str, Any]) -> None:
    state = SamplingState(2, 50)
    state.add(0, request(params(**values)))
    state.add(1, request(params(temperature=0.0)))
    slots = np.array([0, 1])
    assert state.looks_back(slots)
    known = np.zeros((2, 8), np.int32)
    tokens = state.choose(torch.eye(50)[:2], slots, known, np.array([3, 3]))
    assert tokens.tolist() == [-1, 1]
    [(row, failure)] = state.failures.items()
    assert (row, failure.code) == (0, InvalidRequest.code)
    assert "the sampling parameters cannot be served" in failure.message
    state.add(0, request(params(temperature=0.0)))
    assert state.choose(torch.eye(50)[:2], slots, known, np.array([3, 3])).tolist() == [0, 1]
