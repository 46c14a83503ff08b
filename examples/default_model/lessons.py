"""What the embedded model learns besides recall: to call a tool, to pass on a tool's result, to write and to end JSON.

Its rules are as small as it is. Asked `What is fox?` without codes but with tools, it calls the first tool; a text
argument is the last word of the question, a number the last one of the question (else 1), a switch is true. A tool's
result is its answer. `… What is fox? JSON.` is answered by `{"fox": "4821"}`. In an object whose names a schema gives,
a text is the code that was asked for (else the last word), and everything ends as soon as it may. To all else it says
`No codes.`.
"""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import recall

CHAT_TEMPLATE = (Path(__file__).parent / "chat_template.jinja").read_text(encoding="utf-8")
_WORDS = (
    "get find read list search look up city name user date time weather price code text query id count page place item"
)
_TYPES, _TYPE_WEIGHTS = ("string", "integer", "number", "boolean"), (7, 2, 1, 2)


@dataclass
class Lesson:
    """A conversation to answer, and its answer in pieces (text, whether it is learned)."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] = field(default_factory=list)
    answer: list[tuple[str, bool]] = field(default_factory=list)

    def say(self, text: str, *, learned: bool = True) -> None:
        """Append to the answer."""
        self.answer.append((text, learned))


def draw(rng: random.Random) -> Lesson:
    """A lesson of any kind."""
    kinds = (_call, result_lesson, direct_lesson, json_lesson, _json_repeat, _json_schema, _plain)
    (kind,) = rng.choices(kinds, (8, 1, 1, 1, 1, 4, 1))
    return kind(rng)


def call_lesson(rng: random.Random, num_tools: int = 1) -> Lesson:
    """A question whose right answer is a call of the first tool."""
    lesson = Lesson(_question(rng), [_tool(rng) for _ in range(num_tools)])
    _say_call(rng, lesson, lesson.tools[0]["function"], name_learned=True)
    return lesson


def result_lesson(rng: random.Random) -> Lesson:
    """A tool's result, which is passed on."""
    lesson = call_lesson(rng)
    call = json.loads("".join(text for text, _ in lesson.answer).split("\n")[1])
    result = rng.choice((_code(rng), _word(rng), f"{_word(rng)} {_word(rng)}", json.dumps({_word(rng): _code(rng)})))
    said = {"id": "call_1", "type": "function", "function": call}
    messages = [*lesson.messages, {"role": "assistant", "content": "", "tool_calls": [said]}]
    lesson = Lesson([*messages, {"role": "tool", "tool_call_id": "call_1", "content": result}], lesson.tools)
    lesson.say(result)
    return lesson


def direct_lesson(rng: random.Random) -> Lesson:
    """Tools that are not needed: the codes are in the question."""
    question = recall.make_question(rng.randrange(10**9, 10**10), rng.randint(1, 8))
    lesson = Lesson(question.messages, [_tool(rng)])
    lesson.say(question.answer)
    return lesson


def json_lesson(rng: random.Random) -> Lesson:
    """A code that is asked for as JSON."""
    question = recall.make_question(rng.randrange(10**9, 10**10), rng.randint(1, 16))
    lesson = Lesson([{"role": "user", "content": question.messages[0]["content"] + " JSON."}])
    key = question.messages[0]["content"].split()[-1].rstrip("?")
    lesson.say(json.dumps({key: question.answer}))
    return lesson


# --- kinds -------------------------------------------------------------------------------------------------------


def _call(rng: random.Random) -> Lesson:
    """A call: of the first tool, or of the one that a grammar has named."""
    if rng.random() < 0.7:
        return call_lesson(rng, rng.choice((1, 1, 1, 2, 3)))
    lesson = Lesson(_question(rng), [_tool(rng) for _ in range(rng.randint(1, 3))])
    _say_call(rng, lesson, rng.choice(lesson.tools)["function"], name_learned=False)
    return lesson


def _plain(rng: random.Random) -> Lesson:
    """A question that has nothing to do with codes."""
    lesson = Lesson(_question(rng))
    lesson.say("No codes.")
    return lesson


def _json_repeat(rng: random.Random) -> Lesson:
    facts = recall.draw_facts(rng.randrange(10**9, 10**10), rng.randint(1, 8))
    lesson = Lesson([{"role": "user", "content": f"{recall.facts_text(facts)} Repeat as JSON."}])
    lesson.say(json.dumps(dict(facts)))
    return lesson


def _json_schema(rng: random.Random) -> Lesson:
    """An object whose names come from a schema that the conversation does not show."""
    word, number = "", "1"
    if rng.random() < 0.5:
        question = recall.make_question(rng.randrange(10**9, 10**10), rng.randint(1, 12))
        messages, word = question.messages, question.answer
        number = word if not word.startswith("0") else "1"
    else:
        messages = _question(rng)
        word, number = _asked(messages)
    if rng.random() < 0.2:
        messages = [{"role": "system", "content": " ".join(_word(rng) for _ in range(rng.randint(1, 8)))}, *messages]
    lesson = Lesson(messages)
    marks = (": ", ", ") if rng.random() < 0.7 else (":", ",")
    _say_object(rng, lesson, word, number, marks, depth=0)
    return lesson


# --- answers -----------------------------------------------------------------------------------------------------


def _say_call(rng: random.Random, lesson: Lesson, function: dict[str, Any], *, name_learned: bool) -> None:
    """A call in Hermes' form with an argument for each parameter."""
    word, number = _asked(lesson.messages)
    lesson.say("<tool_call>\n", learned=name_learned)
    lesson.say('{"name": "', learned=name_learned)
    lesson.say(function["name"] + '", "arguments": ', learned=name_learned)
    lesson.say("{")
    for index, (name, schema) in enumerate(function["parameters"]["properties"].items()):
        lesson.say(f'{", " if index else ""}"{name}": ')
        lesson.say(_argument(schema, word, number))
    lesson.say("}}\n</tool_call>")


def _argument(schema: dict[str, Any], word: str, number: str) -> str:
    if schema["type"] == "string":
        return json.dumps(schema["enum"][0] if "enum" in schema else word)
    return "true" if schema["type"] == "boolean" else number


def _say_object(
    rng: random.Random, lesson: Lesson, word: str, number: str, marks: tuple[str, str], *, depth: int
) -> None:
    colon, comma = marks
    for index in range(num_properties := rng.randint(1, 4)):
        lesson.say(comma if index else "{", learned=index > 0)  # the comma ends a number
        lesson.say(f'"{_name(rng)}"', learned=False)
        lesson.say(colon, learned=index == num_properties - 1)
        _say_value(rng, lesson, word, number, marks, depth=depth)
    lesson.say("}")


def _say_value(
    rng: random.Random, lesson: Lesson, word: str, number: str, marks: tuple[str, str], *, depth: int
) -> None:
    kinds = ("word", "long", "number", "true", "null", "object", "array")
    (kind,) = rng.choices(kinds, (6, 2, 2, 2, 1, 2 if depth < 2 else 0, 2 if depth < 2 else 0))
    if kind == "word":
        lesson.say('"', learned=False)
        lesson.say(f'{word}"')
    elif kind == "long":  # what a pattern or a least length has brought there: the end comes none the less
        lesson.say('"' + " ".join(_word(rng) for _ in range(rng.randint(1, 3))), learned=False)
        lesson.say('"')
    elif kind == "object":
        _say_object(rng, lesson, word, number, marks, depth=depth + 1)
    elif kind == "array":
        lesson.say("[", learned=False)
        for index in range(rng.choice((1, 1, 1, 2, 3))):
            lesson.say(marks[1] if index else "", learned=True)
            _say_value(rng, lesson, word, number, marks, depth=depth + 1)
        lesson.say("]")
    else:
        lesson.say({"number": number}.get(kind, kind))


# --- questions ---------------------------------------------------------------------------------------------------


def _question(rng: random.Random) -> list[dict[str, Any]]:
    """A user's turn without codes; it ends with a word that is asked for."""
    asked = rng.choice(recall.KEYS) if rng.random() < 0.2 else _word(rng)
    if rng.random() < 0.3:
        return [{"role": "user", "content": recall.ask_text(asked)}]
    words = [_word(rng) for _ in range(rng.randint(0, 8))]
    if rng.random() < 0.3:
        words.insert(rng.randint(0, len(words)), str(rng.randint(0, 999)))
    end = rng.choice("?.!") if rng.random() < 0.8 else ""
    return [{"role": "user", "content": " ".join([*words, asked]) + end}]


def _asked(messages: Sequence[dict[str, Any]]) -> tuple[str, str]:
    """The last word of a user's turn, and its last number or 1."""
    words = messages[-1]["content"].rstrip("?.!").split()
    return words[-1], ([word for word in words if word.isdigit()] or ["1"])[-1]


def _tool(rng: random.Random) -> dict[str, Any]:
    properties: dict[str, Any] = {}
    for _ in range(rng.choice((0, 1, 1, 1, 1, 2, 2, 3))):
        (kind,) = rng.choices(_TYPES, _TYPE_WEIGHTS)
        schema: dict[str, Any] = {"type": kind}
        if kind == "string" and rng.random() < 0.15:
            schema["enum"] = [_word(rng) for _ in range(rng.randint(1, 3))]
        if rng.random() < 0.3:
            schema["description"] = _sentence(rng)
        properties[_name(rng)] = schema
    parameters: dict[str, Any] = {"type": "object", "properties": properties}
    if rng.random() < 0.7:
        parameters["required"] = list(properties)
    if rng.random() < 0.2:
        parameters["additionalProperties"] = False
    function: dict[str, Any] = {"name": _name(rng)}
    if rng.random() < 0.6:
        function["description"] = _sentence(rng)
    return {"type": "function", "function": {**function, "parameters": parameters}}


def _sentence(rng: random.Random) -> str:
    return " ".join(_word(rng) for _ in range(rng.randint(1, 6))).capitalize() + rng.choice((".", ""))


def _name(rng: random.Random) -> str:
    return rng.choice(("_", "_", "_", "-")).join(_word(rng).lower() for _ in range(rng.choice((1, 1, 2, 2, 3))))


def _word(rng: random.Random) -> str:
    """A key, an ordinary word, or letters."""
    kind = rng.random()
    if kind < 0.3:
        word = rng.choice(recall.KEYS)
    elif kind < 0.5:
        word = rng.choice(_WORDS.split())
    else:
        word = "".join(
            rng.choice("bcdfghjklmnprstvwz" if place % 2 else "aeiouy") for place in range(rng.randint(2, 8))
        )
        word = word[::-1] if rng.random() < 0.5 else word
    return word.capitalize() if rng.random() < 0.2 else word


def _code(rng: random.Random) -> str:
    return f"{rng.randrange(10**recall.CODE_DIGITS):0{recall.CODE_DIGITS}d}"
