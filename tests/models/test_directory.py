"""Model directories as they are published: tokens, ids and chat ids are those of transformers, or it is said why."""

import json
import logging
from pathlib import Path
from typing import Any

import model_directories
import pytest
import torch
import transformers

from pdkv.models.config import load_model_config
from pdkv.text import Tokenizer
from tests.engine.worker.step_driver import StepDriver

TEXTS = [
    *model_directories.SAMPLE,
    "",
    " a",
    "<s>[INST] who </s> [/INST]",
    "x<|im_end|>\n y",
    "<|end|> the [PAD] fox",
    "é",
]
CHAT = [
    {"role": "user", "content": " Who is the fox? "},
    {"role": "assistant", "content": "A fox é"},
    {"role": "user", "content": "the <|im_start|> 123"},
]
NAMES = list(model_directories.directories())
WRITTEN = {  # a LlamaTokenizer of transformers 5 reads vocabularies of bytes as SentencePiece's
    "DeepSeek-R1-Distill-Llama-8B", "DeepSeek-R1-0528-Qwen3-8B",
}  # fmt: skip
NOT_IN_TRANSFORMERS = {"DeepSeek-R1-0528-Qwen3-8B"}  # attn_factor, which transformers leaves out


@pytest.fixture(scope="session")
def published(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """One directory by its name, made once."""
    root, made = tmp_path_factory.mktemp("published"), {}

    def get(name: str) -> Path:
        if name not in made:
            made[name] = model_directories.write(root / name, model_directories.directories()[name])
        return Path(made[name])

    return get


def their_tokenizer(path: Path) -> Any:
    kind = transformers.PreTrainedTokenizerFast if path.name in WRITTEN else transformers.AutoTokenizer
    return kind.from_pretrained(path)


@pytest.mark.parametrize("name", NAMES)
def test_ids_texts_and_chat_ids_are_those_of_transformers(published: Any, name: str) -> None:
    path = published(name)
    ours, theirs = Tokenizer.from_dir(path), their_tokenizer(path)
    for text in TEXTS:
        for special in (True, False):
            ids = theirs.encode(text, add_special_tokens=special)
            assert ours.encode(text, add_special_tokens=special) == ids, text
            for skip in (True, False):
                wanted = theirs.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
                assert ours.decode(ids, skip_special_tokens=skip) == wanted
    assert ours.special_tokens == theirs.special_tokens_map
    if theirs.chat_template is None and (path / "chat_template.json").exists():
        theirs.chat_template = json.loads((path / "chat_template.json").read_text())["chat_template"]
    for tools in (None, [{"type": "function", "function": {"name": "f", "parameters": {}}}]):
        if theirs.chat_template is not None:
            wanted = theirs.apply_chat_template(CHAT, tools=tools, add_generation_prompt=True, tokenize=False)
            assert ours.render_chat(CHAT, tools=tools) == wanted
            ids = theirs.encode(wanted, add_special_tokens=False)
            assert ours.encode(ours.render_chat(CHAT, tools=tools), add_special_tokens=False) == ids


@pytest.mark.parametrize("name", NAMES)
def test_tokens_and_end_tokens_are_those_of_transformers(published: Any, name: str) -> None:
    path = published(name)
    model = transformers.AutoModelForCausalLM.from_pretrained(path)
    prompt = [int(i) for i in torch.randint(0, 480, (90,), generator=torch.Generator().manual_seed(1))]
    config = load_model_config(path)
    ends = model.generation_config.eos_token_id
    wanted_ends = {*(ends if isinstance(ends, list) else [ends]), their_tokenizer(path).eos_token_id} - {None}
    assert {*config.eos_token_ids} == wanted_ends
    assert config.dtype == str(model.dtype).removeprefix("torch.")
    if name in NOT_IN_TRANSFORMERS:
        return
    with torch.inference_mode():
        ids = torch.tensor([prompt])
        for _ in range(24):
            ids = torch.cat((ids, model(ids).logits[:, -1:].argmax(-1)), dim=1)
    driver = StepDriver(path, check_finite=True)
    key = driver.add("a", prompt)
    assert driver.run({key: 24})[key] == ids[0, len(prompt) :].tolist()


@pytest.mark.parametrize(
    ("name", "warning"),
    [
        ("DeepSeek-R1-Distill-Llama-8B", "tokenizer.json counts as it is written; transformers makes a LlamaTokenizer"),
        ("Llama-2-7b-chat-hf", "as in transformers, normalizer and pre_tokenizer of tokenizer.json gives way"),
        (
            "SmolLM2-1.7B-Instruct",
            "as in transformers, pre_tokenizer of tokenizer.json gives way to that of GPT2Tokenizer",
        ),
        ("an-unsloth-finetune", "lacks special tokens, which transformers adds: <|finetune_right_pad_id|>"),
        ("Mistral-Nemo-Instruct-2407", "chat_template.json, which is a processor's, has the only chat template"),
    ],
)
def test_what_counts_by_transformers_and_not_by_a_file_is_warned_of(
    published: Any, name: str, warning: str, caplog: pytest.LogCaptureFixture
) -> None:
    Tokenizer.from_dir(published(name))
    assert warning in caplog.text
    caplog.clear()
    Tokenizer.from_dir(published("Qwen3-8B"))
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
