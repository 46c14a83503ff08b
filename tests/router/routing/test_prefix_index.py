"""The prefix index against a plain model, with gaps, resyncs and deaths."""

import itertools
from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from pdkv.base.block_keys import extend_keys, root_key
from pdkv.router.routing.prefix_index import SLICE_KEYS, PrefixIndex, keys_needed
from pdkv.wire.kv import KVGroup, KVLayout
from pdkv.wire.messages import BlockRemoved, BlockStored, CacheCleared, KVEvent, KVEvents
from tests.conftest import EXAMPLES


def keys_of(token_ids: Sequence[int]) -> list[bytes]:
    keys: list[bytes] = []
    extend_keys(keys, root_key(model="m", layout="l"), token_ids)
    return keys


def synced(*engines: str) -> PrefixIndex:
    index = PrefixIndex()
    for engine in engines:
        index.add_engine(engine)
        assert index.apply(engine, KVEvents(0, [CacheCleared()]))
    return index


def settle(index: PrefixIndex) -> int:
    """Do all that was put off; returns in how many slices."""
    num_slices = 0
    while index.has_work:
        index.work()
        num_slices += 1
    return num_slices


def test_match_is_the_longest_prefix_of_each_engine_in_tokens() -> None:
    keys = keys_of(range(64))
    index = synced("a", "b", "c")
    index.apply("a", KVEvents(1, [BlockStored(keys, None)]))
    index.apply("b", KVEvents(1, [BlockStored(keys[:2], None)]))
    assert index.match(keys) == {"a": 64, "b": 32}
    assert index.match(keys_of([*range(32), *[9] * 32])) == {"a": 32, "b": 32}
    assert index.match(keys_of([9] * 32)) == {}
    assert index.match([]) == {}


def test_hole_in_a_chain_ends_the_match() -> None:
    keys = keys_of(range(64))
    index = synced("a")
    index.apply("a", KVEvents(1, [BlockStored(keys, None), BlockRemoved([keys[1]])]))
    assert index.match(keys) == {"a": 16}
    index.apply("a", KVEvents(2, [BlockStored([keys[1]], keys[0])]))
    assert index.match(keys) == {"a": 64}


def test_gap_empties_the_part_asks_once_and_waits_for_the_resync() -> None:
    keys = keys_of(range(32))
    index = synced("a", "b")
    index.apply("a", KVEvents(1, [BlockStored(keys, None)]))
    index.apply("b", KVEvents(1, [BlockStored(keys, None)]))
    assert not index.apply("a", KVEvents(3, [BlockRemoved([keys[1]])]))
    assert index.match(keys) == {"b": 32}
    assert index.apply("a", KVEvents(4, [BlockStored(keys, None)]))  # the resync is on its way: nothing is asked again
    assert index.match(keys) == {"b": 32}
    assert index.apply("a", KVEvents(9, [CacheCleared(), BlockStored(keys[:1], None)]))
    assert index.match(keys) == {"a": 16, "b": 32}
    assert index.num_gaps == 1


def test_events_before_the_whole_content_is_known_ask_for_it_and_are_skipped() -> None:
    keys = keys_of(range(16))
    index = PrefixIndex()
    index.add_engine("a")
    assert not index.apply("a", KVEvents(7, [BlockStored(keys, None)]))
    assert index.apply("a", KVEvents(8, [BlockStored(keys, None)]))
    assert index.match(keys) == {}
    assert index.apply("nobody", KVEvents(0, [CacheCleared(), BlockStored(keys, None)]))
    assert index.num_keys == 0
    assert index.apply("a", KVEvents(8, [CacheCleared(), BlockStored(keys, None)]))
    assert index.match(keys) == {"a": 16}


def test_death_clears_the_engines_part_and_a_new_one_starts_empty() -> None:
    keys = keys_of(range(32))
    index = synced("a", "b")
    for engine in "ab":
        index.apply(engine, KVEvents(1, [BlockStored(keys, None)]))
    index.remove_engine("a")
    index.remove_engine("a")
    assert index.match(keys) == {"b": 32}
    index.add_engine("c")  # takes the free place
    assert index.match(keys) == {"b": 32}
    index.remove_engine("b")
    settle(index)
    assert index.num_keys == 0


PREFIXES = [keys_of([i // 3] * 16 + [i] * 48) for i in range(6)]  # some share their first key
EVENTS = st.one_of(
    st.builds(lambda i, n: BlockStored(PREFIXES[i][:n], None), st.integers(0, 5), st.integers(1, 4)),
    st.builds(lambda i, n: BlockRemoved([PREFIXES[i][n]]), st.integers(0, 5), st.integers(0, 3)),
    st.just(CacheCleared()),
)


@settings(max_examples=50 * EXAMPLES)
@given(st.lists(st.tuples(st.sampled_from("abc"), st.lists(EVENTS, max_size=3)), max_size=25))
def test_index_equals_a_set_of_keys_per_engine(batches: list[tuple[str, list[KVEvent]]]) -> None:
    index = synced(*"abc")
    model: dict[str, set[bytes]] = {engine: set() for engine in "abc"}
    numbers = dict.fromkeys("abc", 1)
    for engine, events in batches:
        assert index.apply(engine, KVEvents(numbers[engine], events))
        numbers[engine] += 1
        for event in events:
            match event:
                case BlockStored(keys=keys):
                    model[engine].update(keys)
                case BlockRemoved(keys=keys):
                    model[engine].difference_update(keys)
                case CacheCleared():
                    model[engine].clear()
    check_matches(index, model)
    settle(index)
    check_matches(index, model)
    assert index.num_keys == len(set().union(*model.values()))
    assert [index.num_keys_of(engine) for engine in "abc"] == [len(model[engine]) for engine in "abc"]


def check_matches(index: PrefixIndex, model: dict[str, set[bytes]]) -> None:
    for keys in PREFIXES:
        expected = {}
        for engine, held in model.items():
            length = next((i for i, key in enumerate(keys) if key not in held), len(keys))
            if length:
                expected[engine] = 16 * length
        assert index.match(keys) == expected


@given(
    held=st.lists(st.sets(st.integers(0, 15)), min_size=3, max_size=3),
    needed=st.lists(st.integers(0, 6), min_size=3, max_size=3),
    num_keys=st.integers(0, 16),
)
def test_an_engine_whose_layers_all_have_a_window_needs_only_a_prefixs_end(
    held: list[set[int]], needed: list[int], num_keys: int
) -> None:
    """Whatever is missing before it: those blocks were given up, and reused. 0 needs all of it."""
    index = PrefixIndex()
    keys = [i.to_bytes(16) for i in range(16)]
    expected = {}
    for engine, own, count in zip("abc", held, needed, strict=True):
        index.add_engine(engine, num_needed=count)
        index.apply(engine, KVEvents(1, [CacheCleared(), BlockStored([keys[i] for i in sorted(own)], None)]))
        for length in range(1, num_keys + 1):
            if set(range(max(length - count, 0) if count else 0, length)) <= own:
                expected[engine] = 16 * length
    assert index.match(keys[:num_keys]) == expected


def test_how_many_keys_a_window_needs() -> None:
    def needed(block_size: int, *windows: int) -> int:
        groups = tuple(KVGroup((layer,), window) for layer, window in enumerate(windows))
        return keys_needed(KVLayout(1, 1, 1, block_size, "float32", 4, groups=groups), 16)

    assert [needed(16), needed(16, 0, 64), needed(16, 64), needed(16, 66), needed(16, 1)] == [0, 0, 4, 5, 1]
    assert [needed(32, 64), needed(32, 66), needed(16, 33, 64)] == [4, 6, 4]


def test_an_engine_cannot_tell_more_keys_than_its_cache_holds() -> None:
    """A lying one would take the router's memory."""
    index = PrefixIndex()
    index.add_engine("e", max_keys=100)
    keys = [i.to_bytes(16) for i in range(250)]
    assert index.apply("e", KVEvents(1, [CacheCleared(), BlockStored(keys[:80], None)]))
    assert index.apply("e", KVEvents(2, [BlockStored(keys[:80], None), BlockStored(keys[60:], None)]))
    settle(index)
    assert (index.num_keys_of("e"), index.num_excess_keys) == (100, 150)
    assert index.apply("e", KVEvents(3, [BlockRemoved(keys[:50]), BlockStored(keys[200:], None)]))
    settle(index)
    assert (index.num_keys_of("e"), index.num_keys) == (100, 100)


# --- nothing takes long at once -----------------------------------------------------------------------------------

MANY = [i.to_bytes(16) for i in range(8 * SLICE_KEYS)]


def hold(index: PrefixIndex, engine: str, number: int = 1) -> None:
    """The engine says that it has MANY keys."""
    assert index.apply(engine, KVEvents(number, [CacheCleared(), BlockStored(MANY, None)]))


def test_an_engine_that_dies_matches_nothing_at_once_and_is_cleared_in_slices() -> None:
    """F21: what was in its cache draws no request any more."""
    index = synced("a", "b")
    hold(index, "a")
    index.apply("b", KVEvents(1, [BlockStored(MANY[:3], None)]))
    settle(index)
    index.remove_engine("a")
    assert index.match(MANY) == {"b": 48}
    assert index.num_keys == len(MANY)
    left = [index.num_keys]
    while index.work():
        left.append(index.num_keys)
    assert index.num_keys == 3
    assert len(left) >= 8
    assert max(a - b for a, b in itertools.pairwise(left)) < 2 * SLICE_KEYS
    assert index.match(MANY) == {"b": 48}


def test_a_resync_is_taken_in_slices_and_matches_as_far_as_it_came() -> None:
    index = synced("a")
    hold(index, "a")
    held = [index.num_keys_of("a")]
    while index.work():
        held.append(index.num_keys_of("a"))
        assert index.match(MANY) == ({"a": 16 * held[-1]} if held[-1] else {})
    assert index.num_keys_of("a") == len(MANY)
    assert held[0] == 0
    assert max(b - a for a, b in itertools.pairwise(held)) <= SLICE_KEYS


def test_an_engine_that_starts_over_forgets_at_once_what_it_had_and_what_waits() -> None:
    index = synced("a")
    hold(index, "a")
    settle(index)
    assert index.apply("a", KVEvents(2, [CacheCleared(), BlockStored(MANY[:2], None)]))
    assert (index.match(MANY), index.num_keys_of("a")) == ({"a": 32}, 2)
    hold(index, "a", number=3)
    assert index.apply("a", KVEvents(9, [CacheCleared(), BlockStored(MANY[:1], None)]))
    settle(index)
    assert (index.match(MANY), index.num_keys) == ({"a": 16}, 1)


def test_events_keep_their_order_behind_those_that_wait() -> None:
    index = synced("a")
    hold(index, "a")
    assert index.apply("a", KVEvents(2, [BlockRemoved([MANY[5]])]))
    settle(index)
    assert index.match(MANY) == {"a": 80}
    assert index.num_keys_of("a") == len(MANY) - 1


def test_a_bit_is_used_again_only_when_it_is_cleared() -> None:
    index = synced("a")
    hold(index, "a")
    settle(index)
    for life in range(4):
        index.remove_engine("a")
        index.add_engine("a")
        assert index.apply("a", KVEvents(0, [CacheCleared(), BlockStored(MANY[:life], None)]))
        assert index.match(MANY) == ({"a": 16 * life} if life else {})
    index.work()
    hold(index, "a")
    settle(index)
    assert index.match(MANY) == {"a": 16 * len(MANY)}
    index.remove_engine("a")
    settle(index)
    assert index.num_keys == 0


def test_an_engine_that_tells_more_than_is_worked_off_is_asked_anew() -> None:
    index = PrefixIndex()
    index.add_engine("a", max_keys=len(MANY))
    hold(index, "a", number=0)
    answers = []
    for number in range(1, 20):
        answers.append(index.apply("a", KVEvents(number, [BlockStored(MANY, None)])))
    assert answers.count(False) == 1
    assert index.num_gaps == 1
    settle(index)
    assert index.num_keys == 0
    hold(index, "a", number=20)
    settle(index)
    assert index.num_keys_of("a") == len(MANY)


def test_whoever_works_is_called_once_each_time_that_there_is_work_again() -> None:
    calls = []
    index = PrefixIndex(on_work=lambda: calls.append(1))
    index.add_engine("a")
    assert index.apply("a", KVEvents(0, [CacheCleared(), BlockStored(MANY[:10], None)]))
    assert not calls
    hold(index, "a")
    index.remove_engine("a")
    assert len(calls) == 1
    settle(index)
    index.remove_engine("a")
    assert len(calls) == 1
    index.add_engine("a")
    hold(index, "a")
    assert len(calls) == 2


def test_a_thousand_engines_match_with_their_own_lengths() -> None:
    index = PrefixIndex()
    expected = {}
    for number in range(1000):
        length = number * 7 % 65
        index.add_engine(f"e{number}")
        assert index.apply(f"e{number}", KVEvents(0, [CacheCleared(), BlockStored(MANY[:length], None)]))
        if length:
            expected[f"e{number}"] = 16 * length
    assert index.match(MANY[:64]) == expected
