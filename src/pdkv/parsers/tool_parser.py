"""The base of all tool parsers: text in, in pieces of any size; text for the user and calls out."""

import contextlib
import logging
import re
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

from pdkv.base.limits import clip
from pdkv.base.log_limit import LogLimit
from pdkv.errors import InvalidRequest, PdkvError, RequestFailed
from pdkv.grammar.formats import Format, Tag, separated, triggered
from pdkv.grammar.schema_time import SchemaTime
from pdkv.parsers.call_object import CallObject
from pdkv.parsers.json_value import skip_spaces
from pdkv.parsers.parts import CallArguments, CallBegin, CallEnd, Content, Part
from pdkv.parsers.prose import Prose

_log_limit = LogLimit(10.0)
logger = logging.getLogger(__name__)

_MAX_IDLE = 16
"""The most state changes without progress."""

State = Callable[[str, int], int]
KnowsToken = Callable[[str], bool]
"""Whether the model's tokenizer has a token for a text."""


class CallFormat(NamedTuple):
    """A tool, as a grammar allows it to be called."""

    name: str
    arguments: Format  # JSON objects
    schema: Mapping[str, Any] | None = None  # of the same
    is_enforced: bool = False  # otherwise any object is allowed
    time: SchemaTime | None = None  # limit for parsing its parts


class CallSyntax(NamedTuple):
    """How a family writes calls, for a grammar."""

    tags: Sequence[Tag]  # each is one call, or one list of them
    separator: str = ""  # between two tags
    tag_holds_all: bool = False  # otherwise each tag is one call

    def calls_alone(self, *, several: bool) -> Format:
        """The format of an answer that is one call or more, and nothing else."""
        return separated(self.tags, self.separator, several=several and not self.tag_holds_all)

    def text_with_calls(self, *, several: bool) -> Format:
        """Any text; a beginning of a call must continue as one of these."""
        return triggered(self.tags, several=several)


def check_names(names: Iterable[str], pattern: str, *, what: str = "tool") -> None:
    """Raises InvalidRequest for a name that a model family's format cannot express. `what`: what errors call it."""
    for name in names:
        if not re.fullmatch(pattern, name):
            raise InvalidRequest(f"the {what} {clip(name)!r} cannot be written by this model: it must match {pattern}")


@contextlib.contextmanager
def failing(parser: "type[ToolParser] | None") -> Iterator[None]:
    """Any error of a third-party parser as a failure of the request: RequestFailed."""
    try:
        yield
    except PdkvError:
        raise
    except Exception as error:
        name = parser.__name__ if parser is not None else "none"
        if _log_limit.passes():
            logger.exception("the tool parser %s failed", name)
        text = f"the tool parser {name} failed: {type(error).__name__}: {clip(str(error))}"
        raise RequestFailed(text, request_id="") from None


class ToolParser(ABC):
    """Parses the calls of one answer; each answer has its own parser.

    The result depends on the text alone, not on its pieces. Nothing is lost: everything but calls is text; if a call's
    arguments stop being JSON after its beginning was shown, they are passed on as written.

    A subclass implements `recognises`, and sets `_state` to the method that reads on: it gets the text and a position
    in it, and returns the position up to which it has read. It is called again until it makes no progress.
    """

    markers: ClassVar[tuple[str, ...]] = ()
    """Texts that the parser looks for: it sees them even if they are special tokens."""
    closing_tag: ClassVar[str] = ""
    """What stands behind a call."""

    def __init__(self, tools: Mapping[str, Mapping[str, Any] | None] | None = None) -> None:
        """`tools`: the schemas of the arguments of the request's tools, by name."""
        self.tools = tools or {}
        self.names = frozenset(self.tools)
        self.num_calls = 0
        self._state: State = self._read_text
        self._object = CallObject()
        self._reads_object = False
        self._raw: list[str] = []  # read of a call that has not begun
        self._rest = ""  # not read yet: more text must come first
        self._prose = Prose()
        self._parts: list[Part] = []

    @classmethod
    @abstractmethod
    def recognises(cls, chat_template: str) -> bool:
        """Whether a model with this chat template writes calls as this parser reads them."""

    @classmethod
    def syntax(cls, tools: Sequence[CallFormat], knows: KnowsToken, *, several: bool) -> CallSyntax | None:
        """Syntax that `_read_text` and later states read as calls of these tools, and as nothing else.

        None: no grammar makes a model write calls in this parser's format.

        Args:
            several: whether an answer may contain several calls.

        Raises:
            InvalidRequest: a tool's name cannot be written.
        """
        return None

    @classmethod
    def new_call_id(cls) -> str:
        """An id that the model's chat template accepts in the next turn."""
        return f"call_{secrets.token_hex(12)}"

    def push(self, text: str) -> list[Part]:
        """The parts that are complete with this piece of text."""
        if text:
            self._read(self._rest + text)
        return self._take()

    def finish(self) -> list[Part]:
        """End the answer and return what was held back. Nothing may be pushed afterwards."""
        rest, self._rest = self._rest, ""
        self._flush(rest)
        if shown := self._prose.finish():
            self._parts.append(Content(shown))
        return self._take()

    def _read(self, text: str) -> None:
        at = num_idle = 0
        while at < len(text):
            state, begun_at = self._state, at
            at = state(text, at)
            if at == begun_at and self._state == state:
                break
            num_idle = num_idle + 1 if at == begun_at else 0
            if num_idle > _MAX_IDLE:
                raise RuntimeError(f"{type(self).__name__} changes its state endlessly")
        self._rest = text[at:]

    @abstractmethod
    def _read_text(self, text: str, at: int) -> int:
        """The first state: text for the user, up to where a call may begin."""

    def _flush(self, rest: str) -> None:
        """End the answer with `rest`, which could not be parsed yet."""
        if self._reads_object:
            self._close_object()
        elif self._state == self._read_spoilt:
            self._arguments(rest)
        elif self._state != self._read_close or not self.closing_tag.startswith(rest):  # else it was cut in its tag
            self._text(rest)

    def _read_close(self, text: str, at: int) -> int:
        """Read after a call: its closing tag, which may be missing; then text follows."""
        place, tag = skip_spaces(text, at), self.closing_tag
        self._text(text[at:place])
        if text.startswith(tag, place):
            self._state = self._read_text
            return place + len(tag)
        if not tag.startswith(text[place:]):
            self._state = self._read_text
        return place

    def _read_spoilt(self, text: str, at: int) -> int:
        """Read arguments that are not valid JSON any more, passed on unchanged; nothing says where they end."""
        self._arguments(text[at:])
        return len(text)

    # --- calls that are objects ---

    def _begin_object(self, raw: str, *, needs_known_name: bool = False) -> None:
        """Begin a possible call; `raw` is the text before it."""
        names = self.names if needs_known_name else None
        self._reads_object = True
        self._object, self._raw = CallObject(names, needs_arguments=needs_known_name), [raw]

    def _push_object(self, text: str, at: int) -> int:
        """Read on in the object, and report its new parts."""
        begun = self._object.has_begun
        behind = self._object.push(text, at)
        if not self._object.has_begun:
            self._raw.append(text[at:behind])
        elif not begun:
            assert self._object.name is not None
            self._raw.clear()
            self._begin_call(self._object.name)
        self._arguments(self._object.take())
        self._reads_object = not (self._object.done or self._object.failed)
        return behind

    def _read_call(self, text: str, at: int, behind: State, spoilt: State) -> int:
        """Read on in the object; `behind` follows a whole call, `spoilt` one with invalid arguments."""
        at = self._push_object(text, at)
        if not self._reads_object:
            is_whole = self._close_object()
            if not self._object.has_begun:
                self._state = self._read_text
            else:
                self._state = behind if is_whole else spoilt
        return at

    def _close_object(self) -> bool:
        """Close the object: it is done, has failed, or the answer ends within it; returns whether its arguments are
        complete.
        """
        if not self._object.has_begun:
            self._text("".join(self._raw))
            return True
        if self._object.has_all_arguments:
            self._end_call()
        return self._object.has_all_arguments

    # --- what subclasses report ---

    def _text(self, text: str) -> None:
        if text and (shown := self._prose.text(text)):
            self._parts.append(Content(shown))

    def _begin_call(self, name: str) -> None:
        self._prose.call()
        self._parts.append(CallBegin(self.num_calls, self.new_call_id(), name))
        self.num_calls += 1

    def _arguments(self, text: str) -> None:
        if text:
            self._parts.append(CallArguments(self.num_calls - 1, text))

    def _end_call(self) -> None:
        self._parts.append(CallEnd(self.num_calls - 1))

    def _take(self) -> list[Part]:
        parts, self._parts = self._parts, []
        return parts
