"""The vLLM adapter without vLLM: its two sides over real connectors, driven in the order of vLLM's calls."""

import importlib
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from store_servers import RedisServer

from pdkv.base.block_keys import HASH_BLOCK_SIZE
from pdkv.connectors.base import BlockHold, ConnectorConfig, TransferKey
from pdkv.connectors.registry import build_connector, plan_connector
from pdkv.errors import ConfigError
from pdkv.vllm.engine import choose_connector
from pdkv.vllm.peers import CardDirectory
from pdkv.vllm.scheduler import Identity, ScheduledRequest, VllmScheduler
from pdkv.vllm.staging import StagingBooks
from pdkv.vllm.worker import EndedLoads, VllmWorker
from pdkv.wire.kv import EngineCard, KVLayout

BLOCK = 32
LAYERS = 2
NUM_BLOCKS = 24
LAYOUT = KVLayout(LAYERS, 2, 16, BLOCK, "float32", 4)
PROMPT = [(37 * i) % 1000 for i in range(200)]


@dataclass
class Request:
    """What vLLM's request is to the adapter."""

    request_id: str
    all_token_ids: list[int]
    cache_salt: str | None = None
    lora_request: Any = None
    mm_features: list[Any] = field(default_factory=list)
    prompt_embeds: Any = None


class Vllm:
    """One engine: blocks that nobody but it names, and the adapter's two sides."""

    def __init__(
        self,
        name: str,
        connector: str,
        options: dict[str, str],
        *,
        staging: int = 32,
        saves: bool = True,
        save_wait_s: float = 10.0,
    ) -> None:
        self.wake = threading.Event()
        self.config = ConnectorConfig(
            engine=name, epoch=f"{name}.0", layout=LAYOUT, num_blocks=staging, plan=plan_connector(connector, options),
            model="m",
        )  # fmt: skip
        self.connector = build_connector(self.config, self.wake.set)
        self.scheduler = VllmScheduler(
            self.connector.scheduler(),
            Identity("m", "layout", BLOCK),
            num_staging_blocks=staging,
            unit_tokens=max(BLOCK, int(options.get("tokens_per_value", BLOCK))),
            saves=saves,
        )
        self.worker = VllmWorker(
            self.connector.worker(),
            LAYOUT,
            num_staging_blocks=staging,
            pool=self.connector.kv_cache(),
            table=self.connector.block_table,
            wake=self.wake,
            save_wait_s=save_wait_s if saves else 0.0,
        )
        self.caches = {f"layer.{i}": torch.zeros(NUM_BLOCKS, 2, BLOCK, 32) for i in range(LAYERS)}
        self.worker.register(self.caches)
        self.tokens: dict[str, list[int]] = {}

    def fill(self, block_ids: Sequence[int], seed: int) -> None:
        """As a forward pass would."""
        generator = torch.Generator().manual_seed(seed)
        for cache in self.caches.values():
            cache[list(block_ids)] = torch.randn(len(block_ids), *cache.shape[1:], generator=generator)

    def images(self, block_ids: Sequence[int]) -> torch.Tensor:
        """Content of blocks, all layers."""
        return torch.stack([cache[list(block_ids)] for cache in self.caches.values()])

    def step(self, *scheduled: ScheduledRequest, finished: Sequence[str] = ()) -> EndedLoads:
        """Schedule, forward (the caller has filled the blocks), results."""
        orders = self.scheduler.step(scheduled, finished)
        self.worker.finish_step(orders)
        results, ended = self.worker.collect()
        self.scheduler.update(results)
        self.scheduler.books.check_integrity()
        return ended

    def run_prompt(self, request: Request, block_ids: Sequence[int], seed: int = 1) -> None:
        """Compute a prompt in one step."""
        block_ids = list(block_ids)
        self.scheduler.add(request)
        assert self.scheduler.match(request.request_id, 0) in (0, None)
        self.fill(block_ids, seed)
        self.step(ScheduledRequest(request.request_id, 0, len(request.all_token_ids), block_ids, True))

    def match(self, request: Request, num_computed: int = 0) -> int:
        """Ask until there is an answer, as vLLM does step by step."""
        self.scheduler.add(request)
        while (found := self.scheduler.match(request.request_id, num_computed)) is None:
            self.wake.wait(10.0)
            self.wake.clear()
        return found

    def load(self, request: Request, block_ids: Sequence[int], num_tokens: int) -> EndedLoads:
        """Load until the worker says how it ended."""
        self.scheduler.allocated(request.request_id, block_ids, num_tokens)
        ended = self.step()
        while not (ended.finished or ended.failed):
            self.wake.wait(10.0)
            self.wake.clear()
            ended = self.step()
        return ended

    def close(self) -> None:
        self.worker.shutdown()
        self.scheduler.shutdown()
        self.connector.shutdown()


Make = Callable[..., Vllm]


@pytest.fixture
def make(tmp_path: Path, keep: Callable[..., Any]) -> Make:
    def build(name: str, connector: str = "shared_storage", **options: Any) -> Vllm:
        values = {"path": f"{tmp_path}/kv", "tokens_per_value": str(BLOCK), "lookup_timeout_s": "60"}
        own = values if connector == "shared_storage" else {}
        own |= {key: str(value) for key, value in options.pop("options", {}).items()}
        return keep(Vllm(name, connector, own, **options))

    return build


def introduce(*engines: Vllm) -> None:
    """Show the engines each other's cards."""
    cards = [
        EngineCard(
            engine=e.config.engine, epoch=e.config.epoch, role="any", pid=os.getpid(),
            connector="shared_memory", kind="pull", content_addressed=True, orders=[], model="m", layout=LAYOUT,
            hash_block_size=HASH_BLOCK_SIZE, num_blocks=e.config.num_blocks,
            max_model_len=512, max_num_seqs=8,
            rank_blobs=[e.worker.handshake()],
        )
        for e in engines
    ]  # fmt: skip
    for engine in engines:
        others = [card for card in cards if card.engine != engine.config.engine]
        engine.scheduler.update_peers(others)
        engine.worker._worker.update_peers(others, [])


@pytest.mark.parametrize("connector", ["shared_storage", "shared_memory"])
def test_what_one_engine_computed_another_loads_into_other_blocks(make: Make, connector: str) -> None:
    first, second = make("a", connector), make("b", connector, saves=False)
    if connector == "shared_memory":
        introduce(first, second)
    first.run_prompt(Request("r", PROMPT), [3, 1, 4, 15, 9, 2, 6])
    reader = Request("x", PROMPT)
    assert second.match(reader) == 192  # whole blocks of 200 tokens, whose last one must be computed
    targets = [20, 8, 7, 12, 11, 0, 23]
    assert second.load(reader, targets, 192) == EndedLoads({"x"}, set())
    assert torch.equal(second.images(targets[:6]), first.images([3, 1, 4, 15, 9, 2]))
    assert not second.images(targets[6:]).any()


def test_a_step_waits_for_its_saves_for_a_bounded_time(make: Make) -> None:
    """F7: the store's server is stopped (SIGSTOP); when it goes on, so does everything else."""
    with RedisServer() as server:
        options = {"url": server.url, "operation_timeout_s": 0.5, "transfer_timeout_s": 0.5, "lookup_timeout_s": 0.2}
        engine = make("a", "store", options=options, save_wait_s=0.1)
        with server.stopped():
            engine.run_prompt(Request("r", PROMPT), [3, 1, 4, 15, 9, 2, 6])
            assert engine.worker.num_late_saves == 1
        engine.close()


def test_a_load_begins_behind_the_local_hit(make: Make) -> None:
    first, second = make("a"), make("b", saves=False)
    first.run_prompt(Request("r", PROMPT), list(range(7)))
    reader = Request("x", PROMPT)
    assert second.match(reader, 64) == 128
    assert second.load(reader, [10, 11, 12, 13, 14, 15], 128).finished == {"x"}
    assert torch.equal(second.images([12, 13, 14, 15]), first.images([2, 3, 4, 5]))
    assert not second.images([10, 11]).any()


@pytest.mark.parametrize("change", [{"cache_salt": "tenant"}, {"prompt": [1, *PROMPT[1:]]}])
def test_other_tokens_and_other_salts_find_nothing(make: Make, change: dict[str, Any]) -> None:
    """F23."""
    first, second = make("a"), make("b")
    first.run_prompt(Request("r", PROMPT), list(range(7)))
    assert second.match(Request("x", change.get("prompt", PROMPT), change.get("cache_salt"))) == 0


def test_an_adapter_that_was_trained_on_finds_nothing_of_what_it_was(make: Make, tmp_path: Path) -> None:
    """Attack 1, with an adapter: the same name and path, other weights."""
    weights = tmp_path / "adapter_model.safetensors"
    weights.write_bytes(b"first")
    adapter = SimpleNamespace(lora_name="tuned", lora_int_id=1, lora_path=str(tmp_path))
    first, same, later = make("a"), make("b"), make("c")
    first.run_prompt(Request("r", PROMPT, lora_request=adapter), list(range(7)))
    assert same.match(Request("x", PROMPT, lora_request=adapter)) > 0
    weights.write_bytes(b"second")
    assert later.match(Request("y", PROMPT, lora_request=adapter)) == 0
    assert same.match(Request("z", PROMPT, lora_request=adapter)) == 0


@pytest.fixture
def redis_url() -> Iterator[str]:
    with RedisServer() as server:
        yield server.url


@pytest.mark.parametrize(
    "connector", ["shared_storage", "host", pytest.param("redis", marks=pytest.mark.processes), "shared_memory"]
)
def test_kv_of_old_weights_does_not_come_back_after_a_reset(
    make: Make, request: pytest.FixtureRequest, tmp_path: Path, connector: str
) -> None:
    """F64: neither from a store, nor out of a peer's staging pool or the engine's own; and what is computed from then
    on is not taken for KV of the old weights by an engine that still has them.
    """
    name, options = connector, {}
    if connector in ("redis", "host"):
        url = request.getfixturevalue("redis_url") if connector == "redis" else f"host://{tmp_path}/host?capacity=64MiB"
        name, options = "store", {"url": url, "tokens_per_value": BLOCK, "lookup_timeout_s": 60}
    trained, other = make("a", name, options=options), make("b", name, options=options)
    if connector == "shared_memory":
        introduce(trained, other)
    first, later = [11, *PROMPT], [12, *PROMPT]
    trained.run_prompt(Request("r", first), range(7), seed=1)
    other.run_prompt(Request("s", later), range(7), seed=1)
    assert trained.match(Request("x", later)) == other.match(Request("y", first)) == 192
    running = Request("running", [13, *PROMPT[:63]])
    trained.run_prompt(running, [10, 11], seed=1)
    assert trained.scheduler.reset()
    for number, prompt in enumerate((first, later, [*running.all_token_ids, 1])):
        assert trained.match(Request(f"new {number}", prompt)) == 0
    running.all_token_ids += PROMPT[63:128]
    trained.step(ScheduledRequest("running", 64, 129, [12, 13], False))  # new weights' KV on top of the old ones'
    assert other.match(Request("z", [*running.all_token_ids, 1])) in (0, 64), "what was saved before the reset"
    assert trained.match(Request("again", [*running.all_token_ids, 1])) == 0
    trained.run_prompt(Request("fresh", [14, *PROMPT]), range(14, 21), seed=2)
    assert trained.match(Request("after", [14, *PROMPT])) == (0 if connector == "shared_memory" else 192)
    assert other.match(Request("of old weights", [14, *PROMPT])) == 0


def test_vllms_reset_of_the_prefix_cache_reaches_the_adapter(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """F64: without a method of its own, the base class's None counted as success."""
    names = ("Base_V1", "Metadata", "Role", "TransferResults", "WorkerMetadata")
    stand_ins = SimpleNamespace(**{f"KVConnector{name}": type(name, (), {}) for name in names})
    monkeypatch.setitem(sys.modules, "vllm.distributed.kv_transfer.kv_connector.v1.base", stand_ins)
    monkeypatch.delitem(sys.modules, "pdkv.vllm.adapter", raising=False)
    adapter = importlib.import_module("pdkv.vllm.adapter")
    monkeypatch.delitem(sys.modules, "pdkv.vllm.adapter")
    engine, connector = make("a"), adapter.PdkvConnector.__new__(adapter.PdkvConnector)
    connector._scheduler = engine.scheduler
    engine.run_prompt(Request("r", PROMPT), range(7))
    assert engine.match(Request("before", PROMPT)) == 192
    assert connector.reset_cache() is True
    assert engine.match(Request("after", PROMPT)) == 0


def test_a_preempted_request_begins_anew_after_a_reset(make: Make) -> None:
    """Its id is the same; no report of what it was before counts for it."""
    engine = make("a")
    request = Request("r", PROMPT)
    engine.run_prompt(request, range(7), seed=1)
    assert engine.scheduler.reset()
    engine.run_prompt(request, range(7, 14), seed=2)
    reader = Request("x", PROMPT)
    assert engine.match(reader) == 192
    engine.load(reader, range(14, 20), 192)
    assert torch.equal(engine.images(range(14, 20)), engine.images(range(7, 13)))


def test_a_reset_beside_a_load_of_old_kv_says_that_it_has_to_be_made_again(make: Make) -> None:
    first, second = make("a"), make("b")
    first.run_prompt(Request("r", PROMPT), range(7))
    found = second.match(Request("x", PROMPT))
    second.scheduler.allocated("x", list(range(7)), found)
    assert not second.scheduler.reset()
    ended = second.step()
    while not (ended.finished or ended.failed):
        second.wake.wait(10.0)
        second.wake.clear()
        ended = second.step()
    assert second.scheduler.reset()
    assert second.scheduler.books.num_free == 31


def test_requests_that_depend_on_more_than_tokens_are_left_alone(make: Make) -> None:
    engine = make("a")
    engine.scheduler.add(Request("image", PROMPT, mm_features=[object()]))
    assert engine.scheduler.match("image", 0) == 0
    engine.step(ScheduledRequest("image", 0, 200, list(range(7)), True))
    assert engine.match(Request("text", PROMPT)) == 0


def test_chunks_and_generated_tokens_are_saved_as_they_are_known(make: Make) -> None:
    """A block whose last token is still in flight is saved when it is known."""
    first, early, second = make("a"), make("b"), make("c")
    request = Request("r", PROMPT[:60])
    first.scheduler.add(request)
    first.match(request)
    first.fill(range(3), 5)
    first.step(ScheduledRequest("r", 0, 40, [0, 1], True))
    first.step(ScheduledRequest("r", 40, 60, [], False))
    request.all_token_ids += PROMPT[60:63]
    first.step(ScheduledRequest("r", 63, 64, [], False))  # token 63 is computed and not yet known
    assert early.match(Request("x", PROMPT[:65])) == 0  # one block is shorter than the least hit
    request.all_token_ids.append(PROMPT[63])
    first.step(ScheduledRequest("r", 64, 65, [2], False))
    reader = Request("y", [*PROMPT[:64], 7])
    assert second.match(reader) == 64
    second.load(reader, [5, 6], 64)
    assert torch.equal(second.images([5, 6]), first.images([0, 1]))


def test_a_preempted_request_is_saved_from_its_new_blocks(make: Make) -> None:
    """F9: what is copied is what the step has just computed, never blocks that the request has lost."""
    first, second = make("a"), make("b")
    request = Request("r", PROMPT)
    first.scheduler.add(request)
    first.match(request)
    first.fill(range(2), 5)
    first.step(ScheduledRequest("r", 0, 64, [0, 1], True))
    first.fill(range(2), 99)  # others' now
    first.fill(range(10, 17), 5)
    first.step(ScheduledRequest("r", 0, 200, list(range(10, 17)), True))
    reader = Request("x", PROMPT)
    assert second.match(reader) == 192
    second.load(reader, list(range(6)), 192)
    assert torch.equal(second.images([2, 3, 4, 5]), first.images([12, 13, 14, 15]))


def test_a_load_that_fails_is_told_and_not_tried_again(make: Make, tmp_path: Path) -> None:
    """F13: vLLM then computes it, or fails the request."""
    first, second = make("a"), make("b", saves=False)
    first.run_prompt(Request("r", PROMPT), list(range(7)))
    reader = Request("x", PROMPT)
    assert second.match(reader) == 192
    for path in (tmp_path / "kv").rglob("*.safetensors"):
        path.unlink()
    assert second.load(reader, list(range(7)), 192) == EndedLoads(set(), {"x"})
    assert not second.images(range(7)).any()
    assert second.match(reader) == 0
    assert second.scheduler.num_failed_loads == 1
    assert second.scheduler.books.num_free == 31


def test_a_peer_that_reuses_its_images_is_found_out(make: Make) -> None:
    """F4: the images' generations are read after the data."""
    first, second = make("a", "shared_memory", staging=8), make("b", "shared_memory", saves=False)
    introduce(first, second)
    first.run_prompt(Request("r", PROMPT), list(range(7)))
    reader = Request("x", PROMPT)
    assert second.match(reader) == 192
    first.step(finished=["r"])
    first.run_prompt(Request("s", [5, *PROMPT]), list(range(7)), seed=2)
    assert second.load(reader, list(range(7)), 192) == EndedLoads(set(), {"x"})


def test_an_aborted_requests_load_is_finished_all_the_same(make: Make) -> None:
    """F1: vLLM frees the blocks when it hears of the end."""
    first, second = make("a"), make("b", saves=False)
    first.run_prompt(Request("r", PROMPT), list(range(7)))
    reader = Request("x", PROMPT)
    found = second.match(reader)
    second.scheduler.allocated("x", list(range(7)), found)
    ended = second.step(finished=["x"])
    while not ended.finished:
        second.wake.wait(10.0)
        second.wake.clear()
        ended = second.step()
    assert ended.finished == {"x"}
    assert second.scheduler.books.num_free == 31


def test_without_a_free_staging_block_less_is_loaded_and_less_is_saved(make: Make) -> None:
    """F7: nobody waits for one."""
    first, second = make("a"), make("b", staging=4)
    first.run_prompt(Request("r", PROMPT), list(range(7)))
    assert second.match(Request("x", PROMPT)) == 96
    second.run_prompt(Request("y", [9, *PROMPT]), list(range(7)))
    assert second.scheduler.num_skipped_tokens == 96
    assert second.match(Request("z", [8, *PROMPT])) == 0


def test_images_that_are_there_are_not_copied_again(make: Make) -> None:
    engine = make("a")
    engine.run_prompt(Request("r", PROMPT), list(range(7)))
    again = Request("s", PROMPT)
    engine.scheduler.add(again)
    orders = engine.scheduler.step([ScheduledRequest("s", 192, 200, list(range(7)), True)], ["r"])
    assert orders.copies.staging == []
    engine.worker.finish_step(orders)


def test_a_cache_of_another_shape_is_refused_with_both_values(make: Make) -> None:
    engine = make("a")
    with pytest.raises(ConfigError, match=r"2 layers with blocks of 8192 bytes, it has 1 with \[8192\]"):
        engine.worker.register({"layer.0": torch.zeros(NUM_BLOCKS, 2, BLOCK, 32)})


# --- books, options, peers ----------------------------------------------------------------------------------------


def test_a_block_is_free_when_its_step_its_holds_and_its_loads_are_over() -> None:
    books = StagingBooks(4)
    first = books.take_for_step(b"k1")
    books.hold(BlockHold(TransferKey("save", 0), [first], TransferKey("r", 0)))
    books.end_step()
    assert books.num_free == 2
    books.end_hold(TransferKey("save", 0))
    books.end_hold(TransferKey("save", 0))  # F2: told twice
    assert books.num_free == 3
    assert books.find_for_step(b"k1") == first
    taken = [books.take(), books.take()]
    assert first not in taken
    assert books.num_free == 0
    books.end_step()
    assert books.take() == first
    assert books.find_for_step(b"k1") is None
    books.check_integrity()


@pytest.mark.parametrize(
    ("name", "config", "message"),
    [
        ("nixl", {}, "found by content"),
        ("shared_storage", {"path": "/kv", "load": "layerwise"}, "load=async"),
        ("telepathy", {}, "unknown connector"),
    ],
)
def test_connectors_that_cannot_run_inside_vllm_are_refused(name: str, config: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        choose_connector(name, config, LAYOUT)


def card(engine: str, pid: int) -> EngineCard:
    return EngineCard(
        engine=engine, epoch=f"{engine}.0", role="any", pid=pid, connector="shared_memory", kind="pull",
        content_addressed=True, orders=[], model="m", layout=LAYOUT, hash_block_size=16, num_blocks=4,
        max_model_len=512, max_num_seqs=8,
    )  # fmt: skip


def test_engines_find_each_other_by_their_cards(tmp_path: Path) -> None:
    """F5: an engine that is gone is removed, by itself or by whoever looks."""
    path = tmp_path / "peers"
    mine, theirs, dead = (CardDirectory(path, name) for name in ("a", "b", "c"))
    mine.publish(card("a", os.getpid()))
    assert mine.poll() is None
    theirs.publish(card("b", os.getpid()))
    change = mine.poll()
    assert change is not None
    assert ([c.engine for c in change.added], change.removed) == (["b"], [])
    (path / "garbage.card").write_bytes(b"\xc1")
    dead.publish(card("c", 2**22 + 1))
    assert mine.poll() is None
    assert mine.num_malformed > 0
    assert not (path / "c.card").exists()
    theirs.withdraw()
    change = mine.poll()
    assert change is not None
    assert [c.engine for c in change.removed] == ["b"]
    assert mine.cards == []


def test_a_directory_that_others_may_write_to_is_refused(tmp_path: Path) -> None:
    """F15: a card names memory to be read; nobody else may write one."""
    path = tmp_path / "open"
    path.mkdir()
    path.chmod(0o777)
    with pytest.raises(ConfigError, match="others may write to it"):
        CardDirectory(path, "a")
