"""What lies in tiers below the caches: who reaches it, how far a prompt matches, and what is refused."""

import pytest

from pdkv.router.routing import tier_index
from pdkv.router.routing.tier_index import TierIndex
from pdkv.wire.tiers import TierEvents, TierPart

KEYS = [bytes([i]) * 16 for i in range(32)]  # of a prompt of 512 tokens
ENDS = KEYS[3::4]  # where values of 64 tokens end


def disk(*, stored: list[bytes] | None = None, removed: list[bytes] | None = None, step: int = 64) -> TierEvents:
    return TierEvents("disk", True, step, removed or [], stored or [])


def index_of(*engines: str) -> TierIndex:
    index = TierIndex()
    for engine in engines:
        index.add_engine(engine)
    return index


def matches(index: TierIndex, keys: list[bytes] = KEYS) -> dict[str, int]:
    """Tokens of the longest prefix that each engine reaches in one tier."""
    found: dict[str, int] = {}
    for reach in index.match(keys):
        for engine in reach.engines:
            found[engine] = max(found.get(engine, 0), reach.num_tokens)
    return found


def test_what_one_engine_stored_every_engine_reaches_that_names_the_tier() -> None:
    index = index_of("a", "b", "c")
    assert index.apply("a", disk(stored=ENDS[:3]))
    assert index.apply("b", disk())
    assert matches(index) == {"a": 192, "b": 192}
    assert matches(index, KEYS[:7]) == {"a": 64, "b": 64}, "of a shorter prompt the whole values"


def test_a_tier_of_an_engines_own_is_nobody_elses() -> None:
    index = index_of("a", "b")
    assert index.apply("a", TierEvents("memory", False, 16, stored=KEYS[:5]))
    assert index.apply("b", TierEvents("memory", False, 64, stored=ENDS[:1]))  # it may cut otherwise
    assert matches(index) == {"a": 80, "b": 64}


def test_two_hosts_memories_are_two_tiers() -> None:
    index = index_of("a", "b", "c")
    index.apply("a", TierEvents("memory", True, 64, stored=ENDS[:3], scope="one host"))
    index.apply("b", TierEvents("memory", True, 64, scope="one host"))
    index.apply("c", TierEvents("memory", True, 64, stored=ENDS[:1], scope="another"))
    assert matches(index) == {"a": 192, "b": 192, "c": 64}
    index.apply("c", TierEvents("memory", True, 64, removed=ENDS[:1], scope="another"))
    assert matches(index) == {"a": 192, "b": 192}


def test_of_several_tiers_the_longest_match_counts() -> None:
    index = index_of("a")
    index.apply("a", disk(stored=ENDS[:2]))
    index.apply("a", TierEvents("0-store/store", True, 32, stored=KEYS[1:12:2]))
    assert matches(index) == {"a": 192}


def test_what_anybody_finds_missing_is_missing_for_all() -> None:
    index = index_of("a", "b")
    index.apply("a", disk(stored=ENDS))
    index.apply("b", disk(removed=[ENDS[2], b"never told"]))
    assert matches(index) == {"a": 128, "b": 128}
    index.apply("b", disk(stored=[ENDS[2]]))
    assert matches(index) == {"a": 512, "b": 512}


def test_a_shared_tier_outlives_the_engine_that_filled_it_and_not_the_last_that_reaches_it() -> None:
    index = index_of("a", "b")
    index.apply("a", disk(stored=ENDS))
    index.apply("b", disk())
    index.remove_engine("a")
    assert matches(index) == {"b": 512}
    index.remove_engine("b")
    assert index.describe() == []
    assert index.apply("b", disk(stored=ENDS)), "what a connection still brings of an engine that is gone is skipped"
    assert index.describe() == []


def test_an_engine_that_comes_again_has_to_say_again_what_it_reaches() -> None:
    index = index_of("a", "b")
    for engine in ("a", "b"):
        index.apply(engine, disk(stored=ENDS))
    index.add_engine("a")
    assert matches(index) == {"b": 512}
    index.apply("a", disk())
    assert matches(index) == {"a": 512, "b": 512}


@pytest.mark.parametrize(
    "events",
    [
        disk(stored=ENDS, step=32),
        disk(stored=ENDS, step=17),
        disk(stored=[KEYS[0]] * (tier_index.MAX_KEYS_PER_MESSAGE + 1)),
        disk(removed=[KEYS[0]] * (tier_index.MAX_KEYS_PER_MESSAGE + 1)),
    ],
    ids=["cut otherwise", "no whole blocks", "too many stored", "too many removed"],
)
def test_what_cannot_be_is_refused_and_counted(events: TierEvents) -> None:
    index = index_of("a", "liar")
    index.apply("a", disk(stored=ENDS[:1]))
    assert not index.apply("liar", events)
    assert index.num_refused == 1
    assert matches(index) == {"a": 64}


def test_tiers_and_their_keys_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier_index, "MAX_TIERS", 2)
    monkeypatch.setattr(tier_index, "MAX_SHARED_KEYS", 4)
    monkeypatch.setattr(tier_index, "MAX_OWN_KEYS", 2)
    index = index_of("a")
    index.apply("a", disk(stored=ENDS[:4]))
    index.apply("a", disk(stored=[ENDS[0], ENDS[4]]))  # the one told longest ago goes
    assert matches(index) == {"a": 64}
    index.apply("a", TierEvents("memory", False, 16, stored=KEYS))
    assert [row["keys"] for row in index.describe()] == [4, 2]
    assert not index.apply("a", TierEvents("third", True, 16, stored=KEYS))
    assert index.num_refused == 1
    assert [(row["medium"], row["shared"], row["engines"]) for row in index.describe()] == [
        ("disk", True, ["a"]), ("memory", False, ["a"]),
    ]  # fmt: skip


def parts_of(index: TierIndex) -> list[str]:
    """Where each value of the prompt is read."""
    [reach] = index.match(KEYS)
    parts = [part for part, count in reach.runs for _ in range(count)]
    assert len(parts) == reach.num_values
    for skipped in range(len(parts)):
        behind = reach.values_behind(64 * skipped + 63)
        assert [part for part, count in behind for _ in range(count)] == parts[skipped:]
    return parts


def test_what_was_told_last_is_in_the_first_part_as_far_as_it_has_room() -> None:
    index = index_of("a", "b")
    fast, slow = TierPart("host", capacity=2), TierPart("redis", capacity=5)
    index.apply("a", TierEvents("store", True, 64, stored=ENDS[:7], parts=[fast, slow]))
    assert parts_of(index) == ["redis"] * 5 + ["host"] * 2, "the last part has what the others have not"
    index.apply("b", TierEvents("store", True, 64, parts=[fast, slow]))
    assert parts_of(index) == ["redis"] * 3 + ["host"] * 4, "both engines' memory is read by both"
    index.apply("a", TierEvents("store", True, 64, stored=ENDS[:1], parts=[fast, slow]))
    assert parts_of(index) == ["host"] + ["redis"] * 3 + ["host"] * 3
    index.apply("b", TierEvents("store", True, 64, parts=[TierPart("host", capacity=0), slow]))
    assert parts_of(index) == ["host"] + ["redis"] * 5 + ["host"], "an engine that writes nothing there has no room"
    index.remove_engine("b")
    assert parts_of(index) == ["host"] + ["redis"] * 5 + ["host"]


def test_what_is_used_again_takes_nobodys_place() -> None:
    """Each load tells its values once more."""
    index = index_of("a")
    parts = [TierPart("host", capacity=6), TierPart("redis")]
    index.apply("a", TierEvents("store", True, 64, stored=ENDS[:6], parts=parts))
    for _ in range(10):
        index.apply("a", TierEvents("store", True, 64, stored=ENDS[4:6], parts=parts))
    assert parts_of(index) == ["host"] * 6
    index.apply("a", TierEvents("store", True, 64, stored=[b"other"], parts=parts))
    assert parts_of(index) == ["redis"] + ["host"] * 5


def test_a_part_without_a_bound_has_everything() -> None:
    index = index_of("a", "b")
    index.apply("a", TierEvents("store", True, 64, stored=ENDS, parts=[TierPart("redis")]))
    assert parts_of(index) == ["redis"] * 8
    index.apply("b", TierEvents("store", True, 64))  # an older engine does not say
    assert parts_of(index) == ["redis"] * 8
    index.remove_engine("a")
    assert parts_of(index) == [""] * 8
