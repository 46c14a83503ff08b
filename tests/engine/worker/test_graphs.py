"""Which steps are padded and captured, by rules; how, with a tape instead of a device: cases_graphs.py."""

import pytest
import torch

from pdkv.engine.worker.graphs import decode_sizes, make_recorder


@pytest.mark.parametrize(
    ("max_num_seqs", "expected"),
    [
        (1, [1]),
        (3, [1, 2, 3]),
        (8, [1, 2, 4, 8]),
        (20, [1, 2, 4, 8, 16, 20]),
        (512, [1, 2, 4, *range(8, 513, 8)]),
        (4096, [1, 2, 4, *range(8, 513, 8)]),
    ],
)
def test_sizes_reach_to_the_largest_batch(max_num_seqs: int, expected: list[int]) -> None:
    assert list(decode_sizes(max_num_seqs)) == expected


def test_a_cpu_captures_nothing() -> None:
    assert make_recorder(torch.device("cpu"), enforce_eager=False, num_ranks=1) is None


@pytest.mark.parametrize(
    ("enforce_eager", "num_ranks", "why"), [(True, 1, "enforce_eager"), (False, 2, "no deadline in a graph")]
)
def test_what_is_not_captured_is_said(
    enforce_eager: bool, num_ranks: int, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    assert make_recorder(torch.device("cuda"), enforce_eager=enforce_eager, num_ranks=num_ranks) is None
    assert why in caplog.text
