"""Experts (32, of which a token has 4) over the bytes and the operations that they need, and latent KV's hand-off.

    python -m benchmarks.run experts
    python -m benchmarks.run engine_moe --vllm VENV      a whole engine beside vLLM

Decode reads the chosen experts' weights at the speed at which memory is read; a prompt takes the operations of one
dense MLP of as many neurons. Both have their routing with them. Needs a C compiler.
"""

import json
import re
import shutil
import tempfile
from pathlib import Path

import torch

from benchmarks.linears import COLD_BYTES, Limits
from benchmarks.models import find_family
from benchmarks.report import Claim, Context
from benchmarks.servers import get, pdkv, post
from pdkv.connector_kit.bench.turns import times_in_turns
from pdkv.kernels.linear import available
from pdkv.models.decoder import GatedMlp
from pdkv.models.expert_config import Experts
from pdkv.models.experts import CompiledExperts, ExpertMlp, Router
from pdkv.models.linear import CompiledLinear

HIDDEN, NEURONS, NUM, CHOSEN = 1024, 768, 32, 4
LAYERS = 4  # of which none is in a cache when it comes again
PROMPT = 512
CONFIG = Experts(layers=(), num=NUM, chosen=CHOSEN, size=NEURONS, normalised=True)
CHOSEN_BYTES = CHOSEN * 3 * HIDDEN * NEURONS * 2


def run(context: Context) -> list[Claim]:
    """Decode, prompts and the hand-off. Without a kernel the last alone."""
    claims = [run_latent(context)]
    if not available() or shutil.which("cc") is None:
        return claims
    threads, rounds = torch.get_num_threads(), 2 if context.quick else 15
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        limits = Limits(Path(folder))
        layers = [make_experts() for _ in range(1 if context.quick else LAYERS)]
        dense = GatedMlp(make(2 * CHOSEN * NEURONS, HIDDEN), make(HIDDEN, CHOSEN * NEURONS))
        row, prompt = torch.randn(1, HIDDEN).bfloat16(), torch.randn(PROMPT, HIDDEN).bfloat16()
        work = {
            "read": lambda: limits.read(threads),
            "decode": lambda: [layer(row + i) for i, layer in enumerate(layers)],
            "prompt": lambda: layers[0](prompt),
            "dense": lambda: dense(prompt),
        }
        times = {name: found.median for name, found in times_in_turns(work, rounds, context.clock).items()}
    bound = len(layers) * CHOSEN_BYTES / COLD_BYTES * times["read"]
    figures = {f"{name}: ms": ms for name, ms in times.items()}
    return [
        Claim(f"experts, 1 row, {threads} threads: bound / time", bound / times["decode"], 0.75, "higher", figures),
        Claim(
            f"experts, {PROMPT} rows, {threads} threads: dense products / time",
            times["dense"] / times["prompt"], 0.6, "higher", figures,
        ),
        *claims,
    ]  # fmt: skip


def make(outputs: int, inputs: int) -> CompiledLinear:
    """A layer of random bfloat16 weights."""
    return CompiledLinear((torch.randn(outputs, inputs) * inputs**-0.5).bfloat16())


def make_experts() -> ExpertMlp:
    """One layer's."""
    router = Router(CompiledLinear(torch.randn(NUM, HIDDEN)), None, CONFIG)
    gate_up, down = ([make(*shape) for _ in range(NUM)] for shape in ((2 * NEURONS, HIDDEN), (HIDDEN, NEURONS)))
    return ExpertMlp(router, CompiledExperts(gate_up, down), None)


def run_latent(context: Context) -> Claim:
    """Bytes that a decode engine is handed for each token of a prompt, over (latent + rotated) x dtype x layers."""
    model = find_family(context.models, "deepseek_v3")
    fields = json.loads((model / "config.json").read_text())
    expected = (fields["kv_lora_rank"] + fields["qk_rope_head_dim"]) * 4 * fields["num_hidden_layers"]
    with pdkv(model, prefill=1, decode=1, options=("--kv-cache-memory", "64MiB")) as server:
        body = {"model": server.model, "prompt": list(range(100, 100 + PROMPT)), "max_tokens": 2, "ignore_eos": True}
        post(server.url + "/v1/completions", body)
        metrics = get(server.url + "/metrics").decode()
    found = sum(map(float, re.findall(r"^pdkv_engine_kv_received_bytes_total\{.*\} (.+)$", metrics, re.MULTILINE)))
    return Claim(
        "latent KV: bytes handed off / (latent + rotated) x dtype x layers", found / PROMPT / expected, 1.0, "lower",
        {"bytes a token": found / PROMPT, "expected": expected},
    )  # fmt: skip
