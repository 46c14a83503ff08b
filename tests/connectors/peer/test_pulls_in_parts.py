"""A prompt's chunks are read while the next ones are computed, by real engines over each pull: order and tokens."""

from pathlib import Path
from typing import Any

import pytest

from pdkv.connectors.peer.pull_worker import PullWorker
from pdkv.engine.worker.runner import ModelRunner
from pdkv.testing.engine import SideBySide, of_type, output_of, submit
from pdkv.wire.kv import KVHandoff
from pdkv.wire.messages import Continue, Finished, HandedOff, Release

PROMPT = [5 + i * 7 % 200 for i in range(150)]  # chunks of 64, 64 and 22 tokens


@pytest.mark.parametrize("connector", ["shared_memory", "nixl"])
def test_a_chunk_is_read_during_the_step_that_computes_the_next_one(
    connector: str, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log: list[Any] = []
    run_job, compute = PullWorker.run_job, ModelRunner._compute

    def logged(worker: Any, job: Any, scratch: Any) -> int | None:
        done = run_job(worker, job, scratch)
        log.append((job.order.load.start, job.order.load.stop))
        return done

    monkeypatch.setattr(PullWorker, "run_job", logged)
    with SideBySide.of_model(tiny_model_dir, connector, max_num_batched_tokens=64) as engines:
        prefill, decode = engines.prefill, engines.decode
        prefill.beside = decode.beside = None
        parts: list[KVHandoff] = []

        def computed(runner: ModelRunner, scheduled: Any, attend: Any) -> Any:
            """In the middle of a step, the test is the router: it passes on what is there, and waits for its read."""
            for part in of_type(prefill.sent, KVHandoff)[len(parts) :]:
                decode.tell(part if parts else submit(PROMPT, kv="await_peer", handoff=part))
                decode.run_until(lambda stop=part.num_tokens: log[-1] == (stop - 64, stop))  # type: ignore[misc]
                parts.append(part)
            log.append(sum(each.num_scheduled for each in scheduled))
            return compute(runner, scheduled, attend)

        monkeypatch.setattr(ModelRunner, "_compute", computed)
        sent = prefill.tell_until(HandedOff, submit(PROMPT, until="first_token", kv="handoff"))
        monkeypatch.setattr(ModelRunner, "_compute", compute)
        assert log == [64, (0, 64), 64, (64, 128), 22]
        first = output_of(sent, "a")
        decode.tell(Continue("a", 0, first), of_type(sent, HandedOff)[0].handoff)
        prefill.run()
        decode.run_until(lambda: bool(of_type(decode.sent, Finished)))
        assert log[5:] == [(128, 150)]  # all that is left
        (finished,) = of_type(decode.sent, Finished)
        assert (finished.sources.remote, finished.sources.recomputed) == (150, 0)
        prefill.tell(Release("t-a", 0))
        prefill.rest()
        decode.rest()
        assert [first + output_of(decode.sent, "a")] == prefill.generate([PROMPT])


@pytest.mark.parametrize("connector", ["shared_memory", "nixl"])
def test_the_digests_of_a_chunk_are_made_before_the_step_behind_it_however_far_ahead_steps_are_planned(
    connector: str, tiny_model_dir: Path
) -> None:
    """A reader has a thread wait for them, which then reads for nobody else."""
    with SideBySide.of_model(tiny_model_dir, connector, max_num_batched_tokens=64) as engines:
        core = engines.prefill.core
        core.handle("r", submit(PROMPT, until="first_token", kv="handoff"), 0.0)
        plans = [core.plan_step(0.0) for _ in range(3)]
        orders: list[Any] = [[] if plan.kv_meta is None else plan.kv_meta.digests for plan in plans]  # type: ignore[attr-defined]
        blocks = list(core.requests["a", 0].block_tables[0])
        assert [[(list(o.block_ids), o.start, o.stop) for o in of_plan] for of_plan in orders] == [
            [], [(blocks[:4], 0, 64)], [(blocks[4:8], 0, 64)],
        ]  # fmt: skip
        for plan in plans:
            core.finish_step(core.executor.execute(plan), 0.0)
        assert of_type(engines.prefill.run(), HandedOff)
        engines.prefill.tell(Release("t-a", 0))
        engines.prefill.rest()
