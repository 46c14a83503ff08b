"""Matchers on random walks: whatever is drawn from their masks is an answer of the grammar's, as a judge sees it."""

import json
import random
import re
from typing import Any

import jsonschema
import pytest
import torch

from pdkv.config import DEFAULT_MODEL
from pdkv.errors import InvalidRequest
from pdkv.grammar.compiled import CompiledGrammar, serialize
from pdkv.grammar.compiling import Compiler
from pdkv.grammar.match_time import MatchTime
from pdkv.grammar.matcher import Matcher
from pdkv.grammar.patterns import CHARACTER
from pdkv.grammar.prepare import make_grammar
from pdkv.grammar.spec import Grammar, StructuredOutputs
from pdkv.grammar.vocabulary import Vocabulary
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


def compiled(vocabulary: Vocabulary, grammar: Grammar) -> CompiledGrammar:
    data = serialize(Compiler(vocabulary).compile(grammar), grammar)
    return CompiledGrammar.from_bytes(data, vocabulary)


def mask_of(matcher: Matcher) -> list[int]:
    """The tokens allowed next."""
    bitmask = torch.full((3, -(-VOCAB_SIZE // 32)), 0x55555555, dtype=torch.int32)
    matcher.fill(bitmask, 1)
    assert (bitmask[[0, 2]] == 0x55555555).all(), "rows of others were written"
    words = [int(word) & 0xFFFFFFFF for word in bitmask[1]]
    return [token for token in range(len(words) * 32) if words[token // 32] >> (token % 32) & 1]


def walk(matcher: Matcher, rng: random.Random, limit: int = 400) -> list[int]:
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
    grammar = compiled(vocabulary, make_grammar(StructuredOutputs(json=schema)))
    rng = random.Random(1)
    for _ in range(30):
        matcher = grammar.matcher()
        text = tokenizer.decode(walk(matcher, rng))
        jsonschema.validate(json.loads(text), schema)
        assert matcher.has_ended


@pytest.mark.parametrize(
    "asked",
    [
        StructuredOutputs(regex="(ab|c)[0-9]{2,4}x?"),
        StructuredOutputs(choice=("yes", "no", 'a "quoted" one', "naïve 你好\n")),
        StructuredOutputs(grammar='root ::= "(" root? ")" | [a-c]'),
    ],
    ids=lambda asked: asked.asked_as,
)
def test_walks_end_with_texts_of_the_grammar(
    vocabulary: Vocabulary, tokenizer: Tokenizer, asked: StructuredOutputs
) -> None:
    grammar = compiled(vocabulary, make_grammar(asked))
    rng = random.Random(2)
    patterns = {"regex": r"(ab|c)[0-9]{2,4}x?", "grammar": r"\(*[a-c]?\)*"}
    for _ in range(30):
        text = tokenizer.decode(walk(grammar.matcher(), rng))
        if asked.choice is not None:
            assert text in asked.choice
        else:
            assert re.fullmatch(patterns[asked.asked_as], text), text
            assert asked.regex or text.count("(") == text.count(")")


def test_a_replay_gives_the_same_masks(vocabulary: Vocabulary) -> None:
    grammar = compiled(vocabulary, make_grammar(StructuredOutputs(json=BOUNDED[-1])))
    other = CompiledGrammar.from_bytes(grammar.serialized, vocabulary)
    rng = random.Random(3)
    first, tokens, masks = grammar.matcher(), [], []
    while not first.has_ended:
        masks.append(mask_of(first))
        tokens.append(rng.choice([token for token in masks[-1] if token != EOS]))
        assert first.accept(tokens[-1])
    for start in range(len(tokens)):  # from any point on, as a retry or a migration does
        matcher = other.matcher()
        assert all(map(matcher.accept, tokens[:start]))
        assert mask_of(matcher) == masks[start]


def test_masks_filled_together_are_those_filled_one_by_one(vocabulary: Vocabulary) -> None:
    """Matchers that have ended, that allow special tokens, and that may be slow are among them."""
    tag = {"type": "tag", "begin": "<|user|>", "content": {"type": "any_text"}, "end": "<|user|>"}
    asked = [{"json": BOUNDED[-1]}, {"structural_tag": {"type": "structural_tag", "format": tag}}]
    grammars = [compiled(vocabulary, make_grammar(StructuredOutputs(**shape))) for shape in asked]
    rng = random.Random(4)
    matchers, twins = [], []
    for row in range(12):
        matcher, twin = grammars[row % 2].matcher(MatchTime(is_exact=row % 3 == 0)), grammars[row % 2].matcher()
        for _ in range(400 if row < 2 else row):
            token = rng.choice(mask_of(twin))
            assert matcher.accept(token)
            assert twin.accept(token)
        matchers.append(matcher)
        twins.append(twin)
    for num_rows in (12, 1, 0):
        together = torch.full((13, vocabulary.num_words), 0x55555555, dtype=torch.int32)
        expected = together.clone()
        Matcher.fill_all(matchers[:num_rows], together)
        for row in range(num_rows):
            twins[row].fill(expected, row)
        assert torch.equal(together, expected)


def test_rollback_goes_back_to_any_point_also_from_behind_the_end(vocabulary: Vocabulary) -> None:
    grammar = compiled(vocabulary, make_grammar(StructuredOutputs(json=BOUNDED[3])))
    matcher, rng, masks = grammar.matcher(), random.Random(4), []
    tokens = walk(grammar.matcher(), rng)
    for token in (*tokens, EOS, EOS, EOS):
        masks.append(mask_of(matcher))
        assert matcher.accept(token)
    assert masks[-3:] == [[EOS]] * 3
    for count in range(1, len(masks) + 1):
        matcher.rollback(count)
        assert mask_of(matcher) == masks[len(masks) - count]
        for token in (*tokens, EOS, EOS, EOS)[len(masks) - count :]:
            assert matcher.accept(token)


def test_what_is_forced_is_each_time_the_only_token(vocabulary: Vocabulary, tokenizer: Tokenizer) -> None:
    grammar = compiled(vocabulary, Grammar("ebnf", 'root ::= "the " ("\\u00e9" | "\\u00e8") "!"'))
    matcher, alone = grammar.matcher(), 0
    while not matcher.has_ended:
        before = mask_of(matcher)
        forced = matcher.forced(100)
        assert mask_of(matcher) == before, "forced changed the state"
        assert forced[:1] == matcher.forced(1)
        for token in forced:
            assert mask_of(matcher) == [token]
            assert matcher.accept(token)
        alone += len(forced)
        if not matcher.has_ended:
            choice = mask_of(matcher)
            assert len(choice) > 1
            assert matcher.accept(choice[0])
    assert alone


def test_the_end_is_where_stop_tokens_alone_may_follow(vocabulary: Vocabulary, tokenizer: Tokenizer) -> None:
    matcher = compiled(vocabulary, Grammar("regex", "ab?")).matcher()
    a, b = tokenizer.encode("a", add_special_tokens=False), tokenizer.encode("b", add_special_tokens=False)
    assert len(a) == len(b) == 1
    assert not matcher.accept(EOS)
    assert matcher.accept(a[0])
    assert not matcher.has_ended  # complete, but b may follow
    assert {EOS, *b} <= set(mask_of(matcher))
    assert matcher.accept(b[0])
    assert matcher.has_ended
    assert mask_of(matcher) == [EOS]
    assert not matcher.accept(b[0])
    assert matcher.accept(EOS)
    assert not matcher.accept(b[0])


def test_tokens_that_answers_leave_out_count_for_no_text(vocabulary: Vocabulary, tokenizer: Tokenizer) -> None:
    """A string of three characters is not one special token, which the client would never see."""
    schema = {"type": "string", "minLength": 1, "maxLength": 30}
    matcher = compiled(vocabulary, make_grammar(StructuredOutputs(json=schema))).matcher()
    assert matcher.accept(tokenizer.encode('"', add_special_tokens=False)[0])
    assert not set(mask_of(matcher)) & tokenizer.special_ids
    assert not any(map(matcher.accept, tokenizer.special_ids))


def test_a_structural_tag_may_be_marked_by_special_tokens(vocabulary: Vocabulary, tokenizer: Tokenizer) -> None:
    [user] = tokenizer.encode("<|user|>", add_special_tokens=False)
    tag = {"type": "tag", "begin": "<|user|>", "content": {"type": "const_string", "value": "a"}, "end": ""}
    asked = StructuredOutputs(structural_tag={"type": "structural_tag", "format": tag})
    matcher = compiled(vocabulary, make_grammar(asked)).matcher()
    assert user in mask_of(matcher)
    assert matcher.accept(user)
    assert tokenizer.decode(matcher.forced(5)[:1]) == "a"


@pytest.mark.parametrize("token", [-1, 512, VOCAB_SIZE - 1, VOCAB_SIZE, 1 << 40])
def test_what_is_no_token_is_never_accepted(vocabulary: Vocabulary, token: int) -> None:
    matcher = compiled(vocabulary, Grammar("regex", ".*")).matcher()
    assert token not in mask_of(matcher)
    assert not matcher.accept(token)


def test_a_grammar_that_is_slow_from_the_beginning_is_refused(vocabulary: Vocabulary) -> None:
    names = [f"x{i}" for i in range(20)]
    rules = "\n".join([f"root ::= {' | '.join(names)}", *(f"{x} ::= root root | root {x} | [a-z]" for x in names)])
    with pytest.raises(InvalidRequest, match=r"matching it takes [0-9]+ ms a token"):
        Compiler(vocabulary).compile(Grammar("ebnf", rules))


@pytest.mark.parametrize(("least", "most"), [(0, 4), (2, 3), (7, None), (1, 128), (120, 140), (129, 129)])
def test_a_string_has_as_many_characters_as_its_lengths_say(
    vocabulary: Vocabulary, tokenizer: Tokenizer, least: int, most: int | None
) -> None:
    """Of characters that are written as themselves; the library's own lengths let control characters pass."""
    compiler = Compiler(vocabulary)
    compiler.warm_up()
    counts = f"{{{least},{'' if most is None else most}}}"
    grammar = Grammar("json_schema", json.dumps({"type": "string", "pattern": f"^{CHARACTER}{counts}$"}))
    made = CompiledGrammar.from_bytes(serialize(compiler.compile(grammar), grammar), vocabulary)
    rng = random.Random(5)
    lengths = set()
    [quote] = tokenizer.encode('"', add_special_tokens=False)
    for _ in range(20):
        matcher, text = made.matcher(), ""
        wanted = rng.randint(least, most if most is not None else least + 20)
        assert mask_of(matcher) == [quote]
        assert matcher.accept(quote)
        while True:
            texts = {token: tokenizer.decode([token]) for token in mask_of(matcher)}
            may_end = least <= len(text) and (most is None or len(text) <= most)
            assert (quote in texts) == may_end
            if may_end and len(text) >= wanted:
                break
            token = rng.choice([token for token in texts if texts[token].isascii() and '"' not in texts[token]])
            assert matcher.accept(token)
            text += texts[token]
        assert matcher.accept(quote)
        assert matcher.has_ended
        json.loads(f'"{text}"')
        lengths.add(len(text))
    assert least == most or len(lengths) > 1
