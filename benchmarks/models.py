"""Random Llama models to measure with: tiny (5 M parameters), mid (200 M), large (960 M), 8b; bfloat16, no download.

    python -m benchmarks.models tiny FOLDER

At transformers' default initializer_range of 0.02 a random model repeats its last token; 0.06 makes it wander.
"""

import argparse
import contextlib
import os
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

VOCAB_SIZE = 4096
MAX_LEN = 8192
_SHAPE = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
SIZES: dict[str, dict[str, int]] = {
    "tiny": dict(zip(_SHAPE, (256, 768, 4, 8, 4), strict=True)),
    "mid": dict(zip(_SHAPE, (1024, 2816, 16, 16, 8), strict=True)),
    "large": dict(zip(_SHAPE, (2048, 5632, 20, 16, 8), strict=True)),
    "8b": {**dict(zip(_SHAPE, (4096, 14336, 32, 32, 8), strict=True)), "vocab_size": 128_256},  # Llama 3.1 8B's
}
_SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
_SEED = 0


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


def make_model(path: Path, size: str, device: str = "cpu") -> None:
    """Write config, weights and tokenizer; all or nothing."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(_SEED)
    config = LlamaConfig(
        **{"vocab_size": VOCAB_SIZE, **SIZES[size]},
        max_position_embeddings=MAX_LEN,
        initializer_range=0.06,
        bos_token_id=0,
        eos_token_id=1,
    )
    make: Any = LlamaForCausalLM._from_config
    with torch.device(device):
        model = make(config, dtype=torch.bfloat16)  # never as float32: the large one would take 4 GB
    path.parent.mkdir(parents=True, exist_ok=True)
    work = tempfile.mkdtemp(dir=path.parent)
    try:
        model.save_pretrained(work)
        _make_tokenizer().save_pretrained(work)
        os.rename(work, path)
    finally:
        shutil.rmtree(work, ignore_errors=True)


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
    parser.add_argument("size", choices=SIZES)
    parser.add_argument("folder", type=Path, help="the model goes to FOLDER/SIZE")
    options = parser.parse_args(arguments)
    print(find_model(options.folder, options.size))
    return 0


if __name__ == "__main__":
    sys.exit(main())
