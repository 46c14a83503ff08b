"""KV groups: which layers share blocks, what a hit is with windows, and that blocks outside a window are given up."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from peer_groups import ALL_WINDOW, FULL_AND_WINDOW, TWO_WINDOWS, layer_windows

from pdkv.connectors.block_table import LocalBlockTable
from pdkv.connectors.transfer.planning import first_seen_block
from pdkv.engine.core import EngineCore
from pdkv.engine.kv.block_pool import BlockPool, Holder
from pdkv.engine.kv.kv_cache_manager import KVCacheManager
from pdkv.engine.kv.kv_groups import kept_from, make_groups, num_held_at_end, num_held_at_once
from pdkv.engine.plan import StepOutput
from pdkv.engine.request import Request
from pdkv.engine.scheduler import SchedulerLimits
from pdkv.testing.engine import at_rest, make_core, output_of, run, submit
from pdkv.testing.standin import expected_tokens
from pdkv.wire.kv import KVGroup, KVLayout
from pdkv.wire.messages import BlockRemoved, BlockStored

SIZE = 4
SHAPES = [FULL_AND_WINDOW, ALL_WINDOW, TWO_WINDOWS]


@pytest.mark.parametrize(
    ("windows", "size", "expected"),
    [
        ([None] * 3, 3, []),
        ([8] * 3, 3, [((0, 1, 2), 8)]),
        ([None] * 3 + [8], 1, [((0,), 0), ((1,), 0), ((2,), 0), ((3,), 8)]),
        ([8, None, 8], 1, [((1,), 0), ((0,), 8), ((2,), 8)]),
        ([None] * 21 + [8] * 7, 7, [(tuple(range(i, i + 7)), 8 * (i == 21)) for i in range(0, 28, 7)]),
        ([None] * 16 + [8] * 15, 16, [(tuple(range(16)), 0), (tuple(range(16, 31)), 8)]),  # one is left unused
        ([4, 8], 1, [((0,), 4), ((1,), 8)]),
    ],
)
def test_equal_blocks(windows: list[int | None], size: int, expected: list[tuple[tuple[int, ...], int]]) -> None:
    layers, groups = make_groups(windows)
    assert (layers, [(group.layers, group.window) for group in groups]) == (size, expected)


@given(st.lists(st.sampled_from([None, 4, 4096]), min_size=1, max_size=80))
def test_every_layer_has_one_place_and_few_are_left_unused(windows: list[int | None]) -> None:
    size, groups = make_groups(windows)
    layout = KVLayout(size, 1, 1, 16, "float32", 4, groups=groups)
    assert len(set(layout.places)) == len(windows) == len(layout.places)
    for (group, index), window in zip(layout.places, windows, strict=True):
        assert index < size
        assert layout.windows[group] == (window or 0)
    assert layout.num_groups * size <= len(windows) * 9 / 8
    assert sorted(layout.windows, key=bool) == list(layout.windows)  # those without a window first


def test_the_layouts_identity_names_the_groups() -> None:
    plain = KVLayout(2, 1, 1, 16, "float32", 4)
    assert plain.identity == "layers=2,head_size=1,dtype=float32,k=rotated"
    latent = msgspec.structs.replace(plain, sides=1, positions="none")
    assert latent.identity == "layers=2,head_size=1,dtype=float32,k=none,sides=1"
    assert (latent.kinds, plain.kinds) == (("latent",), ("heads",))
    assert 2 * latent.block_bytes == plain.block_bytes
    grouped = KVLayout(1, 1, 1, 16, "float32", 4, groups=FULL_AND_WINDOW)
    assert grouped.identity == "layers=1,head_size=1,dtype=float32,k=rotated,block_size=16,groups=0@0+1@6"
    states = msgspec.structs.replace(grouped, groups=(KVGroup((0,)), KVGroup((1,), 2, state=True)))
    assert states.identity == "layers=1,head_size=1,dtype=float32,k=rotated,block_size=16,groups=0@0+1@2s"
    assert states.kinds == ("heads", "windows", "state")


@given(st.integers(0, 40), st.integers(0, 60), st.sampled_from([1, 4, 16]))
def test_the_first_block_that_a_token_sees(window: int, num_tokens: int, size: int) -> None:
    seen = [p for p in range(num_tokens) if not window or p > num_tokens - window]  # the next token's position counts
    first = first_seen_block(window, num_tokens, size)
    assert first == (seen[0] // size if seen else num_tokens // size if window else 0)
    assert num_held_at_end([window], num_tokens, size) == -(-num_tokens // size) - first
    assert num_held_at_end([window], num_tokens, size) <= num_held_at_once([window], num_tokens, size, 1)


@given(
    windows=st.sampled_from([(0,), (6,), (0, 6), (0, 0, 1), (3, 9), (0, 5, 17)]),
    num_wanted=st.integers(0, 40),
    missing=st.sets(st.tuples(st.integers(0, 2), st.integers(0, 9)), max_size=6),
)
def test_a_hit_is_the_longest_that_every_group_has(
    windows: tuple[int, ...], num_wanted: int, missing: set[tuple[int, int]]
) -> None:
    pool = BlockPool(60, LocalBlockTable(60))
    kv = KVCacheManager(pool, block_size=SIZE, hash_block_size=SIZE, windows=windows, max_step_tokens=8)
    first = Request(submit(list(range(41))), "r", b"root" * 4, 0.0)
    hit = kv.find_hit(first)
    assert hit.num_tokens == 0
    assert kv.admit(first, hit, 41, 0)
    tables = [list(table) for table in first.block_tables]
    first.num_confirmed = 41
    kv.commit(first)
    kv.free(first)
    for group, index in missing:
        if group < len(windows) and pool.has_content(tables[group][index]):
            pool.withdraw([tables[group][index]])

    def has(group: int, length: int) -> bool:
        needed = range(first_seen_block(windows[group], length * SIZE, SIZE), length)
        return not any((group, index) in missing for index in needed)

    second = Request(submit(list(range(num_wanted + 1))), "r", b"root" * 4, 0.0)
    lengths = [n for n in range(num_wanted // SIZE + 1) if all(has(g, n) for g in range(len(windows)))]
    hit = kv.find_hit(second)
    assert hit.num_tokens == lengths[-1] * SIZE
    for window, table, known in zip(windows, hit.tables, tables, strict=True):
        skipped = first_seen_block(window, hit.num_tokens, SIZE)
        assert table == [-1] * skipped + known[skipped : lengths[-1]]
    assert kv.admit(second, hit, num_wanted + 1, hit.num_tokens)
    assert pool.counts().active == len(second.held_blocks())
    kv.free(second)
    pool.check_integrity()
    assert pool.counts().active == 0


@pytest.mark.parametrize("windows", [(0,), (0, 6), (6,), (0, 0, 6)])
def test_a_long_prompt_enters_the_cache_over_several_steps(
    monkeypatch: pytest.MonkeyPatch, windows: tuple[int, ...]
) -> None:
    """Ten blocks came at once. Those of a window enter before the first of them is given up."""
    monkeypatch.setattr("pdkv.engine.kv.kv_cache_manager.MAX_COMMITTED_BLOCKS", 3)
    pool = BlockPool(60, LocalBlockTable(60))
    kv = KVCacheManager(pool, block_size=SIZE, hash_block_size=SIZE, windows=windows, max_step_tokens=4)
    request = Request(submit(list(range(41))), "r", b"root" * 4, 0.0)
    assert kv.admit(request, kv.find_hit(request), 41, 40)  # of the window what the last token sees
    tables = [list(table) for table in request.block_tables]
    request.num_confirmed = 41
    for turn in range(1, 5):
        kv.begin_step(turn)
        kv.commit(request)
        kv.end_step(turn)
        for window, table in zip(windows, tables, strict=True):
            entered = [pool.has_content(block_id) for block_id in table[:10] if block_id >= 0]
            assert entered == [True, True] if window else [i < 3 * turn for i in range(10)]
        pool.check_integrity()
    hit = kv.find_hit(Request(submit(list(range(41))), "s", b"root" * 4, 0.0))
    assert hit.tables == [table[:10] for table in tables]


@pytest.mark.parametrize("groups", SHAPES, ids=["full+window", "window", "two windows"])
@pytest.mark.parametrize("chunk", [3, 64])
@pytest.mark.parametrize("hit_tokens", [0, 8])
def test_blocks_outside_the_window_are_given_up_while_the_request_runs(
    groups: tuple[KVGroup, ...], chunk: int, hit_tokens: int
) -> None:
    """With a store, but for what the last hit in front of the request's end needs."""
    limits = SchedulerLimits(8, chunk)
    core = make_core(num_blocks=64, limits=limits, max_model_len=60, groups=groups, hit_tokens=hit_tokens)
    prompt = list(range(100, 130))
    core.handle("r", submit(prompt, max_tokens=20), 0.0)
    request = core.requests["a", 0]
    messages, most = [], 0
    while core.has_work:
        core.step(0.0)
        pool = core.scheduler.kv.pool
        pool.check_integrity()
        messages += [m for _, batch in core.take_messages(0.0) for m in batch]
        if request.block_tables:
            stop = -(-request.num_computed // SIZE)
            for group, table in zip(groups, request.block_tables, strict=True):
                first = first_seen_block(group.window, kept_from(request.num_confirmed, hit_tokens), SIZE)
                assert [block_id >= 0 for block_id in table[:stop]] == [i >= first for i in range(stop)]
            assert pool.counts().active == len(request.held_blocks())
            most = max(most, pool.counts().active)
    assert output_of(messages, "a") == expected_tokens(prompt, 20, layer_windows(groups))
    assert most <= num_held_at_once([group.window for group in groups], 50, SIZE, chunk, hit_tokens)
    assert at_rest(core)


def test_what_is_kept_for_a_store_is_what_the_last_hit_needs() -> None:
    assert [kept_from(n, 8) for n in (0, 1, 8, 9, 16, 17)] == [0, 0, 0, 8, 8, 16]
    assert kept_from(17, 0) == 17
    assert num_held_at_end([0, 6], 17, SIZE, 8) == 5 + 3
    assert num_held_at_end([0, 6], 17, SIZE) == 5 + 2


@pytest.mark.parametrize("groups", SHAPES, ids=["full+window", "window", "two windows"])
def test_hits_of_an_earlier_prompt_and_of_its_continuation(groups: tuple[KVGroup, ...]) -> None:
    core = make_core(num_blocks=80, max_model_len=100, groups=groups)
    windows = layer_windows(groups)
    prompt = list(range(100, 140))
    core.handle("r", submit(prompt, request_id="first", max_tokens=9), 0.0)
    answer = output_of(run(core), "first")
    for name, tokens in {"again": prompt, "short": prompt[:22], "longer": [*prompt, *answer, 7, 8, 9]}.items():
        core.handle("r", submit(tokens, request_id=name, max_tokens=9), 0.0)
        messages = run(core)
        assert output_of(messages, name) == expected_tokens(tokens, 9, windows)
        found = core.counters.local_hit
        core.counters.local_hit = 0
        assert found == (48 if name == "longer" else (len(tokens) - 1) // SIZE * SIZE)
    assert at_rest(core)


@pytest.mark.parametrize("groups", SHAPES, ids=["full+window", "window", "two windows"])
@pytest.mark.parametrize("num_more", [0, 3, 9])
def test_preempted_requests_say_the_same(groups: tuple[KVGroup, ...], num_more: int) -> None:
    """Six requests in a pool that holds one or two: they take each other's blocks, and find some again."""
    num_blocks = num_held_at_once([group.window for group in groups], 36, SIZE, 5) + num_more
    core = make_core(num_blocks=num_blocks, limits=SchedulerLimits(6, 5), max_model_len=36, groups=groups)
    prompts = {str(i): [100 + i // 2 * 20 + j for j in range(9 + i)] for i in range(6)}
    for name, prompt in prompts.items():
        core.handle("r", submit(prompt, request_id=name, max_tokens=22), 0.0)
    messages = run(core, max_steps=2000)
    for name, prompt in prompts.items():
        assert output_of(messages, name) == expected_tokens(prompt, 22, layer_windows(groups))
    assert at_rest(core)
    if not num_more and groups == FULL_AND_WINDOW:
        assert core.scheduler.num_preemptions > 0


def test_steps_that_are_confirmed_late_keep_what_they_see() -> None:
    """Three steps are under way: blocks go only when the steps that see them are confirmed."""
    core = make_core(num_blocks=40, limits=SchedulerLimits(2, 4), max_model_len=60, groups=FULL_AND_WINDOW)
    prompt = list(range(100, 140))
    core.handle("r", submit(prompt, max_tokens=4), 0.0)
    request = core.requests["a", 0]
    outputs: list[StepOutput] = []
    while core.requests:
        outputs.append(core.executor.execute(core.scheduler.schedule(0.0)))
        if len(outputs) == 3 or not request.num_computed < len(prompt):
            if request.block_tables:
                first = first_seen_block(6, request.num_confirmed, SIZE)
                assert all(block_id >= 0 for block_id in request.block_tables[1][first:])
            core.finish_step(outputs.pop(0), 0.0)
            core.scheduler.kv.pool.check_integrity()
    messages = [m for _, batch in core.take_messages(0.0) for m in batch]
    for output in outputs:
        core.finish_step(output, 0.0)
    assert output_of(messages, "a") == expected_tokens(prompt, 4, [0, 6])
    run(core)
    assert at_rest(core)


def test_only_the_first_groups_content_is_told() -> None:
    core: EngineCore = make_core(num_blocks=40, max_model_len=60, groups=FULL_AND_WINDOW)
    pool = core.scheduler.kv.pool
    seen = []
    core.handle("r", submit(list(range(100, 120)), max_tokens=2), 0.0)
    run(core)
    for event in pool.snapshot_events()[1:]:
        assert isinstance(event, BlockStored)
        seen += event.keys
    assert len(seen) == len(set(seen)) == 5
    assert pool.counts().cached == 10
    pool.events.clear()
    blocks = pool.allocate(40)
    assert blocks is not None
    assert sorted(key for event in pool.events if isinstance(event, BlockRemoved) for key in event.keys) == sorted(seen)
    pool.release(blocks, Holder.ACTIVE)
