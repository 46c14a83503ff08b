"""Tensors of a checkpoint from which a load took nothing: a few are harmless, all others make it another model."""

import re
from collections.abc import Iterator

from pdkv.errors import ModelError
from pdkv.models.checkpoint import Checkpoint
from pdkv.models.quantization import Quantization

_HARMLESS = re.compile(r"\.(rotary_emb\.inv_freq|kv_scale|[qkv]_scale|(attn_|prob_|prob_output_)scale)$")
"""What config.json says again, and scales of KV and of attention in FP8, which other readers take or nothing needs."""

_HARMLESS_QUANTIZED = re.compile(r"\.((input|output|act)_scale|input_scale_ub|input_zero_point|weight_shape)$")
"""Of layers whose inputs are not quantized."""

_ADDED = re.compile(r"(\.|_)(bias|zero_point)$")
_SHOWN = 4


def check_unread(checkpoint: Checkpoint, quantization: Quantization | None) -> None:
    """Refuse tensors that were not read, unless they change nothing: harmless ones by name, and biases of zeros.

    Raises:
        ModelError: names some of them.
    """
    if names := sorted(_meant(checkpoint, quantization)):
        shown = ", ".join(map(repr, names[:_SHOWN])) + (f" and {len(names) - _SHOWN} more" if names[_SHOWN:] else "")
        raise ModelError(
            f"{checkpoint.path}: the model that config.json describes has no place for tensors {shown}: leaving them "
            "out could give wrong tokens. Its layers, biases, norms or quantization are not those of the weights"
        )


def _meant(checkpoint: Checkpoint, quantization: Quantization | None) -> Iterator[str]:
    for name in checkpoint.unread():
        if _HARMLESS.search(name) or (quantization is not None and _HARMLESS_QUANTIZED.search(name)):
            continue
        if _ADDED.search(name) and not checkpoint.stored(name).any():  # GPTQ's writers add a bias to each layer
            continue
        yield name
