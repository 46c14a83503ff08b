"""What routers are told of tiers below the cache: news, everything to who joins later, and only so much."""

from collections.abc import Sequence
from types import SimpleNamespace

import pytest

from pdkv.engine.core import EngineCore
from pdkv.engine.outside import lower_tiers
from pdkv.engine.outside.lower_tiers import LowerTiers
from pdkv.router.routing.tier_index import TierIndex
from pdkv.testing.engine import make_core, run, submit
from pdkv.wire.messages import EngineToRouter, Resync
from pdkv.wire.tiers import TierEvents

KEYS = [bytes([i]) * 16 for i in range(10)]


def news(stored: Sequence[bytes] = (), removed: Sequence[bytes] = ()) -> TierEvents:
    return TierEvents("disk", True, 64, list(removed), list(stored))


def test_what_a_connector_says_is_told_and_remembered() -> None:
    tiers = LowerTiers()
    assert tiers.update([news()]) == [news()], "that there is a tier"
    assert tiers.update([news(KEYS[:4])]) == [news(KEYS[:4])]
    assert tiers.update([news(KEYS[1:2], KEYS[2:3])]) == [news(KEYS[1:2], KEYS[2:3])]
    assert tiers.update([news([], KEYS[9:])]) == [news([], KEYS[9:])], "another engine may have told it"
    assert sorted(tiers.snapshot()[0].stored) == [KEYS[0], KEYS[1], KEYS[3]]


def test_what_another_engine_missed_counts_again_when_it_was_saved_again() -> None:
    """The writer has not heard that it was missed."""
    writer, index = LowerTiers(), TierIndex()
    for engine in ("writer", "reader"):
        index.add_engine(engine)
    for events, expected in ((news(KEYS[3:4]), 64), (news([], KEYS[3:4]), 0), (news(KEYS[3:4]), 64)):
        if events.removed:
            index.apply("reader", events)
        else:
            for told in writer.update([events]):
                index.apply("writer", told)
        assert sum(reach.num_tokens for reach in index.match(KEYS[:4])) == expected


def test_many_keys_are_told_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lower_tiers, "KEYS_PER_MESSAGE", 4)
    tiers = LowerTiers()
    expected = [news(KEYS[:4], KEYS[8:]), news(KEYS[4:8])]
    assert tiers.update([news(KEYS[:8], KEYS[8:])]) == expected
    assert tiers.snapshot() == [news(KEYS[:4]), news(KEYS[4:8])]


def test_keys_and_tiers_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lower_tiers, "MAX_TIER_KEYS", 3)
    monkeypatch.setattr(lower_tiers, "MAX_TIERS", 2)
    tiers = LowerTiers()
    tiers.update([news(KEYS)])
    assert tiers.snapshot() == [news(KEYS[-3:])]
    others = [TierEvents(f"m{i}", False, 16, stored=KEYS) for i in range(3)]
    assert tiers.update(others) == others[:1]
    assert len(tiers.snapshot()) == 2


def told(messages: Sequence[EngineToRouter]) -> list[TierEvents]:
    return [message for message in messages if isinstance(message, TierEvents)]


def tell(core: EngineCore, monkeypatch: pytest.MonkeyPatch, *events: TierEvents) -> None:
    """The connector has this to tell, once."""
    waiting = list(events)
    tiers = SimpleNamespace(take_events=lambda: [waiting.pop(0)] if waiting else [], problem="")
    monkeypatch.setattr(core.external, "tiers", tiers)


def test_every_router_hears_of_news_and_one_that_joins_later_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    core = make_core(options={"fabric": "lower-tiers"})
    tell(core, monkeypatch, news(KEYS[:2]), news(KEYS[2:3]))
    assert told(run_one(core)) == [news(KEYS[:2])]
    core.router_joined("later", "1")
    by_router = {router: told(messages) for router, messages in core.take_messages(0.0)}
    assert by_router == {"r": [news(KEYS[2:3])], "later": [news(KEYS[:3])]}
    core.handle("r", Resync(), 0.0)
    assert told([m for _, messages in core.take_messages(0.0) for m in messages]) == [news(KEYS[:3])]


def test_without_a_tier_nothing_is_told() -> None:
    core = make_core(options={"fabric": "no-tiers"})
    core.handle("r", submit([1, 2, 3]), 0.0)
    assert told(run(core)) == []
    core.router_joined("later", "1")
    assert told([m for _, messages in core.take_messages(0.0) for m in messages]) == []


def run_one(core: EngineCore) -> list[EngineToRouter]:
    return [message for _, messages in core.take_messages(0.0) for message in messages]
