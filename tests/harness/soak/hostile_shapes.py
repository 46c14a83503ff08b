"""Shapes of answers that mean no good: huge, without end, contradictory, wrong, slow to compile or to match."""

import random
from collections.abc import Iterator
from typing import Any, NamedTuple


class Hostile(NamedTuple):
    """One request's fields."""

    kind: str
    fields: dict[str, Any]


def hostile_shapes(count: int, seed: int) -> Iterator[Hostile]:
    """So many, of every kind by turns, each another one than those before."""
    rng = random.Random(seed)
    kinds = list(_KINDS)
    for number in range(count):
        kind = kinds[number % len(kinds)]
        yield Hostile(kind, _KINDS[kind](rng))


def _schema(schema: Any) -> dict[str, Any]:
    return {"structured_outputs": {"json": schema}}


def _word(rng: random.Random, length: int = 8) -> str:
    return "".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=length))


def _deep(rng: random.Random, depth: int) -> str:
    """As text: no encoder of JSON goes so deep."""
    return f'{{"properties":{{"{_word(rng)}":' * depth + "{}" + "}}" * depth


def _chain(rng: random.Random) -> dict[str, Any]:
    """Each definition is two of the next one."""
    name = _word(rng)
    chain = {f"{name}{i}": {"allOf": [{"$ref": f"#/$defs/{name}{i + 1}"}] * 2} for i in range(40)}
    return {"$ref": f"#/$defs/{name}0", "$defs": {**chain, f"{name}40": {"type": "object"}}}


def _product(rng: random.Random) -> dict[str, Any]:
    either = [{"anyOf": [{"minimum": rng.random()}, {"maximum": -rng.random()}]} for _ in range(40)]
    return {"type": "number", "allOf": either}


def _tree(rng: random.Random) -> dict[str, Any]:
    """An answer may be nested as deep as it likes."""
    return {"type": "object", "properties": {_word(rng): {"type": "array", "items": {"$ref": "#"}}}}


def _arrays(rng: random.Random) -> dict[str, Any]:
    schema: dict[str, Any] = {"enum": [_word(rng)]}
    for _ in range(4):
        schema = {"type": "array", "items": schema, "minItems": 99}
    return schema


def _many_lengths(rng: random.Random) -> dict[str, Any]:
    names = [_word(rng) for _ in range(60)]
    return {"properties": {name: {"type": "string", "maxLength": rng.randint(100, 1000)} for name in names}}


def _catastrophic(rng: random.Random) -> str:
    return rng.choice(("((a+)+)+{}", "(a|aa|{})+b", "(.*a){{12}}{}", "(([a-z]+)*{})*$", "(x+x+)+{}"))[:40].format(
        _word(rng)
    )


def _ebnf(rng: random.Random) -> str:
    name = _word(rng)
    return rng.choice((
        f'root ::= root "{name}"',  # without end
        f'root ::= {"(" * rng.randint(50, 5000)}"{name}"',
        f'root ::= {name}',
        f'root ::= a{{0,9999}}\na ::= b{{0,9999}}\nb ::= "{name}" | [a-z]{{0,999}}',
        f'root ::= ("{name}" | root root)*',
        "\n".join(f'r{i} ::= r{i + 1} r{i + 1} | "{name}"' for i in range(500)) + '\nr500 ::= "x"\nroot ::= r0',
    ))  # fmt: skip


_KINDS: dict[str, Any] = {
    "huge enum": lambda rng: _schema({"enum": [_word(rng, 20) for _ in range(20_000)]}),
    "many properties": lambda rng: _schema({"properties": {_word(rng): {} for _ in range(3000)}}),
    "deep": lambda rng: _schema(_deep(rng, rng.choice((40, 500, 3000)))),
    "definitions without end": lambda rng: _schema(_chain(rng)),
    "branches multiplied": lambda rng: _schema(_product(rng)),
    "recursive": lambda rng: _schema(_tree(rng)),
    "contradictory": lambda rng: _schema({"type": "integer", "minimum": rng.random() + 9, "maximum": rng.random()}),
    "unknown keyword": lambda rng: _schema({"properties": {_word(rng): {_word(rng): 1}}}),
    "no schema": lambda rng: _schema({"properties": rng.choice(([], 7, {_word(rng): "x"}))}),
    "no JSON": lambda rng: {"structured_outputs": {"json": "{" * rng.randint(1, 9999)}},
    "long strings": lambda rng: _schema(_many_lengths(rng)),
    "long repetition": lambda rng: _schema({"pattern": f"^[a-z{_word(rng)}0-9]{{{rng.randint(500, 1024)}}}$"}),
    "repetitions multiplied": lambda rng: {"structured_outputs": {"regex": f"((({_word(rng)}{{99}}){{99}}){{99}})"}},
    "catastrophic pattern": lambda rng: {"structured_outputs": {"regex": _catastrophic(rng)}},
    "wrong pattern": lambda rng: {
        "structured_outputs": {"regex": rng.choice(("(", "[", "a**", "\\", "(?<=a)")) + _word(rng)}
    },
    "EBNF": lambda rng: {"structured_outputs": {"grammar": _ebnf(rng)}},
    "many choices": lambda rng: {"structured_outputs": {"choice": [_word(rng, 40) for _ in range(4000)]}},
    "wrong tag": lambda rng: {"structured_outputs": {"structural_tag": {"format": {"type": _word(rng)}}}},
    "two shapes": lambda rng: {"structured_outputs": {"regex": _word(rng), "choice": [_word(rng)]}},
    "arrays multiplied": lambda rng: _schema(_arrays(rng)),
}  # fmt: skip
