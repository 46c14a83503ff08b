"""The copies between vLLM's blocks and the staging pool, on a recorded device."""

import threading
from collections.abc import Callable

import pytest
import torch
from recorded_streams import RecordedStreams, check_every_call, use_recorded

from pdkv.connectors.base import KVConnectorMetadata
from pdkv.vllm.copies import StagingCopies
from pdkv.vllm.staging import BlockPairs, StepOrders
from pdkv.vllm.worker import VllmWorker
from pdkv.wire.kv import KVLayout

NUM_BLOCKS, NUM_STAGED = 6, 5
PAIRS = BlockPairs([2, 3, 1], [4, 0, 5])


def make_copies() -> tuple[list[torch.Tensor], torch.Tensor, StagingCopies]:
    """The second layer lies in another order of memory than its shape says."""
    caches = [torch.zeros(NUM_BLOCKS, 2, 4, 8), torch.zeros(NUM_BLOCKS, 4, 2, 8).transpose(1, 2)]
    staging = torch.zeros(NUM_STAGED, 2, 64)
    return caches, staging, StagingCopies(caches, staging)


def values(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(NUM_BLOCKS, 2, 4, 8, generator=generator) for _ in range(2)]


def images(layers: list[torch.Tensor]) -> torch.Tensor:
    """(pairs, layers, elements), as they are staged."""
    return torch.stack([layer[PAIRS.vllm].flatten(1) for layer in layers], dim=1)


def copy_out(recorded: RecordedStreams) -> bool:
    """A step computes blocks, they are copied, the next step overwrites them, a save reads the images."""
    caches, staging, copies = make_copies()
    with recorded.compute.on():
        for cache, value in zip(caches, values(1), strict=True):
            cache.copy_(value)
    copies.copy_out(PAIRS)
    with recorded.compute.on():
        for cache, value in zip(caches, values(2), strict=True):
            cache.copy_(value)
    recorded.finish()
    copies.last.wait(60.0)
    return torch.equal(staging[PAIRS.staging], images(values(1)))


def copy_in(recorded: RecordedStreams) -> bool:
    """A step of former owners writes, a load is copied in, the staging blocks are used again, the next step reads."""
    caches, staging, copies = make_copies()
    with recorded.compute.on():
        for cache in caches:
            cache.fill_(-2.0)
    staging[PAIRS.staging] = images(values(1))
    copies.copy_in(PAIRS)
    with recorded.compute.on():
        read = [cache.clone() for cache in caches]
    copies.last.wait(60.0)
    staging.fill_(-3.0)
    recorded.finish()
    return torch.equal(images(read), images(values(1)))


@pytest.mark.parametrize("scenario", [copy_out, copy_in])
def test_each_order_of_a_copy_is_missed(scenario: Callable[[RecordedStreams], bool]) -> None:
    check_every_call(scenario)


def test_in_host_memory_copies_are_there_when_they_return() -> None:
    caches, staging, copies = make_copies()
    for cache, value in zip(caches, values(1), strict=True):
        cache.copy_(value)
    copies.copy_out(PAIRS)
    assert torch.equal(staging[PAIRS.staging], images(values(1)))
    for cache in caches:
        cache.zero_()
    copies.copy_in(PAIRS)
    assert torch.equal(images(caches), images(values(1)))


class Inner:
    """A connector's worker side that looks at the staging pool when the step that it is told to wait for is over."""

    def __init__(self) -> None:
        self.seen: list[torch.Tensor] = []

    def register_kv_caches(self, kv_cache: torch.Tensor) -> None:
        self.staging = kv_cache.view(NUM_STAGED, 2, -1)

    def start_load_kv(self, meta: KVConnectorMetadata) -> None:
        assert meta.earlier_steps is not None
        meta.earlier_steps.wait(60.0)
        self.seen.append(self.staging[PAIRS.staging].clone())

    def wait_for_save(self) -> None:
        pass


class Table:
    """Where the staging pool is shown to peers, who read at once what is published."""

    def __init__(self, inner: Inner) -> None:
        self.inner = inner
        self.seen: list[torch.Tensor] = []

    def reuse(self, block_id: int) -> None:
        pass

    def publish(self, block_id: int, keys: list[bytes]) -> None:
        self.seen.append(self.inner.staging[block_id].clone())


@pytest.mark.parametrize("shows_pool", [False, True])
def test_a_connector_is_told_what_to_wait_for_and_peers_are_shown_what_is_there(
    shows_pool: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded, inner = use_recorded(monkeypatch), Inner()
    table = Table(inner)
    worker = VllmWorker(
        inner,  # type: ignore[arg-type]
        KVLayout(2, 2, 4, 8, "float32", 4),
        num_staging_blocks=NUM_STAGED,
        pool=None,
        table=table if shows_pool else None,  # type: ignore[arg-type]
        wake=threading.Event(),
        save_wait_s=0.0,
    )
    caches = {str(layer): torch.zeros(NUM_BLOCKS, 2, 8, 8) for layer in range(2)}
    worker.register(caches)
    with recorded.compute.on():
        for cache in caches.values():
            cache.fill_(7.0)
    worker.finish_step(StepOrders(PAIRS, [[b"k"]] * 3, {}, KVConnectorMetadata(step_id=1)))
    assert (inner.seen[0] == 7.0).all()
    assert all((seen == 7.0).all() for seen in table.seen)
    assert len(table.seen) == (3 if shows_pool else 0)
