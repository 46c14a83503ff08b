"""Codecs of stored KV: sizes, speed on one core, and answers that change.

    python -m benchmarks.run kv_codecs
    python -m benchmarks.kv_codecs

Sizes and speeds are of `mid`'s KV for a source file of Python's library, in bfloat16 and values of 64 tokens, in turns
with copies of the same values. The task is the embedded model's: a code that its prompt names is asked for, or all of
them are recited, greedily, over KV that went through a codec, in bfloat16, and over the same KV that did not. An answer
has changed if any of its tokens has.
"""

import sysconfig
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks.models import find_model
from benchmarks.report import Claim, Context, show
from benchmarks.support import recall_module
from pdkv.base.block_keys import HASH_BLOCK_SIZE
from pdkv.config import DEFAULT_MODEL
from pdkv.connector_kit.bench.turns import times_in_turns
from pdkv.connectors.store.envelope import ENVELOPE_BYTES
from pdkv.kv_store.codecs.base import Bytes, Codec, PartShape
from pdkv.kv_store.codecs.registry import CODECS, make_codec

ROOT = Path(__file__).parent.parent
VALUE_UNITS = 4
VALUE_TOKENS = VALUE_UNITS * HASH_BLOCK_SIZE
NUM_FACTS = 64  # 453 tokens: seven values, and what is computed
AT_ONCE = 25
SIZE_LIMIT, DECODE_LIMIT, ENCODE_LIMIT, CHANGED_LIMIT = 3.5, 0.4, 0.25, 0.005


class Speed(NamedTuple):
    """The speed of one codec."""

    ratio: float  # of the images' bytes to those of a stored value, padding and envelope included
    encode: float  # GB/s of images, the median
    decode: float
    copy: float  # the same images, in the same turns


def run(context: Context) -> list[Claim]:
    """Results of the default level of `cachegen`; the others are printed by main()."""
    torch.set_num_threads(1)
    codec = make_codec("cachegen")
    speed = measure(codec, *values_of_mid(context.models, 256 if context.quick else 1024), 3 if context.quick else 40)
    claims = [
        Claim("cachegen, bytes of bf16 / stored", speed.ratio, SIZE_LIMIT, "higher", {}),
        Claim("cachegen, decode GB/s a core", speed.decode, DECODE_LIMIT, "higher", {"copy GB/s": speed.copy}),
        Claim("cachegen, encode GB/s a core", speed.encode, ENCODE_LIMIT, "higher", {"copy GB/s": speed.copy}),
    ]
    torch.set_num_threads(2)
    for task, num in (("question", 10 if context.quick else 1000), ("recital", 2 if context.quick else 200)):
        [changed], right = count_changed([codec], task, num)
        figures = {"answers": num, "right without a codec": right}
        claims.append(Claim(f"cachegen, {task}s answered otherwise", changed / num, CHANGED_LIMIT, "lower", figures))
    return claims


# --- size and speed -----------------------------------------------------------------------------------------------


def values_of_mid(models: Path, num_tokens: int) -> tuple[list[Bytes], PartShape]:
    """Images of mid's KV for a text that everybody has."""
    from transformers import AutoTokenizer

    path = find_model(models, "mid")
    text = (Path(sysconfig.get_path("stdlib")) / "argparse.py").read_text()
    ids = AutoTokenizer.from_pretrained(path)(text).input_ids[:num_tokens]
    [cache] = prefill(load(path), torch.tensor([ids]))
    return images_of(cache)


def measure(codec: Codec, values: Sequence[Bytes], shape: PartShape, rounds: int) -> Speed:
    """A round is one value of each kind; time is this thread's."""
    coded = [codec.encode(value, shape) for value in values]
    out = np.empty(shape.num_bytes, np.uint8)
    sources, codes, copies = cycle(values), cycle(coded), cycle(values)
    times = times_in_turns(
        {
            "encode": lambda: codec.encode(next(sources), shape),
            "decode": lambda: codec.decode(next(codes), shape, out),
            "copy": lambda: np.copyto(out, next(copies)),
        },
        rounds,
        clock=time.thread_time,
    )
    ratio = shape.num_bytes / (codec.max_bytes(shape) + ENVELOPE_BYTES)
    return Speed(ratio, *(shape.num_bytes / times[name].median / 1e6 for name in ("encode", "decode", "copy")))


# --- answers ------------------------------------------------------------------------------------------------------

Layers = list[torch.Tensor]
"""For each layer, (2, heads, tokens, head_size)."""


def load(path: Path) -> Any:
    """A model of transformers, in float32."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


@torch.no_grad()
def prefill(model: Any, ids: torch.Tensor) -> list[Layers]:
    """KV of each prompt, rounded to bfloat16."""
    layers = model(ids, use_cache=True).past_key_values.layers
    stacked = [torch.stack([layer.keys, layer.values], 1).bfloat16() for layer in layers]
    return [[layer[i] for layer in stacked] for i in range(len(ids))]


def images_of(layers: Layers) -> tuple[list[Bytes], PartShape]:
    """The whole values among a prompt's tokens."""
    _, heads, num_tokens, head_size = layers[0].shape
    num_values = num_tokens // VALUE_TOKENS
    tokens = torch.stack(layers)[:, :, :, : num_values * VALUE_TOKENS]
    split = tokens.unflatten(3, (num_values, VALUE_UNITS, HASH_BLOCK_SIZE)).permute(3, 4, 0, 1, 2, 5, 6).contiguous()
    shape = PartShape(VALUE_UNITS, len(layers), heads, head_size, "bfloat16")
    return [value.reshape(-1).view(torch.uint8).numpy() for value in split], shape


def through(codec: Codec, layers: Layers) -> Layers:
    """The KV with whole values coded and decoded, and the rest as it is."""
    values, shape = images_of(layers)
    decoded = np.empty((len(values), shape.num_bytes), np.uint8)
    for value, out in zip(values, decoded, strict=True):
        codec.decode(codec.encode(value, shape), shape, out)
    sizes = (len(values), VALUE_UNITS, shape.num_layers, 2, shape.num_heads, HASH_BLOCK_SIZE, shape.head_size)
    tokens = torch.from_numpy(decoded).view(torch.bfloat16).view(sizes).permute(2, 3, 4, 0, 1, 5, 6).flatten(3, 5)
    return [torch.cat([new, old[:, :, new.shape[2] :]], 2) for new, old in zip(tokens, layers, strict=True)]


def count_changed(codecs: Sequence[Codec], task: str, num: int) -> tuple[list[int], int]:
    """By codec, how many answers changed; and how many are right without one."""
    from transformers import AutoTokenizer

    recall, model = recall_module(), load(DEFAULT_MODEL)
    tokenizer = AutoTokenizer.from_pretrained(DEFAULT_MODEL)
    make = recall.make_question if task == "question" else recall.make_recital
    questions = [make(seed, NUM_FACTS) for seed in range(num)]
    ids = torch.tensor(tokenizer([question.prompt for question in questions]).input_ids)
    num_tokens = len(tokenizer(questions[0].answer, add_special_tokens=False).input_ids) + 1
    changed, right = [0] * len(codecs), 0
    for first in range(0, num, AT_ONCE):
        batch = ids[first : first + AT_ONCE]
        exact = prefill(model, batch[:, :-1])
        answers = go_on(model, exact, batch[:, -1:], num_tokens)
        texts = tokenizer.batch_decode(answers, skip_special_tokens=True)
        right += sum(text == question.answer for text, question in zip(texts, questions[first:], strict=False))
        for i, codec in enumerate(codecs):
            others = go_on(model, [through(codec, layers) for layers in exact], batch[:, -1:], num_tokens)
            changed[i] += int((others != answers).any(1).sum())
    return changed, right


@torch.no_grad()
def go_on(model: Any, caches: Sequence[Layers], last: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """(n, num_tokens): greedy tokens behind prompts of equal length, of which `last`, (n, 1), is not in their KV."""
    from transformers import DynamicCache

    layers = [torch.stack(each).float() for each in zip(*caches, strict=True)]
    cache = DynamicCache(ddp_cache_data=[(layer[:, 0], layer[:, 1]) for layer in layers])
    answers = []
    for _ in range(num_tokens):
        last = model(last, past_key_values=cache, use_cache=True).logits[:, -1].argmax(-1, keepdim=True)
        answers.append(last)
    return torch.cat(answers, 1)


def all_codecs() -> Iterator[Codec]:
    """Every level of each."""
    for name in CODECS.shipped:
        yield from map(partial(make_codec, name), CODECS.load(name).levels)


def main() -> None:
    """Print a table of all codecs and levels, and the claims."""
    torch.set_num_threads(1)
    models = ROOT / ".bench" / "models"
    values, shape = values_of_mid(models, 1024)
    codecs = list(all_codecs())
    speeds = [measure(codec, values, shape, 20) for codec in codecs]
    torch.set_num_threads(2)
    questions, _ = count_changed(codecs, "question", 400)
    recitals, _ = count_changed(codecs, "recital", 50)
    print("| codec | bf16 / stored | encode GB/s | decode GB/s | copy GB/s | of 400 answers changed | of 50 recitals |")
    print("|---|---|---|---|---|---|---|")
    for codec, speed, question, recital in zip(codecs, speeds, questions, recitals, strict=True):
        figures = " | ".join(f"{figure:.2f}" for figure in speed)
        print(f"| {codec.identity or codec.name} | {figures} | {question} | {recital} |")
    claims: Callable[[Context], list[Claim]] = run
    print(show("kv_codecs", claims(Context(models, None))))


if __name__ == "__main__":
    main()
