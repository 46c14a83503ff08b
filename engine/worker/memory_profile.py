"""Measures how much of a GPU's memory is left for KV next to the largest step and the captured graphs."""

from collections.abc import Callable, Sequence

import torch

from pdkv.engine.worker.kv_cache import allocate_pool
from pdkv.engine.worker.runner import ModelRunner
from pdkv.engine.worker.step_buffers import Padding
from pdkv.errors import ConfigError
from pdkv.host.memory_limits import format_bytes
from pdkv.models.decoder import Decoder
from pdkv.wire.kv import KVLayout

_GRAPH_BYTES = 4 << 20
"""Driver memory for one captured step besides the memory that its kernels write: the arguments of some 500 kernels, and
the driver's overhead. torch does not see it, and a device's free memory also changes with other processes.
"""

_GRAPH_POOL_RATIO = 2
"""Share of the kernels' peak memory that graphs take: graphs of all sizes share memory, of which the largest needs
most.
"""


def profiled_bytes(
    model: Decoder,
    layout: KVLayout,
    *,
    utilization: float,
    max_num_tokens: int,
    max_num_seqs: int,
    max_model_len: int,
    decode_sizes: Sequence[int],
    prompt_sizes: Sequence[Padding] = (),
    captures: bool,
    timeout_s: float,
    guess: Callable[[], None] | None = None,
) -> int:
    """Bytes of its share of a GPU that an engine leaves free for KV, found by running the whole warm-up, including the
    largest step, over a pool of one block and measuring the peak.

    Args:
        utilization: the share, in (0, 1].
        max_num_tokens: tokens of a step.
        max_num_seqs: rows of a step that draw, with every option.
        decode_sizes, prompt_sizes: as in `ModelRunner`.
        captures: whether the padded steps will be captured as graphs.
        timeout_s: longest time of a step on the device; it includes waiting for ranks that load their weights more
            slowly.
        guess: computes the most that a proposer computes beside a step. What it has on the device already counts, too.

    Raises:
        ConfigError: nothing is left, or other processes use memory within the share.
    """
    device = model.device
    torch.cuda.reset_peak_memory_stats(device)
    runner = ModelRunner(
        model,
        allocate_pool(layout, 1, device),
        layout,
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        decode_sizes=decode_sizes,
        prompt_sizes=prompt_sizes,
        timeout_s=timeout_s,
    )
    runner.warm_up(max_num_tokens)
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device)
    if guess is not None:
        peak += _bytes_at_peak(guess, device)
    if captures:
        padded_bytes = _bytes_at_peak(lambda: runner.warm_up_decodes(None), device)
        peak += _GRAPH_POOL_RATIO * padded_bytes + runner.num_padded * _GRAPH_BYTES
    free, total = torch.cuda.mem_get_info(device)
    share, available = int(total * utilization), free + torch.cuda.memory_reserved(device)
    if available < share:
        raise ConfigError(
            f"gpu_memory_utilization {utilization:.3g} asks for {format_bytes(share)} of {device}, and other processes "
            f"leave {format_bytes(available)} of its {format_bytes(total)}"
        )
    size_bytes = share - peak
    if size_bytes <= 0:
        raise ConfigError(f"gpu_memory_utilization {utilization:.3g} leaves no memory of {device} for the KV cache")
    return size_bytes


def _bytes_at_peak(run: Callable[[], None], device: torch.device) -> int:
    """Bytes that a call takes at its peak, besides the memory used before."""
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    run()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before
