"""Ctrl-C, and steps that fail: an LLM's next call works, or says why it cannot; nothing hangs and nothing leaks."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import warm

from pdkv import LLM, SamplingParams
from pdkv.errors import EngineUnavailable

PROGRAM = Path(__file__).parents[1] / "support" / "interrupted_llm.py"
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def interrupted(model: Path) -> dict[str, Any]:
    """What the program says, which is killed if it hangs."""
    done = warm.run([*warm.PYTHON, str(PROGRAM), str(model)])
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("loop", ["in turn, by the length of steps", "ahead", "strictly in turn"])
def test_an_interrupt_at_any_point_ends_the_requests_and_the_next_generation_is_whole(
    interrupted: dict[str, Any], loop: str
) -> None:
    """F72."""
    assert [point for point, is_sound in interrupted[loop].items() if not is_sound] == []
    assert len(interrupted[loop]) == 15


def test_an_interrupt_does_not_wait_for_a_long_step(interrupted: dict[str, Any]) -> None:
    assert interrupted["long step"]


def test_a_callers_own_handler_is_called_between_steps_and_stays(interrupted: dict[str, Any]) -> None:
    assert interrupted["own handlers"] == ["itself", "TimeoutError", "itself", "itself", "KeyboardInterrupt", "heard 1"]


def test_in_another_thread_the_main_thread_keeps_its_interrupts(interrupted: dict[str, Any]) -> None:
    assert interrupted["elsewhere"]


@pytest.mark.parametrize("loop", [{"in_turn_below_s": 60.0}, {"in_turn_below_s": 0.0}, {"max_steps_ahead": 0}])
def test_after_a_step_that_failed_every_call_says_so(model: Path, loop: dict[str, Any]) -> None:
    with LLM(model, kv_cache_memory=8 << 20, threads=1, device="cpu", **loop) as llm:
        executor = llm._engine.core.executor
        name = "execute" if "max_steps_ahead" in loop or loop["in_turn_below_s"] else "launch"

        def fail(plan: object) -> None:
            raise MemoryError("no more")

        setattr(executor, name, fail)
        with pytest.raises(MemoryError, match="no more"):
            llm.generate("hello", GREEDY, use_tqdm=False)
        delattr(executor, name)
        for _ in range(2):
            with pytest.raises(EngineUnavailable, match="the engine failed: MemoryError: no more"):
                llm.generate("hello", GREEDY, use_tqdm=False)
        with pytest.raises(EngineUnavailable, match="no more"):
            llm.set_peers([])


def test_after_its_end_an_llm_says_so(model: Path) -> None:
    with LLM(model, kv_cache_memory=8 << 20, threads=1, device="cpu") as llm:
        pass
    with pytest.raises(EngineUnavailable, match="was closed"):
        llm.generate("hello", GREEDY, use_tqdm=False)


def test_a_forked_process_does_not_wait_for_the_threads_that_it_lacks(model: Path) -> None:
    with LLM(model, kv_cache_memory=8 << 20, threads=1, device="cpu", in_turn_below_s=0.0) as llm:
        llm.generate("hello", GREEDY, use_tqdm=False)
        child = os.fork()
        if child == 0:
            code = 1
            try:
                llm.generate("hello", GREEDY, use_tqdm=False)
            except EngineUnavailable as error:
                code = 0 if "belongs to the parent process of this fork" in str(error) else 2
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert llm.generate("hello", GREEDY, use_tqdm=False)
