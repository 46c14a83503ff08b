"""Executor for tp > 1: rank 0, in this process, broadcasts each step to the other ranks and collects the results."""

import contextlib
import socket
from collections.abc import Sequence

import msgspec
import torch

from pdkv.base.clock import MONOTONIC
from pdkv.connectors.base import Stats, WorkerConnector
from pdkv.connectors.stats import sum_stats
from pdkv.connectors.transfer.aggregator import TransferAggregator
from pdkv.engine.plan import StepOutput, StepPlan
from pdkv.engine.worker.executor import Ended, InProcessExecutor, ModelExecutor, RankInfo
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
        self._channels = [RankChannel(sock, f"rank {rank}") for rank, sock in enumerate(sockets, 1)]
        self._ring = RingWriter(self._channels)
        for channel in self._channels:
            channel.send_fds([wake_fd])

    def tell(self, message: bytes, timeout_s: float) -> None:
        """Send an encoded order to all ranks. Raises RankTimeout and RankGone."""
        self._ring.put(message, timeout_s)

    def hear(self, timeout_s: float) -> list[Answer]:
        """The next answer of each rank, by rank. Raises RankTimeout and RankGone, and RankError if a rank is broken."""
        deadline = MONOTONIC.now() + timeout_s
        return [self._answer_of(channel, max(0.0, deadline - MONOTONIC.now())) for channel in self._channels]

    def why(self, error: RankError) -> RankError:
        """The reason that a rank gave in its last message, if it gave one; else `error`, which showed its end."""
        for channel in self._channels:
            try:
                while True:  # after answers that are no longer needed
                    self._answer_of(channel, _LAST_WORD_S)
            except (RankTimeout, RankGone):
                continue
            except RankError as broken:
                return broken
        return error

    def _answer_of(self, channel: RankChannel, timeout_s: float) -> Answer:
        try:
            answer = decode_answer(channel.receive(timeout_s))
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
        self._others = others
        self._timeout_s = timeout_s
        self._stopped = False
        self._transfers = TransferAggregator(local.shard.size)
        self._stats: dict[int, Stats] = {}  # of the connector's workers, by rank
        self.layout = local.layout
        loaded = [answer for answer in others.hear(others.start_timeout_s) if isinstance(answer, Sized)]
        self.num_blocks = min(local.num_blocks, *(answer.num_blocks for answer in loaded))
        if self.num_blocks < local.num_blocks:
            local.take_blocks(self.num_blocks)
        self.max_model_len = local.max_model_len
        self.models_of_other_ranks = [answer.model for answer in loaded]

    def attach(self, kv_pool: torch.Tensor | None, worker: WorkerConnector | None) -> list[RankInfo]:
        others = self._others
        others.tell(encode(Attach(self.num_blocks)), self._timeout_s)
        try:
            own = self._local.attach(kv_pool, worker)
        except RankError as error:
            raise others.why(error) from None
        answers = others.hear(others.start_timeout_s)
        return own + [RankInfo(a.pid, a.blob) for a in answers if isinstance(a, Attached)]

    def enter_thread(self) -> None:
        self._local.enter_thread()

    def execute(self, plan: StepPlan) -> StepOutput:
        """Run the step on all ranks; each answers every step, so no rank is ever more than one step behind.

        Raises:
            RankTimeout, RankGone: a rank hangs or died.
            RankError: a rank failed and said why, or it drew other tokens.
        """
        others = self._others
        try:
            others.tell(encode_step(plan), self._timeout_s)
            output = self._local.execute(plan)
            answers = others.hear(self._timeout_s)
        except RankError as error:
            raise others.why(error) from None
        by_rank, failed = [output.transfers], dict(output.failed)
        done: list[StepDone] = []
        for answer in answers:
            assert isinstance(answer, StepDone), answer
            done.append(answer)
            assert answer.step_id == plan.step_id, (answer.step_id, plan.step_id)
            if answer.digest != output.digest:  # from here on their KV would differ
                raise RankError(
                    f"rank {len(done)} drew other tokens than rank 0 in step {plan.step_id}: all ranks must have the "
                    "same logits, so all must run the same code and libraries on the same kind of processor"
                )
            by_rank.append(transfers_of(answer))
            for key, failure in answer.failed:
                failed[key] = failed[key].joined(failure) if key in failed else failure
        return msgspec.structs.replace(
            output,
            transfers=self._transfers.add(by_rank),
            failed=failed,
            connector_stats=self._sum_stats([output.connector_stats, *(a.connector_stats for a in done)]),
        )

    def ask_finished(self, *, with_stats: bool = False) -> Ended:
        """Ask all ranks; a transfer has ended when it has on every one.

        Raises:
            RankTimeout, RankGone: a rank hangs or died.
        """
        others = self._others
        try:
            others.tell(encode(Collect(with_stats)), self._timeout_s)
            own = self._local.ask_finished(with_stats=with_stats)
            answers = [answer for answer in others.hear(self._timeout_s) if isinstance(answer, Collected)]
        except RankError as error:
            raise others.why(error) from None
        transfers = self._transfers.add([own.transfers, *map(transfers_of, answers)])
        return Ended(transfers, self._sum_stats([own.stats, *(answer.connector_stats for answer in answers)]))

    def _sum_stats(self, by_rank: Sequence[Stats | None]) -> Stats | None:
        """The sum over all ranks, if one has new statistics."""
        if not any(stats is not None for stats in by_rank):
            return None
        self._stats.update((rank, stats) for rank, stats in enumerate(by_rank) if stats is not None)
        return sum_stats(self._stats.values())

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
