"""An engine promises no length that its KV pool cannot hold, and says so before it loads a weight."""

from pathlib import Path
from typing import Any

import pytest
from deployments import write_tokenizer
from small_models import make_hf_config, make_hf_model

from pdkv import LLM, SamplingParams
from pdkv.config import EngineConfig
from pdkv.engine.worker.executor import InProcessExecutor
from pdkv.engine.worker.kv_cache import length_that_fits, make_layout, num_blocks_that_fit
from pdkv.errors import ConfigError, InvalidRequest, ModelError
from pdkv.models.config import load_model_config
from pdkv.models.shard import Shard
from pdkv.testing.engine import at_rest, make_core, of_type, output_of, run, submit
from pdkv.testing.standin import expected_tokens
from pdkv.wire.messages import Failed, Finished

BLOCK_BYTES = 3 * 2 * 2 * 16 * 16 * 4  # of the small models: layers, K and V, heads, tokens, head size, float32


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """1,024 positions; a token of KV takes 768 bytes."""
    return make_hf_model(tmp_path / "model", "llama", "float32")


def make_executor(model: Path, **fields: Any) -> InProcessExecutor:
    config = EngineConfig(model=model, device="cpu", threads=1, **fields)
    return InProcessExecutor(load_model_config(model), config, max_num_batched_tokens=64)


def test_a_length_that_the_pool_does_not_hold_is_an_error_before_weights_are_loaded(model: Path) -> None:
    for file in model.glob("*.safetensors"):
        file.write_bytes(b"no weights")
    with pytest.raises(ConfigError) as error:
        make_executor(model, kv_cache_memory=20 * BLOCK_BYTES, max_model_len=321)
    assert str(error.value) == (
        "the KV pool of 240 KiB holds 320 tokens, but a request may have 321 (max_model_len), which need 252 KiB: "
        "use --kv-cache-memory 1MiB or more, or --max-model-len 320 or less"
    )
    with pytest.raises(ModelError):  # what the same engine with room for the length says
        make_executor(model, kv_cache_memory=1 << 20, max_model_len=321)


def test_the_models_own_length_is_capped_by_the_pool_and_the_engine_says_so(
    model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    executor = make_executor(model, kv_cache_memory=300_000)
    assert (executor.num_blocks, executor.max_model_len) == (24, 384)
    executor.shutdown()
    assert "holds 384 tokens: prompt plus output is limited to that instead of the model's 1024" in caplog.text


@pytest.mark.parametrize("what", ["--kv-cache-memory", "--max-model-len"])
def test_what_the_error_says_to_give_is_enough(model: Path, what: str) -> None:
    with pytest.raises(ConfigError) as error:
        make_executor(model, kv_cache_memory=300_000, max_model_len=1024)
    given = int(str(error.value).split(f"{what} ")[1].split()[0].removesuffix("MiB"))
    if what == "--kv-cache-memory":
        executor = make_executor(model, kv_cache_memory=given << 20, max_model_len=1024)
    else:
        executor = make_executor(model, kv_cache_memory=300_000, max_model_len=given)
    assert executor.num_blocks * 16 >= executor.max_model_len
    executor.shutdown()


def test_the_default_pool_of_a_big_model_says_what_to_set(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Llama-3-8B on the CPU: 128 KiB a token, so that 256 MiB hold a quarter of its 8,192 positions."""
    config = EngineConfig(model=tmp_path, device="cpu")
    fields = {"num_hidden_layers": 32, "num_key_value_heads": 8, "num_attention_heads": 32, "hidden_size": 4096}
    model = load_model_config(make_hf_config(tmp_path, **fields, max_position_embeddings=8192))
    layout = make_layout(model, block_size=16, dtype="bfloat16")
    assert length_that_fits(config, layout, num_blocks_that_fit(layout, config.host_kv_bytes), 8192) == 2048
    assert "--kv-cache-memory 1024MiB" in caplog.text


def test_all_ranks_together_need_what_the_error_says(model: Path) -> None:
    """Four ranks hold each of the two heads twice, so that they need twice the memory."""
    config = EngineConfig(model=model, device="cpu", tp=4, kv_cache_memory=1 << 20, max_model_len=1024)
    layout = make_layout(load_model_config(model), block_size=16, dtype="float32", shard=Shard(3, 4))
    with pytest.raises(ConfigError, match=r"which need 1\.5 MiB: use --kv-cache-memory 2MiB"):
        length_that_fits(config, layout, num_blocks_that_fit(layout, (1 << 20) // 4), 1024)
    assert length_that_fits(config, layout, num_blocks_that_fit(layout, (2 << 20) // 4), 1024) == 1024


def test_a_request_of_the_longest_length_runs_to_its_end_in_a_pool_that_just_holds_it() -> None:
    core = make_core(num_blocks=10, block_size=4, max_model_len=40)
    prompt = list(range(100, 120))
    core.handle("r", submit(prompt, request_id="other", max_tokens=8), 0.0)
    core.handle("r", submit(prompt[:5], request_id="long", max_tokens=35), 0.0)
    core.handle("r", submit(prompt, request_id="too long", max_tokens=21), 0.0)
    messages = run(core)
    assert output_of(messages, "long") == expected_tokens(prompt[:5], 35)
    assert output_of(messages, "too long") == expected_tokens(prompt, 20)  # what the card's length leaves
    assert not of_type(messages, Failed)
    assert len(of_type(messages, Finished)) == 3
    assert at_rest(core)


def test_the_length_ends_where_the_card_says_however_big_the_pool() -> None:
    """A pool of 64 tokens, a card of 24: the card ends an output, and refuses a prompt as long."""
    core = make_core(max_model_len=24)
    prompt = list(range(100, 110))
    core.handle("r", submit(prompt, max_tokens=50), 0.0)
    core.handle("r", submit(list(range(100, 124)), request_id="b"), 0.0)
    messages = run(core)
    assert len(output_of(messages, "a")) == 14
    (failed,) = of_type(messages, Failed)
    assert "at most 23 leave room" in failed.message


@pytest.mark.parametrize("until", ["end", "first_token"])
def test_who_comes_to_an_engine_with_its_whole_output_is_finished(until: str) -> None:
    """The engine that drew the last token died before it could say so."""
    core = make_core(max_model_len=24, options={"fabric": f"complete-{until}"})
    prompt, output = list(range(100, 110)), expected_tokens(list(range(100, 110)), 14)
    fields = {"until": until, "kv": "handoff" if until == "first_token" else "local"}
    core.handle("r", submit(prompt, max_tokens=50, output_token_ids=output, **fields), 0.0)
    core.handle("r", submit(prompt, request_id="b", max_tokens=50, output_token_ids=[*output, 1], **fields), 0.0)
    messages = run(core)
    finished, failed = of_type(messages, Finished), of_type(messages, Failed)
    assert [(m.request_id, m.reason) for m in finished if isinstance(m, Finished)] == [("a", "length")]
    assert [m.request_id for m in failed if isinstance(m, Failed)] == ["b"]
    assert at_rest(core)


def test_no_engine_is_wired_whose_card_promises_more_than_its_pool_holds() -> None:
    with pytest.raises(AssertionError, match="must fit alone"):
        make_core(num_blocks=16, block_size=4, max_model_len=65)


def test_offline_the_length_is_what_was_asked_for(model: Path) -> None:
    write_tokenizer(model)
    params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    with LLM(model, kv_cache_memory=1 << 20, max_model_len=200, threads=1, device="cpu") as llm:
        assert llm._engine.core.card.max_model_len == 200
        (output,) = llm.generate([[5, 6, 7]], params, use_tqdm=False)
        assert len(output.outputs[0].token_ids) == 197
        with pytest.raises(InvalidRequest, match="at most 199 leave room"):
            llm.generate([[5] * 200], params, use_tqdm=False)
