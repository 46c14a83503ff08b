"""Small tokenizers of every kind that models use, made in memory."""

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

SAMPLE = [
    "Hello, world! The quick brown fox jumps over the lazy dog.",
    "naïve café 你好 世界 👍🏽 😀 ελληνικά",
    "a  b\n\tc 0123",
]


def byte_level_backend() -> tokenizers.Tokenizer:
    """GPT-2's kind: every byte has a token."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<s>", "</s>", "<|user|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(SAMPLE * 3, trainer)
    backend.add_tokens(["<plain added>"])
    return backend


def byte_level_sequence_backend() -> tokenizers.Tokenizer:
    """The same vocabulary behind a decoder of several steps."""
    backend = byte_level_backend()
    backend.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Fuse()])
    return backend


def byte_fallback_backend() -> tokenizers.Tokenizer:
    """Llama 2's and Mistral's kind: words with ▁, and byte tokens for what the vocabulary lacks."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256))]
    words += ["▁", *"Helo,wrdabc! \n", "▁Hello", "▁world", "▁a", "he", "é", "你"]
    vocab = {word: i for i, word in enumerate(dict.fromkeys(words))}
    backend = tokenizers.Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    backend.post_processor = processors.TemplateProcessing("<s> $A", None, [("<s>", vocab["<s>"])])
    return backend


def metaspace_backend() -> tokenizers.Tokenizer:
    """SentencePiece's kind without byte tokens."""
    vocab = {w: i for i, w in enumerate(["<unk>", "<s>", "▁", "▁the", "▁cat", "s", "at", "é", "▁▁", "�"])}
    backend = tokenizers.Tokenizer(models.BPE(vocab, [], unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    backend.add_special_tokens(["<s>"])
    return backend


def word_backend() -> tokenizers.Tokenizer:
    """Whole words and no decoder: joined by spaces."""
    backend = tokenizers.Tokenizer(
        models.WordLevel({"<unk>": 0, "one": 1, "two": 2, "three": 3, "<s>": 4}, unk_token="<unk>")
    )
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.add_special_tokens(["<s>"])
    return backend
