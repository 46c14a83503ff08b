"""Engines of several ranks, each a thread of its own: the same tokens, common results, and errors with a type."""

import contextlib
import itertools
import multiprocessing
import multiprocessing.process
import os
import queue
import select
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from busy_device import BusyDevice, follow_on_busy_device
from numpy.typing import NDArray
from random_proposer import RandomProposer
from rank_connector import RankConnector, RankWorker
from traffic import wait_until_true

from pdkv.assemble.engine import RankPlace, build_engine, run_rank
from pdkv.config import DEFAULT_MODEL, EngineConfig, HandoffConfig
from pdkv.connectors.base import KVConnectorMetadata, TransferKey
from pdkv.engine.core import EngineCore
from pdkv.engine.plan import StepPlan
from pdkv.engine.proposers.base import Proposer
from pdkv.engine.step_loop import Ahead, InTurn
from pdkv.engine.worker.pending import MAX_PENDING, PendingStep
from pdkv.engine.worker.ranks.executor import MultiProcessExecutor
from pdkv.engine.worker.ranks.follower import FirstRank
from pdkv.engine.worker.ranks.messages import Answer, Collected, StepDone
from pdkv.engine.worker.sampling.sampler import SamplingState
from pdkv.engine.worker.step_queue import StepQueue
from pdkv.errors import ConfigError, InvalidRequest, ModelError, NonFiniteLogits, RankError, RankGone, RankTimeout
from pdkv.grammar.prepare import with_grammar
from pdkv.kernels import streams
from pdkv.models.rank_sockets import connect_ranks
from pdkv.sampling.params import SamplingParams
from pdkv.sampling.shape import Grammar, StructuredOutputs
from pdkv.testing.engine import of_type, output_of, submit
from pdkv.wire.messages import Abort, AskReport, EngineToRouter, Failed, Finished, Peers, Tokens
from pdkv.wire.reports import LoadReport
from tests.conftest import HFModel

torch.set_num_threads(1)

PROMPTS = [[5, 6, 7], list(range(2, 60)), list(range(100, 117)), [9]]


def no_proposer() -> None:
    """Of a rank that does not guess."""


class Ranked:
    """An engine whose other ranks are threads. `ended` gets what each of them ended with."""

    def __init__(
        self,
        model: Path,
        tp: int,
        directory: Path,
        proposer: Callable[[], Proposer | None] = no_proposer,
        processes: bool = False,
        **fields: Any,
    ) -> None:
        """`proposer` makes one for each rank. `processes`: the others are some, on busy devices."""
        self.ended: queue.Queue[BaseException | None] = queue.Queue()
        self.wake_fd, wake_write_fd = os.pipe2(os.O_NONBLOCK)
        self._wake_write_fd = wake_write_fd
        config = EngineConfig(
            model=model, device="cpu", threads=1, tp=tp,
            **{"kv_cache_memory": 8 << 20, "max_num_seqs": 8, "rank_timeout_s": 20.0, **fields},
        )  # fmt: skip
        handoff = HandoffConfig(connector="rank_connector:RankConnector")
        self.pairs = [socket.socketpair() for _ in range(tp - 1)]
        self.peers = connect_ranks(tp)
        self._proposer = proposer
        store = directory / "store"
        self.threads: list[threading.Thread | multiprocessing.process.BaseProcess] = [
            self._process(config, handoff, rank)
            if processes
            else threading.Thread(target=self._follow, args=(config, handoff, rank, store))
            for rank in range(1, tp)
        ]
        for thread in self.threads:
            thread.start()
        if processes:
            for sock in [theirs for _, theirs in self.pairs] + [sock for peers in self.peers[1:] for sock in peers]:
                sock.close()
        ours = [first for first, _ in self.pairs]
        try:
            self.core = build_engine(
                config, handoff, name=f"tp{tp}", epoch="1", kv_shards=4,
                place=RankPlace(0, ours, self.peers[0], store, 60.0, wake_write_fd), proposer=proposer(),
            )  # fmt: skip
        except BaseException:
            self.close()
            raise
        self.core.router_joined("r", "1")

    def _follow(self, config: EngineConfig, handoff: HandoffConfig, rank: int, store: Path) -> None:
        error: BaseException | None = None
        try:
            place = RankPlace(rank, [self.pairs[rank - 1][1]], self.peers[rank], store, 30.0)
            proposer = self._proposer()
            run_rank(config, handoff, name=f"tp{config.tp}", epoch="1", kv_shards=4, place=place, proposer=proposer)
        except BaseException as raised:
            error = raised
        self.ended.put(error)

    def _process(self, config: EngineConfig, handoff: HandoffConfig, rank: int) -> multiprocessing.process.BaseProcess:
        sockets = [self.pairs[rank - 1][1]], self.peers[rank]
        fields = {"config": config, "handoff": handoff, "name": f"tp{config.tp}", "epoch": "1", "kv_shards": 4}
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["pdkv.assemble.engine"])
        return context.Process(target=follow_on_busy_device, args=(rank, *sockets, 60.0), kwargs=fields)

    def worker(self, rank: int) -> RankWorker:
        return RankConnector.made[self.core.card.engine, rank]

    def close(self) -> None:
        with contextlib.suppress(AttributeError):
            self.core.shutdown()
        for ours, _ in self.pairs:
            ours.close()
        for thread in self.threads:
            thread.join()
        for sockets in self.peers:
            for sock in sockets:
                sock.close()
        for fd in (self.wake_fd, self._wake_write_fd):
            os.close(fd)


MakeEngine = Callable[..., Ranked]


@pytest.fixture
def make_engine(tmp_path: Path) -> Iterator[MakeEngine]:
    made: list[Ranked] = []

    def make(model: Path, tp: int, **fields: Any) -> Ranked:
        directory = tmp_path / str(len(made))
        directory.mkdir()
        made.append(Ranked(model, tp, directory, **fields))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


def run(
    core: EngineCore,
    params: list[SamplingParams] | None = None,
    *,
    name: str = "a",
    ahead: int = 0,
    at_step: Mapping[int, Abort] = MappingProxyType({}),
) -> list[EngineToRouter]:
    """All prompts at once, until all have ended; request i is called {name}{i}.

    So many steps are planned ahead of the oldest that has not ended, always. `at_step`: aborts, by turn.
    """
    for i, prompt in enumerate(PROMPTS):
        request = submit(prompt, request_id=f"{name}{i}", max_tokens=12)
        if params is not None:
            request = msgspec.structs.replace(request, params=params[i])
        core.handle("r", request, 1.0)
    messages: list[EngineToRouter] = []
    step = partial(core.step, 1.0) if not ahead else partial(step_ahead, core, *steps_ahead(core, ahead))
    for turn in itertools.count():
        if not core.requests:
            break
        if turn in at_step:
            core.handle("r", at_step[turn], 1.0)
        step()
        for _, sent in core.take_messages(1.0):
            messages += sent
    core.scheduler.kv.pool.check_integrity()
    return messages


def steps_ahead(core: EngineCore, ahead: int) -> tuple[Ahead, StepQueue]:
    """Steps that nobody runs by himself."""
    orders = StepQueue(core.executor, lambda: None)
    return Ahead(core, orders, ahead), orders


def step_ahead(core: EngineCore, steps: Ahead, orders: StepQueue) -> None:
    """The oldest step ends when as many are planned as may be; with the last request all do."""
    while not steps.is_full:
        steps.plan(1.0)
    orders.run_next()
    steps.take_in(1.0)
    while not core.requests and not orders.is_done:
        orders.run_next()
        steps.take_in(1.0)


@pytest.mark.parametrize("rank", [0, 1])
def test_every_rank_looks_for_what_is_not_finite(hf_model: HFModel, make_engine: MakeEngine, rank: int) -> None:
    """KV goes bad in one rank's pool, in a cached prompt's first block: its next reader fails, and no later one."""
    engine = make_engine(hf_model("llama", initializer_range=0.2), 2, check_finite=True)
    core, blocks = engine.core, engine.core.scheduler.kv.pool
    expected = run(core)
    core.handle("r", submit(PROMPTS[1], request_id="probe", max_tokens=12), 1.0)
    core.step(1.0)
    block = core.requests["probe", 0].block_tables[0][0]
    assert blocks.has_content(block)
    core.handle("r", Abort("probe", 0), 1.0)
    core.step(1.0)
    core.take_messages(1.0)
    engine.worker(rank).kv_pool[block, -1, 1, 0, 0, 0] = float("nan")
    messages = run(core, name="b")
    (failure,) = of_type(messages, Failed)
    assert (failure.request_id, failure.code) == ("b1", NonFiniteLogits.code)
    assert not blocks.has_content(block)
    for i in (0, 2, 3):
        assert output_of(messages, f"b{i}") == output_of(expected, f"a{i}")
    again = run(core, name="c")
    assert [output_of(again, f"c{i}") for i in range(4)] == [output_of(expected, f"a{i}") for i in range(4)]


@pytest.mark.parametrize("fields", [{}, {"max_num_batched_tokens": 20}], ids=["whole", "chunked"])
@pytest.mark.parametrize("tp", [2, 4])
def test_the_tokens_are_those_of_one_rank(
    hf_model: HFModel, make_engine: MakeEngine, tp: int, fields: dict[str, int]
) -> None:
    model = hf_model("llama", initializer_range=0.2)
    expected = run(make_engine(model, 1).core)
    engine = make_engine(model, tp, **fields)
    for name in ("a", "b"):  # the second time from the prefix cache of every rank
        messages = run(engine.core, name=name)
        for i in range(len(PROMPTS)):
            assert output_of(messages, f"{name}{i}") == output_of(expected, f"a{i}")
    engine.core.shutdown()
    assert [engine.ended.get(timeout=60) for _ in range(tp - 1)] == [None] * (tp - 1)


def test_seeds_penalties_and_logprobs_are_those_of_one_rank(hf_model: HFModel, make_engine: MakeEngine) -> None:
    params = [
        SamplingParams(temperature=0.9, seed=7, max_tokens=12, ignore_eos=True, logprobs=2),
        SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True, prompt_logprobs=1),
        SamplingParams(temperature=1.0, seed=3, top_k=5, repetition_penalty=1.3, max_tokens=7, ignore_eos=True),
        SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logit_bias={5: 30.0}),
    ]
    one, two = (run(make_engine(hf_model("qwen3", initializer_range=0.2), tp).core, params) for tp in (1, 2))
    for i in range(len(PROMPTS)):
        assert output_of(two, f"a{i}") == output_of(one, f"a{i}")
    for a, b in zip(of_type(one, Tokens), of_type(two, Tokens), strict=True):
        assert isinstance(a, Tokens)
        assert isinstance(b, Tokens)
        prompts = [m.prompt_logprobs.decode() if m.prompt_logprobs is not None else None for m in (a, b)]
        for entries, others in ((a.logprobs, b.logprobs), prompts):
            assert (entries is None) == (others is None)
            for entry, other in zip(entries or [], others or [], strict=True):
                assert (entry is None) == (other is None)
                if entry is not None and other is not None:
                    assert other.token_id == entry.token_id
                    assert other.logprob == pytest.approx(entry.logprob, abs=1e-3)


@pytest.mark.parametrize("ahead", [0, pytest.param(1, marks=pytest.mark.slow), 2])
def test_guesses_on_every_rank_change_nothing(hf_model: HFModel, make_engine: MakeEngine, ahead: int) -> None:
    params = [SamplingParams(temperature=0.7 * (i % 2), seed=i, max_tokens=9 + i) for i in range(len(PROMPTS))]
    model = hf_model("llama", initializer_range=0.2)
    expected = run(make_engine(model, 1).core, params)
    foreseen = {tuple(prompt): output_of(expected, f"a{i}") for i, prompt in enumerate(PROMPTS)}
    proposers: list[RandomProposer] = []

    def proposer() -> RandomProposer:
        proposers.append(RandomProposer(3, lambda new: foreseen[tuple(new.prompt_token_ids)], vocab_size=200))
        return proposers[-1]

    core = make_engine(model, 2, proposer=proposer).core
    for name in ("a", "b"):  # the second time from the prefix cache, which has no wrong guess
        messages = run(core, params, name=name, ahead=ahead)
        for i in range(len(PROMPTS)):
            assert output_of(messages, f"{name}{i}") == output_of(expected, f"a{i}")
    one, other = proposers
    assert one.num_right == other.num_right > 20
    assert one.num_wrong == other.num_wrong > 10


@pytest.mark.processes  # grammars are matched in some
@pytest.mark.parametrize("ahead", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_grammars_are_the_same_on_every_rank(make_engine: MakeEngine, ahead: int) -> None:
    """Each comes once, whether its request draws greedily or not; one that is wrong ends no rank."""
    schema = StructuredOutputs(json={"type": "array", "items": {"enum": ["cat", "dog", 7]}, "maxItems": 5})
    date = StructuredOutputs(regex="(19|20)[0-9]{2}-(0[1-9]|1[0-2])")
    params = [
        with_grammar(SamplingParams(temperature=0.9 * (i % 2), seed=i, max_tokens=400, structured_outputs=shape))
        for i, shape in enumerate((schema, schema, date, None))
    ]
    wrong = msgspec.structs.replace(params[0], grammar=Grammar("text", "start: undefined"))
    expected = run(make_engine(DEFAULT_MODEL, 1, dtype="float32").core, params)
    reasons = {m.request_id: m.reason for m in of_type(expected, Finished) if isinstance(m, Finished)}
    assert [reasons[f"a{i}"] for i in range(3)] == ["stop"] * 3
    core = make_engine(DEFAULT_MODEL, 2, dtype="float32").core
    for name in ("a", "b"):
        core.handle("r", msgspec.structs.replace(submit([5], request_id=f"{name}-wrong"), params=wrong), 1.0)
        messages = run(core, params, name=name, ahead=ahead)
        assert [m.code for m in of_type(messages, Failed) if isinstance(m, Failed)] == [InvalidRequest.code]
        for i in range(len(PROMPTS)):
            assert output_of(messages, f"{name}{i}") == output_of(expected, f"a{i}")


def test_a_rank_that_draws_another_token_ends_the_engine(
    hf_model: HFModel, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its KV would differ from then on, and nobody would see it."""
    engine = make_engine(hf_model("llama", initializer_range=0.2), 2)
    choose, is_first = SamplingState.choose, threading.current_thread()

    def strange(self: SamplingState, *args: Any, **more: Any) -> NDArray[np.int64]:
        tokens = choose(self, *args, **more)
        return tokens if threading.current_thread() is is_first else tokens ^ 1

    run(engine.core)
    monkeypatch.setattr(SamplingState, "choose", strange)
    with pytest.raises(RankError, match="rank 1 drew other tokens than rank 0 in step"):
        run(engine.core, name="b")


def test_the_card_names_every_rank(tiny_model_dir: Path, make_engine: MakeEngine) -> None:
    card = make_engine(tiny_model_dir, 4).core.card
    assert card.tp == 4
    assert card.rank_blobs == [f"{rank} of 4, 4 shards".encode() for rank in range(4)]
    assert card.rank_pids == [os.getpid()] * 4
    assert (card.layout.num_kv_heads, card.layout.total_kv_heads) == (1, 2)


def test_an_engines_memory_is_shared_out(tiny_model_dir: Path, make_engine: MakeEngine) -> None:
    one, two, four = (make_engine(tiny_model_dir, tp).core.card for tp in (1, 2, 4))
    assert two.num_blocks == one.num_blocks
    assert four.num_blocks == one.num_blocks // 2  # two KV heads: each is held twice


def test_every_rank_gets_the_connectors_own_metadata_and_the_peers(
    tiny_model_dir: Path, make_engine: MakeEngine
) -> None:
    engine = make_engine(tiny_model_dir, 2)
    run(engine.core)
    assert engine.worker(0).notes[:2] == ["step 0", "step 1"]
    assert engine.worker(1).notes == engine.worker(0).notes
    peer = make_engine(tiny_model_dir, 1)
    engine.core.handle("r", Peers([engine.core.card, peer.core.card]), 1.0)
    engine.core.step(1.0)
    assert [engine.worker(rank).peers for rank in range(2)] == [["tp1"]] * 2


def test_metadata_of_another_type_than_the_connector_says_is_an_error(
    tiny_model_dir: Path, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or its fields would be lost on the other ranks, silently."""
    monkeypatch.setattr(RankWorker, "metadata_type", KVConnectorMetadata)
    engine = make_engine(tiny_model_dir, 2)
    with pytest.raises(RankError, match="metadata_type is KVConnectorMetadata, its scheduler side made Note"):
        engine.core.step(1.0)


def test_a_transfer_ends_when_every_rank_has_ended_it(tiny_model_dir: Path, make_engine: MakeEngine) -> None:
    """F20."""
    engine = make_engine(tiny_model_dir, 2)
    executor, scheduler = engine.core.executor, engine.core.scheduler
    engine.worker(1).report(TransferKey("t", 0), 5)
    assert not executor.execute(scheduler.schedule(1.0)).transfers
    engine.worker(0).report(TransferKey("t", 0), 4)
    (outcome,) = executor.execute(scheduler.schedule(1.0)).transfers.finished_sending.values()
    assert outcome.num_bytes == 9


def test_ranks_are_asked_between_two_steps_what_has_ended(tiny_model_dir: Path, make_engine: MakeEngine) -> None:
    """No step is made for that, neither for what some have ended nor for what all have."""
    engine = make_engine(tiny_model_dir, 2)
    core = engine.core
    core.step(0.0)
    notes = list(engine.worker(0).notes)
    seen = []
    for rank in (1, 0):
        engine.worker(rank).report(TransferKey("t", 0), 5)
        core.wake()
        ended = core.executor.ask_finished()
        assert not ended.transfers  # they are settled
        sent = [m for _, messages in core.take_messages(2.0 - rank) for m in messages]
        load = of_type(sent, LoadReport)[-1]
        seen.append(load.connectors[core.card.connector].saves)
        assert not core.has_work
    assert seen == [1, 2]
    assert engine.worker(0).notes == notes


def test_what_the_workers_of_all_ranks_count_is_in_the_load(tiny_model_dir: Path, make_engine: MakeEngine) -> None:
    """Summed part by part; a rank that has nothing new counts with what it said last."""
    engine = make_engine(tiny_model_dir, 2)
    seen = []
    for step, rank in enumerate((1, 0, 1)):
        engine.worker(rank).report(TransferKey(f"t{step}", 0), 5)
        engine.core.wake()
        engine.core.step(0.0)
        loads = [
            m for _, messages in engine.core.take_messages(float(step)) for m in messages if isinstance(m, LoadReport)
        ]
        name = engine.core.card.connector
        seen.append((loads[-1].connectors[name].saves, loads[-1].connectors[f"{name}/part"].loads))
    assert seen == [(1, 1), (2, 1), (3, 1)]


def test_a_report_that_is_asked_for_has_what_all_ranks_count_now(tiny_model_dir: Path, make_engine: MakeEngine) -> None:
    """Also what no transfer's end brings."""
    core = (engine := make_engine(tiny_model_dir, 2)).core
    engine.worker(0).num_reported, engine.worker(1).num_reported = 3, 4
    core.handle("r", AskReport(1), 0.0)
    InTurn(core).turn()
    (report,) = [m for _, sent in core.take_messages(0.0) for m in sent if isinstance(m, LoadReport) and m.answers]
    assert (report.answers, report.connectors[core.card.connector].saves) == (1, 7)


def test_a_rank_with_news_wakes_the_engine(tiny_model_dir: Path, make_engine: MakeEngine) -> None:
    """F19: nobody else would."""
    engine = make_engine(tiny_model_dir, 2)
    engine.worker(1).notify()
    poll = select.poll()
    poll.register(engine.wake_fd, select.POLLIN)
    assert poll.poll(10_000)


def test_what_a_rank_raises_is_the_engines_error(tiny_model_dir: Path, make_engine: MakeEngine) -> None:
    engine = make_engine(tiny_model_dir, 2)
    engine.worker(1).error = ValueError("no such lane")
    engine.core.handle("r", submit([5, 6]), 1.0)
    with pytest.raises(RankError, match="rank 1 failed: ValueError: no such lane"):
        engine.core.step(1.0)
    assert isinstance(engine.ended.get(timeout=60), ValueError)


def test_a_rank_that_hangs_is_a_timeout(tiny_model_dir: Path, make_engine: MakeEngine) -> None:
    engine = make_engine(tiny_model_dir, 2, rank_timeout_s=0.3)
    worker = engine.worker(1)
    worker.hangs = True
    engine.core.handle("r", submit([5, 6]), 1.0)
    with pytest.raises(RankTimeout):
        engine.core.step(1.0)
    worker.stopped.set()


def test_a_rank_that_hangs_in_an_empty_step_is_a_timeout(tiny_model_dir: Path, make_engine: MakeEngine) -> None:
    engine = make_engine(tiny_model_dir, 2, rank_timeout_s=0.3)
    worker = engine.worker(1)
    worker.hangs = True
    with pytest.raises(RankTimeout, match="rank 1"):
        engine.core.step(1.0)
    worker.stopped.set()


def test_the_others_end_when_rank_0_is_gone(tiny_model_dir: Path, make_engine: MakeEngine) -> None:
    engine = make_engine(tiny_model_dir, 2)
    for ours, _ in engine.pairs:
        ours.shutdown(socket.SHUT_RDWR)
    assert isinstance(engine.ended.get(timeout=60), RankGone)
    with pytest.raises(RankGone, match="rank 1"):
        engine.core.step(1.0)


def test_ranks_without_processes_are_refused(tiny_model_dir: Path) -> None:
    with pytest.raises(ConfigError, match="tp=2 needs one process per rank"):
        build_engine(EngineConfig(model=tiny_model_dir, tp=2), name="e", epoch="1")


def test_heads_that_cannot_be_divided_are_refused_by_every_rank(tiny_model_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="3 ranks"):
        Ranked(tiny_model_dir, 3, tmp_path)


def test_ranks_that_have_loaded_other_models_are_refused_with_both_identities(
    make_engine: MakeEngine, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait_to_attach = FirstRank.wait_to_attach
    monkeypatch.setattr(
        FirstRank, "wait_to_attach", lambda self, num_blocks, model: wait_to_attach(self, num_blocks, "another")
    )
    with pytest.raises(ModelError, match=r"rank 0 has loaded model [0-9a-f]{32}, but rank 1 has loaded another"):
        make_engine(tiny_model_dir, 2)


def test_the_rank_with_the_fewest_blocks_bounds_the_length_also_with_windows(
    hf_model: HFModel, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of three KV groups takes blocks of its own: fewer tokens fit than the blocks have."""
    layers = ["sliding_attention", "full_attention", "full_attention"]
    fields = {"initializer_range": 0.2, "sliding_window": 40, "layer_types": layers, "max_position_embeddings": 1024}
    model = hf_model("ministral", head_dim=16, **fields)
    wait_to_attach = FirstRank.wait_to_attach
    monkeypatch.setattr(FirstRank, "wait_to_attach", lambda self, num_blocks, model: wait_to_attach(self, 50, model))
    sizes = {"max_num_batched_tokens": 32, "max_num_seqs": 8}
    engine = make_engine(model, 2, **sizes)
    card = engine.core.card
    assert (card.num_blocks, len(card.layout.windows)) == (50, 3)
    kv = engine.core.scheduler.kv
    assert kv.num_at_once(card.max_model_len) <= 50 < kv.num_at_once(card.max_model_len + 16)
    messages = run(engine.core)
    expected = run(make_engine(model, 1, **sizes).core)
    for i in range(len(PROMPTS)):
        assert output_of(messages, f"a{i}") == output_of(expected, f"a{i}")
    with pytest.raises(ConfigError, match=r"holds \d+ tokens, but a request may have 1000 \(max_model_len\)"):
        make_engine(model, 2, **sizes, max_model_len=1000)


# --- on devices that compute behind their hosts -----------------------------------------------------------------------


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[BusyDevice]:
    """Of this process's ranks, one for all."""
    device = BusyDevice()
    monkeypatch.setattr(streams, "HOST", device)
    yield device
    device.may_end.set()


MIXED = [
    SamplingParams(temperature=0.9, seed=7, max_tokens=40, ignore_eos=True, logprobs=2, repetition_penalty=1.2),
    SamplingParams(temperature=0.0, max_tokens=50, ignore_eos=True),
    SamplingParams(temperature=1.0, seed=3, top_k=5, max_tokens=45, ignore_eos=True),
    SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True, prompt_logprobs=1),  # rank 0 alone reads some
]


def launched_ahead(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """From now on: how many steps were under way whenever rank 0 launched one."""
    found, steps = list[int](), list[PendingStep]()
    launch = MultiProcessExecutor.launch

    def counted(self: MultiProcessExecutor, plan: StepPlan) -> PendingStep:
        found.append(sum(not step.is_done for step in steps))
        steps.append(launch(self, plan))
        return steps[-1]

    monkeypatch.setattr(MultiProcessExecutor, "launch", counted)
    return found


@pytest.mark.parametrize("tp", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("processes", [False, pytest.param(True, marks=pytest.mark.processes)])
@pytest.mark.usefixtures("device")
def test_steps_launched_behind_each_other_give_the_tokens_of_one_rank(
    hf_model: HFModel, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, tp: int, processes: bool
) -> None:
    """Greedy and sampled, beside preemptions, and requests that are aborted between a launch and its end."""
    model = hf_model("llama", initializer_range=0.2)
    one = make_engine(model, 1).core
    expected = run(one, MIXED)
    pool = {"kv_cache_memory": 10 * one.card.layout.block_bytes * tp // 2}  # with two KV heads: 4 ranks hold each twice
    engine = make_engine(model, tp, processes=processes, max_num_batched_tokens=24, **pool)
    core, under_way = engine.core, launched_ahead(monkeypatch)
    for name in ("a", "b"):
        gone = msgspec.structs.replace(submit(PROMPTS[2], request_id=f"{name}-gone"), params=MIXED[2])
        core.handle("r", gone, 1.0)
        messages = run(core, MIXED, name=name, ahead=2, at_step={9: Abort(f"{name}-gone", 0)})
        for i in range(len(PROMPTS)):
            assert output_of(messages, f"{name}{i}") == output_of(expected, f"a{i}")
    assert core.scheduler.num_preemptions > 0
    assert sum(count > 0 for count in under_way) > 20


@pytest.mark.usefixtures("tiny_model_dir")
def test_a_step_reaches_all_ranks_before_the_one_before_it_is_read(
    tiny_model_dir: Path, make_engine: MakeEngine, device: BusyDevice
) -> None:
    engine = make_engine(tiny_model_dir, 2, rank_timeout_s=5.0)
    executor, scheduler, other = engine.core.executor, engine.core.scheduler, engine.worker(1)
    engine.core.handle("r", submit([5, 6], max_tokens=9), 1.0)
    device.may_end.clear()
    steps = []
    for number in range(1 + MAX_PENDING):
        steps.append(executor.launch(scheduler.schedule(1.0)))
        wait_until_true(lambda: len(other.notes) > number, "the other rank has launched it")  # noqa: B023
        other.report(TransferKey("t", number), 5)
    assert not any(step.is_done for step in steps)
    ended = executor.ask_finished(with_stats=True)  # it answers between its steps
    assert not ended.transfers
    assert [step.has_sends for step in steps] == [True] * 3  # which the other rank has found
    device.may_end.set()
    for _ in range(2):
        found = [step.finish() for step in steps]
        assert [output.step_id for output in found] == [0, 1, 2]
        told = [output.connector_stats[""].saves for output in found if output.connector_stats is not None]
        assert set(told) == {3}  # as it said last, not as when a step was launched; which step told it is the rank's
    engine.worker(1).report(TransferKey("t", 3), 5)
    assert not executor.ask_finished().transfers
    assert not executor.launch(scheduler.schedule(1.0)).finish().transfers


def go_on(core: EngineCore, steps: Ahead, orders: StepQueue, turns: int) -> None:
    for _ in range(turns):
        step_ahead(core, steps, orders)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.usefixtures("device")
def test_a_step_that_one_rank_alone_cannot_launch_ends_the_engine(
    tiny_model_dir: Path, make_engine: MakeEngine, rank: int
) -> None:
    engine = make_engine(tiny_model_dir, 2)
    steps, orders = steps_ahead(engine.core, 2)
    engine.core.handle("r", submit([5, 6], max_tokens=99), 1.0)
    go_on(engine.core, steps, orders, 5)
    assert not orders.is_done
    engine.worker(rank).error = ValueError("no such lane")
    with pytest.raises(RankError, match=f"rank {rank} failed: ValueError: no such lane"):
        go_on(engine.core, steps, orders, 9)
    if not rank:
        engine.core.shutdown()
    assert isinstance(engine.ended.get(timeout=60), ValueError if rank else RankError)


@pytest.mark.usefixtures("device")
def test_a_rank_that_hangs_behind_steps_under_way_is_a_timeout(tiny_model_dir: Path, make_engine: MakeEngine) -> None:
    engine = make_engine(tiny_model_dir, 2, rank_timeout_s=2.0)
    steps, orders = steps_ahead(engine.core, 2)
    engine.core.handle("r", submit([5, 6], max_tokens=99), 1.0)
    go_on(engine.core, steps, orders, 5)
    engine.worker(1).hangs = True
    with pytest.raises(RankTimeout):
        go_on(engine.core, steps, orders, 9)
    engine.worker(1).stopped.set()


@pytest.mark.processes
@pytest.mark.parametrize(
    ("number", "error", "timeout_s"), [(signal.SIGKILL, RankGone, 20.0), (signal.SIGSTOP, RankTimeout, 3.0)]
)
@pytest.mark.usefixtures("device")
def test_a_process_of_a_rank_that_dies_or_stands_still_under_steps_ends_the_engine(
    tiny_model_dir: Path, make_engine: MakeEngine, number: int, error: type[RankError], timeout_s: float
) -> None:
    engine = make_engine(tiny_model_dir, 2, processes=True, rank_timeout_s=timeout_s)
    (process,) = engine.threads
    assert isinstance(process, multiprocessing.process.BaseProcess)
    steps, orders = steps_ahead(engine.core, 2)
    engine.core.handle("r", submit([5, 6], max_tokens=99), 1.0)
    go_on(engine.core, steps, orders, 5)
    assert not orders.is_done
    os.kill(process.pid or 0, number)
    with pytest.raises(error):
        go_on(engine.core, steps, orders, 9)
    process.kill()


@pytest.mark.parametrize(("answer", "told"), [
    (StepDone(7, []), "rank 1 answered step 7 instead of step 1"),
    (Collected([]), "rank 1 gave an unexpected answer: Collected"),
])  # fmt: skip
@pytest.mark.usefixtures("device")
def test_a_rank_that_answers_what_it_was_not_asked_ends_the_engine(
    tiny_model_dir: Path, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, answer: Answer, told: str
) -> None:
    engine = make_engine(tiny_model_dir, 2)
    engine.core.handle("r", submit([5, 6], max_tokens=9), 1.0)
    engine.core.step(1.0)
    say = FirstRank.say
    monkeypatch.setattr(FirstRank, "say", lambda self, _: say(self, answer))
    with pytest.raises(RankError, match=told):
        engine.core.step(1.0)
