"""Random models to measure with: tiny (5 M parameters) and mid (200 M), bfloat16, byte-level vocabulary of 4,096.

python -m benchmarks.models FOLDER      writes FOLDER/tiny and FOLDER/mid, which takes seconds
"""

import sys
from pathlib import Path

SIZES = {
    "tiny": {"hidden_size": 256, "num_hidden_layers": 4, "intermediate_size": 768, "num_attention_heads": 8,
             "num_key_value_heads": 4},
    "mid": {"hidden_size": 1024, "num_hidden_layers": 16, "intermediate_size": 2816, "num_attention_heads": 16,
            "num_key_value_heads": 8},
}  # fmt: skip
VOCAB_SIZE = 4096
INITIALIZER_RANGE = 0.06  # at the usual 0.02 a random model repeats its last token


def make_model(size: str, folder: Path) -> Path:
    """The model's directory; made if it is not there. Needs transformers."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import AutoModelForCausalLM, LlamaConfig

    path = folder / size
    if (path / "model.safetensors").exists():
        return path
    torch.manual_seed(0)
    config = LlamaConfig(
        **SIZES[size],
        vocab_size=VOCAB_SIZE,
        max_position_embeddings=8192,
        initializer_range=INITIALIZER_RANGE,
        bos_token_id=0,
        eos_token_id=1,
    )
    AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(path)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    filler = [f"<{i}>" for i in range(VOCAB_SIZE - len(alphabet) - 2)]
    vocabulary = {token: i for i, token in enumerate(["<s>", "</s>", *alphabet, *filler])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(path / "tokenizer.json"))
    return path


if __name__ == "__main__":
    for name in SIZES:
        print(make_model(name, Path(sys.argv[1])))
