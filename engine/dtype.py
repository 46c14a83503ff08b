"""Which dtype `--dtype auto` means."""

import logging

import torch

from pdkv.config import EngineConfig
from pdkv.host.processor import emulates_bfloat16, instruction_set
from pdkv.models.config import ModelConfig

logger = logging.getLogger(__name__)


def resolve_dtype(config: EngineConfig, model: ModelConfig, device: torch.device) -> str:
    """The dtype of computation and KV by torch's name: what was asked for, or the model's own.

    A processor without bfloat16 computes a bfloat16 model in float32, in which prompts and batches take a third of the
    time (benchmarks/dtypes.py), and says so.
    """
    if config.dtype != "auto":
        return config.dtype
    if model.dtype != "bfloat16" or device.type != "cpu" or not emulates_bfloat16():
        return model.dtype
    logger.info(
        "computing in float32, since this processor (%s) would emulate the model's bfloat16: weights and KV take twice "
        "the memory; --dtype bfloat16 keeps it",
        instruction_set(),
    )
    return "float32"
