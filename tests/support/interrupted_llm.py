"""A program that interrupts its own LLM by SIGINT at stated points, and says what came of it; tests run it.

    python interrupted_llm.py MODEL

Each point is in the midst of something: blocks taken and no step run, a step run and not taken in, a message half sent.
"""

import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

from pdkv import LLM, SamplingParams

PROMPTS = [list(range(5, 25)), list(range(30, 60)), list(range(40, 45))]
PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
LOOPS: dict[str, dict[str, Any]] = {
    "in turn, by the length of steps": {"in_turn_below_s": 60.0},
    "ahead": {"in_turn_below_s": 0.0},
    "strictly in turn": {"max_steps_ahead": 0},
}


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def interrupting(owner: Any, name: str, at_call: int) -> Callable[[], None]:
    """Interrupt in that call of a method, before it and again after it. Returns what undoes this."""
    method, calls = getattr(owner, name), [0]

    def called(*args: Any) -> Any:
        calls[0] += 1
        if calls[0] == at_call:
            interrupt()
        result = method(*args)
        if calls[0] == at_call:
            interrupt()
        return result

    setattr(owner, name, called)
    return lambda: setattr(owner, name, method)


def outputs(llm: LLM) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, PARAMS, use_tqdm=False)]


def generate(llm: LLM) -> str:
    """Who ended it."""
    try:
        outputs(llm)
    except BaseException as error:
        return type(error).__name__
    return "itself"


def is_at_rest(llm: LLM) -> bool:
    core = llm._engine.core
    counts = core.scheduler.kv.pool.counts()
    core.scheduler.kv.pool.check_integrity()
    return counts.free + counts.cached == counts.total and not core.requests


def points(llm: LLM) -> dict[str, bool]:
    """By point: whether the interrupt arrived, and the next generation was whole and left nothing."""
    expected, found = outputs(llm), {}
    core = llm._engine.core
    for name in ("handle_guarded", "plan_step", "finish_step", "take_messages"):
        for at_call in (1, 2, 3) if name == "handle_guarded" else (1, 2, 3, 5):
            undo = interrupting(core, name, at_call)
            was_interrupted = generate(llm) == "KeyboardInterrupt"
            undo()
            found[f"{name} {at_call}"] = was_interrupted and outputs(llm) == expected and is_at_rest(llm)
    return found


def own_handlers(llm: LLM) -> list[str]:
    """Of a handler that returns, one that raises, one that goes back to Python's, none, and Python's."""
    heard, said = list[int](), list[str]()

    def note(signum: int, frame: object) -> None:
        heard.append(signum)

    def refuse(signum: int, frame: object) -> None:
        raise TimeoutError

    def replace(signum: int, frame: object) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)

    for handler in (note, refuse, replace, signal.SIG_IGN, signal.default_int_handler):
        signal.signal(signal.SIGINT, handler)
        undo = interrupting(llm._engine.core, "plan_step", 2)
        said.append(generate(llm))
        undo()
        kept = signal.getsignal(signal.SIGINT)
        said[-1] += "" if kept in (handler, signal.default_int_handler) else ", and lost the handler"
    return [*said, f"heard {len(heard)}"]


def elsewhere(llm: LLM) -> bool:
    """Whether a thread that generates leaves the main thread its Ctrl-C."""
    handlers, done = [], []
    core = llm._engine.core
    plan_step = core.plan_step
    core.plan_step = lambda now: handlers.append(signal.getsignal(signal.SIGINT)) or plan_step(now)  # type: ignore
    thread = threading.Thread(target=lambda: done.append(generate(llm)))
    thread.start()
    thread.join()
    core.plan_step = plan_step  # type: ignore[method-assign]
    return done == ["itself"] and {*handlers} == {signal.default_int_handler}


def long_step(llm: LLM) -> bool:
    """Whether Ctrl-C ends the wait for a step that does not end, which the next generation then waits for."""
    expected, may_end = outputs(llm), threading.Event()
    executor = llm._engine.core.executor
    launch = executor.launch

    def hang(plan: Any) -> Any:
        interrupt()
        assert may_end.wait(120.0)
        return launch(plan)

    executor.launch = hang  # type: ignore[method-assign]
    ended_by = generate(llm)
    executor.launch = launch  # type: ignore[method-assign]
    may_end.set()
    return ended_by == "KeyboardInterrupt" and outputs(llm) == expected and is_at_rest(llm)


def main() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # whatever started this may ignore it
    found: dict[str, Any] = {}
    for name, loop in LOOPS.items():
        with LLM(sys.argv[1], kv_cache_memory=8 << 20, threads=1, device="cpu", **loop) as llm:
            found[name] = points(llm)
            if name == "ahead":
                found["long step"] = long_step(llm)
                found["own handlers"] = own_handlers(llm)
                found["elsewhere"] = elsewhere(llm)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
