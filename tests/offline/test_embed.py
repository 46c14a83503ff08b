"""Embeddings and scores by `LLM`: those of transformers in float32."""

import math
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import tokenizers
import torch
from deployments import write_tokenizer

from pdkv import LLM
from pdkv.errors import InvalidRequest

TEXTS = ["a", "To be, or not to be, that is the question: " * 3, "to be"]


@pytest.fixture(scope="module")
def path(hf_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose tokenizer has yes and no."""
    path = tmp_path_factory.mktemp("models") / "pooled"
    shutil.copytree(hf_model("qwen3"), path)
    write_tokenizer(path)
    tokenizer = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
    tokenizer.add_tokens(["yes", "no"])
    tokenizer.save(str(path / "tokenizer.json"))
    return path


@torch.inference_mode()
def test_embeddings_and_scores_equal_transformers(path: Path) -> None:
    """In chunks, beside each other; last tokens' states also behind cached prefixes."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with LLM(path, device="cpu", threads=1, max_num_batched_tokens=64, max_num_seqs=8) as llm:
        for pooling in ("last", "mean", "last"):
            found = llm.embed([*TEXTS, {"prompt": TEXTS[1]}], pooling=pooling, use_tqdm=False)  # type: ignore[arg-type]
            for output in found:
                states = model(torch.tensor([output.prompt_token_ids]), output_hidden_states=True).hidden_states[-1][0]
                state = states[-1] if pooling == "last" else states.mean(dim=0)
                expected = torch.nn.functional.normalize(state, dim=0)
                torch.testing.assert_close(torch.tensor(output.outputs.embedding), expected, atol=1e-5, rtol=0)  # type: ignore[union-attr]
        assert [output.num_cached_tokens > 0 for output in found] == [False, True, False, True]
        assert all(output.num_cached_tokens == 0 for output in llm.embed(TEXTS, pooling="mean", use_tqdm=False))
        scores = llm.score("what", ["a document", "another"], use_tqdm=False)
        no, yes = llm.tokenizer.encode("no"), llm.tokenizer.encode("yes")
        for output in scores:
            logits = model(torch.tensor([output.prompt_token_ids])).logits[0, -1]
            expected_score = 1 / (1 + math.exp(float(logits[no] - logits[yes])))
            assert output.outputs.score == pytest.approx(expected_score, abs=1e-5)  # type: ignore[union-attr]
        with pytest.raises(InvalidRequest, match="is_matryoshka"):
            llm.embed("a", dimensions=8)
        with pytest.raises(InvalidRequest, match="must not be empty"):
            llm.embed(["a", ""])
        assert llm.generate("a", use_tqdm=False)[0].finished
