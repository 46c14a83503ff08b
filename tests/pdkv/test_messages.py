"""Frames survive the wire as they are; what is no frame is refused."""

import msgspec
import pytest

from pdkv import messages
from pdkv.errors import MalformedMessage
from pdkv.messages import (
    Abort,
    BlockRemoved,
    BlockStored,
    CacheCleared,
    Continue,
    EngineToRouter,
    Frame,
    HandedOff,
    KVEvents,
    KVHandoff,
    KVLayout,
    Message,
    RouterToEngine,
    SourceCounts,
    Submit,
    TokenLogprob,
    Tokens,
    decode_frame,
    encode_frame,
)
from pdkv.sampling_params import SamplingParams

HANDOFF = KVHandoff("q", 1, "t", "prefill-0", "e1", 33, b"\x00\xff")

EXAMPLES: list[RouterToEngine | EngineToRouter] = [
    Submit(
        request_id="q",
        transfer_id="t",
        attempt=1,
        choice=2,
        prompt_token_ids=[1, 2, 3],
        output_token_ids=[4],
        params=SamplingParams(temperature=0.5, seed=-(2**63), logit_bias={7: -1.5}, stop=("é",), stop_token_ids=(2,)),
        cache_salt="tenant",
        until="end",
        kv="await_peer",
        handoff=HANDOFF,
    ),
    Continue("q", 1, [5]),
    HandedOff("q", 1, SourceCounts(computed=3, local_hit=16), HANDOFF),
    Tokens("q", 1, 0, [5], sources=SourceCounts(local_hit=16)),
    Tokens("q", 1, 4, [5, 6], [TokenLogprob(5, -0.25, 1, [(5, -0.25), (9, -2.0)])], [None, TokenLogprob(2, -1.0, 3)]),
    KVEvents(7, [CacheCleared(), BlockStored([b"k" * 16], None), BlockRemoved([b"k" * 16])]),
]


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda m: type(m).__name__)
def test_message_is_equal_after_the_wire(message: RouterToEngine | EngineToRouter) -> None:
    assert decode_frame(encode_frame(Frame(3, [message, message]))) == Frame(3, [message, message])


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        msgspec.msgpack.encode([1, 2]),
        msgspec.msgpack.encode({"number": 0}),
        msgspec.msgpack.encode({"number": "0", "messages": []}),
        msgspec.msgpack.encode({"number": 0, "messages": [{"type": "Shutdown"}]}),
        msgspec.msgpack.encode({"number": 0, "messages": [{"type": "Abort", "request_id": 5, "attempt": 0}]}),
        encode_frame(Frame(0, [Abort("q", 0)]))[:-1],
        encode_frame(Frame(0, [Abort("q", 0)])) + b"\x00",
        encode_frame(Frame(0, [Abort("quiet", 0)])).replace(b"quiet", b"\xff\xfe\xfd\xfc\xfb"),  # no UTF-8
        encode_frame(Frame(0, [Abort("q", 0)])).replace(b"request_id", b"request\xff\xfe\xfd"),  # nor in a name
        b"\x91" * 100_000,  # nested deeper than the interpreter's stack
    ],
)
def test_what_is_no_frame_is_refused(data: bytes) -> None:
    with pytest.raises(MalformedMessage):
        decode_frame(data)


def test_unknown_fields_of_a_newer_sender_are_skipped() -> None:
    newer = {"number": 1, "messages": [{"type": "Abort", "request_id": "q", "attempt": 0, "why": "new"}]}
    assert decode_frame(msgspec.msgpack.encode(newer)) == Frame(1, [Abort("q", 0)])


def test_every_message_is_frozen_and_has_a_tag_of_its_own() -> None:
    kinds = [v for v in vars(messages).values() if isinstance(v, type) and issubclass(v, Message) and v is not Message]
    assert len(kinds) >= 20
    tags = {kind.__struct_config__.tag for kind in kinds}
    assert len(tags) == len(kinds)
    assert all(kind.__struct_config__.frozen for kind in kinds)


def test_block_size_is_no_part_of_the_layout_identity() -> None:
    small = KVLayout(num_layers=32, num_kv_heads=32, head_size=128, block_size=16, dtype="float16", dtype_bytes=2)
    large = msgspec.structs.replace(small, block_size=64)
    assert small.identity == large.identity
    assert small.block_bytes == 8 * 2**20
    assert large.block_bytes == 4 * small.block_bytes
    assert msgspec.structs.replace(small, dtype="bfloat16").identity != small.identity
