"""The output of one generation: each token once, whichever engine it came from, and which part is still to be taken."""

from collections.abc import Sequence

import msgspec

from pdkv.router.request import Delta, GenerateRequest
from pdkv.wire.messages import Finished, FinishReason, PromptLogprobs, TokenLogprob, Tokens
from pdkv.wire.reports import MAX_DRAFTS, SourceCounts

MAX_TAKEN = 512
"""The most tokens that a reader gets at once: turning them into text, with logprobs, takes some milliseconds."""


class Output:
    """Tokens by position. `token_ids` are all so far; any engine can continue after them."""

    __slots__ = (
        *("_end_taken", "_max_tokens", "_num_prompt", "_pending", "_pending_logprobs", "_pending_prompt_logprobs"),
        *("_pending_pooled", "_pools"),
        *("num_duplicates", "prompt_logprobs_known", "token_ids"),
    )

    def __init__(self, request: GenerateRequest) -> None:
        self.token_ids: list[int] = []
        self.num_duplicates = 0  # tokens that arrived more than once
        self.prompt_logprobs_known = False  # they arrived, and need not be computed again
        self._max_tokens = request.params.max_tokens
        self._pools = request.params.pooling is not None
        self._pending_pooled = b""
        self._num_prompt = len(request.prompt_token_ids)
        self._end_taken = False
        self._pending: list[int] = []
        self._pending_logprobs: list[TokenLogprob] | None = None
        self._pending_prompt_logprobs: PromptLogprobs | None = None

    def fault_of(self, message: Tokens) -> str:
        """Why no correct engine could have sent these tokens; empty if one could."""
        num_tokens = len(message.token_ids)
        if message.position > len(self.token_ids):
            return f"token {message.position} before {len(self.token_ids)}"
        if self._max_tokens is not None and message.position + num_tokens > self._max_tokens:
            return f"token {message.position + num_tokens} of at most {self._max_tokens}"
        if message.logprobs is not None and len(message.logprobs) != num_tokens:
            return f"{len(message.logprobs)} logprobs for {num_tokens} tokens"
        if message.prompt_logprobs is not None and message.prompt_logprobs.count != self._num_prompt:
            return f"{message.prompt_logprobs.count} prompt logprobs for {self._num_prompt} tokens"
        if message.sources is not None and (fault := self.fault_of_sources(message.sources)):
            return fault
        if self._pools and message.position == 0 and (not message.pooled or len(message.pooled) % 4):
            return f"{len(message.pooled)} bytes of pooled float32 numbers"
        return ""

    def fault_of_sources(self, sources: SourceCounts) -> str:
        """Why no correct engine could have got the prompt's KV from these; empty if one could."""
        num_tokens = sum(msgspec.structs.astuple(sources))
        return f"sources of {num_tokens} prompt tokens for {self._num_prompt}" if num_tokens > self._num_prompt else ""

    def fault_of_end(self, message: Finished) -> str:
        """Why no correct engine could have ended its part so; empty if one could."""
        guesses, most = (message.accepted_guesses, message.rejected_guesses), MAX_DRAFTS * (len(self.token_ids) + 1)
        return f"{guesses} guesses" if max(guesses) > most else self.fault_of_sources(message.sources)

    def add(self, message: Tokens) -> Sequence[int]:
        """Add the new part of a message without fault. Returns the new tokens."""
        token_ids, logprobs = message.token_ids, message.logprobs
        num_known = len(self.token_ids) - message.position
        if num_known:
            self.num_duplicates += min(num_known, len(token_ids))
            if num_known >= len(token_ids):
                return ()
            token_ids = token_ids[num_known:]
            logprobs = None if logprobs is None else logprobs[num_known:]
        self.token_ids.extend(token_ids)
        self._pending.extend(token_ids)
        if logprobs is not None:
            if self._pending_logprobs is None:
                self._pending_logprobs = []
            self._pending_logprobs += logprobs
        if message.prompt_logprobs is not None and not self.prompt_logprobs_known:
            self.prompt_logprobs_known = True
            self._pending_prompt_logprobs = message.prompt_logprobs
        self._pending_pooled = message.pooled
        return token_ids

    def take(self, reason: FinishReason | None, stop_token_id: int | None) -> Delta | None:
        """Everything since the last call, at most MAX_TAKEN tokens; None if there is nothing. The end is reported once,
        with or after the last tokens.
        """
        if not self._pending and (reason is None or self._end_taken):
            return None
        rest = rest_logprobs = None
        if len(self._pending) > MAX_TAKEN:
            reason = stop_token_id = None
            rest = self._pending[MAX_TAKEN:]
            del self._pending[MAX_TAKEN:]
            if self._pending_logprobs is not None:
                rest_logprobs = self._pending_logprobs[MAX_TAKEN:]
                del self._pending_logprobs[MAX_TAKEN:]
        delta = Delta(
            self._pending, self._pending_logprobs, self._pending_prompt_logprobs, reason, stop_token_id,
            self._pending_pooled,
        )  # fmt: skip
        self._pending, self._pending_logprobs, self._pending_prompt_logprobs = rest or [], rest_logprobs, None
        self._pending_pooled = b""
        self._end_taken = reason is not None
        return delta

    @property
    def piles_up(self) -> bool:
        """Whether another call of `take` would return something."""
        return bool(self._pending)

    def is_last(self, num_tokens: int) -> bool:
        """Whether no token may follow this many."""
        return self._max_tokens is not None and num_tokens >= self._max_tokens
