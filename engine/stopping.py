"""Decides when generation ends, and which requests can never work here."""

from collections.abc import Sequence

from pdkv.base.limits import MAX_ADAPTER_BYTES, check_cache_salt, clip, utf8_bytes
from pdkv.engine.request import Request
from pdkv.engine.worker.sampling.checks import check_for_vocab
from pdkv.errors import InvalidRequest
from pdkv.sampling.logits_processors import NO_PROCESSORS, ProcessorSet
from pdkv.wire.messages import FinishReason, Submit


class StopRules:
    """End-of-sequence, stop token ids and lengths. Stop strings belong to the text side.

    Args:
        max_model_len: most tokens of prompt + output, as on the engine's card. The KV pool holds as many.
        processors: the logits processors that requests may name.
    """

    def __init__(
        self,
        *,
        eos_token_ids: Sequence[int],
        max_model_len: int,
        vocab_size: int,
        processors: ProcessorSet = NO_PROCESSORS,
    ) -> None:
        self._eos = frozenset(eos_token_ids)
        self.max_len = max_model_len
        self._vocab_size = vocab_size
        self._processors = processors

    def check(self, submit: Submit, *, has_connector: bool, bounds: tuple[int, int] | None = None) -> None:
        """Refuse a request that can never work.

        Args:
            bounds: the lowest and the highest token, if known.

        Raises:
            InvalidRequest: naming the value and what was expected.
        """
        check_cache_salt(submit.cache_salt)
        if utf8_bytes(submit.adapter, MAX_ADAPTER_BYTES) > MAX_ADAPTER_BYTES:
            raise InvalidRequest(f"adapter must have at most {MAX_ADAPTER_BYTES} bytes of UTF-8", param="adapter")
        submit.params.validate()
        prompt, output = submit.prompt_token_ids, submit.output_token_ids
        if not prompt:
            raise InvalidRequest("the prompt is empty", param="prompt")
        is_full = bool(output) and len(prompt) + len(output) == self.max_len  # `ended` says so
        if len(prompt) + len(output) >= self.max_len and not is_full:
            raise InvalidRequest(
                f"prompt and output so far have {len(prompt) + len(output)} tokens; "
                f"at most {self.max_len - 1} leave room for one more",
                param="prompt",
            )
        predicted = submit.prediction_token_ids
        if len(predicted) > self.max_len:
            text = f"prediction has {len(predicted)} tokens; at most {self.max_len} can be output"
            raise InvalidRequest(text, param="prediction")
        lowest, highest = bounds or (min(*prompt, *output, *predicted, 0), max(*prompt, *output, *predicted, 0))
        if not 0 <= lowest <= highest < self._vocab_size:
            raise InvalidRequest(f"token ids must be in [0, {self._vocab_size})", param="prompt")
        check_for_vocab(submit.params, self._vocab_size, self._eos)
        self._processors.check(submit.params.logits_processors)
        if submit.adapter:
            raise InvalidRequest(f"adapter {clip(submit.adapter)!r} cannot be served: adapters are not supported")
        if (submit.kv == "handoff") != (submit.until != "end"):
            raise InvalidRequest(f"kv={submit.kv!r} cannot be combined with until={submit.until!r}")
        if submit.kv != "local" and not has_connector:
            raise InvalidRequest(f"kv={submit.kv!r} needs a connector, but this engine has none")

    def check_continue(self, request: Request, token_ids: Sequence[int]) -> None:
        """Refuse tokens that the request cannot continue from. Raises InvalidRequest."""
        if request.num_tokens + len(token_ids) >= self.max_len:
            raise InvalidRequest(f"{len(token_ids)} tokens leave no room for one more", param="token_ids")
        if not 0 <= min(token_ids, default=0) <= max(token_ids, default=0) < self._vocab_size:
            raise InvalidRequest(f"token ids must be in [0, {self._vocab_size})", param="token_ids")

    def ended(self, request: Request) -> tuple[FinishReason | None, int | None]:
        """Whether the output in a Submit is already complete: its Finished was lost with an engine."""
        return self.apply(request, 1) if request.output_token_ids else (None, None)

    def apply(self, request: Request, num_new: int) -> tuple[FinishReason | None, int | None]:
        """Check whether one of the last `num_new` output tokens ends the request; tokens after it are dropped.

        Returns:
            The reason and, if a token ended it, that token.
        """
        output, params = request.output_token_ids, request.submit.params
        may_stop = num_new > 1 or params.stop_token_ids or output[-1] in self._eos
        if not may_stop and len(request.prompt_token_ids) + len(output) < request.end_at:  # as nearly always
            return None, None
        max_tokens = params.max_tokens if params.max_tokens is not None else self.max_len
        longest = min(max_tokens, self.max_len - len(request.prompt_token_ids))
        for count in range(len(output) - num_new + 1, len(output) + 1):
            token_id = output[count - 1]
            is_eos = token_id in self._eos and not params.ignore_eos
            if count >= params.min_tokens and (is_eos or token_id in params.stop_token_ids):
                del output[count:]
                return "stop", token_id
            if count >= longest:
                del output[count:]
                return "length", None
        return None, None
