"""Pulls of models with windows: of a window's layers only the blocks travel that the next token sees."""

import random
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from engines import at_rest, make_core, of_type, output_of, submit
from oracle import oracle
from peer_groups import ALL_WINDOW, FULL_AND_WINDOW, TWO_WINDOWS, engines_of, layer_windows, meet, run_to_rest
from state_machine.standin import expected_tokens

from pdkv.connectors.block_table import LocalBlockTable
from pdkv.connectors.peer.group_entries import entries_to_load, own_blocks
from pdkv.connectors.peer.pull_groups import NamedGroup, find_pairs, pack_groups
from pdkv.connectors.peer.pull_groups import unpack_groups as unpack
from pdkv.connectors.transfer.block_runs import MAX_BLOCKS, Blocks, pack_blocks
from pdkv.connectors.transfer.planning import as_ids, first_seen_block
from pdkv.engine.core import EngineCore
from pdkv.sampling_params import SamplingParams
from pdkv.wire.messages import (
    EngineToRouter,
    HandedOff,
    KVGroup,
    KVLayout,
    Loaded,
    Release,
    Submit,
)

SIZE = 4
LAYOUT = KVLayout(1, 1, 1, SIZE, "int64", 8, groups=FULL_AND_WINDOW)


def hand_over(prefill: EngineCore, decode: EngineCore, request: Submit) -> list[EngineToRouter]:
    """One request, prefill first. Returns decode's messages."""
    prefill.handle("r", msgspec.structs.replace(request, kv="handoff", until="first_token"), 0.0)
    messages = run_to_rest([prefill])
    (handed_off,) = of_type(messages, HandedOff)
    assert isinstance(handed_off, HandedOff)
    first = output_of(messages, request.request_id)
    asked = msgspec.structs.replace(request, kv="await_peer", output_token_ids=first, handoff=handed_off.handoff)
    decode.handle("r", asked, 0.0)
    messages = run_to_rest([decode])
    prefill.handle("r", Release(request.transfer_id, 0), 0.0)
    prefill.step(0.0)
    return messages


@pytest.mark.parametrize("groups", [FULL_AND_WINDOW, ALL_WINDOW, TWO_WINDOWS], ids=["full+window", "window", "two"])
@pytest.mark.parametrize("num_tokens", [3, 4, 5, 24, 37])
def test_decode_goes_on_with_what_it_has_read(groups: tuple[KVGroup, ...], num_tokens: int) -> None:
    """Every byte that the next token sees is in the text; blocks before a window are neither leased nor read."""
    names = [f"{role}-{num_tokens}-{len(groups)}-{groups[0].window}" for role in ("p", "d")]
    prefill, decode = (
        make_core(name=name, num_blocks=64, max_model_len=60, groups=groups, options={"mode": "pull"}) for name in names
    )
    meet([prefill, decode])
    prompt = list(range(100, 100 + num_tokens))
    for name in ("first", "again"):  # the second time behind hits of both
        messages = hand_over(prefill, decode, submit(prompt, request_id=name, max_tokens=12))
        assert [m.ok for m in of_type(messages, Loaded)] == ([True])  # type: ignore[attr-defined]
        answer = expected_tokens(prompt, 12, layer_windows(groups))
        assert output_of(messages, name) == answer[1:]
    assert decode.counters.remote + decode.counters.local_hit == 2 * num_tokens
    for core in (prefill, decode):
        assert at_rest(core)
        core.shutdown()


def test_what_a_request_has_at_its_end_is_named() -> None:
    table = LocalBlockTable(40)
    tables = [[5, 6, 7, 9], [-1, -1, 30, 31]]
    groups = unpack(pack_groups(tables, table), 2, MAX_BLOCKS)
    assert groups is not None
    assert [(first, blocks.ids.tolist()) for first, blocks in groups] == [(0, [5, 6, 7, 9]), (2, [30, 31])]
    assert entries_to_load(LAYOUT, 4, 15) == [range(1, 4), range(first_seen_block(6, 15, SIZE), 4)]
    pairs = find_pairs(LAYOUT, groups, 4, 15)
    assert pairs is not None
    assert pairs.source.tolist() == [6, 7, 9, 30, 31]
    assert own_blocks(LAYOUT, [[0, 1, 2, 3], [-1, -1, 12, 13]], 4, 15) == [1, 2, 3, 12, 13]


@pytest.mark.parametrize(
    ("payload", "stop"),
    [
        (b"", 15),
        (msgspec.msgpack.encode([(0, pack_blocks(range(1 << 20)))] * 3), 15),
        (b"\x00" * 40, 15),
        (msgspec.msgpack.encode([(0, b"")]), 15),
        (msgspec.msgpack.encode([(-1, b"\x01\x00\x00\x00\x00"), (0, b"x")]), 15),
    ],
)
def test_a_payload_that_names_no_groups(payload: bytes, stop: int) -> None:
    groups = unpack(payload, 2, MAX_BLOCKS)
    assert groups is None or find_pairs(LAYOUT, groups, 0, stop) is None


def test_a_source_that_gave_up_what_is_wanted_has_nothing() -> None:
    """A reader that wants fewer tokens than were handed off sees a window that begins before what is left."""
    held = [(0, as_ids([0, 1, 2, 3])), (2, as_ids([8, 9]))]
    groups = [NamedGroup(first, Blocks(ids, as_ids([0] * ids.size))) for first, ids in held]
    assert find_pairs(LAYOUT, groups, 0, 16) is not None
    assert find_pairs(LAYOUT, groups, 0, 9) is None
    assert find_pairs(LAYOUT, groups, 0, 17) is None
    assert own_blocks(LAYOUT, [[0, 1, 2, 3], [-1, -1, 12, 13]], 0, 9) is None


# --- real models --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("connector", ["shared_memory", "nixl", "multi"])
@pytest.mark.parametrize(
    ("family", "overrides", "num_groups"),
    [("mistral", {}, 1), ("qwen2", {"use_sliding_window": True, "max_window_layers": 1}, 3)],
)
def test_tokens_and_bytes(
    hf_model: Callable[..., Path], family: str, overrides: dict[str, object], num_groups: int, connector: str
) -> None:
    """The tokens are those of transformers. Bytes: a layer without a window takes 19 blocks, one of 24 tokens 2."""
    model = hf_model(family, sliding_window=24, initializer_range=0.2, max_position_embeddings=512, **overrides)
    options = {"connectors": "shared_memory,nixl"} if connector == "multi" else {}
    with engines_of(model, connector, options) as (prefill, decode):
        layout = decode.card.layout
        assert layout.num_groups == num_groups
        rng = random.Random(3)
        expected = oracle(model).expect(lambda: [rng.randrange(2, 258) for _ in range(300)], 12)
        params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
        request = Submit(request_id="a", transfer_id="t-a", attempt=0, prompt_token_ids=expected.prompt, params=params)
        messages = hand_over(prefill, decode, request)
        assert [m.ok for m in of_type(messages, Loaded)] == [True]  # type: ignore[attr-defined]
        assert output_of(messages, "a") == expected.output[1:]
        blocks = sum(19 - first_seen_block(window, 300, 16) for window in layout.windows)
        assert decode.decode.counts().bytes_received == blocks * layout.block_bytes
        assert blocks == (2 if family == "mistral" else 19 + 2 * 2)  # of 19 and of 57
        assert at_rest(decode)
        assert at_rest(prefill)
