"""One rank of an engine for benchmarks: the connector's calls are timed, but not checked."""

import threading
from collections.abc import Callable
from zlib import crc32

import msgspec
import numpy as np

from pdkv.base.clock import MONOTONIC
from pdkv.connector_kit.bench.throttle import throttle
from pdkv.connector_kit.rig import protocol as p
from pdkv.connector_kit.rig.content import Values
from pdkv.connector_kit.rig.rank import HostedRank
from pdkv.connectors.base import (
    ConnectorConfig,
    KVConnectorMetadata,
    TransferKey,
    TransferOutcome,
    TransferResults,
    WorkerConnector,
)

_MATRIX = 192
_ODD = 0x3C6EF35F


class TimedRank(HostedRank):
    """A rank with different content in each block from the start; steps write nothing, and compute if asked to."""

    def __init__(self, config: ConnectorConfig, notify: Callable[[], None]) -> None:
        self._woken = threading.Event()
        self._awaiting = False
        self._ended: dict[TransferKey, float] = {}
        self._num_products = 0  # of matrices, per layer
        self._unthrottle: Callable[[], None] = lambda: None

        def wake() -> None:
            self._woken.set()
            if not self._awaiting:
                notify()

        super().__init__(config, wake)
        self.instrument(False)

    def fill_pool(self, pool: Values) -> Values:
        """Fill the pool with content that differs between blocks and engines; touches all of it."""
        words = pool.reshape(len(pool), -1)
        base = np.arange(words.shape[1], dtype=np.uint32) * np.uint32(_ODD)
        seed = crc32(f"{self._engine}/{self._rank}".encode())
        for block in range(words.shape[0]):
            words[block] = (base ^ np.uint32((seed + block * _ODD) & 0xFFFFFFFF)).view(np.int32) & 0x3FFFFFFF
        return pool[:0].copy()

    def expect(self, key: TransferKey, block_ids: list[int], wanted: p.TokenRange | None) -> None:
        """Nothing: what arrives is compared by digests."""

    def foreign_writes(self) -> list[int]:
        """None: nothing is compared."""
        return []

    def forward(self, layer_s: float) -> None:
        """Let each layer of a step that writes tokens compute for about this long; always the same work."""
        self._num_products = _products_in(layer_s) if layer_s else 0

    def throttle(self, bytes_per_s: float) -> None:
        """Limit the transport to this many bytes a second; 0: unlimited."""
        self._unthrottle()
        self._unthrottle = throttle(self._worker, bytes_per_s) if bytes_per_s else lambda: None

    def close(self) -> None:
        self._unthrottle()
        super().close()

    # --- steps ----------------------------------------------------------------------------------------------------

    def execute(self, step: p.StepPart) -> p.Executed:
        self._woken.clear()
        began = MONOTONIC.now()
        executed = super().execute(step)
        return msgspec.structs.replace(executed, began=began, ended=MONOTONIC.now())

    def _compute_layer(self, step: p.StepPart, layer: int, meta: KVConnectorMetadata) -> None:
        worker, call = self._worker, self._watch.call
        if meta.needs_layer_hooks:
            call("wait_for_layer_load", worker.wait_for_layer_load, layer)
        if self._num_products:
            _multiply(self._num_products)
        if meta.needs_layer_hooks:
            call("save_kv_layer", worker.save_kv_layer, layer, self._pool, meta)

    def _report(self, results: TransferResults) -> p.Executed:
        now = MONOTONIC.now()
        for outcomes in results:
            self._ended.update(dict.fromkeys(outcomes, now))
        return p.Executed(results, [])

    def await_ends(self, keys: list[TransferKey], timeout_s: float) -> p.Executed:
        """Collect results until all of `keys` are among them; `ended` is when the last of them was."""
        worker: WorkerConnector = self._worker
        deadline = MONOTONIC.now() + timeout_s
        reports: tuple[dict[TransferKey, TransferOutcome], ...] = ({}, {}, {}, {})
        self._awaiting = True
        try:
            while True:
                self._woken.clear()
                report = self._report(self._watch.call("get_finished", worker.get_finished)).results
                for outcomes, more in zip(reports, report, strict=True):
                    outcomes.update(more)
                if all(key in self._ended for key in keys) or MONOTONIC.now() >= deadline:
                    break
                pending = self._scheduler is not None and self._scheduler.has_pending_work
                MONOTONIC.wait(self._woken, 0.0 if pending else min(deadline, MONOTONIC.now() + 0.5))
        finally:
            self._awaiting = False
        ended = [self._ended[key] for key in keys if key in self._ended]
        return p.Executed(TransferResults(*reports), [], ended=max(ended) if len(ended) == len(keys) else 0.0)

    def digest(self, tokens: p.TokenRange) -> list[int]:
        """A number for the content of each KV head at the tokens' places, for comparisons between engines."""
        blocks, offsets, _ = self._places(tokens, 0)
        content = self._view[blocks, offsets]
        return [crc32(np.ascontiguousarray(content[:, :, :, head]).data) for head in range(content.shape[3])]


def _multiply(count: int) -> None:
    import torch

    a = torch.ones(_MATRIX, _MATRIX)
    out = torch.empty(_MATRIX, _MATRIX)
    for _ in range(count):
        torch.mm(a, a, out=out)


def _products_in(seconds: float) -> int:
    """The number of products that take this long on an idle core."""
    best = float("inf")
    _multiply(10)
    for _ in range(5):
        start = MONOTONIC.now()
        _multiply(20)
        best = min(best, (MONOTONIC.now() - start) / 20)
    return max(1, round(seconds / best))
