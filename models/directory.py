"""A model directory as a whole: which of its files decides what, as in transformers and vLLM (docs/models.md).

No torch, no tokenizers. If files disagree, the one that counts for transformers and vLLM counts here, with a warning;
where that is not possible, the file and field are refused by name.
"""

import functools
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from msgspec.structs import replace

from pdkv.errors import ModelError
from pdkv.models.json_fields import Fields, read_bytes, read_json

logger = logging.getLogger(__name__)

T = TypeVar("T")

_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_TYPE = {"__type": "AddedToken"}
_END = "<|endoftext|>"
_CLASS_TOKENS: Mapping[str, Mapping[str, str]] = {
    "LlamaTokenizer": {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
    "Qwen2Tokenizer": {"eos_token": _END, "unk_token": _END, "pad_token": _END},
    "GPT2Tokenizer": {"bos_token": _END, "eos_token": _END, "unk_token": _END},
}
"""Classes of transformers that make a tokenizer anew from a tokenizer.json, and their special tokens."""

_OTHER_CLASSES = ("GemmaTokenizer", "CodeLlamaTokenizer", "CohereTokenizer", "GPTNeoXTokenizer", "T5Tokenizer")
_OTHER_THINGS: Mapping[str, str] = {
    "adapter_config.json": "an adapter (LoRA): merge it into its base model (peft: merge_and_unload, save_pretrained), "
    "and serve that; remove the file where the weights beside it are merged already",
    "*.gguf": "a GGUF model: name the directory of the model's safetensors files instead",
    "params.json": "a model in Mistral's own format: name its Hugging Face form, which has a config.json",
    "model_index.json": "a diffusion pipeline: this server generates text",
}


class AddedToken(msgspec.Struct, frozen=True):
    """A token added to a tokenizer's vocabulary, with the arguments of `tokenizers.AddedToken`."""

    content: str
    single_word: bool = False
    lstrip: bool = False
    rstrip: bool = False
    normalized: bool | None = None  # None: unless it is special
    special: bool = False
    id: int | None = None


class _Model(msgspec.Struct):
    vocab: dict[str, int] | list[tuple[str, float]] = {}
    type: str | None = None


class _TokenizerFile(msgspec.Struct):
    model: _Model
    added_tokens: list[AddedToken] = []
    decoder: msgspec.Raw = msgspec.Raw(b"")


class ModelDirectory:
    """The JSON files and templates of a directory, each read once, on first use."""

    def __init__(self, path: Path) -> None:
        """Raises ModelError for a missing directory or one without a model; the message says what it is."""
        self.path = path
        if path.is_file():
            hint = _OTHER_THINGS["*.gguf"] if path.suffix == ".gguf" else "name the directory that holds the model"
            raise ModelError(f"model {path} is a file: {hint}")
        if not path.is_dir():
            raise ModelError(f"model directory {path} does not exist")
        for pattern, what in _OTHER_THINGS.items():
            is_other = pattern == "adapter_config.json" or not (path / "config.json").exists()
            if is_other and (found := next(path.glob(pattern), None)) is not None:
                raise ModelError(f"{found}: this is {what}")

    def optional(self, name: str) -> dict[str, Any]:
        """The JSON object in a file; empty if there is no file. Raises ModelError."""
        file = self.path / name
        return read_json(file) if file.exists() else {}

    @functools.cached_property
    def config(self) -> Fields:
        """config.json. Raises ModelError."""
        return Fields(self.path / "config.json", read_json(self.path / "config.json"))

    @functools.cached_property
    def tokenizer_config(self) -> dict[str, Any]:
        """tokenizer_config.json, overridden by special_tokens_map.json.

        As in transformers, that happens only if tokenizer_config.json does not list the added tokens itself. Raises
        ModelError.
        """
        config, name = self.optional("tokenizer_config.json"), "special_tokens_map.json"
        if (self.path / "tokenizer.json").exists():  # whose post-processor decides
            config = {key: value for key, value in config.items() if key not in ("add_bos_token", "add_eos_token")}
        if "added_tokens_decoder" in config:
            return config
        older = self.optional(name)
        for key, value in older.items():
            if not key.endswith(("_token", "_tokens")) or isinstance(value, bool):
                raise ModelError(f"{self.path / name}: field {key!r} = {value!r:.80} is not a special token")
        return config | {name: _TYPE | value if isinstance(value, dict) else value for name, value in older.items()}

    @functools.cached_property
    def _tokenizer_file(self) -> _TokenizerFile:
        file = self.path / "tokenizer.json"
        try:
            written = msgspec.json.decode(read_bytes(file), type=_TokenizerFile)  # of 150,000 tokens in some 30 ms
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise ModelError(f"{file}: broken: {error}") from error
        vocab = written.model.vocab
        if isinstance(vocab, dict) and len({*vocab.values()}) < len(vocab):
            raise ModelError(f"{file}: broken: two tokens of model.vocab have the same id")
        return written

    @functools.cached_property
    def tokenizer_class(self) -> str | None:
        """The class by which transformers rebuilds the tokenizer; None: tokenizer.json is used as written.

        Raises ModelError.
        """
        if not all((self.path / name).exists() for name in ("config.json", "tokenizer.json")):
            return None
        model_type = self.config.values.get("model_type")
        said = self.tokenizer_config.get("tokenizer_class") or self.config.values.get("tokenizer_class")
        name = str(said).removesuffix("Fast")
        if model_type == "qwen2" or (model_type == "qwen3" and said is None):
            name = "Qwen2Tokenizer"
        if model_type not in (None, "llama", "qwen2", "qwen3") or name not in (*_CLASS_TOKENS, *_OTHER_CLASSES):
            return None
        written, by_bytes = self._tokenizer_file, b"ByteLevel" in bytes(self._tokenizer_file.decoder)
        is_bpe = isinstance(written.model.vocab, dict) and written.model.type in (None, "BPE")
        if name in _CLASS_TOKENS and is_bpe and by_bytes == (name != "LlamaTokenizer"):
            return name
        logger.warning(
            "%s: tokenizer.json counts as it is written; transformers makes a %s of it, which gives other tokens",
            self.path, name,
        )  # fmt: skip
        return None

    @functools.cached_property
    def special_tokens(self) -> dict[str, str]:
        """Special tokens, name to text, as chat templates get them. Raises ModelError: a file is broken, or a token is
        no text.
        """
        return {name: token.content for name, token in self._named.items()}

    @functools.cached_property
    def _named(self) -> dict[str, AddedToken]:
        config = {**_CLASS_TOKENS.get(self.tokenizer_class or "", {}), **self.tokenizer_config}
        extra = config.get("extra_special_tokens")
        more = [name for name, value in config.items() if name.endswith("_token") and _is_token(value)]
        values = {name: config[name] for name in (*_NAMES, *more) if config.get(name) is not None}
        values |= extra if isinstance(extra, dict) else {}
        return {name: replace(self._added(value, name), special=True) for name, value in values.items()}

    @functools.cached_property
    def added_tokens(self) -> list[AddedToken]:
        """The tokens that transformers adds to the vocabulary of tokenizer.json, in its order. Raises ModelError."""
        config = self.tokenizer_config
        rebuilt, has_file = self.tokenizer_class is not None, (self.path / "tokenizer.json").exists()
        own = self._tokenizer_file.added_tokens if has_file else []
        if "added_tokens_decoder" in config:
            listed = self._as(config["added_tokens_decoder"], dict[int, AddedToken], "added_tokens_decoder")
        else:
            older = self._as(self.optional("added_tokens.json"), dict[str, int], "added_tokens.json")
            listed = {number: AddedToken(text) for text, number in older.items()}
            listed |= {token.id or 0: token for token in own}
        named = {*self.special_tokens.values()}
        tokens = [
            replace(token, special=token.special or token.content in named) for _, token in sorted(listed.items())
        ]
        have = {token.content for token in ([] if rebuilt else own) + tokens}
        extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
        extra = [] if isinstance(extra, dict) else self._as(extra, list[Any], "no list: extra_special_tokens")
        more = [self._added(token, "extra_special_tokens") for token in extra]
        more = [replace(token, special=token.special or token.content in named) for token in more]
        special = dict.fromkeys([*self._named.values(), *more])  # of one text the last one counts
        tokens += [token for token in special if token.content not in have]
        if self.tokenizer_class == "Qwen2Tokenizer":
            tokens += [AddedToken(token.content, special=True) for token in special]
        return tokens

    def _added(self, value: Any, name: str) -> AddedToken:
        """A token, which is written as its text or as {"content": text, …}."""
        return self._as({"content": value, "special": True} if isinstance(value, str) else value, AddedToken, name)

    def _as(self, value: Any, kind: type[T], name: str) -> T:
        try:
            return msgspec.convert(value, kind, strict=False)
        except msgspec.ValidationError:
            raise ModelError(f"{self.path}: {name} is {value!r:.80}, a text was expected") from None

    @functools.cached_property
    def _ids(self) -> dict[str, int]:
        """Ids of all tokens, by the rule of the library `tokenizers` for those that are added, whatever ids the file
        gives them.
        """
        vocab, own = self._tokenizer_file.model.vocab, self._tokenizer_file.added_tokens
        size = len(vocab)
        ids = dict(vocab) if isinstance(vocab, dict) else {token: index for index, (token, _) in enumerate(vocab)}
        last = -1
        for token in [*([] if self.tokenizer_class is not None else own), *self.added_tokens]:
            last = max(last, ids.setdefault(token.content, max(size, last + 1)))
        return ids

    @property
    def new_ids(self) -> dict[str, int]:
        """Ids of tokens that tokenizer.json lacks, or has with other ids. Raises ModelError."""
        own = {token.content: token.id for token in self._tokenizer_file.added_tokens}
        return {
            token.content: self._ids[token.content]
            for token in self.added_tokens
            if self._ids[token.content] >= len(self._tokenizer_file.model.vocab)
            and own.get(token.content) != self._ids[token.content]
        }

    def eos_token_id(self) -> int | None:
        """The id of the tokenizer's eos_token; None: it has none. Raises ModelError."""
        text = self.special_tokens.get("eos_token")
        if text is None or not (self.path / "tokenizer.json").exists():
            return None
        return self._ids.get(text)

    def chat_templates(self) -> dict[str, str]:
        """Chat templates by name: those in separate files, else those in tokenizer_config.json, else in
        chat_template.json.

        Raises:
            ModelError: a template is not a text.
        """
        main, listed = self.path / "chat_template.jinja", self.optional("tokenizer_config.json").get("chat_template")
        files = {"default": main} if main.exists() else {}
        files |= {file.stem: file for file in sorted((self.path / "additional_chat_templates").glob("*.jinja"))}
        if files:
            templates = {name: read_text(file) for name, file in files.items()}
            if listed is not None and listed != templates.get("default"):
                logger.warning("%s: chat_template of tokenizer_config.json is not used: %s is", self.path, main.name)
            return templates
        name = "tokenizer_config.json"
        if listed is None:
            name, listed = "chat_template.json", self.optional("chat_template.json").get("chat_template")
            if listed is not None:
                logger.warning("%s: chat_template.json, which is a processor's, has the only chat template", self.path)
        if listed is None or isinstance(listed, str):
            return {} if listed is None else {"default": listed}
        try:
            named = {entry["name"]: entry["template"] for entry in listed}
        except (TypeError, KeyError):
            named = {"": None}
        if not all(isinstance(key, str) and isinstance(template, str) for key, template in named.items()):
            raise ModelError(f"{self.path / name}: chat_template is neither a text nor a list of named texts")
        return named


def _is_token(value: Any) -> bool:
    """Whether transformers takes a field of tokenizer_config.json whose name it does not know for a special token."""
    return isinstance(value, str) or (isinstance(value, dict) and value.items() >= _TYPE.items())


def read_text(file: Path) -> str:
    """A text file of bounded size. Raises ModelError."""
    try:
        return read_bytes(file).decode()
    except UnicodeDecodeError as error:
        raise ModelError(f"{file}: {error}") from error
