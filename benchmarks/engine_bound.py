"""Decode steps of one engine over what their bytes and operations need, and what weights of 8 bits gain.

    python -m benchmarks.run engine_bound

The bound is max(bytes / bandwidth, operations / peak): weights and KV are read once a step, as fast as so many bytes
are read again and again in the same rounds, and each weight is multiplied once for each request. Weights are read as
the checkpoint has them: layers of float32 keep those of bfloat16. Needs a C compiler.
"""

import itertools
import json
import random
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch
from safetensors import safe_open

from benchmarks.linears import COLD_BYTES, PEAK_OF, Limits, peak_of
from benchmarks.load import random_prompt
from benchmarks.models import find_model
from benchmarks.report import Claim, Context
from pdkv.connector_kit.bench.turns import Spread, times_in_turns
from pdkv.host.processor import emulates_bfloat16
from pdkv.kernels.compiled import isa
from pdkv.kernels.linear import available
from pdkv.offline.llm import LLM
from pdkv.sampling.params import SamplingParams

AT_ONCE = (1, 8, 32)
PROMPT, FIRST, STEPS = 32, 8, 64
"""Tokens of a prompt, and steps before those that are timed."""

LIMIT = 0.85
GAINS = {1: 1.6, 8: 1.3}
"""What mid gains by weights of 8 bits, by requests at once."""


def run(context: Context) -> list[Claim]:
    """Claims for tiny and mid in each dtype that this processor computes by instructions of its own."""
    if not available() or shutil.which("cc") is None or isa() not in PEAK_OF:
        return []
    dtypes = ("float32",) if emulates_bfloat16() else ("float32", "bfloat16")
    sizes = ("tiny",) if context.quick else ("tiny", "mid")
    return [claim for size in sizes for dtype in dtypes for claim in _claims(context, size, dtype)]


def _claims(context: Context, size: str, dtype: str) -> Iterator[Claim]:
    model, threads = find_model(context.models, size), torch.get_num_threads()
    num_weights, weight_bytes = weights_of_step(model)
    number: torch.dtype = getattr(torch, dtype)
    peak = peak_of(isa(), number)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        limits = Limits(Path(folder))
        options = {"threads": threads, "dtype": dtype, "kv_cache_memory": "256MiB", "enable_prefix_caching": False}
        llms = {
            name: stack.enter_context(LLM(model, quantization=quantization, **options))
            for name, quantization in ((dtype, None), ("int8", "int8"))
        }
        for at_once in AT_ONCE[:1] if context.quick else AT_ONCE:
            work = {
                f"{name}, {steps}": partial(_decode, llm, at_once, steps)
                for name, llm in llms.items()
                for steps in (FIRST, FIRST + STEPS)
            }
            num_bytes = weight_bytes + at_once * (PROMPT + STEPS // 2) * _token_bytes(model, number.itemsize)
            part = min(num_bytes, COLD_BYTES)
            again = COLD_BYTES // part
            work["read"] = lambda part=part, again=again: [limits.read(threads, part) for _ in range(again)]
            work["compute"] = partial(limits.compute, peak, threads)
            times = times_in_turns(work, 1 if context.quick else 4)
            steps = {name: _step_ms(times, name) for name in llms}
            arithmetic = 2 * at_once * num_weights / limits.operations(peak, threads) * times["compute"].median
            read = num_bytes / (part * again) * times["read"].median
            figures = {f"{name}: step ms": ms for name, ms in steps.items()}
            figures |= {"read ms": read, "arithmetic ms": arithmetic}
            title = f"{size}, {dtype}, {at_once} at once"
            yield Claim(f"{title}: bound / step", max(read, arithmetic) / steps[dtype], LIMIT, "higher", figures)
            if size == "mid" and at_once in GAINS:
                gain = steps[dtype] / steps["int8"]
                yield Claim(f"{title}: step / step with weights of 8 bits", gain, GAINS[at_once], "higher", figures)


def weights_of_step(model: Path) -> tuple[int, int]:
    """The number of weights that a step multiplies, which are not those of the table of embeddings, and their bytes."""
    with safe_open(model / "model.safetensors", framework="pt") as file:
        names = file.keys()
        weights = [file.get_tensor(name) for name in names if "embed_tokens" not in name]
    return sum(weight.numel() for weight in weights), sum(weight.nbytes for weight in weights)


def _token_bytes(model: Path, item: int) -> int:
    fields = json.loads((model / "config.json").read_text())
    head = fields["hidden_size"] // fields["num_attention_heads"]
    return 2 * fields["num_hidden_layers"] * fields["num_key_value_heads"] * head * item


_seeds = itertools.count()


def _decode(llm: LLM, at_once: int, steps: int) -> None:
    rng = random.Random(next(_seeds))
    prompts = [{"prompt_token_ids": random_prompt(rng, PROMPT)} for _ in range(at_once)]
    llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=steps, ignore_eos=True), use_tqdm=False)


def _step_ms(times: dict[str, Spread], name: str) -> float:
    return (times[f"{name}, {FIRST + STEPS}"].median - times[f"{name}, {FIRST}"].median) / STEPS
