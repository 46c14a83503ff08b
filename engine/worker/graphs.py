"""Steps padded to a few sizes, each captured as one CUDA graph: those in which every request computes one token, and
those with prompts of up to 2,048 tokens, between whose layers nothing runs.

Launching a step's kernels one by one may take a host longer than a GPU needs to run them. A graph launches them all
at once, with the arguments that they had when it was captured: so shapes depend on the padded size alone, and
everything else that differs between two steps lies in buffers at fixed addresses (step_buffers.py). Logits are computed
after the graph, by two kernels: at 512 rows and a large vocabulary they would fill a quarter of a GiB that must not be
overwritten before the sampler has read it.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch

from pdkv.engine.worker.attention.backend import AttentionBackend, ModelInputs
from pdkv.engine.worker.batch import IntArray, StepInputs
from pdkv.engine.worker.step_buffers import MOST_PROMPTS, MOST_TOKENS, Padding, first_prompt
from pdkv.kernels.paged_attention import FEW_QUERIES
from pdkv.models.decoder import Decoder

logger = logging.getLogger(__name__)

_LARGEST = 512
_SIZES = (1, 2, 4, *range(8, _LARGEST, 8))

_PROMPT_SIZES = (32, 64, 128, 256, 320, 384, 448, 512, *range(640, MOST_TOKENS + 1, 128))
_FREE_TOKENS = 256
"""A GPU reads weights as long as it multiplies so many rows: padding costs nothing."""

Replay = Callable[[], None]
"""Queues the captured work on the current stream."""


def decode_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """Padded sizes of decode steps, ascending; larger steps are not padded."""
    largest = min(max_num_seqs, _LARGEST)
    return (*(size for size in _SIZES if size < largest), largest)


def prompt_sizes(max_num_tokens: int, max_num_seqs: int) -> tuple[Padding, ...]:
    """Padded sizes of steps with prompts, ascending, of at most so many tokens: each with room for no request of few
    tokens, for some and for all, since room that is not used costs a little time in each layer.
    """
    most = min(max_num_seqs, _LARGEST)
    found = set[Padding]()
    for tokens in (size for size in _PROMPT_SIZES if size <= max_num_tokens):
        prompts = min(tokens // (FEW_QUERIES + 1), max(MOST_PROMPTS // 2, tokens // 128))
        for decodes in {0, most} | ({min(16, most), min(128, most)} if tokens <= 512 else set()):
            if decodes + prompts <= tokens:
                found.add(Padding(tokens, decodes, prompts, decodes + prompts))
    return tuple(sorted(found))


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
        try:
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                run()
        finally:
            torch.cuda.set_stream(current)  # which a capture that fails leaves behind
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
        logger.info("steps are not captured as CUDA graphs: %s", why)
        return None
    return CudaRecorder(device)


class PaddedSteps:
    """Computes steps of one token per request, padded to one of `decodes`, from graphs once they are captured; and from
    graphs alone steps with prompts, padded to one of `prompts`.
    """

    def __init__(
        self, model: Decoder, attention: AttentionBackend, decodes: Sequence[int], prompts: Sequence[Padding] = ()
    ) -> None:
        """`attention` pads decodes; sizes ascend."""
        self._model = model
        self._attention = attention
        self._decodes = [Padding(size, size) for size in decodes]
        self._prompts = prompts if attention.pads_prompts else ()
        self._replays: dict[Padding, Replay] = {}
        shape = (max(decodes[-1], *(size.seqs for size in self._prompts), 0), model.config.hidden_size)
        self._hidden = torch.empty(shape, dtype=model.dtype, device=model.device)

    @property
    def num_sizes(self) -> int:
        """Number of sizes: with prompts only if `attention` pads them."""
        return len(self._decodes) + len(self._prompts)

    def size_for(self, inputs: StepInputs, rows: IntArray) -> Padding | None:
        """The padded size of a step in which every request computes one token and needs its hidden state (`rows`), or
        which has prompts. None: it is another kind of step, or there is none for it.
        """
        num_tokens = len(inputs.positions)
        if num_tokens == len(inputs.slots) == len(rows):
            return next((size for size in self._decodes if size.tokens >= num_tokens), None)
        few, few_tokens = first_prompt(inputs)
        needed = Padding(num_tokens, few_tokens, len(inputs.slots) - few, len(rows))
        if not needed.prompts:
            return None
        return next((size for size in self._prompts if size in self._replays and _holds(size, needed)), None)

    def compute(self, step: ModelInputs, size: Padding) -> torch.Tensor:
        """Normalised hidden states (size.rows or size.tokens, hidden) of the step that `attention` has prepared at that
        size.

        The next step overwrites them, so work queued later must not read them.
        """
        replay = self._replays.get(size)
        if replay is None:
            self._run(step)
        else:
            replay()
        return self._hidden[: size.tokens if size.rows is None else size.rows]

    def warm_up(self, block_tables: IntArray, recorder: Recorder | None) -> None:
        """Run every size without requests, which touches no KV, and capture it if there is a recorder; if not, of those
        with prompts the largest alone.

        The largest of each kind comes first, so that the others can use its memory.
        """
        for size in reversed(self._decodes):
            self._prepare_and_run(size, block_tables, recorder)
        chosen = self._prompts[-1:] if recorder is None else reversed(self._prompts)
        try:
            for size in chosen:
                self._prepare_and_run(size, block_tables, recorder)
        except RuntimeError as error:
            if recorder is None:
                raise
            logger.warning("some steps with prompts are launched kernel by kernel: a capture failed: %s", error)
        if recorder is not None:
            num_prompts = len(self._replays) - len(self._decodes)
            logger.info("CUDA graphs: %d of decode steps, %d of steps with prompts", len(self._decodes), num_prompts)

    def _prepare_and_run(self, size: Padding, block_tables: IntArray, recorder: Recorder | None) -> None:
        nobody = StepInputs.of_nobody(len(block_tables))
        rows = None if size.rows is None else np.zeros(0, np.int64)
        step = self._attention.prepare(nobody, block_tables, rows, size=size)
        if recorder is None:
            self._run(step)
        else:
            self._replays[size] = recorder.capture(lambda: self._run(step))

    def _run(self, step: ModelInputs) -> None:
        hidden = self._model.forward(step.token_ids, step.positions, self._attention.attend, step.rows)
        self._hidden[: len(hidden)].copy_(hidden)


def _holds(size: Padding, needed: Padding) -> bool:
    """Whether a step fits, and does not take much longer for it."""
    most = max(_FREE_TOKENS, needed.tokens + needed.tokens // 4)
    fits = needed.tokens <= size.tokens <= most and needed.decodes <= size.decodes and needed.prompts <= size.prompts
    return fits and (needed.rows or 0) <= (size.rows or 0)
