"""What a request confirmed enters the cache also where it ends first: a bounded part with each step."""

import pytest
from state_machine.standin_store import STAND_IN_STORE

from pdkv.connectors.block_table import LocalBlockTable
from pdkv.engine.core import EngineCore
from pdkv.engine.kv.block_pool import BlockPool
from pdkv.engine.kv.kv_cache_manager import KVCacheManager
from pdkv.engine.request import Request
from pdkv.engine.scheduler import SchedulerLimits
from pdkv.testing.engine import at_rest, make_core, output_of, run, submit
from pdkv.testing.standin import expected_tokens
from pdkv.wire.messages import BlockStored

SIZE = 4
PROMPT = list(range(100, 141))  # 10 blocks and a token
CAP = 3


@pytest.fixture(autouse=True)
def cap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdkv.engine.kv.kv_cache_manager.MAX_COMMITTED_BLOCKS", CAP)


def make_manager(num_blocks: int = 30, windows: tuple[int, ...] = (0,)) -> KVCacheManager:
    pool = BlockPool(num_blocks, LocalBlockTable(num_blocks))
    return KVCacheManager(pool, block_size=SIZE, hash_block_size=SIZE, windows=windows)


def make_request(kv: KVCacheManager, prompt: list[int] = PROMPT) -> Request:
    """Its whole prompt came at once, and the first blocks have entered the cache."""
    request = Request(submit(prompt), "r", b"root" * 4, 0.0)
    assert kv.admit(request, kv.find_hit(request), len(prompt), 0)
    request.num_confirmed = len(prompt)
    kv.commit(request)
    return request


def step(kv: KVCacheManager, step_id: int = 0) -> bool:
    kv.begin_step(step_id)
    goes_on = kv.end_step(step_id)
    kv.pool.check_integrity()
    return goes_on


def num_found(kv: KVCacheManager, prompt: list[int] = PROMPT) -> int:
    return kv.find_hit(Request(submit(prompt), "r", b"root" * 4, 0.0)).num_tokens // SIZE


@pytest.mark.parametrize("windows", [(0,), (0, 0), (0, 6)])
def test_the_rest_enters_with_the_steps_that_follow(windows: tuple[int, ...]) -> None:
    kv = make_manager(windows=windows)
    request = make_request(kv)
    table = request.block_tables[0][:10]
    assert kv.free(request)
    entered = []
    while step(kv):
        entered.append(sum(map(kv.pool.has_content, table)))
    assert entered == [3, 6, 9, 10]  # the first step had entered its share before
    assert num_found(kv) == 10
    assert kv.pool.counts().active == 0
    stored = [key for event in kv.pool.events if isinstance(event, BlockStored) for key in event.keys]
    assert stored == request.hash_keys[:10]


def test_the_end_of_a_chain_is_reused_before_its_beginning() -> None:
    kv = make_manager(num_blocks=11)
    kv.free(make_request(kv))
    while step(kv):
        pass
    other = Request(submit(list(range(12))), "r", b"root" * 4, 0.0)
    assert kv.admit(other, kv.find_hit(other), 12, 0)
    assert num_found(kv) == 8


def test_all_requests_share_what_a_step_may_enter() -> None:
    kv = make_manager()
    step(kv)
    others = [make_request(kv, [token + 1000 * i for token in PROMPT]) for i in (1, 2)]
    assert [request.num_committed_blocks for request in others] == [CAP, 0]
    for request in others:
        kv.free(request)
    step(kv)
    assert [num_found(kv, request.prompt_token_ids) for request in others] == [CAP, 0]
    while step(kv):
        pass
    assert [num_found(kv, request.prompt_token_ids) for request in others] == [10, 10]
    assert kv.pool.counts().active == 0


def test_blocks_that_somebody_needs_do_not_wait_for_the_cache() -> None:
    kv = make_manager(num_blocks=12)
    kv.free(make_request(kv))
    other = Request(submit(list(range(40))), "r", b"root" * 4, 0.0)
    hit = kv.find_hit(other)
    assert kv.fits(40, hit, 0)
    assert kv.admit(other, hit, 40, 0)
    kv.pool.check_integrity()
    assert not step(kv)
    assert num_found(kv) == 2  # what the other one did not take
    kv.free(other)

    grown = make_request(kv, [7])
    kv.free(make_request(kv))
    assert kv.grow(grown, 40)
    assert not step(kv)


def test_a_hit_on_what_leaves_is_counted_once() -> None:
    """Its blocks are held, but not free to take while the hit needs them."""
    kv = make_manager(num_blocks=11)
    kv.free(make_request(kv))
    other = Request(submit([*PROMPT[:12], *range(500, 532)]), "r", b"root" * 4, 0.0)
    hit = kv.find_hit(other)
    assert hit.num_tokens == 12
    assert kv.fits(44, hit, 12)
    assert not kv.fits(45, hit, 12)
    assert kv.admit(other, hit, 44, 12)
    assert kv.pool.counts().active == 11
    assert not step(kv)


def test_a_step_in_flight_holds_the_blocks_until_its_end() -> None:
    kv = make_manager()
    request = make_request(kv)
    kv.begin_step(7)
    request.last_step_id = 7
    assert not kv.free(request)
    assert not step(kv, 6)
    assert kv.pool.counts().active == 11
    assert kv.end_step(7)
    while step(kv):
        pass
    assert num_found(kv) == 10
    assert kv.pool.counts().active == 0


def test_nothing_more_enters_of_a_request_that_computed_nonsense() -> None:
    kv = make_manager()
    request = make_request(kv)
    kv.discard(request, request.block_tables[0][2:3])
    assert not kv.free(request)
    assert not step(kv)
    assert num_found(kv) == 2
    assert kv.pool.counts().active == 0


def test_kv_that_waits_for_its_first_token_does_not_enter() -> None:
    """Loaded, but its source may still find a mistake in it."""
    kv = make_manager()
    request = Request(submit(PROMPT, kv="await_peer"), "r", b"root" * 4, 0.0)
    assert kv.admit(request, kv.find_hit(request), 41, 0)
    request.num_confirmed = 41
    assert not kv.free(request)
    assert num_found(kv) == 0


def make_engine(name: str, num_blocks: int = 64) -> EngineCore:
    chosen = {"connector": STAND_IN_STORE, "options": {"fabric": "leaving", "mode": "store"}}
    return make_core(name=name, num_blocks=num_blocks, limits=SchedulerLimits(8, 4), **chosen)


@pytest.mark.parametrize("end", ["finished", "aborted"])
def test_what_was_loaded_for_one_token_is_found_again(end: str) -> None:
    writer, reader = make_engine("writer"), make_engine("reader")
    writer.handle("r", submit(PROMPT), 0.0)
    run(writer)
    reader.handle("r", submit(PROMPT, request_id="first", max_tokens=1 if end == "finished" else 20), 0.0)
    while not reader.scheduler.running:
        reader.step(0.0)
    if end == "aborted":
        reader.router_left("r")
        reader.router_joined("r", "2")
    run(reader)
    assert at_rest(reader)
    reader.handle("r", submit(PROMPT, request_id="again"), 0.0)
    request = reader.requests["again", 0]
    messages = run(reader)
    assert (request.num_local_hit, request.num_external) == (40, 0)
    assert output_of(messages, "again") == expected_tokens(PROMPT, 4)
    assert at_rest(reader)
