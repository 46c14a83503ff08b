"""The model runner of one rank: a step plan in, sampled tokens out, with the connector's hooks around each layer."""

import zlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from pdkv.base.clock import MONOTONIC, Clock
from pdkv.connectors.base import NO_TRANSFERS, KVConnectorMetadata, WorkerConnector
from pdkv.connectors.step_done import StepsDone, make_step_done
from pdkv.engine.plan import SampledTokens, ScheduledRequest, StepFailure, StepOutput, StepPlan
from pdkv.engine.proposers.base import Proposer
from pdkv.engine.worker.attention.backend import Layer, Scores, pad
from pdkv.engine.worker.attention.select import make_backend
from pdkv.engine.worker.batch import IntArray, PersistentBatch, StepInputs
from pdkv.engine.worker.drafts import DrawRows, Guesser, digest_of
from pdkv.engine.worker.finite_check import FiniteCheck
from pdkv.engine.worker.graphs import PaddedSteps, Recorder
from pdkv.engine.worker.masks import GrammarMasks, Masks
from pdkv.engine.worker.pending import DoneStep, PendingStep
from pdkv.engine.worker.profiler import span
from pdkv.engine.worker.queued_step import DeviceQueue, Draws, QueuedStep, tokens_of
from pdkv.engine.worker.readback import Read, read_here
from pdkv.engine.worker.sampling.logit_processors import TokenMasks
from pdkv.engine.worker.sampling.prompt_results import PromptResults
from pdkv.engine.worker.sampling.sampler import SamplingState
from pdkv.engine.worker.step_buffers import Padding
from pdkv.engine.worker.warm_up import WarmUp
from pdkv.kernels.paged_attention import FEW_QUERIES
from pdkv.kernels.streams import streams_of
from pdkv.kernels.upload import to_tensor
from pdkv.models.decoder import Attend, Decoder
from pdkv.models.heads import Heads
from pdkv.models.latent_heads import LatentHeads
from pdkv.sampling.logits_processors import NO_PROCESSORS, ProcessorSet
from pdkv.wire.kv import KVLayout
from pdkv.wire.messages import TokenLogprob
from pdkv.wire.types import RequestKey

_TRANSFER = "pdkv.transfer"


def _kind_of(scheduled: list[ScheduledRequest]) -> str:
    """The name of the range of a step's computation in a profile."""
    of_prompts = {each.num_scheduled > FEW_QUERIES for each in scheduled}
    return "pdkv.mixed" if len(of_prompts) == 2 else "pdkv.prefill" if True in of_prompts else "pdkv.decode"


class Computed(NamedTuple):
    """Results of a step besides transfers; by request."""

    sampled: dict[RequestKey, SampledTokens]
    of_prompts: dict[RequestKey, list[TokenLogprob | None] | bytes]
    failed: dict[RequestKey, StepFailure]
    late: list[RequestKey]
    digest: int


_NOTHING = Computed({}, {}, {}, [], 0)


class ModelRunner:
    """Runs steps over a persistent batch. Not thread-safe; `kv_pool` as in `KVLayout.pool_shape`, on its device.

    If the device runs asynchronously, a step is queued there as a whole: drawn tokens stay on the device, where the
    next step finds them, and one event says when the host may read them. Steps for which `_needs_host_tokens` is true
    are computed one after the other, as all are on a CPU.
    """

    def __init__(
        self,
        model: Decoder,
        kv_pool: torch.Tensor,
        layout: KVLayout,
        *,
        max_num_seqs: int,
        max_model_len: int,
        worker: WorkerConnector | None = None,
        reports: bool = True,
        check_finite: bool = False,
        proposer: Proposer | None = None,
        processors: ProcessorSet = NO_PROCESSORS,
        masks: Masks | None = None,
        decode_sizes: Sequence[int] = (),
        prompt_sizes: Sequence[Padding] = (),
        recorder: Recorder | None = None,
        timeout_s: float = 30.0,
        clock: Clock = MONOTONIC,
    ) -> None:
        """`reports` False: another rank reports the tokens and their logprobs; this one draws the same for itself.

        `check_finite`: requests for which a step computes NaN or infinity are in `StepOutput.failed`.
        `proposer`: guesses tokens, which later steps try if their plans leave room for drafts.
        `processors`: those that requests may name.
        `masks`: of the grammars that requests may have; None: there are none.
        `decode_sizes`, ascending: if the device's attention supports it, steps of one token per request are padded to
        these.
        `prompt_sizes`, ascending: those with prompts, too, where they are captured.
        `recorder`: captures them when the runner warms up.
        `timeout_s`: how long the device may take for a step, until `set_timeout`, by `clock`.
        """
        self._check_finite = check_finite
        self._reports = reports
        self._steps_done = StepsDone()
        self._model = model
        self._kv_pool, self._model_layers = kv_pool, layout.model_layers
        self._worker = worker
        self._guesser = None if proposer is None else Guesser(proposer, model.config.vocab_size, clock)
        self._batch = PersistentBatch(
            max_num_seqs, max_model_len, layout.block_size, layout.num_groups, has_drafts=proposer is not None
        )
        config = model.config
        windows = config.windows or [None] * config.num_layers
        places = zip(layout.places, windows, layout.scales, strict=True)
        value_size = None if config.latent is None else config.latent.rank
        layers = [Layer(*place, window, scales, value_size) for place, window, scales in places]
        scores = Scores(config.attention_scale, config.attention_softcap)
        self._attention = make_backend(kv_pool, model.num_heads, layers, scores)
        self._padded: PaddedSteps | None = None
        if decode_sizes and self._attention.pads_decodes:
            self._padded = PaddedSteps(model, self._attention, decode_sizes, prompt_sizes)
        self._recorder = recorder
        streams = streams_of(model.device)
        self._queue = None if streams.is_host else DeviceQueue(max_num_seqs, model.device, streams, timeout_s, clock)
        self._read: Read = read_here if self._queue is None else self._queue.read_now
        self._sampling = SamplingState(max_num_seqs, config.vocab_size, config.eos_token_ids, processors, self._read)
        self._prompt_results = PromptResults(model, self._sampling, collects=reports)
        self._masks = masks or GrammarMasks(None, config.eos_token_ids)

    def set_timeout(self, timeout_s: float) -> None:
        """Set how long the device may take for each later step."""
        if self._queue is not None:
            self._queue.set_timeout(timeout_s)

    def warm_up(self, max_num_tokens: int = 0, *, compiles: bool = True) -> None:
        """Run steps in unused blocks, and capture those that can be captured.

        So the first requests wait for no kernel, and the memory of compiled kernels is taken now instead of bit by bit.

        Args:
            max_num_tokens: of one step; only on a device.
            compiles: whether a CPU's layers compile kernels per number of rows.
        """
        worker, self._worker = self._worker, None
        guesser, self._guesser = self._guesser, None
        num_groups, num_seqs, _ = self._batch.block_tables.shape
        num_blocks, block_size = self._kv_pool.shape[0], self._kv_pool.shape[4]
        limits = WarmUp(num_seqs, self._batch.max_len, num_groups, num_blocks, block_size)
        for plan in limits.on_device(max_num_tokens) if max_num_tokens else limits.on_host(compiles=compiles):
            self.execute(plan)
        self.warm_up_decodes(self._recorder)
        self._worker, self._guesser = worker, guesser

    @property
    def num_padded(self) -> int:
        """Number of sizes to which steps are padded."""
        return 0 if self._padded is None else self._padded.num_sizes

    @torch.inference_mode()
    def warm_up_decodes(self, recorder: Recorder | None) -> None:
        """Run decode steps of each padded size without requests, and capture them."""
        if self._padded is not None:
            self._padded.warm_up(self._batch.block_tables, recorder)

    def rewrite(self, key: RequestKey, token_ids: IntArray) -> IntArray:
        """Give a request of the batch these tokens as all that are known, between two steps. Returns those that it had
        in their places.
        """
        if self._queue is not None:
            self._queue.tokens.forget(np.array([self._batch.slot(key)]))
        return self._batch.rewrite(key, token_ids)

    def execute(self, plan: StepPlan) -> StepOutput:
        """Run one step; an empty one (no token scheduled) only makes the connector's calls."""
        return self.launch(plan).finish()

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> PendingStep:
        """Make the connector's calls of a step and give its work to the device. An earlier one may be pending."""
        worker, meta = self._worker, plan.kv_meta
        if worker is not None:
            for key, direction in plan.cancels:
                worker.cancel(key, direction)
        self._update_batch(plan)
        if worker is not None and meta is not None:
            meta.earlier_steps = self._steps_done.up_to(plan.settled)
            meta.this_step = make_step_done(self._kv_pool.device)
            self._steps_done.add(plan.step_id, meta.this_step)
            with span(_TRANSFER):
                worker.start_load_kv(meta)
        if plan.scheduled:
            with span(_kind_of(plan.scheduled)):
                computed = self._compute(plan.scheduled, self._attend(meta))
        else:
            computed = _NOTHING
        if meta is not None and meta.this_step is not None:
            meta.this_step.record()
        with span(_TRANSFER):
            if worker is not None and meta is not None:
                worker.wait_for_save()
            transfers = NO_TRANSFERS if worker is None else worker.get_finished()
        stats = worker.get_stats() if worker is not None and transfers else None
        if isinstance(computed, Draws):
            rest = StepOutput(plan.step_id, {}, {}, transfers, connector_stats=stats)
            return QueuedStep(rest, computed, self._batch)
        sampled, of_prompts, failed, late, digest = computed
        drafting_s, drafter_tokens = 0.0, (0, 0)
        if self._guesser is not None:
            drafting_s = self._guesser.seconds if sampled else 0.0
            drafter_tokens = self._guesser.proposer.drafter_tokens
        results = sampled, of_prompts, transfers, failed, late, stats, digest, drafting_s, drafter_tokens
        return DoneStep(StepOutput(plan.step_id, *results))

    def _update_batch(self, plan: StepPlan) -> None:
        for key in plan.ended:
            slot = self._batch.remove(key)
            if slot is not None:
                if self._guesser is not None:
                    self._guesser.remove(slot, self._batch)
                self._sampling.remove(slot)
                self._prompt_results.remove(slot)
                self._masks.remove(slot)
                if self._queue is not None:
                    self._queue.tokens.forget(slot)
        for request in plan.new:
            slot = self._batch.add(request)
            self._sampling.add(slot, request)
            self._prompt_results.add(slot, request)
            self._masks.add(slot, request)
            if self._guesser is not None:
                self._guesser.add(slot, request)
        if plan.resumed:
            self._masks.resume(self._batch.slot(key) for key in plan.resumed if key in self._batch)

    def _attend(self, meta: KVConnectorMetadata | None) -> Attend:
        """The attention of this step, between the connector's layer hooks if the step needs them."""
        worker, attend, pool = self._worker, self._attention.attend, self._kv_pool
        if worker is None or meta is None or not meta.needs_layer_hooks:
            return attend

        def attend_between_hooks(layer: int, qkv: torch.Tensor, heads: Heads | LatentHeads | None) -> torch.Tensor:
            with span(_TRANSFER):
                worker.wait_for_layer_load(layer)
            out = attend(layer, qkv, heads)
            with span(_TRANSFER):
                worker.save_kv_layer(layer, pool, meta)
            return out

        return attend_between_hooks

    def _compute(self, scheduled: list[ScheduledRequest], attend: Attend) -> "Computed | Draws":
        """Forward pass, results of prompts and sampling of one step that is not empty."""
        if self._padded is not None:  # a device computes requests of few tokens apart from prompts
            scheduled = sorted(scheduled, key=lambda each: each.num_scheduled > FEW_QUERIES)
        inputs = self._batch.prepare(scheduled)
        if self._queue is not None and not self._needs_host_tokens(inputs):
            return self._queue_inputs(self._queue, inputs, attend)
        if not self._check_finite:
            return self._compute_inputs(inputs, attend, None)
        check = FiniteCheck(inputs, self._read)
        computed = self._compute_inputs(inputs, check.around(attend), check)
        failed = check.failures(scheduled, self._batch, self._kv_pool[:, : self._model_layers])
        return computed._replace(failed={**computed.failed, **failed}) if failed else computed

    def _needs_host_tokens(self, inputs: StepInputs) -> bool:
        """Whether the host must know a step's drawn tokens before the next one is launched, so that it is computed in
        turn.

        That holds for all steps in which such a request draws, so the host knows all of its tokens. The list is in
        docs/engine-loop.md.
        """
        drawing = inputs.slots[inputs.sampling]
        return (
            self._guesser is not None
            or self._check_finite
            or self._sampling.looks_back(drawing)
            or self._masks.masks_in(drawing)
            or self._prompt_results.collects_in(inputs.slots)
        )

    def _queue_inputs(self, queue: DeviceQueue, inputs: StepInputs, attend: Attend) -> Draws:
        """Give the whole step to the device without waiting."""
        drawn = DrawRows.of(inputs)
        hidden = self._forward(inputs, drawn.rows, attend)
        if not len(drawn.rows):
            return queue.read([], drawn, hidden.new_empty(0, dtype=torch.int64), None)
        logits = self._model.logits(hidden)[: len(drawn.rows)]
        tokens = self._sampling.draw(logits, drawn.slots, self._batch.token_ids, drawn.num_tokens)
        queue.tokens.put(drawn.slots, drawn.num_tokens, tokens)
        self._sampling.counts.add(drawn.slots, drawn.num_tokens, tokens)
        logprobs = self._sampling.queue_logprobs(logits, drawn.slots, tokens) if self._reports else None
        return queue.read(self._batch.requests_in(drawn.slots), drawn, tokens, logprobs)

    def _compute_inputs(self, inputs: StepInputs, attend: Attend, check: FiniteCheck | None) -> Computed:
        drawn = DrawRows.of(inputs)
        rows = self._prompt_results.with_prompt_rows(drawn.rows, inputs)
        hidden = self._forward(inputs, rows, attend)
        if self._guesser is not None:
            self._guesser.follow(inputs, self._batch, self._kv_pool)
        self._prompt_results.collect(hidden, rows, inputs, check)
        if not len(drawn.rows):
            self._read([])  # a step's output is known once its device has computed it
            return _NOTHING
        if len(rows) > len(drawn.rows):  # what prompts want needs more
            wanted = pad(np.searchsorted(rows, drawn.rows), self._attention.padded(len(drawn.rows)))
            hidden = hidden.index_select(0, to_tensor(wanted, hidden.device))
        logits = self._model.logits(hidden)[: len(drawn.rows)]
        return self._draw(inputs, logits, drawn, check, hidden)

    def _draw(
        self,
        inputs: StepInputs,
        logits: torch.Tensor,
        drawn: DrawRows,
        check: FiniteCheck | None,
        hidden: torch.Tensor,
    ) -> Computed:
        """Draw after every row of logits (n, vocab), keep the draws after right guesses, and guess the next tokens."""
        batch, sampling = self._batch, self._sampling
        masks, late = self._masks.take(drawn, batch)  # meanwhile a device computes the logits
        logprobs: Mapping[int, TokenLogprob] | None = None
        if self._queue is None:
            tokens = sampling.choose(logits, drawn.slots, batch.token_ids, drawn.num_tokens, masks)
            tokens[drawn.starts[late]] = -1
        else:
            tokens, logprobs = self._read_draws(self._queue, logits, drawn, masks, late)
        counts = drawn.count_right(tokens, batch)
        kept = drawn.kept(counts)
        if check is not None:
            check.look_at_logits(logits, drawn, counts)
        digest = zlib.crc32(tokens[kept].data)
        if self._guesser is None or not self._guesser.has_work(inputs, batch):
            batch.append_tokens(drawn.slots[kept], drawn.num_tokens[kept], tokens[kept])
            drafts = None
        else:
            compared = drawn.compare(tokens, counts, batch)
            batch.append_tokens(drawn.slots[kept], drawn.num_tokens[kept], tokens[kept])
            slots, most = inputs.slots[drawn.requests], np.where(counts > 0, inputs.num_guesses[drawn.requests], 0)
            num_guesses = self._guesser.guess(slots, most, batch, hidden, drawn.starts + counts - 1)
            digest = digest_of(digest, slots, num_guesses, batch)
            drafts = compared.results(num_guesses)
        if self._queue is not None:
            self._queue.tokens.forget(drawn.slots)
        if logprobs is None:
            logprobs = sampling.logprobs(logits, drawn.slots, np.where(kept, tokens, -1)) if self._reports else {}
        requests = batch.requests_in(drawn.slots[drawn.starts])
        sampled, stuck = tokens_of(requests, drawn, tokens, counts, logprobs, sampling.failures, drafts)
        left_out = [requests[i].key for i in late]
        for key in left_out:
            del sampled[key], stuck[key]
        slots = np.delete(inputs.slots[drawn.requests], late)
        self._masks.accept(drawn, tokens, counts, batch)
        return Computed(sampled, self._prompt_results.take(slots), stuck, left_out, digest)

    def _read_draws(
        self, queue: DeviceQueue, logits: torch.Tensor, drawn: DrawRows, masks: TokenMasks | None, late: Sequence[int]
    ) -> tuple[NDArray[np.int64], Mapping[int, TokenLogprob]]:
        """Tokens that a device draws after every row of logits, (n,), and their logprobs by row; both in one wait."""
        sampling = self._sampling
        tokens = sampling.draw(logits, drawn.slots, self._batch.token_ids, drawn.num_tokens, masks)
        logprobs = sampling.queue_logprobs(logits, drawn.slots, tokens) if self._reports else None
        chosen, *found = queue.read([], drawn, tokens, logprobs).results.read()
        chosen[[*sampling.failures, *drawn.starts[late]]] = -1
        return chosen, {} if logprobs is None else logprobs.entries(chosen, found)

    def _forward(self, inputs: StepInputs, rows: IntArray, attend: Attend) -> torch.Tensor:
        """Normalised hidden states (len(rows) padded, hidden) of those tokens of the step."""
        size = None
        if self._padded is not None and attend == self._attention.attend:  # nothing runs between the layers
            size = self._padded.size_for(inputs, rows)
        some = rows if len(rows) < len(inputs.positions) or (size is not None and size.rows is not None) else None
        step = self._attention.prepare(inputs, self._batch.block_tables, some, size=size)
        if self._queue is not None:
            self._queue.tokens.fill(step.token_ids, inputs)
        if self._padded is None or size is None:
            return self._model.forward(step.token_ids, step.positions, attend, step.rows)
        hidden = self._padded.compute(step, size)
        return hidden if size.rows is None else hidden[: len(rows)].clone()
