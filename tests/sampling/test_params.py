"""One declaration of a sampling parameter is all that requests, flags, a model's defaults and checks know of it."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pdkv.base.options import options_of
from pdkv.cli.generate import sampling_flags
from pdkv.errors import InvalidRequest
from pdkv.models.generation_config import read_sampling_defaults
from pdkv.router.http.read.bodies import ChatBody, CompletionBody
from pdkv.router.http.responses_api.protocol import ResponsesBody
from pdkv.sampling.params import PARAMS_IN_BODIES, PARAMS_OF_MODELS, SamplingParams
from pdkv.wire.messages import Submit

PARAMS = options_of(SamplingParams)
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", PARAMS_IN_BODIES)
def test_a_parameter_is_a_field_of_every_request_and_of_the_page(name: str) -> None:
    assert all(name in body.__struct_fields__ for body in (CompletionBody, ChatBody, ResponsesBody))
    assert f"`{name}`" in (ROOT / "docs" / "http-api.md").read_text()


@pytest.mark.parametrize("name", PARAMS_OF_MODELS)
def test_a_models_default_is_read_and_in_the_page(name: str, tmp_path: Path) -> None:
    theirs = {"max_tokens": "max_new_tokens"}.get(name, name)
    (tmp_path / "generation_config.json").write_text(json.dumps({theirs: 1}))
    assert read_sampling_defaults(tmp_path) == {name: 1}
    assert f"`{theirs}`" in (ROOT / "docs" / "models.md").read_text()


def test_a_parameter_with_a_help_text_is_a_flag() -> None:
    assert sampling_flags().keys() == {name for name, item in PARAMS.items() if item.help}
    assert {"temperature", "top_k", "stop", "ignore_eos", "allowed_token_ids"} <= sampling_flags().keys()


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("temperature", -1, "temperature must be a number of at least 0, got -1"),
        ("temperature", float("nan"), "temperature must be a number of at least 0, got nan"),
        ("temperature", float("inf"), "temperature must be a number of at least 0, got inf"),
        ("temperature", "1", "temperature='1': Expected `float`, got `str`"),
        ("top_p", 0, "top_p must be a number above 0 and up to 1, got 0"),
        ("top_k", 1.5, "top_k must be a whole number of at least -1 and below 2,147,483,648, got 1.5"),
        ("n", True, "n must be a whole number of at least 1 and up to 128, got True"),
        ("n", 10**30, "n must be a whole number of at least 1 and up to 128, got 1000"),
        ("stop", ["a"] * 65, "stop must have at most 64 entries, got 65"),
        ("structured_outputs", 5, "structured_outputs must be a mapping, got 5"),
        ("logit_bias", 5, "logit_bias must be a mapping"),
        ("stop", 5, "stop must be a list of non-empty texts with a length of up to 64, got 5"),
        ("logit_bias", {5: 101}, "logit_bias={5: 101}: Expected `float` <= 100.0"),
        ("bad_words", ["a", " "], "bad_words=['a', ' ']: Expected `str` matching regex"),
    ],
)
def test_every_value_out_of_its_range_is_refused_with_what_was_expected(field: str, value: Any, message: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(**{field: value}).validate()
    assert str(caught.value).startswith(message)
    assert caught.value.param == field


def test_engines_read_no_message_with_a_value_out_of_its_range() -> None:
    submit = Submit(request_id="r", transfer_id="r", attempt=0, prompt_token_ids=[1], params=SamplingParams(top_p=7.0))
    with pytest.raises(msgspec.ValidationError, match=r"`float` <= 1.0 - at `\$.params.top_p`"):
        msgspec.msgpack.decode(msgspec.msgpack.encode(submit), type=Submit)


def test_none_is_the_default_or_what_the_field_says_of_it() -> None:
    params = SamplingParams(max_tokens=None, top_p=None, stop=None).checked()  # type: ignore[arg-type]
    assert (params.max_tokens, params.top_p, params.stop) == (None, 1.0, ())
    SamplingParams(max_tokens=None, min_tokens=100).validate()


def test_a_whole_number_may_be_written_as_a_float_and_a_list_as_one_text() -> None:
    params = SamplingParams(n=2.0, stop="x", seed=None).checked()  # type: ignore[arg-type]
    assert (params.n, type(params.n), params.stop) == (2, int, ("x",))
