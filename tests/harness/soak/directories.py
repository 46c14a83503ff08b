# ruff: noqa: E501 (tables)
"""Mutated model directories: what pdkv makes of them is what transformers makes of them, or it says what it does.

    python -m soak.directories --mutations 10000

Names, values and files of directories as they are published are changed, taken away, doubled and exchanged. Where both
accept one, tokens, dtype, end tokens, ids, texts and prompts of conversations must be equal unless pdkv warned; a
refusal is a ModelError or ConfigError that names the directory; anything else that is raised is a violation.
"""

import argparse
import contextlib
import copy
import json
import logging
import random
import shutil
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import model_directories
import msgspec
import torch

from pdkv.errors import ConfigError, InvalidRequest, ModelError
from pdkv.models.config import load_model_config
from pdkv.text import Tokenizer
from soak.report import RESULTS, write_json
from tests.engine.worker.step_driver import StepDriver

BASES = ("Llama-3.1-8B-Instruct", "Llama-2-7b-chat-hf", "vicuna-7b-v1.5", "Hermes-2-Pro-Llama-3-8B",
         "SmolLM2-1.7B-Instruct", "DeepSeek-R1-Distill-Qwen-7B", "Qwen2.5-7B-Instruct", "Qwen3-saved-by-transformers-5",
         "Qwen3-8B", "Mistral-7B-Instruct-v0.1", "Mistral-7B-Instruct-v0.3", "Ministral-8B-saved-by-transformers-5",
         "Phi-3-mini-4k-instruct", "Phi-4-mini-instruct")  # fmt: skip
PROMPT = [int(i) for i in torch.randint(3, 250, (72,), generator=torch.Generator().manual_seed(3))]
TEXTS = (
    *model_directories.SAMPLE,
    "<s>[INST] who</s> [/INST]",
    "x<|im_end|>\n y<|eot_id|>",
    "<|end|> the [PAD] fox é <fox> b<fox>c",
    " ",
)
CHAT = [{"role": "user", "content": " the <|im_end|> fox "}, {"role": "assistant", "content": "A"},
        {"role": "user", "content": "é [INST]"}]  # fmt: skip
MIN_MARGIN = 1e-3
"""Of the best logit over the second: below it, the order of additions may decide."""

_ROPES: list[Any] = [
    None, {"rope_type": "default"}, {"type": "linear", "factor": 2.0}, {"rope_type": "linear", "factor": 1},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
    {"rope_type": "yarn", "factor": 2.0, "attention_factor": 1.5, "beta_fast": 16, "beta_slow": 2},
    {"rope_type": "yarn", "factor": 2.0, "attn_factor": 1.5}, {"type": "yarn", "factor": 2.0, "mscale": 1.0, "mscale_all_dim": 0.5},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64},
    {"rope_type": "llama3", "factor": 8.0}, {"rope_theta": 777.0}, {"rope_type": "default", "rope_theta": 99.0, "factor": 3.0},
    {"rope_type": "yarn", "factor": 3.0, "truncate": False}, {"full_attention": {"rope_type": "default", "rope_theta": 50.0}},
]  # fmt: skip
CONFIG_VALUES: dict[str, list[Any]] = {
    "model_type": ["llama", "mistral", "qwen2", "qwen3", "phi3", "ministral", "", 5], "rope_scaling": _ROPES,
    "rope_parameters": _ROPES, "rope_theta": [100.0, 5e5, "x", None], "rms_norm_eps": [1e-3, 1e-6, 1, "1e-5", None],
    "num_key_value_heads": [1, 2, 4, None, 3], "num_attention_heads": [2, 4, 8], "head_dim": [8, 16, 32, None],
    "hidden_act": ["silu", "gelu", None], "attention_bias": [True, False, None], "mlp_bias": [True, False],
    "tie_word_embeddings": [True, False, None], "sliding_window": [16, 48, 1, None, 0], "use_sliding_window": [True, False],
    "max_window_layers": [0, 1, 2, 28], "layer_types": [["full_attention"] * 2, ["sliding_attention"] * 2,
                                                        ["full_attention", "sliding_attention"], [], None],
    "partial_rotary_factor": [0.5, 1.0, 0.75], "eos_token_id": [2, [2, 7], 479, 480, -1, None, "2"],
    "torch_dtype": ["float32", "bfloat16", "float16", "float8", None], "dtype": ["float32", "bfloat16", "auto", None],
    "tokenizer_class": ["LlamaTokenizer", "Qwen2TokenizerFast", "GPT2Tokenizer", "PreTrainedTokenizerFast", "X", None],
    "max_position_embeddings": [64, 128, 512, 2048, None], "original_max_position_embeddings": [64, 128, 512, None],
    "vocab_size": [480, 479, 272, None], "num_hidden_layers": [1, 2, 3], "attention_multiplier": [0.25, 0.3],
    "logit_scale": [1.0, 0.5], "final_logit_softcapping": [None, 30.0], "clip_qkv": [None, 8.0],
    "quantization_config": [None, {"quant_method": "fp8"}, {}], "bos_token_id": [1, 2, None, [1]],
    "architectures": [["LlamaForCausalLM"], ["MistralForCausalLM"], ["Qwen3ForCausalLM"], [], None],
}  # fmt: skip
FOX = {"__type": "AddedToken", "content": "<fox>", "lstrip": True, "rstrip": True}
TOKENIZER_VALUES: dict[str, list[Any]] = {
    "tokenizer_class": CONFIG_VALUES["tokenizer_class"], "add_prefix_space": [True, False, None],
    "legacy": [True, False, None], "add_bos_token": [True, False], "add_eos_token": [True, False],
    "split_special_tokens": [True, False], "clean_up_tokenization_spaces": [True, False],
    "extra_special_tokens": [["<fox>", "x"], {"image_token": "<img>"}, [], None, 5, [FOX, "<fox>", FOX], ["the", FOX]],
    "additional_special_tokens": [["<fox>"], ["the"], [], None, [FOX | {"rstrip": False}, FOX]],
    "image_token": ["<img>", None, FOX, {"content": "<fox>"}, "<fox>"],
    "chat_template": ["T{% for m in messages %}{{ m.content }}{% endfor %}", None, 5, [], {}, "{% if %}",
                      [{"name": "default", "template": "D{% for m in messages %}{{ m.content }}{% endfor %}"}]],
    **{f"{name}_token": ["<s>", "</s>", "<|im_end|>", "the", "<new>", None, 7, {"content": "x"},
                         "<fox>", FOX, FOX | {"normalized": True, "special": False}]
       for name in ("bos", "eos", "unk", "pad", "sep", "mask")},
}  # fmt: skip
WEIRD: list[Any] = [None, True, False, 0, 1, -1, 0.5, 10**30, "", "x", [], {}, [1], {"a": 1}, [[]], "1", 1e308]


class Result(msgspec.Struct, kw_only=True):
    """What a run saw."""

    seed: int
    mutations: int
    outcomes: dict[str, int] = {}
    violations: list[str] = []


class Made(NamedTuple):
    """What one side made of a directory; None: it refused that part."""

    facts: dict[str, Any]
    refusals: list[str]


class Warned(logging.Handler):
    """Counts warnings."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def mutate(path: Path, rng: random.Random, bases: Sequence[Path]) -> list[str]:
    """Change a directory; what was changed."""
    done = [_mutate_once(path, rng, bases) for _ in range(rng.choice((1, 1, 1, 2, 3)))]
    return [text for text in done if text]


def _mutate_once(path: Path, rng: random.Random, bases: Sequence[Path]) -> str:
    kind = rng.choice(
        ("config", "config", "config", "tokenizer", "tokenizer", "generation", "file", "vocabulary", "raw")
    )
    if kind == "config":
        return _mutate_object(path / "config.json", rng, CONFIG_VALUES)
    if kind == "tokenizer":
        name = rng.choice(
            ("tokenizer_config.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
        )
        return _mutate_object(path / name, rng, TOKENIZER_VALUES)
    if kind == "generation":
        values = {"eos_token_id": CONFIG_VALUES["eos_token_id"], "temperature": [0.5], "top_k": [3, -1]}
        return _mutate_object(path / "generation_config.json", rng, values)
    files = sorted(file for file in path.rglob("*") if file.is_file())
    file = rng.choice(files)
    name = file.relative_to(path).as_posix()
    if kind == "vocabulary":
        return _mutate_vocabulary(path / "tokenizer.json", rng)
    if kind == "raw" and file.suffix != ".safetensors":
        data = bytearray(file.read_bytes())
        at = rng.randrange(len(data) or 1)
        data[at : at + rng.choice((0, 1, 20))] = rng.choice((b"", b"\x00", b"}", b'"', b"\xff", b"[" * 3000))
        file.unlink()
        file.write_bytes(bytes(data) if rng.random() < 0.7 else bytes(data[:at]))
        return f"raw {name}"
    other = rng.choice(bases)
    if rng.random() < 0.5 or not (other / name).exists():
        file.unlink()
        return f"without {name}"
    file.unlink()
    shutil.copy(other / name, file)
    return f"{name} of {other.name}"


def _mutate_object(file: Path, rng: random.Random, values: dict[str, list[Any]]) -> str:
    try:
        given = json.loads(file.read_text()) if file.exists() else {}
    except (ValueError, RecursionError):  # an earlier change spoilt it
        return ""
    if not isinstance(given, dict):
        return ""
    name = (
        rng.choice([*values, *given]) if rng.random() < 0.9 else rng.choice(("x", "num_experts", "alibi", "rope_ratio"))
    )
    how = rng.random()
    if how < 0.15:
        given.pop(name, None)
        change = f"without {name}"
    else:
        value = copy.deepcopy(rng.choice(values.get(name, WEIRD) if how < 0.85 else WEIRD))
        given[name] = value
        change = f"{name}={value!r:.60}"
    file.unlink(missing_ok=True)
    file.write_text(json.dumps(given))
    return f"{file.name}: {change}"


def _mutate_vocabulary(file: Path, rng: random.Random) -> str:
    try:
        given = json.loads(file.read_text())
        tokens = given["added_tokens"]
        token = rng.choice(tokens)
    except (OSError, ValueError, LookupError, TypeError):
        return ""
    how = rng.choice(
        ("lstrip", "rstrip", "special", "normalized", "gone", "post", "normalizer", "pre", "decoder", "steps")
    )
    if how in token:
        token[how] = not token[how]
    elif how == "gone":
        tokens.remove(token)
    elif how == "post":
        given["post_processor"] = None
    elif how == "normalizer":
        given["normalizer"] = rng.choice(
            (None, {"type": "NFC"}, {"type": "Lowercase"}, {"type": "Prepend", "prepend": "▁"})
        )
    elif how == "pre":
        given["pre_tokenizer"] = rng.choice((None, {"type": "Whitespace"}))
    elif how == "decoder":
        given["decoder"] = rng.choice((None, {"type": "Fuse"}))
    file.unlink()
    file.write_text(json.dumps(given))
    return f"tokenizer.json: {how} {token.get('content')}"


def ours(path: Path) -> Made:
    """What pdkv makes of it. Raises whatever is no refusal."""
    facts: dict[str, Any] = {}
    refusals = []
    with refused(refusals, path):
        config = load_model_config(path)
        facts["ends"], facts["dtype"] = {*config.eos_token_ids}, config.dtype
        is_dynamic = config.rope_scaling is not None and config.rope_scaling.kind == "dynamic"
        if len(PROMPT) + 2 <= config.default_max_model_len and not is_dynamic and config.dtype == "float32":
            driver = StepDriver(path, check_finite=False)
            key = driver.add("a", PROMPT)
            facts["tokens"] = driver.run({key: 2})[key]
    with refused(refusals, path):
        tokenizer = Tokenizer.from_dir(path)
        facts["ids"] = [
            tokenizer.encode(text, add_special_tokens=special) for text in TEXTS for special in (True, False)
        ]
        facts["texts"] = [
            tokenizer.decode(ids, skip_special_tokens=skip) for ids in facts["ids"] for skip in (True, False)
        ]
        with contextlib.suppress(InvalidRequest):
            facts["chat"] = tokenizer.render_chat(CHAT)
    return Made(facts, refusals)


@contextlib.contextmanager
def refused(texts: list[str], path: Path) -> Iterator[None]:
    """A refusal is a ModelError or a ConfigError; of files, one that names the directory."""
    try:
        yield
    except (ModelError, ConfigError) as error:
        texts.append(str(error))
        if str(path) not in str(error) and "chat template" not in str(error) and "tensor" not in str(error):
            raise AssertionError(f"the refusal names no file: {error}") from error


def theirs(path: Path, wanted: set[str]) -> dict[str, Any]:
    """What transformers makes of it, of the parts that pdkv accepted; a part that it refuses is absent."""
    import transformers

    facts: dict[str, Any] = {}
    if "ends" in wanted:
        with contextlib.suppress(Exception):
            model = transformers.AutoModelForCausalLM.from_pretrained(path, trust_remote_code=False)
            ends = model.generation_config.eos_token_id
            facts["ends"] = {*(ends if isinstance(ends, list) else [ends])} - {None}
            facts["dtype"] = str(model.dtype).removeprefix("torch.")
            if "tokens" in wanted:
                facts["tokens"] = _greedy(model)
    if "ids" in wanted:
        with contextlib.suppress(Exception):
            tokenizer = transformers.AutoTokenizer.from_pretrained(path, trust_remote_code=False)
            facts["ids"] = [
                tokenizer.encode(text, add_special_tokens=special) for text in TEXTS for special in (True, False)
            ]
            facts["texts"] = [
                tokenizer.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
                for ids in facts["ids"] for skip in (True, False)
            ]  # fmt: skip
            if tokenizer.eos_token_id is not None and "ends" in facts:
                facts["ends"] |= {tokenizer.eos_token_id}
            if "chat" in wanted:
                facts["chat"] = tokenizer.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    return facts


def _greedy(model: Any) -> list[int | None]:
    """Two tokens; None: it is close."""
    ids, tokens = torch.tensor([PROMPT]), []
    with torch.inference_mode():
        for _ in range(2):
            best = model(ids).logits[0, -1].float().topk(2)
            close = bool(best.values[0] - best.values[1] < MIN_MARGIN)
            tokens.append(None if close or None in tokens else int(best.indices[0]))
            ids = torch.cat((ids, best.indices[:1].view(1, 1)), dim=1)
    return tokens


def differences(mine: dict[str, Any], other: dict[str, Any], vocab_size: int) -> list[str]:
    """Names of facts that are not the same."""
    found = []
    for name in mine.keys() & other.keys():
        if name == "tokens":
            same = all(b is None or a == b for a, b in zip(mine[name], other[name], strict=True))
        elif name == "ends":  # config.json's count too
            same = {number for number in other[name] if 0 <= number < vocab_size} <= mine[name]
        else:
            same = mine[name] == other[name]
        if not same:
            found.append(name)
    return sorted(found)


def fuzz(root: Path, mutations: int, seed: int, bases: Sequence[str] = BASES) -> Result:
    """Mutate directories made in `root`."""
    import transformers

    published = model_directories.directories()
    made = [model_directories.write(root / name, published[name]) for name in bases]
    result, outcomes, handler = Result(seed=seed, mutations=mutations), Counter[str](), Warned()
    logging.getLogger("pdkv").addHandler(handler)
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    transformers.logging.disable_progress_bar()
    try:
        for number in range(mutations):
            rng = random.Random(f"{seed}:{number}")
            base = rng.choice(made)
            path = root / "mutant" / base.name
            shutil.rmtree(path, ignore_errors=True)
            shutil.copytree(base, path)
            changes = mutate(path, rng, made)
            handler.texts.clear()
            outcome, violation = _judge(path, handler)
            outcomes[outcome] += 1
            if violation:
                result.violations.append(f"{seed}:{number} {base.name} {changes}: {violation}")
                print(result.violations[-1], file=sys.stderr, flush=True)
    finally:
        logging.getLogger("pdkv").removeHandler(handler)
    result.outcomes = dict(outcomes)
    return result


def _judge(path: Path, handler: Warned) -> tuple[str, str]:
    """What became of a directory, and what is wrong with that."""
    try:
        mine = ours(path)
    except Exception as error:
        return "raised", f"{type(error).__name__}: {error!s:.300}"
    if mine.refusals:
        return "refused", ""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        other = theirs(path, set(mine.facts))
    vocab_size = json.loads((path / "config.json").read_text()).get("vocab_size", 0) if "ends" in mine.facts else 0
    found = differences(mine.facts, other, vocab_size)
    if found and not handler.texts:
        shown = "; ".join(f"{name}: {mine.facts[name]!r:.200} is not {other[name]!r:.200}" for name in found)
        return "differs", shown
    if found:
        return "differs with a warning", ""
    return "equal" if mine.facts.keys() <= other.keys() else "refused by transformers alone", ""


def main(arguments: Sequence[str] | None = None) -> int:
    """0 if nothing was violated."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mutations", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as root:
        result = fuzz(Path(root), options.mutations, options.seed)
    print(result.outcomes)
    write_json("soak-directories", result, RESULTS)
    return 1 if result.violations else 0


if __name__ == "__main__":
    sys.exit(main())
