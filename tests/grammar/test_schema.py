"""Schemas: the documents that their grammars let pass, and refusals that name keyword and place."""

from typing import Any

import pytest
from grammar_walks import ByteGrammars

from pdkv.errors import InvalidRequest
from pdkv.grammar.prepare import make_grammar
from pdkv.grammar.schema import normalize
from pdkv.sampling.shape import StructuredOutputs


@pytest.fixture(scope="module")
def grammars(tmp_path_factory: pytest.TempPathFactory) -> ByteGrammars:
    return ByteGrammars(tmp_path_factory.mktemp("bytes"))


def check(grammars: ByteGrammars, schema: Any, good: str, bad: str) -> None:
    """Documents that pass and that do not, with spaces between them."""
    grammar = make_grammar(StructuredOutputs(json=schema))
    for text in (*good.split(), *bad.split()):
        assert grammars.accepts(grammar, text) == (text in good.split()), text


@pytest.mark.parametrize(
    ("schema", "place", "words"),
    [
        ({"properties": {"a": {"not": {}}}}, "/properties/a/not", "what may not"),
        ({"items": {"if": {}}}, "/items/if", "conditions"),
        ({"contains": {}}, "/contains", "look for"),
        ({"dependentRequired": {"a": ["b"]}}, "/dependentRequired", "anyOf"),
        ({"type": "array", "uniqueItems": True}, "/uniqueItems", "compare"),
        ({"type": "number", "multipleOf": 0}, "/multipleOf", "more than 0"),
        ({"multipleOf": 1e5, "allOf": [{"multipleOf": 1e5}]}, "/allOf/0/multipleOf", "too many digits"),
        ({"items": {"multipleOf": 0.07}}, "/items/multipleOf", "too many digits"),
        ({"items": {"minimum": 0.30000000000000004}}, "/items/minimum", "15 digits"),
        ({"properties": {"a/b~": {"minLenght": 1}}}, "/properties/a~1b~0/minLenght", "not known"),
        ({"$ref": "https://example.org/a"}, "/$ref", "other documents"),
        ({"$ref": "#/$defs/b"}, "/$ref", "points to nothing"),
        ({"$defs": {"a": {"type": "strin"}}, "$ref": "#/$defs/a"}, "/$defs/a/type", "one or several of"),
        ({"$dynamicRef": "#a"}, "/$dynamicRef", "use $ref"),
        ({"type": "string", "format": "idn-email"}, "/format", "what can: date"),
        ({"type": "string", "pattern": "\\0"}, "/pattern", "U+0000"),
        ({"patternProperties": {"a": {}, "b(": {}}}, "/patternProperties/b(", "missing )"),
        ({"oneOf": [{"type": "integer"}, {"minimum": 2}]}, "/oneOf", "fulfil two"),
        ({"type": "object", "minProperties": 2}, "/minProperties", "up to 1"),
        ({"enum": []}, "/enum", "not empty"),
        ({"const": 2**70}, "/const", "2**53"),
        ({"items": [{}]}, "/items", "must be a schema"),
        ({"maxItems": -1}, "/maxItems", "must be an integer"),
        ({"properties": {"a": {"$id": "b"}}}, "/properties/a/$id", "remove it"),
        ({"patternProperties": {"a": {}}, "allOf": [{}], "unevaluatedProperties": False}, "/unevaluatedPr", "depends"),
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
        False, {"type": "integer", "minimum": 3, "maximum": 2}, {"patternProperties": {"a": {}, "b": {}}},
        {"type": "number", "exclusiveMinimum": 1, "maximum": 1}, {"enum": [1], "const": True},
        {"type": "string", "minLength": 3, "maxLength": 2}, {"type": "string", "enum": [1]},
        {"allOf": [{"type": "string"}, {"type": "integer"}]}, {"allOf": [{"enum": [1, 2]}, {"enum": [3]}]},
        {"type": "array", "prefixItems": [{}, False], "minItems": 2},
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
        {"properties": {"a": {}}, "additionalProperties": False, "required": ["b"]},
    ],
)  # fmt: skip
def test_a_schema_that_nothing_fulfils_is_refused(schema: Any, grammars: ByteGrammars) -> None:
    with pytest.raises(InvalidRequest):
        grammars.check(make_grammar(StructuredOutputs(json=schema)))


DEFINITIONS = {
    "named": {"properties": {"name": {"type": "null"}}, "required": ["name"]},
    "cat": {"type": "object", "properties": {"kind": {"const": "cat"}, "lives": {"const": 9}}, "required": ["kind"]},
    "dog": {"type": "object", "properties": {"kind": {"const": "dog"}}, "required": ["kind"]},
    "a b/c": {"type": "boolean"},
}


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        (True, '1 {} "\\u0041" [{"a":null}]', "1. {"),
        ({"title": "A", "x-mine": 1, "type": "boolean"}, "true false", "1 null"),
        ({"allOf": [{"enum": [1, True, [1, {}], [2, {}]]}, {"enum": [[2, {}], 1.0, 2]}]}, "1 [2,{}]", "true [1,{}] 2"),
        ({"maxLength": 2.0}, '"ab" "\\n\\""', '"abc" 1'),
        ({"pattern": "^a*b$", "minLength": 2}, '"ab" "aab"', '"b" "aa"'),
        ({"enum": ["aa", "b"], "minLength": 2}, '"aa"', '"b"'),
        ({"type": ["string", "null"], "enum": ["a", None, 3]}, '"a" null', "3"),
        ({"type": "integer", "exclusiveMinimum": 3, "maximum": 4.5}, "4", "3 5 4.0"),
        ({"exclusiveMinimum": 0, "maximum": 1e-4}, "0.0001 0.00000001", "0 -0 0.0 0.0002"),
        ({"exclusiveMinimum": 0, "allOf": [{"maximum": 0.5}]}, "0.5", "0 0.0"),
        ({"exclusiveMinimum": 99, "exclusiveMaximum": 99.001}, "99.0009", "99 99.0 99.001"),
        ({"minimum": -2.5, "exclusiveMaximum": -2}, "-2.1 -2.5", "-2 -2.0 -2.51"),
        ({"minimum": -1, "exclusiveMaximum": 0}, "-0.1 -1", "0 -0 -0.0"),
        ({"minimum": 0.3000001, "maximum": 0.3000009}, "0.3000001 0.3000005", "0.3 0.300001"),
        ({"type": "integer", "multipleOf": 3, "minimum": -3}, "-3 0 3", "-6 1 3.0"),
        ({"prefixItems": [{"multipleOf": 0.01}] * 9 + [{"multipleOf": 5}]}, "[] [0.25,0.1]", "[0.255]"),
        ({"multipleOf": 6, "allOf": [{"multipleOf": 0.5}, {"multipleOf": 4}]}, "12 0", "6 8 0.5"),
        ({"oneOf": [{"type": "null"}, {"const": 1}]}, "null 1", "2 1.5"),
        ({"oneOf": [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}]}, '{"kind":"cat","lives":9} {"kind":"dog"}',
         '{"kind":"dog","lives":9} {"lives":9}'),
        ({"anyOf": [{"maximum": 3}, {"type": "string"}], "type": "integer"}, "3", '4 "a"'),
        ({"anyOf": [{"$ref": "#/$defs/a%20b~1c"}, {"$ref": "#/anyOf/2"}, {"type": "null"}]}, "true null", "1"),
        ({"type": "array", "prefixItems": [{"type": "null"}, False], "items": {}}, "[] [null]", "[null,1] [1]"),
        ({"allOf": [{"unevaluatedItems": False}, {"prefixItems": [{}]}]}, "[]", "[1]"),
        ({"allOf": [{"additionalProperties": False}, {"properties": {"a": {}}}], "type": "object"}, "{}", '{"a":1} 1'),
        ({"properties": {"a": {}}, "allOf": [{"allOf": [{}], "unevaluatedProperties": False}]}, "{}", '{"a":1}'),
        ({"patternProperties": {"^a": {"type": "null"}, "^b$": {}}}, '{"ab":null,"b":1} {"c":1}', '{"ab":1}'),
        ({"patternProperties": {"^a": {"type": "integer"}}, "properties": {"ab": {"minimum": 3}}}, '{"ab":3} {"a":1}',
         '{"ab":2} {"ab":3.5}'),
        ({"allOf": [{"$ref": "#/$defs/named"}, {"properties": {"age": {"type": "integer"}}, "required": ["age"]}],
          "type": "object", "unevaluatedProperties": False}, '{"name":null,"age":1}',
         '{"name":null} {"age":1} {"name":null,"age":1,"b":1}'),
    ],
)  # fmt: skip
def test_documents_pass_that_fulfil_the_schema(schema: Any, good: str, bad: str, grammars: ByteGrammars) -> None:
    check(grammars, {**schema, "$defs": DEFINITIONS} if "$ref" in str(schema) else schema, good, bad)


@pytest.mark.parametrize("schema", [True, {"properties": {"a": {"items": {"type": "integer"}}, "b": {}}}])
def test_at_most_one_space_stands_behind_a_comma_or_a_colon(schema: Any, grammars: ByteGrammars) -> None:
    """A small model writes spaces and line ends up to the last of its tokens."""
    grammar = make_grammar(StructuredOutputs(json=schema))
    for text in ('{"a":[1,2],"b":{}}', '{"a": [1, 2], "b": {}}', '{"a": [1,2],"b": {}}'):
        assert grammars.accepts(grammar, text)
    for text in ('{"a":  [1]}', '{ "a":[1]}', '{"a":[1] }', '{"a" :[1]}', '{"a":[ 1]}', '{"a":\n[1]}', " {}", "{} "):
        assert not grammars.accepts(grammar, text), text


def test_what_is_too_wide_for_the_library_is_refused_with_its_place(grammars: ByteGrammars) -> None:
    def wide(count: int) -> Any:
        return {"items": {"type": "object", "properties": {str(i): {} for i in range(count)}}}

    def branches(count: int) -> Any:
        return {"items": {"anyOf": [{"properties": {str(i): {}}, "required": [str(i)]} for i in range(count)]}}

    for make, most in ((wide, 500), (branches, 2000)):
        assert grammars.accepts(make_grammar(StructuredOutputs(json=make(most - 10))), '[{"7":1}]')
        with pytest.raises(InvalidRequest, match=r"^the schema at /items has too many .* 2000 ways"):
            normalize(make(most + 1))
    assert grammars.accepts(make_grammar(StructuredOutputs(json={"anyOf": [{"const": i} for i in range(2100)]})), "7")


def test_hostile_schemas_are_refused_in_a_bounded_time(grammars: ByteGrammars) -> None:
    deep: dict[str, Any] = {}
    for _ in range(500):
        deep = {"items": deep}
    chain = {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(30)}
    product = {"allOf": [{"anyOf": [{"minimum": i}, {"maximum": -i}]} for i in range(40)]}
    wide = {"anyOf": [{"type": "string"}] * 30_000}
    for schema in (deep, {"$ref": "#/$defs/d0", "$defs": chain | {"d30": {"$ref": "#"}}}, product, wide):
        with pytest.raises(InvalidRequest):
            grammars.check(make_grammar(StructuredOutputs(json=schema)))


@pytest.mark.parametrize(
    ("schema", "beginning"),
    [
        ({"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}, '{"a":'),
        ({"type": "array", "items": {"$ref": "#"}, "minItems": 1}, "["),
    ],
)
def test_a_schema_whose_values_have_no_end_is_enforced(schema: Any, beginning: str, grammars: ByteGrammars) -> None:
    """What cuts an answer off is its length."""
    matcher = grammars.matcher(make_grammar(StructuredOutputs(json=schema)))
    assert all(map(matcher.accept, grammars.encode(beginning * 300)))
    assert not any(map(matcher.accept, grammars.encode("]}null")))


def test_values_in_each_other_without_end_are_refused() -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(InvalidRequest, match="nested too deeply"):
        make_grammar(StructuredOutputs(json={"enum": [deep]}))
