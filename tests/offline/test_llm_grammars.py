"""Answers with a shape: valid to the end, and the same however their steps are planned, guessed or taken back."""

import json
from collections.abc import Iterator
from functools import partial
from typing import Any

import jsonschema
import pytest
from random_proposer import RandomProposer

from pdkv import LLM, SamplingParams
from pdkv.assemble.engine import build_engine
from pdkv.config import DEFAULT_MODEL
from pdkv.engine.plan import NewRequest
from pdkv.errors import GrammarGivenUp, InvalidRequest
from pdkv.offline.outputs import RequestOutput
from pdkv.sampling.shape import Grammar, StructuredOutputs
from pdkv.text import Tokenizer

pytestmark = pytest.mark.processes  # grammars are matched in some

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "ages": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 120}, "maxItems": 4},
        "kind": {"enum": ["cat", "dog", "bird"]},
    },
    "required": ["name", "ages", "kind"],
    "additionalProperties": False,
}
JSON, DATE = StructuredOutputs(json=SCHEMA), StructuredOutputs(regex="(19|20)[0-9]{2}-(0[1-9]|1[0-2])")
POOL = {"kv_cache_memory": 16 << 16, "max_model_len": 256}


def asked() -> tuple[list[str], list[SamplingParams]]:
    """Greedy and seeded, with a shape and without."""
    prompts = [f"Animal {i} is a " + "very " * (3 * i % 20) for i in range(12)]
    tokenizer = Tokenizer.from_dir(DEFAULT_MODEL)
    lines = {i: -100.0 for i in tokenizer.ids_by_text().values() if "\n" in tokenizer.decode([i])}
    params = [
        SamplingParams(
            temperature=(0.0, 1.0)[i % 2],
            seed=i,
            max_tokens=90,
            n=1 + (i == 5),
            structured_outputs=(JSON, DATE, JSON, None)[i % 4],
            logprobs=(None, 1)[i % 3 == 0],
            repetition_penalty=(1.0, 1.2)[i % 5 == 0],
            logit_bias=lines,  # a model in doubt indents what it writes, as far as it may
        )
        for i in range(12)
    ]
    return prompts, params


def generate(ahead: int, proposer: RandomProposer | None = None, **fields: Any) -> list[RequestOutput]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pdkv.offline.engine.build_engine", partial(build_engine, proposer=proposer))
        options = {"dtype": "float32", "device": "cpu", "threads": 1, "in_turn_below_s": 0.0, **fields}
        with LLM(max_steps_ahead=ahead, **options) as llm:
            outputs = llm.generate(*asked(), use_tqdm=False)
            assert (llm._engine.core.scheduler.num_preemptions > 0) == ("kv_cache_memory" in fields)
    return outputs


def texts_of(outputs: list[RequestOutput]) -> list[tuple[list[int], str, str]]:
    return [(c.token_ids, c.text, c.finish_reason) for output in outputs for c in output.outputs]


@pytest.fixture(scope="module")
def in_turn() -> list[RequestOutput]:
    return generate(0)


def test_answers_have_their_shape(in_turn: list[RequestOutput]) -> None:
    dates = 0
    for output, params in zip(in_turn, asked()[1], strict=True):
        for choice in output.outputs:
            if params.structured_outputs is JSON:
                jsonschema.validate(json.loads(choice.text), SCHEMA)
                assert choice.finish_reason == "stop"
            elif params.structured_outputs is DATE:
                year, month = map(int, choice.text.split("-"))
                dates += 1900 <= year < 2100 and 1 <= month <= 12
    assert dates == 4
    assert len({choice.text for output in in_turn for choice in output.outputs}) > 6


@pytest.mark.parametrize("ahead", [1, 2])
def test_steps_planned_ahead_change_nothing(in_turn: list[RequestOutput], ahead: int) -> None:
    assert texts_of(generate(ahead)) == texts_of(in_turn)


@pytest.mark.parametrize("ahead", [0, 2])
def test_what_is_preempted_goes_on_to_the_same_end(in_turn: list[RequestOutput], ahead: int) -> None:
    assert texts_of(generate(ahead, **POOL)) == texts_of(in_turn)


@pytest.mark.parametrize("ahead", [0, 2])
def test_guesses_right_and_wrong_change_nothing(in_turn: list[RequestOutput], ahead: int) -> None:
    foreseen = {
        (tuple(output.prompt_token_ids), choice.index): choice.token_ids
        for output in in_turn
        for choice in output.outputs
    }

    def foresee(request: NewRequest) -> list[int]:
        return foreseen[tuple(request.prompt_token_ids), request.choice]

    proposer = RandomProposer(3, foresee, vocab_size=500)
    assert texts_of(generate(ahead, proposer)) == texts_of(in_turn)
    assert proposer.num_right > 50
    assert proposer.num_wrong > 50


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(DEFAULT_MODEL, dtype="float32", device="cpu", threads=1) as made:
        yield made


def test_a_chat_is_answered_in_its_shape(llm: LLM) -> None:
    params = SamplingParams(max_tokens=20, structured_outputs=StructuredOutputs(choice=("yes", "no", "perhaps")))
    messages = [{"role": "user", "content": "Is it raining?"}]
    (output,) = llm.chat(messages, params, use_tqdm=False)
    assert output.outputs[0].text in ("yes", "no", "perhaps")


@pytest.mark.parametrize(
    ("asked_for", "text"),
    [
        (StructuredOutputs(json={"type": "object", "properties": {"a": {"type": "strin"}}}), "strin"),
        (StructuredOutputs(grammar='root ::= "a'), "the grammar cannot be read"),
        (StructuredOutputs(), "structured_outputs requires exactly one of"),
    ],
    ids=["schema", "grammar", "nothing"],
)
def test_a_wrong_shape_is_refused_and_the_engine_goes_on(llm: LLM, asked_for: StructuredOutputs, text: str) -> None:
    with pytest.raises(InvalidRequest, match=text) as raised:
        llm.generate("x", SamplingParams(structured_outputs=asked_for), use_tqdm=False)
    assert raised.value.param == "structured_outputs"
    (output,) = llm.generate("x", SamplingParams(max_tokens=3, ignore_eos=True), use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 3


@pytest.mark.parametrize(
    "fields", [{"allowed_token_ids": (5,)}, {"min_tokens": 30}], ids=["other tokens", "more tokens"]
)
def test_what_contradicts_the_shape_ends_the_request_with_the_reason(llm: LLM, fields: dict[str, Any]) -> None:
    params = SamplingParams(max_tokens=60, structured_outputs=StructuredOutputs(choice=("yes", "no")), **fields)
    with pytest.raises(InvalidRequest, match=r"no token can be chosen: .*structured_outputs"):
        llm.generate("x", params, use_tqdm=False)


def test_the_engine_gives_a_grammar_the_time_that_its_options_say() -> None:
    rules = "".join(f'\nr{i}: "x{i}"' for i in range(20_000))
    costly = Grammar("text", "start: " + " | ".join(f"r{i}" for i in range(20_000)) + rules)
    with (
        LLM(grammar_time_s=0.1, **POOL) as llm,
        pytest.raises(GrammarGivenUp, match=r"more than 0\.1 s of processor time to match \(--grammar-time-s\)"),
    ):
        llm.generate("a", SamplingParams(grammar=costly))
