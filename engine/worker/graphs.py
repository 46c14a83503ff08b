"""Steps in which every request computes one token, padded to a few sizes, each captured as one CUDA graph.

Launching a decode step's kernels one by one takes a host longer than a GPU needs to run them. A graph launches them all
at once, with the arguments that they had when it was captured: so shapes depend on the padded size alone, and
everything else that differs between two steps lies in buffers at fixed addresses (step_buffers.py). Logits are computed
after the graph, by two kernels: at 512 rows and a large vocabulary they would fill a quarter of a GiB that must not be
overwritten before the sampler has read it.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from pdkv.engine.worker.attention.backend import AttentionBackend, ModelInputs
from pdkv.engine.worker.batch import IntArray, StepInputs
from pdkv.models.decoder import Decoder

logger = logging.getLogger(__name__)

_LARGEST = 512
_SIZES = (1, 2, 4, *range(8, _LARGEST, 8))

Replay = Callable[[], None]
"""Queues the captured work on the current stream."""


def decode_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """Padded sizes of decode steps, ascending; larger steps are not padded."""
    largest = min(max_num_seqs, _LARGEST)
    return (*(size for size in _SIZES if size < largest), largest)


class Recorder(Protocol):
    """Captures the work that functions queue on a device."""

    def capture(self, run: Callable[[], None]) -> Replay:
        """Capture `run`, which is called twice: it must queue the same work both times, and not wait."""
        ...


class CudaRecorder:
    """Captures CUDA graphs on a stream of its own. They share their memory, so only one of them may run at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, run: Callable[[], None]) -> Replay:
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            run()  # kernels are compiled and loaded, which is not allowed during a capture
        current.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads of the engine may use CUDA meanwhile: only this thread's calls may break the capture.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            run()
        return graph.replay


def make_recorder(device: torch.device, *, enforce_eager: bool, num_ranks: int) -> Recorder | None:
    """A recorder; None if steps are not captured: on a CPU, on request, or with ranks that talk to one another: torch
    limits how long a collective may wait, but not within a graph, where a lost rank would block the others
    indefinitely.
    """
    if device.type != "cuda":
        return None
    if enforce_eager or num_ranks > 1:
        why = "enforce_eager" if enforce_eager else "waits of ranks for each other have no deadline in a graph"
        logger.info("decode steps are not captured as CUDA graphs: %s", why)
        return None
    return CudaRecorder(device)


class DecodeSteps:
    """Computes steps of one token per request, padded to one of `sizes`, from graphs once they are captured."""

    def __init__(self, model: Decoder, attention: AttentionBackend, sizes: Sequence[int]) -> None:
        """`attention` pads decodes; `sizes` ascend."""
        self._model = model
        self._attention = attention
        self._sizes = sizes
        self._replays: dict[int, Replay] = {}
        shape = (sizes[-1], model.config.hidden_size)
        self._hidden = torch.empty(shape, dtype=model.dtype, device=model.device)

    def size_for(self, inputs: StepInputs, rows: IntArray) -> int | None:
        """The padded size of a step in which every request computes one token and needs its hidden state (`rows`).
        None: it is another kind of step, or larger than all sizes.
        """
        num_tokens = len(inputs.positions)
        if not num_tokens == len(inputs.slots) == len(rows):
            return None
        return next((size for size in self._sizes if size >= num_tokens), None)

    def compute(self, step: ModelInputs) -> torch.Tensor:
        """Normalised hidden states (size, hidden) of the step that `attention` has prepared at that size.

        The next step overwrites them, so work queued later must not read them.
        """
        size = len(step.token_ids)
        replay = self._replays.get(size)
        if replay is None:
            self._run(step)
        else:
            replay()
        return self._hidden[:size]

    def warm_up(self, block_tables: IntArray, recorder: Recorder | None) -> None:
        """Run every size without requests, which touches no KV, and capture it if there is a recorder.

        The largest comes first, so that the others can use its memory.
        """
        for size in reversed(self._sizes):
            nobody = StepInputs.of_nobody(len(block_tables))
            step = self._attention.prepare(nobody, block_tables, None, size=size)
            if recorder is None:
                self._run(step)
            else:
                self._replays[size] = recorder.capture(lambda step=step: self._run(step))  # type: ignore[misc]

    def _run(self, step: ModelInputs) -> None:
        hidden = self._model.forward(step.token_ids, step.positions, self._attention.attend, None)
        self._hidden[: len(hidden)].copy_(hidden)
