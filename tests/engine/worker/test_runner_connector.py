"""The runner's calls into a connector's worker side, and prompt logprobs."""

from pathlib import Path

import pytest
import torch

from pdkv.config import EngineConfig
from pdkv.connectors.base import (
    NO_TRANSFERS,
    Cancel,
    Direction,
    KVConnectorMetadata,
    Stats,
    TransferKey,
    TransferOutcome,
    TransferResults,
    WorkerConnector,
)
from pdkv.connectors.step_done import ON_HOST, StepDone
from pdkv.engine.plan import NewRequest, ScheduledRequest, StepPlan
from pdkv.engine.worker.executor import InProcessExecutor
from pdkv.engine.worker.kv_cache import num_blocks_that_fit
from pdkv.errors import ConfigError
from pdkv.models.config import load_model_config
from pdkv.sampling.params import SamplingParams
from pdkv.wire.kv import EngineCard
from pdkv.wire.reports import ConnectorStats
from tests.engine.worker.step_driver import StepDriver
from tests.engine.worker.transformers_oracle import draw_prompts, logprobs

torch.set_num_threads(1)


class Recorder(WorkerConnector):
    """Writes down every call."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.pool: torch.Tensor | None = None

    def register_kv_caches(self, kv_cache: torch.Tensor) -> None:
        self.pool = kv_cache

    def start_load_kv(self, meta: KVConnectorMetadata) -> None:
        self.calls.append(f"start {meta.step_id}")

    def wait_for_layer_load(self, layer: int) -> None:
        self.calls.append(f"wait {layer}")

    def save_kv_layer(self, layer: int, kv_cache: torch.Tensor, meta: KVConnectorMetadata) -> None:
        self.calls.append(f"save {layer} {bool(kv_cache[:, layer].any())}")

    def wait_for_save(self) -> None:
        self.calls.append("saved")

    def get_finished(self) -> TransferResults:
        self.calls.append("finished")
        return TransferResults({TransferKey("t", 1): TransferOutcome(num_bytes=5)}, {}, {}, {})

    def cancel(self, key: TransferKey, direction: Direction) -> None:
        self.calls.append(f"cancel {key[0]}, {direction}")

    def update_peers(self, added: object, removed: object) -> None:
        self.calls.append("peers")

    def shutdown(self) -> None:
        self.calls.append("shutdown")


def test_layer_hooks_surround_the_attention_of_each_layer(tiny_model_dir: Path) -> None:
    worker = Recorder()
    driver = StepDriver(tiny_model_dir, worker=worker)
    key = driver.add("a", [5, 6, 7])
    output = driver.step({key: 3}, KVConnectorMetadata(step_id=9, needs_layer_hooks=True))
    layers = [call for layer in range(3) for call in (f"wait {layer}", f"save {layer} True")]
    assert worker.calls == ["start 9", *layers, "saved", "finished"]
    assert output.transfers.finished_sending[TransferKey("t", 1)].num_bytes == 5


def test_without_hooks_and_in_empty_steps_only_the_step_calls_are_made(tiny_model_dir: Path) -> None:
    worker = Recorder()
    driver = StepDriver(tiny_model_dir, worker=worker)
    key = driver.add("a", [5, 6, 7])
    driver.step({key: 3}, KVConnectorMetadata(step_id=1))
    driver.step({}, KVConnectorMetadata(step_id=2, needs_layer_hooks=True))
    driver.step({})
    assert worker.calls == ["start 1", "saved", "finished", "start 2", "saved", "finished", "finished"]


def test_chunks_in_mid_prompt_call_every_layer_too(tiny_model_dir: Path) -> None:
    worker = Recorder()
    driver = StepDriver(tiny_model_dir, worker=worker)
    key = driver.add("a", list(range(2, 40)))
    output = driver.step({key: 20}, KVConnectorMetadata(step_id=1, needs_layer_hooks=True))
    assert output.sampled == {}
    assert "save 2 True" in worker.calls


def test_a_step_s_end_is_recorded_behind_its_kernels_and_told_to_its_readers(
    tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A launch returns while a device computes: what reads a step's KV waits for its event."""

    class Step(StepDone):
        def record(self) -> None:
            worker.calls.append("recorded")

    class Watching(Recorder):
        def start_load_kv(self, meta: KVConnectorMetadata) -> None:
            super().start_load_kv(meta)
            told.append((meta.earlier_steps, meta.this_step))

    told: list[tuple[StepDone | None, StepDone | None]] = []
    made: list[str] = []
    monkeypatch.setattr("pdkv.engine.worker.runner.make_step_done", lambda device: made.append(device.type) or Step())
    worker = Watching()
    driver = StepDriver(tiny_model_dir, worker=worker)
    key = driver.add("a", list(range(2, 40)))
    driver.step({key: 20}, KVConnectorMetadata(step_id=1, needs_layer_hooks=True))
    driver.step({}, KVConnectorMetadata(step_id=2))
    assert made == ["cpu", "cpu"]
    layers = [call for layer in range(3) for call in (f"wait {layer}", f"save {layer} True")]
    assert worker.calls == [
        "start 1", *layers, "recorded", "saved", "finished", "start 2", "recorded", "saved", "finished"
    ]  # fmt: skip
    (before, first), (earlier, second) = told
    assert before is ON_HOST
    assert isinstance(first, Step)
    assert earlier is first
    assert isinstance(second, Step)


@pytest.mark.parametrize("chunk", [2048, 30])
def test_prompt_logprobs_equal_transformers(tiny_model_dir: Path, chunk: int) -> None:
    drawn = draw_prompts(tiny_model_dir, [90, 1, 33], 4)
    driver = StepDriver(tiny_model_dir)
    asking = driver.add("asking", drawn[0][0], prompt_logprobs=2)
    single = driver.add("single", drawn[1][0], prompt_logprobs=0)
    other = driver.add("other", drawn[2][0])
    outputs = driver.run(dict.fromkeys([asking, single, other], 4), chunk=chunk)
    assert [outputs[key] for key in (asking, single, other)] == [drawn[i][1] for i in range(3)]
    assert set(driver.prompt_logprobs) == {asking, single}
    assert driver.prompt_logprobs[single] == [None]
    result = driver.prompt_logprobs[asking]
    expected = logprobs(tiny_model_dir, drawn[0][0])
    assert len(result) == 90
    assert result[0] is None
    for position, (token, entry) in enumerate(zip(drawn[0][0][1:], result[1:], strict=True)):
        assert entry is not None
        row = expected[position]
        assert entry.token_id == token
        assert entry.logprob == pytest.approx(float(row[token]), abs=1e-3)
        assert entry.rank == int((row > row[token]).sum()) + 1
        assert [pair[1] for pair in entry.top] == pytest.approx(row.topk(2).values.tolist(), abs=1e-3)


def test_prompt_logprobs_are_not_given_twice(tiny_model_dir: Path) -> None:
    driver = StepDriver(tiny_model_dir)
    key = driver.add("resumed", [4, 5, 6], [7], prompt_logprobs=1)
    driver.run({key: 2})
    assert driver.prompt_logprobs == {}


def test_the_executor_sizes_attaches_and_runs(tiny_model_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = EngineConfig(model=tiny_model_dir, device="cpu", kv_cache_memory=1 << 20, threads=1, max_num_seqs=4)
    with caplog.at_level("INFO"):
        executor = InProcessExecutor(load_model_config(tiny_model_dir), config, max_num_batched_tokens=64)
    # 2 sides x 3 layers x 2 KV heads x 16 tokens x 16 head size x 4 bytes
    assert executor.layout.block_bytes == 12288
    assert executor.num_blocks == (1 << 20) // 12288
    assert "2 KV heads" in caplog.text
    worker = Recorder()
    executor.attach(None, worker)
    assert worker.pool is not None
    assert worker.pool.shape == (85, 3, 2, 2, 16, 16)
    key = TransferKey("a", 0)
    request = NewRequest(key, 0, [3, 4], [], SamplingParams(temperature=0.0), [[7]])
    plan = StepPlan(0, [request], [ScheduledRequest(key, 0, 2, [], True)], [], cancels=[Cancel(("gone", 2), "receive")])
    output = executor.execute(plan)
    assert len(output.sampled[key].token_ids) == 1
    executor.update_peers(list[EngineCard](), list[EngineCard]())
    executor.shutdown()
    executor.shutdown()
    assert worker.calls == ["cancel gone, receive", "finished", "peers", "shutdown"]


def test_a_pool_of_another_shape_is_refused(tiny_model_dir: Path) -> None:
    config = EngineConfig(model=tiny_model_dir, device="cpu", kv_cache_memory=1 << 20, threads=1)
    executor = InProcessExecutor(load_model_config(tiny_model_dir), config, max_num_batched_tokens=64)
    with pytest.raises(ConfigError, match="expected"):
        executor.attach(torch.zeros(85, 3, 2, 2, 16, 8), None)
    with pytest.raises(ConfigError, match="no block"):
        num_blocks_that_fit(executor.layout, 12287)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_that_is_not_there_is_refused(tiny_model_dir: Path) -> None:
    config = EngineConfig(model=tiny_model_dir, device="cuda")
    with pytest.raises(ConfigError, match="cuda"):
        InProcessExecutor(load_model_config(tiny_model_dir), config, max_num_batched_tokens=64)


def test_a_step_with_which_transfers_ended_brings_the_counts(tiny_model_dir: Path) -> None:
    class Counting(Recorder):
        ended = True

        def get_finished(self) -> TransferResults:
            return super().get_finished() if self.ended else NO_TRANSFERS

        def get_stats(self) -> Stats:
            return {"": ConnectorStats(loads=1)}

    worker = Counting()
    driver = StepDriver(tiny_model_dir, worker=worker)
    assert driver.step({}).connector_stats == {"": ConnectorStats(loads=1)}
    worker.ended = False
    assert driver.step({}).connector_stats is None
