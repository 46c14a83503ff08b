"""The bounds that router and engines share."""

from typing import Any

import pytest

from pdkv.base.limits import MAX_CACHE_SALT_BYTES, MAX_LOGIT_BIAS, MAX_N, MAX_STOPS, check_cache_salt, clip
from pdkv.base.options import options_of
from pdkv.errors import InvalidRequest
from pdkv.sampling.params import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS, MAX_TEXT_BYTES, SamplingParams
from pdkv.sampling.shape import MAX_GRAMMAR_BYTES, Grammar, StructuredOutputs

MAX_STOP_TOKEN_IDS, MAX_ALLOWED_TOKEN_IDS = (
    int(options_of(SamplingParams)[name].bounds["max_length"]) for name in ("stop_token_ids", "allowed_token_ids")
)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"stop": ("x",) * (MAX_STOPS + 1)}, "stop"),
        ({"stop": ("x" * MAX_TEXT_BYTES, "y")}, "stop"),
        ({"stop": ("é" * (MAX_TEXT_BYTES // 2), "y")}, "stop"),
        ({"stop": ("\ud800" * MAX_TEXT_BYTES,)}, "stop"),
        ({"stop": ("x", "")}, "stop"),
        ({"stop_token_ids": (1,) * (MAX_STOP_TOKEN_IDS + 1)}, "stop_token_ids"),
        ({"logit_bias": dict.fromkeys(range(MAX_LOGIT_BIAS + 1), 1.0)}, "logit_bias"),
        ({"allowed_token_ids": (1,) * (MAX_ALLOWED_TOKEN_IDS + 1)}, "allowed_token_ids"),
        ({"allowed_token_ids": ()}, "allowed_token_ids"),
        ({"bad_words": ("x",) * (MAX_BAD_WORDS + 1)}, "bad_words"),
        ({"bad_words": ("x" * MAX_TEXT_BYTES, "y")}, "bad_words"),
        ({"bad_words": ("x", " ")}, "bad_words"),
        ({"bad_words_token_ids": ((1,),) * (MAX_BAD_WORDS + 1)}, "bad_words"),
        ({"bad_words_token_ids": ((1,) * MAX_BAD_WORD_TOKENS, (1,))}, "bad_words"),
        ({"bad_words_token_ids": ((1,), ())}, "bad_words"),
        ({"n": MAX_N + 1}, "n"),
    ],
)
def test_too_much_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        SamplingParams(**fields).validate()
    assert raised.value.param == param
    assert len(str(raised.value)) < 250


@pytest.mark.parametrize(
    "fields",
    [{"structured_outputs": StructuredOutputs(json_object=True)}, {"grammar": Grammar(kind="text", text="a")}],
    ids=["asked", "made"],
)
def test_an_answer_with_a_shape_ends_where_that_does(fields: dict[str, Any]) -> None:
    SamplingParams(**fields).validate()
    with pytest.raises(InvalidRequest, match="ignore_eos must be false with structured_outputs"):
        SamplingParams(**fields, ignore_eos=True).validate()


def test_a_grammar_has_a_size_that_fits() -> None:
    with pytest.raises(InvalidRequest, match=f"at most {MAX_GRAMMAR_BYTES} bytes"):
        SamplingParams(grammar=Grammar(kind="text", text="a" * (MAX_GRAMMAR_BYTES + 1))).validate()


def test_the_bounds_themselves_are_allowed() -> None:
    SamplingParams(
        stop=("x" * (MAX_TEXT_BYTES // MAX_STOPS),) * MAX_STOPS,
        stop_token_ids=(1,) * MAX_STOP_TOKEN_IDS,
        logit_bias=dict.fromkeys(range(MAX_LOGIT_BIAS), 1.0),
        allowed_token_ids=(1,) * MAX_ALLOWED_TOKEN_IDS,
        bad_words=("x" * (MAX_TEXT_BYTES // MAX_BAD_WORDS),) * MAX_BAD_WORDS,
        bad_words_token_ids=((1,) * (MAX_BAD_WORD_TOKENS // MAX_BAD_WORDS),) * MAX_BAD_WORDS,
        n=MAX_N,
    ).validate()


def test_a_cache_salt_is_measured_in_utf8() -> None:
    check_cache_salt("é" * (MAX_CACHE_SALT_BYTES // 2))
    for salt in ("é" * (MAX_CACHE_SALT_BYTES // 2) + "x", "x" * (MAX_CACHE_SALT_BYTES + 1), "x" * 30_000_000):
        with pytest.raises(InvalidRequest, match="cache_salt must have at most 256 bytes") as raised:
            check_cache_salt(salt)
        assert raised.value.param == "cache_salt"


def test_an_echoed_name_is_clipped() -> None:
    assert clip("short") == "short"
    assert clip("x" * 1000, 10) == "xxxxxxxxxx… (1000 characters)"
