"""Operators' orders at an engine: its pool answers at once, the tiers below it by and by, and what is late is told."""

from collections.abc import Iterator, Sequence
from types import SimpleNamespace

import pytest

from pdkv.base.block_keys import extend_keys
from pdkv.connectors.base import NO_TRANSFERS, TransferKey, TransferOutcome, TransferResults
from pdkv.engine.core import EngineCore
from pdkv.engine.intake import root_of
from pdkv.engine.outside.cache_orders import SLACK_S
from pdkv.testing.engine import make_core, of_type, run, submit
from pdkv.wire.kv import KVGroup
from pdkv.wire.messages import BlockRemoved, KVEvents
from pdkv.wire.tiers import CacheAction, CacheAnswer, CacheOrder, TierAnswer

PROMPT = list(range(100, 118))  # four blocks of 4 tokens, and two tokens


def keys_of(core: EngineCore, prompt: Sequence[int]) -> list[bytes]:
    keys: list[bytes] = []
    size = core.card.hash_block_size
    extend_keys(keys, root_of(core.card, submit(list(prompt))), prompt, hash_block_size=size)
    return keys


def order(
    core: EngineCore, action: CacheAction, keys: list[bytes] | None, now: float = 1.0, **fields: str
) -> list[CacheAnswer]:
    core.handle("r", CacheOrder(order_id="o", action=action, keys=keys, timeout_s=2.0, **fields), now)  # type: ignore[arg-type]
    return [m for m in of_type(run(core, now), CacheAnswer) if isinstance(m, CacheAnswer)]


def cached(core: EngineCore, keys: list[bytes]) -> tuple[int, int]:
    """(tokens, blocks) in the pool."""
    (answer,) = order(core, "lookup", keys, tier="pool")
    (pool,) = answer.tiers
    return pool.num_tokens, pool.num_values


@pytest.mark.parametrize("groups", [(), (KVGroup((0,)), KVGroup((1,), window=6))])
def test_the_pool_tells_and_drops_what_it_has_of_a_prompt(groups: tuple[KVGroup, ...]) -> None:
    core = make_core(num_blocks=32, max_model_len=40, groups=groups)
    for request_id, prompt in (("a", PROMPT), ("b", [*PROMPT[:8], *range(20)])):
        core.handle("r", submit(prompt, request_id=request_id, max_tokens=1), 0.0)
        run(core)
    keys = keys_of(core, PROMPT)
    assert cached(core, keys)[0] == 16
    assert cached(core, keys_of(core, [1, *PROMPT])) == (0, 0)
    (answer,) = order(core, "clear", keys)
    assert answer.tiers[0].num_values >= 4
    assert cached(core, keys)[0] == cached(core, keys_of(core, [*PROMPT[:8], *range(20)]))[0] == 0
    core.scheduler.kv.pool.check_integrity()
    order(core, "clear", None)
    assert core.scheduler.kv.pool.counts().free == 32
    core.handle("r", submit(PROMPT, request_id="c", max_tokens=1), 0.0)
    run(core)
    assert cached(core, keys)[0] == 16


def test_what_somebody_holds_stays_and_routers_hear_of_the_rest() -> None:
    core = make_core(num_blocks=32)
    core.handle("r", submit(PROMPT, max_tokens=20), 0.0)
    while not core.requests["a", 0].output_token_ids:
        core.step(1.0)
    core.handle("r", submit(list(range(8)), request_id="b", max_tokens=1), 1.0)
    while ("b", 0) in core.requests:
        core.step(1.0)
    core.take_messages(1.0)
    core.handle("r", CacheOrder(order_id="o", action="clear"), 1.0)
    messages = [m for _, sent in core.take_messages(1.0) for m in sent]
    removed = [
        k for m in messages if isinstance(m, KVEvents) for e in m.events if isinstance(e, BlockRemoved) for k in e.keys
    ]
    assert removed
    assert set(removed) == set(keys_of(core, range(8))[:2])
    assert core.scheduler.kv.find_prefix(keys_of(core, PROMPT)).num_tokens == 16
    run(core)


@pytest.fixture(name="core")
def core_with_a_tier(monkeypatch: pytest.MonkeyPatch) -> Iterator[EngineCore]:
    """Its connector takes orders and says what the test puts into `core.said`."""
    core = make_core(options={"fabric": "cache-orders"})
    core.asked, core.said = [], []  # type: ignore[attr-defined]

    def take(order: CacheOrder) -> int:
        core.asked.append(order)  # type: ignore[attr-defined]
        return 1

    def answers() -> list[CacheAnswer]:
        said, core.said = core.said, []  # type: ignore[attr-defined]
        return said  # type: ignore[no-any-return]

    tiers = SimpleNamespace(order=take, take_answers=answers, take_events=list, problem="")
    monkeypatch.setattr(core.external, "tiers", tiers)
    yield core
    core.shutdown()


def test_an_answer_waits_for_the_tiers_and_names_them_as_the_stats_do(core: EngineCore) -> None:
    assert order(core, "lookup", [], tier="memory/0-host") == []
    assert [asked.tier for asked in core.asked] == ["0-host"]  # type: ignore[attr-defined]
    core.said.append(CacheAnswer("o", [TierAnswer("0-host", 64, 4)], ["0-host"]))  # type: ignore[attr-defined]
    core.said.append(CacheAnswer("older", [TierAnswer("0-host", 1, 1)]))  # type: ignore[attr-defined]
    (answer,) = of_type(run(core), CacheAnswer)
    assert answer == CacheAnswer("o", [TierAnswer("memory/0-host", 64, 4)], ["pool", "memory/0-host"])
    assert order(core, "pin", [], tier="pool")[0].tiers[0].code == "store_unable"
    assert len(core.asked) == 1, "the pool is none of the connector's tiers"  # type: ignore[attr-defined]


def test_tiers_that_do_not_answer_are_late(core: EngineCore) -> None:
    assert order(core, "lookup", [], now=1.0) == []
    assert core.next_deadline() == 3.0 + SLACK_S
    (answer,) = of_type(run(core, 3.0 + SLACK_S), CacheAnswer)
    assert [(tier.tier, tier.code) for tier in answer.tiers] == [("pool", ""), ("memory", "transfer_timeout")]
    assert core.next_deadline() is None


def test_nobody_is_told_when_the_router_has_left(core: EngineCore) -> None:
    assert order(core, "lookup", []) == []
    core.router_left("r")
    core.said.append(CacheAnswer("o"))  # type: ignore[attr-defined]
    assert of_type(run(core), CacheAnswer) == []
    assert core.next_deadline() is None


def test_what_an_order_has_found_damaged_is_counted(core: EngineCore, monkeypatch: pytest.MonkeyPatch) -> None:
    """The connector says that there is nothing else for the engine to act on."""
    monkeypatch.setattr(core.external.connector, "resolve_results", lambda results: NO_TRANSFERS)
    ended = {TransferKey("o", 0): TransferOutcome(num_damaged=2)}
    core.external.settle(TransferResults(ended, {}, {}, {}))
    assert core.external.num_damaged == 2
