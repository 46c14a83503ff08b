"""A real engine in this process, stepped by its caller as an engine's own loop would."""

import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from engines import output_of, submit

from pdkv.build_engine import build_engine
from pdkv.config import EngineConfig, HandoffConfig
from pdkv.wire.messages import EngineToRouter, Failed

_WAIT_S = 120.0


class SteppedEngine:
    """One model, one connector."""

    def __init__(self, name: str, model: Path, connector: str, options: Mapping[str, str], **fields: Any) -> None:
        """`fields`: of EngineConfig."""
        self._woken = threading.Event()
        self._num_runs = 0
        self.name = name
        config = EngineConfig(
            **{"model": model, "device": "cpu", "kv_cache_memory": 16 << 20, "threads": 1, "max_num_seqs": 8, **fields}
        )
        handoff = HandoffConfig(connector=connector, connector_config=options)
        self.core = build_engine(config, handoff, name=name, epoch="1", notify=self._woken.set)
        self.core.router_joined("r", "1")

    @property
    def num_damaged(self) -> int:
        """Stored values that it took for none, as /metrics has it."""
        return self.core.external.num_damaged

    def run(self, prompts: Sequence[list[int]], *, max_tokens: int = 4) -> list[list[int]]:
        """Greedy outputs of prompts that run together; returns when what they save is saved."""
        self._num_runs += 1
        ids = [f"{self._num_runs}-{index}" for index in range(len(prompts))]
        for request_id, prompt in zip(ids, prompts, strict=True):
            self.core.handle("r", submit(prompt, request_id=request_id, max_tokens=max_tokens), time.monotonic())
        messages: list[EngineToRouter] = []
        bound = time.monotonic() + _WAIT_S
        while self.core.requests or not self.core.external.is_idle:
            self._step()
            assert time.monotonic() < bound, f"{self.name} does not come to rest"
            for _, sent in self.core.take_messages(time.monotonic()):
                messages += sent
        assert not [message for message in messages if isinstance(message, Failed)]
        self.core.scheduler.kv.pool.check_integrity()
        return [output_of(messages, request_id) for request_id in ids]

    def _step(self) -> None:
        if not self.core.has_work:
            deadline = self.core.next_deadline()
            self._woken.wait(None if deadline is None else max(deadline - time.monotonic(), 0.0))
        if self._woken.is_set():
            self._woken.clear()
            self.core.wake()
        self.core.step(time.monotonic())

    def close(self) -> None:
        """Idempotent."""
        self.core.shutdown()
