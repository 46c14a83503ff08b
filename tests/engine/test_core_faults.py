"""Messages of a router that lies, or that is in error: each costs at most its own request, and the engine works on."""

import logging

import msgspec
import pytest

from pdkv.engine.reports import MAX_KEYS_PER_EVENTS
from pdkv.errors import RankGone
from pdkv.router.routing.prefix_index import PrefixIndex
from pdkv.sampling.params import SamplingParams
from pdkv.testing.engine import at_rest, make_core, of_type, output_of, run, submit
from pdkv.testing.standin import VOCAB_SIZE, expected_tokens
from pdkv.wire.kv import KVHandoff
from pdkv.wire.messages import (
    Abort,
    BlockStored,
    CacheCleared,
    Continue,
    Failed,
    KVEvents,
    KVTicket,
    Release,
    Resync,
    RouterToEngine,
)

PROMPT = list(range(100, 110))


def params(**fields: object) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=4, seed=0, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"cache_salt": "s" * 257}, "cache_salt"),
        ({"adapter": "a" * 257}, "adapter"),
        ({"params": params(stop=("x" * 5000,))}, "stop"),
        ({"params": params(stop=("",))}, "stop"),
        ({"params": params(stop_token_ids=tuple(range(300)))}, "stop_token_ids"),
        ({"params": params(top_k=2**63)}, "top_k"),
        ({"params": params(n=10**6)}, "n"),
        ({"params": params(repetition_penalty=float("nan"))}, "repetition_penalty"),
        ({"params": params(logit_bias={5: float("inf")})}, "logit_bias"),
        ({"params": params(logprobs=10**6)}, "logprobs"),
        ({"handoff": KVHandoff("a", 0, "t-other", "e1", "1", 10, b"")}, "handoff"),
    ],
)
def test_what_the_router_should_have_refused_is_refused_with_its_field(change: dict[str, object], param: str) -> None:
    core = make_core()
    core.handle_guarded("r", msgspec.structs.replace(submit(PROMPT), **change), 0.0)
    (failed,) = of_type(run(core), Failed)
    assert (failed.code, failed.param) == ("invalid_request_error", param)
    assert at_rest(core)


def test_an_error_in_a_message_s_handling_fails_its_request_only(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    core = make_core()
    add = core.scheduler.waiting.add

    def poisoned(request: object) -> None:
        if request.submit.request_id == "poison":  # type: ignore[attr-defined]
            raise IndexError("x" * 10_000)
        add(request)  # type: ignore[arg-type]

    monkeypatch.setattr(core.scheduler.waiting, "add", poisoned)
    core.handle_guarded("r", submit(PROMPT, request_id="a"), 0.0)
    with caplog.at_level(logging.CRITICAL):
        core.handle_guarded("r", submit(PROMPT, request_id="poison"), 0.0)
    messages = run(core)
    (failed,) = of_type(messages, Failed)
    assert failed.request_id == "poison"
    assert len(msgspec.msgpack.encode(failed)) < 5000
    assert output_of(messages, "a") == expected_tokens(PROMPT, 4)
    assert core.counters.dropped_messages == 1
    assert at_rest(core)


def test_a_lost_rank_is_not_one_message_s_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    core = make_core()

    def lost(request: object) -> None:
        raise RankGone("rank 1 is gone")

    monkeypatch.setattr(core.scheduler.waiting, "add", lost)
    with pytest.raises(RankGone):
        core.handle_guarded("r", submit(PROMPT), 0.0)


@pytest.mark.parametrize("token_ids", [[VOCAB_SIZE], [-1], [5] * 100])
def test_a_first_token_that_cannot_be_is_refused(token_ids: list[int]) -> None:
    """Beyond the vocabulary it was an index error in the middle of the next step."""
    core = make_core(options={"fabric": "core-continue"})
    core.handle_guarded("r", submit(PROMPT, kv="await_peer"), 0.0)
    core.handle_guarded("r", Continue("a", 0, token_ids), 0.0)
    (failed,) = of_type([m for _, sent in core.take_messages(0.0) for m in sent], Failed)
    assert failed.code == "invalid_request_error"
    run(core)
    assert at_rest(core)
    core.shutdown()


def test_no_router_touches_another_one_s_requests() -> None:
    core = make_core(num_blocks=32)
    core.router_joined("other", "1")
    core.handle_guarded("r", submit(PROMPT, request_id="a", max_tokens=6), 0.0)
    core.step(0.0)
    forged: list[RouterToEngine] = [
        Abort("a", 0),
        submit(PROMPT, request_id="a", attempt=1),
        Continue("a", 0, [1]),
        KVTicket("a", 0, b"t"),
        Release("t-a", 0),
    ]
    for message in forged:
        core.handle_guarded("other", message, 0.0)
    messages = run(core)
    assert output_of(messages, "a")[-5:] == expected_tokens(PROMPT, 6)[-5:]
    assert [m.param for m in of_type(messages, Failed) if isinstance(m, Failed)] == ["request_id"]
    assert at_rest(core)


def test_a_transfer_belongs_to_one_request() -> None:
    """A second Submit under the same transfer took over the first one's lease, whose blocks were never given back."""
    core = make_core(num_blocks=32, options={"fabric": "core-transfer"})
    handoff = {"kv": "handoff", "until": "first_token"}
    first = submit(PROMPT, request_id="a", **handoff)
    core.handle_guarded("r", first, 0.0)
    core.handle_guarded("r", msgspec.structs.replace(first, request_id="b"), 0.0)
    messages = run(core)
    core.handle_guarded("r", msgspec.structs.replace(first, request_id="c"), 0.0)
    messages += run(core)
    refused = [(m.request_id, m.param) for m in of_type(messages, Failed) if isinstance(m, Failed)]
    assert refused == [("b", "transfer_id"), ("c", "transfer_id")]
    core.handle_guarded("r", Release(first.transfer_id, 0), 0.0)
    run(core)
    assert at_rest(core)
    core.shutdown()


def test_many_resyncs_of_one_frame_are_answered_once() -> None:
    core = make_core()
    for _ in range(1000):
        core.handle_guarded("r", Resync(), 0.0)
    messages = [m for _, sent in core.take_messages(0.0) for m in sent]
    assert len(of_type(messages, KVEvents)) == 1
    core.handle_guarded("r", Resync(), 0.0)
    assert len(of_type([m for _, sent in core.take_messages(0.0) for m in sent], KVEvents)) == 1


def test_a_large_cache_is_told_in_parts_that_the_index_puts_together(monkeypatch: pytest.MonkeyPatch) -> None:
    core = make_core()
    keys = [i.to_bytes(16) for i in range(5 * MAX_KEYS_PER_EVENTS // 2)]
    chains = [BlockStored(keys[i : i + 1000], None) for i in range(0, len(keys), 1000)]
    monkeypatch.setattr(core.scheduler.kv.pool, "snapshot_events", lambda: [CacheCleared(), *chains])
    core.handle_guarded("r", Resync(), 0.0)
    parts = [m for _, sent in core.take_messages(0.0) for m in sent if isinstance(m, KVEvents)]
    assert [part.more for part in parts] == [True, True, False]
    assert len({part.number for part in parts}) == 1
    index = PrefixIndex()
    index.add_engine("e0")
    assert all(index.apply("e0", part) for part in parts)
    while index.work():
        pass
    assert index.num_keys_of("e0") == len(keys)
    assert index.apply("e0", KVEvents(parts[0].number + 1, []))
    assert index.num_gaps == 0
