"""Traces of steps: what is in them, and that one which fails costs no step."""

import json
from pathlib import Path

import pytest

from pdkv.engine.plan import StepOutput, StepPlan
from pdkv.engine.worker import profiler as module
from pdkv.engine.worker.profiler import StepProfiler, span
from pdkv.testing import VirtualClock
from pdkv.wire.profiles import Profile, Profiled
from tests.engine.worker.step_driver import StepDriver

ORDER = Profile(order_id="o", steps=3, seconds=5.0)


class Rig:
    """A runner whose steps go through a profiler."""

    def __init__(self, model: Path, directory: Path | None) -> None:
        self.clock = VirtualClock()
        self.profiler = StepProfiler(self.clock)
        self.profiler.directory, self.profiler.name = directory, "decode-0"
        self.driver = StepDriver(model)
        self.driver.runner.execute = self.execute  # type: ignore[method-assign]
        self.key = self.driver.add("r", [1, 2, 3] * 30)

    def execute(self, plan: StepPlan) -> StepOutput:
        return self.profiler.run(plan, self.driver.runner.launch).finish()

    def begin(self) -> Profiled | None:
        return self.profiler.begin("router", ORDER, self.clock.now())

    def steps(self) -> Profiled:
        """A prompt's step and those of some tokens; what came of the order."""
        for num_tokens in (90, 1, 1, 1):
            self.driver.step({self.key: num_tokens})
        told = self.profiler.take()
        assert told is not None
        assert (told[0], self.profiler.take(), self.profiler.deadline) == ("router", None, None)
        return told[1]


def test_a_trace_has_a_range_for_each_step_and_what_it_did(tiny_model_dir: Path, tmp_path: Path) -> None:
    rig = Rig(tiny_model_dir, tmp_path)
    off = span("a")
    assert rig.begin() is None
    again = rig.begin()
    assert again is not None
    assert (again.code, "already" in again.problem) == ("conflict", True)
    told = rig.steps()
    assert (told.file, told.steps, told.problem) == ("profile-decode-0.json", 3, "")
    assert [path.name for path in tmp_path.iterdir()] == [told.file]
    text = (tmp_path / told.file).read_text()
    assert told.num_bytes == len(text)
    names = [event.get("name") for event in json.loads(text)["traceEvents"] if event.get("cat") == "user_annotation"]
    assert [name for name in names if name.startswith("pdkv.step")] == ["pdkv.step 0", "pdkv.step 1", "pdkv.step 2"]
    assert (names.count("pdkv.prefill"), names.count("pdkv.decode")) == (1, 2)
    assert "pdkv.transfer" in names
    assert span("a") is off  # one object: nothing is made while none is asked for


@pytest.mark.parametrize(
    ("fault", "problem"),
    [("no directory", "has no directory"), ("a file in its place", "cannot be written"), ("too large", "fewer steps")],
)
def test_a_trace_that_cannot_be_kept_costs_no_step(
    tiny_model_dir: Path, tmp_path: Path, fault: str, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory: Path | None = tmp_path
    if fault == "no directory":
        directory = None
    elif fault == "a file in its place":
        directory = tmp_path / "file"
        directory.write_text("")
    else:
        monkeypatch.setattr(module, "MAX_PROFILE_BYTES", 10)
    rig = Rig(tiny_model_dir, directory)
    told = rig.begin() or rig.steps()
    assert problem in told.problem
    assert [path.name for path in tmp_path.glob("profile*")] == []


def test_an_engine_without_requests_ends_its_trace_with_the_time(tiny_model_dir: Path, tmp_path: Path) -> None:
    rig = Rig(tiny_model_dir, tmp_path)
    rig.begin()
    assert rig.profiler.deadline == rig.clock.now() + ORDER.seconds
    rig.clock.advance(ORDER.seconds)
    rig.driver.step({})
    told = rig.profiler.take()
    assert told is not None
    assert (told[1].steps, told[1].problem) == (0, "")
