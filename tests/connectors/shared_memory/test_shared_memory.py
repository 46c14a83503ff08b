"""The shared_memory connector between engines: the right bytes at the right place, or a refusal."""

from typing import Any

import pytest
import torch
from shared_memory_rig import Engines, Gate, chain, make_layout, view

from pdkv.connectors.base import ASK_AGAIN, NO_MATCH, FinishDecision
from pdkv.connectors.transfer.block_runs import pack_blocks
from pdkv.wire.types import MAX_BLOB_BYTES

torch.set_num_threads(1)


@pytest.mark.parametrize(("source_size", "own_size"), [(16, 16), (32, 32), (16, 32), (32, 16), (48, 16), (32, 48)])
@pytest.mark.parametrize(("num_hit_blocks", "num_tokens"), [(0, 1), (0, 96), (0, 150), (1, 150), (2, 97)])
def test_handed_off_tokens_arrive_and_nothing_else_changes(
    make_engine: Engines, source_size: int, own_size: int, num_hit_blocks: int, num_tokens: int
) -> None:
    if (start := num_hit_blocks * own_size) >= num_tokens:
        pytest.skip("nothing to load")
    prefill = make_engine("p", layout=make_layout(source_size))
    decode = make_engine("d", layout=make_layout(own_size))
    decode.meet(prefill.card)
    source = [i * 7 % 48 for i in range(3, 3 + -(-num_tokens // source_size))]
    own = [i * 11 % 48 for i in range(5, 5 + -(-num_tokens // own_size))]
    before, sent = decode.kv.clone(), prefill.kv.clone()
    request = view("t", kv="await_peer", num_tokens=num_tokens + 1, handoff=prefill.offer(source, num_tokens))

    assert decode.start(request, own, start) == num_tokens - start
    outcome = decode.loaded(request)
    assert outcome.code == ""
    assert outcome.num_bytes > 0
    assert torch.equal(decode.tokens(own, start, num_tokens), prefill.tokens(source, start, num_tokens))
    untouched = [b for b in range(48) if b not in own[num_hit_blocks:]]
    assert torch.equal(decode.kv[untouched], before[untouched])
    assert torch.equal(prefill.kv, sent)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_pools_of_other_dtypes(make_engine: Engines, dtype: torch.dtype) -> None:
    layout = make_layout(dtype=str(dtype).removeprefix("torch."), dtype_bytes=dtype.itemsize)
    prefill, decode = make_engine("p", layout=layout), make_engine("d", layout=layout)
    decode.meet(prefill.card)
    request = view("t", kv="await_peer", num_tokens=41, handoff=prefill.offer([9, 3, 1], 40))
    decode.start(request, [0, 1, 2], 0)
    assert decode.loaded(request).num_bytes == 3 * layout.block_bytes
    assert decode.kv.dtype == dtype
    expected = prefill.kv.view(torch.uint8)[[9, 3]]
    assert expected.any()
    assert torch.equal(decode.kv.view(torch.uint8)[[0, 1]], expected)


@pytest.mark.parametrize(("source_size", "own_size"), [(16, 16), (32, 16), (16, 32), (32, 32)])
def test_content_is_found_by_key_and_loaded(make_engine: Engines, source_size: int, own_size: int) -> None:
    holder = make_engine("holder", layout=make_layout(source_size))
    engine = make_engine("engine", layout=make_layout(own_size))
    engine.meet(holder.card)
    keys, source = chain(12), [i * 5 % 48 for i in range(12 * 16 // source_size)]
    holder.publish(keys, source)
    request = view("t", kv="handoff", num_tokens=190, block_keys=chain(11))
    own = [i * 11 % 48 for i in range(12)]
    expected_stop = 189 // own_size * own_size
    assert engine.start(request, own, 32) == expected_stop - 32
    assert engine.loaded(request).code == ""
    assert torch.equal(engine.tokens(own, 32, expected_stop), holder.tokens(source, 32, expected_stop))


def test_the_longest_chain_wins_and_only_whole_blocks_count(make_engine: Engines) -> None:
    short, long = make_engine("short"), make_engine("long")
    engine = make_engine("engine", layout=make_layout(32))
    engine.meet(short.card, long.card)
    short.publish(chain(6), range(6))
    long.publish(chain(9), range(9))
    request = view("t", kv="local", num_tokens=400, block_keys=chain(24))
    assert engine.start(request, range(12), 0) == 8 * 16
    assert engine.loaded(request).code == ""
    assert torch.equal(engine.tokens(range(4), 0, 128), long.tokens(range(8), 0, 128))


def test_short_finds_are_not_worth_it(make_engine: Engines) -> None:
    holder, engine = make_engine("holder"), make_engine("engine", min_hit_tokens="48")
    engine.meet(holder.card)
    holder.publish(chain(4), range(4))
    request = view("t", kv="local", num_tokens=400, block_keys=chain(24))
    assert engine.scheduler.get_num_new_matched_tokens(request, 32) == NO_MATCH
    assert engine.scheduler.get_num_new_matched_tokens(request, 16).num_tokens == 48


def test_content_lookup_can_be_switched_off(make_engine: Engines) -> None:
    holder, engine = make_engine("holder"), make_engine("engine", content_lookup="false")
    engine.meet(holder.card)
    holder.publish(chain(8), range(8))
    request = view("t", kv="local", num_tokens=400, block_keys=chain(24))
    assert engine.scheduler.get_num_new_matched_tokens(request, 0) == NO_MATCH


def test_what_decode_generated_is_found_by_the_next_turn(make_engine: Engines) -> None:
    """Roles are not fixed: decode's pool serves a prefill engine, and that one's a third."""
    decode, prefill, third = make_engine("d"), make_engine("p"), make_engine("x")
    decode.publish(chain(6), [40, 3, 9, 10, 11, 2])
    prefill.meet(decode.card, third.card)
    turn = view("turn-2", kv="handoff", num_tokens=120, block_keys=chain(7))
    assert prefill.start(turn, range(8), 0) == 96
    assert prefill.loaded(turn).code == ""
    prefill.publish(chain(6), range(6))
    third.meet(prefill.card)
    again = view("turn-3", kv="local", num_tokens=120, block_keys=chain(7))
    assert third.start(again, range(20, 28), 0) == 96
    assert third.loaded(again).code == ""
    assert torch.equal(third.tokens(range(20, 26), 0, 96), decode.tokens([40, 3, 9, 10, 11, 2], 0, 96))


def test_a_read_after_reuse_is_refused(make_engine: Engines) -> None:
    prefill, decode = make_engine("p"), make_engine("d")
    decode.meet(prefill.card)
    request = view("t", kv="await_peer", num_tokens=41, handoff=prefill.offer([9, 3, 1], 40))
    before = decode.kv.clone()
    prefill.table.reuse(1)  # the partial tail
    decode.start(request, [0, 1, 2], 0)
    assert decode.loaded(request).code == "stale_generation"
    assert torch.equal(decode.kv, before)


def test_reuse_during_the_copy_is_refused(make_engine: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    prefill, decode = make_engine("p"), make_engine("d")
    decode.meet(prefill.card)
    prefill.publish(chain(8), range(8))
    gate = Gate(monkeypatch)
    request = view("t", kv="local", num_tokens=140, block_keys=chain(8))
    assert decode.start(request, range(9), 0) == 128
    gate.wait()
    prefill.table.reuse(5)
    gate.opened.set()
    assert decode.loaded(request).code == "stale_generation"


def test_a_block_outside_the_wanted_range_does_not_matter(make_engine: Engines) -> None:
    prefill, decode = make_engine("p"), make_engine("d")
    decode.meet(prefill.card)
    request = view("t", kv="await_peer", num_tokens=41, handoff=prefill.offer([9, 3, 1], 40))
    prefill.table.reuse(9)
    decode.start(request, [0, 1, 2], 16)
    assert decode.loaded(request).code == ""


def test_without_a_hand_off_the_answer_is_not_known_yet(make_engine: Engines) -> None:
    scheduler = make_engine("d").scheduler
    assert scheduler.get_num_new_matched_tokens(view("t", kv="await_peer", num_tokens=41), 0) == ASK_AGAIN
    never = view("t", kv="await_peer", num_tokens=41, kv_ready=False)
    assert scheduler.get_num_new_matched_tokens(never, 0) == NO_MATCH


@pytest.mark.parametrize(
    "changes",
    [
        {"engine": "unknown"},
        {"epoch": "0"},
        {"payload": b""},
        {"payload": b"\xc1"},
        {"payload": pack_blocks([1], [0])},
        {"payload": pack_blocks([9, 1, 2], [0, 0, 0])[:-1]},
    ],
    ids=repr,
)
def test_unusable_hand_offs_do_not_match(make_engine: Engines, changes: dict[str, Any]) -> None:
    prefill, decode = make_engine("p"), make_engine("d")
    decode.meet(prefill.card)
    request = view("t", kv="await_peer", num_tokens=41, handoff=prefill.offer([9, 3, 1], 40, **changes))
    assert decode.scheduler.get_num_new_matched_tokens(request, 0) == NO_MATCH


def test_blocks_outside_the_pool_are_not_read(make_engine: Engines) -> None:
    prefill, decode = make_engine("p"), make_engine("d")
    decode.meet(prefill.card)
    handoff = prefill.offer([9, 3, 1], 40, payload=pack_blocks([9, 3, 48], [0, 0, 0]))
    request = view("t", kv="await_peer", num_tokens=41, handoff=handoff)
    decode.start(request, [0, 1, 2], 0)
    assert decode.loaded(request).code == "kv_not_found"


def test_a_payload_is_short_for_adjacent_blocks_and_bounded_for_scattered_ones(make_engine: Engines) -> None:
    assert len(pack_blocks(range(4000), [7] * 4000)) < 40
    engine = make_engine("p")
    request = view("t", kv="handoff", num_tokens=10)
    finished = engine.scheduler.request_finished(request, [[0, 2] * (4 * MAX_BLOB_BYTES)])
    assert finished == FinishDecision(hold_blocks=False, payload=b"")


def test_a_request_that_is_not_handed_off_keeps_nothing(make_engine: Engines) -> None:
    assert make_engine("p").scheduler.request_finished(view("t", kv="local", num_tokens=10), [[1]]) == FinishDecision(
        hold_blocks=False
    )


def test_an_allocation_without_a_source_fails_with_a_reason(make_engine: Engines) -> None:
    engine = make_engine("d")
    request = view("t", kv="local", num_tokens=100)
    engine.scheduler.update_state_after_alloc(request, [range(7)], 64)
    engine.scheduler.update_state_after_alloc(request, [range(7)], 64)  # idempotent: one load, one answer
    engine.step()
    assert engine.loaded(request).code == "kv_not_found"
    engine.step()
    assert not engine.worker.get_finished()
