"""What tells a drafter's KV of a token from that of others which an earlier request has left in a block."""

import numpy as np
import torch

from pdkv.engine.worker.draft_model import _by_block, _by_token, _bytes, _marks


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
