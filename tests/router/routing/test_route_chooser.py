"""Each side of a request is chosen by itself, and a choice after the first goes where its prompt was run."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from chooser_rig import ChooserRig
from scripted_engine import make_request

from pdkv.base.block_keys import extend_keys
from pdkv.errors import EngineUnavailable
from pdkv.router.request import GenerateRequest, Offer, Route
from pdkv.router.routing.policies import POLICIES
from pdkv.router.routing.route_chooser import AFFINITY_TOKENS
from pdkv.sampling.params import SamplingParams
from pdkv.wire.kv import ConnectorKind
from pdkv.wire.reports import BlockCounts, LoadReport


@pytest.mark.parametrize(("num_prefill", "num_decode"), [(2, 2), (2, 4), (4, 2), (3, 3), (2, 3)])
def test_round_robin_uses_every_pair_equally(num_prefill: int, num_decode: int) -> None:
    """F25."""
    rig = ChooserRig(num_prefill, num_decode)
    pairs: Counter[tuple[str, str]] = Counter()
    for _ in range(2 * num_prefill * num_decode):
        route = rig.choose(make_request(), 0.0)
        assert (route.decode, route.order) == ("", "prefill_first")  # bound when the prompt is handed off
        pairs[route.prefill, rig.choose_decode(make_request(), route.prefill, 0.0)] += 1
    assert len(pairs) == num_prefill * num_decode
    assert set(pairs.values()) == {2}


@pytest.mark.parametrize("policy", POLICIES)
def test_aggregated_engines_do_both(policy: str) -> None:
    rig = ChooserRig(0, 3, policy, role="any")
    routes = [rig.choose(make_request(), 0.0) for _ in range(9)]
    assert all(route == Route(route.prefill, route.prefill) for route in routes)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_pair_whose_transfers_failed_is_avoided_while_there_is_another(policy: str) -> None:
    rig = ChooserRig(1, 2, policy)
    rig.fleet.pairs.loaded("prefill-0", "decode-0", False, 0.0)
    rig.occupy("decode-1", kv=10_000)
    assert {rig.choose_decode(make_request(), "prefill-0", 1.0) for _ in range(8)} == {"decode-1"}
    rig.fleet.pairs.loaded("prefill-0", "decode-1", False, 0.0)
    assert {rig.choose_decode(make_request(), "prefill-0", 1.0) for _ in range(20)} & {"decode-0"}


@pytest.mark.parametrize("policy", POLICIES)
def test_engines_whose_connectors_speak_different_versions_are_never_a_pair(policy: str) -> None:
    """Which are left over do both; a restart with the others' version makes pairs of them again."""
    rig = ChooserRig(0, 0, policy)
    fleet = rig.fleet

    def start(name: str, version: int) -> None:
        rig.start(name, wire_versions={"p2p": version})

    start("prefill-0", 1)
    start("decode-0", 2)
    assert rig.choose(make_request(), 0.0) == Route("prefill-0", "prefill-0")
    start("decode-1", 1)
    rig.occupy("decode-1", kv=10_000)
    for _ in range(8):
        route = rig.choose(make_request(), 0.0)
        assert route == Route("prefill-0", "", "prefill_first")
        assert rig.choose_decode(make_request(), "prefill-0", 0.0) == "decode-1"
    start("prefill-1", 3)
    assert {rig.choose_prefill(make_request(), 0.0) for _ in range(8)} == {"prefill-0"}
    fleet.went_down("decode-0", 0.0)
    start("decode-0", 1)
    assert {rig.choose_decode(make_request(), "prefill-0", 0.0) for _ in range(20)} & {"decode-0"}


@pytest.mark.parametrize("kind", ["store", "pull"])
def test_who_would_compute_a_prompt_anew_is_given_it_at_once_while_no_store_answers(kind: ConnectorKind) -> None:
    """A probe is for the engine that it was sent to; what is beside a pull or push does not keep anybody from it."""
    rig, handed_over = ChooserRig(1, 2, kind=kind), Route("prefill-0", "", "prefill_first")
    report = LoadReport(0, 0, BlockCounts(100, 100, 0, 0, 0, 0))
    rig.fleet.reported("prefill-0", msgspec.structs.replace(report, connector_problem="no answer"))
    routes = {rig.choose(make_request(), 0.0) for _ in range(8)}
    assert routes == ({Route(f"decode-{i}", f"decode-{i}") for i in range(2)} if kind == "store" else {handed_over})
    assert rig.choose(make_request(probe=True), 0.0) == handed_over
    rig.fleet.reported("prefill-0", report)
    assert rig.choose(make_request(), 0.0) == handed_over


@pytest.mark.parametrize("policy", POLICIES)
def test_a_choice_after_the_first_goes_where_its_prompt_was_run(policy: str) -> None:
    rig = ChooserRig(3, 1, policy)
    rig.occupy("prefill-1", prompts=5000)
    assert {rig.choose_prefill(make_request(near="prefill-1"), 0.0) for _ in range(5)} == {"prefill-1"}
    assert "prefill-1" not in {
        rig.choose_prefill(make_request(near="prefill-1"), 0.0, without=("prefill-1",)) for _ in range(5)
    }
    rig.fleet.went_down("prefill-1", 0.0)
    assert rig.choose_prefill(make_request(near="prefill-1"), 0.0) in ("prefill-0", "prefill-2")


def test_a_side_without_engines_is_named() -> None:
    rig = ChooserRig(1, 1)
    rig.fleet.went_down("decode-0", 0.0)
    assert rig.choose_prefill(make_request(), 0.0) == "prefill-0"
    with pytest.raises(EngineUnavailable, match="no decode engine is ready"):
        rig.choose(make_request(), 0.0)
    rig.fleet.went_down("prefill-0", 0.0)
    with pytest.raises(EngineUnavailable, match="no prefill engine is ready"):
        rig.choose(make_request(), 0.0)


@pytest.mark.parametrize("policy", ["least_loaded", "prefix_aware"])
def test_requests_of_one_key_go_to_one_engine_while_its_load_allows_it(policy: str) -> None:
    rig = ChooserRig(4, 1, policy)

    def engines_of(key: str) -> set[str]:
        return {rig.choose_prefill(make_request(affinity=key), 0.0) for _ in range(8)}

    owners = {key: engines_of(key) for key in "abcdefghijklmnop"}
    assert all(len(engines) == 1 for engines in owners.values())
    assert len(set().union(*owners.values())) == 4
    [owner] = owners["a"]
    rig.occupy(owner, prompts=AFFINITY_TOKENS - 1)
    assert engines_of("a") == {owner}
    rig.occupy(owner, prompts=2)
    assert owner not in engines_of("a")
    rig.fleet.went_down(owner, 0.0)
    assert all(engines_of(key) == engines for key, engines in owners.items() if engines != {owner})


# --- tiers below the caches ---------------------------------------------------------------------------------------


def test_who_has_a_prompt_itself_comes_first_and_need_not_be_waited_for_where_others_can_load_it() -> None:
    rig, request = ChooserRig(3, 1, "prefix_aware"), make_request(1024)
    rig.store("prefill-0", 1024, request)
    assert {rig.choose_prefill(request, 0.0) for _ in range(6)} == {"prefill-0"}
    rig.occupy("prefill-0", prompts=400)
    assert {rig.choose_prefill(request, 0.0) for _ in range(6)} == {"prefill-0"}, "the others would compute it"
    rig.reach(["prefill-0", "prefill-1"], 1024, request)
    assert {rig.choose_prefill(request, 0.0) for _ in range(6)} == {"prefill-1"}
    rig.occupy("prefill-1", prompts=400)
    assert {rig.choose_prefill(request, 0.0) for _ in range(6)} == {"prefill-0"}, "equally busy"
    rig.occupy("prefill-0", prompts=2000)
    rig.occupy("prefill-1", prompts=2000)
    assert {rig.choose_prefill(request, 0.0) for _ in range(6)} == {"prefill-2"}, "too busy for what it saves"


def test_who_decodes_is_chosen_by_what_it_has_itself() -> None:
    """What it has not, it loads in any case."""
    rig, request = ChooserRig(1, 2, "prefix_aware"), make_request(1024)
    rig.store("decode-0", 512, request)
    rig.reach(["decode-0", "decode-1"], 1024, request)
    rig.occupy("decode-0", kv=500)
    assert {rig.choose_decode(request, "prefill-0", 0.0) for _ in range(6)} == {"decode-0"}


def test_a_prompt_is_hashed_once_for_all_its_choices_and_attempts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Router 5: 13 ms for 128k tokens, and again for each choice and each retry."""
    hashed: list[int] = []

    def counted(keys: list[bytes], root: bytes, token_ids: Sequence[int]) -> None:
        hashed.append(len(token_ids))
        extend_keys(keys, root, token_ids)

    monkeypatch.setattr("pdkv.router.request.extend_keys", counted)
    rig = ChooserRig(2, 2, "prefix_aware")
    first = make_request(320)
    for choice in range(3):
        request = msgspec.structs.replace(first, choice=choice)
        for _ in range(2):
            route = rig.choose(request, 0.0)
            rig.choose_decode(request, route.prefill, 0.0)
            rig.uncached_tokens(request, route.prefill)
    assert hashed == [320]
    keys = [first.keys.of(root, first.prompt_token_ids) for root in (b"one", b"other")]
    assert keys[0] != keys[1]


def test_prefill_is_told_who_has_most_of_what_it_lacks() -> None:
    rig, request = ChooserRig(1, 2, lends=True), make_request(100)
    assert rig.choose(request, 0.0).offer is None
    rig.store("prefill-0", 32, request)
    rig.store("decode-0", 32, request)
    assert rig.choose(request, 0.0).offer is None  # nobody has more
    rig.store("decode-1", 96, request)
    route = rig.choose(request, 0.0)
    assert route == Route("prefill-0", "", "prefill_first", Offer("decode-1", 96))


def test_who_borrows_comes_before_who_computes_and_behind_who_has_the_prompt() -> None:
    rig, request = ChooserRig(2, 1, "prefix_aware", lends=True), make_request(1024)
    rig.store("prefill-0", 1008, request)
    assert {rig.choose_prefill(request, 0.0) for _ in range(4)} == {"prefill-0"}
    rig.occupy("prefill-0", prompts=400)
    assert {rig.choose_prefill(request, 0.0) for _ in range(4)} == {"prefill-1"}, "it borrows"
    for _ in range(40):
        rig.fleet.speeds.computed("prefill-1", 1000, 0.1)
        rig.fleet.speeds.loaded(1008 * 64, 0.09)  # hardly sooner than computing it
    assert {rig.choose_prefill(request, 0.0) for _ in range(4)} == {"prefill-0"}


# --- turns that go to their KV ----------------------------------------------------------------------------------------


def measured(num_cached: int = 960, **options: Any) -> tuple[ChooserRig, GenerateRequest]:
    """One prefill and two decode engines, of which one has most of the prompt; a token takes 1 ms, a hand-off 10."""
    rig, request = ChooserRig(1, 2, **({"policy": "prefix_aware"} | options)), make_request(1024)
    rig.store("decode-0", num_cached, request)
    for _ in range(3):
        rig.fleet.speeds.computed("prefill-0", 1000, 1.0)
        rig.fleet.speeds.loaded(64 << 10, 0.01)
        rig.fleet.speeds.loaded(1 << 10, 0.01)
    return rig, request


def routes_of(rig: ChooserRig, request: GenerateRequest) -> Route:
    """Where it goes if nothing of it is out yet."""
    [route] = {rig.choose(request, 0.0, may_stay=True) for _ in range(4)}
    return route


def test_a_turn_goes_to_the_decode_engine_that_has_nearly_all_of_it() -> None:
    rig, request = measured()
    assert routes_of(rig, request) == Route("decode-0", "decode-0")
    again = rig.choose(request, 0.0)
    assert again.prefill == "prefill-0", "of what is out already decode would have to compute more"


def test_a_turn_goes_to_prefill_where_that_is_sooner() -> None:
    rig, request = measured()
    rig.store("prefill-0", 1008, request)  # 16 ms of computing and a hand-off of 10, instead of 64 ms
    assert routes_of(rig, request).prefill == "prefill-0"
    rig.occupy("prefill-0", prompts=100)
    assert routes_of(rig, request) == Route("decode-0", "decode-0")
    rig.occupy("decode-0")  # a stream that would stand still meanwhile
    assert routes_of(rig, request).prefill == "prefill-0"


def test_a_cold_prompt_stays_on_a_decode_engine_that_is_idle_and_not_on_one_that_others_need() -> None:
    rig, request = measured(num_cached=0)
    route = routes_of(rig, request)
    assert route.aggregated, "a hand-off would take 10 ms more"
    for name in ("decode-0", "decode-1"):
        rig.occupy(name)
    assert routes_of(rig, request).prefill == "prefill-0", "a stream would stand still for a second"


def test_a_prompt_that_would_hold_up_those_who_come_goes_to_prefill() -> None:
    rig, request = measured(num_cached=0)
    for i in range(20):
        rig.choose(make_request(16), i / 10)
    assert rig.choose(request, 2.0, may_stay=True).prefill == "prefill-0", "ten come in a second"
    assert rig.choose(make_request(32), 2.1, may_stay=True).aggregated, "few of them while it is short"


def test_prefill_keeps_a_request_where_decode_is_full_and_would_let_it_wait_longer() -> None:
    rig, request = measured(num_cached=0)
    for name in ("decode-0", "decode-1"):
        rig.fleet.speeds.decoded(name, 1, 0.01)
        rig.occupy(name, kv=rig.fleet.engines[name].kv_capacity)
    assert rig.choose(request, 0.0, may_stay=True) == Route("prefill-0", "prefill-0")
    assert rig.chooser.num_kept == 1
    rig.occupy("prefill-0", prompts=1000)
    assert not rig.choose(request, 0.0, may_stay=True).aggregated, "each token would wait for a step of prompts"


def test_what_is_pooled_of_a_prompt_stays_on_prefill_engines_even_without_others() -> None:
    request = msgspec.structs.replace(make_request(32), params=SamplingParams(max_tokens=1, pooling="last"))
    assert {ChooserRig(2, num_decode).choose(request) for num_decode in (0, 2)} == {Route("prefill-0", "prefill-0")}


def test_the_time_of_a_transfer_counts_by_its_pair() -> None:
    rig, request = measured(num_cached=0)
    for name, seconds in (("decode-0", 1.0), ("decode-1", 0.001)):
        for _ in range(20):
            rig.fleet.speeds.loaded(64 << 10, seconds, ("prefill-0", name))
    rig.occupy("decode-1", kv=2000)
    assert {rig.choose_decode(request, "prefill-0") for _ in range(4)} == {"decode-1"}
    rig.occupy("decode-1", kv=100_000)
    assert {rig.choose_decode(request, "prefill-0") for _ in range(4)} == {"decode-0"}


def test_turns_go_to_prefill_where_nobody_measured_or_asked_for_it() -> None:
    rig, request = ChooserRig(1, 2, "prefix_aware"), make_request(1024)
    rig.store("decode-0", 960, request)
    assert routes_of(rig, request).prefill == "prefill-0"
    for options in ({"local_turns": "never"}, {"policy": "least_loaded"}):
        rig, request = measured(**options)
        assert routes_of(rig, request).prefill == "prefill-0"
    rig, request = measured(local_turns="always")
    rig.store("prefill-0", 1008, request)
    assert routes_of(rig, request) == Route("decode-0", "decode-0")
    assert rig.chooser.num_local_turns == 4
    rig, request = measured()
    near = msgspec.structs.replace(request, near="prefill-0")
    assert routes_of(rig, near).prefill == "prefill-0", "the first choice has just run it there"
    near = msgspec.structs.replace(request, near="decode-0")
    rig.occupy("decode-0", kv=5000)
    assert routes_of(rig, near) == Route("decode-0", "decode-0"), "the first choice has just run it there"
    params = msgspec.structs.replace(request.params, prompt_logprobs=1)  # all of it is to be computed
    rig = ChooserRig(1, 2, "prefix_aware", local_turns="always")
    rig.store("decode-0", 960, request)
    assert routes_of(rig, request) == Route("decode-0", "decode-0")
    assert routes_of(rig, msgspec.structs.replace(request, params=params)).prefill == "prefill-0"


def slo_rig() -> tuple[ChooserRig, GenerateRequest]:
    """prefill-0 has the prompt, and 2 s of work; both compute 1,000 tokens a second."""
    rig, request = ChooserRig(2, 2, "prefix_aware", local_turns="never"), make_request(1024)
    for name in ("prefill-0", "prefill-1"):
        rig.fleet.speeds.computed(name, 1000, 1.0)
    rig.store("prefill-0", 960, request)
    rig.occupy("prefill-0", prompts=2000)
    return rig, request


@pytest.mark.parametrize(
    ("slo_s", "engine"),
    [(0.0, "prefill-1"), (3.0, "prefill-0"), (1.5, "prefill-1"), (0.001, "prefill-1"), (3600.0, "prefill-0")],
)
def test_an_objective_is_met_by_the_engine_that_computes_least(slo_s: float, engine: str) -> None:
    rig, request = slo_rig()
    assert rig.choose_prefill(msgspec.structs.replace(request, slo_ttft_s=slo_s)) == engine


def test_an_objective_gathers_no_more_than_some_seconds_on_one_engine() -> None:
    rig, request = slo_rig()
    rig.occupy("prefill-0", prompts=20_000)
    assert rig.choose_prefill(msgspec.structs.replace(request, slo_ttft_s=3600.0)) == "prefill-1"


@pytest.mark.parametrize(("slo_s", "engine"), [(0.0, "decode-0"), (0.05, "decode-1"), (0.5, "decode-0")])
def test_an_objective_for_further_tokens_counts_steps(slo_s: float, engine: str) -> None:
    rig, request = ChooserRig(1, 2, "least_loaded"), make_request(64)
    rig.occupy("decode-1", kv=10)
    assert rig.choose_decode(msgspec.structs.replace(request, slo_tpot_s=0.05), "prefill-0") == "decode-0", "unmeasured"
    for name, step_s in (("decode-0", 0.1), ("decode-1", 0.01)):
        rig.fleet.speeds.decoded(name, 1, step_s)
    assert rig.choose_decode(msgspec.structs.replace(request, slo_tpot_s=slo_s), "prefill-0") == engine
