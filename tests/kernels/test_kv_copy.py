"""Writing tokens and copying blocks as callers see them, element by element, and what is refused."""

from typing import Any

import pytest
import torch

from pdkv.kernels.kv_copy import copy_units, write_kv


def numbered_pool() -> torch.Tensor:
    return torch.arange(6 * 4 * 2 * 2 * 16 * 3, dtype=torch.float32).view(6, 4, 2, 2, 16, 3)


def test_write_kv_touches_its_slots_only() -> None:
    pool = numbered_pool()
    expected = pool.clone()
    k, v = -1 - torch.rand(5, 2, 3), -2 - torch.rand(5, 2, 3)
    slots = [16 * 2 + 5, -1, 0, 16 * 5 + 15, -16]
    for token, slot in enumerate(slots):
        if slot >= 0:
            for head in range(2):
                expected[slot // 16, 3, 0, head, slot % 16] = k[token, head]
                expected[slot // 16, 3, 1, head, slot % 16] = v[token, head]
    write_kv(pool, 3, k, v, torch.tensor(slots))
    assert torch.equal(pool, expected)


def test_write_kv_of_padding_alone_writes_nothing() -> None:
    pool = numbered_pool()
    write_kv(pool, 0, torch.ones(2, 2, 3), torch.ones(2, 2, 3), torch.tensor([-1, -1]))
    assert torch.equal(pool, numbered_pool())


@pytest.mark.parametrize("layers", [None, (0, 4), (1, 3)])
def test_blocks_travel_both_ways(layers: tuple[int, int] | None) -> None:
    pool, ids = numbered_pool(), torch.tensor([4, 0, 2])
    start, stop = layers or (0, 4)
    buffer = torch.zeros(3, stop - start, 2, 2, 16, 3)
    copy_units(pool, ids, buffer, layers, to_pool=False)
    for i, block in enumerate(ids.tolist()):
        assert torch.equal(buffer[i], pool[block, start:stop])
    target = torch.zeros_like(pool)
    copy_units(target, torch.tensor([1, 5, 3]), buffer, layers, to_pool=True)
    expected = torch.zeros_like(pool)
    expected[torch.tensor([1, 5, 3]), start:stop] = pool[ids, start:stop]
    assert torch.equal(target, expected)


def test_parts_of_blocks_travel_both_ways() -> None:
    """The second half of a block, one head of two, two layers of four."""
    pool, units = torch.rand(6, 4, 2, 2, 32, 3), torch.tensor([2 * 4 + 1, 2 * 0 + 1])
    buffer = torch.zeros(2, 2, 2, 1, 16, 3)
    copy_units(pool, units, buffer, (1, 3), (1, 2), to_pool=False)
    expected = pool[torch.tensor([4, 0]), 1:3, :, 1:2, 16:]
    assert torch.equal(buffer, expected)
    target = torch.zeros_like(pool)
    copy_units(target, units, buffer, (1, 3), (1, 2), to_pool=True)
    assert torch.equal(target[torch.tensor([4, 0]), 1:3, :, 1:2, 16:], expected)
    assert target.count_nonzero() == expected.count_nonzero()


def test_what_fp8_cannot_hold_is_saturated() -> None:
    pool = torch.zeros(1, 1, 2, 1, 16, 8).to(torch.float8_e4m3fn)
    k = torch.tensor([448.0, 449.0, -1e30, 17.0, 19.0, 2.0**-9, torch.inf, torch.nan]).view(1, 1, 8)  # steps of 2 at 17
    write_kv(pool, 0, k, 2 * k, torch.tensor([3]), (1.0, 2.0))
    expected = torch.tensor([448.0, 448.0, -448.0, 16.0, 20.0, 2.0**-9, torch.nan, torch.nan])
    for side in range(2):
        torch.testing.assert_close(pool[0, 0, side, 0, 3].float(), expected, equal_nan=True, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"slot_mapping": torch.zeros(2, dtype=torch.int32)}, "int64"),
        ({"slot_mapping": torch.zeros(3, dtype=torch.int64)}, "k and v must be"),
        ({"k": torch.zeros(2, 2, 3, dtype=torch.float64)}, "float64"),
        ({"layer": 4}, "layer 4"),
        ({"kv_pool": numbered_pool().transpose(0, 1)}, "contiguous"),
    ],
)
def test_write_kv_refuses_what_does_not_fit(values: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {
        "kv_pool": numbered_pool(),
        "layer": 0,
        "k": torch.zeros(2, 2, 3),
        "v": torch.zeros(2, 2, 3),
        "slot_mapping": torch.tensor([0, 1]),
    }
    with pytest.raises(ValueError, match=message):
        write_kv(**{**arguments, **values})


@pytest.mark.parametrize(
    ("buffer", "ids", "layers", "message"),
    [
        (torch.zeros(2, 4, 2, 2, 16, 3), torch.tensor([1]), None, "buffer must be"),
        (torch.zeros(1, 4, 2, 2, 16, 3), torch.tensor([1]), (1, 3), "buffer must be"),
        (torch.zeros(1, 4, 2, 2, 3, 16).transpose(4, 5), torch.tensor([1]), None, "contiguous"),
        (torch.zeros(1, 4, 2, 2, 16, 3), torch.tensor([1], dtype=torch.int32), None, "int64"),
        (torch.zeros(1, 1, 2, 2, 16, 3), torch.tensor([1]), (4, 5), "not a range"),
        (torch.zeros(1, 4, 2, 2, 5, 3), torch.tensor([1]), None, "buffer must be"),
        (torch.zeros(1, 4, 2, 2, 16, 3).half(), torch.tensor([1]), None, "float16"),
    ],
)
def test_copies_refuse_what_does_not_fit(
    buffer: torch.Tensor, ids: torch.Tensor, layers: tuple[int, int] | None, message: str
) -> None:
    for to_pool in (False, True):
        with pytest.raises(ValueError, match=message):
            copy_units(numbered_pool(), ids, buffer, layers, to_pool=to_pool)
