"""Plain data between scheduler and workers: what a step computes, and its results."""

from typing import NamedTuple

import msgspec

from pdkv.connectors.base import Cancel, KVConnectorMetadata, Stats, TransferResults
from pdkv.sampling.params import SamplingParams
from pdkv.wire.messages import TokenLogprob
from pdkv.wire.types import RequestKey


class NewRequest(msgspec.Struct, frozen=True):
    """The full state of a request that the workers do not know yet, or no longer know after a preemption."""

    key: RequestKey
    choice: int
    prompt_token_ids: list[int]
    output_token_ids: list[int]
    params: SamplingParams  # without the grammar
    block_ids: list[
        list[int]
    ]  # one block table per KV group, all equally long; -1: a block that no token sees any more
    grammar: int | None = None  # the grammar's number; only rank 0 has it
    prediction_token_ids: list[int] = []  # what the client expects as the output, for proposers
    tenant: str = ""  # a digest of its API key and cache salt: proposers keep what they learn apart by it
    hands_off: bool = False  # another engine goes on with it after the first token drawn here


class ScheduledRequest(msgspec.Struct, frozen=True, gc=False):
    """One request's share of a step: tokens [num_computed, num_computed + num_scheduled) of prompt + output.

    At most the last `num_drafts` of them are guesses at tokens to come. The scheduler learns from the step's output how
    many of the guesses are right, and until then plans for the largest possible number. So a share that samples ends
    with the last token that the workers know and their drafts, even if the plan assumes another position.
    """

    key: RequestKey
    num_computed: int
    num_scheduled: int
    new_block_ids: list[list[int]]  # appended since the last step, per KV group; empty: none, or a NewRequest
    samples: bool  # the range reaches the request's last token: a token is drawn there, and after each draft
    num_drafts: int = 0
    num_guesses: int = 0  # the most tokens to guess after the draw, for later steps


class StepPlan(msgspec.Struct, frozen=True):
    """One step. `scheduled` is in the order of execution; `ended` leave the batch before anything else.

    A request that a step has left out draws again from the first plan that lists it in `resumed`. What the steps in
    between compute for it is void.
    """

    step_id: int
    new: list[NewRequest]
    scheduled: list[ScheduledRequest]
    ended: list[RequestKey]
    kv_meta: KVConnectorMetadata | None = None
    cancels: list[Cancel] = []
    resumed: list[RequestKey] = []
    settled: int | None = None  # newest step whose output was known to the plan; None: that of the step before each

    @property
    def num_tokens(self) -> int:
        """The most tokens computed in this step."""
        return sum([s.num_scheduled for s in self.scheduled])


class DraftResult(NamedTuple):
    """How the guesses at one request's tokens did in a step. One guess beyond those verified is compared, too."""

    num_verified: int  # rows of the step after guesses
    num_right: int  # of those compared, before the first wrong one
    is_wrong: bool  # whether the next of those compared is wrong
    num_guesses: int  # at the tokens after those drawn


NO_DRAFTS = DraftResult(0, 0, False, 0)
"""There were no guesses, and there are none."""


class SampledTokens(msgspec.Struct, frozen=True, gc=False):
    """The tokens that a step drew for one request."""

    token_ids: list[int]  # 0, if none can be chosen, to 1 + the share's drafts
    logprobs: list[TokenLogprob] | None  # one per token, if requested
    drafts: "DraftResult | None" = None  # None: nothing was guessed, or it is not known


class StepFailure(msgspec.Struct, frozen=True):
    """Why a request cannot continue although the step succeeded; nothing of its share counts."""

    code: str  # a PdkvError's code
    message: str
    bad_blocks: list[int] = []  # full blocks of the request whose content must not be found

    def joined(self, other: "StepFailure") -> "StepFailure":
        """The union of two ranks' findings."""
        return StepFailure(self.code, self.message, sorted({*self.bad_blocks, *other.bad_blocks}))


class StepOutput(msgspec.Struct, frozen=True):
    """The output of a step, aggregated over ranks."""

    step_id: int
    sampled: dict[RequestKey, SampledTokens]
    # logprobs of the whole prompt, or what is pooled of it (float32), with the first sampled token
    of_prompts: dict[RequestKey, list[TokenLogprob | None] | bytes]
    transfers: TransferResults
    failed: dict[RequestKey, StepFailure] = {}
    late: list[RequestKey] = []  # those for which no mask was ready in time: nothing is drawn
    connector_stats: Stats | None = None  # of the workers since start; None: as in the step before
    digest: int = 0  # of what was drawn and is proposed: the same on every rank
    drafting_s: float = 0.0  # the part of the step in which tokens were guessed
    drafter_tokens: tuple[int, int] = (0, 0)  # of prompts, since the start: whose KV the drafter found, and computed
