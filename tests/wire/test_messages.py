"""Frames survive the wire as they are; what is no frame is refused."""

from collections.abc import Callable

import msgspec
import pytest
from wire_rig import Frame, encode_frame

from pdkv.base.block_keys import root_key
from pdkv.errors import MalformedMessage, UnsendableMessage
from pdkv.sampling.params import SamplingParams
from pdkv.wire import messages
from pdkv.wire.frames import (
    FRAME_BYTES,
    MAX_FRAME_BYTES,
    MAX_FRAME_MESSAGES,
    BadMessage,
    ReceivedFrame,
    decode_frame,
    decode_message,
    encode_message,
    encode_raw_frame,
    split,
)
from pdkv.wire.kv import EngineCard, KVHandoff, KVLayout, KVTerms
from pdkv.wire.messages import (
    MAX_TRIAL_TOKENS,
    PART_TOKENS,
    Abort,
    AskReport,
    BlockRemoved,
    BlockStored,
    CacheCleared,
    Continue,
    EngineToRouter,
    HandedOff,
    KVEvents,
    Peers,
    PromptLogprobs,
    Ready,
    RouterToEngine,
    Submit,
    TokenLogprob,
    Tokens,
)
from pdkv.wire.reports import MAX_KV_OWNERS, SourceCounts, TierHeld
from pdkv.wire.tiers import CacheAnswer, CacheOrder, TierAnswer
from pdkv.wire.types import MAX_LIST, Message

HANDOFF = KVHandoff("q", 1, "t", "prefill-0", "e1", 33, b"\x00\xff")

EXAMPLES: list[RouterToEngine | EngineToRouter] = [
    CacheOrder(order_id="o", action="pin", keys=[b"k"], tier="host", ttl_s=2.5, timeout_s=1.0),
    CacheOrder(order_id="o", action="prefetch", keys=[b"k"], kv_terms=KVTerms(1)),
    CacheOrder(order_id="o", action="move", keys=[b"k"], tier="redis", source="host", copy=True),
    AskReport(2**40),
    CacheAnswer("o", [TierAnswer("store/0-host", 64, 4), TierAnswer("1-redis", code="x", problem="é")], ["pool"]),
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
        kv_terms=KVTerms(2**63 - 1, ttl_s=10**9, quota_bytes=2**53),
    ),
    Continue("q", 1, [5]),
    HandedOff("q", 1, SourceCounts(computed=3, local_hit=16), HANDOFF),
    Tokens("q", 1, 0, [5], sources=SourceCounts(local_hit=16)),
    Tokens(
        "q",
        1,
        4,
        [5, 6],
        [TokenLogprob(5, -0.25, 1, ((5, -0.25), (9, -2.0)))],
        PromptLogprobs.of([None, TokenLogprob(2, -1.0, 3)]),
    ),
    KVEvents(7, [CacheCleared(), BlockStored([b"k" * 16], None), BlockRemoved([b"k" * 16])]),
]


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda m: type(m).__name__)
def test_message_is_equal_after_the_wire(message: RouterToEngine | EngineToRouter) -> None:
    assert decode_frame(encode_frame(Frame(3, [message, message]))) == ReceivedFrame(3, [message, message])


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        msgspec.msgpack.encode([1, 2]),
        msgspec.msgpack.encode({"number": 0}),
        msgspec.msgpack.encode({"number": "0", "messages": []}),
        msgspec.msgpack.encode({"number": -1, "messages": []}),
        encode_frame(Frame(0, [Abort("q", 0)]))[:-1],
        encode_frame(Frame(0, [Abort("q", 0)])) + b"\x00",
        encode_frame(Frame(0, [Abort("q", 0)])).replace(b"messages", b"messag\xff\xfe"),  # no UTF-8
        b"\x91" * 100_000,  # nested deeper than the interpreter's stack
        msgspec.msgpack.encode({"number": 0, "messages": [None] * (MAX_FRAME_MESSAGES + 1)}),
    ],
)
def test_what_is_no_frame_is_refused(data: bytes) -> None:
    with pytest.raises(MalformedMessage):
        decode_frame(data)


SUBMIT = msgspec.to_builtins(next(m for m in EXAMPLES if isinstance(m, Submit)), builtin_types=(bytes,))
CARD = {
    "type": "Ready",
    "card": msgspec.to_builtins(
        EngineCard(
            engine="e", epoch="1", role="any", pid=1, connector="memory", kind="pull", content_addressed=False,
            orders=[], model="m", layout=KVLayout(1, 1, 8, 16, "float32", 4), hash_block_size=16, num_blocks=8,
            max_model_len=128, max_num_seqs=4,
        ),
        builtin_types=(bytes,),
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("message", "param"),
    [
        (SUBMIT | {"choice": -5}, "choice"),
        (SUBMIT | {"choice": 128}, "choice"),
        (SUBMIT | {"prompt_token_ids": [1, -1]}, "prompt_token_ids"),
        (SUBMIT | {"output_token_ids": [2**31]}, "output_token_ids"),
        (SUBMIT | {"timeout_s": float("nan")}, "timeout_s"),
        (SUBMIT | {"timeout_s": 0.0}, "timeout_s"),
        (SUBMIT | {"timeout_s": float("inf")}, "timeout_s"),
        (SUBMIT | {"transfer_id": "x" * 300}, "transfer_id"),
        (SUBMIT | {"params": {"top_k": "many"}}, "top_k"),
        (SUBMIT | {"params": {"top_k": 2**31 - 1, "stop": ["x", 5]}}, "stop"),
        (SUBMIT | {"kv": "elsewhere"}, "kv"),
        (SUBMIT | {"kv_terms": {"owner": 0}}, "owner"),
        (SUBMIT | {"kv_terms": {"owner": 2**63}}, "owner"),
        (SUBMIT | {"kv_terms": {"owner": 1, "ttl_s": 0}}, "ttl_s"),
        (SUBMIT | {"kv_terms": {"owner": 1, "ttl_s": 10**9 + 1}}, "ttl_s"),
        (SUBMIT | {"kv_terms": {"owner": 1, "ttl_s": float("nan")}}, "ttl_s"),
        (SUBMIT | {"kv_terms": {"owner": 1, "quota_bytes": -1}}, "quota_bytes"),
        (SUBMIT | {"kv_terms": {"owner": 1, "quota_bytes": 2**53 + 1}}, "quota_bytes"),
        ({"type": "Continue", "request_id": "q", "attempt": 1, "token_ids": [-7]}, "token_ids"),
        ({"type": "KVTicket", "request_id": "q", "attempt": 1, "ticket": b"x" * 70_000}, "ticket"),
        ({"type": "Tokens", "request_id": "q", "attempt": 1, "position": -1, "token_ids": []}, "position"),
        ({"type": 7, "request_id": "q", "attempt": 1}, "type"),
    ],
)
def test_a_value_out_of_its_range_is_its_message_s_fault_and_no_other_s(message: object, param: str) -> None:
    good = msgspec.to_builtins(Abort("other", 0))
    frame = decode_frame(msgspec.msgpack.encode({"number": 5, "messages": [good, message, good]}))
    first, bad, last = frame.messages
    assert first == last == Abort("other", 0)
    assert isinstance(bad, BadMessage)
    assert (bad.param, bad.key) == (param, ("q", 1))
    assert param in bad.reason or "Invalid" in bad.reason


@pytest.mark.parametrize(
    "message",
    [
        {"type": "Abort", "request_id": "q", "attempt": -1},
        {"type": "Abort", "request_id": "x" * 300, "attempt": 1},
        {"type": "KVEvents", "number": 1, "events": [{"type": "BlockStored", "keys": [b"k" * 65], "parent": None}]},
        {"type": "KVEvents", "number": -1, "events": []},
        {"type": "Hello", "router_id": "r" * 1000, "epoch": "1"},
        {"type": "LoadReport", "waiting": -1, "running": 0, "blocks": [0] * 6},
        CARD | {"card": CARD["card"] | {"tp": 10**9}},
        CARD | {"card": CARD["card"] | {"layout": CARD["card"]["layout"] | {"num_layers": 0}}},
        CARD | {"card": CARD["card"] | {"layout": CARD["card"]["layout"] | {"block_size": 2**62}}},
        CARD | {"card": CARD["card"] | {"num_blocks": -1}},
        5,
        [],
        None,
    ],
)
def test_a_bad_message_that_is_nobody_s_is_dropped_without_a_key(message: object) -> None:
    (bad,) = decode_frame(msgspec.msgpack.encode({"number": 5, "messages": [message]})).messages
    assert isinstance(bad, BadMessage)
    assert bad.key is None


def test_the_card_that_the_bad_ones_are_made_from_is_good() -> None:
    (ready,) = decode_frame(msgspec.msgpack.encode({"number": 5, "messages": [CARD]})).messages
    assert isinstance(ready, Ready)


def test_peers_are_known_but_for_those_whose_cards_cannot_be_read() -> None:
    cards = [CARD["card"] | {"engine": name, "num_blocks": blocks} for name, blocks in (("a", 8), ("b", -1), ("c", 8))]
    message = {"type": "Peers", "cards": cards, "removed": ["gone"]}
    (peers,) = decode_frame(msgspec.msgpack.encode({"number": 5, "messages": [message]})).messages
    assert isinstance(peers, Peers)
    assert ([card.engine for card in peers.cards], peers.removed) == (["a", "c"], ["gone"])


def test_frames_are_split_far_below_what_a_receiver_takes() -> None:
    """Finding 3: 28 siblings of one big request were one frame, which ended the connection."""
    params = SamplingParams(seed=1)
    messages = [
        Submit(request_id=f"q{i}", transfer_id="t", attempt=0, prompt_token_ids=[2**20] * 100_000, params=params)
        for i in range(28)
    ]
    groups = list(split(map(encode_message, messages)))
    sizes = [len(encode_raw_frame(0, group)) for group in groups]
    assert len(groups) == 10
    assert max(sizes) < 2 * FRAME_BYTES < MAX_FRAME_BYTES // 16
    assert [m for group in groups for m in decode_frame(encode_raw_frame(0, group)).messages] == messages
    assert [len(group) for group in split(encode_message(Abort("q", 0)) for _ in range(10))] == [10]
    many = [encode_message(Abort("q", 0))] * (MAX_FRAME_MESSAGES + 1)
    assert sum(len(decode_frame(encode_raw_frame(0, group)).messages) for group in split(many)) == len(many)
    assert list(split([])) == []


@pytest.mark.parametrize(
    "make",
    [
        lambda: Continue("q", 0, [2**70]),
        lambda: Abort("\ud800", 0),
        lambda: Continue("q", 0, [2**20] * (MAX_FRAME_BYTES // 5)),  # 107 MB, for this test alone
    ],
    ids=["an integer of 71 bits", "a text that is none", "longer than a frame"],
)
def test_what_no_frame_can_carry_is_an_error_before_anything_is_sent(make: Callable[[], Abort | Continue]) -> None:
    message = make()
    with pytest.raises(UnsendableMessage, match=r"(Continue|Abort) (cannot be sent|has \d+ bytes)"):
        encode_message(message)


def test_unknown_fields_of_a_newer_sender_are_skipped() -> None:
    newer = {"number": 1, "messages": [{"type": "Abort", "request_id": "q", "attempt": 0, "why": "new"}]}
    assert decode_frame(msgspec.msgpack.encode(newer)) == ReceivedFrame(1, [Abort("q", 0)])


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


def test_what_fp8_stands_for_is_a_part_of_the_layout_identity() -> None:
    """So engines of other scales have other keys in a store, too."""
    plain = KVLayout(num_layers=2, num_kv_heads=1, head_size=8, block_size=16, dtype="float8_e4m3fn", dtype_bytes=1)
    assert plain.scales == ((1.0, 1.0), (1.0, 1.0))
    sets = [(), ((1.0, 2.0), (1.0, 1.0)), ((2.0, 1.0), (1.0, 1.0)), ((1.0, 1.0), (1.0, 2.0)), ((0.1, 2.0), (1.0, 1.0))]
    layouts = [msgspec.structs.replace(plain, kv_scales=scales) for scales in sets]
    assert len({root_key(model="m", layout=layout.identity) for layout in layouts}) == len(sets)
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(layouts[-1]), type=KVLayout)
    assert again.scales == sets[-1]
    assert again.identity == layouts[-1].identity
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(msgspec.to_builtins(plain) | {"kv_scales": [[1.0, 0.0]]}, KVLayout)


@pytest.mark.parametrize(
    "message",
    [
        Tokens("r", 0, 0, [], logprobs=[TokenLogprob(1, 0.0, 1)] * (MAX_LIST + 1)),
        Continue("r", 0, [0] * (MAX_LIST + 1)),
        KVEvents(1, [BlockRemoved([b"k"] * (MAX_LIST + 1))]),
    ],
    ids=["logprobs", "token ids", "block keys"],
)
def test_lists_in_messages_are_bounded(message: EngineToRouter | RouterToEngine) -> None:
    """In memory an entry is many times its bytes."""
    received = decode_message(bytes(encode_message(message)))
    assert isinstance(received, BadMessage)


def test_logprobs_of_a_prompt_are_decoded_apart_in_parts() -> None:
    """Whoever reads the message decodes none of them."""
    count = 2 * PART_TOKENS + 3
    entries = [None, *(TokenLogprob(i, -0.5 * i, i + 1, ((i, -0.5 * i), (7, -1.0))) for i in range(1, count))]
    packed = PromptLogprobs.of(entries)
    assert [len(msgspec.msgpack.decode(part)) for part in packed.parts] == [PART_TOKENS, PART_TOKENS, 3]
    received = msgspec.msgpack.decode(msgspec.msgpack.encode(Tokens("q", 0, 0, [1], None, packed)), type=Tokens)
    assert received.prompt_logprobs == packed
    assert packed.decode() == entries
    assert PromptLogprobs.of([]).decode() == []


@pytest.mark.parametrize(
    "message",
    [
        Tokens("r", 0, 0, [], prompt_logprobs=PromptLogprobs(MAX_LIST + 1, [])),
        Submit(
            request_id="r",
            transfer_id="t",
            attempt=0,
            prompt_token_ids=[1],
            params=SamplingParams(),
            trial_tokens=MAX_TRIAL_TOKENS + 1,
        ),
    ],
    ids=["prompt logprobs", "trial tokens"],
)
def test_counts_in_messages_are_bounded(message: EngineToRouter | RouterToEngine) -> None:
    """A peer can neither announce more than a list holds nor have an engine to itself for long."""
    received = decode_message(bytes(encode_message(message)))
    assert isinstance(received, BadMessage)


@pytest.mark.parametrize(
    ("packed", "text"),
    [
        (PromptLogprobs(3, PromptLogprobs.of([None, None]).parts), "2 prompt logprobs instead of 3"),
        (PromptLogprobs(1, [msgspec.msgpack.encode([None, None]), b"not looked at"]), "2 prompt logprobs instead of 1"),
        (PromptLogprobs(1, [b"\x00"]), "Expected `array`"),
        (PromptLogprobs(1, [b"\x91"]), "truncated"),
        (PromptLogprobs(1, [msgspec.msgpack.encode([[-1, 0.0, 1]])]), "Expected `int` >= 0"),
        (PromptLogprobs(PART_TOKENS + 1, [msgspec.msgpack.encode([None] * (PART_TOKENS + 1))]), "length"),
    ],
)
def test_logprobs_of_a_prompt_that_are_none_are_malformed(packed: PromptLogprobs, text: str) -> None:
    with pytest.raises(MalformedMessage, match=text):
        packed.decode()


def test_a_tier_is_named_in_full_by_its_last_part_or_by_its_kind() -> None:
    def is_about(tier: str, *parts: str) -> bool:
        order = CacheOrder(order_id="o", action="lookup", tier=tier, source=tier)
        for part in parts:
            order = order.within(part)
        assert order.is_from("0-host") == (order.is_about("0-host") and bool(tier))
        return order.is_about("0-host")

    assert all(is_about(tier, "multi", "1-store") for tier in ("", "host", "0-host", "multi/1-store/0-host"))
    wrong = ("redis", "1-host", "0", "multi/2-store/0-host", "1-store", "multi")
    assert not any(is_about(tier, "multi", "1-store") for tier in wrong)
    answer = CacheAnswer("o", [TierAnswer("0-host", 64)], ["0-host"]).under("1-store").under("multi")
    assert (answer.tiers, answer.known) == ([TierAnswer("multi/1-store/0-host", 64)], ["multi/1-store/0-host"])


def test_what_owners_have_in_a_tier_adds_up_over_ranks_and_is_bounded() -> None:
    first, second = (TierHeld(1, 2, 3, 4, owned) for owned in ({7: 10, 8: 1}, {8: 2, 9: 5}))
    assert first + second == TierHeld(2, 4, 6, 8, {7: 10, 8: 3, 9: 5})
    many = [TierHeld(owned={i: i for i in range(start, start + MAX_KV_OWNERS)}) for start in (1, MAX_KV_OWNERS + 1)]
    total = many[0] + many[1]
    assert total.owned == many[1].owned, "those with the most bytes"
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(total), type=TierHeld) == total
