"""What engines need not compute of a prompt: what they have, and what they load in less time."""

import msgspec
import pytest
from chooser_rig import ChooserRig
from scripted_engine import make_request

from pdkv.router.engines.speeds import LOADED_SHARE, saved_tokens
from pdkv.router.request import GenerateRequest, Offer
from pdkv.router.routing import expected
from pdkv.router.routing.prefix_index import INLINE_KEYS
from pdkv.wire.messages import BlockRemoved, BlockStored, CacheCleared, KVEvents
from pdkv.wire.reports import ConnectorStats, LoadReport
from pdkv.wire.tiers import TierPart

TOKEN_BYTES = 64  # of the rig's engines


def worth_of(rig: ChooserRig, request: GenerateRequest, engine: str = "prefill-0", now: float = 0.0) -> int:
    return rig.holdings.worth(rig.holdings.of(request, now), [engine], now)[engine]


def report(rig: ChooserRig, engine: str, **reads: tuple[int, float]) -> None:
    """The engine says what reads of its tiers took since its start: (bytes, seconds)."""
    stats = {f"store/{name}": ConnectorStats(read_bytes=b, read_seconds=s) for name, (b, s) in reads.items()}
    load = rig.fleet.engines[engine].load or LoadReport(0, 0, rig.fleet.engines[engine].blocks)
    rig.fleet.reported(engine, msgspec.structs.replace(load, connectors=stats))


def test_what_is_computed_is_the_prompt_less_what_the_engine_has_and_a_block_at_least() -> None:
    rig, request = ChooserRig(2, 1), make_request(100)
    assert rig.uncached_tokens(request, "prefill-0") == 100
    rig.store("prefill-0", 64, request)
    assert rig.uncached_tokens(request, "prefill-0") == 36
    assert rig.uncached_tokens(request, "prefill-1") == 100
    rig.store("prefill-1", 96, request)
    assert rig.uncached_tokens(request, "prefill-1") == 16


def test_what_an_engine_was_given_counts_as_its_own_until_its_events_say_otherwise_or_seconds_passed() -> None:
    rig, request = ChooserRig(2, 1), make_request(100)
    longer = make_request(150)  # its first tokens are those of the other
    assert rig.index.apply("prefill-0", KVEvents(0, [CacheCleared()]))
    assert rig.holdings.given(rig.holdings.of(request, 0.0), "prefill-0", None, 0.0) == 100
    assert worth_of(rig, longer) == 96
    assert worth_of(rig, longer, "prefill-1") == 0
    assert rig.holdings.given(rig.holdings.of(longer, 1.0), "prefill-0", None, 1.0) == 54
    assert worth_of(rig, longer, now=4.9) == 144
    keys = rig.keys_of("prefill-0", 150, longer)
    assert rig.index.apply("prefill-0", KVEvents(1, [BlockStored(keys[:4], None)]))
    assert worth_of(rig, longer, now=4.9) == 144, "what the engine has, and what it still computes"
    assert rig.index.apply("prefill-0", KVEvents(2, [BlockRemoved(keys[3:4])]))
    assert worth_of(rig, longer, now=4.9) == 48
    assert rig.index.apply("prefill-0", KVEvents(3, [BlockStored(keys[3:4], None)]))
    assert worth_of(rig, longer, now=4.9) == 144
    assert worth_of(rig, longer, now=6.0) == 64, "what it has"
    assert rig.index.expected.num_keys == 0


def test_long_events_end_expectations_in_the_slices_in_which_they_are_applied() -> None:
    rig, request = ChooserRig(1, 1), make_request(16 * (INLINE_KEYS + 1))
    assert rig.index.apply("prefill-0", KVEvents(0, [CacheCleared()]))
    rig.holdings.given(rig.holdings.of(request, 0.0), "prefill-0", None, 0.0)
    keys = rig.keys_of("prefill-0", 16 * (INLINE_KEYS + 1), request)
    rig.index._on_work = lambda: None  # what is put off is done below
    assert rig.index.apply("prefill-0", KVEvents(1, [BlockRemoved(keys)]))
    assert rig.index.expected.num_keys == len(keys), "nothing of it was done at once"
    while rig.index.work():
        pass
    assert rig.index.expected.num_keys == 0


def test_what_is_expected_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expected, "MAX_KEYS", 8)
    rig, requests = ChooserRig(1, 1), [make_request(100, cache_salt=salt) for salt in ("a", "b")]
    for request in requests:
        rig.holdings.given(rig.holdings.of(request, 0.0), "prefill-0", None, 0.0)
    assert rig.index.expected.num_keys == 6
    assert [worth_of(rig, request) for request in requests] == [0, 96], "what was given last"


def test_what_an_engine_is_expected_to_have_ends_with_it() -> None:
    rig, request = ChooserRig(2, 1), make_request(100)
    for engine in ("prefill-0", "prefill-1"):
        rig.holdings.given(rig.holdings.of(request, 0.0), engine, None, 0.0)
    rig.index.remove_engine("prefill-0")
    assert (worth_of(rig, request), worth_of(rig, request, "prefill-1")) == (0, 96)


def test_no_engine_lends_what_it_is_only_expected_to_have() -> None:
    rig, request = ChooserRig(2, 1, reuse="always", lends=True), make_request(100)
    rig.holdings.given(rig.holdings.of(request, 0.0), "prefill-0", None, 0.0)
    assert rig.find_offer(request, "prefill-1") is None
    rig.store("prefill-0", 64, request)
    assert rig.find_offer(request, "prefill-1") == Offer("prefill-0", 64)


def test_what_a_load_saves_is_its_tokens_less_those_that_could_be_computed_meanwhile() -> None:
    assert saved_tokens(1000, 0.1, 0.001) == 900
    assert saved_tokens(1000, 2.0, 0.001) == 0
    assert saved_tokens(1000, None, 0.001) == saved_tokens(1000, 0.1, None) == 1000 * LOADED_SHARE


def test_tokens_that_an_engine_will_load_are_a_small_part_of_its_load() -> None:
    rig, request = ChooserRig(2, 1), make_request(1280)
    rig.reach(["prefill-0"], 1024, request)
    rig.store("prefill-0", 256, request)
    assert rig.uncached_tokens(request, "prefill-0") == 1280 - 256 - 691
    assert rig.uncached_tokens(request, "prefill-1") == 1280


def test_a_tier_is_worth_what_its_reads_and_the_engines_prompts_took() -> None:
    rig, request = ChooserRig(1, 1), make_request(1024)
    rig.reach(["prefill-0"], 1024, request, parts=[TierPart("store")])
    assert worth_of(rig, request) == int(1024 * LOADED_SHARE), "nothing was measured"
    rig.fleet.speeds.computed("prefill-0", 1000, 1.0)
    assert worth_of(rig, request) == int(1024 * LOADED_SHARE), "the tier was not"
    rig.fleet.reported("prefill-0", LoadReport(0, 0, rig.fleet.engines["prefill-0"].blocks, connectors={
        "store": ConnectorStats(read_bytes=100 * TOKEN_BYTES, read_seconds=0.05),
    }))  # fmt: skip
    assert worth_of(rig, request) == 512, "half a millisecond a token, which takes one to compute"
    rig.store("prefill-0", 512, request)
    assert worth_of(rig, request) == 512 + 256


def test_a_tier_that_is_slower_than_computing_is_worth_nothing() -> None:
    rig, request = ChooserRig(1, 1), make_request(1024)
    rig.reach(["prefill-0"], 1024, request, parts=[TierPart("store/0-redis")])
    rig.fleet.speeds.computed("prefill-0", 1000, 1.0)
    report(rig, "prefill-0", **{"0-redis": (100 * TOKEN_BYTES, 1.0)})
    assert worth_of(rig, request) == 0


def test_what_the_first_part_has_no_room_for_any_more_is_read_from_the_next() -> None:
    rig, request = ChooserRig(1, 1), make_request(1024)  # 16 values
    parts = [TierPart("store/0-host", capacity=8), TierPart("store/1-redis")]
    rig.fleet.speeds.computed("prefill-0", 1000, 1.0)
    report(rig, "prefill-0", **{"0-host": (1000 * TOKEN_BYTES, 0.001), "1-redis": (100 * TOKEN_BYTES, 0.05)})
    rig.reach(["prefill-0"], 512, request, parts=parts)
    assert worth_of(rig, request) == pytest.approx(512, abs=2)
    other = make_request(512, cache_salt="other")
    rig.reach(["prefill-0"], 512, other, parts=parts)  # takes their place
    assert worth_of(rig, request) == pytest.approx(256, abs=2)


def test_reads_count_since_the_last_report_and_anew_with_each_incarnation() -> None:
    rig = ChooserRig(1, 1)
    report(rig, "prefill-0", host=(1000, 1.0))
    report(rig, "prefill-0", host=(1000, 1.0))  # nothing was read
    assert rig.fleet.speeds.byte_s("store/host") == pytest.approx(1e-3)
    report(rig, "prefill-0", host=(2000, 4.0))
    assert rig.fleet.speeds.byte_s("store/host") == pytest.approx((0.9 + 3.0) / (900 + 1000))
    rig.fleet.went_down("prefill-0", 0.0)
    rig.start("prefill-0")
    report(rig, "prefill-0", host=(10, 0.01))  # fewer than its predecessor had
    assert rig.fleet.speeds.byte_s("store/host") is not None
    assert rig.fleet.speeds.byte_s("store/other") is None


def test_bytes_that_are_told_before_their_seconds_count_with_them() -> None:
    """Reads overlap, and reports come in between."""
    rig = ChooserRig(1, 1)
    report(rig, "prefill-0", host=(4000, 0.0))
    assert rig.fleet.speeds.byte_s("store/host") is None
    report(rig, "prefill-0", host=(4000, 2.0))
    report(rig, "prefill-0", host=(4000, 3.0))
    report(rig, "prefill-0", host=(6000, 3.0))
    assert rig.fleet.speeds.byte_s("store/host") == pytest.approx((0.9 * 2.0 + 1.0) / (0.9 * 4000 + 2000))


def test_what_another_engine_lends_counts_less_the_time_of_its_load() -> None:
    rig, request = ChooserRig(1, 2, lends=True), make_request(1024)
    rig.store("decode-1", 1024, request)
    assert worth_of(rig, request) == int(1008 * LOADED_SHARE)
    for _ in range(30):
        rig.fleet.speeds.computed("prefill-0", 1000, 1.0)
        rig.fleet.speeds.loaded(1008 * TOKEN_BYTES, 0.5)
    assert worth_of(rig, request) == pytest.approx(508, abs=2)
    assert worth_of(rig, request, "decode-1") == 1024


def test_the_token_that_is_computed_is_not_lent() -> None:
    rig, request = ChooserRig(1, 2, lends=True), make_request(64)
    rig.store("decode-0", 64, request)
    assert rig.find_offer(request, "prefill-0") == Offer("decode-0", 48)


def test_what_is_borrowed_counts_for_the_time_of_its_load() -> None:
    rig, request = ChooserRig(1, 2, lends=True), make_request(100)
    rig.store("prefill-0", 32, request)
    assert rig.uncached_tokens(request, "prefill-0", Offer("decode-1", 96)) == 16  # a block at least
    assert rig.uncached_tokens(request, "prefill-0", Offer("decode-1", 64)) == 100 - 32 - 28


def test_who_cannot_lend_is_passed_over() -> None:
    request = make_request(100)
    assert not _offers(ChooserRig(1, 2, lends=False), request)
    assert not _offers(ChooserRig(1, 2, reuse="never", lends=True), request)
    params = msgspec.structs.replace(request.params, prompt_logprobs=1)  # they must be computed
    assert not _offers(ChooserRig(1, 2, lends=True), msgspec.structs.replace(request, params=params))
    rig = ChooserRig(1, 2, lends=True)
    rig.fleet.pairs.loaded("decode-0", "prefill-0", False, 0.0)
    assert not _offers(rig, request)
    rig = ChooserRig(1, 2, lends=True)
    rig.fleet.engines["decode-0"].draining = True  # it gets nothing new, and has what it has
    assert _offers(rig, request)


def _offers(rig: ChooserRig, request: GenerateRequest) -> bool:
    rig.store("decode-0", 96, request)
    return rig.find_offer(request, "prefill-0", 1.0) is not None


@pytest.mark.parametrize(("tier_s", "is_read"), [(0.5, True), (0.01, False)])
def test_beside_a_tier_a_loan_is_all_that_it_brings(tier_s: float, is_read: bool) -> None:
    """Not only what the tier lacks. It is asked for if that is sooner than the tier and the rest computed."""
    rig, request = ChooserRig(1, 2, lends=True), make_request(1024)
    rig.store("decode-0", 1024, request)
    rig.reach(["prefill-0"], 960, request, parts=[TierPart("store/0-disk")])
    for _ in range(30):
        rig.fleet.speeds.computed("prefill-0", 1000, 1.0)
        rig.fleet.speeds.loaded(1008 * TOKEN_BYTES, 0.2)
    report(rig, "prefill-0", **{"0-disk": (960 * TOKEN_BYTES, tier_s)})
    offer = rig.find_offer(request, "prefill-0")
    assert (offer is not None) == is_read
    if offer is not None:
        assert offer.num_tokens == 1008
        assert offer.load_timeout_s == pytest.approx(2 * 1.008, rel=0.05)


def test_what_is_computed_sooner_than_read_is_computed_unless_reading_is_asked_for() -> None:
    request = make_request(100)
    for reuse, seconds, is_read in [("auto", 1.0, False), ("always", 1.0, True), ("auto", 1e-6, True)]:
        rig = ChooserRig(1, 2, reuse=reuse, lends=True)  # type: ignore[arg-type]
        rig.fleet.speeds.computed("prefill-0", 1000, 0.1)
        rig.fleet.speeds.loaded(96 * TOKEN_BYTES, seconds)
        assert _offers(rig, request) is is_read, (reuse, seconds)
