"""What the grammar of a schema lets pass, judged by `jsonschema` and by the schema as its client wrote it."""

import itertools
import json
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import jsonschema
import msgspec
import numpy as np
from grammar_walks import ByteGrammars
from schema_suite import Group, Schema

from pdkv.errors import InvalidRequest
from pdkv.grammar.prepare import make_grammar
from pdkv.sampling.shape import Grammar, StructuredOutputs

WALK_BYTES = 1024
_MAX_ORDERED = 4


class Tally(msgspec.Struct):
    """What came of many schemas."""

    schemas: int = 0
    refused: dict[str, int] = {}  # by keyword, or by the beginning of what was said
    compiled: int = 0
    valid: int = 0  # values of the suite that fulfil a schema that was compiled
    valid_accepted: int = 0
    invalid: int = 0
    walks: int = 0
    complete: int = 0  # of the walks, within WALK_BYTES
    wrong: list[str] = []  # texts that were accepted and are none, or no JSON


class Judge:
    """Tries schemas, and keeps a tally."""

    def __init__(self, grammars: ByteGrammars, seed: int, num_walks: int) -> None:
        """`num_walks` of each schema."""
        self.tally = Tally()
        self._refused: Counter[str] = Counter()
        self._grammars = grammars
        self._num_walks = num_walks
        self._rng = np.random.default_rng(seed)

    def try_group(self, group: Group) -> None:
        """Its values, and walks."""
        grammar = self._compile(group.schema)
        if grammar is None:
            return
        self.tally.valid += len(group.valid)
        self.tally.invalid += len(group.invalid)
        self.tally.valid_accepted += sum(any(self._accepted(grammar, value)) for value in group.valid)
        for value in group.invalid:
            self.tally.wrong += [f"{group.name}: accepts {text}" for text in self._accepted(grammar, value)]
        self._walk(group.name, group.schema, grammar)

    def try_schema(self, name: str, schema: Schema) -> None:
        """Walks alone."""
        grammar = self._compile(schema)
        if grammar is not None:
            self._walk(name, schema, grammar)

    def _compile(self, schema: Schema) -> Grammar | None:
        self.tally.schemas += 1
        try:
            grammar = make_grammar(StructuredOutputs(json=schema))
            self._grammars.check(grammar)
        except InvalidRequest as error:
            text = str(error)
            self._refused[text.split("'")[1] if text.startswith("the keyword '") else text[:40]] += 1
            self.tally.refused = dict(self._refused.most_common())
            return None
        self.tally.compiled += 1
        return grammar

    def _accepted(self, grammar: Grammar, value: Any) -> Iterator[str]:
        return (text for text in _texts(value) if self._grammars.accepts(grammar, text))

    def _walk(self, name: str, schema: Schema, grammar: Grammar) -> None:
        for _ in range(self._num_walks):
            self.tally.walks += 1
            text = self._grammars.walk(grammar, self._rng, WALK_BYTES)
            if text is None:
                continue
            self.tally.complete += 1
            if error := why_wrong(schema, text):
                self.tally.wrong.append(f"{name}: {json.dumps(schema)} leads to {text!r}: {error}")


def why_wrong(schema: Schema, text: str) -> str | None:
    """Why a text does not fulfil a schema, if it does not."""
    kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    try:
        errors = kind(schema, format_checker=kind.FORMAT_CHECKER).iter_errors(json.loads(text))
        return next((error.message for error in errors), None)
    except ValueError as error:
        return f"no JSON, {error}"


def pairs(groups: list[Group], count: int, seed: int) -> Iterator[tuple[str, Schema]]:
    """Schemas made of two of the suite's, in every way that combines them."""
    rng = random.Random(seed)
    alone = [group for group in groups if "$ref" not in json.dumps(group.schema)]  # they are of a document of their own
    for _ in range(count):
        one, other = rng.sample(alone, 2)
        keyword = rng.choice(("allOf", "anyOf", "oneOf", "beside", "properties"))
        yield f"{keyword} of {one.name} and {other.name}", _combined(keyword, _bare(one.schema), _bare(other.schema))


def _combined(keyword: str, one: Schema, other: Schema) -> Schema:
    if keyword == "properties":
        return {"properties": {"a": one, "b": other}, "required": ["b"], "unevaluatedProperties": False}
    if keyword == "beside" and isinstance(one, dict):
        return {**one, "allOf": [other]} if "allOf" not in one else {**one, "anyOf": [other]}
    return {"allOf" if keyword == "beside" else keyword: [one, other]}


def _bare(schema: Schema) -> Schema:
    return {name: value for name, value in schema.items() if name != "$schema"} if isinstance(schema, dict) else schema


def _texts(value: Any) -> set[str]:
    """Ways to write a value."""
    orders = [value]
    if isinstance(value, dict) and 1 < len(value) <= _MAX_ORDERED:
        orders = [dict(order) for order in itertools.permutations(value.items())]
    return {
        json.dumps(ordered, ensure_ascii=ascii_only, separators=separators)
        for ordered in orders
        for ascii_only in (True, False)
        for separators in ((", ", ": "), (",", ":"))
    }
