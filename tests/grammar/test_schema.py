"""Schemas in their normal form, and refusals that name keyword and place."""

import json
from typing import Any

import pytest

from pdkv.errors import InvalidRequest
from pdkv.grammar import endless
from pdkv.grammar.prepare import make_grammar
from pdkv.grammar.schema import normalize
from pdkv.grammar.spec import StructuredOutputs


def normal(schema: Any) -> Any:
    return json.loads(normalize(schema))


@pytest.mark.parametrize(
    ("schema", "place", "words"),
    [
        ({"properties": {"a": {"not": {}}}}, "/properties/a/not", "what may not"),
        ({"items": {"if": {}}}, "/items/if", "conditions"),
        ({"contains": {}}, "/contains", "look for"),
        ({"dependentSchemas": {}}, "/dependentSchemas", "anyOf"),
        ({"dependentRequired": {"a": ["b"]}}, "/dependentRequired", "anyOf"),
        ({"type": "array", "uniqueItems": True}, "/uniqueItems", "compare"),
        ({"type": "number", "multipleOf": 0.1}, "/multipleOf", "integer from 1"),
        ({"type": "integer", "multipleOf": 3, "minimum": 1}, "/multipleOf", "neither"),
        ({"properties": {"a/b~": {"minLenght": 1}}}, "/properties/a~1b~0/minLenght", "not known"),
        ({"$ref": "https://example.org/a"}, "/$ref", "other documents"),
        ({"$ref": "#/$defs/b"}, "/$ref", "points to nothing"),
        ({"$defs": {"a": {"type": "strin"}}, "$ref": "#/$defs/a"}, "/$defs/a/type", "one or several of"),
        ({"$dynamicRef": "#a"}, "/$dynamicRef", "use $ref"),
        ({"type": "string", "format": "idn-email"}, "/format", "what can: date"),
        ({"type": "string", "pattern": "a", "minLength": 1}, "/minLength", "beside pattern"),
        ({"type": "string", "pattern": "(?=a)b"}, "/pattern", "cannot be enforced"),
        ({"type": "string", "pattern": "a^b"}, "/pattern", "not at its beginning"),
        ({"type": "string", "pattern": r"(a)\1"}, "/pattern", "back-references"),
        ({"patternProperties": {"a": {}, "b": {}}}, "/patternProperties", "several"),
        ({"patternProperties": {"a": {}}, "properties": {"ab": {}}}, "/patternProperties", "in both"),
        ({"oneOf": [{"type": "integer"}, {"minimum": 2}]}, "/oneOf", "fulfil two"),
        ({"type": "object", "minProperties": 2}, "/minProperties", "up to 1"),
        ({"enum": ["aa", "b"], "minLength": 2}, "/minLength", "beside enum"),
        ({"enum": []}, "/enum", "not empty"),
        ({"const": 2**70}, "/const", "64 bits"),
        ({"items": [{}]}, "/items", "must be a schema"),
        ({"maxItems": -1}, "/maxItems", "must be an integer"),
        ({"properties": {"a": {"$id": "b"}}}, "/properties/a/$id", "remove it"),
        ({"allOf": [{"additionalProperties": False}, {"properties": {"a": {}}}]}, "additionalProperties", "together"),
        ({"allOf": [{"unevaluatedItems": False}, {"prefixItems": [{}]}]}, "/items", "together"),
        ({"properties": {"a": {}}, "allOf": [{"allOf": [{}], "unevaluatedProperties": False}]}, "/allOf/0", "beside"),
        ({"minLength": 3000}, "/minLength", "up to 1024"),
        ({"type": "number", "exclusiveMinimum": 0, "maximum": 1e-7}, "/maximum", "no number of 6 decimals"),
        ({"minimum": 1.0000001, "exclusiveMaximum": 1.000001, "type": "number"}, "/exclusiveMaximum", "6 decimals"),
        ({"minimum": 0.3000001, "maximum": 0.3000009}, "/maximum", "no number of 6 decimals"),
    ],
)
def test_what_a_grammar_cannot_enforce_is_refused_by_name_and_place(schema: Any, place: str, words: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        normalize(schema)
    assert place in str(caught.value)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    "schema",
    [
        False,
        {"type": "integer", "minimum": 3, "maximum": 2},
        {"type": "string", "minLength": 3, "maxLength": 2},
        {"allOf": [{"type": "string"}, {"type": "integer"}]},
        {"allOf": [{"enum": [1, 2]}, {"enum": [3]}]},
        {"type": "string", "enum": [1]},
        {"enum": [1], "const": True},
        {"type": "array", "prefixItems": [{}], "minItems": 2},
        {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
        {"type": "array", "items": {"$ref": "#"}, "minItems": 1},
        {"properties": {"a": {}}, "additionalProperties": False, "required": ["b"]},
    ],
)
def test_a_schema_that_nothing_fulfils_is_refused(schema: Any) -> None:
    with pytest.raises(InvalidRequest):
        normalize(schema)


@pytest.mark.parametrize(
    ("schema", "made"),
    [
        (True, {}),
        ({"title": "A", "x-mine": 1, "type": "boolean"}, {"type": "boolean"}),
        ({"maxLength": 2.0}, {"type": "string", "pattern": r'^[^"\\\x00-\x1f]{0,2}$'}),
        ({"type": ["string", "null"], "enum": ["a", None, 3]}, {"enum": ["a", None]}),
        ({"type": "integer", "exclusiveMinimum": 3, "maximum": 4.5}, {"type": "integer", "minimum": 4, "maximum": 4}),
        ({"oneOf": [{"type": "null"}, {"const": 1}]}, {"anyOf": [{"type": "null"}, {"enum": [1]}]}),
        ({"anyOf": [{"maximum": 3}, {"type": "string"}], "type": "integer"}, {"type": "integer", "maximum": 3}),
        ({"type": "array", "prefixItems": [{"type": "null"}, False], "items": {}},
         {"type": "array", "prefixItems": [{"type": "null"}], "items": False}),
    ],
)  # fmt: skip
def test_the_normal_form_has_nothing_beside_what_decides(schema: Any, made: Any) -> None:
    assert normal(schema) == made


def test_schemas_that_hold_together_become_one() -> None:
    schema = {
        "$defs": {"named": {"properties": {"name": {"type": "string"}}, "required": ["name"]}},
        "allOf": [{"$ref": "#/$defs/named"}, {"properties": {"age": {"type": "integer"}}, "required": ["age"]}],
        "type": "object",
        "unevaluatedProperties": False,
    }
    made = normal(schema)
    assert made["properties"] == {"name": {"type": "string"}, "age": {"type": "integer"}}
    assert made["required"] == ["name", "age"]
    assert made["additionalProperties"] is False


def test_discriminated_branches_may_be_one_of() -> None:
    kind = {"type": "object", "required": ["kind"]}
    cat = {**kind, "properties": {"kind": {"const": "cat"}, "lives": {"type": "integer"}}}
    dog = {**kind, "properties": {"kind": {"const": "dog"}}}
    schema = {"oneOf": [{"$ref": "#/$defs/c"}, {"$ref": "#/$defs/d"}], "$defs": {"c": cat, "d": dog}}
    assert len(normal(schema)["anyOf"]) == 2


def test_references_with_escapes_and_indices_are_followed() -> None:
    branches = [{"$ref": "#/$defs/a%20b~1c"}, {"$ref": "#/anyOf/2"}, {"type": "null"}]
    schema = {"anyOf": branches, "$defs": {"a b/c": {"type": "string"}}}
    assert set(map(str, normal(schema)["$defs"].values())) == {"{'type': 'string'}", "{'type': 'null'}"}


def test_hostile_schemas_are_refused_in_a_bounded_time() -> None:
    deep: dict[str, Any] = {}
    for _ in range(500):
        deep = {"items": deep}
    chain = {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(30)}
    product = {"allOf": [{"anyOf": [{"minimum": i}, {"maximum": -i}]} for i in range(40)]}
    wide = {"anyOf": [{"type": "string"}] * 30_000}
    for schema in (deep, {"$ref": "#/$defs/d0", "$defs": chain | {"d30": {"$ref": "#"}}}, product, wide):
        with pytest.raises(InvalidRequest):
            normalize(schema)


def test_whether_a_long_chain_of_definitions_ends_is_seen_in_one_pass() -> None:
    """Else its time would be over. Each array has to hold one of the next kind, and only the last kind may end."""
    for order in (1, -1):
        numbers = range(8000)[::order]
        chain = {
            f"d{i}": {"type": "array", "minItems": 1, "items": {"$ref": f"#/$defs/d{i + order}"}} for i in numbers[:-1]
        }
        last, first = f"d{numbers[-1]}", {"$ref": f"#/$defs/d{numbers[0]}"}
        for schema, ends in (({"type": "null"}, True), (first, False)):
            wide = {**first, "$defs": {**chain, last: schema}}
            if ends:
                normalize(wide)
            else:
                with pytest.raises(InvalidRequest, match="no answer could end"):
                    normalize(wide)


def test_values_of_a_definition_are_no_schemas(monkeypatch: pytest.MonkeyPatch) -> None:
    """They were searched for references: a value of 4 MB took seconds, and 450 MB."""
    real, searched = endless._references, []

    def search(schema: Any) -> Any:
        searched.append(schema)
        return real(schema)

    monkeypatch.setattr(endless, "_references", search)
    values = [*range(1000), {"$ref": "#/$defs/none"}]
    made = normal({"$ref": "#/$defs/d", "$defs": {"d": {"const": values}}})
    assert made == {"$ref": "#/$defs/d0", "$defs": {"d0": {"enum": [values]}}}
    assert searched == [{"enum": [values]}]


def test_bounds_may_be_as_close_as_numbers_of_six_decimals() -> None:
    for low, high in ((0, 1e-6), (0.3, 0.300001), (1.0000009, 1.000001), (-1e-6, 0), (1e14, 1e14 + 1)):
        assert normal({"type": "number", "minimum": low, "maximum": high})["maximum"] == high


def test_values_in_common_are_found_whatever_their_order_and_number() -> None:
    many = [{"a": [i, True]} for i in range(20_000)]
    made = normal({"allOf": [{"enum": [1, True, *many]}, {"enum": [*reversed(many[10:]), 1.0]}]})
    assert made == {"enum": [1, *many[10:]]}


def test_values_in_each_other_without_end_are_refused() -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(InvalidRequest, match="nested too deeply"):
        make_grammar(StructuredOutputs(json={"allOf": [{"enum": [deep]}, {"enum": [deep]}]}))
