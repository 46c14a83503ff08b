"""Plain data between scheduler and workers: what a step computes and what came out of it."""

import msgspec

from pdkv.connectors.base import Cancel, KVConnectorMetadata, Stats, TransferResults
from pdkv.sampling.params import SamplingParams
from pdkv.wire.messages import TokenLogprob
from pdkv.wire.types import RequestKey


class NewRequest(msgspec.Struct, frozen=True):
    """A request that the workers do not know yet (or, after a preemption, not any more): its full state."""

    key: RequestKey
    choice: int
    prompt_token_ids: list[int]
    output_token_ids: list[int]
    params: SamplingParams  # without the grammar
    block_ids: list[list[int]]  # a block table per KV group, all equally long; -1: a block that no token sees any more
    grammar: int | None = None  # its number; only rank 0 has it


class ScheduledRequest(msgspec.Struct, frozen=True, gc=False):
    """One request's share of a step: tokens [num_computed, num_computed + num_scheduled) of prompt + output.

    The last `num_drafts` of them, at most, are guesses at tokens to come. How many of those are right the scheduler
    learns with the step's output, and until then it plans behind the most that may be. So with drafts a share that
    samples ends with the last token that the workers know and the drafts that they have, wherever the plan sees that.
    """

    key: RequestKey
    num_computed: int
    num_scheduled: int
    new_block_ids: list[list[int]]  # appended since the last step, per KV group; empty: none, or a NewRequest
    samples: bool  # the range reaches the request's last token: a token is drawn, and one behind each draft
    num_drafts: int = 0


class StepPlan(msgspec.Struct, frozen=True):
    """One step. `scheduled` is in the order of execution; `ended` leave the batch before anything else.

    A request that a step has left out is drawn for again from the plan on that has it in `resumed`. What steps in
    between compute of it is void.
    """

    step_id: int
    new: list[NewRequest]
    scheduled: list[ScheduledRequest]
    ended: list[RequestKey]
    kv_meta: KVConnectorMetadata | None = None
    cancels: list[Cancel] = []
    resumed: list[RequestKey] = []
    settled: int | None = None  # newest step whose output was known to the plan; None: that of each step before it

    @property
    def num_tokens(self) -> int:
        """Tokens computed in this step, at most."""
        return sum(s.num_scheduled for s in self.scheduled)


class SampledTokens(msgspec.Struct, frozen=True, gc=False):
    """What a step drew for one request."""

    token_ids: list[int]  # 0, where none can be chosen, to 1 + the share's drafts
    logprobs: list[TokenLogprob] | None  # one per token where asked for


class StepFailure(msgspec.Struct, frozen=True):
    """Why a request cannot go on, though the step did; nothing of its share counts."""

    code: str  # a PdkvError's
    message: str
    bad_blocks: list[int] = []  # full blocks of the request whose content nobody may find

    def joined(self, other: "StepFailure") -> "StepFailure":
        """What two ranks found."""
        return StepFailure(self.code, self.message, sorted({*self.bad_blocks, *other.bad_blocks}))


class StepOutput(msgspec.Struct, frozen=True):
    """What came out of a step, aggregated over ranks."""

    step_id: int
    sampled: dict[RequestKey, SampledTokens]
    prompt_logprobs: dict[RequestKey, list[TokenLogprob | None]]  # whole prompt, with the first sampled token
    transfers: TransferResults
    failed: dict[RequestKey, StepFailure] = {}
    late: list[RequestKey] = []  # those for which no mask was there in time: nothing is drawn
    connector_stats: Stats | None = None  # of the workers since start; None: as in the step before
    digest: int = 0  # of what was drawn and is proposed: the same on every rank
