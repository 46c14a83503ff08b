"""What the largest step leaves of a GPU's memory for KV."""

import numpy as np
import torch

from pdkv.engine.plan import NewRequest
from pdkv.engine.sampling.sampler import SamplingState
from pdkv.errors import ConfigError
from pdkv.host.memory_limits import format_bytes
from pdkv.models.decoder import Decoder
from pdkv.models.heads import Heads
from pdkv.sampling_params import MAX_LOGPROBS, SamplingParams


@torch.inference_mode()
def profiled_bytes(model: Decoder, utilization: float, num_tokens: int, num_rows: int) -> int:
    """Bytes that the largest step leaves of a share of a GPU: run one without a cache, see what it took at its peak.

    Args:
        num_tokens: of the step.
        num_rows: requests that draw in it, at most as many as it has tokens.

    Raises:
        ConfigError: nothing is left, or other processes have taken what the share promises.
    """
    device = model.device
    torch.cuda.reset_peak_memory_stats(device)
    _run_largest_step(model, num_tokens, min(num_rows, num_tokens))
    torch.cuda.synchronize(device)
    free, total = torch.cuda.mem_get_info(device)
    share, available = int(total * utilization), free + torch.cuda.memory_reserved(device)
    if available < share:
        raise ConfigError(
            f"gpu_memory_utilization {utilization:.3g} asks for {format_bytes(share)} of {device}, and other processes "
            f"leave {format_bytes(available)} of its {format_bytes(total)}"
        )
    size_bytes = share - torch.cuda.max_memory_allocated(device)
    if size_bytes <= 0:
        raise ConfigError(f"gpu_memory_utilization {utilization:.3g} leaves no memory of {device} for the KV cache")
    return size_bytes


def _run_largest_step(model: Decoder, num_tokens: int, num_rows: int) -> None:
    """A forward pass without attention, and draws with all that a request can ask of them."""
    device, vocab_size = model.device, model.config.vocab_size
    zeros = torch.zeros(num_tokens, dtype=torch.int64, device=device)

    def attend(layer: int, qkv: torch.Tensor, heads: Heads | None) -> torch.Tensor:
        if heads is not None:
            heads.apply(qkv)
        return qkv[:, : model.num_heads].flatten(1)

    hidden = model.forward(zeros, torch.arange(num_tokens, device=device), attend, None)
    logits = model.logits(hidden[-num_rows:])
    params = SamplingParams(temperature=1.0, top_k=2, top_p=0.5, repetition_penalty=1.1, logprobs=MAX_LOGPROBS, seed=0)
    sampling, slots = SamplingState(num_rows, vocab_size), np.arange(num_rows)
    for slot in range(num_rows):
        sampling.add(slot, NewRequest(("profile", slot), 0, [0], [], params, []))
    known, num_known = np.zeros((num_rows, 2), np.int32), np.ones(num_rows, np.int64)
    tokens = sampling.choose(logits, slots, known, num_known)
    sampling.logprobs(logits, slots, tokens)
