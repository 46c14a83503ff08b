"""A paced engine's parts below the scheduler: an executor that waits, and a model that writes and reads stamps."""

import ctypes
import logging
import os
import platform
from collections import Counter
from threading import Event
from typing import Any, NamedTuple

import numpy as np
import torch

from pdkv.base.clock import MONOTONIC, Clock
from pdkv.config import EngineConfig
from pdkv.engine.plan import SampledTokens, StepPlan
from pdkv.engine.worker.attention.backend import AttentionBackend, ModelInputs
from pdkv.engine.worker.batch import IntArray, StepInputs
from pdkv.engine.worker.executor import InProcessExecutor, resolve_device
from pdkv.engine.worker.finite_check import FiniteCheck
from pdkv.engine.worker.pending import PendingStep
from pdkv.engine.worker.runner import Computed, ModelRunner
from pdkv.engine.worker.step_buffers import Padding
from pdkv.errors import ConfigError
from pdkv.models.config import ModelConfig
from pdkv.models.decoder import Attend, Decoder
from pdkv.models.heads import Heads
from pdkv.models.latent_heads import LatentHeads
from pdkv.models.weight_files import WeightFiles
from pdkv.testing.paced import GRANULE, Profile, Stamps, Words, answers, looked_at, read_profile
from pdkv.wire.kv import KVLayout
from pdkv.wire.types import RequestKey

logger = logging.getLogger(__name__)

_SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}
_PR_SET_TIMERSLACK = 29
_SLICE_NS, _SLACK_NS = 100_000, 1_000

give_way = os.sched_yield
"""Called in the middle of a step's work: on a host with more work than cores, another engine's step may be over."""

_AHEAD = 4
"""For so many steps at once is worked out where they look: requests end, begin, and enter a granule in between."""

_CERTAIN = 1e4
"""The answer's logit, where all others have 0: whatever a request's temperature, it is drawn."""


_ONLY = {"tp": 1, "check_finite": False, "kv_cache_dtype": "auto", "speculative_config": {}}


class _SchedAttr(ctypes.Structure):
    """See sched_setattr(2)."""

    _fields_ = [
        ("size", ctypes.c_uint32),
        ("policy", ctypes.c_uint32),  # 0: SCHED_OTHER
        ("flags", ctypes.c_uint64),
        ("nice", ctypes.c_int32),
        ("priority", ctypes.c_uint32),
        ("runtime", ctypes.c_uint64),
        ("deadline", ctypes.c_uint64),
        ("period", ctypes.c_uint64),
    ]


def wake_promptly() -> None:
    """Let this thread run soon after its waits end: in short slices, which Linux prefers from 6.12 on.

    With slices of 100 microseconds instead of 3 ms, a thread that waits for 7 ms at a time, on a host with more work
    than cores, wakes 0.16 ms late instead of 2 ms (median). No effect if the system does not support slices.
    """
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    attributes = _SchedAttr(size=ctypes.sizeof(_SchedAttr), nice=nice, runtime=_SLICE_NS)
    libc = ctypes.CDLL(None)
    if (number := _SCHED_SETATTR.get(platform.machine())) is not None:
        libc.syscall(number, 0, ctypes.byref(attributes), 0)
    libc.prctl(_PR_SET_TIMERSLACK, ctypes.c_ulong(_SLACK_NS), 0, 0, 0)


class Pace:
    """When the current step must end, and when earlier steps ended."""

    def __init__(self, profile: Profile, clock: Clock) -> None:
        self.profile = profile
        self.clock = clock
        self.closing = Event()
        """No step waits any more."""
        self.new: dict[int, RequestKey] = {}
        """Which requests of the step came with it, by their place in it."""
        self.stalled_s = 0.0
        """Seconds that the step's layers have waited for their KV."""
        self.permille: Counter[int] = Counter()
        """Steps by how long they took, in thousandths of what the curve says."""
        self._began = self._seconds = self._asked = 0.0

    def begin(self, plan: StepPlan) -> None:
        """Note that a step begins now."""
        self._began = self.clock.now()
        give_way()
        new = {request.key for request in plan.new}
        self.new = {i: share.key for i, share in enumerate(plan.scheduled) if share.key in new}
        decodes = sum(share.num_scheduled - share.num_drafts == 1 for share in plan.scheduled)
        context = sum(share.num_computed + share.num_scheduled for share in plan.scheduled)
        rest = plan.num_tokens - sum(s.num_scheduled for s in plan.scheduled if s.num_scheduled - s.num_drafts == 1)
        self._seconds = self.profile.seconds(decodes, rest, context)
        self.stalled_s = 0.0

    def wait(self, part: float) -> None:
        """Wait until this fraction of the step has passed."""
        self.clock.wait(self.closing, self._began + part * self._seconds + self.stalled_s)

    def ask(self) -> None:
        """Note that a layer asks for its KV, until `go_on`."""
        self._asked = self.clock.now()

    def go_on(self) -> None:
        """Note that the layer has it."""
        self.stalled_s += self.clock.now() - self._asked

    def end(self) -> None:
        """Wait for the step's end, and note when it came."""
        self.wait(1.0)
        took_s = self.clock.now() - self._began - self.stalled_s
        self.permille[round(took_s / self._seconds * 1000)] += 1
        give_way()


class _Looks(NamedTuple):
    """Where steps look: `num_steps` that follow each other, and each of g granules of r rows in each of l layers."""

    num_steps: int
    behind: IntArray  # (steps, requests) of the stamp behind which a request goes on
    first: IntArray  # (r,) granule of each row
    places: IntArray  # (l, steps, g) of the words
    masks: Words  # (l, steps, g) theirs
    weights: Words  # (l, g)


class PacedKV(AttentionBackend):
    """Writes stamps where attention writes K and V, and looks at stamps of all granules of a context in each layer."""

    def __init__(self, kv_pool: torch.Tensor, pace: Pace) -> None:
        """`kv_pool`: (num_blocks, layers, 2, kv_heads, block_size, head_size), in host memory."""
        num_blocks, self._num_layers, _, heads, self._block_size, _ = kv_pool.shape
        words = kv_pool.view(torch.int64).numpy().view(np.uint64)
        self._pool: Words = words.reshape(num_blocks, self._num_layers, 2 * heads, self._block_size, -1)
        self._words: Words = words.reshape(-1)
        self._layer_words = self._pool[0, 0].size
        self._stamps = Stamps(pace.profile)
        self._pace = pace
        none = np.zeros(0, np.int64)
        self._looks = _Looks(0, none, none, none, none.astype(np.uint64), none.astype(np.uint64))
        self._begin: tuple[list[int], list[int]] = [], []  # of these: slots and positions
        self._step = 0  # of these
        self._wrong: dict[int, int] = {}  # by slot: of whom KV was not as it should be when it came

    def prepare(
        self, inputs: StepInputs, block_tables: IntArray, rows: IntArray | None, *, size: Padding | None = None
    ) -> ModelInputs:
        self._inputs, self._table = inputs, block_tables[0]
        positions, coming = inputs.positions, self._step + 1
        decodes = rows is None and len(positions) == len(inputs.slots)
        self._num_before = positions if decodes else positions[inputs.cu_seqlens_q[:-1]]
        self._lengths = (positions if rows is None else positions[rows]) + 1
        begin = inputs.slots.tolist(), (positions - coming).tolist()
        if decodes and coming < self._looks.num_steps and begin == self._begin and not self._pace.new:
            self._step = coming
        else:
            self._slots = inputs.slots
            if not decodes:
                of = np.arange(len(positions)) if rows is None else rows
                self._slots = inputs.slots[inputs.cu_seqlens_q.searchsorted(of, side="right") - 1]
            self._looks = self._look_ahead(_AHEAD if decodes else 1)
            self._begin = inputs.slots.tolist(), positions.tolist()
            self._step = 0
        self._folds = np.zeros(len(self._lengths), np.uint64)
        give_way()
        return ModelInputs(_EMPTY, _EMPTY, None)

    def _look_ahead(self, most: int) -> _Looks:
        """What this step looks at, and those behind it that compute one token more of each request: `most` in all."""
        counts = -(-self._lengths // GRANULE)
        steps = np.arange(1 + min(most - 1, int((counts * GRANULE - self._lengths).min(initial=most))))[:, None]
        first = counts.cumsum() - counts
        granules = np.arange(counts.sum()) - first.repeat(counts)
        lengths = self._lengths.repeat(counts) + steps
        parts = lengths % self._pool.shape[2]
        places = self._place(self._slots.repeat(counts), looked_at(granules, lengths), parts, lengths)
        layers = np.arange(self._num_layers)[:, None, None] * self._layer_words
        masks, weights = self._stamps.masks[:, parts], self._stamps.weights[:, granules]
        behind = self._place(self._inputs.slots, np.maximum(self._num_before + steps - 1, 0), 0, 0)
        return _Looks(len(steps), behind, first, layers + places, masks, weights)

    def attend(self, layer: int, qkv: torch.Tensor, heads: Heads | LatentHeads | None = None) -> torch.Tensor:
        self._pace.go_on()
        self.compute(layer, layer + 1)
        return qkv

    def compute(self, begin: int, end: int) -> None:
        """Compute these layers of the step."""
        stamps, inputs = self._stamps, self._inputs
        give_way()
        _, behind, first, places, masks, weights = self._looks
        if not begin:
            before = self._words.take(behind[self._step]) ^ stamps.masks[0, 0]
            if not self._step:
                before *= self._num_before > 0
            self._chain = stamps.chain(inputs.token_ids, before, inputs.cu_seqlens_q[:-1])
            self._arrived: dict[int, Words] = {}
            for request in self._pace.new:
                self._wrong.pop(int(inputs.slots[request]), None)
        for request, key in self._pace.new.items():
            if self._num_before[request]:
                self._look_at_all(request, key, begin, end)
        stamped = self._chain[:, None, None, None] ^ stamps.masks[begin:end, :, None]
        self._pool[inputs.block_ids[0], begin:end, :, inputs.offsets] = stamped
        if len(first):
            found = self._words.take(places[begin:end, self._step])
            found ^= masks[begin:end, self._step]
            found *= weights[begin:end]
            self._folds += np.add.reduceat(found, first, axis=1).sum(axis=0)

    def answers(self) -> list[int]:
        """The tokens after the requested rows."""
        if self._wrong:
            self._folds += np.array([self._wrong.get(s, 0) for s in self._slots.tolist()], np.uint64)
        give_way()
        return answers(self._folds, self._lengths)

    def _place(self, slots: IntArray, positions: IntArray, parts: IntArray | int, words: IntArray | int) -> IntArray:
        """Indexes of words of layer 0. `parts`: of (side, head); `words`: any number, of which the remainder counts."""
        _, layers, num_parts, block_size, num_words = self._pool.shape
        blocks, offsets = np.divmod(positions, block_size)
        rows = (self._table[slots, blocks] * layers * num_parts + parts) * block_size + offsets
        places: IntArray = rows * num_words + words % num_words
        return places

    def _look_at_all(self, request: int, key: RequestKey, begin: int, end: int) -> None:
        """Compare what a request came with: the words of a row say the same in all layers, sides and heads."""
        slot, num_tokens = self._inputs.slots[request], int(self._num_before[request])
        blocks = self._table[slot, : -(-num_tokens // self._block_size)]
        found = self._pool[blocks, begin:end] ^ self._stamps.masks[begin:end, :, None, None]
        first = self._arrived.setdefault(request, found[:, :1, :1, :, :1].copy())
        differ = found != first
        differ[-1, :, :, num_tokens - (len(blocks) - 1) * self._block_size :] = False
        if differ.any():
            bad = np.flatnonzero(differ.any(axis=(1, 2, 3, 4)))
            logger.error("request %s: wrong KV in block %d of its %d", key, bad[0], len(blocks))
            self._wrong[int(slot)] = int(found[differ].sum(dtype=np.uint64) | np.uint64(1))


class PacedModel(Decoder):
    """Layers that take their time and ask the KV for their result."""

    kv: PacedKV

    def __init__(self, config: ModelConfig, dtype: torch.dtype, pace: Pace) -> None:
        self.config, self.dtype, self.device = config, dtype, torch.device("cpu")
        self.num_heads = self.num_kv_heads = config.num_kv_heads
        self.pace = pace

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, attend: Attend, rows: torch.Tensor | None
    ) -> torch.Tensor:
        return torch.tensor(self.tokens(attend)).reshape(-1, 1)

    def tokens(self, attend: Attend) -> list[int]:
        """The tokens that `logits` makes likeliest after each of the rows."""
        num_layers, kv, pace = self.config.num_layers, self.kv, self.pace
        if attend == kv.attend:  # no hook stands between the layers
            kv.compute(0, num_layers)
            return kv.answers()
        for layer in range(num_layers):
            pace.ask()
            attend(layer, _EMPTY, None)
            if layer + 1 < num_layers:
                pace.wait((layer + 1) / num_layers)
        return kv.answers()

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.zeros(len(hidden), self.config.vocab_size).scatter_(1, hidden, _CERTAIN)

    def step_bytes(self, num_tokens: int, num_logits: int) -> int:
        return num_logits * self.config.vocab_size * 2 * 4


class PacedRunner(ModelRunner):
    """A runner that draws by itself if a sampler would only take the likeliest token, which takes a third of a step."""

    launch = ModelRunner.launch.__wrapped__  # type: ignore[attr-defined]
    """Without torch's mode: what is not used is not in the processor's cache, and takes 50 microseconds."""

    def __init__(self, model: Decoder, kv_pool: torch.Tensor, layout: KVLayout, **options: Any) -> None:
        assert isinstance(model, PacedModel)
        super().__init__(model, kv_pool, layout, **options)
        self._attention = model.kv = PacedKV(kv_pool, model.pace)
        self._paced = model
        self._others: set[RequestKey] = set()  # who need the sampler

    def _update_batch(self, plan: StepPlan) -> None:
        super()._update_batch(plan)
        self._others.difference_update(plan.ended)
        for request in plan.new:
            is_plain = self._sampling.is_plain(self._batch.slot(request.key))
            if not is_plain or request.grammar is not None or request.params.computes_prompt:
                self._others.add(request.key)

    def _compute_inputs(self, inputs: StepInputs, attend: Attend, check: FiniteCheck | None) -> Computed:
        if self._others or self._guesser is not None:
            return super()._compute_inputs(inputs, attend, check)
        drawing, lengths, rows = inputs.slots, inputs.seq_lens, None
        if len(inputs.sampling) < len(inputs.positions):
            rows = inputs.cu_seqlens_q[1:][inputs.sampling] - 1
            drawing, lengths = drawing[inputs.sampling], lengths[inputs.sampling]
        self._attention.prepare(inputs, self._batch.block_tables, rows)
        tokens = self._paced.tokens(attend)
        self._batch.append_tokens(drawing, lengths, np.array(tokens, np.int64))
        pairs = zip(self._batch.requests_in(drawing), tokens, strict=True)
        return Computed({request.key: SampledTokens([token], None) for request, token in pairs}, {}, {}, [], 0)


class PacedExecutor(InProcessExecutor):
    """Runs steps that end when the profile says so, and does everything except the arithmetic.

    Raises:
        ConfigError: an option that a paced engine cannot support, by name.
    """

    _runner_type = PacedRunner

    def __init__(
        self, model_config: ModelConfig, config: EngineConfig, *, clock: Clock = MONOTONIC, **options: Any
    ) -> None:
        for name, only in _ONLY.items():
            if (value := getattr(config, name)) != only:
                raise ConfigError(f"--model {config.model}: a paced engine cannot have {name} {value}, only {only}")
        if resolve_device(config).type != "cpu":
            raise ConfigError(f"--model {config.model}: a paced engine has its KV in host memory, use --device cpu")
        self.pace = Pace(read_profile(config.model), clock)
        super().__init__(model_config, config, **options)

    def _load_model(self, model: ModelConfig, dtype: str, weights: WeightFiles | None) -> Decoder:
        return PacedModel(model, getattr(torch, dtype), self.pace)

    def enter_thread(self) -> None:
        wake_promptly()
        super().enter_thread()

    def launch(self, plan: StepPlan) -> PendingStep:
        if not plan.scheduled:
            return super().launch(plan)
        self.pace.begin(plan)
        step = super().launch(plan)
        self.pace.end()
        return step

    def shutdown(self) -> None:
        self.pace.closing.set()
        super().shutdown()
        if self.pace.permille:
            logger.info("steps by thousandths of what the curve says: %s", sorted(self.pace.permille.items()))
            self.pace.permille.clear()


_EMPTY = torch.empty(0)
