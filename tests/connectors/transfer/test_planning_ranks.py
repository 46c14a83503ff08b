"""Which rank exchanges which heads and layers with which: worked examples of the field, and their traps (F20)."""

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdkv.connectors.base import ConnectorConfig
from pdkv.connectors.peer.cards import check_compatible
from pdkv.connectors.transfer.planning import HeadPart, blocks_of, check_ranks, rank_heads, reader_parts, sender_parts
from pdkv.errors import IncompatiblePeers
from pdkv.wire.kv import EngineCard, KVLayout

# role, rank, kv_rank, kv_group_rank, kv_world_size, global rank, port offset: prefill TP 2, decode TP 4, one of each
XPYD_TABLE = [
    ("P", 0, 0, 0, 3, 0, 1),
    ("P", 1, 0, 0, 3, 1, 3),
    ("D", 0, 1, 1, 3, 2, 1),
    ("D", 1, 1, 2, 3, 3, 1),
    ("D", 2, 1, 1, 3, 4, 3),
    ("D", 3, 1, 2, 3, 5, 3),
]


def test_the_groups_of_the_published_rank_table() -> None:
    """{P0, D0, D1} and {P1, D2, D3}; without brackets in 2 * (rank // 2) + 1 there would be four groups."""
    groups: dict[int, set[str]] = {}
    for role, rank, _, _, _, _, port_offset in XPYD_TABLE:
        groups.setdefault(port_offset, set()).add(f"{role}{rank}")
    planned = {
        2 * rank + 1: {f"P{rank}"} | {f"D{part.peer_rank}" for part in sender_parts(rank, 2, 4, 8)} for rank in (0, 1)
    }
    assert planned == groups == {1: {"P0", "D0", "D1"}, 3: {"P1", "D2", "D3"}}


def test_a_ranks_place_in_its_group_is_its_place_among_the_owners_receivers() -> None:
    for role, rank, _, group_rank, world_size, global_rank, port_offset in XPYD_TABLE:
        if role == "P":
            assert (group_rank, port_offset, global_rank) == (0, 2 * rank + 1, rank)
            assert world_size == 1 + len(sender_parts(rank, 2, 4, 8))
            continue
        (part,) = reader_parts(rank, 4, 2, 8)
        receivers = [p.peer_rank for p in sender_parts(part.peer_rank, 2, 4, 8)]
        assert (group_rank, port_offset, global_rank) == (
            1 + receivers.index(rank), 2 * part.peer_rank + 1, 2 + rank,
        )  # fmt: skip


@pytest.mark.parametrize("rank", range(4))
def test_eight_heads_from_two_ranks_to_four(rank: int) -> None:
    assert list(reader_parts(rank, 4, 2, 8)) == [HeadPart(rank // 2, 0, 2 * (rank % 2), 2)]


def test_with_fewer_readers_than_owners_one_gathers_from_several() -> None:
    """A ratio rounded down would be 0: the inverse direction has a formula of its own."""
    assert list(reader_parts(0, 1, 4, 8)) == [HeadPart(owner, 2 * owner, 0, 2) for owner in range(4)]
    assert list(reader_parts(1, 2, 4, 8)) == [HeadPart(2, 0, 0, 2), HeadPart(3, 2, 0, 2)]
    assert list(sender_parts(3, 4, 2, 8)) == [HeadPart(1, 0, 2, 2)]


def test_slots_of_a_rank_local_cache_give_the_heads_of_that_rank() -> None:
    """Slots [0, 5] of a (10, 4, 8) cache give (2, 2, 8); a published sample takes one head, of the wrong slots."""
    cache = np.arange(10 * 4 * 8).reshape(10, 4, 8)
    (part,) = reader_parts(1, 4, 2, 8)
    found = cache[[0, 5], part.peer_first : part.peer_first + part.num_heads]
    assert found.shape == (2, 2, 8)
    assert (found == cache[[0, 5]][:, 2:4]).all()
    assert found.shape != (2, 1, 8)


def test_replicated_heads_are_read_from_one_owner_and_sent_once() -> None:
    assert [rank_heads(rank, 4, 2).start for rank in range(4)] == [0, 0, 1, 1]
    assert list(reader_parts(0, 1, 4, 2)) == [HeadPart(0, 0, 0, 1), HeadPart(2, 1, 0, 1)]
    assert list(sender_parts(1, 4, 1, 2)) == []  # its neighbour gives the head that both hold
    assert [reader_parts(rank, 8, 4, 2)[0].peer_rank for rank in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]


@given(
    tp=st.sampled_from([1, 2, 4, 8]), peer_tp=st.sampled_from([1, 2, 4, 8]), num_heads=st.sampled_from([1, 2, 4, 8, 16])
)
def test_every_head_of_every_reader_comes_once_and_from_who_holds_it(tp: int, peer_tp: int, num_heads: int) -> None:
    for rank in range(tp):
        got = []
        for part in reader_parts(rank, tp, peer_tp, num_heads):
            own, theirs = rank_heads(rank, tp, num_heads), rank_heads(part.peer_rank, peer_tp, num_heads)
            for i in range(part.num_heads):
                assert own[part.first + i] == theirs[part.peer_first + i]
                got.append(own[part.first + i])
            back = HeadPart(rank, part.peer_first, part.first, part.num_heads)
            assert back in sender_parts(part.peer_rank, peer_tp, tp, num_heads)
        assert got == list(rank_heads(rank, tp, num_heads))
    sent = sum(p.num_heads for rank in range(peer_tp) for p in sender_parts(rank, peer_tp, tp, num_heads))
    assert sent == sum(len(rank_heads(rank, tp, num_heads)) for rank in range(tp))


@pytest.mark.parametrize(
    ("tp", "peer_tp", "num_heads", "text"),
    [
        (2, 3, 6, "must be multiples of one another: 2 here, 3 there"),
        (3, 3, 8, "8 KV heads cannot be divided among 3"),
        (1, 0, 8, "0 there"),
    ],
)
def test_what_cannot_be_resharded_is_refused_with_both_values(tp: int, peer_tp: int, num_heads: int, text: str) -> None:
    with pytest.raises(IncompatiblePeers, match=text):
        check_ranks(tp, peer_tp, num_heads)


def test_published_sizes() -> None:
    """Bytes by KV heads of this rank, not by query heads or by all ranks' heads."""
    layout = KVLayout(num_layers=1, num_kv_heads=32, head_size=128, block_size=16, dtype="bfloat16", dtype_bytes=2)
    assert layout.block_bytes == 2 * 16 * 32 * 128 * 2 == 262_144
    whole = KVLayout(32, 32, 128, 16, "bfloat16", 2)
    assert whole.block_bytes == 8 * 1024 * 1024
    assert 729 * whole.block_bytes / 2**30 == pytest.approx(5.695, abs=1e-3)
    llama = KVLayout(32, 8, 128, 16, "bfloat16", 2)
    assert llama.block_bytes // 16 == 128 * 1024
    assert 10_000 * llama.block_bytes // 16 == pytest.approx(1.31e9, rel=1e-2)
    assert [len(rank_heads(0, tp, 8)) * 128 for tp in (1, 2)] == [1024, 512]  # elements of K per token and layer


def test_blocks_of_a_token_range() -> None:
    assert len(blocks_of(0, 17, 16)) == 2
    assert len(blocks_of(0, 17, 16)) - len(blocks_of(0, 16, 16)) == 1
    assert blocks_of(32, 70, 32) == range(1, 3)
    assert blocks_of(32, 32, 16) == range(0)


LAYOUT = KVLayout(2, 4, 8, 16, "float32", 4, total_kv_heads=8)


def _card(tp: int, layout: KVLayout, **changes: object) -> EngineCard:
    values: dict[str, object] = {
        "engine": "p", "epoch": "1", "role": "any", "pid": 1, "connector": "c", "kind": "push",
        "content_addressed": False, "orders": [], "model": "m", "layout": layout, "hash_block_size": 16,
        "num_blocks": 8, "max_model_len": 64, "max_num_seqs": 4, "tp": tp,
    }  # fmt: skip
    return EngineCard(**{**values, **changes})  # type: ignore[arg-type]


def _config(tp: int = 2, layout: KVLayout = LAYOUT) -> ConnectorConfig:
    return ConnectorConfig(engine="d", epoch="1", layout=layout, num_blocks=8, model="m", tp=tp)


def in_fp8(*kv_scales: tuple[float, float]) -> KVLayout:
    return msgspec.structs.replace(LAYOUT, dtype="float8_e4m3fn", dtype_bytes=1, kv_scales=kv_scales)


@pytest.mark.parametrize("other", [(), ((1.0, 0.5), (2.0, 3.0))], ids=["none", "another"])
def test_peers_of_other_scales_are_refused(other: tuple[tuple[float, float], ...]) -> None:
    """The same bytes stand for other numbers there."""
    mine = in_fp8((1.0, 0.5), (2.0, 2.0))
    check_compatible(_config(layout=mine), _card(2, in_fp8((1.0, 0.5), (2.0, 2.0))))
    with pytest.raises(IncompatiblePeers, match=r"KV layout differs: .*kv_scales=.* in engine d, .* in engine p"):
        check_compatible(_config(layout=mine), _card(2, in_fp8(*other)))


@pytest.mark.parametrize(("tp", "num_kv_heads", "block_size"), [(1, 8, 16), (2, 4, 32), (4, 2, 16), (16, 1, 48)])
def test_peers_of_other_ranks_and_blocks_are_compatible(tp: int, num_kv_heads: int, block_size: int) -> None:
    check_compatible(_config(), _card(tp, KVLayout(2, num_kv_heads, 8, block_size, "float32", 4, 8)))


@pytest.mark.parametrize(
    ("card", "text"),
    [
        (_card(2, KVLayout(2, 3, 8, 16, "float32", 4, 6)), "KV heads differs: 8 in engine d, 6 in engine p"),
        (
            _card(3, LAYOUT),
            "engine d and engine p: numbers of tensor parallel ranks must be multiples of one another: 2 here, 3 there",
        ),
        (_card(4, LAYOUT), "engine p says 4 KV heads a rank, but 4 ranks have 2"),
        (_card(2, KVLayout(2, 4, 8, 24, "float32", 4, 8)), "blocks of 24 tokens"),
        (_card(2, in_fp8()), "dtype=float32,k=rotated' in engine d, .*dtype=float8_e4m3fn,k=rotated' in engine p"),
        (_card(2, LAYOUT, model="other"), "model differs: 'm' in engine d, 'other' in engine p"),
        (_card(2, LAYOUT, pp=2), "pipeline parallel stages differs: 1 in engine d, 2 in engine p"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_cards_that_do_not_fit_are_refused_with_both_values(card: EngineCard, text: str) -> None:
    with pytest.raises(IncompatiblePeers, match=text):
        check_compatible(_config(), card)
