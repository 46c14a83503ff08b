"""The stand-in for a device refuses what a GPU makes the host wait for, and takes the rest."""

from collections.abc import Callable

import pytest
import torch
from no_sync import CUDA, DeviceTensors, SyncError

WAITS: dict[str, Callable[[torch.Tensor], object]] = {
    "item": lambda x: x[0, 0].item(),
    "bool": lambda x: bool((x > 0).any()),
    "int": lambda x: int(x[0, 0]),
    "tolist": lambda x: x.tolist(),
    "numpy": lambda x: x.numpy(),
    "cpu": lambda x: x.cpu(),
    "equal": lambda x: torch.equal(x, x),
    "nonzero": lambda x: x.nonzero(),
    "mask": lambda x: x[x > 0],
    "write by mask": lambda x: x.__setitem__(x > 0, torch.ones(1, device="cuda")),
    "masked_select": lambda x: x.masked_select(x > 0),
    "unique": lambda x: x.unique(),
    "repeats": lambda x: x[0].repeat_interleave(torch.ones(3, dtype=torch.int64, device="cuda")),
    "upload": lambda x: torch.ones(3).to(x.device),
    "upload, not pinned": lambda x: torch.ones(3).to(x.device, non_blocking=True),
    "upload, waiting": lambda x: torch.ones(3).pin_memory().to(x.device),
    "copy to pageable": lambda x: torch.ones(2, 3).copy_(x, non_blocking=True),
    "copy that waits": lambda x: torch.ones(2, 3).pin_memory().copy_(x),
    "index of the CPU": lambda x: x.index_select(0, torch.tensor([1])),
}


@pytest.mark.parametrize("what", WAITS)
def test_what_waits_is_refused(what: str) -> None:
    with DeviceTensors() as device, pytest.raises(SyncError):
        WAITS[what](device.put(torch.ones(2, 3)))


def test_the_rest_computes() -> None:
    with DeviceTensors() as device:
        x = device.put(torch.arange(6.0).view(2, 3))
        assert (x.device, x.is_cuda, x.is_cpu) == (CUDA, True, False)
        x[1].mul_(10.0)
        index = torch.tensor([1]).pin_memory().to("cuda", non_blocking=True)
        total = x.index_select(0, index) + torch.ones(1, 3, device="cuda")
        host = torch.empty(1, 3, pin_memory=True)
        host.copy_(total, non_blocking=True)
        assert host.tolist() == device.take(total).tolist() == [[31.0, 41.0, 51.0]]
        assert device.take(device.launch(torch.add)(x, x)).tolist() == [[0.0, 2.0, 4.0], [60.0, 80.0, 100.0]]
