"""What a pull's piece says of itself: blocks and units of both sides, and the heads as each rank counts them."""

import msgspec
import pytest
from scripted_engine import make_card

from pdkv.connectors.base import TransferKey
from pdkv.connectors.peer.pull_scheduler import BlockLoad
from pdkv.connectors.peer.pull_worker import PullPiece
from pdkv.connectors.step_done import ON_HOST
from pdkv.connectors.transfer.planning import HeadPart, as_ids
from pdkv.connectors.transfer.units import UnitPart
from pdkv.errors import KVNotFound
from pdkv.wire.kv import KVLayout

OWN = KVLayout(num_layers=3, num_kv_heads=4, head_size=8, block_size=16, dtype="float32", dtype_bytes=4)
PEER = msgspec.structs.replace(OWN, num_kv_heads=2, total_kv_heads=4, block_size=32)


def make_piece(start: int, stop: int, source: list[int], block_ids: list[int], unit: int = 32) -> PullPiece:
    load = BlockLoad(
        TransferKey("t", 0), "p", "e0", start, stop, unit, as_ids(source).tobytes(), bytes(8 * len(source)), block_ids
    )
    return PullPiece(load, make_card("p", "prefill", layout=PEER, tp=2), HeadPart(1, 2, 0, 2), ON_HOST)


def test_units_of_both_sides_name_the_same_tokens_whatever_the_block_sizes() -> None:
    piece = make_piece(48, 90, source=[7, 3], block_ids=[5, 9, 2])  # the first source block holds token 32
    assert piece.blocks.tolist() == [7, 3]
    assert piece.source_units().tolist() == [2 * 7 + 1, 2 * 3, 2 * 3 + 1]
    assert piece.own_units(OWN).tolist() == [5, 9, 2]


def test_sources_that_are_units_already_stay_what_they_are() -> None:
    piece = make_piece(48, 80, source=[15, 6], block_ids=[5, 9], unit=16)
    assert piece.blocks.tolist() == [7, 3]
    assert piece.source_units().tolist() == [15, 6]


def test_a_head_has_its_number_on_each_side() -> None:
    piece = make_piece(0, 32, source=[7], block_ids=[5, 9])
    assert piece.own_part(OWN) == UnitPart(2, 4, 0, 3)
    assert piece.peer_part(OWN) == UnitPart(0, 2, 0, 3)


def test_a_drafter_s_layers_are_read_where_both_have_the_same_one() -> None:
    """They have no digest: an engine with another drafter could not compare it."""
    piece = make_piece(0, 32, source=[7], block_ids=[5, 9])
    mine = msgspec.structs.replace(OWN, num_layers=5, drafter="a", drafter_layers=2)
    assert mine.identity == OWN.identity
    assert piece.own_part(mine) == piece.digested_part(mine) == UnitPart(2, 4, 0, 3)
    for name, layers, stop in (("a", 2, 5), ("b", 2, 3), ("a", 1, 3)):  # the last one lies about its blocks
        peer = msgspec.structs.replace(PEER, num_layers=3 + layers, drafter=name, drafter_layers=layers)
        other = piece._replace(card=make_card("p", "prefill", layout=peer, tp=2))
        assert other.own_part(mine) == UnitPart(2, 4, 0, stop)
        assert other.own_part(OWN) == other.digested_part(mine) == UnitPart(2, 4, 0, 3)


@pytest.mark.parametrize(("start", "stop", "source"), [(0, 33, [7]), (8, 32, [7])])
def test_tokens_that_the_blocks_do_not_hold_are_not_found(start: int, stop: int, source: list[int]) -> None:
    with pytest.raises(KVNotFound):
        make_piece(start, stop, source, block_ids=[5, 9]).source_units()
