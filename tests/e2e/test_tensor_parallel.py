"""Engines of several ranks as processes: right tokens, one life for all ranks, and nothing left behind."""

import os
import random
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from deployments import Launch, Running
from equality import (
    AMPLE_POOL_BLOCKS,
    CHUNKED,
    NUM_OUTPUT,
    PREEMPTING,
    Workload,
    check_undisturbed,
    deployed,
    greedy_workload,
    run_all,
    run_until_preempted,
)
from oracle import Expected, greedy, oracle
from quantized_models import dequantized
from serving_checks import serve_directory
from small_models import FEATURES
from traffic import stop_process, wait_until_true

TWO_RANKS = ("--prefill", "0", "--decode", "1", "--tp", "2")
PROMPT = "Say it once more. " * 4


@pytest.fixture(scope="module")
def workload(hf_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Workload:
    """Of Phi-3: its weights are fused, and each rank takes its rows of each part; with a window and partial rotary."""
    return greedy_workload(hf_model("phi3", initializer_range=0.2, **FEATURES["phi3"]), tmp_path_factory.mktemp("phi3"))


@pytest.mark.parametrize("tp", [pytest.param("2", marks=pytest.mark.slow), "4"])
def test_an_aggregated_engine_gives_the_tokens_of_one_rank(workload: Workload, tp: str) -> None:
    """With 4 ranks and two KV heads each head is held twice, so that it takes twice the memory."""
    memory = str(2 * AMPLE_POOL_BLOCKS * workload.block_bytes)
    flags = ("--prefill", "0", "--decode", "1", "--decode-tp", tp, "--decode-kv-cache-memory", memory)
    with deployed(workload, *flags, *CHUNKED) as deployment:
        (engine,) = deployment.get("/topology").json()["engines"]
        assert len(set(engine["ranks"])) == int(tp)
        assert engine["pid"] == engine["ranks"][0]
        for asked in (workload, replace(workload, expected=workload.expected[-15:])):  # these are cached
            check_undisturbed(run_all(deployment, asked))


def test_a_hand_off_between_engines_of_unequal_ranks(workload: Workload) -> None:
    """F20: decode computes no prompt token, whatever ranks hold the heads; blocks come short on both sides, too."""
    flags = ("--prefill", "1", "--decode", "1", "--prefill-tp", "2", "--decode-tp", "1")
    with deployed(workload, *flags, *PREEMPTING) as deployment:
        run_until_preempted(deployment, workload)


def test_int8_weights_are_the_same_on_any_number_of_ranks(hf_model: Callable[..., Path], tmp_path: Path) -> None:
    """1P1D, with one rank and two, gives the tokens of the weights that the 8 bits stand for."""
    origin = hf_model("llama", initializer_range=0.2)
    model, rng = oracle(dequantized(origin, tmp_path / "dense")), random.Random(0)
    prompts = [rng.choices(range(2, model.vocab_size), k=length) for length in (257, 129, 100, 64, 33, 16, 15, 1)]
    outputs = model.generate_all(prompts, NUM_OUTPUT, [greedy] * len(prompts))
    expected = [Expected(prompt, output) for prompt, output in zip(prompts, outputs, strict=True) if output is not None]
    assert len(expected) > 4
    workload = Workload(serve_directory(origin, tmp_path / "served"), expected)
    flags = ("--prefill", "1", "--decode", "1", "--prefill-tp", "2", "--decode-tp", "1", "--quantization", "int8")
    with deployed(workload, *flags) as deployment:
        check_undisturbed(run_all(deployment, workload))


@pytest.fixture(scope="module")
def deployment(module_launch: Launch) -> Running:
    """Its engine is killed again and again."""
    return module_launch(*TWO_RANKS, "--rank-timeout-s", "5")


def ranks_of(deployment: Running) -> list[int]:
    (engine,) = deployment.get("/topology").json()["engines"]
    return list(engine["ranks"])


def is_gone(pid: int) -> bool:
    """Whether a process has ended, be it that nobody has waited for it yet."""
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def answer(deployment: Running) -> list[int]:
    reply = deployment.complete(PROMPT, max_tokens=12, ignore_eos=True, return_token_ids=True)
    assert reply.status_code == 200, reply.text
    token_ids: list[int] = reply.json()["choices"][0]["token_ids"]
    return token_ids


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_ends_the_engine_which_comes_back(deployment: Running, rank: int) -> None:
    """F5, F24: a new incarnation of all ranks, and no process of the one before."""
    expected, before = answer(deployment), ranks_of(deployment)
    again = "launcher: engine-0 is ready again"
    num_before = deployment.log.count(again)
    os.kill(before[rank], signal.SIGKILL)
    deployment.wait_for_line(rf"router: engine-0 is ready \(pid (?!{before[0]}\b)")
    wait_until_true(lambda: deployment.log.count(again) > num_before, again)  # before or after the router's line
    after = ranks_of(deployment)
    assert not set(before) & set(after)
    assert all(is_gone(pid) for pid in before)
    assert answer(deployment) == expected


def test_a_rank_that_is_stopped_ends_the_engine_at_its_deadline(deployment: Running) -> None:
    expected, before = answer(deployment), ranks_of(deployment)
    stop_process(before[1])
    reply = deployment.complete(PROMPT, max_tokens=12)
    assert reply.status_code in (200, 503), reply.text  # the next incarnation answers it, or it failed clearly
    deployment.wait_for_line(r"engine-0: the engine stops: .*(Timed out|in time)")
    deployment.wait_for_line(rf"router: engine-0 is ready \(pid (?!{before[0]}\b)")
    assert not set(before) & set(ranks_of(deployment))
    assert answer(deployment) == expected


def test_a_stop_ends_all_ranks_without_a_complaint(launch: Launch) -> None:
    """Ranks that were started one by one, without a fork server."""
    deployment = launch(*TWO_RANKS, "--start-method", "spawn")
    assert len(answer(deployment)) == 12
    assert deployment.stop() == 0
    complaints = [line for line in deployment.lines if "ERROR" in line or "WARNING" in line]
    assert not [line for line in complaints if "is a suspect" not in line], deployment.log  # as one that is starved


def test_a_killed_launcher_leaves_no_rank_whose_rank_0_is_stopped(deployment: Running) -> None:
    """F24: the other rank waits for rank 0's orders, and does not wait for ever. It is the deployment's end."""
    first, second = ranks_of(deployment)
    other = psutil.Process(second)
    stop_process(first)
    deployment.process.kill()
    psutil.wait_procs([other], timeout=60)
    assert is_gone(second)
    assert deployment.finish(killed=True) == -signal.SIGKILL
