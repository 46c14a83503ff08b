"""The steps before an engine is ready: which kernels of 4-bit layers they compile, and where none are padded."""

from pathlib import Path
from typing import Literal

import pytest
import torch
from small_models import make_hf_model
from step_plans import new, share
from twin_device import TwinDevice

from pdkv.config import EngineConfig
from pdkv.engine.plan import StepPlan
from pdkv.engine.worker.executor import InProcessExecutor
from pdkv.engine.worker.readback import Readback
from pdkv.engine.worker.runner import ModelRunner
from pdkv.engine.worker.warm_up import WarmUp
from pdkv.kernels import linear, streams
from pdkv.kernels.int4_weight import CHUNK, PLANE, Int4Weight
from pdkv.models.config import load_model_config


def weight_of(outputs: int, inputs: int) -> Int4Weight:
    words = torch.empty(-(-inputs // CHUNK), outputs, PLANE, dtype=torch.int32, device="meta")
    return Int4Weight(words, torch.empty(-(-inputs // 128), outputs, device="meta"), None, 128, inputs)


@pytest.mark.parametrize(
    ("outputs", "inputs"), [(6144, 4096), (4096, 14_336), (28_672, 4096), (512, 1024), (1024, 2048)]
)
@pytest.mark.parametrize("max_model_len", [100, 4096])
def test_every_kernel_of_a_4_bit_layer_is_compiled_before_an_engine_is_ready(
    outputs: int, inputs: int, max_model_len: int
) -> None:
    """One for each tile of rows, and for inputs that are divided among programs and that are not."""
    from pdkv.kernels.linear_int4_triton import _Tiles  # and Triton with it

    weight = weight_of(outputs, inputs)

    def kernel(rows: int) -> tuple[int, bool]:
        tiles = _Tiles.of(rows, weight, 132)
        return tiles.rows, tiles.parts > 1

    limits = WarmUp(max_num_seqs=64, max_model_len=max_model_len, num_groups=1, num_blocks=1, block_size=16)
    steps = [sum(each.num_scheduled for each in plan.scheduled) for plan in limits.on_device(2048)]
    assert max(steps) <= 2048
    assert {kernel(rows) for rows in range(1, 256)} <= {kernel(rows) for rows in steps if 0 < rows < 256}


def test_until_steps_can_run_a_rank_s_device_may_wait_as_long_as_a_start_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For ranks that still compile their kernels; then as long as ranks may keep each other waiting."""
    timeouts = list[float]()
    begin = Readback._queue
    monkeypatch.setattr(Readback, "_queue", lambda self, *rest: timeouts.append(self._timeout_s) or begin(self, *rest))
    monkeypatch.setattr(streams, "HOST", TwinDevice())
    model = make_hf_model(tmp_path, "llama", "float32")
    config = EngineConfig(model=model, device="cpu", threads=1, rank_timeout_s=9.0, kv_cache_memory=1 << 20)
    executor = InProcessExecutor(load_model_config(model), config, max_num_batched_tokens=64, start_timeout_s=77.0)
    executor.attach(None, None)
    assert set(timeouts) == {77.0}
    timeouts.clear()
    executor.execute(StepPlan(0, [new("a", [3, 4], 0)], [share("a", 0, 2)], []))
    assert timeouts == [9.0]
    executor.shutdown()


def test_on_a_cpu_no_decode_step_is_padded(tmp_path: Path) -> None:
    """Over KV in FP8 neither, though its attention could."""
    model = make_hf_model(tmp_path, "llama", "float32")
    config = EngineConfig(model=model, device="cpu", threads=1, kv_cache_dtype="fp8", kv_cache_memory=1 << 20)
    executor = InProcessExecutor(load_model_config(model), config, max_num_batched_tokens=64)
    executor.attach(None, None)
    runner = executor._runner
    assert runner is not None
    assert runner._attention.pads_decodes
    assert runner._padded is None
    executor.shutdown()


@pytest.mark.skipif(not linear.available(), reason="no compiler when pdkv was installed")
@pytest.mark.parametrize(("linears", "requests"), [("auto", [1, 1]), ("torch", [1, 1, 2, 3])])
def test_a_cpu_without_kernels_for_each_number_of_rows_reads_its_weights_twice_to_warm_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, linears: Literal["auto", "torch"], requests: list[int]
) -> None:
    steps = list[StepPlan]()
    execute = ModelRunner.execute
    monkeypatch.setattr(ModelRunner, "execute", lambda self, plan: steps.append(plan) or execute(self, plan))
    model = make_hf_model(tmp_path, "llama", "float32")
    config = EngineConfig(
        model=model, device="cpu", threads=1, kv_cache_memory=1 << 20, max_num_seqs=3, cpu_linears=linears
    )
    executor = InProcessExecutor(load_model_config(model), config, max_num_batched_tokens=64)
    executor.attach(None, None)
    assert [len(plan.scheduled) for plan in steps if plan.scheduled] == requests
    executor.shutdown()
