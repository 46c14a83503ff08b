"""Which steps are padded and captured, by rules; how, with a tape instead of a device: cases_graphs.py."""

import pytest
import torch

from pdkv.engine.worker.graphs import decode_sizes, make_recorder, prompt_sizes


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


@pytest.mark.parametrize("max_num_seqs", [1, 16, 256, 4096])
def test_sizes_with_prompts_are_few_and_have_room(max_num_seqs: int) -> None:
    """Up to 2,048 tokens and the step's own limit; each of them without decodes, and the large ones with all."""
    sizes = prompt_sizes(8192, max_num_seqs)
    assert len(sizes) <= 56
    assert list(sizes) == sorted(set(sizes))
    assert {size.tokens for size in sizes if not size.decodes} == {size.tokens for size in sizes}
    assert max(sizes).tokens == 2048
    assert max(sizes).decodes == min(max_num_seqs, 512)
    for size in sizes:
        assert 0 < size.prompts <= 16
        assert size.rows == size.seqs <= size.tokens
    assert max(prompt_sizes(500, max_num_seqs)).tokens == 448
    assert prompt_sizes(0, max_num_seqs) == ()


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
