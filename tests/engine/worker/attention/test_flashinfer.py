"""FlashInfer as the attention of a device, by a twin of it in torch: FlashInfer itself needs a GPU."""

import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from attention_case import MIXES, Case, Shape
from flashinfer_twin import WRONGS, TwinModule, Wrong

from pdkv.engine.worker.attention import flashinfer as flashinfer_attention
from pdkv.engine.worker.attention import select
from pdkv.engine.worker.attention.backend import AttentionBackend, Layer
from pdkv.engine.worker.attention.cuda import CudaAttention
from pdkv.engine.worker.attention.flashinfer import FlashInferAttention
from pdkv.engine.worker.attention.select import make_backend
from pdkv.engine.worker.step_buffers import Padding
from pdkv.errors import ConfigError
from pdkv.kernels.kv_copy import FP8
from pdkv.kernels.streams import HostStreams
from tests.engine.worker.step_driver import StepDriver

torch.set_num_threads(1)

SHAPE = Shape(heads=4, kv_heads=2, head_size=64, layers=3)
BOTH = [Layer(0, 0), Layer(0, 1, 20), Layer(0, 2)]
"""Layers with and without a window."""


@pytest.fixture(autouse=True)
def _small_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flashinfer_attention, "_WORKSPACE_BYTES", 1 << 10)


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[..., TwinModule]:
    """Puts a twin where FlashInfer would be imported from, and takes pools for a device's."""

    def put(wrong: Wrong | None = None) -> TwinModule:
        module = TwinModule(wrong)
        monkeypatch.setitem(sys.modules, "flashinfer", module)
        monkeypatch.setattr(select, "on_device", lambda _: True)
        return module

    return put


def make_pool(dtype: torch.dtype = torch.bfloat16, **shape: int) -> torch.Tensor:
    _, kv_heads, head_size, block_size, layers = SHAPE._replace(**shape)
    return torch.zeros(2, layers, 2, kv_heads, block_size, head_size, dtype=dtype)


@pytest.mark.parametrize("mix", MIXES, ids=len)
def test_a_step_is_planned_once_for_each_kind_of_layer(mix: list[tuple[int, int]]) -> None:
    """And gives what ours gives, strided queries, all rows and the last ones; the same wrappers plan the next step."""
    case, other = Case(mix, torch.bfloat16, shape=SHAPE), Case(mix, torch.bfloat16, shape=SHAPE)
    module = TwinModule()
    backend = FlashInferAttention(case.pool, SHAPE.heads, BOTH, module)
    assert module.num_wrappers == 2 * 2  # each has pinned memory and device memory of its own
    ours = CudaAttention(other.pool, SHAPE.heads, BOTH)
    for last_only in (False, True, False):
        module.plans.clear()
        rows = case.last_rows if last_only else None
        for each, its in ((backend, case), (ours, other)):
            each.prepare(its.inputs, its.batch.block_tables, rows)
        for layer in range(SHAPE.layers):
            results = [each.attend(layer, its.qkv) for each, its in ((backend, case), (ours, other))]
            assert torch.equal(*results)
        assert len(module.plans) == len(set(module.plans)) == 2
    assert module.num_runs == 3 * SHAPE.layers


def test_padded_steps_are_ours(install: Callable[..., TwinModule]) -> None:
    case, module = Case([(20, 1), (3, 1)], torch.bfloat16, shape=SHAPE), TwinModule()
    backend = FlashInferAttention(case.pool, SHAPE.heads, BOTH, module)
    backend.prepare(case.inputs, case.batch.block_tables, None)
    backend.prepare(case.inputs, case.batch.block_tables, None, size=Padding(2, 2))
    result = backend.attend(0, case.qkv)
    assert len(module.plans) == 2
    assert not module.num_runs
    torch.testing.assert_close(result.double(), case.expected(0), rtol=2e-2, atol=2e-2)
    assert backend.pads_decodes


def test_a_plan_that_may_not_be_on_the_device_yet_is_not_overwritten(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[Any] = []

    class Event:
        def __init__(self) -> None:
            self.come = True
            self.num_records = 0
            events.append(self)

        def record(self) -> None:
            self.num_records += 1
            self.come = False

        def query(self) -> bool:
            return self.come

    class Streams(HostStreams):
        def make_event(self, *, timed: bool = False) -> Any:
            return Event()

    monkeypatch.setattr(flashinfer_attention, "streams_of", lambda _: Streams())
    case, module = Case([(0, 5)], torch.bfloat16, shape=SHAPE), TwinModule()
    backend = FlashInferAttention(case.pool, SHAPE.heads, BOTH[:1], module)
    for _ in range(3):
        backend.prepare(case.inputs, case.batch.block_tables, None)
    assert len(set(module.plans)) == 3
    assert [event.num_records for event in events] == [1, 1, 1]
    events[0].come = True
    backend.prepare(case.inputs, case.batch.block_tables, None)
    assert module.plans[3] is module.plans[0]


def test_flashinfer_is_taken_where_it_is_right(
    install: Callable[..., TwinModule], caplog: pytest.LogCaptureFixture
) -> None:
    module = install()
    with caplog.at_level(logging.INFO):
        for dtype in (torch.bfloat16, torch.float16):
            assert type(make_backend(make_pool(dtype), 4, BOTH)) is FlashInferAttention
    assert "FlashInfer 0.0.twin" in caplog.text
    assert module.num_runs == 2 * 2  # of both kinds of layers, not of each
    assert type(make_backend(make_pool(), 4, BOTH, "triton")) is CudaAttention


@pytest.mark.parametrize("wrong", WRONGS)
def test_flashinfer_is_refused_where_it_is_wrong(
    wrong: Wrong, install: Callable[..., TwinModule], caplog: pytest.LogCaptureFixture
) -> None:
    install(wrong)
    with caplog.at_level(logging.INFO):
        assert type(make_backend(make_pool(), 4, BOTH)) is CudaAttention
    reason = "RuntimeError: no kernel image" if wrong == "raises" else "a random step with"
    assert f"not by FlashInfer: {reason}" in caplog.text
    with pytest.raises(ConfigError, match=reason):
        make_backend(make_pool(), 4, BOTH, "flashinfer")


@pytest.mark.parametrize(
    ("pool", "reason"),
    [
        (make_pool(torch.float32), "KV is float32"),
        (make_pool().to(torch.float8_e4m3fn), "KV is float8_e4m3fn"),
        (make_pool(head_size=80), "heads have 80 values"),
    ],
    ids=["float32", "fp8", "head size"],
)
def test_pools_that_flashinfer_does_not_take(
    pool: torch.Tensor, reason: str, install: Callable[..., TwinModule]
) -> None:
    install()
    assert type(make_backend(pool, 4, BOTH)) is CudaAttention
    with pytest.raises(ConfigError, match=reason):
        make_backend(pool, 4, BOTH, "flashinfer")


def test_without_flashinfer_ours_serve(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    monkeypatch.setattr(select, "on_device", lambda _: True)
    with caplog.at_level(logging.INFO):
        assert type(make_backend(make_pool(), 4, BOTH)) is CudaAttention
    assert "flashinfer" in caplog.text
    with pytest.raises(ConfigError, match="flashinfer"):
        make_backend(make_pool(), 4, BOTH, "flashinfer")


@pytest.mark.parametrize("dtype", [torch.bfloat16, FP8])
@pytest.mark.parametrize("name", ["triton", "flashinfer"])
def test_on_a_cpu_no_gpu_s_attention_can_be_asked_for(name: select.AttentionName, dtype: torch.dtype) -> None:
    with pytest.raises(ConfigError, match="is for GPUs"):
        make_backend(make_pool(dtype), 4, BOTH, name)


def test_on_a_cpu_kv_in_fp8_is_computed_in_torch_and_nothing_else_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        assert type(make_backend(make_pool(FP8), 4, BOTH)) is CudaAttention
    assert not caplog.records


def test_a_model_says_the_same_by_flashinfer(install: Callable[..., TwinModule], hf_model: Callable[..., Path]) -> None:
    """Prompts in chunks beside decodes, windows in some layers; decodes alone are padded."""
    options: dict[str, Any] = {"head_dim": 64, "use_sliding_window": True, "sliding_window": 32}
    options["layer_types"] = ["sliding_attention", "full_attention", "sliding_attention"]
    directory = hf_model("qwen3", "bfloat16", initializer_range=0.2, **options)
    tokens = []
    modules = [install(), install()]
    for name in ("triton", "flashinfer"):
        driver = StepDriver(directory, linears="torch", attention_backend=name, decode_sizes=(4,), check_finite=False)
        backend: AttentionBackend = driver.runner._attention
        assert isinstance(backend, FlashInferAttention) == (name == "flashinfer")
        first, second = (driver.add(str(i), [(7 * i + 3 * j) % 300 for j in range(40 + i)]) for i in range(2))
        for chunks in ({first: 30}, {first: 10, second: 20}, {first: 1, second: 21}, *[{first: 1, second: 1}] * 5):
            driver.step(chunks)
        tokens.append([driver.tokens[key] for key in (first, second)])
    assert tokens[0] == tokens[1]
    assert modules[1].num_runs == 2 + 3 * 3  # of the test at the start, and of three steps with prompts
