"""Matchers on random walks: whatever is drawn from their masks is an answer of the grammar's, as a judge sees it."""

import json
import random
import re
from typing import Any

import jsonschema
import pytest
from grammar_walks import allowed_by

from pdkv.config import DEFAULT_MODEL
from pdkv.errors import InvalidRequest
from pdkv.grammar.matching.matcher import Matcher
from pdkv.grammar.matching.vocabulary import Vocabulary
from pdkv.grammar.prepare import make_grammar
from pdkv.sampling.shape import Grammar, StructuredOutputs
from pdkv.text import Tokenizer

VOCAB_SIZE = 512 + 40  # the model pads its vocabulary
EOS = 1

BOUNDED: list[dict[str, Any]] = [
    {"type": "integer", "minimum": -20, "maximum": 300},
    {"enum": ["red", "green", 7, None, {"a": [1]}]},
    {"type": "string", "pattern": "^[a-f]{2}-[0-9]{1,3}$"},
    {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 4},
    {"anyOf": [{"type": "null"}, {"type": "string", "format": "date"}]},
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "pattern": "^[a-zA-Z é]{1,8}$"},
            "kind": {"enum": ["a", "b"]},
            "at": {"$ref": "#/$defs/point"},
            "tags": {"type": "array", "items": {"type": "string", "format": "ipv4"}, "maxItems": 2},
        },
        "required": ["name", "at"],
        "additionalProperties": False,
        "$defs": {
            "point": {
                "type": "object",
                "properties": {axis: {"type": "integer", "minimum": 0, "maximum": 9} for axis in "xy"},
                "required": ["x", "y"],
                "additionalProperties": False,
            }
        },
    },
]


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return Vocabulary.load(DEFAULT_MODEL, VOCAB_SIZE, [EOS])


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_dir(DEFAULT_MODEL)


def matcher_of(vocabulary: Vocabulary, **asked: Any) -> Matcher:
    return Matcher(make_grammar(StructuredOutputs(**asked)), vocabulary)


def mask_of(matcher: Matcher) -> list[int]:
    """The tokens allowed next."""
    return allowed_by(matcher, VOCAB_SIZE).tolist()


def walk(matcher: Matcher, rng: random.Random, limit: int = 1000) -> list[int]:
    """Random tokens up to the end, which is not among them."""
    tokens: list[int] = []
    while len(tokens) < limit:
        token = rng.choice(mask_of(matcher))
        assert matcher.accept(token)
        if token == EOS:
            return tokens
        tokens.append(token)
    raise AssertionError(f"no end within {limit} tokens: {tokens}")


@pytest.mark.parametrize("schema", BOUNDED, ids=lambda schema: json.dumps(schema)[:40])
def test_walks_end_with_json_of_the_schema(
    vocabulary: Vocabulary, tokenizer: Tokenizer, schema: dict[str, Any]
) -> None:
    fresh, rng = matcher_of(vocabulary, json=schema), random.Random(1)
    for _ in range(30):
        matcher = fresh.copy()
        text = tokenizer.decode(walk(matcher, rng))
        jsonschema.validate(json.loads(text), schema)
        assert mask_of(matcher) == [EOS]


@pytest.mark.parametrize(
    "asked",
    [
        {"regex": "(ab|c)[0-9]{2,4}x?"},
        {"choice": ("yes", "no", 'a "quoted" one', "naïve 你好\n")},
        {"grammar": 'root ::= "(" root? ")" | [a-c]'},
    ],
    ids=["regex", "choice", "grammar"],
)
def test_walks_end_with_texts_of_the_grammar(
    vocabulary: Vocabulary, tokenizer: Tokenizer, asked: dict[str, Any]
) -> None:
    fresh, rng = matcher_of(vocabulary, **asked), random.Random(2)
    for _ in range(30):
        text = tokenizer.decode(walk(fresh.copy(), rng))
        if "choice" in asked:
            assert text in asked["choice"]
        else:
            assert re.fullmatch(asked.get("regex", r"\(*[a-c]?\)*"), text), text
            assert text.count("(") == text.count(")")


@pytest.mark.parametrize("drafted", [0, 3], ids=["tokens", "drafts"])
def test_masks_are_a_function_of_the_tokens(vocabulary: Vocabulary, drafted: int) -> None:
    """A replay from any point on, as a retry or a migration does, and drafts that are taken back, change none."""
    first, rng = matcher_of(vocabulary, json=BOUNDED[-1]), random.Random(3)
    fresh, tokens, masks = matcher_of(vocabulary, json=BOUNDED[-1]), list[int](), list[list[int]]()
    while not tokens or tokens[-1] != EOS:
        masks.append(mask_of(first))
        tokens.append(rng.choice(masks[-1]))
        assert first.accept(tokens[-1])
    for start in range(len(tokens)):
        matcher = fresh.copy()
        assert all(map(matcher.accept, tokens[:start]))
        assert mask_of(matcher) == masks[start]
        for _ in range(drafted):
            num_accepted = 0
            while num_accepted < 5 and matcher.accept(rng.choice(mask_of(matcher))):
                num_accepted += 1
            matcher.rollback(num_accepted)
            assert mask_of(matcher) == masks[start]
    assert mask_of(fresh) == masks[0], "a copy's tokens are the original's"


def test_rollback_goes_back_to_any_point_also_from_behind_the_end(vocabulary: Vocabulary) -> None:
    matcher = matcher_of(vocabulary, json=BOUNDED[3])
    tokens = [*walk(matcher.copy(), random.Random(4)), EOS, EOS, EOS]
    masks = list[list[int]]()
    for token in tokens:
        masks.append(mask_of(matcher))
        assert matcher.accept(token)
    assert EOS in masks[-3]
    assert masks[-2:] == [[EOS]] * 2
    for count in range(1, len(masks) + 1):
        matcher.rollback(count)
        assert mask_of(matcher) == masks[-count]
        assert all(map(matcher.accept, tokens[-count:]))


def test_the_end_is_where_stop_tokens_alone_may_follow(vocabulary: Vocabulary, tokenizer: Tokenizer) -> None:
    matcher = matcher_of(vocabulary, regex="ab?")
    [a], [b] = (tokenizer.encode(text, add_special_tokens=False) for text in "ab")
    assert not matcher.accept(EOS)
    assert matcher.accept(a)
    assert {EOS, b} <= set(mask_of(matcher))  # complete, but b may follow
    assert matcher.accept(b)
    assert mask_of(matcher) == [EOS]
    assert not matcher.accept(b)
    assert matcher.accept(EOS)
    assert not matcher.accept(b)


def test_tokens_that_answers_leave_out_count_for_no_text(vocabulary: Vocabulary, tokenizer: Tokenizer) -> None:
    """A string of three characters is not one special token, which the client would never see."""
    matcher = matcher_of(vocabulary, json={"type": "string", "minLength": 1, "maxLength": 30})
    assert matcher.accept(tokenizer.encode('"', add_special_tokens=False)[0])
    assert not set(mask_of(matcher)) & tokenizer.special_ids
    assert not any(map(matcher.accept, tokenizer.special_ids))


def test_a_structural_tag_may_be_marked_by_special_tokens(vocabulary: Vocabulary, tokenizer: Tokenizer) -> None:
    [user] = tokenizer.encode("<|user|>", add_special_tokens=False)
    tag = {"type": "tag", "begin": "<|user|>", "content": {"type": "const_string", "value": "a"}, "end": ""}
    matcher = matcher_of(vocabulary, structural_tag={"type": "structural_tag", "format": tag})
    assert user in mask_of(matcher)
    assert matcher.accept(user)
    assert [tokenizer.decode([token]) for token in mask_of(matcher)] == ["a"]


@pytest.mark.parametrize("token", [-1, 512, VOCAB_SIZE - 1, VOCAB_SIZE, 1 << 40])
def test_what_is_no_token_is_never_accepted(vocabulary: Vocabulary, token: int) -> None:
    matcher = matcher_of(vocabulary, regex=".*")
    assert token not in mask_of(matcher)
    assert not matcher.accept(token)


def test_a_wrong_grammar_is_refused_with_the_reason(vocabulary: Vocabulary) -> None:
    with pytest.raises(InvalidRequest, match="undefined"):
        Matcher(Grammar("text", '%llguidance {"no_forcing": true}\nstart: undefined'), vocabulary)


@pytest.mark.parametrize(("least", "most"), [(0, 4), (2, 3), (7, None), (1, 128), (120, 140), (129, 129)])
def test_a_string_has_as_many_characters_as_its_lengths_say(
    vocabulary: Vocabulary, tokenizer: Tokenizer, least: int, most: int | None
) -> None:
    schema = {"type": "string", "minLength": least, **({} if most is None else {"maxLength": most})}
    fresh, rng = matcher_of(vocabulary, json=schema), random.Random(5)
    [quote] = tokenizer.encode('"', add_special_tokens=False)
    lengths = set[int]()
    for _ in range(20):
        matcher, text = fresh.copy(), ""
        wanted = rng.randint(least, most if most is not None else least + 20)
        assert mask_of(matcher) == [quote]
        assert matcher.accept(quote)
        while True:
            texts = {token: tokenizer.decode([token]) for token in mask_of(matcher)}
            may_end = least <= len(text) and (most is None or len(text) <= most)
            assert (quote in texts) == may_end
            if may_end and len(text) >= wanted:
                break
            plain = [token for token in texts if texts[token].isascii() and not set(texts[token]) & set('"\\')]
            token = rng.choice(plain)
            assert matcher.accept(token)
            text += texts[token]
        assert matcher.accept(quote)
        assert mask_of(matcher) == [EOS]
        assert json.loads(f'"{text}"') == text
        lengths.add(len(text))
    assert least == most or len(lengths) > 1
