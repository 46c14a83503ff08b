"""Store connectors over real servers that are stopped (SIGSTOP): every wait of theirs ends by its deadline, typed (F7).

When the server goes on, so does everything else.
"""

import itertools
import threading
from collections.abc import Callable, Iterator

import pytest
from store_rig import Engine, prefill, random_kv, scattered, view
from store_servers import LMCacheServer, RedisServer, StoreServer
from traffic import wait_until_true

from pdkv.errors import StoreTimeout, TransferTimeout
from pdkv.kv_store.base import KVStore
from pdkv.kv_store.registry import open_store
from pdkv.kv_store.tiers import TieredStore

NUM_TOKENS = 128
DEADLINE_S = "2"
"""Passes once in each test; what comes before the stop and after it must be done within it on a busy machine."""
DEADLINES = ("lookup_timeout_s", "transfer_timeout_s", "layer_timeout_s")
LATE = (StoreTimeout.code, TransferTimeout.code)

MakeEngine = Callable[..., Engine]


@pytest.fixture(scope="module", params=[RedisServer, LMCacheServer])
def server(request: pytest.FixtureRequest) -> Iterator[StoreServer]:
    with request.param() as running:
        yield running


@pytest.fixture
def make(server: StoreServer) -> Iterator[MakeEngine]:
    """Engines with connections of their own and nothing in the store that an earlier test has put there."""
    server.restart()
    made: list[tuple[Engine, KVStore]] = []

    def make_engine(name: str, deadline_s: str = DEADLINE_S, **options: str) -> Engine:
        store = open_store(server.url, {"operation_timeout_s": deadline_s, "connect_timeout_s": DEADLINE_S})
        made.append((Engine(store, name, **dict.fromkeys(DEADLINES, deadline_s), **options), store))
        return made[-1][0]

    yield make_engine
    for engine, store in made:
        engine.close()
        store.close()


def test_a_lookup_is_a_miss(server: StoreServer, make: MakeEngine) -> None:
    prefill(make("p", "60"), NUM_TOKENS)
    engine = make("d")
    with server.stopped():
        assert engine.ask(view("u", num_tokens=NUM_TOKENS + 1, salt="0")) == 0


@pytest.mark.parametrize("layerwise", [False, True])
def test_a_load_fails(server: StoreServer, make: MakeEngine, layerwise: bool) -> None:
    """A forward pass that waits for its layers goes on without them."""
    mode = {"load": "layerwise"} if layerwise else {}
    kv, _ = prefill(make("p", "60", **mode), NUM_TOKENS)
    engine, request = make("d", **mode), view("u", num_tokens=NUM_TOKENS + 1, salt="0")
    blocks = scattered(NUM_TOKENS, 16)
    assert engine.ask(request) == NUM_TOKENS
    with server.stopped():
        engine.start_load(request, blocks, NUM_TOKENS, layerwise=layerwise)
        engine.forward()
        assert engine.wait(request.transfer_key).code in LATE
    attempts = (view(f"v{n}", num_tokens=NUM_TOKENS + 1, salt="0") for n in itertools.count())
    wait_until_true(lambda: not engine.load(next(attempts), blocks, NUM_TOKENS).code, "it loads again")
    assert bool((engine.tokens(blocks, NUM_TOKENS) == kv).all())


def test_a_save_fails_its_hand_off(server: StoreServer, make: MakeEngine) -> None:
    engine, blocks = make("p"), scattered(NUM_TOKENS, 16)
    engine.fill(blocks, random_kv(NUM_TOKENS))
    request = view("t", kv="handoff", num_tokens=NUM_TOKENS + 1, salt="0")
    with server.stopped():
        engine.save(request, blocks, NUM_TOKENS, last=True)
        assert engine.wait(request.transfer_key).code in LATE
    prefill(engine, NUM_TOKENS, transfer_id="again")


def test_a_shutdown_waits_for_no_server(server: StoreServer, make: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lookup, a load and a save are under way, with deadlines of an hour, and no watch hangs up on them before."""
    monkeypatch.setattr("pdkv.kv_store.tiers.LATE_S", 3600.0)
    engine, blocks = make("p", "3600"), scattered(NUM_TOKENS, 16)
    tiers = engine.connectors[0].store
    assert isinstance(tiers, TieredStore)
    prefill(engine, NUM_TOKENS)
    with server.stopped():
        engine.scheduler.get_num_new_matched_tokens(view("l", num_tokens=NUM_TOKENS + 1, salt="new"), 0)
        engine.start_load(view("u", num_tokens=NUM_TOKENS + 1, salt="0"), blocks, NUM_TOKENS)
        engine.confirm(view("s", num_tokens=NUM_TOKENS + 1, salt="other"), blocks, NUM_TOKENS)
        wait_until_true(lambda: len(tiers.tiers[0].calls) == 3, "all three ask the server")
        threads = [thread for thread in threading.enumerate() if thread.name.startswith("pdkv-")]
        engine.close()
        assert not [thread.name for thread in threads if thread.is_alive()]
