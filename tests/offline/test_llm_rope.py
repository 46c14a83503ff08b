"""Scaled and partial RoPE, within and beyond the positions that a model was trained with, against transformers.

Where scaling depends on a length, the oracle's frequencies are fixed for the engine's, as an engine's are.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from deployments import write_tokenizer
from oracle import Expected, Oracle
from small_models import make_hf_model

from pdkv import LLM, SamplingParams
from pdkv.errors import InvalidRequest

TRAINED, NUM_OUTPUT = 64, 16
LONG = 4 * TRAINED
LENGTHS = (TRAINED - NUM_OUTPUT // 2, 2 * TRAINED, LONG - NUM_OUTPUT)
"""Of prompts: the output crosses the original length, all is beyond it, all of the length is used."""

PARAMS = SamplingParams(temperature=0, max_tokens=NUM_OUTPUT, ignore_eos=True)
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": TRAINED}
LONGROPE = {
    "rope_type": "longrope", "original_max_position_embeddings": TRAINED,
    "short_factor": [1.0 + i / 8 for i in range(8)], "long_factor": [1.5 + i for i in range(8)],
}  # fmt: skip
TRAINED_SHORT = {"max_position_embeddings": TRAINED}
STRETCHED = {"max_position_embeddings": LONG, "original_max_position_embeddings": TRAINED}


def make_model(path: Path, family: str, rope: dict[str, Any], **overrides: Any) -> Path:
    model = make_hf_model(path, family, "float32", rope_parameters={"rope_theta": 10000.0, **rope}, **overrides)
    write_tokenizer(model)
    return model


def expect(oracle: Oracle, lengths: tuple[int, ...], num_output: int = NUM_OUTPUT) -> list[Expected]:
    rng = random.Random(3)
    return [oracle.expect(lambda n=n: [rng.randrange(2, 258) for _ in range(n)], num_output) for n in lengths]


@contextmanager
def engine(model: Path, **fields: Any) -> Iterator[LLM]:
    with LLM(model, kv_cache_memory=4 << 20, threads=1, **fields) as llm:
        yield llm


def check(llm: LLM, expected: list[Expected]) -> None:
    outputs = llm.generate([one.prompt for one in expected], PARAMS, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == [one.output for one in expected]


@pytest.mark.parametrize(
    ("family", "rope", "overrides"),
    [
        ("llama", {"rope_type": "linear", "factor": 4.0}, TRAINED_SHORT),
        ("llama", YARN, TRAINED_SHORT),
        ("qwen2", {**YARN, "mscale": 0.7, "mscale_all_dim": 1.2, "truncate": False}, STRETCHED),
        ("qwen3", {**YARN, "attention_factor": 1.3, "beta_fast": 8, "beta_slow": 2}, STRETCHED),
        ("mistral", {**YARN, "factor": None}, STRETCHED),
        ("phi3", {"rope_type": "default", "partial_rotary_factor": 0.5}, {"max_position_embeddings": LONG}),
    ],
    ids=["linear", "yarn", "yarn-mscale", "yarn-attention-factor", "yarn-no-factor", "partial"],
)
def test_where_no_length_matters_tokens_are_those_of_transformers(
    tmp_path: Path, family: str, rope: dict[str, Any], overrides: dict[str, Any]
) -> None:
    model = make_model(tmp_path, family, rope, **overrides)
    expected = expect(Oracle(model), LENGTHS)
    with engine(model) as llm:
        assert llm._engine.core.card.max_model_len == LONG
        check(llm, expected)
        with pytest.raises(InvalidRequest, match=f"at most {LONG - 1} leave room"):
            llm.generate([[5] * LONG], PARAMS, use_tqdm=False)


def fixed_oracle(model: Path, length: int) -> Oracle:
    """transformers with the frequencies that it would take for a sequence of `length` tokens, whatever comes."""
    import transformers

    oracle = Oracle(model)
    rotary = oracle.model.model.rotary_emb
    compute = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS[rotary.rope_type]
    rotary.inv_freq, rotary.attention_scaling = compute(oracle.model.config, "cpu", seq_len=length)
    rotary.rope_type = "fixed"
    return oracle


DYNAMIC = {"rope_type": "dynamic", "factor": 4.0}


@pytest.mark.parametrize("max_model_len", [None, 2 * TRAINED], ids=["default", "shorter"])
def test_dynamic_frequencies_are_those_of_the_engines_length(tmp_path: Path, max_model_len: int | None) -> None:
    model = make_model(tmp_path, "llama", DYNAMIC, **TRAINED_SHORT)
    length = max_model_len or LONG
    lengths = tuple(n for n in LENGTHS if n + NUM_OUTPUT <= length)
    expected = expect(fixed_oracle(model, length), lengths)
    with engine(model, max_model_len=max_model_len) as llm:
        assert llm._engine.core.card.max_model_len == length
        check(llm, expected)


def test_dynamic_up_to_the_trained_length_is_transformers_as_it_is(tmp_path: Path) -> None:
    model = make_model(tmp_path, "llama", DYNAMIC, **TRAINED_SHORT)
    with engine(model, max_model_len=TRAINED) as llm:
        check(llm, expect(Oracle(model), (TRAINED // 2, TRAINED - NUM_OUTPUT)))


@pytest.mark.parametrize("family", ["phi3", "llama"])
def test_longrope_has_the_short_factors_up_to_the_original_length(tmp_path: Path, family: str) -> None:
    """That is the length of an engine that is told none, as in vLLM: there transformers never changes factors."""
    model = make_model(tmp_path, family, LONGROPE, **STRETCHED)
    with engine(model) as llm:
        assert llm._engine.core.card.max_model_len == TRAINED
        check(llm, expect(Oracle(model), (TRAINED // 2, TRAINED - NUM_OUTPUT)))


@pytest.mark.parametrize("rope", [LONGROPE, {**LONGROPE, "attention_factor": 1.4, "partial_rotary_factor": 1.0}])
def test_longrope_has_the_long_factors_in_an_engine_for_more(tmp_path: Path, rope: dict[str, Any]) -> None:
    """Prompts beyond the original length are transformers' as it is, others with its factors fixed."""
    model = make_model(tmp_path, "phi3", rope, **STRETCHED)
    beyond = expect(Oracle(model), LENGTHS[1:])
    fixed = expect(fixed_oracle(model, LONG), LENGTHS)
    with engine(model, max_model_len=LONG) as llm:
        check(llm, beyond)
        check(llm, fixed)


def test_engines_of_other_lengths_are_other_models_where_their_frequencies_are(tmp_path: Path) -> None:
    model = make_model(tmp_path, "phi3", LONGROPE, **STRETCHED)
    identities = []
    for length in (32, TRAINED, TRAINED + 1, LONG):
        with engine(model, max_model_len=length) as llm:
            identities.append(llm._engine.core.card.model)
    assert identities[0] == identities[1] != identities[2] == identities[3]
