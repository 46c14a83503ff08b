"""`multi`: what its children make together, whose match is loaded, and when a hand-off has been sent."""

import logging
import os
from collections.abc import Callable

import msgspec
import pytest
from state_machine.standin_store import STAND_IN_STORE, store_of

from pdkv.connectors.base import (
    OBSERVES_NOTHING,
    BlockHold,
    Built,
    ConfirmedRange,
    ConnectorConfig,
    KVConnectorMetadata,
    Observed,
    RequestView,
    SchedulerView,
    TransferKey,
    TransferOutcome,
    TransferResults,
)
from pdkv.connectors.block_table import BlockTable
from pdkv.connectors.memory.fabric import MemoryFabric
from pdkv.connectors.multi.connector import BlockTables, plan_children
from pdkv.connectors.multi.scheduler import MultiScheduler
from pdkv.connectors.multi.sending import MAX_EARLY_FAILURES, SendingTable
from pdkv.connectors.multi.wire import (
    MultiMetadata,
    bound_handoff,
    decode_handoff,
    decode_ticket,
    encode_handoff,
    encode_ticket,
    split_card,
    tag,
    untag,
)
from pdkv.connectors.multi.worker import MultiWorker
from pdkv.connectors.peer.pull_scheduler import PullMetadata
from pdkv.connectors.peer.push_scheduler import PushScheduler
from pdkv.connectors.peer.push_scheduler import decode_ticket as decode_push_ticket
from pdkv.connectors.registry import build_connector, plan_connector
from pdkv.connectors.store.base import StoreConnector
from pdkv.engine.core import EngineCore
from pdkv.errors import ConfigError, UnknownConnector
from pdkv.launch.engine_process import _check_connector
from pdkv.launch.specs import EngineSpec
from pdkv.prefill.role import PrefillRole
from pdkv.testing.engine import at_rest, make_core, of_type, output_of, run, submit
from pdkv.testing.standin import expected_tokens
from pdkv.wire.kv import KVLayout
from pdkv.wire.messages import Allocated, Finished, HandedOff, KVReady, KVTicket, Loaded, Peers, Release
from pdkv.wire.types import MAX_BLOB_BYTES

LAYOUT = KVLayout(2, 1, 1, 4, "int64", 8)
SHAREABLE = KVLayout(2, 1, 8, 16, "float32", 4)
PROMPT = list(range(100, 110))


def make(connectors: str, layout: KVLayout = LAYOUT, **options: str) -> Built:
    options = {
        "connectors": connectors,
        **{name.replace("_0_", "0.").replace("_1_", "1."): v for name, v in options.items()},
    }
    return _make(options, layout)


def _make(options: dict[str, str], layout: KVLayout) -> Built:
    config = ConnectorConfig(
        engine="e", epoch="e.0", layout=layout, num_blocks=4, plan=plan_connector("multi", options)
    )
    return build_connector(config, lambda: None)


def modes(*names: str) -> dict[str, str]:
    """Options of a multi of the memory connector in these modes; the store is the stand-in's."""
    own = {f"{i}.mode": name for i, name in enumerate(names)}
    return {"connectors": ",".join(STAND_IN_STORE if name == "store" else "memory" for name in names), **own}


def with_modes(*names: str) -> Built:
    return _make(modes(*names), LAYOUT)


def core_with(name: str, fabric: str, *names: str) -> EngineCore:
    options = modes(*names) | {f"{i}.fabric": fabric for i in range(len(names))}
    return make_core(name=name, options=options, connector="multi")


def scheduler_of(core: EngineCore) -> MultiScheduler:
    assert isinstance(core.external.connector, MultiScheduler)
    return core.external.connector


# --- configuration ------------------------------------------------------------------------------------------------


def test_options_go_to_the_child_that_their_prefix_names() -> None:
    specs = plan_children({"connectors": "memory, shared_memory", "memory.mode": "store", "1.io_threads": "2"})
    assert [(spec.name, dict(spec.options)) for spec in specs] == [
        ("memory", {"mode": "store"}),
        ("shared_memory", {"io_threads": "2"}),
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "connectors=NAME"),
        ({"connectors": " , "}, "connectors=NAME"),
        ({"connectors": "memory", "mode": "pull"}, "'mode' is no child's; prefixes are: 0. or memory."),
        ({"connectors": "memory", "7.mode": "pull"}, "'7.mode' is no child's"),
        (
            {"connectors": "memory,memory", "memory.mode": "pull"},
            "is several children's; .* 0. or memory., 1. or memory.",
        ),
        (
            {"connectors": "memory", "memory.colour": "red"},
            "connector multi: unknown option 'memory.colour'; known: codec, .*fabric, .*load",
        ),
        ({"connectors": "memory,multi"}, "cannot hold another multi"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan_connector("multi", options)


def test_an_unknown_child_is_refused() -> None:
    with pytest.raises(UnknownConnector, match="telepathy"):
        make("memory,telepathy")


@pytest.mark.parametrize(
    ("names", "kind", "orders"),
    [
        (["store"], "store", ["prefill_first", "decode_first"]),
        (["store", "pull"], "pull", ["prefill_first", "decode_first"]),
        (["pull", "pull"], "pull", ["prefill_first", "decode_first"]),
        (["store", "push"], "push", ["decode_first", "needs_peer_first", "concurrent"]),
    ],
)
def test_kind_and_orders_follow_from_the_children(names: list[str], kind: str, orders: list[str]) -> None:
    plan = plan_connector("multi", modes(*names))
    assert plan.kind == kind
    assert list(plan.orders) == orders
    assert plan.content_addressed == (set(names) == {"store"})


@pytest.mark.parametrize(
    ("names", "lends"), [(["pull", "store"], True), (["store", "push"], True), (["store", "store"], False)], ids=str
)
def test_lends_where_its_hand_offs_do(names: list[str], lends: bool) -> None:
    assert plan_connector("multi", modes(*names)).lends is lends


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["push", "push"], "only one child can push"),
        (["pull", "push"], "needs decode first and memory needs prefill first"),
    ],
)
def test_children_that_cannot_work_together_are_refused(names: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        with_modes(*names)


def test_a_pulling_child_that_finds_content_goes_with_a_pushing_one() -> None:
    plan = plan_connector("multi", {"connectors": "memory,shared_memory", "memory.mode": "push"})
    assert plan.kind == "push"


def test_a_launch_of_several_engines_is_refused_where_a_child_joins_only_one_process() -> None:
    from pathlib import Path

    from pdkv.config import EngineConfig, HandoffConfig

    spec = EngineSpec(
        name="prefill-0", epoch="1", role="prefill", endpoint="ipc:///nowhere", num_engines=2,
        config=EngineConfig(model=Path("m")), handoff=HandoffConfig(),
        connector=plan_connector("multi", modes("pull")),
    )  # fmt: skip
    with pytest.raises(ConfigError, match="connects only engines in one process"):
        _check_connector(spec)


def test_two_children_that_allocate_the_pool_are_refused_with_both_names() -> None:
    with pytest.raises(ConfigError, match="both shared_memory and shared_memory would allocate the KV pool"):
        plan_connector("multi", {"connectors": "shared_memory,shared_memory"})


def test_every_childs_table_hears_of_reuse(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that peers read, and the one that a store beside them reads."""
    seen: list[BlockTable | None] = []
    build = StoreConnector.build.__func__  # type: ignore[attr-defined]

    def seeing(cls: type[StoreConnector], config: ConnectorConfig, notify: Callable[[], None]) -> Built:
        seen.append(config.block_table)
        built: Built = build(cls, config, notify)
        return built

    monkeypatch.setattr(StoreConnector, "build", classmethod(seeing))
    connector = make("store,shared_memory,memory", SHAREABLE, _0_url="memory://tables")
    table = connector.block_table
    assert isinstance(table, BlockTables)
    tables = [*table._tables, *seen]
    assert len(tables) == 3
    before = [own.generation(2) for own in tables]
    table.reuse(2)
    table.publish(2, [b"k" * 16])
    assert all(own.generation(2) != generation for own, generation in zip(tables, before, strict=True))
    connector.shutdown()


def test_childrens_tiers_are_told_apart() -> None:
    connector = make("store,store", SHAREABLE, _0_url="memory://a", _1_url="memory://b")
    scheduler = connector.scheduler()
    told = [(events.medium, events.shared, events.tokens_per_key) for events in scheduler.tiers.take_events()]
    assert told == [("0-store/memory", False, 64), ("1-store/memory", False, 64)]
    assert list(scheduler.tiers.take_events()) == []
    scheduler.shutdown()
    connector.shutdown()


def test_a_child_that_cannot_be_built_takes_the_others_down() -> None:
    def num_pools() -> int:
        targets = [os.readlink(fd.path) for fd in os.scandir("/proc/self/fd") if os.path.islink(fd.path)]
        return sum(target.startswith("/memfd:pdkv:e") for target in targets)

    before = num_pools()
    with pytest.raises(ConfigError, match="tokens_per_value"):
        make("shared_memory,store", SHAREABLE, _1_tokens_per_value="17", _1_url="memory://")
    assert num_pools() == before


# --- wire ---------------------------------------------------------------------------------------------------------


def test_tags_tell_children_apart() -> None:
    keys = [TransferKey("t", 0), TransferKey("1:t", 3, lent=True), TransferKey("", 1, part=2)]
    assert [untag(tag(child, key)) for child in (0, 12) for key in keys] == [(c, k) for c in (0, 12) for k in keys]
    assert tag(0, TransferKey("t", 0)) != tag(1, TransferKey("t", 0))


@pytest.mark.parametrize("garbage", [b"", b"\xc1", b"\x93\x01\x02\x03", msgspec.msgpack.encode([b"a"])])
def test_garbage_is_nobodys_hand_off_or_ticket(garbage: bytes) -> None:
    assert decode_handoff(garbage, 2) is None
    assert decode_ticket(garbage) is None


def test_a_hand_off_stays_within_its_bound() -> None:
    payloads = [b"x" * 40_000, b"y" * 30_000, b"z"]
    kept = bound_handoff(payloads)
    assert kept == [None, payloads[1], payloads[2]]
    assert len(encode_handoff(kept)) <= MAX_BLOB_BYTES
    assert decode_handoff(encode_handoff(kept), 3) == kept


def test_a_card_without_the_same_children_is_refused_once_with_both_sides_values(
    caplog: pytest.LogCaptureFixture,
) -> None:
    core, other = core_with("e0", "multi-cards", "pull", "store"), core_with("e1", "multi-cards", "pull")
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            core.handle("r", Peers([core.card, other.card, make_core(name="e2", options={}).card]), 0.0)
    (first, second) = [record.getMessage() for record in caplog.records]
    assert first == f"no KV from engine e1: it has multi of memory; e0 has multi of memory,{STAND_IN_STORE}"
    assert second == (
        "no KV from engine e2: it has connector memory, which lists no children on its card; "
        f"e0 has multi of memory,{STAND_IN_STORE}"
    )


def test_each_child_sees_a_peer_as_its_own() -> None:
    connector = make("shared_memory,memory", SHAREABLE)
    worker = connector.worker()
    card = msgspec.structs.replace(make_core(name="peer").card, connector="multi", rank_blobs=[worker.handshake()])
    cards = split_card(card, plan_connector("multi", {"connectors": "shared_memory,memory"}).parts)
    assert not isinstance(cards, str)
    assert [c.connector for c in cards] == ["shared_memory", "memory"]
    assert cards[0].rank_blobs[0]
    assert cards[0].content_addressed
    worker.shutdown()
    connector.shutdown()


def test_another_rank_decodes_each_childs_orders_by_its_type() -> None:
    connector = make("shared_memory,memory", SHAREABLE)
    scheduler, worker = connector.scheduler(), connector.worker()
    meta = scheduler.build_connector_meta(SchedulerView(7, [], [], [], [], [], []))
    assert isinstance(worker, MultiWorker)
    raw = msgspec.msgpack.decode(msgspec.msgpack.encode(meta), type=worker.metadata_type)
    assert isinstance(raw, MultiMetadata)
    decoded = [
        msgspec.msgpack.decode(part, type=child.metadata_type)
        for child, part in zip(worker.workers, raw.parts, strict=True)
    ]
    assert [type(part) for part in decoded] == [PullMetadata, KVConnectorMetadata]
    assert all(part.step_id == 7 for part in decoded)
    for side in (worker, scheduler, connector):
        side.shutdown()


def test_steps_are_observed_only_where_a_child_wants_them() -> None:
    assert with_modes("pull", "pull").scheduler().observes == OBSERVES_NOTHING
    assert with_modes("push").scheduler().observes == PushScheduler.observes
    assert with_modes("pull", "store").scheduler().observes == Observed()


# --- hand-offs ----------------------------------------------------------------------------------------------------


def test_a_hand_off_has_been_sent_when_all_its_children_have_ended() -> None:
    table = SendingTable()
    table.begin(TransferKey("t", 0), [0, 2], tells_failure=True)
    table.end(TransferKey("t", 0), 2, TransferOutcome("store_full", 10))
    assert not table.has_ended
    table.end(TransferKey("t", 0), 1, TransferOutcome())  # has no part in it
    table.end(TransferKey("t", 0), 0, TransferOutcome("", 5, 2.0))
    assert table.take_ended() == {TransferKey("t", 0): TransferOutcome("store_full", 15, 2.0)}
    table.end(TransferKey("t", 0), 0, TransferOutcome())  # a duplicate
    assert not table.has_ended


def test_a_failure_before_the_hand_off_is_told_with_it() -> None:
    table = SendingTable()
    table.end(TransferKey("t", 0), 0, TransferOutcome("peer_gone"))
    table.begin(TransferKey("t", 0), [0], tells_failure=True)
    assert table.take_ended() == {TransferKey("t", 0): TransferOutcome("peer_gone")}


def test_failures_that_nobody_asks_for_are_bounded() -> None:
    """F2: a stale report changes nothing and takes no memory."""
    table = SendingTable()
    for i in range(2 * MAX_EARLY_FAILURES):
        table.end(TransferKey(f"t{i}", 0), 0, TransferOutcome("peer_gone"))
    assert len(table._early) == MAX_EARLY_FAILURES


def test_what_is_pushed_again_is_told_again() -> None:
    """To another reader: without a word it would wait for its own deadline. The store may still be at it, or over."""
    table, key = SendingTable(), TransferKey("t", 0)
    table.begin(key, {0, 1}, tells_failure=True)
    table.end(key, 1, TransferOutcome())
    table.begin_again(key, 1)
    table.end(key, 0, TransferOutcome())
    assert not table.has_ended
    table.end(key, 1, TransferOutcome("peer_gone"))
    assert table.take_ended()[key].code == "peer_gone"
    table.begin_again(key, 1)
    table.end(key, 1, TransferOutcome("late"))
    assert table.take_ended()[key].code == "late"
    assert not len(table)


def test_a_first_readers_failure_is_not_the_seconds() -> None:
    """The store still saves."""
    table, key = SendingTable(), TransferKey("t", 0)
    table.begin(key, {0, 1}, tells_failure=True)
    table.end(key, 1, TransferOutcome("peer_gone"))
    table.begin_again(key, 1)
    table.end(key, 1, TransferOutcome())
    table.end(key, 0, TransferOutcome())
    assert table.take_ended()[key].code == ""


def test_a_reader_whose_ticket_comes_after_anothers_hears_that_nothing_will_come() -> None:
    """A ticket for more than there is, from the second decode engine."""
    options = modes("push", "store") | {"0.fabric": "multi-again"}
    prefill, *readers = (
        make_core(name=name, options=options | {"1.fabric": f"multi-again-{name}"}, connector="multi")
        for name in ("p", "d", "e")
    )
    for core in (prefill, *readers):
        core.handle("r", Peers([each.card for each in (prefill, *readers)]), 0.0)

    def ask(reader: EngineCore, attempt: int) -> bytes:
        reader.handle("r", submit(PROMPT, kv="await_peer", attempt=attempt), 0.0)
        (allocated,) = of_type(run(reader), Allocated)
        assert allocated.ticket is not None
        return allocated.ticket

    prefill.handle("r", submit(PROMPT, until="first_token", kv="handoff"), 0.0)
    prefill.handle("r", KVTicket("a", 0, ask(readers[0], 0)), 0.0)
    said = [*run(prefill), *run(readers[0]), *run(prefill)]
    assert [message.ok for message in of_type(said, KVReady) if isinstance(message, KVReady)] == [True]
    wrapped = decode_ticket(ask(readers[1], 1))
    assert wrapped is not None
    wanted = decode_push_ticket(wrapped.ticket)
    assert wanted is not None
    too_much = msgspec.msgpack.encode(msgspec.structs.replace(wanted, stop=wanted.stop + 40))
    prefill.handle("r", KVTicket("a", 0, encode_ticket(wrapped.child, too_much), 1), 0.0)
    (ready,) = of_type([*run(prefill), *run(prefill)], KVReady)
    assert (ready.ok, ready.ticket) == (False, 1)


def test_a_hold_ends_with_its_own_result_and_the_hand_off_later() -> None:
    scheduler = with_modes("store", "push").scheduler()
    assert isinstance(scheduler, MultiScheduler)
    scheduler.sending.add_holds([BlockHold(tag(1, TransferKey("t", 0, part=1)), [3], TransferKey("t", 0))])
    scheduler.sending.begin(TransferKey("t", 0), [0, 1], tells_failure=True)
    batch = {tag(1, TransferKey("t", 0, part=1)): TransferOutcome()}
    assert scheduler.resolve_results(TransferResults(batch, {}, {}, {})) == TransferResults(batch, {}, {}, {})
    both = {tag(1, TransferKey("t", 0)): TransferOutcome(), tag(0, TransferKey("t", 0)): TransferOutcome()}
    resolved = scheduler.resolve_results(TransferResults(both, {}, {}, {}))
    assert list(resolved.finished_sending) == [TransferKey("t", 0)]


def leases(core: EngineCore) -> int:
    assert isinstance(core.prefill, PrefillRole)
    return len(core.prefill.leases)


def test_beside_a_pull_a_store_has_no_part_in_the_hand_off() -> None:
    """Its saves outlive a release, it is not waited for, and it has no tail."""
    fabric = MemoryFabric(manual=True)
    MemoryFabric.bind("multi-lease", fabric)
    core = core_with("e0", "multi-lease", "pull", "store")
    core.handle("r", submit(PROMPT, until="first_token", kv="handoff"), 0.0)
    messages = run(core)
    assert of_type(messages, KVReady) == []
    assert leases(core) == 1
    assert core.scheduler.kv.pool.counts().leased == 3
    core.handle("r", Release("t-a", 0), 0.0)
    run(core)
    while fabric.under_way:
        fabric.deliver()
    run(core)
    assert at_rest(core)
    assert len(store_of(fabric)) == 2
    MemoryFabric.unbind("multi-lease")


def test_a_first_token_that_ends_the_request_leaves_nothing_behind() -> None:
    core = core_with("e0", "multi-first", "store", "pull")
    core.handle("r", submit(PROMPT, until="first_token", kv="handoff", max_tokens=1), 0.0)
    assert of_type(run(core), HandedOff) == []
    assert len(scheduler_of(core).sending) == 0
    assert at_rest(core)


# --- loads --------------------------------------------------------------------------------------------------------


def hand_over(fabric: str, *names: str) -> tuple[EngineCore, EngineCore, HandedOff, list[int]]:
    """A prompt handed off by one engine, and the other engine that will decode it."""
    prefill, decode = core_with("p", fabric, *names), core_with("d", fabric, *names)
    for core in (prefill, decode):
        core.handle("r", Peers([prefill.card, decode.card]), 0.0)
    prefill.handle("r", submit(PROMPT, until="first_token", kv="handoff"), 0.0)
    messages = run(prefill)
    (handed,) = of_type(messages, HandedOff)
    return prefill, decode, handed, output_of(messages, "a")


@pytest.mark.parametrize("names", [("pull", "store"), ("store", "pull")], ids="-".join)
def test_decode_computes_nothing_whichever_child_wins(names: tuple[str, str]) -> None:
    prefill, decode, handed, first = hand_over(f"multi-{names}", *names)
    decode.handle("r", submit(PROMPT, output_token_ids=first, kv="await_peer", handoff=handed.handoff), 0.0)
    decode.handle("r", KVReady("a", 0, True), 0.0)
    messages = run(decode)
    assert first + output_of(messages, "a") == expected_tokens(PROMPT, 4)
    (finished,) = of_type(messages, Finished)
    assert (finished.sources.remote, finished.sources.computed) == (10, 0)
    prefill.handle("r", Release("t-a", 0), 0.0)
    run(prefill)
    assert at_rest(prefill)
    assert at_rest(decode)


def test_a_store_takes_over_what_it_has_where_the_hand_off_failed() -> None:
    """The rest is computed, loudly."""
    prefill, decode, handed, first = hand_over("multi-falls", "pull", "store")
    fabric = MemoryFabric.named("multi-falls")
    fabric._endpoints.pop("p")  # as after kill -9, before anybody knows
    decode.handle("r", submit(PROMPT, output_token_ids=first, kv="await_peer", handoff=handed.handoff), 0.0)
    messages = run(decode)
    assert first + output_of(messages, "a") == expected_tokens(PROMPT, 4)
    assert scheduler_of(decode)._num_fallbacks.total() == 1
    assert decode.external.get_stats("multi")["multi/0-memory"].fallbacks == 1
    (loaded,) = of_type(messages, Loaded)
    assert (loaded.ok, loaded.code) == (False, "peer_gone")
    (finished,) = of_type(messages, Finished)
    assert finished.sources.remote == 8
    assert at_rest(decode)
    assert prefill.card.engine == "p"


def test_a_reader_that_cannot_pull_finds_what_the_store_has() -> None:
    """Two hosts: the store is asked only where the hand-off cannot be had."""
    prefill, decode, handed, first = hand_over("multi-hosts", "pull", "store")
    decode.handle("r", Peers([decode.card]), 0.0)  # to its pulling child the peer is nobody
    decode.handle("r", submit(PROMPT, output_token_ids=first, kv="await_peer", handoff=handed.handoff), 0.0)
    messages = run(decode)
    assert first + output_of(messages, "a") == expected_tokens(PROMPT, 4)
    (finished,) = of_type(messages, Finished)
    assert finished.sources.remote == 8
    assert scheduler_of(decode)._num_fallbacks.total() == 0
    assert leases(prefill) == 1


def test_a_malformed_hand_off_is_counted_and_computed_here() -> None:
    _, decode, handed, first = hand_over("multi-garbage", "pull", "store")
    handoff = msgspec.structs.replace(handed.handoff, payload=b"\xc1")
    decode.handle("r", submit(PROMPT, output_token_ids=first, kv="await_peer", handoff=handoff), 0.0)
    messages = run(decode)
    assert first + output_of(messages, "a") == expected_tokens(PROMPT, 4)
    assert scheduler_of(decode).views.num_malformed > 0


def test_only_the_winner_gives_a_ticket_and_only_its_peer_sees_it() -> None:
    connector = with_modes("store", "push")
    scheduler = connector.scheduler()
    request = RequestView("a", 0, "t", "await_peer", 10, 10, [b"k"] * 2)
    assert scheduler.get_num_new_matched_tokens(request, 0).num_tokens == 10
    ticket = scheduler.update_state_after_alloc(request, [[0, 1, 2]], 10)
    assert ticket is not None
    assert isinstance(scheduler, MultiScheduler)
    sender = msgspec.structs.replace(request, kv="handoff", ticket=ticket)
    views = [scheduler.views.request(sender, child) for child in (0, 1)]
    assert views[0] is not None
    assert views[1] is not None
    assert views[0].ticket is None
    assert encode_ticket(1, views[1].ticket or b"") == ticket


def test_a_cancel_reaches_a_load_that_was_taken_over_in_the_same_step() -> None:
    """F1: the workers hear of the cancel before the load, so the load's own worker is told again."""
    _, decode, handed, first = hand_over("multi-cancel", "pull", "store")
    scheduler = scheduler_of(decode)
    request = RequestView("a", 0, "t-a", "await_peer", 11, 10, decode_keys(PROMPT, decode), handed.handoff)
    scheduler.get_num_new_matched_tokens(request, 0)
    scheduler.update_state_after_alloc(request, [[0, 1, 2]], 10)
    scheduler.build_connector_meta(SchedulerView(1, [], [], [], [], [], []))
    failed = {tag(0, TransferKey("t-a", 0)): TransferOutcome("peer_gone")}
    assert not scheduler.resolve_results(TransferResults({}, {}, {}, failed))
    meta: KVConnectorMetadata = scheduler.build_connector_meta(
        SchedulerView(2, [], [], [], [], [], [], cancelled=[TransferKey("t-a", 0)])
    )
    assert isinstance(meta, MultiMetadata)
    assert meta.cancels == [(1, TransferKey("t-a", 0))]
    ended = {tag(1, TransferKey("t-a", 0)): TransferOutcome("kv_not_found")}  # once: the next failure is the engine's
    assert list(scheduler.resolve_results(TransferResults({}, {}, {}, ended)).failed_receiving) == [
        TransferKey("t-a", 0)
    ]
    assert not scheduler._loads
    assert first


def decode_keys(prompt: list[int], core: EngineCore) -> list[bytes]:
    """Block keys of a prompt as the core's requests have them."""
    from pdkv.base.block_keys import extend_keys, root_key

    keys: list[bytes] = []
    root = root_key(model=core.card.model, layout=core.card.layout.identity)
    extend_keys(keys, root, prompt, hash_block_size=core.card.hash_block_size)
    return keys


def test_results_of_unknown_transfers_keep_their_childs_key() -> None:
    """F2: the engine counts them."""
    scheduler = with_modes("pull", "pull").scheduler()
    assert isinstance(scheduler, MultiScheduler)
    stale = {tag(1, TransferKey("gone", 0)): TransferOutcome()}
    assert scheduler.resolve_results(TransferResults({}, {}, stale, {})) == TransferResults({}, {}, stale, {})


def test_only_a_push_is_shown_a_hand_off_again() -> None:
    """A late ticket: a store has had it already, and would hold the blocks for a save that it has ended."""
    scheduler = with_modes("store", "push").scheduler()
    assert isinstance(scheduler, MultiScheduler)
    request = RequestView("a", 0, "t", "handoff", 11, 10, [b"k"] * 2)
    last = ConfirmedRange(request, 0, 10, [[0, 1, 2]], True)
    for finished, shown in (([TransferKey("t", 0)], [1, 1]), ([], [0, 1])):
        view = SchedulerView(1, [], [last], [], finished, [], [])
        children = enumerate((Observed(), PushScheduler.observes))
        assert [len(scheduler.views.step(view, child, o).confirmed) for child, o in children] == shown


def test_who_lends_nothing_takes_a_loans_request_for_a_local_one() -> None:
    scheduler = with_modes("store", "pull").scheduler()
    assert isinstance(scheduler, MultiScheduler)
    lent = RequestView("a", 0, "t", "handoff", 11, 10, [b"k"] * 2, lent=True)
    seen = [scheduler.views.request(lent, child) for child in range(2)]
    assert [view is not None and view.kv for view in seen] == ["local", "handoff"]
