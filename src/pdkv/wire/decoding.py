"""Decodes bytes from outside: whatever is wrong with them, the only error raised is MalformedMessage."""

from typing import TypeVar

import msgspec

from pdkv.errors import MalformedMessage

T = TypeVar("T")


def decode_total(
    decoder: "msgspec.msgpack.Decoder[T] | msgspec.json.Decoder[T]", data: bytes | bytearray | memoryview
) -> T:
    """Decode and validate one message from a peer.

    msgspec raises more than its own error: UnicodeDecodeError (which is a ValueError) for text that is not UTF-8,
    OverflowError for integers of more than 64 bits, RecursionError for deep nesting.

    Raises:
        MalformedMessage: `data` is not a valid message of the decoder's type, for any reason.
    """
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError, TypeError) as error:
        raise MalformedMessage(f"{type(error).__name__}: {error}"[:200]) from None
