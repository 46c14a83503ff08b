"""Patterns as grammars enforce them: no text passes that `re` would not let pass, in plain text and within JSON."""

import contextlib
import json
import random
import re

import numpy as np
import pytest
from grammar_walks import ByteGrammars

from pdkv.errors import InvalidRequest
from pdkv.grammar.prepare import make_grammar
from pdkv.sampling.shape import StructuredOutputs

ATOMS = (
    *"ab-'/}é😀.", "\\.", "\\/", "\\{", "\\d", "\\w", "\\s", "\\S", "\\D", "\\W", "\\x41", "\\u00e9", "[ab]", "[^a]",
    "[b-d]", "[^\\d]", "[à-ü]", '[^"]', "[\\w-]", "[.-]", "[^\\x00-\\x1f]", "[^\\W_]", "[a\\]]", '[\\s"]',
)  # fmt: skip
REPEATS = ("*", "+", "?", "{2}", "{0,2}", "{1,3}", "{1,}", "{2,}", "*?", "??", "+?", "{0}")
CHARACTERS = 'ab"\\1 _-./é😀\n\tAcd]{}\u00a0\u2028\u0661x'


def drawn(rng: random.Random, depth: int) -> str:
    """A pattern."""
    kind = rng.random()
    if depth == 0 or kind < 0.35:
        return rng.choice(ATOMS)
    parts = [drawn(rng, depth - 1) for _ in range(rng.randint(1, 3))]
    if kind < 0.6:
        return "".join(parts)
    if kind < 0.75:
        return f"({'|'.join(parts)}{rng.choice(('', '|'))})"
    return f"({rng.choice(('', '?:'))}{parts[0]}){rng.choice(REPEATS)}"


@pytest.fixture(scope="module")
def grammars(tmp_path_factory: pytest.TempPathFactory) -> ByteGrammars:
    return ByteGrammars(tmp_path_factory.mktemp("bytes"))


@pytest.mark.parametrize("num_patterns", [75, pytest.param(300, marks=pytest.mark.slow)])
@pytest.mark.parametrize("in_json", [True, False])
def test_random_patterns_let_no_other_text_pass(in_json: bool, num_patterns: int, grammars: ByteGrammars) -> None:
    rng, walks = random.Random(int(in_json)), np.random.default_rng(0)
    num_matched = 0
    for _ in range(num_patterns):
        pattern = drawn(rng, 3)
        asked = StructuredOutputs(json={"type": "string", "pattern": f"^{pattern}$"}) if in_json else None
        with contextlib.suppress(InvalidRequest):  # characters that JSON escapes
            compiled = make_grammar(asked or StructuredOutputs(regex=pattern))
            grammars.check(compiled)
            texts = {"".join(rng.choices(CHARACTERS, k=rng.randint(0, 5))) for _ in range(10)}
            accepted = {text for text in texts if grammars.accepts(compiled, _written(text, in_json))}
            drawn_texts = (grammars.walk(compiled, walks, 40) for _ in range(3))
            accepted |= {_read(text, in_json) for text in drawn_texts if text is not None}
            wrong = [text for text in accepted if not re.fullmatch(pattern, text)]
            assert not wrong, (pattern, wrong)
            num_matched += len(accepted)
    assert num_matched > num_patterns


def _written(text: str, in_json: bool) -> str:
    return json.dumps(text, ensure_ascii=False) if in_json else text


def _read(text: str, in_json: bool) -> str:
    return str(json.loads(text)) if in_json else text


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        ("a**", "multiple repeat"), ("a*+", "multiple repeat"), ("a{2}{3}", "multiple repeat"),
        ("*a", "nothing to repeat"), ("(|+)", "nothing to repeat"), ("^*", "nothing to repeat"), ("a{,2}", "'{,2}'"),
        ("a{3,2}", "min repeat greater"), ("a{9999999999}", "too large"), ("(a", "missing )"), (")a(", "unbalanced"),
        ("[a", "not closed"), ("[]a]", "is empty"), ("[^]", "is empty"), ("[b-a]", "'b-a' is not a range"),
        (r"[a-\d]", r"'a-\\d' is not a range"), (r"[\w-a]", r"'\\w-a' is not a range"), ("a^b", "at the edges"),
        ("a$b", "at the edges"), ("(?=a)", "no look-around"), ("(?i)a", "flags"), (r"\x4", r"'\\x' cannot"),
        ("\\", "cannot be enforced"), (r"(a)\1", "back-references"), (r"\01", r"'\\01' cannot"),
        (r"\ud83d", r"'\\ud83d' cannot"), ("x" * 16_385, "at most 16384"),
    ],
)  # fmt: skip
def test_patterns_that_are_wrong_or_ambiguous_are_refused_with_their_place(pattern: str, words: str) -> None:
    for asked, place in (
        (StructuredOutputs(regex=pattern), "regex"),
        (StructuredOutputs(json={"items": {"pattern": pattern}}), "the keyword 'pattern' at /items/pattern"),
    ):
        with pytest.raises(InvalidRequest, match=f"^{re.escape(place)}.*{re.escape(words)}"):
            make_grammar(asked)


def test_braces_without_counts_are_characters(grammars: ByteGrammars) -> None:
    """To `re` as well."""
    for pattern in ("a{1, 2}", "a{ 1}", "a{1 }", "a{x}", "a{}", "{"):
        texts = [pattern, "a", "aa", ""]
        compiled = make_grammar(StructuredOutputs(regex=pattern))
        assert [text for text in texts if grammars.accepts(compiled, text)] == [pattern]
        assert [text for text in texts if re.fullmatch(pattern, text)] == [pattern]


@pytest.mark.parametrize(
    "pattern", ['"', "\\\\", "\\n", '[^"]', "[^\\\\]", "[\\x00-\\x1f]", "[^a]", '\t|[^"]', "[^\\n]", "\\W"]
)
def test_a_character_that_json_escapes_is_itself(pattern: str, grammars: ByteGrammars) -> None:
    compiled = make_grammar(StructuredOutputs(json={"type": "string", "pattern": f"^({pattern})$"}))
    for char in [*map(chr, range(1, 48)), *"09Aaz[\\]^_`{|}~\x7f"]:
        texts = {json.dumps(char), f'"\\u{ord(char):04x}"', f'"\\u{ord(char):04X}"', f'"{char}"'}
        assert any(grammars.accepts(compiled, text) for text in texts) == bool(re.fullmatch(pattern, char)), repr(char)


@pytest.mark.parametrize(("least", "most"), [(0, 3), (2, 2), (1, None), (0, 200), (130, 131), (5, 300)])
def test_lengths_are_kept(least: int, most: int | None, grammars: ByteGrammars) -> None:
    lengths = {"minLength": least, **({} if most is None else {"maxLength": most})}
    compiled = make_grammar(StructuredOutputs(json=lengths))
    for length in {least - 1, least, least + 1, (most or 5) - 1, most or 5, (most or 5) + 1} - {-1}:
        fits = length >= least and (most is None or length <= most)
        for char in "é\n\\":
            assert grammars.accepts(compiled, json.dumps(char * length, ensure_ascii=False)) == fits, length
    assert not grammars.accepts(compiled, '"\n' + "a" * least + '"')
