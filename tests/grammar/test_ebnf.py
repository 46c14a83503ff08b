"""EBNF: random grammars beside a recogniser that tries everything, and what is refused, by name and line."""

import itertools
import random
import re

import pytest
from grammar_walks import ByteGrammars

from pdkv.errors import InvalidRequest
from pdkv.grammar.ebnf import ebnf
from pdkv.grammar.prepare import make_grammar
from pdkv.sampling.shape import Grammar, StructuredOutputs

TEXTS = ["".join(text) for length in range(6) for text in itertools.product("abc", repeat=length)]
RULES = ("root", "x", "y")

# A node: a class (frozenset), a rule's name, or an operation with its nodes and counts.
Node = frozenset[str] | str | tuple[str, tuple["Node", ...], int, int]


@pytest.fixture(scope="module")
def byte_grammars(tmp_path_factory: pytest.TempPathFactory) -> ByteGrammars:
    return ByteGrammars(tmp_path_factory.mktemp("bytes"))


def made(text: str) -> Grammar:
    return make_grammar(StructuredOutputs(grammar=text))


def node(rng: random.Random, depth: int) -> Node:
    kind = rng.random()
    if depth == 0 or kind < 0.35:
        if rng.random() < 0.5:
            return frozenset(rng.sample("abc", rng.randint(1, 2)))
        letters = tuple(frozenset(letter) for letter in rng.choice(["", "a", "ab", "ba", "cc"]))
        return ("all", letters, 1, 1)
    if kind < 0.5:
        return rng.choice(RULES)
    if kind < 0.7:
        return ("all", tuple(node(rng, depth - 1) for _ in range(rng.randint(2, 3))), 1, 1)
    if kind < 0.82:
        return ("one", tuple(node(rng, depth - 1) for _ in range(2)), 1, 1)
    return ("all", (node(rng, depth - 1),), *rng.choice([(0, 9), (1, 9), (0, 1), (2, 2), (1, 3)]))


def written(what: Node) -> str:
    match what:
        case frozenset():
            return f"[{''.join(sorted(what))}]"
        case str():
            return what
        case (kind, parts, least, most):
            inner = f"({(' | ' if kind == 'one' else ' ').join(map(written, parts))})" if parts else '""'
            return inner if least == most == 1 else f"{inner}{{{least},{most if most < 9 else ''}}}"
    raise AssertionError(what)


def recognised(rules: dict[str, Node], text: str) -> bool:
    """Whether root is the text: where each rule may end is found by trying until nothing is added."""
    ends: dict[tuple[str, int], set[int]] = {(name, at): set() for name in rules for at in range(len(text) + 1)}

    def behind(what: Node, at: int) -> set[int]:
        match what:
            case frozenset():
                return {at + 1} if text[at : at + 1] in what else set()
            case str():
                return ends[what, at]
            case ("one", parts, _, _):
                return {end for part in parts for end in behind(part, at)}
            case (_, parts, least, most):
                found, now = {at} if least == 0 else set(), {at}
                for count in range(1, most + 1):
                    for part in parts:
                        now = {end for place in now for end in behind(part, place)}
                    found |= now if count >= least else set()
                return found
        raise AssertionError(what)

    grown = True
    while grown:
        grown = False
        for (name, at), known in ends.items():
            found = behind(rules[name], at)
            grown |= not found <= known
            known |= found
    return len(text) in ends["root", 0]


@pytest.mark.parametrize(
    ("seed", "num_grammars"), [(0, 25), *(pytest.param(seed, 75, marks=pytest.mark.slow) for seed in range(4))]
)
def test_random_grammars_allow_what_they_say(byte_grammars: ByteGrammars, seed: int, num_grammars: int) -> None:
    rng, num_checked = random.Random(seed), 0
    for _ in range(num_grammars):
        rules = {name: node(rng, 3) for name in RULES}
        text = "\n".join(f"{name} ::= {written(what)}" for name, what in rules.items())
        grammar = made(text)
        try:
            byte_grammars.check(grammar)
        except InvalidRequest:  # nothing fulfils it
            assert not any(recognised(rules, word) for word in TEXTS), text
            continue
        for word in rng.sample(TEXTS, 50):
            assert byte_grammars.accepts(grammar, word) == recognised(rules, word), (text, word)
        num_checked += 1
    assert num_checked > 0.6 * num_grammars


@pytest.mark.parametrize(
    ("grammar", "texts", "others"),
    [
        ('root ::= [a-z]+ root "b" | "c"', ["c", "xcb", "abcb"], ["b", "xc"]),
        ('root ::= "(" root ")" | name | "call " [a-z]\nname ::= [a-z]+', ["(call)", "call x"], ["call xy", "()"]),
        ('root ::= t* | "(" root ")"\nt ::= l | "\\\\" root "."\nl ::= [a-d] | [d-z]', ["", "a\\(b).c"], ["a\\", "(a"]),
        ('root ::= ([^"\\n] | "\\"" root "\\"")+', ['a"b"c', "é\t."], ["", "a\n", 'a""']),
        ('root ::= [a-z] root | "(" root ")" root | ""', ["", "ab(c(d)e)f"], ["(", "a)"]),
        ('root ::= "\\u00e9\\x41\\U0001F600\\n" | ":" root', [":éA😀\n"], ["éA😀"]),
        ("root ::= [^\\x00-\\uD7FF] | [\\]\\-^] root", ["\ue000", "]-^😀"], ["a", "^"]),
        ('root ::= "a"{2,3} "b"{0} "c"{0,2} | "(" root ")"', ["(aa)", "aaacc"], ["a", "aaaa", "aab", "aaccc"]),
    ],
)
def test_what_grammars_mean(byte_grammars: ByteGrammars, grammar: str, texts: list[str], others: list[str]) -> None:
    assert all(byte_grammars.accepts(made(grammar), text) for text in texts)
    assert not any(byte_grammars.accepts(made(grammar), text) for text in others)


@pytest.mark.parametrize("free", ['[^"]*', '([^"\\\\] | "\\\\" ["\\\\n])*', "char*", "chars"])
def test_free_text_within_a_grammar_is_read_in_one_piece(free: str) -> None:
    """In single characters its masks take a hundred times as long."""
    string = f'string ::= "\\"" {free} "\\""\nchar ::= [^"\\\\] | [\\\\] ["\\n]'
    string += '\nchars ::= "" | [^"\\\\] chars | [\\\\] ["\\n] chars'
    rules = ebnf(f'root ::= "[" root "]" | string\n{string}').rules
    assert any(re.search(r"\]\{1,\}/", body) for body in rules.values())


@pytest.mark.parametrize(
    ("grammar", "words"),
    [
        ("root ::= (", "closing parenthesis in the place of 'the end', in line 1"),
        ('root ::= "a" )', "must have a rule, name ::= …, in the place of ')', in line 1"),
        ('\nroot ::= "a', "cannot be read at '\"a', in line 2"),
        ("root ::= x", "no rule for 'x', in line 1"),
        ('x ::= "a"', "no rule for 'root'"),
        ('x ::= ""\nroot ::= x\nx ::= ""', "two rules for 'x', in line 3"),
        ('root ::= * "a"', "something in front of '*'"),
        ('root ::= "a"{3,2}', "most not less than least: got {3,2}"),
        ('root ::= "a"{10001}', "up to 10000 times"),
        ("root ::= [z-a]", "earlier one in [z-a]"),
        ("root ::= [\\d]", "an escape that is not known: \\d, in line 1"),
        ('root ::=\n"\\q"', "an escape that is not known: \\q, in line 2"),
        ('root ::= "\\x4"', "an escape that is not known: \\x"),
        ('root ::= "\\uD800"', "an escape for an invalid character: '\\\\uD800'"),
        ("root ::= [^\\x00-\\U0010FFFF]", "a character class that matches nothing: [^\\x00-\\U0010FFFF], in line 1"),
        ("root ::= []", "a character class that matches nothing: []"),
    ],
)
def test_what_is_no_grammar_is_refused_with_its_line(grammar: str, words: str) -> None:
    with pytest.raises(InvalidRequest, match=re.escape(words)):
        made(grammar)


@pytest.mark.parametrize("mark", "*+")
def test_repetitions_within_repetitions_are_no_more_work_than_their_text(mark: str) -> None:
    """Each level that is gone through twice would make it 2 ** 60 times as much."""
    inner = "[a-z]"
    for depth in range(60):
        inner = f'("{depth}" root | [a-z] | "y" {inner}{mark})'
    assert len(made(f"root ::= {inner}").text) < 20_000
