"""Special tokens by name, as the files beside a tokenizer.json say them. No torch, no tokenizers."""

from pathlib import Path
from typing import Any

import msgspec

from pdkv.errors import ModelError
from pdkv.models.json_fields import read_json

_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class _AddedToken(msgspec.Struct):
    id: int
    content: str


class _Model(msgspec.Struct):
    vocab: dict[str, int] | list[tuple[str, float]] = []


class _TokenizerFile(msgspec.Struct):
    model: _Model
    added_tokens: list[_AddedToken] = []


def read_tokenizer_config(path: Path) -> dict[str, Any]:
    """tokenizer_config.json of a model directory; empty where there is none. Raises ModelError."""
    file = path / "tokenizer_config.json"
    return read_json(file) if file.is_file() else {}


def read_special_tokens(path: Path) -> dict[str, Any]:
    """Name to text, as Hugging Face gives them to chat templates.

    As in transformers, special_tokens_map.json counts, and before tokenizer_config.json, only where the latter does not
    list the added tokens itself. Raises ModelError: a file is broken, or a token is no text.
    """
    config, older = read_tokenizer_config(path), path / "special_tokens_map.json"
    if "added_tokens_decoder" not in config and older.is_file():
        config |= read_json(older)
    tokens: dict[str, Any] = {
        name: _text_of(config[name], name, path) for name in _NAMES if config.get(name) is not None
    }
    if extra := config.get("additional_special_tokens"):
        if not isinstance(extra, list):
            raise ModelError(f"{path}: additional_special_tokens is no list")
        tokens["additional_special_tokens"] = [_text_of(value, "additional_special_tokens", path) for value in extra]
    return tokens


def read_eos_token_id(path: Path) -> int | None:
    """The id of the tokenizer's eos_token; None: it has none, or its vocabulary lacks it. Raises ModelError."""
    text, file = read_special_tokens(path).get("eos_token"), path / "tokenizer.json"
    if text is None or not file.is_file():
        return None
    try:
        known = msgspec.json.decode(file.read_bytes(), type=_TokenizerFile)  # of 150,000 tokens in some 30 ms
    except (OSError, msgspec.MsgspecError) as error:
        raise ModelError(f"{file}: broken: {error}") from error
    vocab = known.model.vocab
    ids = vocab if isinstance(vocab, dict) else {token: index for index, (token, _) in enumerate(vocab)}
    return {**ids, **{token.content: token.id for token in known.added_tokens}}.get(text)


def _text_of(value: Any, name: str, path: Path) -> str:
    """A special token is written as its text or as {"content": text, …}."""
    text = value.get("content") if isinstance(value, dict) else value
    if not isinstance(text, str):
        raise ModelError(f"{path}: special token {name} is {value!r}, a text was expected")
    return text
