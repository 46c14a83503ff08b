"""The shared_memory connector between engines of several ranks: each rank finds its heads wherever they are (F20)."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from push_rig import NUM_LAYERS, PullEngine, full_kv, make_layout

from pdkv.connectors.base import TransferKey
from pdkv.connectors.shared_memory.connector import SharedMemoryConnector
from pdkv.connectors.transfer.planning import first_seen_block
from pdkv.wire.kv import KVGroup

torch.set_num_threads(1)

Engines = Callable[..., PullEngine]


@pytest.fixture
def make_engine(keep: Callable[..., Any]) -> Engines:
    def make(
        name: str, tp: int = 1, block_size: int = 16, groups: tuple[KVGroup, ...] = (), **arguments: Any
    ) -> PullEngine:
        layout = make_layout(tp, block_size, groups=groups)
        return keep(PullEngine(SharedMemoryConnector, name, tp=tp, layout=layout, **arguments))

    return make


@pytest.mark.parametrize("sizes", [(16, 16), (16, 32), (32, 16), (32, 32)], ids=str)
@pytest.mark.parametrize("tp", [(1, 1), (1, 2), (2, 1), (2, 4), (4, 1), (2, 2), (1, 8), (8, 2)], ids=str)
@pytest.mark.parametrize("start", [0, 32])
def test_every_rank_loads_its_heads_and_nothing_else_changes(
    make_engine: Engines, tp: tuple[int, int], sizes: tuple[int, int], start: int
) -> None:
    prefill, decode = make_engine("p", tp[0], sizes[0]), make_engine("d", tp[1], sizes[1])
    decode.meet(prefill.card)
    kv = full_kv(150, prefill.layout)
    source, target = [i * 7 % 64 for i in range(3, 13)], [i * 11 % 64 for i in range(5, 15)]
    prefill.fill(source, kv)
    before = [pool.clone() for pool in decode.pools]
    assert decode.load(prefill.hand_off("t", source, 150), target, start) == 150 - start
    outcome = decode.outcome("receiving", TransferKey("t", 1))
    assert outcome.code == ""
    assert outcome.num_bytes > 0
    decode.check(target, kv, start)
    untouched = [b for b in range(64) if b not in target[start // sizes[1] :]]
    for pool, old in zip(decode.pools, before, strict=True):
        assert torch.equal(pool[untouched], old[untouched])
    assert not decode.unread


@pytest.mark.parametrize("tp", [(1, 1), (2, 1), (1, 2), (2, 2), (2, 4), (8, 2)], ids=str)
@pytest.mark.parametrize("start", [0, 32])
def test_of_a_window_every_rank_loads_its_heads_of_the_last_blocks(
    make_engine: Engines, tp: tuple[int, int], start: int
) -> None:
    """Two groups, one with a window of 40 tokens: nothing before it is written."""
    groups = (KVGroup(tuple(range(NUM_LAYERS))), KVGroup(tuple(range(NUM_LAYERS, 2 * NUM_LAYERS)), 40))
    prefill, decode = (make_engine(name, ranks, groups=groups) for name, ranks in zip("pd", tp, strict=True))
    decode.meet(prefill.card)
    kv = [full_kv(150, prefill.layout), full_kv(150, prefill.layout) + 1000]
    source = [[i * 7 % 64 for i in range(3, 13)], [i * 7 % 64 for i in range(20, 30)]]
    target = [[i * 11 % 64 for i in range(5, 15)], [i * 11 % 64 for i in range(30, 40)]]
    for block_ids, values in zip(source, kv, strict=True):
        prefill.fill(block_ids, values)
    before = [pool.clone() for pool in decode.pools]
    first = first_seen_block(40, 150, 16)
    held, wanted = ([full, [-1] * first + window[first:]] for full, window in (source, target))
    handoff = prefill.hand_off("t", held, 150)
    assert decode.load(handoff, wanted, start) == 150 - start
    assert decode.outcome("receiving", TransferKey("t", 1)).code == ""
    decode.check(target[0], kv[0], start)
    decode.check(target[1], kv[1], first * 16)
    loaded = {*target[0][start // 16 :], *target[1][first:]}
    for pool, old in zip(decode.pools, before, strict=True):
        untouched = [b for b in range(64) if b not in loaded]
        assert torch.equal(pool[untouched], old[untouched])


@pytest.mark.parametrize("tp", [(2, 2), (2, 4), (4, 1)], ids=str)
def test_the_first_ranks_generations_speak_for_all(make_engine: Engines, tp: tuple[int, int]) -> None:
    """F4: what was reused is refused on every rank."""
    prefill, decode = make_engine("p", tp[0]), make_engine("d", tp[1])
    decode.meet(prefill.card)
    handoff = prefill.hand_off("t", [9, 3, 1], 40)
    prefill.table.reuse(3)
    decode.load(handoff, [0, 1, 2])
    assert decode.outcome("receiving", TransferKey("t", 1)).code == "stale_generation"
    decode.load(prefill.hand_off("u", [9, 3, 1], 40), [0, 1, 2])
    assert decode.outcome("receiving", TransferKey("u", 1)).code == ""


@pytest.mark.parametrize("tp", [(2, 2), (1, 4), (4, 2)], ids=str)
def test_a_cancel_is_answered_by_every_rank_once(make_engine: Engines, tp: tuple[int, int]) -> None:
    prefill, decode = make_engine("p", tp[0]), make_engine("d", tp[1])
    decode.meet(prefill.card)
    decode.load(prefill.hand_off("t", [9, 3, 1], 40), [0, 1, 2])
    decode.cancel(TransferKey("t", 1), "receive")
    assert decode.outcome("receiving", TransferKey("t", 1)).code in ("", "transfer_cancelled")
    assert not decode.unread


def test_a_peer_that_left_fails_on_every_rank(make_engine: Engines) -> None:
    """F5."""
    prefill, decode = make_engine("p", 2), make_engine("d", 2)
    decode.meet(prefill.card)
    handoff = prefill.hand_off("t", [9, 3, 1], 40)
    assert decode.scheduler.source_block_size("p", "1") == 16
    decode.meet(make_engine("p", 2, epoch="2").card)
    assert decode.load(handoff, [0, 1, 2]) == 0
    for worker in decode.workers:
        assert worker.num_open_jobs == 0
