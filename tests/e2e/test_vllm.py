"""Two vLLM processes hand KV over through pdkv: one vLLM's tokens, and its own metrics say where KV came from."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from oracle import Expected
from prompt_set import forty_prompts
from serving_checks import serve_directory
from vllm_peers import vllm_pair, vllm_python

pytestmark = pytest.mark.vllm

NUM_OUTPUT = 8
BLOCK = 32
MIN_HIT = 64


@pytest.fixture(scope="module")
def model(hf_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Expected]]:
    vllm_python()
    path = hf_model("llama", initializer_range=0.2, head_dim=32)
    expected = [e for e in forty_prompts(path, NUM_OUTPUT) if len(e.prompt) >= 100][:10]
    return serve_directory(path, tmp_path_factory.mktemp("vllm")), expected


@pytest.fixture
def configure(tmp_path: Path) -> Callable[[str], dict[str, Any]]:
    """Makes kv_connector_extra_config for a connector, or for host memory before files."""

    def make(connector: str) -> dict[str, Any]:
        others: dict[str, dict[str, Any]] = {
            "shared_storage": {"config": {"path": f"{tmp_path}/kv"}},
            "store": {"config": {"url": f"file://{tmp_path}/kv", "tokens_per_value": "64"}},
            "host": {
                "connector": "store",
                "config": {
                    "url": f"host://{tmp_path}/host?capacity=64MiB,file://{tmp_path}/kv",
                    "tokens_per_value": "64",
                },
            },
            "shared_memory": {"peers_dir": f"{tmp_path}/peers", "staging_tokens": 8192},
        }
        return {"connector": connector, **others[connector]}

    return make


@pytest.mark.parametrize("connector", ["shared_storage", "shared_memory", "store", "host"])
def test_decode_computes_nothing_beyond_the_last_block(
    model: tuple[Path, list[Expected]], configure: Callable[[str], dict[str, Any]], connector: str
) -> None:
    """F8: what the producer computed the consumer loads. A block of less than `unit` tokens is computed there."""
    path, expected = model
    unit = 64 if connector in ("store", "host") else BLOCK
    with vllm_pair(path, configure(connector)) as (producer, consumer):
        for e in expected:
            assert producer.complete(e.prompt, NUM_OUTPUT) == e.output
            before = consumer.prompt_tokens()
            assert consumer.complete(e.prompt, NUM_OUTPUT) == e.output
            after = consumer.prompt_tokens()
            by_source = {source: after[source] - before.get(source, 0) for source in after}
            stored = (len(e.prompt) - 1) // unit * unit
            hit = by_source["local_cache_hit"]
            assert by_source["external_kv_transfer"] == (stored - hit if stored - hit >= MIN_HIT else 0), by_source
            assert sum(by_source.values()) == len(e.prompt)
        total = consumer.prompt_tokens()
    assert total["external_kv_transfer"] > 0
    assert total["local_compute"] < len(expected) * (unit + MIN_HIT)
