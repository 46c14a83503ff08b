"""The same model in transformers, on the same device and in the same type: its logprobs, and its tokens a second."""

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.gpu import host_gaps
from benchmarks.report import Claim
from pdkv import LLM, SamplingParams
from pdkv.connector_kit.bench.turns import times_in_turns
from pdkv.models.config import load_model_config

BATCH, INPUT_LEN, OUTPUT_LEN = 32, 128, 128
ROUNDS = 3


def errors(device: str, model: Path, prompts: list[list[int]], num_tokens: int) -> dict[str, torch.Tensor]:
    """How far logprobs in bfloat16 lie from those of transformers in float32, of `num_tokens` that pdkv draws greedily
    after each prompt: its own, and those of transformers.
    """
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, logprobs=0)
    with LLM(model, device=device, dtype="bfloat16", kv_cache_memory=64 << 20) as llm:
        outputs = [result.outputs[0] for result in llm.generate(prompts, params, use_tqdm=False)]
    found = [
        torch.tensor([next(iter(entry.values())).logprob for entry in output.logprobs or []]) for output in outputs
    ]
    ours = torch.cat(found)
    theirs, exact = (
        torch.cat([_logprobs(other, p, list(o.token_ids)) for p, o in zip(prompts, outputs, strict=True)])
        for other in (_load(model, device), _load(model, device, torch.float32))
    )
    return {"pdkv": (ours - exact).abs(), "transformers": (theirs - exact).abs()}


@torch.inference_mode()
def _logprobs(model: Any, prompt: list[int], output: list[int]) -> torch.Tensor:
    """(len(output),) of each output token behind what comes before it."""
    tokens = torch.tensor([prompt + output], device=model.device)
    logits = model(tokens).logits[0, len(prompt) - 1 : -1].float()
    return logits.log_softmax(-1).gather(1, tokens[0, len(prompt) :, None])[:, 0].cpu()


def bytes_of_step(model: Path) -> int:
    """What a step reads of the weights: of the embedding a row per token, which is nothing beside the others."""
    config = load_model_config(model)
    size = sum(path.stat().st_size for path in model.glob("*.safetensors"))
    return size - config.vocab_size * config.hidden_size * getattr(torch, config.dtype).itemsize


class Card(NamedTuple):
    """What a card does in a second."""

    copied: float  # bytes read and written by its copy
    multiplied: float  # operations of its matmul

    def least_s(self, model: Path, input_len: int, output_len: int) -> float:
        """The time in which it could compute the batch: the prompts' products, then every other token's reads of the
        weights and of the KV before it.
        """
        config = load_model_config(model)
        size, item = bytes_of_step(model), getattr(torch, config.dtype).itemsize
        kv = 2 * config.num_layers * config.num_kv_heads * config.head_size * item  # bytes of a token
        steps = range(1, output_len)
        read = len(steps) * size + BATCH * kv * sum(input_len + step for step in steps)
        return read / self.copied + 2 * size / item * BATCH * input_len / self.multiplied


def speed(model: Path, device: str, dtype: torch.dtype, card: Card, *, is_tiny: bool) -> Iterator[Claim]:
    """Tokens/s of a batch, of those that the card allows, beside those of transformers; then the engine's host gaps."""
    input_len, output_len = (16, 4) if is_tiny else (INPUT_LEN, OUTPUT_LEN)
    batches = (4, 8) if is_tiny else host_gaps.BATCHES
    prompts = [[(7 * i + j) % 4000 + 2 for j in range(input_len)] for i in range(BATCH)]
    took = {"transformers": _time_transformers(model, device, dtype, prompts, output_len)}
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
    most = max(BATCH, *batches)
    options: dict[str, Any] = {"dtype": str(dtype).removeprefix("torch."), "max_model_len": 512}
    with LLM(model, device=device, max_num_seqs=most, **options) as llm:
        took["pdkv"] = _time_pdkv(llm, prompts, output_len)
        least_s = card.least_s(model, input_len, output_len)
        rates = {f"{name} tok/s": BATCH * output_len / seconds for name, seconds in (took | {"bound": least_s}).items()}
        rates["of transformers"] = took["transformers"] / took["pdkv"]
        shape = f"{model.name}, {BATCH} x {input_len} in, {output_len} out"
        name = f"{shape}: tokens/s / what the card's copy and matmul allow"
        yield Claim(name, least_s / took["pdkv"], 0.85, "higher", rates)
        for batch in batches:
            yield host_gaps.claim(llm, batch, model.name, device)


def _time_transformers(path: Path, device: str, dtype: torch.dtype, prompts: list[list[int]], output_len: int) -> float:
    """Seconds for the batch, whose tokens come to the host; the median of rounds."""
    model, tokens = _load(path, device, dtype), torch.tensor(prompts, device=device)
    lengths = {"min_new_tokens": output_len, "max_new_tokens": output_len}
    options = {"attention_mask": torch.ones_like(tokens), "do_sample": False, "pad_token_id": 0, **lengths}
    with torch.inference_mode():
        return times_in_turns({"": lambda: model.generate(tokens, **options).tolist()}, ROUNDS)[""].median / 1e3


def _time_pdkv(llm: LLM, prompts: list[list[int]], output_len: int) -> float:
    """Seconds for the batch; the median of rounds. No prompt is found in the cache: each round begins them anew."""
    params = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True)
    first_tokens = iter(range(2, ROUNDS + 3))

    def generate() -> None:
        first = next(first_tokens)
        llm.generate([[first, *prompt[1:]] for prompt in prompts], params, use_tqdm=False)

    return times_in_turns({"": generate}, ROUNDS)[""].median / 1e3


def _load(model: Path, device: str, dtype: torch.dtype = torch.bfloat16) -> Any:
    """Straight to the device."""
    from transformers import AutoModelForCausalLM

    with torch.device(device):
        return AutoModelForCausalLM.from_pretrained(model, dtype=dtype).to(device).eval()
