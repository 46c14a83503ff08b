"""Executor for tp > 1: rank 0, in this process, broadcasts each step to the other ranks and collects the results."""

import contextlib
import socket
from collections import deque
from collections.abc import Iterator, Sequence
from typing import TypeVar

import msgspec
import torch

from pdkv.base.clock import MONOTONIC
from pdkv.connectors.base import Stats, WorkerConnector
from pdkv.connectors.stats import sum_stats
from pdkv.connectors.transfer.aggregator import TransferAggregator
from pdkv.engine.plan import StepOutput, StepPlan
from pdkv.engine.worker.executor import Ended, InProcessExecutor, ModelExecutor, RankInfo
from pdkv.engine.worker.pending import PendingStep
from pdkv.engine.worker.ranks.channel import RankChannel
from pdkv.engine.worker.ranks.messages import (
    Answer,
    Attach,
    Attached,
    Broken,
    Collect,
    Collected,
    PeersChanged,
    Sized,
    StepDone,
    Stop,
    decode_answer,
    encode,
    encode_step,
    transfers_of,
)
from pdkv.engine.worker.ranks.ring_queue import RingWriter
from pdkv.errors import MalformedMessage, RankError, RankGone, RankTimeout
from pdkv.wire.kv import EngineCard

_Answer = TypeVar("_Answer", bound=Answer)

_LAST_WORD_S = 1.0
"""Seconds for a rank whose companions lost it to say why."""


class OtherRanks:
    """The other ranks of this engine, seen from rank 0: a ring that all read, and a channel to each."""

    def __init__(self, sockets: Sequence[socket.socket], *, wake_fd: int, start_timeout_s: float) -> None:
        """Offer the ring. Owns `sockets`, one to each of the ranks 1, 2 …; the caller owns `wake_fd`, to which a rank
        writes when its connector has news.

        Raises:
            RankGone: a rank died already.
        """
        self.start_timeout_s = start_timeout_s
        channels = [RankChannel(sock, f"rank {rank}") for rank, sock in enumerate(sockets, 1)]
        self._channels = {channel: deque[StepDone]() for channel in channels}
        self._lost: RankError | None = None
        self._ring = RingWriter(channels)
        for channel in self._channels:
            channel.send_fds([wake_fd])

    def tell(self, message: bytes, timeout_s: float) -> None:
        """Send an encoded order to all ranks. Raises RankTimeout and RankGone."""
        self._ring.put(message, timeout_s)

    def hear(self, kind: type[_Answer], timeout_s: float) -> list[_Answer]:
        """The next answer of that kind of each rank, by rank; ends of steps that come before it are kept for later.

        Raises RankTimeout and RankGone, and RankError if a rank is broken, or answers what it was not asked.
        """
        deadline = MONOTONIC.now() + timeout_s
        return [self._next(kind, channel, ended, deadline) for channel, ended in self._channels.items()]

    @property
    def has_ended_steps(self) -> bool:
        """Whether a rank has ended a step that was not asked for yet."""
        return any(self._channels.values())

    def _next(self, kind: type[_Answer], channel: RankChannel, ended: deque[StepDone], deadline: float) -> _Answer:
        while True:
            answer = ended.popleft() if ended and kind is StepDone else self._answer_of(channel, deadline)
            if isinstance(answer, kind):
                return answer
            if not isinstance(answer, StepDone):
                raise RankError(f"{channel.peer} gave an unexpected answer: {type(answer).__name__}")
            ended.append(answer)

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        """A context whose RankError is the reason that a rank gave in its last message, if one did; after it, there is
        nothing more to hear.
        """
        if self._lost is not None:
            raise self._lost
        try:
            yield
        except RankError as error:
            self._lost = self._why(error)
            raise self._lost from None
        except Exception as error:  # the others wait for this rank in the step
            self._lost = RankError(f"rank 0 failed: {type(error).__name__}: {error}")
            raise

    def _why(self, error: RankError) -> RankError:
        for channel in self._channels:
            deadline = MONOTONIC.now() + _LAST_WORD_S
            try:
                while True:  # after answers that are no longer needed
                    self._answer_of(channel, deadline)
            except (RankTimeout, RankGone):
                continue
            except RankError as broken:
                return broken
        return error

    def _answer_of(self, channel: RankChannel, deadline: float) -> Answer:
        try:
            answer = decode_answer(channel.receive(max(0.0, deadline - MONOTONIC.now())))
        except MalformedMessage as error:
            raise RankError(f"{channel.peer} sent no valid answer: {error}") from None
        if isinstance(answer, Broken):
            raise RankError(f"{channel.peer} failed: {answer.reason}")
        return answer

    def close(self) -> None:
        """Close the channels, which the ranks see. Idempotent."""
        self._ring.close()
        for channel in self._channels:
            channel.close()


class MultiProcessExecutor(ModelExecutor):
    """Rank 0's runner next to those of the other processes. Each rank draws for itself, with the same results."""

    def __init__(self, local: InProcessExecutor, others: OtherRanks, *, timeout_s: float) -> None:
        """Wait until every rank has its weights, and agree on the number of blocks.

        Args:
            local: rank 0.
            timeout_s: limit of each wait for a rank's answer to a step.

        Raises:
            RankError: a rank failed.
        """
        self._local, self.profiler = local, local.profiler  # of rank 0 alone
        self._others, self.explained = others, others.explained
        self._timeout_s = timeout_s
        self._stopped = False
        self._transfers = TransferAggregator(local.shard.size)
        self._stats: dict[int, tuple[int, Stats]] = {}  # of the connector's workers, by rank, with their time
        self.layout = local.layout
        self._last_step_id = self.told_to = -1  # launched; up to which the other ranks have told all ended sends
        loaded = others.hear(Sized, others.start_timeout_s)
        self.num_blocks = min(local.num_blocks, *(answer.num_blocks for answer in loaded))
        if self.num_blocks < local.num_blocks:
            local.take_blocks(self.num_blocks)
        self.max_model_len = local.max_model_len
        self.models_of_other_ranks = [answer.model for answer in loaded]

    def attach(self, kv_pool: torch.Tensor | None, worker: WorkerConnector | None) -> list[RankInfo]:
        with self.explained():
            self._others.tell(encode(Attach(self.num_blocks)), self._timeout_s)
            own = self._local.attach(kv_pool, worker)
            answers = self._others.hear(Attached, self._others.start_timeout_s)
        return own + [RankInfo(answer.pid, answer.blob) for answer in answers]

    def enter_thread(self) -> None:
        self._local.enter_thread()

    def execute(self, plan: StepPlan) -> StepOutput:
        return self.launch(plan).finish()

    def launch(self, plan: StepPlan) -> PendingStep:
        """Launch the step on all ranks: behind the same earlier ones on each, so their exchanges meet in that order.

        Raises:
            RankTimeout, RankGone: a rank hangs or died.
            RankError: a rank failed and said why.
        """
        with self.explained():
            self._others.tell(encode_step(plan), self._timeout_s)
            step = self._local.launch(plan)
        self._last_step_id = plan.step_id
        return _StepOfRanks(self, step, plan.step_id)

    def finish(self, step: PendingStep) -> StepOutput:
        """Finish the oldest step, which every rank answers, so none has more steps under way than rank 0.

        Raises:
            RankError: as `launch`; or a rank drew other tokens, or answered another step.
        """
        with self.explained():
            output = step.finish()
            answers = self._others.hear(StepDone, self._timeout_s)
        by_rank, failed = [output.transfers], dict(output.failed)
        for rank, answer in enumerate(answers, 1):
            if answer.step_id != output.step_id:
                raise RankError(f"rank {rank} answered step {answer.step_id} instead of step {output.step_id}")
            if answer.digest != output.digest:  # from here on their KV would differ
                raise RankError(
                    f"rank {rank} drew other tokens than rank 0 in step {output.step_id}: all ranks must have the same "
                    "logits, so all must run the same code and libraries on the same kind of processor"
                )
            by_rank.append(transfers_of(answer))
            for key, failure in answer.failed:
                failed[key] = failed[key].joined(failure) if key in failed else failure
        return msgspec.structs.replace(
            output,
            transfers=self._transfers.add(by_rank),
            failed=failed,
            connector_stats=self._sum_stats(
                [output.connector_stats, *(a.connector_stats for a in answers)], output.step_id
            ),
        )

    def ask_finished(self, *, with_stats: bool = False) -> Ended:
        """Ask all ranks; a transfer has ended when it has on every one.

        Raises:
            RankTimeout, RankGone: a rank hangs or died.
        """
        others = self._others
        with self.explained():
            others.tell(encode(Collect(with_stats)), self._timeout_s)
            own = self._local.ask_finished(with_stats=with_stats)
            answers = others.hear(Collected, self._timeout_s)
        if not others.has_ended_steps and not any(answer.has_sends for answer in answers):
            self.told_to = self._last_step_id
        transfers = self._transfers.add([own.transfers, *map(transfers_of, answers)])
        return Ended(
            transfers, self._sum_stats([own.stats, *(a.connector_stats for a in answers)], self._last_step_id + 1)
        )

    def _sum_stats(self, by_rank: Sequence[Stats | None], step_id: int) -> Stats | None:
        """The sum over all ranks, if one has new statistics; `step_id`: of the first step launched behind them."""
        if not any(stats is not None for stats in by_rank):
            return None
        for rank, stats in enumerate(by_rank):
            if stats is not None and step_id >= self._stats.get(rank, (0, stats))[0]:
                self._stats[rank] = step_id, stats
        return sum_stats(stats for _, stats in self._stats.values())

    def update_peers(self, added: Sequence[EngineCard], removed: Sequence[EngineCard]) -> None:
        self._others.tell(encode(PeersChanged(list(added), list(removed))), self._timeout_s)
        self._local.update_peers(added, removed)

    def shutdown(self) -> None:
        if self._stopped:
            return
        self._stopped = True
        with contextlib.suppress(RankError):  # a rank that is gone needs no order to stop
            self._others.tell(encode(Stop()), 0.0)
        self._others.close()
        self._local.shutdown()


class _StepOfRanks(PendingStep):
    """A step that rank 0 has launched, as the others have or are about to."""

    def __init__(self, ranks: MultiProcessExecutor, own: PendingStep, step_id: int) -> None:
        self._ranks, self._own, self._step_id = ranks, own, step_id
        self._output: StepOutput | None = None

    @property
    def is_done(self) -> bool:
        """Whether this rank's device has computed it: by then the others have exchanged all they do in it."""
        with self._ranks.explained():
            return self._own.is_done

    @property
    def has_sends(self) -> bool:
        return self._own.has_sends or self._step_id > self._ranks.told_to

    def finish(self) -> StepOutput:
        if self._output is None:
            self._output = self._ranks.finish(self._own)
        return self._output
