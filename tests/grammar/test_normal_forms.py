"""Schemas that come again: the same normal form, without the work, within a bound on memory."""

import json
from typing import Any

import pytest

from pdkv.errors import InvalidRequest
from pdkv.grammar import schema as schemas
from pdkv.grammar.normal_forms import NormalForms


def test_a_schema_is_normalized_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    normalize = schemas.normalize
    monkeypatch.setattr(
        schemas, "normalize", lambda *given, **options: made.append(given) or normalize(*given, **options)
    )
    forms = NormalForms()
    given: list[Any] = [{"const": 1}, {"const": True}, {"const": 1.5}, {"minLength": 2}]
    for _ in range(2):
        for schema in given:
            assert forms.normalize(schema) == normalize(schema)
    assert len(made) == len(given)


def test_what_is_kept_is_bounded_and_the_oldest_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    forms = NormalForms(max_bytes=2000)
    for i in range(100):
        forms.normalize({"enum": ["x" * i]})
        forms.normalize({"const": 7})
        assert forms.num_bytes <= 2000
    monkeypatch.setattr(schemas, "normalize", None)
    assert json.loads(forms.normalize({"const": 7}))["const"] == 7
    with pytest.raises(TypeError):
        forms.normalize({"enum": ["x"]})


def test_a_refusal_is_the_same_each_time() -> None:
    forms = NormalForms()
    for _ in range(2):
        with pytest.raises(InvalidRequest, match="/not"):
            forms.normalize({"not": {}})
    assert forms.num_bytes == 0


@pytest.mark.parametrize("schema", [{"const": "\ud800"}, {"const": object()}])
def test_what_is_no_json_is_refused(schema: Any) -> None:
    with pytest.raises(InvalidRequest, match="not valid JSON"):
        NormalForms().normalize(schema)
