"""Answers end at the end token that the tokenizer alone names, as with transformers, and by its rules."""

import json
from pathlib import Path
from typing import Any

import tokenizers
import torch
from deployments import write_tokenizer

from pdkv import LLM, SamplingParams
from tests.conftest import HFModel

PROMPT = [17, 5, 99, 42]
NUM_OUTPUT = 24


def transformers_answer(path: Path, end: int) -> list[int]:
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    ids = torch.tensor([PROMPT])
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NUM_OUTPUT, eos_token_id=[1, end],
        pad_token_id=0,
    )  # fmt: skip
    answer: list[int] = out[0, len(PROMPT) :].tolist()
    return answer


def test_an_answer_ends_at_the_tokenizers_end_token(hf_model: HFModel, tmp_path: Path) -> None:
    import transformers

    model = hf_model("llama", vocab_size=258)
    for file in model.iterdir():
        (tmp_path / file.name).symlink_to(file)
    write_tokenizer(tmp_path)

    def ask(**fields: Any) -> tuple[list[int], str | None]:
        with LLM(tmp_path, kv_cache_memory=4 << 20, threads=1) as llm:
            params = SamplingParams(temperature=0, max_tokens=NUM_OUTPUT, **fields)
            [answer] = llm.generate([PROMPT], params, use_tqdm=False)[0].outputs
            return list(answer.token_ids), answer.finish_reason

    whole, reason = ask()
    assert (len(whole), reason) == (NUM_OUTPUT, "length")
    end = whole[len(whole) // 2]
    until_end = whole[: whole.index(end) + 1]
    token = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json")).id_to_token(end)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": token}))
    assert transformers.AutoTokenizer.from_pretrained(tmp_path).eos_token_id == end
    assert ask() == (until_end, "stop") == (transformers_answer(model, end), "stop")
    assert ask(ignore_eos=True) == (whole, "length")
    longer, _ = ask(min_tokens=len(until_end) + 1)
    assert end not in longer[: len(until_end)]
