"""Ids, numbers and limits in messages between processes, with the ranges that every sender keeps.

Values out of range do not pass the decoder (`src/pdkv/wire/frames.py`).
"""

from typing import Annotated

import msgspec
from msgspec import Meta

from pdkv.base.limits import MAX_ID_CHARS

MAX_BLOB_BYTES = 64 * 1024
"""Largest size of a ticket and of a hand-off's payload."""

RequestKey = tuple[str, int]
"""(request_id, attempt)."""

MAX_PROBLEM_CHARS = 512
"""Longest text about a problem of a connector or a tier."""

MAX_CARDS = 65536
"""Most engines that one engine is told of."""

MAX_CONNECTOR_PARTS = 64
"""Most children and tiers of a connector that are counted separately."""

MAX_LIST = 1 << 21
"""Longest list of tokens, log probabilities or block keys: in memory an entry is many times its bytes."""

Id = Annotated[str, Meta(max_length=MAX_ID_CHARS)]
Text = Annotated[str, Meta(max_length=1024)]
Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Size = Annotated[int, Meta(ge=1, lt=2**31)]
Natural = Annotated[int, Meta(ge=0, lt=2**31)]
Attempt = Natural
TokenId = Natural
TokenIds = Annotated[list[TokenId], Meta(max_length=MAX_LIST)]
Seconds = Annotated[float, Meta(ge=0.0, le=1e12)]
Blob = Annotated[bytes, Meta(max_length=MAX_BLOB_BYTES)]
BlockKey = Annotated[bytes, Meta(min_length=1, max_length=64)]
BlockKeys = Annotated[list[BlockKey], Meta(max_length=MAX_LIST)]
KVOwner = Annotated[int, Meta(ge=1, le=2**63 - 1)]


class Message(msgspec.Struct, frozen=True, omit_defaults=True, array_like=False, tag=True):
    """Base of everything that crosses a process boundary."""
