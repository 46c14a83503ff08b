"""Which columns of a 4-bit layer follow one another in a packed weight, so that the kernel finds their groups."""

from collections.abc import Sequence
from math import gcd
from typing import NamedTuple

import torch

from pdkv.kernels.int4_weight import CHUNK, PLANE, fits

_MOST_PADDED = 2
"""Times the columns: from there on packed weights are no smaller than FP8's."""


class PackedColumns(NamedTuple):
    """Columns in the order of their groups, each group padded to whole planes unless the groups are regular."""

    order: torch.Tensor | None  # (packed,): of each the column it is, for padding 0; None: as they come
    is_padding: torch.Tensor | None  # (packed,) bool; None: there is none
    groups: torch.Tensor  # (packed groups,): the layer's group that each is, or is a part of
    group_size: int  # packed columns of a packed group; the last one may have fewer

    def padded_groups(self) -> torch.Tensor:
        """The group of each padding column."""
        assert self.is_padding is not None
        return self.groups[self.is_padding.nonzero().flatten() // self.group_size]


def pack_columns(groups: torch.Tensor) -> PackedColumns | None:
    """Lay out columns by `groups` (columns,) int64, the group of each column.

    Groups that ranks have cut are divided into smaller ones. In a checkpoint that orders inputs by activation, a group
    may contain any columns, and a rank any number of them.

    Returns:
        None if the groups are too small for that.
    """
    is_sorted = bool((groups[1:] >= groups[:-1]).all())
    order = None if is_sorted else groups.argsort(stable=True)
    present, counts = torch.unique_consecutive(groups if order is None else groups[order], return_counts=True)
    size = _common_size(counts.tolist())
    if size is not None:
        return PackedColumns(order, None, _repeated(present, counts, size), size)
    padded = -(-counts // PLANE) * PLANE
    total = int(padded.sum())
    if total > _MOST_PADDED * len(groups):
        return None
    gaps = (padded.cumsum(0) - padded) - (counts.cumsum(0) - counts)
    at = torch.arange(len(groups), device=groups.device) + gaps.repeat_interleave(counts)
    packed = torch.zeros(total, dtype=torch.int64, device=groups.device)
    packed[at] = torch.arange(len(groups), device=groups.device) if order is None else order
    is_padding = torch.ones(total, dtype=torch.bool, device=groups.device)
    is_padding[at] = False
    size = _common_size(padded.tolist())
    assert size is not None, "whole planes fit"
    return PackedColumns(packed, is_padding, _repeated(present, padded, size), size)


def _common_size(counts: Sequence[int]) -> int | None:
    """The largest size of equal groups, the last one maybe shorter, of which groups of so many columns are made."""
    size = gcd(*counts[:-1]) or sum(counts)
    return next((each for each in (size, gcd(size, CHUNK)) if fits(each, sum(counts))), None)


def _repeated(groups: torch.Tensor, counts: torch.Tensor, size: int) -> torch.Tensor:
    return groups.repeat_interleave(-(-counts // size))
