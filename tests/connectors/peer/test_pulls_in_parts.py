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
