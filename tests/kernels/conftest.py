"""Where kernels run in these tests."""

import os

import pytest
import torch

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

if IS_INTERPRETED:
    from interpreted_floats import compute_as_gpus_do, save_work

    compute_as_gpus_do()
    save_work()


@pytest.fixture(autouse=True)
def _few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of attention that have no work cost the interpreter as much as others."""
    if IS_INTERPRETED:
        from pdkv.kernels import paged_attention_triton

        monkeypatch.setattr(paged_attention_triton, "_PROGRAMS", 32)


@pytest.fixture
def device() -> torch.device:
    """Where the kernels run: the GPU, or the CPU through Triton's interpreter or the references."""
    torch.set_num_threads(1)
    return torch.device("cuda" if torch.cuda.is_available() and not IS_INTERPRETED else "cpu")


@pytest.fixture(params=[torch.float32, torch.float16, torch.bfloat16], ids=str)
def dtype(request: pytest.FixtureRequest, device: torch.device) -> torch.dtype:
    """What kernels compute in."""
    if request.param == torch.float16 and device.type == "cpu":
        pytest.skip("the interpreter takes bfloat16 the same way")
    return request.param


@pytest.fixture
def in_triton(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """The CUDA backend launches the Triton kernels here, too, where its own choice would be the references."""
    if device.type == "cpu":
        from pdkv.engine.worker.attention import cuda as attention_cuda
        from pdkv.kernels import kv_copy
        from pdkv.kernels import paged_attention_triton as attention_kernels
        from pdkv.kernels.kv_copy_triton import write_kv_triton

        monkeypatch.setattr(attention_kernels, "_PROGRAMS", 4)
        monkeypatch.setattr(attention_cuda, "paged_attention", attention_kernels.paged_attention_triton)
        monkeypatch.setattr(kv_copy, "write_kv", write_kv_triton)


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models choose the layers and the kernels that they choose on a GPU."""
    from pdkv.engine.worker.attention import select
    from pdkv.models import heads, linear, loader, passes

    monkeypatch.setattr(select, "on_device", lambda _: True)
    monkeypatch.setattr(loader, "linear_kind", lambda *_: "plain")
    for module in (heads, passes):
        monkeypatch.setattr(module, "by_triton", lambda _: True)
    monkeypatch.setattr(linear, "_is_row", lambda x: len(x) == 1)
    monkeypatch.setattr(linear, "_adds_in_place", lambda _: True)
