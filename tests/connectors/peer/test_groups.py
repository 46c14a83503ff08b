"""Models with windows: of a window's layers only the blocks travel that the receiver's next token sees."""

import random
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from oracle import oracle
from peer_groups import ALL_WINDOW, FULL_AND_WINDOW, TWO_WINDOWS, layer_windows

from pdkv.connectors.block_table import LocalBlockTable
from pdkv.connectors.peer.group_entries import entries_to_load, own_blocks
from pdkv.connectors.peer.pull_groups import NamedGroup, find_pairs, pack_groups
from pdkv.connectors.peer.pull_groups import unpack_groups as unpack
from pdkv.connectors.transfer.block_runs import MAX_BLOCKS, Blocks, pack_blocks
from pdkv.connectors.transfer.planning import as_ids, first_seen_block
from pdkv.engine.scheduler import SchedulerLimits
from pdkv.testing.engine import InProcessEngine, SideBySide, of_type, output_of, submit
from pdkv.testing.standin import expected_tokens
from pdkv.wire.kv import KVGroup, KVLayout
from pdkv.wire.messages import Loaded

SIZE = 4
LAYOUT = KVLayout(1, 1, 1, SIZE, "int64", 8, groups=FULL_AND_WINDOW)


@pytest.mark.parametrize("groups", [FULL_AND_WINDOW, ALL_WINDOW, TWO_WINDOWS], ids=["full+window", "window", "two"])
@pytest.mark.parametrize("num_tokens", [3, 4, 5, 24, 37])
@pytest.mark.parametrize(
    ("mode", "chunk", "late_ticket"), [("pull", 64, False), ("push", 64, False), ("push", 5, False), ("push", 64, True)]
)
def test_decode_goes_on_with_what_it_got(
    groups: tuple[KVGroup, ...], num_tokens: int, mode: str, chunk: int, late_ticket: bool
) -> None:
    """Every byte that the next token sees is in the text; blocks before a window are neither leased nor moved."""
    made = {"groups": groups, "options": {"mode": mode}, "limits": SchedulerLimits(8, chunk)}
    prefill, decode = (
        InProcessEngine.of_stand_in(name=name, num_blocks=64, max_model_len=60, **made)
        for name in ("groups-p", "groups-d")
    )  # fmt: skip
    engines = SideBySide(prefill, decode)
    prompt = list(range(100, 100 + num_tokens))
    for name in ("first", "again"):  # the second time behind hits of both
        messages = engines.hand_over(submit(prompt, request_id=name, max_tokens=12), late_ticket=late_ticket)
        assert [m.ok for m in of_type(messages, Loaded)] == [True]
        assert output_of(messages, name) == expected_tokens(prompt, 12, layer_windows(groups))[1:]
    assert decode.core.counters.remote + decode.core.counters.local_hit == 2 * num_tokens
    for engine in (prefill, decode):
        engine.close()


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


@pytest.mark.parametrize(
    ("connector", "options"),
    [
        ("shared_memory", {}),
        ("nixl", {}),
        ("multi", {"connectors": "shared_memory,nixl"}),
        ("p2p", {}),
        ("nixl", {"mode": "push"}),
        ("multi", {"connectors": "shared_memory,p2p"}),
    ],
)
@pytest.mark.parametrize(
    ("family", "overrides", "num_groups", "num_blocks"),
    [("mistral", {}, 1, 2), ("qwen2", {"use_sliding_window": True, "max_window_layers": 1}, 3, 19 + 2 * 2)],
)
def test_tokens_and_bytes(
    hf_model: Callable[..., Path],
    family: str,
    overrides: dict[str, object],
    num_groups: int,
    num_blocks: int,
    connector: str,
    options: dict[str, str],
) -> None:
    """The tokens are those of transformers. Bytes: a layer without a window takes 19 blocks, one of 24 tokens 2."""
    model = hf_model(family, sliding_window=24, initializer_range=0.2, max_position_embeddings=512, **overrides)
    rng = random.Random(3)
    expected = oracle(model).expect(lambda: [rng.randrange(2, 258) for _ in range(300)], 12)
    with SideBySide.of_model(model, connector, options) as engines:
        decode = engines.decode.core
        layout = decode.card.layout
        assert layout.num_groups == num_groups
        messages = engines.hand_over(submit(expected.prompt, max_tokens=12))
        assert [m.ok for m in of_type(messages, Loaded)] == [True]
        assert output_of(messages, "a") == expected.output[1:]
        assert num_blocks == sum(19 - first_seen_block(window, 300, 16) for window in layout.windows)
        assert decode.decode.counts().bytes_received == num_blocks * layout.block_bytes
