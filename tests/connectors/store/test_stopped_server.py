"""Store connectors over real servers that are stopped (SIGSTOP): every wait of theirs ends by its deadline, typed (F7).

When the server goes on, so does everything else.
"""

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager

import pytest
from store_rig import Engine, prefill, random_kv, scattered, view
from store_servers import PATIENT, SharedServer, StoreServer, impatient
from traffic import wait_until_true

from pdkv.connectors.base import RequestView
from pdkv.errors import StoreTimeout, TransferTimeout
from pdkv.kv_store.base import KVStore
from pdkv.kv_store.connections import Deadline
from pdkv.kv_store.registry import open_store
from pdkv.kv_store.server_store import ServerStore
from pdkv.kv_store.tiers import TieredStore

NUM_TOKENS = 128
LATE = (StoreTimeout.code, TransferTimeout.code)
SEEDS = itertools.count()
"""Of prompts that no other test has stored."""

MakeEngine = Callable[..., Engine]


@pytest.fixture(scope="module", params=["redis", "lmcache"])
def server(request: pytest.FixtureRequest, shared_server: SharedServer) -> StoreServer:
    return shared_server(request.param)


@pytest.fixture
def make(server: StoreServer) -> Iterator[MakeEngine]:
    """Engines with connections of their own, and with deadlines that pass only while the server is `stopped`."""
    with ExitStack() as made:

        def make_engine(name: str, **options: str) -> Engine:
            engine = Engine(made.enter_context(open_store(server.url, PATIENT)), name, **options)
            made.callback(engine.close)
            return engine

        yield make_engine


@pytest.fixture
def stopped(server: StoreServer) -> Callable[[Engine], AbstractContextManager[None]]:
    """stopped(engine): the server does not answer the engine within the block."""

    @contextmanager
    def stop(engine: Engine) -> Iterator[None]:
        with server.stopped(), impatient(tiers_of(engine).tiers[0].store):
            yield

    return stop


Stopped = Callable[[Engine], AbstractContextManager[None]]


def tiers_of(engine: Engine) -> TieredStore:
    tiers = engine.connectors[0].store
    assert isinstance(tiers, TieredStore)
    return tiers


def asking(name: str, seed: int) -> RequestView:
    return view(name, num_tokens=NUM_TOKENS + 1, salt=str(seed))


def test_a_lookup_is_a_miss(make: MakeEngine, stopped: Stopped) -> None:
    prefill(make("p"), NUM_TOKENS, seed=(seed := next(SEEDS)))
    engine = make("d")
    with stopped(engine):
        assert engine.ask(asking("u", seed)) == 0


@pytest.mark.parametrize("layerwise", [False, True])
def test_a_load_fails(make: MakeEngine, stopped: Stopped, layerwise: bool) -> None:
    """A forward pass that waits for its layers goes on without them."""
    mode = {"load": "layerwise"} if layerwise else {}
    kv, _ = prefill(make("p", **mode), NUM_TOKENS, seed=(seed := next(SEEDS)))
    engine, request, blocks = make("d", **mode), asking("u", seed), scattered(NUM_TOKENS, 16)
    assert engine.ask(request) == NUM_TOKENS
    with stopped(engine):
        engine.start_load(request, blocks, NUM_TOKENS, layerwise=layerwise)
        engine.forward()
        assert engine.wait(request.transfer_key).code in LATE
    attempts = (asking(f"v{n}", seed) for n in itertools.count())
    wait_until_true(lambda: not engine.load(next(attempts), blocks, NUM_TOKENS).code, "it loads again")
    assert bool((engine.tokens(blocks, NUM_TOKENS) == kv).all())


def test_a_save_fails_its_hand_off(make: MakeEngine, stopped: Stopped) -> None:
    engine, blocks, seed = make("p"), scattered(NUM_TOKENS, 16), next(SEEDS)
    engine.fill(blocks, random_kv(NUM_TOKENS))
    request = view("t", kv="handoff", num_tokens=NUM_TOKENS + 1, salt=str(seed))
    with stopped(engine):
        engine.save(request, blocks, NUM_TOKENS, last=True)
        assert engine.wait(request.transfer_key).code in LATE
    prefill(engine, NUM_TOKENS, transfer_id="again", seed=seed)


def open_connections(store: KVStore, num: int) -> None:
    """So many lie idle then: who connects can be hung up on only behind that."""
    assert isinstance(store, ServerStore)
    if num:
        store._pool.run(lambda _: open_connections(store, num - 1), Deadline(60.0, "the server"))


def test_a_shutdown_waits_for_no_server(server: StoreServer, make: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lookup, a load and a save are under way, and no watch hangs up on them before."""
    monkeypatch.setattr("pdkv.kv_store.tiers.LATE_S", 3600.0)
    others = set(threading.enumerate())
    engine, blocks, seed = make("p"), scattered(NUM_TOKENS, 16), next(SEEDS)
    tiers = tiers_of(engine)
    prefill(engine, NUM_TOKENS, seed=seed)
    open_connections(tiers.tiers[0].store, 3)
    with server.stopped():
        engine.scheduler.get_num_new_matched_tokens(asking("l", next(SEEDS)), 0)
        engine.start_load(asking("u", seed), blocks, NUM_TOKENS)
        engine.confirm(asking("s", next(SEEDS)), blocks, NUM_TOKENS)
        wait_until_true(lambda: len(tiers.tiers[0].calls) == 3, "all three ask the server")
        threads = [thread for thread in set(threading.enumerate()) - others if thread.name.startswith("pdkv-")]
        engine.close()
        assert threads
        assert not [thread.name for thread in threads if thread.is_alive()]
