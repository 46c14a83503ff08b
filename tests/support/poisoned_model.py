"""Real checkpoints with one embedding row that is not finite: requests with that token overflow, and no others."""

import shutil
from pathlib import Path

from safetensors.torch import load_file, save_file

POISON = 300
"""The token id."""


def poison(clean: Path, target: Path, value: float) -> Path:
    """Copy the untied model `clean` to `target`, with `value` as all of the poisoned token's embedding."""
    shutil.copytree(clean, target)
    file = target / "model.safetensors"
    tensors = load_file(file)
    assert "lm_head.weight" in tensors, "every logit would be poisoned"
    tensors["model.embed_tokens.weight"][POISON] = value
    save_file(tensors, file, metadata={"format": "pt"})
    return target


VALUES = {"nan": float("nan"), "inf": float("inf"), "minus-inf": float("-inf")}
"""What to poison with. The largest finite number is harmless: the first norm makes zeros of it."""
