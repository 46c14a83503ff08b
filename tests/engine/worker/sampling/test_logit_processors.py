"""On a device the processors change logits as they do on the CPU, and the host waits for none."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from no_sync import DeviceTensors

from pdkv.engine.worker.sampling.logit_processors import (
    BadWords,
    TokenMasks,
    add_bias,
    apply_masks,
    forbid_bad_words,
    forbid_tokens,
    keep_tokens,
)

VOCAB = 70
ROWS = np.array([1, 3])
IDS = [np.array([2, 69]), np.array([5])]
WORDS = torch.from_numpy(np.random.default_rng(1).integers(-(2**31), 2**31, (4, 3), dtype=np.int32))
KNOWN = np.array([[4, 5, 6, 5, 6], [9, 9, 8, 0, 0]], np.int32)
PROCESSORS: dict[str, Callable[[torch.Tensor], None]] = {
    "forbid": lambda logits: forbid_tokens(logits, ROWS, IDS),
    "keep": lambda logits: keep_tokens(logits, ROWS, IDS),
    "bias": lambda logits: add_bias(logits, ROWS, IDS, [np.array([1.5, -2.0], np.float32), np.ones(1, np.float32)]),
    "bad words": lambda logits: forbid_bad_words(
        logits, ROWS, [BadWords([[6, 7], [1]]), BadWords([[8, 3]])], KNOWN, np.array([5, 3]), np.array([1, 1])
    ),
    "masks of some": lambda logits: apply_masks(logits, TokenMasks(ROWS, WORDS[:2])),
    "masks of all": lambda logits: apply_masks(logits, TokenMasks(np.arange(4), WORDS)),
}


@pytest.mark.parametrize("name", PROCESSORS)
def test_a_device_gets_the_logits_of_the_cpu(name: str) -> None:
    logits = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(2))
    expected = logits.clone()
    PROCESSORS[name](expected)
    assert not torch.equal(expected, logits)
    with DeviceTensors() as device:
        there = device.put(logits)
        PROCESSORS[name](there)
        assert torch.equal(device.take(there), expected)
