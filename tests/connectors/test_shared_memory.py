"""The shared_memory connector between engines: right bytes or a typed failure, never anything else."""

import hashlib
import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from pdkv.block_keys import HASH_BLOCK_SIZE
from pdkv.connectors import shared_memory_worker
from pdkv.connectors.base import ASK_AGAIN, NO_MATCH, ConnectorConfig, RequestView, SchedulerView, TransferOutcome
from pdkv.connectors.shared_memory import SharedMemoryConnector
from pdkv.connectors.shared_memory_scheduler import decode_blocks, encode_blocks
from pdkv.errors import ConfigError
from pdkv.messages import MAX_BLOB_BYTES, EngineCard, KVHandoff, KVLayout

torch.set_num_threads(1)
_WAIT_S = 20.0


def _layout(block_size: int = 16, **changes: Any) -> KVLayout:
    values: dict[str, Any] = {"num_layers": 2, "num_kv_heads": 2, "head_size": 8, "dtype": "float32", "dtype_bytes": 4}
    return KVLayout(block_size=block_size, **(values | changes))


class Engine:
    """One engine's connector, driven by hand."""

    def __init__(self, name: str, *, epoch: str = "1", layout: KVLayout | None = None, **options: str) -> None:
        self.layout = layout or _layout()
        self._woken = threading.Semaphore(0)
        self.step_id = 0
        config = ConnectorConfig(
            engine=name, epoch=epoch, layout=self.layout, num_blocks=48, options=options, model="m"
        )
        self.connector = SharedMemoryConnector(config, self._woken.release)
        self.table = self.connector.make_block_table()
        self.kv = self.connector.allocate_kv_cache()
        self.kv.copy_(torch.randn(self.kv.shape))
        self.scheduler = self.connector.make_scheduler_side()
        self.worker = self.connector.make_worker_side(0)
        self.worker.register_kv_caches(self.kv)
        self.card = EngineCard(
            engine=name, epoch=epoch, role="any", pid=os.getpid(), connector="shared_memory", kind="pull",
            content_addressed=True, orders=[], model="m", layout=self.layout, hash_block_size=HASH_BLOCK_SIZE,
            num_blocks=48, max_model_len=1024, max_num_seqs=8, rank_blobs=[self.worker.handshake()],
        )  # fmt: skip
        self._peers: list[EngineCard] = []

    def meet(self, *cards: EngineCard) -> None:
        self.scheduler.update_peers(cards)
        removed = [card for card in self._peers if card not in cards]
        self.worker.update_peers([card for card in cards if card not in self._peers], removed)
        self._peers = list(cards)

    def hand_off(self, block_ids: Sequence[int], num_tokens: int, **changes: Any) -> KVHandoff:
        request = view("h", kv="handoff", num_tokens=num_tokens + 1, num_wanted=num_tokens)
        finished = self.scheduler.request_finished(request, block_ids)
        assert finished.hold_blocks
        values: dict[str, Any] = {
            "request_id": "h", "attempt": 1, "transfer_id": "h", "engine": self.card.engine,
            "epoch": self.card.epoch, "num_tokens": num_tokens, "payload": finished.payload,
        }  # fmt: skip
        return KVHandoff(**(values | changes))

    def start(self, request: RequestView, block_ids: Sequence[int], num_computed: int) -> int:
        """Ask, allocate, hand the orders to the worker; returns the number of tokens under way."""
        num_tokens = self.scheduler.get_num_new_matched_tokens(request, num_computed).num_tokens
        self.scheduler.update_state_after_alloc(request, block_ids, num_tokens)
        self.step()
        return num_tokens

    def step(self) -> None:
        self.step_id += 1
        meta = self.scheduler.build_connector_meta(SchedulerView(self.step_id, [], [], [], [], [], []))
        self.worker.start_load_kv(meta)

    def outcome(self, request: RequestView) -> TransferOutcome:
        """The next result, which must be this request's and no other."""
        while not (results := self.worker.get_finished()):
            assert self._woken.acquire(timeout=_WAIT_S), "no result"
        self.scheduler.update_connector_output(results)
        (outcome,) = [*results.finished_receiving.values(), *results.failed_receiving.values()]
        assert request.transfer_key in (results.failed_receiving if outcome.code else results.finished_receiving)
        return outcome

    def tokens(self, block_ids: Sequence[int], start: int, stop: int) -> torch.Tensor:
        """KV of a request's tokens [start, stop), (tokens, layers, 2, heads, head size)."""
        return self.kv[list(block_ids)].permute(0, 4, 1, 2, 3, 5).flatten(0, 1)[start:stop].clone()

    def publish(self, keys: Sequence[bytes], block_ids: Sequence[int]) -> None:
        per_block = self.layout.block_size // HASH_BLOCK_SIZE
        for i, block_id in enumerate(block_ids):
            self.table.publish(block_id, list(keys[i * per_block : (i + 1) * per_block]))

    def close(self) -> None:
        self.scheduler.shutdown()
        self.worker.shutdown()
        self.worker.shutdown()
        self.connector.shutdown()
        self.connector.shutdown()


MakeEngine = Callable[..., Engine]


@pytest.fixture
def make_engine() -> Iterator[MakeEngine]:
    engines: list[Engine] = []

    def make(name: str, **arguments: Any) -> Engine:
        engines.append(Engine(name, **arguments))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


def view(transfer_id: str, *, kv: Any, num_tokens: int, num_wanted: int | None = None, **rest: Any) -> RequestView:
    wanted = num_tokens - 1 if num_wanted is None else num_wanted
    keys = rest.pop("block_keys", ())
    return RequestView(transfer_id, 1, transfer_id, kv, num_tokens, wanted, keys, **rest)


def chain(num_keys: int, salt: str = "") -> list[bytes]:
    return [hashlib.blake2b(f"{salt}{i}".encode(), digest_size=16).digest() for i in range(num_keys)]


class Gate:
    """Holds every copy of whole blocks until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached, self.opened = threading.Semaphore(0), threading.Event()
        self.num_copies = 0
        real = shared_memory_worker.copy_blocks

        def copy(*arguments: Any) -> None:
            self.num_copies += 1
            self.reached.release()
            assert self.opened.wait(_WAIT_S)
            real(*arguments)

        monkeypatch.setattr(shared_memory_worker, "copy_blocks", copy)

    def wait(self) -> None:
        assert self.reached.acquire(timeout=_WAIT_S)


# --- right bytes ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("source_size", "own_size"), [(16, 16), (32, 32), (16, 32), (32, 16), (48, 16), (32, 48)])
@pytest.mark.parametrize(("num_hit_blocks", "num_tokens"), [(0, 1), (0, 96), (0, 150), (1, 150), (2, 97)])
def test_handed_off_tokens_arrive_and_nothing_else_changes(
    make_engine: MakeEngine, source_size: int, own_size: int, num_hit_blocks: int, num_tokens: int
) -> None:
    if (start := num_hit_blocks * own_size) >= num_tokens:
        pytest.skip("nothing to load")
    prefill = make_engine("p", layout=_layout(source_size))
    decode = make_engine("d", layout=_layout(own_size))
    decode.meet(prefill.card)
    source = [i * 7 % 48 for i in range(3, 3 + -(-num_tokens // source_size))]
    own = [i * 11 % 48 for i in range(5, 5 + -(-num_tokens // own_size))]
    before, sent = decode.kv.clone(), prefill.kv.clone()
    request = view("t", kv="await_peer", num_tokens=num_tokens + 1, handoff=prefill.hand_off(source, num_tokens))

    assert decode.start(request, own, start) == num_tokens - start
    outcome = decode.outcome(request)
    assert outcome.code == ""
    assert outcome.num_bytes > 0
    assert torch.equal(decode.tokens(own, start, num_tokens), prefill.tokens(source, start, num_tokens))
    untouched = [b for b in range(48) if b not in own[num_hit_blocks:]]
    assert torch.equal(decode.kv[untouched], before[untouched])
    assert torch.equal(prefill.kv, sent)


def test_bfloat16_pools(make_engine: MakeEngine) -> None:
    layout = _layout(dtype="bfloat16", dtype_bytes=2)
    prefill, decode = make_engine("p", layout=layout), make_engine("d", layout=layout)
    decode.meet(prefill.card)
    request = view("t", kv="await_peer", num_tokens=41, handoff=prefill.hand_off([9, 3, 1], 40))
    decode.start(request, [0, 1, 2], 0)
    assert decode.outcome(request).num_bytes == 3 * layout.block_bytes
    assert decode.kv.dtype == torch.bfloat16
    assert torch.equal(decode.tokens([0, 1, 2], 0, 40), prefill.tokens([9, 3, 1], 0, 40))


@pytest.mark.parametrize(("source_size", "own_size"), [(16, 16), (32, 16), (16, 32), (32, 32)])
def test_content_is_found_by_key_and_loaded(make_engine: MakeEngine, source_size: int, own_size: int) -> None:
    holder = make_engine("holder", layout=_layout(source_size))
    engine = make_engine("engine", layout=_layout(own_size))
    engine.meet(holder.card)
    keys, source = chain(12), [i * 5 % 48 for i in range(12 * 16 // source_size)]
    holder.publish(keys, source)
    request = view("t", kv="handoff", num_tokens=190, block_keys=chain(11))
    own = [i * 11 % 48 for i in range(12)]
    expected_stop = 189 // own_size * own_size
    assert engine.start(request, own, 32) == expected_stop - 32
    assert engine.outcome(request).code == ""
    assert torch.equal(engine.tokens(own, 32, expected_stop), holder.tokens(source, 32, expected_stop))


def test_the_longest_chain_wins_and_only_whole_blocks_count(make_engine: MakeEngine) -> None:
    short, long = make_engine("short"), make_engine("long")
    engine = make_engine("engine", layout=_layout(32))
    engine.meet(short.card, long.card)
    short.publish(chain(6), range(6))
    long.publish(chain(9), range(9))
    request = view("t", kv="local", num_tokens=400, block_keys=chain(24))
    assert engine.start(request, range(12), 0) == 8 * 16
    assert engine.outcome(request).code == ""
    assert torch.equal(engine.tokens(range(4), 0, 128), long.tokens(range(8), 0, 128))


def test_short_finds_are_not_worth_it(make_engine: MakeEngine) -> None:
    holder, engine = make_engine("holder"), make_engine("engine", min_hit_tokens="48")
    engine.meet(holder.card)
    holder.publish(chain(4), range(4))
    request = view("t", kv="local", num_tokens=400, block_keys=chain(24))
    assert engine.scheduler.get_num_new_matched_tokens(request, 32) == NO_MATCH
    assert engine.scheduler.get_num_new_matched_tokens(request, 16).num_tokens == 48


def test_content_lookup_can_be_switched_off(make_engine: MakeEngine) -> None:
    holder, engine = make_engine("holder"), make_engine("engine", content_lookup="false")
    engine.meet(holder.card)
    holder.publish(chain(8), range(8))
    request = view("t", kv="local", num_tokens=400, block_keys=chain(24))
    assert engine.scheduler.get_num_new_matched_tokens(request, 0) == NO_MATCH


def test_what_decode_generated_is_found_by_the_next_turn(make_engine: MakeEngine) -> None:
    """Roles are not fixed: decode's pool serves a prefill engine, and that one's a third."""
    decode, prefill, third = make_engine("d"), make_engine("p"), make_engine("x")
    decode.publish(chain(6), [40, 3, 9, 10, 11, 2])
    prefill.meet(decode.card, third.card)
    turn = view("turn-2", kv="handoff", num_tokens=120, block_keys=chain(7))
    assert prefill.start(turn, range(8), 0) == 96
    assert prefill.outcome(turn).code == ""
    prefill.publish(chain(6), range(6))
    third.meet(prefill.card)
    again = view("turn-3", kv="local", num_tokens=120, block_keys=chain(7))
    assert third.start(again, range(20, 28), 0) == 96
    assert third.outcome(again).code == ""
    assert torch.equal(third.tokens(range(20, 26), 0, 96), decode.tokens([40, 3, 9, 10, 11, 2], 0, 96))


# --- late reads -----------------------------------------------------------------------------------------------------


def test_a_read_after_reuse_is_refused(make_engine: MakeEngine) -> None:
    prefill, decode = make_engine("p"), make_engine("d")
    decode.meet(prefill.card)
    request = view("t", kv="await_peer", num_tokens=41, handoff=prefill.hand_off([9, 3, 1], 40))
    before = decode.kv.clone()
    prefill.table.reuse(1)  # the partial tail
    decode.start(request, [0, 1, 2], 0)
    assert decode.outcome(request).code == "stale_generation"
    assert torch.equal(decode.kv, before)


def test_reuse_during_the_copy_is_refused(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    prefill, decode = make_engine("p"), make_engine("d")
    decode.meet(prefill.card)
    prefill.publish(chain(8), range(8))
    gate = Gate(monkeypatch)
    request = view("t", kv="local", num_tokens=140, block_keys=chain(8))
    assert decode.start(request, range(9), 0) == 128
    gate.wait()
    prefill.table.reuse(5)
    gate.opened.set()
    assert decode.outcome(request).code == "stale_generation"


def test_a_block_outside_the_wanted_range_does_not_matter(make_engine: MakeEngine) -> None:
    prefill, decode = make_engine("p"), make_engine("d")
    decode.meet(prefill.card)
    request = view("t", kv="await_peer", num_tokens=41, handoff=prefill.hand_off([9, 3, 1], 40))
    prefill.table.reuse(9)
    decode.start(request, [0, 1, 2], 16)
    assert decode.outcome(request).code == ""


# --- hand-offs that name nothing ------------------------------------------------------------------------------------


def test_without_a_hand_off_the_answer_is_not_known_yet(make_engine: MakeEngine) -> None:
    scheduler = make_engine("d").scheduler
    assert scheduler.get_num_new_matched_tokens(view("t", kv="await_peer", num_tokens=41), 0) == ASK_AGAIN
    never = view("t", kv="await_peer", num_tokens=41, kv_ready=False)
    assert scheduler.get_num_new_matched_tokens(never, 0) == NO_MATCH


@pytest.mark.parametrize(
    "changes",
    [
        {"engine": "unknown"},
        {"epoch": "0"},
        {"payload": b""},
        {"payload": b"\xc1"},
        {"payload": encode_blocks([1], [0])},
        {"payload": encode_blocks([-3, 1, 2], [0, 0, 0])},
    ],
    ids=repr,
)
def test_unusable_hand_offs_do_not_match(make_engine: MakeEngine, changes: dict[str, Any]) -> None:
    prefill, decode = make_engine("p"), make_engine("d")
    decode.meet(prefill.card)
    request = view("t", kv="await_peer", num_tokens=41, handoff=prefill.hand_off([9, 3, 1], 40, **changes))
    assert decode.scheduler.get_num_new_matched_tokens(request, 0) == NO_MATCH


def test_blocks_outside_the_pool_are_not_read(make_engine: MakeEngine) -> None:
    prefill, decode = make_engine("p"), make_engine("d")
    decode.meet(prefill.card)
    handoff = prefill.hand_off([9, 3, 1], 40, payload=encode_blocks([9, 3, 48], [0, 0, 0]))
    request = view("t", kv="await_peer", num_tokens=41, handoff=handoff)
    decode.start(request, [0, 1, 2], 0)
    assert decode.outcome(request).code == "kv_not_found"


def test_a_payload_is_short_for_adjacent_blocks_and_bounded_for_scattered_ones(make_engine: MakeEngine) -> None:
    assert len(encode_blocks(range(4000), [7] * 4000)) < 16
    assert decode_blocks(encode_blocks([5, 6, 9], [2, 3, 3])) == ([5, 6, 9], [2, 3, 3])
    engine = make_engine("p")
    request = view("t", kv="handoff", num_tokens=10)
    finished = engine.scheduler.request_finished(request, [0, 2] * (MAX_BLOB_BYTES // 8))
    assert finished == (False, b"")


def test_a_request_that_is_not_handed_off_keeps_nothing(make_engine: MakeEngine) -> None:
    assert make_engine("p").scheduler.request_finished(view("t", kv="local", num_tokens=10), [1]) == (False, None)


def test_an_allocation_without_a_source_fails_with_a_reason(make_engine: MakeEngine) -> None:
    engine = make_engine("d")
    request = view("t", kv="local", num_tokens=100)
    engine.scheduler.update_state_after_alloc(request, range(7), 64)
    engine.scheduler.update_state_after_alloc(request, range(7), 64)  # idempotent: one load, one answer
    engine.step()
    assert engine.outcome(request).code == "kv_not_found"
    engine.step()
    assert not engine.worker.get_finished()


# --- cancel, deadlines, failures ------------------------------------------------------------------------------------


def test_a_queued_load_is_dropped_at_once(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    prefill, decode = make_engine("p"), make_engine("d")
    decode.meet(prefill.card)
    gate = Gate(monkeypatch)
    first, second = (
        view(name, kv="await_peer", num_tokens=41, handoff=prefill.hand_off([9, 3, 1], 40)) for name in "ab"
    )
    decode.start(first, [0, 1, 2], 0)
    gate.wait()
    decode.start(second, [3, 4, 5], 0)
    before = decode.kv[[3, 4, 5]].clone()
    decode.worker.cancel(second.transfer_key)
    assert decode.outcome(second).code == "transfer_cancelled"
    gate.opened.set()
    assert decode.outcome(first).code == ""
    assert gate.num_copies == 1
    assert torch.equal(decode.kv[[3, 4, 5]], before)


def test_a_running_load_fails_only_when_its_copy_has_stopped(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill, decode = make_engine("p"), make_engine("d")
    decode.meet(prefill.card)
    gate = Gate(monkeypatch)
    request = view("t", kv="await_peer", num_tokens=41, handoff=prefill.hand_off([9, 3, 1], 40))
    decode.start(request, [0, 1, 2], 0)
    gate.wait()
    decode.worker.cancel(request.transfer_key)
    assert not decode.worker.get_finished()  # the blocks are still being written
    gate.opened.set()
    assert decode.outcome(request).code == "transfer_cancelled"


def test_cancels_after_the_end_are_counted_and_ignored(make_engine: MakeEngine) -> None:
    prefill, decode = make_engine("p"), make_engine("d")
    decode.meet(prefill.card)
    request = view("t", kv="await_peer", num_tokens=41, handoff=prefill.hand_off([9, 3, 1], 40))
    decode.worker.cancel(request.transfer_key)
    decode.start(request, [0, 1, 2], 0)
    assert decode.outcome(request).code == ""
    decode.worker.cancel(request.transfer_key)
    assert not decode.worker.get_finished()
    assert decode.worker.num_unknown_keys == 2
    decode.start(request, [0, 1, 2], 0)  # the same transfer again, after a preemption
    assert decode.outcome(request).code == ""


def test_a_load_past_its_deadline_fails(make_engine: MakeEngine) -> None:
    prefill, decode = make_engine("p"), make_engine("d", load_timeout_s="1e-9")
    decode.meet(prefill.card)
    request = view("t", kv="await_peer", num_tokens=41, handoff=prefill.hand_off([9, 3, 1], 40))
    decode.start(request, [0, 1, 2], 0)
    assert decode.outcome(request).code == "transfer_timeout"


def test_an_unexpected_error_fails_the_load_and_not_the_thread(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    prefill, decode = make_engine("p"), make_engine("d")
    decode.meet(prefill.card)
    request = view("t", kv="await_peer", num_tokens=41, handoff=prefill.hand_off([9, 3, 1], 40))
    with monkeypatch.context() as patch:
        patch.setattr(shared_memory_worker, "copy_blocks", lambda *_: 1 / 0)
        decode.start(request, [0, 1, 2], 0)
        assert decode.outcome(request).code == "transfer_failed"
    assert "ZeroDivisionError" in caplog.text
    decode.start(request, [0, 1, 2], 0)
    assert decode.outcome(request).code == ""


@pytest.mark.parametrize(("successor", "code"), [(False, "peer_gone"), (True, "stale_epoch")])
def test_loads_from_a_peer_that_left_fail(make_engine: MakeEngine, successor: bool, code: str) -> None:
    prefill, decode = make_engine("p"), make_engine("d")
    decode.meet(prefill.card)
    request = view("t", kv="await_peer", num_tokens=41, handoff=prefill.hand_off([9, 3, 1], 40))
    num_tokens = decode.scheduler.get_num_new_matched_tokens(request, 0).num_tokens
    decode.scheduler.update_state_after_alloc(request, [0, 1, 2], num_tokens)
    decode.meet(*[make_engine("p", epoch="2").card] * successor)
    decode.step()
    assert decode.outcome(request).code == code


def test_a_copy_in_flight_outlives_its_peers_removal(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    prefill, decode = make_engine("p"), make_engine("d")
    decode.meet(prefill.card)
    gate = Gate(monkeypatch)
    request = view("t", kv="await_peer", num_tokens=41, handoff=prefill.hand_off([9, 3, 1], 40))
    decode.start(request, [0, 1, 2], 0)
    gate.wait()
    decode.meet()
    gate.opened.set()
    assert decode.outcome(request).code == ""
    assert torch.equal(decode.tokens([0, 1, 2], 0, 40), prefill.tokens([9, 3, 1], 0, 40))


def test_shutdown_ends_loads_in_flight(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    prefill, decode = make_engine("p"), make_engine("d", io_threads="2")
    decode.meet(prefill.card)
    gate = Gate(monkeypatch)
    requests = [view(n, kv="await_peer", num_tokens=41, handoff=prefill.hand_off([9, 3, 1], 40)) for n in "abc"]
    for i, request in enumerate(requests):
        decode.start(request, [3 * i, 3 * i + 1, 3 * i + 2], 0)
    gate.wait()
    gate.wait()
    stopping = threading.Thread(target=decode.worker.shutdown)
    stopping.start()
    gate.opened.set()
    stopping.join(_WAIT_S)
    assert not stopping.is_alive()
    assert not [t for t in threading.enumerate() if t.name.startswith("pdkv-load") and t in decode.worker._threads]


# --- who may talk to whom -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"connector": "memory"}, "connector differs: 'shared_memory' in engine d, 'memory' in engine p"),
        ({"model": "other"}, "model differs: 'm' in engine d, 'other' in engine p"),
        ({"layout": _layout(num_layers=3)}, "KV layout differs: 'layers=2"),
        ({"layout": _layout(num_kv_heads=1)}, "KV heads differs: 2 in engine d, 1 in engine p"),
        ({"layout": _layout(head_size=16)}, "head_size=16"),
        ({"layout": _layout(dtype="float16", dtype_bytes=2)}, "dtype=float16"),
        ({"layout": _layout(24)}, "blocks of 24 tokens"),
        ({"hash_block_size": 32}, "hash block size differs: 16 in engine d, 32 in engine p"),
        ({"tp": 2}, "(2, 1) in engine p"),
        ({"rank_blobs": []}, "says nothing of an arena"),
        ({"rank_blobs": [b"\xc1"]}, "says nothing of an arena"),
    ],
    ids=str,
)
def test_incompatible_peers_are_named_once_and_not_used(
    make_engine: MakeEngine, changes: dict[str, Any], text: str, caplog: pytest.LogCaptureFixture
) -> None:
    prefill, decode = make_engine("p"), make_engine("d")
    fields = {name: getattr(prefill.card, name) for name in EngineCard.__struct_fields__}
    card = EngineCard(**(fields | changes))
    with caplog.at_level(logging.WARNING):
        decode.scheduler.update_peers([card])
        decode.scheduler.update_peers([card])
        request = view("t", kv="await_peer", num_tokens=41, handoff=prefill.hand_off([9, 3, 1], 40))
        assert decode.scheduler.get_num_new_matched_tokens(request, 0) == NO_MATCH
    assert len(caplog.messages) == 1
    assert text in caplog.messages[0]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"threads": "1"}, "unknown connector option 'threads'; known: content_lookup, io_threads"),
        ({"io_threads": "0"}, "at least 1"),
        ({"load_timeout_s": "nan"}, "number of seconds"),
        ({"content_lookup": "maybe"}, "true or false"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, str], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        Engine("d", **options)


def test_pools_elsewhere_are_refused(make_engine: MakeEngine) -> None:
    engine = make_engine("d")
    with pytest.raises(ConfigError, match="must allocate the KV pool itself"):
        engine.worker.register_kv_caches(torch.zeros_like(engine.kv))
    with pytest.raises(ConfigError, match="is on meta: use --device cpu"):
        engine.worker.register_kv_caches(engine.kv.to("meta"))
    with pytest.raises(ConfigError, match="this is rank 1"):
        engine.connector.make_worker_side(1)


def _resources() -> tuple[int, int, int]:
    """Open descriptors, mappings of arenas, threads."""
    maps = Path("/proc/self/maps").read_text()
    return len(os.listdir("/proc/self/fd")), maps.count("memfd:pdkv"), threading.active_count()


def test_everything_is_given_back() -> None:
    before = _resources()
    prefill, decode = Engine("p"), Engine("d")
    alone = _resources()
    decode.meet(prefill.card)
    request = view("t", kv="await_peer", num_tokens=41, handoff=prefill.hand_off([9, 3, 1], 40))
    decode.start(request, [0, 1, 2], 0)
    assert decode.outcome(request).code == ""
    assert _resources()[1] == alone[1] + 2  # each side's view of the peer
    decode.meet()
    assert _resources() == alone
    prefill.close()
    decode.close()
    del prefill, decode
    assert _resources() == before
