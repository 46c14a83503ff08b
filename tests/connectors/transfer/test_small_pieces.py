"""Which pieces are gathered: small ones, if there are enough of them."""

from pdkv.connectors.transfer.planning import as_ids
from pdkv.connectors.transfer.small_pieces import Gate


def test_small_pieces_are_gathered_if_there_are_enough_of_them() -> None:
    """F18."""
    gate = Gate(4096, 3)
    sizes = as_ids([4096, 100, 8192, 4095, 0])
    assert gate.choose(sizes).tolist() == [False, True, False, True, True]
    assert gate.choose(sizes[:4]).tolist() == [False] * 4
    assert gate.choose(as_ids([])).tolist() == []


def test_a_gate_of_nothing_gathers_nothing() -> None:
    assert not Gate(0, 1).choose(as_ids([0, 1, 2])).any()
