"""Stores that give back something else than was saved: it reaches no block, it is counted, and it does not stay."""

import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
from damage import MUTATIONS, KnownStore, damage, swap
from store_rig import KINDS_HERE, Engine, random_kv, scattered, store_here, view
from store_servers import PATIENT, SERVERS, SharedServer

from pdkv.connectors.base import TransferOutcome
from pdkv.errors import KVNotFound
from pdkv.kv_store.base import KVStore
from pdkv.kv_store.registry import open_store

NUM_TOKENS = 256
NUM_VALUES = 4

EVERY_MUTATION = ("memory", "redis")
"""Kinds of stores: one whose values are views, and one that copies them."""

OF_OTHERS = ("flip", "truncate")

MakeEngine = Callable[..., Engine]


@pytest.fixture(scope="module", params=[*KINDS_HERE, *SERVERS])
def store(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, shared_server: SharedServer
) -> Iterator[KnownStore]:
    """A store of each kind, shared by the module's tests: each has salts of its own."""
    kind = request.param
    directory = tmp_path_factory.mktemp("values", numbered=True)
    store = open_store(shared_server(kind).url, PATIENT) if kind in SERVERS else store_here(kind, directory)
    with KnownStore(store) as known:
        yield known


@pytest.fixture
def make(request: pytest.FixtureRequest) -> Iterator[MakeEngine]:
    made: list[Engine] = []

    def make_engine(store: KVStore, **arguments: object) -> Engine:
        made.append(Engine(store, f"e{len(made)}", **arguments))  # type: ignore[arg-type]
        return made[-1]

    yield make_engine
    for engine in made:
        engine.scheduler.shutdown()
        engine.worker.shutdown()
        assert engine.worker._staging.num_free == engine.worker._staging.count


def save(engine: Engine, salt: str, num_tokens: int = NUM_TOKENS) -> torch.Tensor:
    """Compute a prompt and store it; its KV."""
    kv, blocks = random_kv(num_tokens, sum(salt.encode())), scattered(num_tokens, engine.block_size)
    engine.fill(blocks, kv)
    request = view(f"save-{salt}", num_tokens=num_tokens + 1, salt=salt)
    outcomes = [engine.save(request, blocks, stop, start=stop - 128) for stop in range(128, num_tokens + 1, 128)]
    assert any(outcomes), "nothing was saved"
    assert not any(outcome.code for outcome in outcomes if outcome is not None)
    return kv


def keys_of(engine: Engine, salt: str, num_tokens: int = NUM_TOKENS) -> list[bytes]:
    """Keys of a prompt's values, of its first part."""
    cut = engine.connectors[0].cut
    block_keys = view("x", num_tokens=num_tokens + 1, salt=salt).block_keys
    return [value.key + cut.suffixes[0] for value in cut.whole_values(block_keys, 0, num_tokens)]


def load(engine: Engine, transfer_id: str, salt: str, num_found: int) -> tuple[TransferOutcome, torch.Tensor]:
    """Ask, which finds so many tokens, and load them: the outcome, and what is in the blocks."""
    request = view(transfer_id, num_tokens=NUM_TOKENS + 1, salt=salt)
    blocks = scattered(NUM_TOKENS, engine.block_size, start=7)
    assert engine.ask(request) == num_found
    for pool in engine.pools:
        pool.fill_(-1.0)
    return engine.load(request, blocks, num_found), engine.tokens(blocks, NUM_TOKENS)


def check_repaired(store: KnownStore, make: MakeEngine, engine: Engine, salt: str, kv: torch.Tensor, gap: int) -> None:
    """Nobody asks again for what is damaged; the next save puts a sound value there, for every engine."""
    asked = dict(store.num_asked)
    for again in ("again", "another"):
        assert engine.ask(view(f"{again}-{salt}", num_tokens=NUM_TOKENS + 1, salt=salt)) == (gap if gap >= 64 else 0)
    assert store.num_asked == asked
    assert torch.equal(save(engine, salt), kv)
    for reader in (engine, make(store)):
        outcome, got = load(reader, f"repaired-{salt}-{reader.name}", salt, NUM_TOKENS)
        assert outcome.code == ""
        assert outcome.num_damaged == 0
        assert torch.equal(got, kv)


@pytest.mark.parametrize(
    ("store", "mutation"),
    [
        pytest.param(kind, name, marks=() if kind in EVERY_MUTATION or name in OF_OTHERS else pytest.mark.slow)
        for kind in (*KINDS_HERE, *SERVERS)
        for name in MUTATIONS
    ],
    indirect=["store"],
    scope="module",
)
def test_a_damaged_value_is_a_counted_miss_and_is_replaced(store: KnownStore, make: MakeEngine, mutation: str) -> None:
    """F26. Attack 2, B9."""
    rng = random.Random(mutation)
    kv = save(make(store), mutation)
    engine = make(store)
    index = rng.randrange(NUM_VALUES)
    damage(store, keys_of(engine, mutation)[index], mutation, rng)
    outcome, got = load(engine, mutation, mutation, NUM_TOKENS)
    assert (outcome.code, outcome.num_tokens, outcome.num_damaged) == (KVNotFound.code, 64 * index, 1)
    assert torch.equal(got[: 64 * index], kv[: 64 * index])
    left = got[64 * index : 64 * index + 64]
    assert bool((left == (0.0 if store.can_scatter else -1.0)).all()), "not one byte of it is left in a block"
    check_repaired(store, make, engine, mutation, kv, 64 * index)


def test_two_values_that_changed_places_are_both_misses(store: KnownStore, make: MakeEngine) -> None:
    kv = save(make(store), "swap")
    engine = make(store)
    keys = keys_of(engine, "swap")
    swap(store, keys[1], keys[2])
    outcome, got = load(engine, "swap", "swap", NUM_TOKENS)
    assert (outcome.code, outcome.num_tokens, outcome.num_damaged) == (KVNotFound.code, 64, 2)
    assert torch.equal(got[:64], kv[:64])
    check_repaired(store, make, engine, "swap", kv, 64)


def test_a_value_of_another_model_prompt_or_layout_is_a_miss(store: KnownStore, make: MakeEngine) -> None:
    """Whole and sound ones of the same size, under a key that is not their own."""
    kv = save(make(store), "own")
    others = [make(store), make(store, tokens_per_value="192", layer_groups="3")]
    for other in others:
        save(other, "foreign", 384)
    engine = make(store)
    for index, other in enumerate(others):
        value = store.saved[keys_of(other, "foreign", 384)[0]]
        assert len(value) == len(store.saved[keys_of(engine, "own")[0]])
        store.replace(keys_of(engine, "own")[2 * index + 1], value)
        reader = make(store)
        outcome, got = load(reader, f"own-{index}", "own", NUM_TOKENS)
        assert (outcome.code, outcome.num_tokens, outcome.num_damaged) == (KVNotFound.code, 64 + 128 * index, 1)
        assert torch.equal(got[: outcome.num_tokens], kv[: outcome.num_tokens])
        check_repaired(store, make, reader, "own", kv, outcome.num_tokens)


def test_signed_values_and_others_miss_each_other_and_a_forged_one_is_a_miss(
    store: KnownStore, make: MakeEngine, tmp_path: Path
) -> None:
    for name in ("one", "two"):
        (tmp_path / name).write_text(f"secret number {name}, long enough\n")
        (tmp_path / name).chmod(0o600)
    kinds: Sequence[dict[str, str]] = [
        {},
        *({"sign": "true", "sign_key_file": f"{tmp_path / n}"} for n in ("one", "two")),
    ]
    kvs = []
    for index, options in enumerate(kinds):
        assert make(store, **options).ask(view(f"early-{index}", num_tokens=257, salt="signed")) == 0
        kvs.append(save(make(store, **options), "signed"))
    for index, options in enumerate(kinds):
        outcome, got = load(make(store, **options), f"signed-{index}", "signed", NUM_TOKENS)
        assert (outcome.code, outcome.num_damaged) == ("", 0)
        assert torch.equal(got, kvs[index])
    signed = make(store, **kinds[1])
    for forger in (make(store), make(store, **kinds[2])):
        store.replace(keys_of(signed, "signed")[2], store.saved[keys_of(forger, "signed")[2]])
        outcome, _ = load(make(store, **kinds[1]), f"forged-{forger.name}", "signed", NUM_TOKENS)
        assert (outcome.code, outcome.num_tokens, outcome.num_damaged) == (KVNotFound.code, 128, 1)
        save(make(store, **kinds[1]), "signed")
