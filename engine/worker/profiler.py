"""A trace of some steps of this process by torch.profiler, asked for while it runs (docs/observability.md#profiles).

While none is asked for, a step costs one comparison more, and a `span` one.
"""

import contextlib
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

from pdkv.base.clock import MONOTONIC, Clock
from pdkv.engine.plan import StepPlan
from pdkv.wire.profiles import MAX_PROFILE_BYTES, Profile, Profiled

T = TypeVar("T")
logger = logging.getLogger(__name__)

_NOTHING = contextlib.nullcontext()
_is_on = False  # a trace is under way in this process


class _Asked(NamedTuple):
    router_id: str
    order: Profile
    deadline: float


def span(name: str) -> AbstractContextManager[Any]:
    """A range of the trace, if there is one now; on CUDA one of NVTX, too."""
    return _range(name) if _is_on else _NOTHING


@contextlib.contextmanager
def _range(name: str) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.profiler.record_function(name))
        if torch.cuda.is_available():
            stack.enter_context(torch.cuda.nvtx.range(name))
        yield


def _all_threads() -> Any:
    """The configuration with which steps are traced on whichever thread they run; torch before 2.8 has none."""
    try:
        return torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    except TypeError:
        return None


class StepProfiler:
    """Traces the steps that follow an order. `begin`, `take` and `deadline` are the loop's, `run` is the thread's that
    runs steps.
    """

    def __init__(self, clock: Clock = MONOTONIC) -> None:
        self.directory: Path | None = None  # where traces are written; None: none can be asked for
        self.name = ""  # of the file
        self._clock = clock
        self._asked: _Asked | None = None
        self._told: tuple[str, Profiled] | None = None
        self._profile: torch.profiler.profile | None = None
        self._num_steps = 0

    def begin(self, router_id: str, order: Profile, now: float) -> Profiled | None:
        """Trace from the next step on. Returns an answer if that is not possible."""
        if self.directory is None:
            return order.failed("not_supported", "this engine has no directory for a profile")
        if self._asked is not None:
            return order.failed("conflict", f"{self.name} is being profiled already: try again when that has ended")
        self._asked = _Asked(router_id, order, now + order.seconds)
        return None

    @property
    def deadline(self) -> float | None:
        """When a step must come for the trace to end, even an empty one."""
        return None if self._asked is None else self._asked.deadline

    def take(self) -> tuple[str, Profiled] | None:
        """The router that asked, and what came of it, once."""
        told, self._told = self._told, None
        return told

    def run(self, plan: StepPlan, launch: Callable[[StepPlan], T]) -> T:
        """Launch a step, as a part of the trace if one is asked for."""
        if self._asked is None:
            return launch(plan)
        return self._traced(plan, launch, self._asked)

    def _traced(self, plan: StepPlan, launch: Callable[[StepPlan], T], asked: _Asked) -> T:
        if self._profile is None and (problem := self._start()):
            self._end(asked, asked.order.failed("request_failed", problem))
            return launch(plan)
        try:
            with span(f"pdkv.step {plan.step_id}"):
                launched = launch(plan)
            self._num_steps += bool(plan.scheduled)
        except BaseException:
            self._end(asked, asked.order.failed("request_failed", "a step failed meanwhile"))
            raise
        if self._num_steps >= asked.order.steps or self._clock.now() >= asked.deadline:
            self._end(asked, self._write(asked.order))
        return launched

    def _start(self) -> str:
        """Begin the trace. Returns what is wrong, such as another one in this process."""
        global _is_on
        self._profile, self._num_steps = torch.profiler.profile(experimental_config=_all_threads()), 0
        try:
            self._profile.start()
        except RuntimeError as error:
            return f"torch cannot begin a trace: {error}"[:500]
        _is_on = True
        return ""

    def _write(self, order: Profile) -> Profiled:
        """End the trace, and write it."""
        profile, directory = self._profile, self.directory
        assert profile is not None
        assert directory is not None
        path = directory / f"profile-{self.name}.json"
        new = path.with_suffix(".new")
        try:
            profile.stop()
            profile.export_chrome_trace(str(new))
            size = new.stat().st_size
            if size > MAX_PROFILE_BYTES:
                text = f"the trace of {self._num_steps} steps has {size} bytes, at most {MAX_PROFILE_BYTES} are kept"
                return order.failed("too_large", f"{text}: ask for fewer steps")
            new.replace(path)
            return Profiled(order.order_id, file=path.name, num_bytes=size, steps=self._num_steps)
        except (OSError, RuntimeError) as error:
            return order.failed("request_failed", f"the trace cannot be written: {error}"[:500])
        finally:
            with contextlib.suppress(OSError):
                new.unlink()

    def _end(self, asked: _Asked, told: Profiled) -> None:
        global _is_on
        _is_on, self._profile = False, None
        self._told = asked.router_id, told
        self._asked = None
        logger.info("profile: %s", told.problem or f"{told.steps} steps in {told.file}, {told.num_bytes} bytes")
