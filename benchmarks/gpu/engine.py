"""A model of Llama 3.1 8B's shape, random, in bfloat16: a decode step, of the time in which its bytes can be read;
tokens a second, of those that the card's copy and matmul allow; and how long the device waits for its host.
"""

import json
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks.gpu import host_gaps
from benchmarks.gpu.against_transformers import Card, speed
from benchmarks.gpu.kernels import FULL, SMALL, Bench
from benchmarks.repeated_step import RepeatedStep
from benchmarks.report import Claim
from pdkv.connector_kit.bench.turns import times_in_turns
from pdkv.engine.worker.graphs import decode_sizes, make_recorder, prompt_sizes
from pdkv.models.config import ModelConfig, load_model_config
from pdkv.models.decoder import Decoder
from pdkv.models.linear import linear_kind
from pdkv.models.loader import Loader

SHAPE = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128_256,
    "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 500_000.0, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "eos_token_id": 128_001, "bos_token_id": 128_000,
}  # fmt: skip
TINY = {
    "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 512, "eos_token_id": 1, "bos_token_id": 0,
}  # fmt: skip


class Case(NamedTuple):
    """A step."""

    sequences: int
    context: int  # tokens of each
    limit: float  # least share of a copy's bandwidth
    kernels: float  # at most, in a layer; what a step has besides is less than one
    num_steps: int = 20  # in a row


CASES = (Case(1, 1024, 0.85, 8.0), Case(64, 1024, 0.75, 11.0))

CHUNK = 192
"""Tokens of a prompt beside the larger case's decodes."""

ROUNDS = 5


class RandomWeights:
    """Tensors of any name, made where they are used."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self._device = device
        self._dtype = dtype
        self.num_bytes = 0

    def __contains__(self, name: str) -> bool:
        return True

    def get(self, name: str, shape: tuple[int, ...], part: tuple[slice, ...] = ()) -> torch.Tensor:
        """Numbers that keep activations at their size."""
        tensor = torch.empty(shape, device=self._device, dtype=self._dtype)
        tensor = tensor.normal_(std=0.02) if len(shape) > 1 else tensor.fill_(1.0)
        self.num_bytes += tensor.nbytes
        return tensor[part]


def run(device: str, scale: str) -> Iterator[Claim]:
    """One claim for each number of sequences, one beside transformers, and one for each batch of an engine."""
    where, dtype = torch.device(device), torch.float32 if device == "cpu" else torch.bfloat16
    is_tiny = scale == "tiny"
    bench = Bench(where, dtype, SMALL if is_tiny else FULL, 1 if is_tiny else 10)
    copied, multiplied = bench.copy_yardstick(), bench.matmul_yardstick()
    config = _config(SHAPE | TINY if is_tiny else SHAPE)
    weights = RandomWeights(where, dtype)
    model = Loader(weights, config, dtype, where, linear_kind(dtype, where)).decoder(2048)
    embedding = config.vocab_size * config.hidden_size * dtype.itemsize  # of which a step reads a row per token
    num_bytes = weights.num_bytes - embedding
    for case in CASES:
        one = case._replace(context=64, num_steps=2) if is_tiny else case
        yield from _claims(one, model, dtype, num_bytes, copied.rate)
    yield _with_prompt(one, model, dtype, 24 if is_tiny else CHUNK)
    del model, weights  # the next one needs their memory
    yield from speed(device, is_tiny, Card(copied.rate * 1e9, multiplied.rate * 1e12))


def _claims(case: Case, model: Decoder, dtype: torch.dtype, num_bytes: int, rate: float) -> Iterator[Claim]:
    """`num_bytes` of weights; `rate`: GB/s that a copy reads and writes."""
    sizes = decode_sizes(case.sequences)
    recorder = make_recorder(model.device, enforce_eager=False, num_ranks=1)
    step = RepeatedStep(model, dtype, case.sequences, case.context, decode_sizes=sizes, recorder=recorder)
    kv_bytes = case.sequences * case.context * step.bytes_per_token
    steps = times_in_turns({"": partial(step.run, case.num_steps)}, ROUNDS)[""]
    took = steps.over(case.num_steps)
    bound_ms = (num_bytes + kv_bytes) / (rate * 1e6)
    figures = took.figures("step") | {"bound ms": bound_ms, "weights GB": num_bytes / 1e9, "KV GB": kv_bytes / 1e9}
    name = f"8B shape, {case.sequences} x {case.context}: bandwidth / a copy's"
    yield Claim(name, bound_ms / took.median, case.limit, "higher", figures)
    spans = host_gaps.work(partial(step.run, case.num_steps), model.device.type)
    in_layer = len(spans) / case.num_steps / model.config.num_layers
    yield Claim(f"8B shape, {case.sequences} x {case.context}: kernels of a layer", in_layer, case.kernels, "lower", {})


def _with_prompt(case: Case, model: Decoder, dtype: torch.dtype, chunk: int) -> Claim:
    """How long the device waits in steps of decodes and a part of a prompt, from their graph and without."""
    recorder = make_recorder(model.device, enforce_eager=False, num_ranks=1)
    decodes, figures = decode_sizes(case.sequences), dict[str, float]()
    for name, sizes in (("eager", ()), ("", prompt_sizes(2048, case.sequences + 1))):
        shape = dtype, case.sequences, case.context
        step = RepeatedStep(model, *shape, decode_sizes=decodes, prompt_sizes=sizes, chunk=chunk, recorder=recorder)
        found = host_gaps.gaps(host_gaps.work(partial(step.run, case.num_steps), model.device.type))
        figures |= {f"{name} {key}".strip(): value for key, value in found.items()}
    name = f"8B shape, {case.sequences} decodes and {chunk} of a prompt: time in which the device waits for its host"
    return Claim(f"{name} / all of it", figures["waits ms"] / figures["ms"], host_gaps.LIMIT, "lower", figures)


def _config(fields: dict[str, object]) -> ModelConfig:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(fields))
        return load_model_config(Path(folder))
