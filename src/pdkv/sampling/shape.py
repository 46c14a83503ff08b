"""The shape that a client requests of an answer, and its form for engines."""

import hashlib
from typing import Any, Literal

import msgspec

from pdkv.errors import InvalidRequest

GrammarKind = Literal["text", "tags"]
"""In tags, a special token matches its text; elsewhere it matches nothing."""

ASKED_AS = ("json", "json_object", "regex", "choice", "grammar", "structural_tag")
"""The fields of `StructuredOutputs`, exactly one of which is given."""

MAX_GRAMMAR_BYTES = 1 << 20
"""Bytes of UTF-8 of one grammar: every choice's Submit carries it."""

MAX_CHOICE_TEXTS = 4096
"""The most texts of one `choice`."""


class StructuredOutputs(msgspec.Struct, frozen=True, kw_only=True, repr_omit_defaults=True, forbid_unknown_fields=True):
    """The shape of an answer as a client requests it; exactly one of the fields is given. Names and meaning are
    vLLM's.
    """

    json: dict[str, Any] | str | bool | None = None  # a JSON schema
    json_object: bool | None = None  # any JSON object
    regex: str | None = None
    choice: tuple[str, ...] | None = None  # one of these texts
    grammar: str | None = None  # EBNF
    structural_tag: dict[str, Any] | str | None = None  # free text with tagged parts that have a shape
    backend: str | None = None  # this and the next select vLLM's library: there is only one here
    disable_fallback: bool = False
    disable_any_whitespace: bool = False  # this and all that follow allow no other value
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None

    @property
    def asked_as(self) -> str:
        """The given field.

        Raises:
            InvalidRequest: none is given, or several, or an option that no grammar here supports.
        """
        for name in ("disable_any_whitespace", "disable_additional_properties", "whitespace_pattern"):
            if getattr(self, name):
                raise InvalidRequest(f"structured_outputs.{name} is not supported: put it into the schema, or drop it")
        given = [name for name in ASKED_AS if getattr(self, name) not in (None, False) or name == self._false_schema]
        if len(given) != 1:
            got = " and ".join(given) or "none"
            raise InvalidRequest(f"structured_outputs requires exactly one of {', '.join(ASKED_AS)}; got {got}")
        return given[0]

    @property
    def _false_schema(self) -> str:
        return "json" if self.json is False else ""


StructuredOutputsParams = StructuredOutputs
GuidedDecodingParams = StructuredOutputs
"""vLLM's names; the second one was used until its 0.11."""


class Grammar(msgspec.Struct, frozen=True):
    """The shape of an answer in the form for engines: checked, and reduced to what a grammar can enforce."""

    kind: GrammarKind
    text: str  # in llguidance's dialect of Lark

    @property
    def digest(self) -> bytes:
        """Digest (16 bytes) of its kind and text, by which a given-up grammar is refused."""
        return hashlib.blake2b(f"{self.kind}\0{self.text}".encode("utf-8", "surrogatepass"), digest_size=16).digest()

    def validate(self) -> None:
        """Raise InvalidRequest for more than MAX_GRAMMAR_BYTES."""
        size = len(self.text.encode("utf-8", "surrogatepass"))
        if size > MAX_GRAMMAR_BYTES:
            raise InvalidRequest(f"a grammar must have at most {MAX_GRAMMAR_BYTES} bytes, got {size}")
