"""The embedded default model is whole, small, and does what it is for: it recalls."""

import json
from pathlib import Path
from typing import Any

import pytest
import recall
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

import pdkv

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
    for seed in range(20):
        question = recall.make_question(seed, 2 + 3 * seed)
        answer = generate(model, TOKENIZER.encode(question.prompt).ids, recall.CODE_DIGITS + 1)
        assert answer == question.answer


def test_recalls_in_chats_and_in_a_follow_up_turn(model: Model) -> None:
    from transformers import AutoTokenizer

    template = AutoTokenizer.from_pretrained(MODEL_DIR)
    for seed in range(20):
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


def test_repeats_all_facts(model: Model) -> None:
    for seed in range(4):
        recital = recall.make_recital(seed, 4 + 4 * seed)
        assert generate(model, TOKENIZER.encode(recital.prompt).ids, 150) == recital.answer
