"""Block lists on the wire: what is packed comes out again, garbage names nothing, and a scattered prompt fits."""

import random
import struct
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdkv.connectors.base import ConnectorConfig, FinishDecision, RequestView, TransferKey
from pdkv.connectors.block_table import LocalBlockTable
from pdkv.connectors.peer.cards import PeerCards
from pdkv.connectors.peer.pull_scheduler import PullScheduler
from pdkv.connectors.peer.push_scheduler import PushScheduler, PushTicket, decode_ticket
from pdkv.connectors.transfer.block_runs import MAX_BLOCK_ID, MAX_BLOCKS, pack_blocks, unpack_blocks
from pdkv.connectors.transfer.planning import as_ids
from pdkv.errors import TransferError
from pdkv.kernels import block_runs
from pdkv.wire.kv import EngineCard, KVHandoff, KVLayout
from pdkv.wire.types import MAX_BLOB_BYTES

LAYOUT = KVLayout(1, 1, 1, 16, "int64", 8)


@pytest.fixture(params=["compiled", "python"], scope="module", autouse=True)
def _form(request: pytest.FixtureRequest) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "python":
            patch.setattr(block_runs, "_library", lambda: None)
        else:
            assert block_runs.available()
        yield


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 1 << 20) | st.integers(0, MAX_BLOCK_ID),
            st.integers(1, 40),
            st.integers(0, 3) | st.integers(0, 2**63 - 1),
        ),
        max_size=30,
    )
)
def test_what_is_packed_comes_out_again(runs: list[tuple[int, int, int]]) -> None:
    ids = [first + i for first, count, _ in runs for i in range(count)]
    generations = [generation for _, count, generation in runs for _ in range(count)]
    blocks = unpack_blocks(pack_blocks(ids, generations))
    assert blocks is not None
    assert blocks.ids.tolist() == ids
    assert blocks.generations.tolist() == generations
    half = sum(count for _, count, _ in runs[: len(runs) // 2])
    joined = pack_blocks(ids[:half], generations[:half]) + pack_blocks(ids[half:], generations[half:])
    both = unpack_blocks(joined, len(ids))
    assert both is not None
    assert (both.ids.tolist(), both.generations.tolist()) == (ids, generations)
    assert not ids or unpack_blocks(joined, len(ids) - 1) is None


@settings(deadline=None)
@given(st.binary(max_size=200), st.integers(0, 60), st.integers(0, 255))
def test_garbage_names_nothing_that_could_harm(garbage: bytes, at: int, value: int) -> None:
    """F16, F17: at most so many blocks, none below 0, none whose address is none; whatever is cut or flipped."""
    valid = pack_blocks([3, 4, 9, 1000], [1, 1, 2, 70_000])
    flipped = bytearray(valid)
    flipped[at % len(flipped)] = value
    for data in (garbage, valid[:at] if at < len(valid) else b"", bytes(flipped), valid + garbage[:1]):
        blocks = unpack_blocks(data, 64)
        if blocks is not None:
            assert blocks.ids.size == blocks.generations.size <= 64
            assert not blocks.ids.size or 0 <= blocks.ids.min() <= blocks.ids.max() <= MAX_BLOCK_ID + 64
            assert not blocks.ids.size or blocks.generations.min() >= 0


@settings(deadline=None)
@given(st.lists(st.integers(0, 2**40), max_size=12), st.binary(max_size=40), st.integers(0, 200), st.integers(1, 4000))
def test_both_forms_read_and_write_the_same(ids: list[int], garbage: bytes, at: int, most: int) -> None:
    numbers = np.array(ids, dtype=np.int64)
    packed = block_runs.pack(numbers, numbers[::-1].copy())
    wrong = packed[:at] + garbage + packed[at + len(garbage) :]
    with pytest.MonkeyPatch.context() as patch:
        found = [block_runs.unpack(data, most) for data in (packed, wrong)]
        patch.setattr(block_runs, "_library", lambda: None)
        assert block_runs.pack(numbers, numbers[::-1].copy()) == packed
        for data, rows in zip((packed, wrong), found, strict=True):
            other = block_runs.unpack(data, most)
            assert (other is None) == (rows is None)
            assert rows is None or np.array_equal(other, rows)


def test_a_short_message_cannot_name_more_than_its_bound() -> None:
    """A run of many blocks costs a few bytes: what it would take in memory is refused before it is taken."""
    column = struct.Struct("<QB")
    form = pack_blocks([1])[0]
    for num_runs, count in ((1, MAX_BLOCKS + 1), (1, 2**62), (2**32 - 1, 1), (1000, MAX_BLOCKS // 999)):
        data = struct.pack("<BI", form, num_runs) + column.pack(0, 0) + column.pack(count, 0) + column.pack(0, 0)
        assert unpack_blocks(data) is None
    assert unpack_blocks(pack_blocks(range(100)), 99) is None


@pytest.mark.parametrize("number", [-1, -(2**62)])
def test_numbers_below_0_cannot_be_packed(number: int) -> None:
    with pytest.raises(ValueError, match=str(number)):
        pack_blocks([number])
    with pytest.raises(ValueError, match="1 generations for 2 blocks"):
        pack_blocks([1, 2], [0])


class AgedTable(LocalBlockTable):
    """Of a pool that has been in use for months."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        rng = random.Random(7)
        self.values[:] = [rng.randrange(1 << 17) for _ in range(num_blocks)]


def long_prompt(num_tokens: int) -> tuple[ConnectorConfig, list[int], RequestView]:
    num_blocks = 1 << 17
    config = ConnectorConfig(engine="p", epoch="1", layout=LAYOUT, num_blocks=num_blocks)
    block_ids = np.random.default_rng(3).permutation(num_blocks)[: -(-num_tokens // 16)].tolist()
    return config, block_ids, RequestView("r", 1, "t", "handoff", num_tokens + 1, num_tokens, ())


@pytest.mark.parametrize("num_tokens", [131_072, 160_000])
def test_a_long_prompt_in_scattered_blocks_is_handed_off_and_found(num_tokens: int) -> None:
    """It was computed anew beyond 104k tokens: the list of its blocks did not fit."""
    config, block_ids, request = long_prompt(num_tokens)
    table = AgedTable(config.num_blocks)
    decision = PullScheduler(config, table, PeerCards(config)).request_finished(request, [block_ids])
    assert isinstance(decision, FinishDecision)
    assert decision.hold_blocks
    assert decision.payload is not None
    assert 0 < len(decision.payload) <= MAX_BLOB_BYTES

    class Reader(PullScheduler):
        def source_block_size(self, engine: str, epoch: str) -> int | None:
            return 16

    reader = Reader(config, LocalBlockTable(config.num_blocks), PeerCards(config))
    handoff = KVHandoff("r", 1, "t", "p", "1", num_tokens, decision.payload)
    waiting = RequestView("r", 1, "t", "await_peer", num_tokens + 1, num_tokens, (), handoff)
    assert reader.get_num_new_matched_tokens(waiting, 0).num_tokens == num_tokens
    reader.update_state_after_alloc(waiting, [range(len(block_ids))], num_tokens)
    assert not reader._named
    (load,) = reader._queued
    assert as_ids(load.source).tolist() == block_ids
    assert load.generations == table.values[block_ids].tobytes()


@pytest.mark.parametrize("num_tokens", [131_072, 160_000])
def test_a_ticket_names_the_scattered_blocks_of_a_long_prompt(num_tokens: int) -> None:
    config, block_ids, _ = long_prompt(num_tokens)
    request = RequestView("r", 1, "t", "await_peer", num_tokens, num_tokens, ())
    encoded = PushScheduler(config, PeerCards(config)).update_state_after_alloc(request, [block_ids], num_tokens)
    assert encoded is not None
    assert len(encoded) <= MAX_BLOB_BYTES
    ticket = decode_ticket(encoded)
    assert ticket is not None
    assert ticket.block_ids(16).tolist() == block_ids


def test_a_payload_is_unpacked_once_for_all_questions(monkeypatch: pytest.MonkeyPatch) -> None:
    from pdkv.connectors.peer import pull_scheduler

    config = ConnectorConfig(engine="d", epoch="1", layout=LAYOUT, num_blocks=64)
    scheduler = PullScheduler(config, LocalBlockTable(64), PeerCards(config))
    card = EngineCard(
        engine="p", epoch="1", role="any", pid=0, connector="x", kind="pull", content_addressed=False, orders=[],
        model="", layout=LAYOUT, hash_block_size=16, num_blocks=64, max_model_len=64, max_num_seqs=1,
    )  # fmt: skip
    scheduler.update_peers([card])
    count = [0]

    def counted(data: bytes, most: int) -> object:
        count[0] += 1
        return unpack_blocks(data, most)

    monkeypatch.setattr(pull_scheduler, "unpack_blocks", counted)
    handoff = KVHandoff("r", 1, "t", "p", "1", 40, pack_blocks([5, 9, 2]))
    waiting = RequestView("r", 1, "t", "await_peer", 41, 40, (), handoff)
    for _ in range(5):
        assert scheduler.get_num_new_matched_tokens(waiting, 0).num_tokens == 40
    scheduler.update_state_after_alloc(waiting, [[1, 2, 3]], 40)
    assert count == [1]


def test_a_short_payload_that_names_a_million_blocks_is_not_unpacked() -> None:
    """Nor is a ticket: a few bytes would take 16 MB for each request that waits."""
    payload = pack_blocks(range(MAX_BLOCKS))
    assert len(payload) < 100
    config = ConnectorConfig(engine="d", epoch="1", layout=LAYOUT, num_blocks=64)

    class Reader(PullScheduler):
        def source_block_size(self, engine: str, epoch: str) -> int | None:
            return 16

    reader = Reader(config, LocalBlockTable(64), PeerCards(config))
    waiting = RequestView("r", 1, "t", "await_peer", 41, 40, (), KVHandoff("r", 1, "t", "p", "1", 40, payload))
    assert reader.get_num_new_matched_tokens(waiting, 0).num_tokens == 0
    assert reader._named[TransferKey("t", 1)][1] is None
    with pytest.raises(TransferError):
        PushTicket("d", "1", "t", 1, 0, 40, payload).block_ids(16)
