"""Resolves `--dtype` and `--kv-cache-dtype`, and the compute dtype of layers with FP8 weights."""

import logging

import torch

from pdkv.config import EngineConfig
from pdkv.errors import ConfigError
from pdkv.host.processor import emulates_bfloat16, instruction_set
from pdkv.models.config import ModelConfig
from pdkv.models.eight_bits import keeps_8_bits
from pdkv.models.linear import linear_kind
from pdkv.models.quantized_linear import why_not_fp8

logger = logging.getLogger(__name__)


def resolve_dtype(config: EngineConfig, model: ModelConfig, device: torch.device) -> str:
    """The computation dtype by torch's name: the requested one, or the model's own.

    A CPU without bfloat16 instructions computes a bfloat16 model in float32, in which prompts and batches take a third
    of the time (docs/cpu.md); a log line says so.
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


def resolve_kv_dtype(config: EngineConfig, dtype: str, device: torch.device) -> str:
    """The dtype in which KV is stored, with `dtype` as the computation dtype; by torch's names.

    Raises:
        ConfigError: FP8 on a GPU that does not convert it (before compute capability 8.9).
    """
    if config.kv_cache_dtype == "auto":
        return dtype
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
        name, capability = torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)
        raise ConfigError(
            f"--kv-cache-dtype fp8 needs compute capability 8.9 or above, {name} has {capability[0]}.{capability[1]}"
        )
    if device.type == "cpu":
        logger.warning("--kv-cache-dtype fp8 on a CPU saves memory, not time: attention is computed by plain torch")
    return "float8_e4m3fn"


def resolve_quantization(config: EngineConfig, model: ModelConfig, device: torch.device) -> ModelConfig:
    """The model with the weights and inputs that an engine computes it with.

    Raises:
        ConfigError: `--quantization` on a GPU, or of a checkpoint that is quantized.
    """
    if config.quantization is not None and device.type != "cpu":
        raise ConfigError(
            f"--quantization {config.quantization} is for engines on a CPU, and this one is on {device}: take a "
            "quantized checkpoint"
        )
    model = resolve_fp8(config, model.quantized_at_load(config.quantization, config.model), device)
    if model.quantization is None:
        return model
    dtype: torch.dtype = getattr(torch, resolve_dtype(config, model, device))
    return (
        model.in_8_bits() if keeps_8_bits(model.quantization, linear_kind(dtype, device, config.cpu_linears)) else model
    )


def resolve_fp8(config: EngineConfig, model: ModelConfig, device: torch.device) -> ModelConfig:
    """The model as an engine computes it: with FP8 inputs if its weights are FP8 and the device multiplies them.

    The same on every rank. It changes the KV, so it is part of the model's identity.
    """
    if model.quantization is None or model.quantization.input_scheme is None:
        return model
    dtype: torch.dtype = getattr(torch, resolve_dtype(config, model, device))
    reason = why_not_fp8(model, dtype, device, config.tp)
    if reason is None:
        return model.with_fp8_inputs()
    logger.info("inputs of FP8 layers stay as they are: %s", reason)
    return model
