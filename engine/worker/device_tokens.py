"""The last token drawn in each slot, on the device, where the next step reads it before the host knows it."""

import numpy as np
import torch

from pdkv.engine.worker.batch import IntArray, StepInputs
from pdkv.kernels.upload import to_tensor

_NONE = -1


class DeviceTokens:
    """The last token of each slot, kept on the device; its position in its request is known on the host, by
    counting.
    """

    def __init__(self, max_num_seqs: int, device: torch.device) -> None:
        self._tokens = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)
        self._positions = np.full(max_num_seqs, _NONE, np.int64)  # of each slot's token in its request

    def put(self, slots: IntArray, positions: IntArray, tokens: torch.Tensor) -> None:
        """Store drawn tokens, (n,) int64 on the device, in distinct slots: the token at `positions` (n,) of each
        request.

        A negative token (the request has no token to choose) becomes 0; everything computed after it is dropped.
        """
        self._tokens.index_copy_(0, to_tensor(slots, tokens.device), tokens.clamp(min=0))
        self._positions[slots] = positions

    def forget(self, slots: IntArray | int) -> None:
        """Forget the slots' tokens: the slots belong to other requests now, or the host has newer tokens."""
        self._positions[slots] = _NONE

    def fill(self, token_ids: torch.Tensor, inputs: StepInputs) -> None:
        """Write the tokens of a step that were drawn on this device into `token_ids` (at least n,), on the device.

        A request's drawn token is its last one, so in a step it is the last one of its share.
        """
        last = inputs.cu_seqlens_q[1:] - 1
        [known] = np.nonzero(self._positions[inputs.slots] == inputs.positions[last])
        if known.size:
            places = to_tensor(np.stack([last[known], inputs.slots[known]]), token_ids.device)
            token_ids.index_copy_(0, places[0], self._tokens.index_select(0, places[1]))
