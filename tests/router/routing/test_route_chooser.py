"""Each side of a request is chosen by itself, and a choice after the first goes where its prompt was run."""

import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from scripted_engine import make_card, make_request

from pdkv.block_keys import extend_keys, root_key
from pdkv.errors import EngineUnavailable
from pdkv.router.engines.books import Entry
from pdkv.router.engines.fleet import ORDERS, Fleet
from pdkv.router.generations.request import Offer, Route
from pdkv.router.routing.policies import POLICIES
from pdkv.router.routing.prefix_index import PrefixIndex
from pdkv.router.routing.route_chooser import AFFINITY_TOKENS, RouteChooser, with_lower_tier
from pdkv.router.routing.tier_index import TierIndex
from pdkv.wire.messages import BlockStored, CacheCleared, KVEvents, TierEvents


def make_chooser(num_prefill: int, num_decode: int, policy: str = "round_robin", role: str = "") -> RouteChooser:
    fleet, index, tiers = Fleet(), PrefixIndex(), TierIndex()
    for kind, num in (("prefill", num_prefill), (role or "decode", num_decode)):
        for i in range(num):
            fleet.add(f"{kind}-{i}", kind)
            fleet.came_up(f"{kind}-{i}", make_card(f"{kind}-{i}", kind))
            index.add_engine(f"{kind}-{i}")
            tiers.add_engine(f"{kind}-{i}")
    chooser = RouteChooser(fleet, index, tiers, policy=policy, orders=ORDERS, rng=random.Random(0))
    chooser.fleet, chooser.index, chooser.tiers = fleet, index, tiers  # type: ignore[attr-defined]  # for the tests
    return chooser


def keys_of(chooser: Any, engine: str, num_tokens: int, request: Any) -> list[bytes]:
    """Block keys of the prompt's first tokens."""
    card = chooser.fleet.engines[engine].card
    keys: list[bytes] = []
    root = root_key(model=card.model, layout=card.layout.identity)
    extend_keys(keys, root, request.prompt_token_ids[:num_tokens])
    return keys


def reach(chooser: Any, engines: Sequence[str], num_tokens: int, request: Any) -> None:
    """The beginning of the prompt lies in a store that these engines reach."""
    keys = keys_of(chooser, engines[0], num_tokens, request)
    for engine in engines:
        assert chooser.tiers.apply(engine, TierEvents("disk", True, 64, stored=keys[3::4]))


def store(chooser: Any, engine: str, num_tokens: int, request: Any) -> None:
    """The engine says that it has the beginning of the prompt."""
    keys = keys_of(chooser, engine, num_tokens, request)
    assert chooser.index.apply(engine, KVEvents(0, [CacheCleared(), BlockStored(keys, None)]))


@pytest.mark.parametrize(("num_prefill", "num_decode"), [(2, 2), (2, 4), (4, 2), (3, 3), (2, 3)])
def test_round_robin_uses_every_pair_equally(num_prefill: int, num_decode: int) -> None:
    """F25."""
    chooser = make_chooser(num_prefill, num_decode)
    pairs: Counter[tuple[str, str]] = Counter()
    for _ in range(2 * num_prefill * num_decode):
        route = chooser.choose(make_request(), 0.0)
        assert (route.decode, route.order) == ("", "prefill_first")  # bound when the prompt is handed off
        pairs[route.prefill, chooser.choose_decode(make_request(), route.prefill, 0.0)] += 1
    assert len(pairs) == num_prefill * num_decode
    assert set(pairs.values()) == {2}


@pytest.mark.parametrize("policy", POLICIES)
def test_aggregated_engines_do_both(policy: str) -> None:
    chooser = make_chooser(0, 3, policy, role="any")
    routes = [chooser.choose(make_request(), 0.0) for _ in range(9)]
    assert all(route == Route(route.prefill, route.prefill) for route in routes)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_pair_whose_transfers_failed_is_avoided_while_there_is_another(policy: str) -> None:
    chooser: Any = make_chooser(1, 2, policy)
    chooser.fleet.pairs.loaded("prefill-0", "decode-0", False, 0.0)
    Entry(chooser.fleet.engines["decode-1"].books, 0, 10_000).enter()
    assert {chooser.choose_decode(make_request(), "prefill-0", 1.0) for _ in range(8)} == {"decode-1"}
    chooser.fleet.pairs.loaded("prefill-0", "decode-1", False, 0.0)
    assert {chooser.choose_decode(make_request(), "prefill-0", 1.0) for _ in range(20)} & {"decode-0"}


@pytest.mark.parametrize("policy", POLICIES)
def test_engines_whose_connectors_speak_different_versions_are_never_a_pair(policy: str) -> None:
    """Which are left over do both; a restart with the others' version makes pairs of them again."""
    chooser: Any = make_chooser(0, 0, policy)
    fleet = chooser.fleet

    def start(name: str, version: int) -> None:
        if name not in fleet.engines:
            fleet.add(name, name[:-2])
            chooser.index.add_engine(name)
            chooser.tiers.add_engine(name)
        fleet.came_up(name, make_card(name, name[:-2], wire_versions={"p2p": version}))

    start("prefill-0", 1)
    start("decode-0", 2)
    assert chooser.choose(make_request(), 0.0) == Route("prefill-0", "prefill-0")
    start("decode-1", 1)
    Entry(fleet.engines["decode-1"].books, 0, 10_000).enter()
    for _ in range(8):
        route = chooser.choose(make_request(), 0.0)
        assert route == Route("prefill-0", "", "prefill_first")
        assert chooser.choose_decode(make_request(), "prefill-0", 0.0) == "decode-1"
    start("prefill-1", 3)
    assert {chooser.choose_prefill(make_request(), 0.0) for _ in range(8)} == {"prefill-0"}
    fleet.went_down("decode-0", 0.0)
    start("decode-0", 1)
    assert {chooser.choose_decode(make_request(), "prefill-0", 0.0) for _ in range(20)} & {"decode-0"}


@pytest.mark.parametrize("policy", POLICIES)
def test_a_choice_after_the_first_goes_where_its_prompt_was_run(policy: str) -> None:
    chooser: Any = make_chooser(3, 1, policy)
    Entry(chooser.fleet.engines["prefill-1"].books, 5000, 0).enter()
    assert {chooser.choose_prefill(make_request(near="prefill-1"), 0.0) for _ in range(5)} == {"prefill-1"}
    assert "prefill-1" not in {
        chooser.choose_prefill(make_request(near="prefill-1"), 0.0, without=("prefill-1",)) for _ in range(5)
    }
    chooser.fleet.went_down("prefill-1", 0.0)
    assert chooser.choose_prefill(make_request(near="prefill-1"), 0.0) in ("prefill-0", "prefill-2")


def test_what_is_computed_is_the_prompt_less_what_the_engine_has_and_a_block_at_least() -> None:
    chooser, request = make_chooser(2, 1), make_request(100)
    assert chooser.uncached_tokens(request, "prefill-0") == 100
    store(chooser, "prefill-0", 64, request)
    assert chooser.uncached_tokens(request, "prefill-0") == 36
    assert chooser.uncached_tokens(request, "prefill-1") == 100
    store(chooser, "prefill-1", 96, request)
    assert chooser.uncached_tokens(request, "prefill-1") == 16


def test_a_prompt_is_hashed_once_for_all_choices_and_attempts() -> None:
    request = make_request(64)
    sibling = make_request(64, keys=request.keys)
    keys = request.keys.of(b"root", request.prompt_token_ids)
    assert sibling.keys.of(b"root", sibling.prompt_token_ids) is keys
    assert request.keys.of(b"other", request.prompt_token_ids) != keys


def test_a_side_without_engines_is_named() -> None:
    chooser: Any = make_chooser(1, 1)
    chooser.fleet.went_down("decode-0", 0.0)
    assert chooser.choose_prefill(make_request(), 0.0) == "prefill-0"
    with pytest.raises(EngineUnavailable, match="no decode engine is ready"):
        chooser.choose(make_request(), 0.0)
    chooser.fleet.went_down("prefill-0", 0.0)
    with pytest.raises(EngineUnavailable, match="no prefill engine is ready"):
        chooser.choose(make_request(), 0.0)


@pytest.mark.parametrize("policy", ["least_loaded", "prefix_aware"])
def test_requests_of_one_key_go_to_one_engine_while_its_load_allows_it(policy: str) -> None:
    chooser: Any = make_chooser(4, 1, policy)

    def engines_of(key: str) -> set[str]:
        return {chooser.choose_prefill(make_request(affinity=key), 0.0) for _ in range(8)}

    owners = {key: engines_of(key) for key in "abcdefghijklmnop"}
    assert all(len(engines) == 1 for engines in owners.values())
    assert len(set().union(*owners.values())) == 4
    [owner] = owners["a"]
    books = Entry(chooser.fleet.engines[owner].books, AFFINITY_TOKENS - 1, 0)
    books.enter()
    assert engines_of("a") == {owner}
    Entry(chooser.fleet.engines[owner].books, 2, 0).enter()
    assert owner not in engines_of("a")
    chooser.fleet.went_down(owner, 0.0)
    assert all(engines_of(key) == engines for key, engines in owners.items() if engines != {owner})


# --- tiers below the caches ---------------------------------------------------------------------------------------


def busy(chooser: Any, engine: str, num_tokens: int) -> None:
    Entry(chooser.fleet.engines[engine].books, num_tokens, 0).enter()


def test_who_has_a_prompt_itself_comes_first_and_need_not_be_waited_for_where_others_can_load_it() -> None:
    chooser, request = make_chooser(3, 1, "prefix_aware"), make_request(1024)
    store(chooser, "prefill-0", 1024, request)
    assert {chooser.choose_prefill(request, 0.0) for _ in range(6)} == {"prefill-0"}
    busy(chooser, "prefill-0", 200)
    assert {chooser.choose_prefill(request, 0.0) for _ in range(6)} == {"prefill-0"}, "the others would compute it"
    reach(chooser, ["prefill-0", "prefill-1"], 1024, request)
    assert {chooser.choose_prefill(request, 0.0) for _ in range(6)} == {"prefill-1"}
    busy(chooser, "prefill-1", 200)
    assert {chooser.choose_prefill(request, 0.0) for _ in range(6)} == {"prefill-0"}, "equally busy"
    busy(chooser, "prefill-0", 950)
    busy(chooser, "prefill-1", 950)
    assert {chooser.choose_prefill(request, 0.0) for _ in range(6)} == {"prefill-2"}, "too busy for what it saves"


def test_what_lies_below_the_cache_counts_for_as_much_of_the_prompt_as_the_cache_lacks() -> None:
    assert with_lower_tier(0, 0) == 0
    assert with_lower_tier(512, 256) == 512
    assert with_lower_tier(0, 1000) == 900
    assert with_lower_tier(500, 1000) == 950


def test_tokens_that_an_engine_will_load_are_a_small_part_of_its_load() -> None:
    chooser, request = make_chooser(2, 1, "prefix_aware"), make_request(1280)
    reach(chooser, ["prefill-0"], 1024, request)
    store(chooser, "prefill-0", 256, request)
    assert chooser.uncached_tokens(request, "prefill-0") == 1280 - 256 - 691
    assert chooser.uncached_tokens(request, "prefill-1") == 1280


def test_who_decodes_is_chosen_by_what_it_has_itself() -> None:
    """What it has not, it loads in any case."""
    chooser, request = make_chooser(1, 2, "prefix_aware"), make_request(1024)
    store(chooser, "decode-0", 512, request)
    reach(chooser, ["decode-0", "decode-1"], 1024, request)
    Entry(chooser.fleet.engines["decode-0"].books, 0, 500).enter()
    assert {chooser.choose_decode(request, "prefill-0", 0.0) for _ in range(6)} == {"decode-0"}


def test_a_prompt_is_hashed_once_for_all_its_choices_and_attempts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Router 5: 13 ms for 128k tokens, and again for each choice and each retry."""
    hashed: list[int] = []

    def counted(keys: list[bytes], root: bytes, token_ids: Sequence[int]) -> None:
        hashed.append(len(token_ids))
        extend_keys(keys, root, token_ids)

    monkeypatch.setattr("pdkv.router.generations.request.extend_keys", counted)
    chooser: Any = make_chooser(2, 2, "prefix_aware")
    first = make_request(320)
    for choice in range(3):
        request = msgspec.structs.replace(first, choice=choice)
        for _ in range(2):
            route = chooser.choose(request, 0.0)
            chooser.choose_decode(request, route.prefill, 0.0)
            chooser.uncached_tokens(request, route.prefill)
    assert hashed == [320]


# --- what other engines have ----------------------------------------------------------------------------------------


def lending_chooser(num_prefill: int = 1, num_decode: int = 2, **options: Any) -> Any:
    """A chooser whose engines lend to each other, unless an option says something else of their cards."""
    chooser: Any = make_chooser(num_prefill, num_decode)
    chooser._reuse = options.pop("reuse", "auto")
    for name in chooser.fleet.engines:
        chooser.fleet.came_up(name, make_card(name, name[:-2], **({"lends": True} | options)))
    return chooser


def test_prefill_is_told_who_has_most_of_what_it_lacks() -> None:
    chooser, request = lending_chooser(), make_request(100)
    assert chooser.choose(request, 0.0).offer is None
    store(chooser, "prefill-0", 32, request)
    store(chooser, "decode-0", 32, request)
    assert chooser.choose(request, 0.0).offer is None  # nobody has more
    store(chooser, "decode-1", 96, request)
    route = chooser.choose(request, 0.0)
    assert route == Route("prefill-0", "", "prefill_first", Offer("decode-1", 96))
    assert chooser.uncached_tokens(request, "prefill-0", route.offer) == 16  # a block at least
    assert chooser.uncached_tokens(request, "prefill-0", Offer("decode-1", 64)) == 100 - with_lower_tier(32, 64)


def test_the_token_that_is_computed_is_not_lent() -> None:
    chooser, request = lending_chooser(), make_request(64)
    store(chooser, "decode-0", 64, request)
    assert chooser.choose(request, 0.0).offer == Offer("decode-0", 48)


def test_who_cannot_lend_is_passed_over() -> None:
    request = make_request(100)
    assert not _offers(lending_chooser(lends=False), request)
    assert not _offers(lending_chooser(reuse="never"), request)
    params = msgspec.structs.replace(request.params, prompt_logprobs=1)  # they must be computed
    assert not _offers(lending_chooser(), msgspec.structs.replace(request, params=params))
    chooser = lending_chooser()
    chooser.fleet.pairs.loaded("decode-0", "prefill-0", False, 0.0)
    assert not _offers(chooser, request)
    chooser = lending_chooser()
    chooser.fleet.engines["decode-0"].draining = True  # it gets nothing new, and has what it has
    assert _offers(chooser, request)


def _offers(chooser: Any, request: Any) -> bool:
    store(chooser, "decode-0", 96, request)
    return chooser.find_offer(request, "prefill-0", 1.0) is not None


def test_what_is_computed_sooner_than_read_is_computed_unless_reading_is_asked_for() -> None:
    request = make_request(100)
    for reuse, seconds, is_read in [("auto", 1.0, False), ("always", 1.0, True), ("auto", 1e-6, True)]:
        chooser = lending_chooser(reuse=reuse)
        chooser.fleet.speeds.computed("prefill-0", 1000, 0.1)
        chooser.fleet.speeds.loaded(96 * 64, seconds)
        assert _offers(chooser, request) is is_read, (reuse, seconds)
