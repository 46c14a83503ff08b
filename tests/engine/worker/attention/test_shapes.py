"""Rounded sizes hold what they round, waste little, and are few."""

from pdkv.engine.worker.attention.shapes import round_rows


def test_rows() -> None:
    sizes = [round_rows(count) for count in range(2049)]
    assert all(count <= size <= max(count + 7, count * 1.25) for count, size in enumerate(sizes))
    assert len(set(sizes)) < 120
    assert sizes[512] == 512
    assert sizes[519] == 528
