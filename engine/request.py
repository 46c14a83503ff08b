"""One request on one engine: its progress is kept in counters, never phases."""

from collections.abc import Sequence
from hashlib import blake2b
from sys import maxsize

import msgspec

from pdkv.base.log_fields import RequestName
from pdkv.connectors.base import RequestView, TransferKey
from pdkv.engine.plan import NewRequest
from pdkv.kernels.block_keys import keys_behind
from pdkv.wire.messages import Submit
from pdkv.wire.reports import SourceCounts
from pdkv.wire.types import RequestKey


class Request:
    """The state of a Submit. Tokens [0, num_computed) are computed or being computed, [0, num_confirmed) are confirmed.

    While steps with drafts are in flight, `num_computed` is the largest possible number.
    """

    __slots__ = (
        *("arrival", "awaits_mask", "block_tables", "computed_before", "deadline", "draft_rate", "due_at", "end_at"),
        *("grammar", "handoff", "hash_keys", "hash_root", "in_worker", "key", "kv", "kv_ready", "last_step_id"),
        *("load_failed", "num_committed_blocks", "num_computed", "num_confirmed", "num_drafts", "num_external"),
        *("num_accepted", "num_full_blocks", "num_given_up", "num_guesses", "num_handed_over", "num_in_flight"),
        *("num_local_hit", "num_named", "num_rejected", "num_reported"),
        *("num_worker_blocks", "output_token_ids", "preempted", "prompt_token_ids", "restarts", "router_id"),
        *("source_is_peer", "started", "submit", "ticket", "ticket_number", "transfer_key", "trial_tokens"),
    )

    def __init__(
        self, submit: Submit, router_id: str, hash_root: bytes, arrival: float, hash_keys: Sequence[bytes] = ()
    ) -> None:
        """`hash_keys`: the known keys of its full hash blocks, from the first on."""
        self.submit = submit
        self.key: RequestKey = (submit.request_id, submit.attempt)
        self.transfer_key = TransferKey(submit.transfer_id, submit.attempt, lent=submit.until == "cached")
        self.router_id = router_id
        self.arrival = arrival
        self.started: float | None = None  # when its first step began
        self.deadline = arrival + submit.timeout_s
        self.prompt_token_ids = submit.prompt_token_ids
        self.output_token_ids = list(submit.output_token_ids)
        self.end_at = _end_at(submit)  # at this many tokens it is over: nothing is computed after the last but one
        self.kv = submit.kv  # becomes "local" with `compute_here`
        self.handoff = submit.handoff
        self.num_handed_over = 0  # tokens that another engine has computed
        self.num_named = 0  # tokens of the prompt that its reader was told of while the rest was computed
        self.ticket = submit.ticket
        self.ticket_number = 0
        self.grammar: int | None = None  # the number by which its grammar is known
        self.trial_tokens = submit.trial_tokens  # new tokens that it must still get alone
        self.kv_ready: bool | None = None
        self.hash_root = hash_root
        self.hash_keys = list(hash_keys)  # one per full hash block of prompt + output
        self.load_failed = False  # nothing more is asked for from outside
        self.restarts = 0  # number of resets; results of a step planned under another value are dropped
        self.preempted = False  # tokens computed from now on are computed again
        self.computed_before: list[tuple[int, int, bool]] = []  # prompt ranges computed in earlier lives
        self.draft_rate: float | None = None  # how likely each guess is right; None: none has been compared
        self.num_accepted = self.num_rejected = 0  # verified guesses
        self._reset()

    def _reset(self) -> None:
        self.block_tables: list[list[int]] = []  # one per KV group, equally long; -1: given up, or never needed
        self.num_given_up: list[int] = []  # by group, the number of -1 entries at the table's start
        self.num_computed = 0
        self.num_confirmed = 0
        self.num_reported = 0  # confirmed tokens that the connector has been told of
        self.num_full_blocks = 0  # blocks of each group that are to enter the cache
        self.num_committed_blocks = 0  # blocks that have
        self.due_at = 0  # with fewer confirmed tokens, nothing of it enters the cache or is reported
        self.num_local_hit = 0
        self.num_external = 0
        self.source_is_peer = False
        self.in_worker = False
        self.num_worker_blocks = 0
        self.last_step_id = -1  # last step that names this request's blocks
        self.num_in_flight = 0  # the most tokens that steps in flight will draw: known with their updates
        self.num_drafts = 0  # the part of these after drafts, which may not come
        self.num_guesses = 0  # the most guesses that the workers have for its next step
        self.awaits_mask = False  # nothing is computed for it until the mask of its next token is ready

    def restart(self) -> None:
        """Forget everything computed; the results of steps in flight are dropped."""
        start, stop = self.num_local_hit + self.num_external, min(self.num_confirmed, len(self.prompt_token_ids))
        if start < stop:
            self.computed_before.append((start, stop, self.preempted))
        self.restarts += 1
        self.preempted = True
        self._reset()

    def resume(self, num_tokens: int) -> None:
        """Continue after tokens [0, num_tokens), which are in the request's blocks, and drop the results of steps in
        flight.
        """
        self.restarts += 1
        self.preempted = True  # what was to be loaded from outside is computed again
        self.num_external = num_tokens - self.num_local_hit
        self.num_computed = self.num_confirmed = num_tokens
        self.num_reported = self.num_worker_blocks = self.due_at = self.num_in_flight = 0
        self.num_drafts = self.num_guesses = 0

    def leave_out(self) -> None:
        """Note that a step drew nothing for the request, and later ones in flight will not either: it continues after
        the known tokens.
        """
        self.restarts += 1
        self.awaits_mask = True
        self.num_computed = self.num_tokens - 1  # computed again: drawing the next token needs its logits
        self.num_in_flight = self.num_drafts = self.num_guesses = 0

    @property
    def borrows(self) -> bool:
        """Whether the request's hand-off names KV that another engine lends, for a prompt that will itself be handed
        off.
        """
        return self.handoff is not None and self.kv == "handoff"

    @property
    def awaits_rest(self) -> bool:
        """Whether its hand-off names only the first part of its KV: the rest is still being computed elsewhere."""
        return self.kv == "await_peer" and self.handoff is not None and self.handoff.more

    def go_without_loan(self) -> None:
        """Continue without the loan: as many tokens were found elsewhere, which depend on neither the lender nor the
        loan's deadline.
        """
        if self.borrows:
            self.handoff = None

    def compute_here(self) -> None:
        """Compute the rest here: the peer's part is over, whether it succeeded or not."""
        if self.kv == "await_peer" and self.handoff is not None:
            self.num_handed_over = self.handoff.num_tokens
        self.handoff = None
        if self.kv == "await_peer":
            self.kv = "local"

    @property
    def name(self) -> RequestName:
        """The request's name in log lines."""
        return name_of(self.submit)

    def begins(self, now: float) -> None:
        """Note that a step computes the request; the first one counts."""
        if self.started is None:
            self.started = now

    def times(self, now: float) -> tuple[float, float]:
        """Seconds before and since the beginning of its first step."""
        started = now if self.started is None else self.started
        return started - self.arrival, now - started

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens known."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def num_planned(self) -> int:
        """Known tokens, and the most that steps in flight will draw."""
        return len(self.prompt_token_ids) + len(self.output_token_ids) + self.num_in_flight

    @property
    def is_ending(self) -> bool:
        """Whether the steps in flight complete the request's length, or may if all drafts are right. Until that is
        known, nothing more is computed for it; at its end it gives its blocks back.
        """
        return self.num_in_flight > 0 and self.num_planned >= self.end_at

    @property
    def stands_still(self) -> bool:
        """Whether nothing is computed for the request now: it is ending, or the mask of its next token is not ready."""
        return self.is_ending or self.awaits_mask

    @property
    def num_wanted(self) -> int:
        """KV of tokens [0, num_wanted) may come from a cache or from outside; the next token is computed here."""
        if self.kv == "await_peer" and not self.output_token_ids:
            return len(self.prompt_token_ids)
        return self.num_tokens - 1

    @property
    def all_token_ids(self) -> list[int]:
        """Prompt + output."""
        return self.prompt_token_ids + self.output_token_ids

    def held_blocks(self, first: int = 0) -> Sequence[int]:
        """The request's blocks in all groups, from the tables' entry `first` on."""
        return held_blocks(self.block_tables, first)

    def update_hash_keys(self, num_tokens: int, hash_block_size: int) -> None:
        """Extend the keys to all full hash blocks of the first `num_tokens` tokens."""
        start, stop = len(self.hash_keys) * hash_block_size, num_tokens // hash_block_size * hash_block_size
        if start < stop:
            num_prompt = len(self.prompt_token_ids)
            tokens = self.prompt_token_ids[start:stop]
            if stop > num_prompt:
                tokens = tokens + self.output_token_ids[max(start - num_prompt, 0) : stop - num_prompt]
            parent = self.hash_keys[-1] if self.hash_keys else self.hash_root
            self.hash_keys += keys_behind(parent, tokens, hash_block_size=hash_block_size)

    def introduce(self) -> NewRequest:
        """The request's full state, for workers that do not know it."""
        submit, params = self.submit, self.submit.params
        if params.grammar is not None:
            params = msgspec.structs.replace(params, grammar=None)
        output_token_ids, tables = list(self.output_token_ids), [list(table) for table in self.block_tables]
        return NewRequest(
            self.key, submit.choice, self.prompt_token_ids, output_token_ids, params, tables, self.grammar,
            submit.prediction_token_ids, tenant_of(submit), self.kv == "handoff",
        )  # fmt: skip

    def view(self) -> RequestView:
        """The part that a connector may see."""
        submit = self.submit
        return RequestView(
            request_id=submit.request_id,
            attempt=submit.attempt,
            transfer_id=submit.transfer_id,
            kv=self.kv,
            num_tokens=self.num_tokens,
            num_wanted=self.num_wanted,
            block_keys=self.hash_keys,
            handoff=self.handoff,
            ticket=self.ticket,
            kv_ready=self.kv_ready,
            num_local_hit=self.num_local_hit,
            prompt_token_ids=() if submit.cache_salt or submit.adapter else self.prompt_token_ids,
            kv_terms=submit.kv_terms,
            num_handed_over=self.num_handed_over,
            lent=self.transfer_key.lent,
        )

    def sources(self) -> SourceCounts:
        """Prompt tokens by the current source of their KV; they sum to the prompt's length.

        Tokens that the request computed before a preemption and found again, here or outside, count as computed, not as
        a hit.
        """
        prompt = len(self.prompt_token_ids)
        local = min(self.num_local_hit, prompt)
        found = min(local + self.num_external, prompt)
        own = prompt - found
        ranges = [(start, stop) for start, stop, _ in self.computed_before]
        own_local, own_found = _num_covered(ranges, local), _num_covered(ranges, found)
        found_again = _num_covered([(start, stop) for start, stop, again in self.computed_before if again], found)
        external = found - local - (own_found - own_local)
        return SourceCounts(
            computed=own_found - found_again + (0 if self.preempted else own),
            recomputed=found_again + (own if self.preempted else 0),
            local_hit=local - own_local,
            remote=external if self.source_is_peer else 0,
            store=0 if self.source_is_peer else external,
        )


def _end_at(submit: Submit) -> int:
    """The number of prompt and output tokens at which a request ends by its own limits."""
    num_prompt, most = len(submit.prompt_token_ids), submit.params.max_tokens
    end_at = maxsize if most is None else num_prompt + most
    return end_at if submit.until == "end" else min(end_at, num_prompt + len(submit.output_token_ids) + 1)


def tenant_of(submit: Submit) -> str:
    """A digest of what must be equal for two requests to learn from one another: API key and cache salt."""
    text = f"{len(submit.tenant)} {submit.tenant}{submit.cache_salt}"
    return blake2b(text.encode(errors="surrogatepass"), digest_size=16).hexdigest()


def name_of(submit: Submit) -> RequestName:
    """The name of a request in log lines."""
    return RequestName(submit.request_id, submit.attempt, label=submit.label, traceparent=submit.traceparent)


def held_blocks(tables: Sequence[Sequence[int]], first: int = 0) -> Sequence[int]:
    """The blocks of all groups' tables, from entry `first` on, without those given up."""
    if len(tables) == 1 and (not tables[0] or tables[0][0] >= 0):  # entries given up are at the start
        return tables[0][first:] if first else tables[0]
    return [block_id for table in tables for block_id in table[first:] if block_id >= 0]


def _num_covered(ranges: Sequence[tuple[int, int]], bound: int) -> int:
    """How many of the numbers [0, bound) lie in at least one of the ranges [start, stop)."""
    count = end = 0
    for start, stop in sorted(ranges):
        start, stop = max(start, end), min(stop, bound)
        if start < stop:
            count, end = count + stop - start, stop
    return count
