"""The scales of KV stored in FP8 (the value that 1.0 represents), as given in a quantized checkpoint."""

import contextlib
import math
from pathlib import Path

from pdkv.errors import ModelError
from pdkv.models.checkpoint import Checkpoint
from pdkv.models.weight_files import WeightFiles

KVScales = tuple[tuple[float, float], ...]
"""The scales of K and V for each layer; empty: 1.0 everywhere."""

_NAMES = tuple(
    "model.layers.{layer}.self_attn." + name for name in ("{side}_scale", "{side}_proj.{side}_scale", "kv_scale")
)
"""Names of the tensor of one number: compressed-tensors', ModelOpt's, and AutoFP8's, which is for K and V."""


def read_kv_scales(path: Path, num_layers: int, weights: WeightFiles | None = None) -> KVScales:
    """The scales of the checkpoint in the directory `path`; 1.0 if it has none, as in vLLM.

    Args:
        weights: the checkpoint's files, already open; None: they are opened here.

    Raises:
        ModelError: a file is broken, or a scale is not one positive number.
    """
    with contextlib.ExitStack() as opened:
        files = weights or opened.enter_context(WeightFiles(path))
        checkpoint = opened.enter_context(Checkpoint(files))
        scales = tuple((_scale(checkpoint, layer, "k"), _scale(checkpoint, layer, "v")) for layer in range(num_layers))
    return () if all(pair == (1.0, 1.0) for pair in scales) else scales


def _scale(checkpoint: Checkpoint, layer: int, side: str) -> float:
    for pattern in _NAMES:
        name = pattern.format(layer=layer, side=side)
        if name not in checkpoint:
            continue
        stored = checkpoint.stored(name)
        scale = float(stored) if stored.numel() == 1 else math.nan
        if not 0 < scale < math.inf:
            raise ModelError(
                f"{checkpoint.path}: tensor {name!r} must be one positive number, a scale of all of a layer's heads, "
                f"got {stored.flatten()[:4].tolist()} of shape {tuple(stored.shape)}"
            )
        return scale
    return 1.0
