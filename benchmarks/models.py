"""Random Llama models to measure with: tiny (5 M parameters), mid (200 M), large (960 M), 8b; bfloat16, no download.

    python -m benchmarks.models tiny FOLDER

At transformers' default initializer_range of 0.02 a random model repeats its last token; 0.06 makes it wander.
"""

import argparse
import contextlib
import json
import os
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pdkv.config import DEFAULT_MODEL

VOCAB_SIZE = 4096
MAX_LEN = 8192
_SHAPE = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
SIZES: dict[str, dict[str, int]] = {
    "tiny": dict(zip(_SHAPE, (256, 768, 4, 8, 4), strict=True)),
    "mid": dict(zip(_SHAPE, (1024, 2816, 16, 16, 8), strict=True)),
    "large": dict(zip(_SHAPE, (2048, 5632, 20, 16, 8), strict=True)),
    "8b": {**dict(zip(_SHAPE, (4096, 14336, 32, 32, 8), strict=True)), "vocab_size": 128_256},  # Llama 3.1 8B's
}
MOE = {
    "hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 8, "num_attention_heads": 16,
    "num_key_value_heads": 4, "head_dim": 64, "num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 768,
    "norm_topk_prob": True, "tie_word_embeddings": False,
}  # fmt: skip
"""The configuration of the size "moe", a Qwen3-MoE."""
_SMALL = {
    "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 2,
}  # fmt: skip
_EXPERTS = {"moe_intermediate_size": 128, "num_experts_per_tok": 2}
_LATENT = {
    "num_key_value_heads": 8, "q_lora_rank": 64, "kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16,
    "v_head_dim": 32, "first_k_dense_replace": 1, "n_routed_experts": 8, "n_shared_experts": 1, **_EXPERTS,
}  # fmt: skip
_CAPPED = {"head_dim": 32, "sliding_window": 64, "query_pre_attn_scalar": 32}
_PADDED = {"pad_token_id": 1}  # in place of a default behind the vocabulary
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 64},
    "ministral": {"head_dim": 32, "layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 64},
    "qwen2": {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 2},
    "qwen3": {"head_dim": 32},
    "phi3": {"original_max_position_embeddings": MAX_LEN, "partial_rotary_factor": 0.75, **_PADDED},
    "gemma2": {"attn_logit_softcapping": 2.0, **_CAPPED},
    "gemma3_text": {"sliding_window_pattern": 2, **_CAPPED},
    "olmo2": {},
    "granite": {"embedding_multiplier": 6.0, "logits_scaling": 2.0, "residual_multiplier": 0.4},
    "smollm3": {"no_rope_layer_interval": 2, **_PADDED},
    "glm4": {"head_dim": 32, **_PADDED},
    "qwen3_moe": {"head_dim": 32, "num_experts": 8, **_EXPERTS},
    "mixtral": {"num_local_experts": 4, "sliding_window": None},
    "glm4_moe": {"head_dim": 32, "n_routed_experts": 8, "n_group": 2, "topk_group": 1, "use_qk_norm": True, **_EXPERTS},
    "deepseek_v2": {"n_group": 1, "topk_group": 1, "norm_topk_prob": False, **_LATENT},
    "deepseek_v3": {"n_group": 2, "topk_group": 1, "num_nextn_predict_layers": 0, **_LATENT},
}
"""Small models of all families that are served, by transformers' names of their configurations."""
_SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
_SEED = 0
_GATE = 0.05
"""Standard deviation of added neurons' weights before the activation."""


@contextlib.contextmanager
def models_folder() -> Iterator[Path]:
    """Where models are found again, if BENCH_MODELS names a directory, or one that goes."""
    kept = os.environ.get("BENCH_MODELS")
    with contextlib.nullcontext(kept) if kept else tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def find_model(folder: Path, size: str, device: str = "cpu") -> Path:
    """The model directory `folder`/`size`, made on `device` if it is not there."""
    path = folder / size
    if not (path / "config.json").exists():
        make_model(path, size, device)
    return path


def find_family(folder: Path, family: str) -> Path:
    """The model directory of a small model of that family, in float32, made if it is not there."""
    path = folder / family
    if not (path / "config.json").exists():
        _make(path, family, {**_SMALL, **FAMILIES[family]}, "cpu", "float32")
    return path


def make_model(path: Path, size: str, device: str = "cpu") -> None:
    """Write config, weights and tokenizer; all or nothing."""
    family, fields = ("qwen3_moe", MOE) if size == "moe" else ("llama", SIZES[size])
    _make(path, family, fields, device, "bfloat16")  # never as float32: the large one would take 4 GB


def find_wide(folder: Path, width: int, noise: float, dtype: str = "bfloat16", times: int = 1) -> Path:
    """A model directory of the embedded model with `width` more neurons in each layer, made if it is not there.

    Args:
        noise: standard deviation of their weights behind the activation; with 0 the function is that of the embedded
            model, and otherwise nearly so.
        times: its hidden state has so many times as many numbers, all others zeros: 4 to a power, so that norms of them
            are exact.
    """
    path = folder / f"wide-{times}-{width}-{noise:g}-{dtype}"
    if not path.exists():
        _whole(path, lambda work: _widen(work, width, noise, dtype, times))
    return path


def _widen(work: Path, width: int, noise: float, dtype: str, times: int) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    draw = torch.Generator().manual_seed(_SEED)
    shutil.copytree(DEFAULT_MODEL, work, dirs_exist_ok=True)
    fields = json.loads((work / "config.json").read_text())
    zeros = (times - 1) * fields["hidden_size"]
    fields["intermediate_size"] += width
    fields["hidden_size"] += zeros
    fields["rms_norm_eps"] /= times
    (work / "config.json").write_text(json.dumps({**fields, "dtype": dtype}))
    weights = load_file(work / "model.safetensors")
    for name, weight in weights.items():
        if "mlp" in name:
            axis = 1 if "down_proj" in name else 0
            shape = (weight.shape[0], width) if axis else (width, weight.shape[1])
            more = torch.randn(shape, generator=draw) * (noise if axis else _GATE)
            weight = torch.cat([weight, more], axis)
        if weight.dim() == 1:
            weight = weight / times**0.5
        adds = "o_proj" in name or "down_proj" in name
        weight = torch.nn.functional.pad(weight, (0, 0, 0, zeros) if adds else (0, zeros))
        weights[name] = weight.to(getattr(torch, dtype)).contiguous()
    save_file(weights, work / "model.safetensors", {"format": "pt"})


def _whole(path: Path, make: Callable[[Path], None]) -> None:
    """Make a directory, all or nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(dir=path.parent))
    try:
        make(work)
        os.rename(work, path)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _make(path: Path, family: str, fields: Mapping[str, Any], device: str, dtype: str) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(_SEED)
    config = AutoConfig.for_model(
        family,
        **{"vocab_size": VOCAB_SIZE, **fields},
        max_position_embeddings=MAX_LEN,
        initializer_range=0.06,
        bos_token_id=0,
        eos_token_id=1,
    )
    make: Any = AutoModelForCausalLM.from_config
    with torch.device(device):
        model = make(config, dtype=getattr(torch, dtype))

    def save(work: Path) -> None:
        model.save_pretrained(work)
        _make_tokenizer().save_pretrained(work)

    _whole(path, save)


def _make_tokenizer() -> Any:
    """Byte-level BPE over the sources of Python's standard library, which every machine has."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(_SPECIAL.values()),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    library = sorted(Path(sysconfig.get_path("stdlib")).glob("[a-m]*.py"))
    bpe.train_from_iterator((source.read_text(errors="ignore") for source in library), trainer)
    make: Any = PreTrainedTokenizerFast
    return make(tokenizer_object=bpe, **_SPECIAL)


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("size", choices=[*SIZES, "moe"])
    parser.add_argument("folder", type=Path, help="the model goes to FOLDER/SIZE")
    options = parser.parse_args(arguments)
    print(find_model(options.folder, options.size))
    return 0


if __name__ == "__main__":
    sys.exit(main())
