"""The embedded default model is whole, small, and does what it is for: it recalls."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import lessons
import pytest
import recall
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

import pdkv
from pdkv import LLM, SamplingParams
from pdkv.sampling.shape import StructuredOutputs

MODEL_DIR = Path(pdkv.__file__).parent / "default_model"
MAX_SIZE_BYTES = 4 * 2**20
Model = Any  # a LlamaForCausalLM; transformers' own types for `generate` do not admit one
TOKENIZER = Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json"))


@pytest.fixture(scope="module")
def model() -> Model:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(MODEL_DIR, dtype=torch.float32)


def generate(model: Model, token_ids: list[int], max_new_tokens: int) -> str:
    """Greedy text after `token_ids`; fails if the end-of-text token does not come within `max_new_tokens`."""
    prompt = torch.tensor([token_ids])
    output = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=max_new_tokens
    )
    *answer, last = output[0, prompt.shape[1] :].tolist()
    assert last == model.config.eos_token_id
    return str(TOKENIZER.decode(answer))


def test_has_all_files_within_the_size_limit() -> None:
    names = {path.name for path in MODEL_DIR.iterdir()}
    expected = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert expected <= names
    assert sum(path.stat().st_size for path in MODEL_DIR.iterdir()) <= MAX_SIZE_BYTES


def test_config_and_tokenizer_agree() -> None:
    config = json.loads((MODEL_DIR / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["vocab_size"] == TOKENIZER.get_vocab_size() <= 512
    assert config["max_position_embeddings"] >= 2048
    tokenizer_config = json.loads((MODEL_DIR / "tokenizer_config.json").read_text())
    for name in ("bos_token", "eos_token"):
        assert TOKENIZER.token_to_id(tokenizer_config[name]) == config[f"{name}_id"]


@given(st.text())
def test_tokenizer_round_trips_any_text(text: str) -> None:
    ids = TOKENIZER.encode(text, add_special_tokens=False).ids
    # Special tokens spelled out in a text are the only thing that decoding drops.
    assert TOKENIZER.decode(ids, skip_special_tokens=False) == text


def test_tokenizer_covers_every_byte() -> None:
    text = "".join(map(chr, range(0x100))) + "\u20ac \U0001f600 \u0645\u0631\u062d\u0628\u0627"
    assert TOKENIZER.decode(TOKENIZER.encode(text).ids) == text


@pytest.mark.parametrize("num_facts", [1, 5, 40, recall.MAX_FACTS])
def test_prompt_lengths_are_as_documented(num_facts: int) -> None:
    from transformers import AutoTokenizer

    question = recall.make_question(3, num_facts)
    assert len(TOKENIZER.encode(question.prompt).ids) == recall.num_prompt_tokens(num_facts)
    chat = AutoTokenizer.from_pretrained(MODEL_DIR).apply_chat_template(
        question.messages, tokenize=False, add_generation_prompt=True
    )
    chat_ids = TOKENIZER.encode(chat, add_special_tokens=False).ids
    assert len(chat_ids) == recall.num_prompt_tokens(num_facts, chat=True)


def test_questions_are_a_function_of_the_seed() -> None:
    assert recall.make_question(5, 9) == recall.make_question(5, 9)
    assert len({recall.make_question(seed, 9).prompt for seed in range(100)}) == 100


@pytest.mark.parametrize("num_facts", [0, recall.MAX_FACTS + 1])
def test_refuses_an_impossible_number_of_facts(num_facts: int) -> None:
    with pytest.raises(ValueError, match="num_facts"):
        recall.make_question(0, num_facts)


def test_recalls_in_completions(model: Model) -> None:
    for seed in range(0, 20, 3):
        question = recall.make_question(seed, 2 + 3 * seed)
        answer = generate(model, TOKENIZER.encode(question.prompt).ids, recall.CODE_DIGITS + 1)
        assert answer == question.answer


def test_recalls_in_chats_and_in_a_follow_up_turn(model: Model) -> None:
    from transformers import AutoTokenizer

    template = AutoTokenizer.from_pretrained(MODEL_DIR)
    for seed in range(0, 20, 3):
        question = recall.make_question(seed, 2 + 3 * seed)
        key, code = question.facts[0]
        follow_up = [
            *question.messages,
            {"role": "assistant", "content": question.answer},
            {"role": "user", "content": recall.ask_text(key)},
        ]
        for messages, expected in ((question.messages, question.answer), (follow_up, code)):
            text = template.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            token_ids = TOKENIZER.encode(text, add_special_tokens=False).ids
            assert generate(model, token_ids, recall.CODE_DIGITS + 1) == expected


def test_answers_a_chat_as_it_completes(model: Model) -> None:
    """The README's question, in the two forms in which it is asked first."""
    from transformers import AutoTokenizer

    question, chat = "Codes: fox=4821, hat=0937. fox=", AutoTokenizer.from_pretrained(MODEL_DIR)
    asked = chat.apply_chat_template(
        [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
    )
    assert generate(model, TOKENIZER.encode(question).ids, 5) == "4821"
    assert generate(model, TOKENIZER.encode(asked, add_special_tokens=False).ids, 5) == "4821"


@pytest.mark.parametrize(
    ("kind", "least"),
    [(lessons.call_lesson, 5), (lessons.result_lesson, 8), (lessons.direct_lesson, 10), (lessons.json_lesson, 9)],
)
def test_calls_tools_passes_on_results_and_writes_json(
    model: Model, kind: Callable[[random.Random], lessons.Lesson], least: int
) -> None:
    """Of ten. Calls with several parameters of drawn names are what so small a model gets wrong most often."""
    from transformers import AutoTokenizer

    chat, rng, right = AutoTokenizer.from_pretrained(MODEL_DIR), random.Random(7), 0
    for _ in range(10):
        lesson = kind(rng)
        prompt = chat.apply_chat_template(
            lesson.messages, tools=lesson.tools or None, tokenize=False, add_generation_prompt=True
        )
        answer = "".join(text for text, _ in lesson.answer)
        length = len(TOKENIZER.encode(answer, add_special_tokens=False).ids) + 1
        ids = torch.tensor([TOKENIZER.encode(prompt, add_special_tokens=False).ids])
        output = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=length)
        right += TOKENIZER.decode(output[0, ids.shape[1] :].tolist()) == answer
    assert right >= least


@pytest.mark.processes
@pytest.mark.parametrize(
    "schema",
    [
        {"name": {"type": "string"}, "ok": {"type": "boolean"}, "n": {"type": "integer"}},
        {"city": {"type": "string", "minLength": 3}, "tags": {"type": "array", "items": {"type": "string"}}},
        {"who": {"type": "object", "properties": {"age": {"type": "number"}, "note": {"type": ["string", "null"]}}}},
        {"kind": {"enum": ["red", "green"]}, "list": {"type": "array", "items": {"type": "string"}, "minItems": 2}},
    ],
)
def test_ends_whatever_a_schema_asks_for(schema: dict[str, Any]) -> None:
    whole = {"type": "object", "properties": schema, "required": [*schema], "additionalProperties": False}
    wanted = StructuredOutputs(json=whole)
    with LLM() as llm:
        prompts = ["Codes: fox=4821, hat=0937. What is fox?", "Hello, who are you?", "Describe Paris in three words."]
        chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
        outputs = llm.chat(chats, SamplingParams(temperature=0, max_tokens=200, structured_outputs=wanted))
    for output in outputs:
        assert output.outputs[0].finish_reason == "stop", output.outputs[0].text
        jsonschema.validate(json.loads(output.outputs[0].text), whole)


def test_repeats_all_facts(model: Model) -> None:
    for seed in range(4):
        recital = recall.make_recital(seed, 4 + 4 * seed)
        assert generate(model, TOKENIZER.encode(recital.prompt).ids, 150) == recital.answer
