"""The format of a recorded load, version 1: JSON lines, a `Head` and then one `TraceRequest` per choice of a request.

No text, token, name of a client or key is in it. Fields that a reader does not know are skipped.
"""

from typing import Annotated

import msgspec
from msgspec import Meta

from pdkv.base.limits import MAX_TOTAL_PROMPT_TOKENS

VERSION = 1

BLOCK_SIZE = 64
"""Tokens per block of a router's recordings."""

_Ordinal = Annotated[int, Meta(ge=0, lt=2**31)]
_Tokens = Annotated[int, Meta(ge=0, le=MAX_TOTAL_PROMPT_TOKENS)]
_Seconds = Annotated[float, Meta(ge=0, le=1e9)]
_Block = Annotated[str, Meta(pattern="^[0-9a-f]{16}\\Z")]


class TraceRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One choice of a request, written when it had ended."""

    t: _Seconds  # when it came, since the recording began
    session: _Ordinal  # equal in the turns of one conversation
    key: _Ordinal  # the API key
    prompt_tokens: _Tokens  # 0: it was refused before they were counted
    output_tokens: _Tokens
    max_tokens: _Tokens | None = None  # None: as many as fit
    blocks: tuple[_Block, ...] = ()  # one per full block of its prompt; equal ones have equal tokens up to their ends
    priority: Annotated[int, Meta(ge=-(2**31), lt=2**31)] = 0
    slo_ttft_ms: _Seconds | None = None
    slo_tpot_ms: _Seconds | None = None
    stream: bool = True
    pool: Annotated[str, Meta(max_length=256)] = ""  # that ran it; "": the launch's own engines
    outcome: Annotated[str, Meta(pattern="^(stop|length|abort|error:[a-z0-9_]{1,64})\\Z")]
    ttft_s: _Seconds | None = None  # None: no token came
    e2e_s: _Seconds

    def follows(self, other: "TraceRequest") -> bool:
        """Whether it may be the turn after `other`: it came after that one's end, and its prompt begins with that one's
        and is longer by its answer at least.
        """
        length = other.prompt_tokens + other.output_tokens
        is_later = other.t + other.e2e_s <= self.t and length <= self.prompt_tokens
        return is_later and self.blocks[: len(other.blocks)] == other.blocks


class Head(msgspec.Struct, frozen=True, kw_only=True):
    """The first line."""

    pdkv_trace: int
    block_size: Annotated[int, Meta(ge=1, le=65536)]
    model: str
