"""Stores of models with windows: what is saved of a window, how long a hit is, and what a load of it reads."""

import random
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import Expected, oracle
from store_rig import AMPLE, FaultyStore, MakeEngine, chain, engines, make_layout, view

from pdkv.connectors.base import ConnectorConfig, TransferKey
from pdkv.connectors.store.envelope import ENVELOPE_BYTES
from pdkv.connectors.store.plan import StoreCut
from pdkv.connectors.transfer.planning import first_seen_block
from pdkv.engine.core import EngineCore
from pdkv.engine.kv.block_pool import Holder
from pdkv.engine.kv.kv_groups import kept_from
from pdkv.errors import ConfigError
from pdkv.kv_store.memory_store import MemoryStore
from pdkv.kv_store.registry import open_store
from pdkv.testing.engine import SideBySide, at_rest, of_type, output_of, submit
from pdkv.wire.kv import KVGroup
from pdkv.wire.messages import EngineToRouter, Finished, Loaded, Submit
from tests.conftest import EXAMPLES

FULL, WINDOW, SMALL = KVGroup((0,)), KVGroup((1,), 40), KVGroup((2,), 17)
SHAPES = [
    (FULL, WINDOW),
    (FULL, KVGroup((1,)), WINDOW, SMALL),
    (KVGroup((0, 1), 33),),
    (KVGroup((1,), 17), KVGroup((0,), 40)),
]


def cut_of(
    groups: tuple[KVGroup, ...], block_size: int = 16, tokens_per_value: int = 64, layer_groups: int = 1
) -> StoreCut:
    config = ConnectorConfig(engine="e", epoch="1", layout=make_layout(block_size, groups=groups), num_blocks=8)
    return StoreCut(config, tokens_per_value=tokens_per_value, layer_groups=layer_groups)


# --- plans --------------------------------------------------------------------------------------------------------


def test_without_groups_keys_are_those_of_earlier_stores() -> None:
    """Stores that were filled before there were groups stay valid."""
    cut = cut_of(())
    (value, *_) = cut.whole_values(chain(8), 0, 128)
    suffix = "40000000010001000000000001000000000000000000"
    assert (value.key + cut.suffixes[0]).hex() == "c3585b60b755fb13e6e65a16d20f1230" + suffix
    (tail,) = cut.tails(TransferKey("t", 1), 70)
    assert (tail.key + cut.suffixes[0]).hex() == "a097986772bc4f6b80cba0227278a4ed" + suffix


@pytest.mark.parametrize("groups", SHAPES, ids=["full+window", "many", "window", "two windows"])
@pytest.mark.parametrize(("block_size", "tokens_per_value"), [(16, 64), (48, 64), (32, 16)])
@settings(max_examples=10 * EXAMPLES, deadline=None)
@given(chunks=st.lists(st.integers(1, 200), min_size=1, max_size=5), is_handoff=st.booleans())
def test_what_is_saved_is_there_and_is_what_hits_need(
    groups: tuple[KVGroup, ...], block_size: int, tokens_per_value: int, chunks: list[int], is_handoff: bool
) -> None:
    cut = cut_of(groups, block_size, tokens_per_value)
    total = sum(chunks)
    keys = chain(total // 16)
    saved: set[tuple[int, int]] = set()
    ends = []
    start = 0
    for number, length in enumerate(chunks):
        stop = start + length
        last = is_handoff and number == len(chunks) - 1
        seen = kept_from(stop, cut.hit_tokens)
        for group, window in enumerate(cut.windows):
            first = first_seen_block(window, seen, block_size)
            table = [-1] * first + [1] * (-(-stop // block_size) - first)
            for value in cut.values_to_save(keys, start, stop, group, table, last=last):
                assert value.start >= first * block_size
                assert value.stop <= stop
                assert last or (group, value.start) not in saved or cut.windows[group]
                saved.add((group, value.start))
        ends += [kept_from(stop, cut.hit_tokens)] + ([stop] if stop % cut.hit_tokens == 0 else [])
        start = stop
    for end in ends:
        assert {(v.group, v.start) for v in cut.values_to_load(keys, 0, end)} <= saved
    if is_handoff:
        tails = cut.tails(TransferKey("t", 1), total)
        wanted = cut.values_to_load(keys, 0, total, tails)
        assert {(v.group, v.start) for v in wanted if cut.is_whole(v)} <= saved
        assert [v for v in wanted if not cut.is_whole(v)] == sorted(tails, key=lambda v: (v.start, v.group))


def test_layers_are_cut_within_each_group() -> None:
    padded = (KVGroup((0, 2, 4)), KVGroup((1, 3), 40))
    cut = cut_of(padded, layer_groups=2)
    spans = [[(part.part.layer_start, part.part.layer_stop) for part in parts] for parts in cut.parts]
    assert spans == [[(0, 1), (1, 3)], [(0, 1), (1, 2)]], "the layer that the second group lacks is not stored"
    assert [cut.stage_that_begins_at(layer) for layer in range(5)] == [0, 2, 1, 3, None]
    with pytest.raises(ConfigError, match=r"1 to 2 \(of the model's smallest KV group\), got 3"):
        cut_of(padded, layer_groups=3)


@pytest.mark.parametrize("groups", SHAPES, ids=["full+window", "many", "window", "two windows"])
@pytest.mark.parametrize("seed", range(12))
def test_a_hit_is_the_longest_that_every_group_has(groups: tuple[KVGroup, ...], seed: int) -> None:
    rng = random.Random(seed)
    block_size = rng.choice([16, 32])
    with engines() as (store, make):
        engine = make("e", groups=groups, block_size=block_size, min_hit_tokens="0", known_for_s="1000")
        cut = engine.connectors[0].cut
        wanted = rng.randint(40, 500)
        request = view("t", num_tokens=wanted + 1)
        values = [
            value
            for group in range(len(groups))
            for value in cut.whole_values(request.block_keys, 0, wanted, group)
            if rng.random() < (0.95 if seed % 2 else 0.7)
        ]
        store.inner.put([(v.key + cut.suffixes[0], memoryview(bytearray(8))) for v in values])
        there = {(value.group, value.start) for value in values}
        for start in (0, rng.randrange(wanted) // block_size * block_size):
            ends = [*range((start // cut.hit_tokens + 1) * cut.hit_tokens, wanted + 1, cut.hit_tokens)]
            if wanted // cut.hit_tokens < len(request.block_keys) * 16 // cut.hit_tokens:  # a value ends behind it
                ends.append(wanted // block_size * block_size)
            needs = {end: cut.values_to_load(request.block_keys, start, end) for end in ends}
            hits = [end for end, own in needs.items() if {(v.group, v.start) for v in own} <= there]
            assert engine.ask(request, start) == max(hits, default=start) - start


def test_lookups_of_windows_ask_from_the_end(store: FaultyStore, make: MakeEngine) -> None:
    """For the window at the end, for the last block before each earlier end, for the windows of those that have it."""
    engine = make("e", groups=(KVGroup((0,), 40),), min_hit_tokens="0")
    cut, request = engine.connectors[0].cut, view("t", num_tokens=1025)
    (end,) = [512]
    stored = [v for v in cut.whole_values(request.block_keys, 0, 1024) if end - 48 <= v.start < end]
    store.inner.put([(v.key + cut.suffixes[0], memoryview(bytearray(8))) for v in stored])
    assert engine.ask(request) == end
    assert store.count("contains") == 3 + 15 + 2  # the earlier ends are 15, and the last block of one is known


# --- engines ------------------------------------------------------------------------------------------------------


def forget(core: EngineCore) -> None:
    """Nothing is in the engine's own cache any more."""
    pool = core.scheduler.kv.pool
    blocks = pool.allocate(pool.num_available)
    assert blocks is not None
    pool.release(blocks, Holder.ACTIVE)


def sources(messages: Sequence[EngineToRouter]) -> tuple[int, int]:
    """Tokens from the store, tokens computed."""
    (finished,) = [m for m in messages if isinstance(m, Finished)]
    assert finished.sources is not None
    return finished.sources.store, finished.sources.computed + finished.sources.recomputed


Families = Callable[[str], Path]

FAMILIES = {
    "mistral": {},  # one group
    "qwen2": {"use_sliding_window": True, "max_window_layers": 1},  # one without and two with a window
}


FIELDS = {"sliding_window": 24, "initializer_range": 0.2, "max_position_embeddings": 512}


@pytest.fixture(scope="module")
def models(hf_model: Callable[..., Path]) -> Families:
    return lambda family: hf_model(family, **FIELDS, **FAMILIES[family])


@contextmanager
def stored(model: Path, **options: str) -> Iterator[tuple[SideBySide, MemoryStore]]:
    """Two engines over a store of their own, which stays as long as the block."""
    url = f"memory://{uuid.uuid4()}"
    with open_store(url) as store, SideBySide.of_model(model, "store", {"url": url, **AMPLE, **options}) as engines:
        assert isinstance(store, MemoryStore)
        yield engines, store


def expect(model: Path, num_tokens: int, num_output: int = 12) -> Expected:
    rng = random.Random(num_tokens)
    return oracle(model).expect(lambda: [rng.randrange(2, 258) for _ in range(num_tokens)], num_output)


def ask(expected: Expected, name: str) -> Submit:
    return submit(expected.prompt, request_id=name, max_tokens=len(expected.output))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("num_tokens", [300, 256, 15])
def test_tokens_and_bytes_of_a_hand_off(models: Families, family: str, num_tokens: int) -> None:
    """The tokens are those of transformers. A layer without a window takes all, one of 24 tokens two blocks or less."""
    model = models(family)
    expected = expect(model, num_tokens)
    with stored(model) as (engines, _):
        decode = engines.decode.core
        messages = engines.hand_over(ask(expected, "a"))
        assert [m.ok for m in of_type(messages, Loaded)] == [True]
        assert output_of(messages, "a") == expected.output[1:]
        layout = decode.card.layout
        num_blocks = num_values = 0
        for window in layout.windows:
            own = -(-num_tokens // 16) - first_seen_block(window, num_tokens, 16)
            num_blocks += own
            num_values += own if window else -(-num_tokens // 64)
        received = num_blocks * layout.block_bytes + num_values * ENVELOPE_BYTES
        assert decode.decode.counts().bytes_received == received
        assert num_tokens != 300 or num_blocks == {"mistral": 2, "qwen2": 19 + 2 * 2}[family]  # of 19 and of 57


@pytest.mark.parametrize(
    ("family", "window", "found"), [("qwen2", 100, 240), ("mistral", 100, 240), ("mistral", 40, 192)]
)
def test_of_a_value_that_ends_behind_what_is_wanted_its_first_blocks_are_loaded(
    hf_model: Callable[..., Path], family: str, window: int, found: int
) -> None:
    """Where the windows before its inner ends are there, too: those of the ends of values overlap."""
    model = hf_model(family, **FIELDS | {"sliding_window": window}, **FAMILIES[family])
    expected = expect(model, 256)
    with stored(model) as (engines, _):
        engines.prefill.ask(ask(expected, "a"))
        messages = engines.decode.ask(ask(expected, "b"))
    assert output_of(messages, "b") == expected.output
    assert sources(messages) == (found, 256 - found)


@pytest.mark.parametrize(
    ("family", "load"),
    [
        ("mistral", "async"),
        ("qwen2", "layerwise"),
        *(pytest.param(*row, marks=pytest.mark.slow) for row in (("mistral", "layerwise"), ("qwen2", "async"))),
    ],
)
def test_another_engine_finds_a_prompt_and_its_continuation(models: Families, family: str, load: str) -> None:
    model = models(family)
    expected = expect(model, 300, 40)
    with stored(model, load=load) as (engines, _):
        first, second = engines.prefill, engines.decode
        messages = first.ask(ask(expected, "a"))
        assert output_of(messages, "a") == expected.output
        assert sources(messages) == (0, 300)
        again = second.ask(ask(expected, "b"))
        assert output_of(again, "b") == expected.output
        assert sources(again) == (256, 44)
        longer = oracle(model).expect(lambda: [*expected.prompt, *expected.output, 7, 8, 9], 12)
        forget(first.core)
        messages = first.ask(ask(longer, "c"))
        assert output_of(messages, "c") == longer.output
        assert sources(messages) == (320, 23), "what was generated is found, too"


def test_a_damaged_latent_value_is_a_counted_miss(hf_model: Callable[..., Path]) -> None:
    model = hf_model("deepseek_v3", initializer_range=0.2)
    expected = expect(model, 100)
    with stored(model) as (engines, store):
        engines.prefill.ask(ask(expected, "a"))
        (value,) = store._shelf._values.values()
        value[len(value) // 3] ^= 1
        messages = engines.decode.ask(ask(expected, "b"))
        assert output_of(messages, "b") == expected.output
        assert sources(messages) == (0, 100)
        assert engines.decode.core.external.num_damaged == 1


@pytest.mark.parametrize(
    ("family", "group", "load"),
    [
        ("mistral", 0, "async"),
        ("qwen2", 0, "layerwise"),
        ("qwen2", 1, "async"),
        *(
            pytest.param(*row, marks=pytest.mark.slow)
            for row in (("mistral", 0, "layerwise"), ("qwen2", 0, "async"), ("qwen2", 1, "layerwise"))
        ),
    ],
)
def test_a_damaged_value_of_a_window_is_a_counted_miss(models: Families, family: str, load: str, group: int) -> None:
    model = models(family)
    expected = expect(model, 300)
    with stored(model, load=load) as (engines, store):
        first, second = engines.prefill, engines.decode
        first.ask(ask(expected, "a"))
        length = min(map(len, store._shelf._values)) + (2 if group else 0)  # the first group's keys name no group
        key = [key for key in store._shelf._values if len(key) == length][-1]
        value = store._shelf._values[key]
        value[len(value) // 3] ^= 1
        messages = second.ask(ask(expected, "b"))
        assert output_of(messages, "b") == expected.output
        assert sources(messages) == (0, 300), "what came of a window is for another end"
        assert second.core.external.num_damaged == 1
        assert at_rest(second.core)
        for engine, name in ((first, "c"), (second, "d")):  # saved anew by the second one
            forget(engine.core)
            assert sources(engine.ask(ask(expected, name)))[0] == 256
