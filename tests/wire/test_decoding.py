"""Bytes from peers end in a value or in MalformedMessage, in every decoder that reads them."""

from collections.abc import Callable

import msgspec
import pytest

from pdkv.connectors.multi.wire import decode_handoff
from pdkv.connectors.multi.wire import decode_ticket as decode_multi_ticket
from pdkv.connectors.nixl.wire import BLOBS
from pdkv.connectors.nixl.wire import decode as decode_nixl
from pdkv.connectors.peer.push_scheduler import decode_ticket as decode_push_ticket
from pdkv.connectors.transfer.block_runs import unpack_blocks
from pdkv.engine.worker.ranks.messages import decode_answer, decode_order
from pdkv.errors import MalformedMessage
from pdkv.launch.specs import decode_ack
from pdkv.wire.decoding import decode_total
from pdkv.wire.frames import decode_frame

HOSTILE = {
    "a key that is no UTF-8": b"\x81\xa3\xff\xfe\xfd\x01",
    "a text that is no UTF-8": b"\x81\xa4type\xa3\xff\xfe\xfd",
    "an integer of 65 bits": msgspec.msgpack.encode({"type": "Sized", "num_blocks": 2**64 - 1}),
    "nesting without end": b"\x91" * 100_000,
    "a list of 2**32 - 1 items": b"\xdd\xff\xff\xff\xff",
    "a truncated map": b"\xdf\xff\xff\xff\xff\xa4type",
    "an extension": b"\xc7\x00\x05",
    "nothing": b"",
}


def decode_blob(data: bytes) -> object:
    return decode_total(BLOBS, data)


@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE)
@pytest.mark.parametrize(
    "decode",
    [decode_frame, decode_order, decode_answer, decode_nixl, decode_blob, decode_ack],
    ids=lambda d: d.__name__,
)
def test_every_failure_is_a_malformed_message(decode: Callable[[bytes], object], data: bytes) -> None:
    with pytest.raises(MalformedMessage):
        decode(data)


@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE)
def test_payloads_of_hand_offs_and_tickets_are_none_instead(data: bytes) -> None:
    assert unpack_blocks(data) is None
    assert decode_push_ticket(data) is None
    assert decode_multi_ticket(data) is None
    assert decode_handoff(data, 2) is None


def test_json_is_decoded_by_the_same_rules() -> None:
    decoder = msgspec.json.Decoder(dict[str, int])
    assert decode_total(decoder, b'{"a": 1}') == {"a": 1}
    for data in (b'{"\xff": 1}', b'{"a": 1' + b"0" * 9000 + b"}", b'{"a":' * 50_000, b"{"):
        with pytest.raises(MalformedMessage):
            decode_total(decoder, data)
