"""Models of the same configuration, names, shapes and file sizes, and other weights."""

import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

WEIGHTS = "model.safetensors"
Change = Callable[[str, torch.Tensor], torch.Tensor]
"""(name, tensor) -> tensor of the same shape."""


def merge_adapter(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """An adapter of rank 1, merged into every v_proj."""
    if not name.endswith("v_proj.weight"):
        return tensor
    return tensor + torch.outer(torch.linspace(-1, 1, tensor.shape[0]), torch.linspace(-1, 1, tensor.shape[1]))


def change_norms(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """All layer norms and nothing else."""
    return tensor * torch.linspace(0.5, 2, tensor.shape[0]) if "norm" in name else tensor


def change_attention(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """The attention of layers 0 and 1."""
    return tensor.flip(0) if "layers.0.self_attn" in name or "layers.1.self_attn" in name else tensor


CHANGES: tuple[Change, ...] = (merge_adapter, change_norms, change_attention)


def rewrite(path: Path, change: Change) -> None:
    """Put a changed weight file in the place of a model's."""
    file = path / WEIGHTS
    tensors = {name: change(name, tensor).contiguous() for name, tensor in load_file(file).items()}
    fresh = file.with_name("fresh")
    save_file(tensors, fresh, metadata={"format": "pt"})
    assert fresh.stat().st_size == file.stat().st_size
    fresh.replace(file)


def copy_with(model: Path, target: Path, change: Change) -> Path:
    """A copy of a model directory with other weights."""
    shutil.copytree(model, target)
    rewrite(target, change)
    return target
