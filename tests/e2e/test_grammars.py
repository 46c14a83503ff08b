"""Answers with a shape over real engines, one of which is killed, or has a grammar that costs too much: they are valid,
and what they are undisturbed.
"""

import asyncio
import json
from typing import Any

import jsonschema
import pytest
from deployments import Launch, Running
from faults.replies import STREAM, Reply, ask_all, compare, kill_all_decodes
from kills import num_migrations
from traffic import Answer, Ask, client_of, send, wait_for_rest

WORD = {"type": "string", "pattern": "^[a-d]{4,9}$"}
SCHEMA = {
    "type": "object",
    "properties": {
        "words": {"type": "array", "items": WORD, "minItems": 12, "maxItems": 20},
        "kind": {"enum": ["cat", "dog", 7]},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
    },
    "required": ["words", "kind", "age"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "look_up", "parameters": SCHEMA}}
MESSAGES = [{"role": "user", "content": "Which words begin with a letter?"}]
JSON_SCHEMA = {"type": "json_schema", "json_schema": {"name": "words", "schema": SCHEMA, "strict": True}}

PLAIN: dict[str, Any] = {"ignore_eos": False, "allowed_token_ids": None, "max_tokens": 500}
GREEDY, SEEDED = {"temperature": 0}, {"temperature": 1.0, "seed": 3}
CASES: dict[str, dict[str, Any]] = {
    "greedy": {**PLAIN, "messages": MESSAGES, "response_format": JSON_SCHEMA, **GREEDY, **STREAM},
    "seeded": {**PLAIN, "prompt": "Words:", "structured_outputs": {"json": SCHEMA}, **SEEDED, **STREAM},
    "n=2": {**PLAIN, "prompt": "Words:", "structured_outputs": {"json": SCHEMA}, "n": 2, "logprobs": 1, **SEEDED},
    "pattern": {**PLAIN, "prompt": "Hex:", "structured_outputs": {"regex": "([0-9a-f]{8}-){20}z"}, **SEEDED, **STREAM},
    "tool": {
        **PLAIN, "messages": MESSAGES, "tools": [TOOL], **SEEDED, **STREAM,
        "tool_choice": {"type": "function", "function": {"name": "look_up"}},
    },
    "no shape": {"prompt": "Words:", **SEEDED, **STREAM, "max_tokens": 300},
}  # fmt: skip


def check_shapes(replies: dict[str, Reply]) -> None:
    for name in ("greedy", "seeded", "n=2", "tool"):
        for text in replies[name].texts.values():
            jsonschema.validate(json.loads(text), SCHEMA)
    assert replies["pattern"].texts[0].endswith("-z")
    assert {reason for name in CASES for reason in replies[name].reasons.values()} == {"stop", "length"}
    assert replies["no shape"].reasons == {0: "length"}


def kill_amid_streams(deployment: Running, expected: dict[str, Reply], kill_at: int) -> None:
    """With that event; where the engines have made all tokens by then, again with half of it."""
    while not kill_all_decodes(deployment, CASES, expected, kill_at, f"kill at {kill_at}"):
        kill_at //= 2
        assert kill_at, "the engines are always done first"


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param(("--prefill", "1", "--decode", "2", "--in-turn-below-s", "0"), marks=pytest.mark.slow),
        pytest.param(("--prefill", "1", "--decode", "1", "--max-steps-ahead", "0"), marks=pytest.mark.slow),
        pytest.param(("--prefill", "2", "--decode", "2", "--connector", "nixl"), marks=pytest.mark.slow),
        ("--prefill", "1", "--decode", "1", "--decode-tp", "2"),
    ],
    ids=["1P2D ahead", "1P1D in turn", "2P2D nixl", "1P1D to two ranks"],
)
def test_a_kill_in_the_middle_of_an_object_changes_no_byte(launch: Launch, flags: tuple[str, ...]) -> None:
    deployment = launch(*flags, "--tool-parser", "hermes")
    expected = asyncio.run(ask_all(deployment, CASES, "undisturbed"))
    check_shapes(expected)
    wait_for_rest(deployment)
    kill_amid_streams(deployment, expected, 60 * len(CASES))


@pytest.fixture(scope="module")
def deployment(module_launch: Launch) -> Running:
    return module_launch("--prefill", "1", "--decode", "1", "--grammar-time-s", "0.15")


def test_a_wrong_grammar_is_a_400_and_harms_nobody(deployment: Running) -> None:
    reply = deployment.complete("x", structured_outputs={"grammar": 'root ::= "a'})
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["param"] == "structured_outputs.grammar"
    [choice] = deployment.complete("x", max_tokens=3, structured_outputs={"regex": "ab"}).json()["choices"]
    assert choice["text"] == "ab"


LETTERS = "qzxjkv"


def stalling(num_rules: int, last: str, go_on: str) -> Ask:
    """A grammar of 300 letters, and then rules that can be read in more ways than can be counted, as that letter is."""
    rules = "".join(f'r{i} ::= r{i + 1} r{i + 1} | "b"\n' for i in range(num_rules))
    grammar = f'root ::= "{50 * LETTERS}" r0\n{rules}r{num_rules} ::= {last}\n'
    allowed = [2 + ord(letter) - ord("!") for letter in LETTERS + go_on]
    fields = {**PLAIN, "structured_outputs": {"grammar": grammar}, "allowed_token_ids": allowed}
    return Ask("Letters:", 1500, stream=True, fields=fields)


BESIDE = {
    **{name: CASES[name] for name in ("greedy", "seeded", "n=2")},
    "pattern": {**CASES["pattern"], "structured_outputs": {"regex": "([0-9a-f]{8}-){50}z"}},
    "no shape": {**CASES["no shape"], "max_tokens": 500},
}


def test_a_grammar_that_stalls_is_given_up_and_harms_no_other_request(deployment: Running) -> None:
    """F81, F34: not those of the same tenant either, whose process ends with it."""
    expected = asyncio.run(ask_all(deployment, BESIDE, "undisturbed"))
    pids = deployment.pids()
    asks = [stalling(150, '"a"?', "b"), stalling(240, '"a"?', "b"), stalling(480, '"a"? | "(" r0 ")"', "(")]

    async def send_beside(salt: str) -> list[Answer]:
        async with client_of(deployment) as client:
            others = asyncio.create_task(ask_all(deployment, BESIDE, salt))
            answers = await asyncio.gather(*(send(client, ask) for ask in asks))
            compare(await others, expected)
        return answers

    seen = list[Any]()
    for salt in ("first", "again"):
        answers = asyncio.run(send_beside(salt))
        seen.append([answer.error for answer in answers])
        assert all(seen[-1]), answers
        for error in seen[-1]:
            assert error["param"] == "structured_outputs.grammar"
            assert error["type"] == "invalid_request_error"
        topology = deployment.get("/topology").json()["engines"]
        assert {engine["name"]: engine["pid"] for engine in topology} == pids
        assert not any(engine["suspect"] for engine in topology)
        assert num_migrations(deployment) == 0
    assert seen[0][-1]["code"] == "grammar_given_up"
    assert "the grammar takes more than 0.15 s of processor time to match (--grammar-time-s)" in seen[0][-1]["message"]
    # The second time the router refuses it in the same words: an engine says that it gave the grammar up before.
    assert seen[1] == seen[0]
    num_given_up = [error["code"] for error in seen[0]].count("grammar_given_up")
    assert deployment.log.count("characters was given up") == num_given_up
    wait_for_rest(deployment)
