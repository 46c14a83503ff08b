"""What tells a drafter's KV of a token from that of others, and what is left of an earlier request's in a block."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from step_plans import new

from pdkv.engine.worker.draft_model import (
    DraftModelOptions,
    DraftModelProposer,
    _by_block,
    _by_token,
    _bytes,
    _Drafted,
    _marks,
)


def test_a_mark_depends_on_all_tokens_up_to_it() -> None:
    ids = np.array([5, 6, 7, 8, 6], np.int32)
    marks = _marks(ids)
    assert (_marks(ids[:3]) == marks[:3]).all()
    assert len(np.unique(marks, axis=0)) == len(ids)
    assert marks.any(axis=1).all()  # memory that was never written has none
    for place, other in ((0, 9), (2, 0)):
        changed = ids.copy()
        changed[place] = other
        same = (_marks(changed) == marks).all(axis=1)
        assert same.tolist() == [i < place for i in range(len(ids))]


def test_bytes_of_tokens_go_back_to_where_they_were() -> None:
    pool = torch.arange(3 * 2 * 2 * 1 * 16 * 4, dtype=torch.bfloat16).view(3, 2, 2, 1, 16, 4)
    blocks = _bytes(pool)
    tokens = _by_token(blocks[[2, 0]])
    assert tokens.shape == (32, 2 * 2 * 4 * 2)
    assert (tokens[1] == blocks[2, :, :, :, 1].ravel()).all()
    assert (_by_block(tokens, blocks) == blocks[[2, 0]]).all()


def test_a_block_keeps_nothing_of_its_earlier_owner() -> None:
    """Its drafter's layers may be saved with it, for whom the owner's KV was not meant."""
    proposer = object.__new__(DraftModelProposer)
    proposer._block_size, proposer._first_layer = 16, 3
    proposer._known = {slot: _Drafted(new(f"{slot}", [5] * 40, 0)) for slot in range(2)}
    for drafted in proposer._known.values():
        drafted.has_looked = True
    pool = torch.ones(6, 5, 2, 1, 16, 4)
    inputs: Any = SimpleNamespace(
        slots=np.arange(2), seq_lens=np.array([40, 17]), cu_seqlens_q=np.array([0, 30, 31])
    )  # tokens 10 to 39, and token 16
    batch: Any = SimpleNamespace(block_tables=np.array([[[4, 2, 5], [1, 3, 0]]]))
    proposer.follow(inputs, batch, pool)
    assert [int(block) for block in range(6) if not pool[block, 3:].any()] == [2, 3, 5]
    assert (pool[:, :3] == 1).all()
    assert (pool[[0, 1, 4]] == 1).all()


def test_a_request_without_room_for_one_more_token_leaves_others_their_guesses(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has nothing to compute, and a step of nothing cannot be computed."""
    proposer = DraftModelProposer(DraftModelOptions(model=Path("/nowhere")))
    proposer._block_size, proposer._free = 16, []
    full, other = _Drafted(new("full", [5] * 16, 0)), _Drafted(new("other", [6] * 2, 0))
    full.num_computed, full.blocks, other.num_computed, other.blocks = 16, [0], 2, [2]
    proposer._known = {0: full, 1: other}
    monkeypatch.setattr(proposer, "_launch", lambda shares, samples: pytest.fail(f"{shares} have no token"))
    asked: Any = SimpleNamespace(
        slots=np.arange(2), num_tokens=np.array([17, 3]), token_ids=np.zeros((2, 64), np.int32)
    )
    assert proposer._catch_up(asked) == [(1, other, 3)]
