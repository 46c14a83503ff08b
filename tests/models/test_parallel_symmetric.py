"""Small sums over memory of all ranks: when, for what, and decided the same by all. Ranks are threads here."""

import logging
import re
import threading
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rank_threads import on_ranks

from pdkv.errors import TransferTimeout
from pdkv.models import parallel_symmetric
from pdkv.models.parallel import DeviceRanks, TensorParallel
from pdkv.models.parallel_symmetric import MAX_BYTES, CudaSums, SharedSums, SymmetricRanks, over_symmetric_memory
from pdkv.models.shard import Shard

torch.set_num_threads(1)

CPU = torch.device("cpu")


class Memory:
    """What the ranks' GPUs map, by threads that share it; notes the sizes of sums."""

    def __init__(self, size: int) -> None:
        self.buffers: dict[int, torch.Tensor] = {}
        self.barrier = threading.Barrier(size)
        self.sizes: list[int] = []
        self.fails_on: int | None = None
        self.wrong_on: int | None = None

    def make(self, shard: Shard, device: torch.device, path: Path, timeout_s: float) -> SharedSums:
        if shard.rank == self.fails_on:
            raise RuntimeError("CUDA driver error: operation not supported")
        return ThreadSums(shard.rank, self)


class ThreadSums(SharedSums):
    """Adds in the order of ranks, between two barriers."""

    def __init__(self, rank: int, memory: Memory) -> None:
        self.buffer = torch.full((MAX_BYTES,), 255, dtype=torch.uint8)
        self._rank, self._memory = rank, memory
        memory.buffers[rank] = self.buffer

    def add_up(self, part: torch.Tensor, out: torch.Tensor) -> None:
        memory = self._memory
        if self._rank == 0:
            memory.sizes.append(part.nbytes)
        assert part.data_ptr() == self.buffer.data_ptr()
        memory.barrier.wait(30)
        parts = [memory.buffers[rank][: part.nbytes].view(part.dtype) for rank in range(len(memory.buffers))]
        total = torch.stack(parts).sum(0)
        memory.barrier.wait(30)
        out.copy_(total + 0.25 if self._rank == memory.wrong_on else total)


@pytest.fixture(autouse=True)
def lonely(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """Devices that read no other's memory."""
    devices: set[int] = set()
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda own, other: own not in devices)
    return devices


def join(memory: Memory, group: TensorParallel, index: int | None = None) -> TensorParallel:
    """As the device `index`, or one of its own."""
    assert isinstance(group, DeviceRanks)
    device = torch.device("cpu", group.shard.rank if index is None else index)
    return over_symmetric_memory(group, device, Path("unused"), 5.0, memory.make)


@pytest.mark.parametrize("size", [2, 3])
def test_small_sums_go_over_the_memory_and_all_others_over_the_group(size: int) -> None:
    memory = Memory(size)
    cases = [(shape, dtype) for shape in ((1, 64), (64, 4096), (65, 4096), (3, 5), (0, 8)) for dtype in (
        torch.bfloat16, torch.float32, torch.float16)]  # fmt: skip

    def run(group: TensorParallel) -> list[torch.Tensor]:
        ranks = join(memory, group)
        assert isinstance(ranks, SymmetricRanks)
        if ranks.shard.rank == 0:
            memory.sizes.clear()
        results = []
        for shape, dtype in cases:
            x = torch.full(shape, ranks.shard.rank + 1.0, dtype=dtype)
            assert ranks.all_reduce(x) is x
            results.append(x)
        sides = ranks.all_gather(torch.full((2, 3), float(ranks.shard.rank)))
        assert torch.equal(sides, torch.arange(size).repeat_interleave(3).expand(2, -1).float())
        return results

    for results in on_ranks(size, run, over_gloo=True):
        for x in results:
            assert (x == size * (size + 1) / 2).all()
    assert memory.sizes == [64 * 2, 64 * 4, 64 * 4096 * 2]


def refuse_last_rank(memory: Memory, lonely: set[int], indexes: list[int]) -> None:
    memory.fails_on = 2


def be_wrong_on_the_last_rank(memory: Memory, lonely: set[int], indexes: list[int]) -> None:
    memory.wrong_on = 2


def take_access_from_the_last_rank(memory: Memory, lonely: set[int], indexes: list[int]) -> None:
    lonely.add(2)


def share_a_device(memory: Memory, lonely: set[int], indexes: list[int]) -> None:
    indexes[2] = 1


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (refuse_last_rank, "RuntimeError: CUDA driver error: operation not supported"),
        (be_wrong_on_the_last_rank, "its sums differ"),
        (take_access_from_the_last_rank, r"GPU 2 has no access to GPUs \[0, 1\]"),
        (share_a_device, r"ranks share GPUs: \[0, 1, 1\]"),
    ],
)
def test_what_one_rank_cannot_no_rank_does(
    spoil: Callable[[Memory, set[int], list[int]], None],
    reason: str,
    lonely: set[int],
    caplog: pytest.LogCaptureFixture,
) -> None:
    memory, indexes = Memory(3), [0, 1, 2]
    spoil(memory, lonely, indexes)

    def run(group: TensorParallel) -> torch.Tensor:
        assert join(memory, group, indexes[group.shard.rank]) is group
        return group.all_reduce(torch.ones(4))

    with caplog.at_level(logging.INFO):
        assert [total.tolist() for total in on_ranks(3, run, over_gloo=True)] == [[3.0] * 4] * 3
    lines = [record.message for record in caplog.records if "not over symmetric memory" in record.message]
    assert len(lines) == 3
    assert any(re.search(reason, line) for line in lines)


def test_the_group_and_the_memory_are_left_together() -> None:
    left: list[str] = []

    class Sums(SharedSums):
        def add_up(self, part: torch.Tensor, out: torch.Tensor) -> None:
            raise AssertionError

        def release(self) -> None:
            left.append("memory")

    class Group(SimpleNamespace):
        shard = Shard(0, 2)

        def set_timeout(self, timeout_s: float) -> None:
            left.append(f"{timeout_s} s")

        def close(self) -> None:
            left.append("group")

    ranks = SymmetricRanks(Group(), Sums())  # type: ignore[arg-type]
    ranks.set_timeout(3.0)
    ranks.close()
    assert left == ["3.0 s", "memory", "group"]  # an abort may wait for what waits for signals


def test_the_group_is_left_though_the_device_answers_no_more() -> None:
    left: list[str] = []

    class Sums(SharedSums):
        def add_up(self, part: torch.Tensor, out: torch.Tensor) -> None:
            raise AssertionError

        def release(self) -> None:
            raise TransferTimeout("the device has not come to an event within 2 s")

    group: Any = SimpleNamespace(shard=Shard(0, 2), close=lambda: left.append("group"))
    with pytest.raises(TransferTimeout):
        SymmetricRanks(group, Sums()).close()
    assert left == ["group"]


class Waiting:
    """A kernel that waits for the other rank's signal and then for room for its own, as torch's do; in a thread."""

    def __init__(self) -> None:
        self.pads = [torch.zeros(4, dtype=torch.int32), torch.ones(4, dtype=torch.int32)]  # the lost rank took none
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self._wait)
        self.thread.start()

    def _wait(self) -> None:
        while not self.stop.is_set() and self.pads[0][1] != 1:
            pass
        while not self.stop.is_set() and self.pads[1][0] != 0:
            pass

    def get_signal_pad(self, rank: int, dtype: torch.dtype) -> torch.Tensor:
        assert dtype == torch.int32
        return self.pads[rank]


@pytest.mark.parametrize("is_lost_for_good", [False, True])
def test_kernels_that_wait_for_a_lost_rank_are_released(
    is_lost_for_good: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kernel = Waiting()

    class Event:
        def record(self) -> None: ...
        def synchronize(self, timeout_s: float) -> None: ...
        def query(self) -> bool:
            return not kernel.thread.is_alive()

    sums = CudaSums.__new__(CudaSums)  # torch's own memory needs GPUs
    sums._shard, sums._handle = Shard(0, 2), kernel
    sums._streams = SimpleNamespace(make_event=Event, make_stream=lambda: SimpleNamespace(on=nullcontext))  # type: ignore[assignment]
    if is_lost_for_good:
        monkeypatch.setattr(parallel_symmetric, "_RELEASE_TIMEOUT_S", 0.2)
        monkeypatch.setattr(kernel, "get_signal_pad", lambda rank, dtype: torch.zeros(4, dtype=dtype))
    try:
        sums.release()
        assert ("waits for a lost rank" in caplog.text) == is_lost_for_good == kernel.thread.is_alive()
    finally:
        kernel.stop.set()
        kernel.thread.join(30)


def test_torch_has_what_symmetric_memory_is_made_of() -> None:
    """On a CPU neither memory nor a meeting; but a group of a name, and the operators with these arguments."""
    import torch.distributed._symmetric_memory as symmetric_memory
    from torch._C._distributed_c10d import ProcessGroup, _register_process_group, _resolve_process_group
    from torch.distributed import HashStore

    group: Any = ProcessGroup(HashStore(), 1, 2)
    name: Any = "pdkv:/nowhere"
    _register_process_group(name, group)
    assert (_resolve_process_group(name).rank(), _resolve_process_group(name).size()) == (1, 2)
    assert callable(symmetric_memory.rendezvous)
    schemas = [torch.ops.symm_mem.multimem_all_reduce_.default._schema]
    schemas.append(torch.ops.symm_mem.one_shot_all_reduce.default._schema)
    names = ["input", "reduce_op", "group_name"]
    assert [[argument.name for argument in schema.arguments] for schema in schemas] == [names, names]


def test_the_kernel_that_releases_is_launched_before_any_other_can_spin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the rank's own signals, of which there are none yet. Of torch's memory the group alone is real here."""
    import torch.distributed._symmetric_memory as symmetric_memory
    from torch._C import _distributed_c10d

    pads = [torch.full((4,), 9, dtype=torch.int32) for _ in range(2)]
    handle = SimpleNamespace(get_signal_pad=lambda rank, dtype: pads[rank], multicast_ptr=0)
    memory = SimpleNamespace(empty_strided_p2p=lambda shape, stride, dtype, *_: torch.empty(shape, dtype=dtype))
    monkeypatch.setattr(_distributed_c10d, "_SymmetricMemory", memory)
    monkeypatch.setattr(symmetric_memory, "rendezvous", lambda buffer, name: handle)
    sums = CudaSums(Shard(1, 2), CPU, tmp_path / "meeting", 5.0)
    assert sums.buffer.shape == (MAX_BYTES,)
    assert [pad.tolist() for pad in pads] == [[9] * 4, [0] * 4]
