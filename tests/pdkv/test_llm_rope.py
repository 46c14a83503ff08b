"""Linear RoPE scaling beyond the positions that a model was trained with, against transformers."""

import random
from pathlib import Path

import pytest
from deployments import write_tokenizer
from oracle import oracle
from small_models import make_hf_model

from pdkv import LLM, SamplingParams
from pdkv.errors import InvalidRequest

TRAINED, FACTOR, NUM_OUTPUT = 64, 4.0, 16
SCALED = int(TRAINED * FACTOR)


def test_tokens_beyond_the_unscaled_length_are_those_of_transformers(tmp_path: Path) -> None:
    rope = {"rope_type": "linear", "factor": FACTOR, "rope_theta": 10000.0}
    overrides = {"max_position_embeddings": TRAINED, "rope_parameters": rope}
    model = make_hf_model(tmp_path, "llama", "float32", **overrides)
    write_tokenizer(model)
    rng = random.Random(3)
    lengths = (TRAINED - NUM_OUTPUT // 2, 2 * TRAINED, SCALED - NUM_OUTPUT)
    expected = [
        oracle(model).expect(lambda size=length: [rng.randrange(2, 258) for _ in range(size)], NUM_OUTPUT)
        for length in lengths
    ]
    params = SamplingParams(temperature=0, max_tokens=NUM_OUTPUT, ignore_eos=True)
    with LLM(model, kv_cache_memory=4 << 20, threads=1) as llm:
        assert llm._core.card.max_model_len == SCALED
        outputs = llm.generate([one.prompt for one in expected], params, progress=False)
        assert [output.outputs[0].token_ids for output in outputs] == [one.output for one in expected]
        with pytest.raises(InvalidRequest, match=f"at most {SCALED - 1} leave room"):
            llm.generate([[5] * SCALED], params, progress=False)
