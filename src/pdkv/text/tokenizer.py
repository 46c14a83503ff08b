"""The tokenizer of a Hugging Face model directory."""

import functools
import json
import logging
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import tokenizers
from tokenizers import decoders, normalizers, pre_tokenizers

from pdkv.config import DEFAULT_MODEL, ModelFiles, is_paced
from pdkv.errors import InvalidRequest, ModelError
from pdkv.models.directory import ModelDirectory, read_text
from pdkv.text.bounded_template import bounded_template
from pdkv.text.chat_template import ChatTemplate
from pdkv.text.detokenizer import ByteDetokenizer, Detokenizer, WindowDetokenizer
from pdkv.text.sandbox import Render
from pdkv.text.template_forms import ContentFormat, Messages

logger = logging.getLogger(__name__)

_SHORT = 1024
"""Tokens that are decoded within a hundred microseconds."""

_KEPT_TEMPLATES = 8
"""Compiled templates kept, including the model's."""

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Tokenizer:
    """Text to token ids and back; immutable once loaded, and shared by all requests."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special_tokens: Mapping[str, Any] | None = None,
        chat_template: str | None = None,
        tool_template: str | None = None,
        content_format: ContentFormat = "auto",
    ) -> None:
        """`special_tokens`: the names and texts that a chat template may use, such as bos_token; `tool_template`: the
        template for conversations with tools; None: the same one; `content_format`: as in ChatTemplate. Raises
        ModelError if a template is broken.
        """
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.special_tokens = dict(special_tokens or {})
        self._content_format = content_format
        self._compile = functools.lru_cache(_KEPT_TEMPLATES)(self._compile_template)
        self.chat_template = self._compile(chat_template, False, content_format) if chat_template else None
        self.tool_template = self.chat_template
        if tool_template:
            self.tool_template = self._compile(tool_template, True, content_format)
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        """Special tokens are left out of decoded text by default."""
        self._decoders = _decoder_names(backend)
        self._byte_level = self._decoders == ["ByteLevel"]
        self._token_bytes = _TokenBytes(self, skip=frozenset())
        self._shown_bytes = _TokenBytes(self, skip=self.special_ids)
        self._bytes_with: dict[frozenset[str], _TokenBytes] = {}  # keeping some of the special tokens

    @classmethod
    def from_dir(
        cls, path: Path, *, chat_template: Path | None = None, content_format: ContentFormat = "auto"
    ) -> "Tokenizer":
        """Load tokenizer.json and the files next to it: tokenizer_config.json, special_tokens_map.json, templates.

        Args:
            chat_template: a file that replaces the model's templates.
            content_format: as in ChatTemplate.

        Raises:
            ModelError: a file is missing or broken.
        """
        directory = ModelDirectory(DEFAULT_MODEL if is_paced(path) else path)
        file = directory.path / "tokenizer.json"
        if not file.exists():
            raise ModelError(
                f"{path}: tokenizer.json is missing; transformers writes one: "
                "AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)"
            )
        try:
            backend = _as_transformers(tokenizers.Tokenizer.from_str(read_text(file)), directory)
            backend.encode("a")
        except (ModelError, KeyboardInterrupt):
            raise
        except BaseException as error:  # the library raises nothing more specific, and its panics are no Exception
            raise ModelError(f"{file}: broken: {error}") from error
        given = {} if chat_template is None else {"default": read_text(chat_template)}
        templates = given or directory.chat_templates()
        return cls(
            backend,
            special_tokens=directory.special_tokens,
            chat_template=templates.get("default"),
            tool_template=templates.get("tool_use"),
            content_format=content_format,
        )

    @property
    def vocab_size(self) -> int:
        """Number of ids that the tokenizer knows; the model may have more."""
        return int(self._backend.get_vocab_size(with_added_tokens=True))

    @property
    def chat_template_source(self) -> str:
        """Unmodified source of the chat template for conversations with tools; empty if there is none."""
        return self.tool_template.source if self.tool_template is not None else ""

    def ids_by_text(self) -> dict[str, int]:
        """Every token's id by its form in the vocabulary, including added tokens."""
        return dict(self._backend.get_vocab(with_added_tokens=True))

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`, including special tokens (such as BOS) that the tokenizer puts around a sequence.

        Other Python threads run in the meantime: unlike the library's own `encode`, its batches allow that, and without
        offsets they take half the time.

        Raises:
            InvalidRequest: it contains half of a surrogate pair, or the library gives up on it.
        """
        try:
            [encoding] = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        except TypeError:  # the library's error for a text that has no UTF-8 form
            raise InvalidRequest("the text is not valid Unicode: it contains half of a surrogate pair") from None
        except BaseException as error:
            if isinstance(error, Exception | KeyboardInterrupt | SystemExit):
                raise
            raise InvalidRequest(f"the tokenizer gave up on the text: {error}") from None  # a panic of the library
        ids: list[int] = encoding.ids
        return ids

    @functools.cached_property
    def max_token_chars(self) -> int:
        """Characters of the longest token, at least one: the most characters per token of any text.

        In a byte-level vocabulary a token is written with one letter per byte, and has at most as many characters as
        bytes.
        """
        return max(map(len, self._backend.get_vocab(with_added_tokens=True)), default=1)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of a whole sequence. For a long one, other Python threads run meanwhile, as in `encode`."""
        if len(token_ids) <= _SHORT:
            return str(self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens))
        [text] = self._backend.decode_batch([list(token_ids)], skip_special_tokens=skip_special_tokens)
        return str(text)

    def render_chat(
        self,
        messages: Messages,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        content_format: ContentFormat | None = None,
        bounded: bool = False,
        **options: Any,
    ) -> str:
        """The prompt of a conversation, including special tokens, for the router and `LLM`.

        As in transformers and vLLM, conversations with tools use the template "tool_use" if there is one.

        Args:
            tools: functions that the template may describe.
            chat_template: replaces the model's.
            content_format: replaces that of the model's template.
            bounded: `chat_template` is untrusted and rendered within limits of time and memory.
            options: further arguments of `ChatTemplate.render`.

        Raises:
            InvalidRequest: there is no chat template, it is broken, or it refuses the messages.
        """
        template = self.tool_template if tools else self.chat_template
        if chat_template is None and template is None:
            kind = "chat template" if self.tool_template is None else "chat template without tools"
            raise InvalidRequest(f"the model has no {kind}: use completions, or --chat-template FILE", param="messages")
        form, source = content_format or self._content_format, chat_template
        if source is None and form != self._content_format:
            assert template is not None
            source = template.source
        try:
            if source is not None and bounded:
                with bounded_template(source) as render:
                    given = self._compile_template(source, bool(tools), form, render)
                    return given.render(messages, tools=tools, **options)
            template = template if source is None else self._compile(source, bool(tools), form)
        except (ModelError, jinja2.TemplateError) as error:
            raise InvalidRequest(f"chat_template: {error}", param="chat_template") from None
        assert template is not None
        return template.render(messages, tools=tools, **options)

    def _compile_template(
        self, source: str, for_tools: bool, form: ContentFormat, render: Render | None = None
    ) -> ChatTemplate:
        return ChatTemplate(source, self.special_tokens, for_tools=for_tools, content_format=form, render=render)

    def token(self, token_id: int) -> str:
        """The token as in the vocabulary; empty for an unknown id."""
        return str(self._backend.id_to_token(token_id) or "")

    def detokenizer(self, *, skip_special_tokens: bool = True, keep: frozenset[str] = frozenset()) -> Detokenizer:
        """A new incremental detokenizer; special tokens with the texts in `keep` are not skipped."""
        if self._byte_level:
            return ByteDetokenizer(self._bytes_to_show(keep) if skip_special_tokens else self._token_bytes)
        hidden = self.special_ids - self._ids_of(keep) if skip_special_tokens else frozenset()
        return WindowDetokenizer(
            lambda ids: self.decode(ids, skip_special_tokens=False),
            is_hidden=lambda i: i in hidden or self._backend.id_to_token(i) is None,
            is_byte=self._is_byte,
            hold_replacement="ByteLevel" in self._decoders,
        )

    def _bytes_to_show(self, keep: frozenset[str]) -> "_TokenBytes":
        """One table per set of texts: a server has as many as it has formats of answers."""
        if not keep:
            return self._shown_bytes
        if keep not in self._bytes_with:
            self._bytes_with[keep] = _TokenBytes(self, skip=self.special_ids - self._ids_of(keep))
        return self._bytes_with[keep]

    def knows(self, text: str) -> bool:
        """Whether a token, special or not, stands for the text."""
        return self._backend.token_to_id(text) is not None

    def _ids_of(self, texts: frozenset[str]) -> frozenset[int]:
        """The ids of those texts that are tokens."""
        return frozenset(i for text in texts if (i := self._backend.token_to_id(text)) is not None)

    def token_bytes(self, token_id: int) -> bytes:
        """UTF-8 of one token by itself, with special tokens in full; some tokens are only part of a character."""
        return self._token_bytes[token_id]

    def token_text(self, token_id: int) -> str:
        """One token by itself as text; part of a character becomes U+FFFD."""
        return self._token_bytes[token_id].decode("utf-8", "replace")

    def _is_byte(self, token_id: int) -> bool:
        return "ByteFallback" in self._decoders and bool(
            _BYTE_TOKEN.fullmatch(self._backend.id_to_token(token_id) or "")
        )

    def _bytes_of(self, token_id: int) -> bytes:
        token = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        if self._byte_level:
            try:
                return bytes(map(_BYTE_OF.__getitem__, token))
            except KeyError:  # an added token: plain text
                return str(token).encode()
        if "ByteFallback" in self._decoders and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(match[1], 16)])
        if token_id in self.special_ids:
            return str(token).encode()
        # Decoded twice, less once: its text after another token, where no leading space is stripped.
        once, twice = self.decode([token_id]), self.decode([token_id, token_id])
        return twice[len(once) :].encode()


def load_tokenizer(files: ModelFiles) -> Tokenizer:
    """The tokenizer that options ask for; logs once which formats its chat templates accept. Raises ModelError."""
    tokenizer = Tokenizer.from_dir(
        files.model, chat_template=files.chat_template, content_format=files.chat_template_content_format
    )
    taken = {"default": tokenizer.chat_template, "of tools": tokenizer.tool_template}
    forms = {name: str(template.forms) for name, template in taken.items() if template is not None}
    for each in dict.fromkeys(forms.values()):
        logger.info("chat template %s: %s", " and ".join(name for name in forms if forms[name] == each), each)
    return tokenizer


class _TokenBytes(dict[int, bytes]):
    """Bytes by token id, filled on first use: a vocabulary of 150,000 costs nothing at start."""

    def __init__(self, tokenizer: Tokenizer, *, skip: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._skip = skip

    def __missing__(self, token_id: int) -> bytes:
        data = b"" if token_id in self._skip else self._tokenizer._bytes_of(token_id)
        self[token_id] = data
        return data


def _byte_alphabet() -> dict[str, int]:
    """Byte-level BPE's alphabet (GPT-2): printable Latin-1 stands for itself, the rest is moved up from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted(set(range(256)) - set(printable))
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}


_BYTE_OF = _byte_alphabet()


_STEPS = ("normalizer", "pre_tokenizer", "decoder")
_QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _as_transformers(backend: tokenizers.Tokenizer, directory: ModelDirectory) -> tokenizers.Tokenizer:
    """The tokenizer that transformers makes of a tokenizer.json and the files next to it; warns of what it changes."""
    name, config = directory.tokenizer_class, directory.tokenizer_config
    before = backend
    if name is not None:
        backend = _rebuilt(backend, name, config)
        steps = {part: [getattr(each, part) for each in (before, backend)] for part in _STEPS}
        parts = [part for part, both in steps.items() if len({each and each.__getstate__() for each in both}) > 1]
        if parts:
            logger.warning(
                "%s: as in transformers, %s of tokenizer.json gives way to that of %s",
                directory.path, " and ".join(parts), name,
            )  # fmt: skip
    size = directory.config.values.get("vocab_size") if (directory.path / "config.json").exists() else None
    room = size if isinstance(size, int) else sys.maxsize
    missing = {text for text, number in directory.new_ids.items() if number >= room}
    for texts, what in ((missing, "the model has no room for"), ({*directory.new_ids} - missing, "transformers adds")):
        if texts:
            shown = ", ".join(sorted(texts))
            logger.warning("%s: tokenizer.json lacks special tokens, which %s: %s", directory.path, what, shown)
    tokens = [token for token in directory.added_tokens if token.content not in missing]
    for token in tokens:
        flags = {flag: getattr(token, flag) for flag in ("single_word", "lstrip", "rstrip", "special")}
        flags |= {} if token.normalized is None else {"normalized": token.normalized}
        backend.add_tokens([tokenizers.AddedToken(token.content, **flags)])
    backend.encode_special_tokens = config.get("split_special_tokens") is True
    return backend


def _rebuilt(written: tokenizers.Tokenizer, name: str, config: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """The tokenizer that a class of transformers makes of a tokenizer.json: its vocabulary, with the class's own steps
    around it.
    """
    model, spaced = written.model, config.get("add_prefix_space")
    model.unk_token, model.dropout, model.ignore_merges = None, None, False
    model.continuing_subword_prefix, model.end_of_word_suffix = ("", "") if name != "LlamaTokenizer" else (None, None)
    model.fuse_unk = model.byte_fallback = name == "LlamaTokenizer"
    backend = tokenizers.Tokenizer(model)
    backend.post_processor = written.post_processor
    if name == "LlamaTokenizer":
        spaced = spaced is not False
        scheme = ("always" if config.get("legacy") else "first") if spaced else "never"
        backend.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme=scheme, split=False)
        steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        backend.decoder = decoders.Sequence([*steps, *([decoders.Strip(" ", 1, 0)] if spaced else [])])
        return backend
    by_bytes = pre_tokenizers.ByteLevel(add_prefix_space=bool(spaced), use_regex=name != "Qwen2Tokenizer")
    backend.pre_tokenizer, backend.decoder = by_bytes, decoders.ByteLevel()
    if name == "Qwen2Tokenizer":
        backend.normalizer = normalizers.NFC()
        split = pre_tokenizers.Split(tokenizers.Regex(_QWEN2_SPLIT), "isolated")
        backend.pre_tokenizer = pre_tokenizers.Sequence([split, by_bytes])
    return backend


def _decoder_names(backend: tokenizers.Tokenizer) -> list[str]:
    """Type names of the decoder's steps, in order."""
    if backend.decoder is None:
        return []
    state = json.loads(backend.decoder.__getstate__())
    steps = state.get("decoders", [state])
    return [step["type"] for step in steps]
