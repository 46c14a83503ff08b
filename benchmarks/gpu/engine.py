"""A model of Llama 3.1 8B's shape, random, in bfloat16: a decode step, of the time in which its bytes can be read;
tokens a second, of those that the card's copy and matmul allow; and how long the device waits for its host.
"""

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import torch

from benchmarks.gpu import host_gaps
from benchmarks.gpu.against_transformers import Card, bytes_of_step, speed
from benchmarks.gpu.kernels import FULL, SMALL, Bench
from benchmarks.models import find_model, models_folder
from benchmarks.repeated_step import RepeatedStep
from benchmarks.report import Claim
from pdkv.connector_kit.bench.turns import times_in_turns
from pdkv.engine.worker.graphs import decode_sizes, make_recorder, prompt_sizes
from pdkv.models.config import load_model_config
from pdkv.models.decoder import Decoder
from pdkv.models.loader import load_decoder


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


def run(device: str, scale: str) -> Iterator[Claim]:
    """One claim for each number of sequences, one beside transformers, and one for each batch of an engine."""
    where, dtype = torch.device(device), torch.float32 if device == "cpu" else torch.bfloat16
    is_tiny = scale == "tiny"
    bench = Bench(where, dtype, SMALL if is_tiny else FULL, 1 if is_tiny else 10)
    copied, multiplied = bench.copy_yardstick(), bench.matmul_yardstick()
    with models_folder() as folder:
        path = find_model(folder, "tiny" if is_tiny else "8b", device)
        model = load_decoder(path, load_model_config(path), dtype=dtype, device=where, max_model_len=2048)
        for case in CASES:
            one = case._replace(context=64, num_steps=2) if is_tiny else case
            yield from _claims(one, model, dtype, bytes_of_step(path), copied.rate)
        yield _with_prompt(one, model, dtype, 24 if is_tiny else CHUNK)
        del model  # the next one needs its memory
        yield from speed(path, device, dtype, Card(copied.rate * 1e9, multiplied.rate * 1e12), is_tiny=is_tiny)


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
