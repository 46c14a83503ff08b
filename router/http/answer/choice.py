"""One choice of a reply: takes engines' deltas, and produces the text, tokens and logprobs to show."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec

from pdkv.errors import MalformedMessage, RequestFailed
from pdkv.parsers.answer import AnswerStream
from pdkv.parsers.parts import Part, joined
from pdkv.parsers.tool_parser import failing
from pdkv.router.http.read.job import Job
from pdkv.router.http.read.prompts import Prompt
from pdkv.router.http.read.served_model import ServedModel
from pdkv.router.request import Delta, GenerateRequest, PromptKeys
from pdkv.text import StopStrings, TextStream
from pdkv.wire.messages import PromptLogprobs, TokenLogprob

_INLINE_ECHO = 256
"""Prompts of up to this many tokens are echoed on the event loop, which takes a quarter of a millisecond."""


class ShownLogprob(NamedTuple):
    """The logprob of one token of the reply."""

    token_id: int
    logprob: TokenLogprob | None  # None for a prompt's first token
    text_offset: int  # characters before the token


class TokenCounts(NamedTuple):
    """Token counts of a request that has ended."""

    prompt: int  # each prompt counts once, whatever n is
    completion: int  # over all choices
    cached: int  # of the prompts
    reasoning: int | None  # of the completions; None: reasoning is not told apart from answers
    # of the prompts, whose KV may have gone through a lossy codec; None: there is no such codec
    lossy: int | None = None
    guesses: tuple[int, int] | None = None  # those verified, right and wrong ones; None: it does not matter

    @property
    def of_prompt(self) -> dict[str, int]:
        """Details of the prompt's tokens; `lossy_tokens` is not a field of OpenAI's."""
        return {"cached_tokens": self.cached} | ({} if self.lossy is None else {"lossy_tokens": self.lossy})


def usage(counts: TokenCounts) -> dict[str, Any]:
    """Token counts of a request, including reasoning tokens if reasoning is separated from answers."""
    shown: dict[str, Any] = {
        "prompt_tokens": counts.prompt,
        "completion_tokens": counts.completion,
        "total_tokens": counts.prompt + counts.completion,
        "prompt_tokens_details": counts.of_prompt,
    }
    details = {} if counts.reasoning is None else {"reasoning_tokens": counts.reasoning}
    if counts.guesses is not None:
        details["accepted_prediction_tokens"], details["rejected_prediction_tokens"] = counts.guesses
    if details:
        shown["completion_tokens_details"] = details
    return shown


class ChoiceDelta(NamedTuple):
    """The new part of a choice."""

    choice: int  # its number in the reply
    text: str
    token_ids: Sequence[int]
    logprobs: list[ShownLogprob] | None
    finish_reason: str | None
    stop_reason: str | int | None  # the stop string, or the stop token other than end of sequence
    parts: Sequence[Part] | None = None  # of an answer that is parsed; its text is in them alone
    pooled: bytes = b""  # with the first delta of a prompt of which something is pooled


class Choice:
    """The state of one choice. `finished`: nothing more will be shown."""

    def __init__(self, job: Job, model: ServedModel, *, index: int, seed: int, sibling: "Choice | None" = None) -> None:
        """`index` counts over all prompts; `seed` is the client's, or drawn for this prompt.

        The prompt as shown in the reply is computed once, by the first choice, which is the `sibling` of the others.
        """
        self.index = index
        self.prompt: Prompt = job.prompts[index // job.n]
        self.finished = False
        self.num_tokens = 0
        self.num_reasoning_tokens = 0
        self.last_token_at = 0.0
        """When the last tokens came from the engines, by the process's clock; 0 before the first."""
        self._encoded_prompt_logprobs: PromptLogprobs | None = None
        self._prompt_logprobs: list[TokenLogprob | None] | None = None
        self._keys: PromptKeys = PromptKeys() if sibling is None else sibling._keys
        self._sibling = sibling
        self._shown_prompt: tuple[str, list[ShownLogprob]] | None = None
        self._job = job
        self._tokenizer = model.tokenizer
        self._text = self._new_text(job, model)
        self._answer = self._new_answer(job)
        self._echo_pending = job.echo
        self._num_echoed = 0  # characters
        params = msgspec.structs.replace(job.params, seed=seed, stop=())  # the engines do not know about stop strings
        room = model.max_model_len - len(self.prompt.token_ids)
        if params.max_tokens is None or params.max_tokens > room:  # it can only be a default: see prepare_completion
            params = msgspec.structs.replace(params, max_tokens=room)
        if sibling is not None:
            params = msgspec.structs.replace(params, prompt_logprobs=None)
        self._params = params

    @property
    def num_prompt_logprobs(self) -> int:
        """Tokens of the prompt that have logprobs; known once the first choice has its first delta."""
        encoded = (self._sibling or self)._encoded_prompt_logprobs
        return 0 if encoded is None else encoded.count

    @property
    def prompt_logprobs(self) -> list[TokenLogprob | None] | None:
        """Logprobs of the whole prompt; those of a long one are decoded on a thread, and the first caller waits.

        Raises:
            RequestFailed: the engine sent something else.
        """
        if self._sibling is not None:
            return self._sibling.prompt_logprobs
        if self._prompt_logprobs is None and self._encoded_prompt_logprobs is not None:
            try:
                self._prompt_logprobs = self._encoded_prompt_logprobs.decode()
            except MalformedMessage as error:
                raise RequestFailed(f"an engine sent invalid prompt logprobs: {error}", request_id="") from None
        return self._prompt_logprobs

    def _new_text(self, job: Job, model: ServedModel) -> TextStream:
        params = job.params
        ends = params.stop_token_ids if params.ignore_eos else (*params.stop_token_ids, *model.eos_token_ids)
        return TextStream(
            self._tokenizer.detokenizer(
                skip_special_tokens=job.skip_special_tokens,
                keep=job.answer.markers if job.answer is not None else frozenset(),
            ),
            stop=() if _stops_behind_thoughts(job) else job.stops or (),
            min_tokens=params.min_tokens,
            stop_token_ids=ends,
            shows_stop=job.shows_stop,
        )

    @staticmethod
    def _new_answer(job: Job) -> AnswerStream | None:
        if job.answer is None:
            return None
        behind = job.stops is not None and _stops_behind_thoughts(job)
        with failing(job.answer.tool_parser):
            return AnswerStream(job.answer, StopStrings(job.stops or (), shown=job.shows_stop) if behind else None)

    def request(
        self, *, timeout_s: float, stall_timeout_s: float, label: str, traceparent: str = "", near: str = ""
    ) -> GenerateRequest:
        """The request to generate the choice. `near`: the engine that ran the prompt for its sibling."""
        return GenerateRequest(
            prompt_token_ids=self.prompt.token_ids,
            params=self._params,
            seed_drawn=self._job.params.seed is None,
            choice=self.index % self._job.n,
            timeout_s=timeout_s,
            stall_timeout_s=stall_timeout_s,
            label=label,
            traceparent=traceparent,
            near=near,
            keys=self._keys,
            **self._job.common(),
        )

    def push(self, delta: Delta) -> ChoiceDelta:
        """The new part to show for an engine's delta. Nothing may be pushed once `finished`."""
        if delta.prompt_logprobs is not None:
            self._encoded_prompt_logprobs = delta.prompt_logprobs
        if self._job.prompt_only:
            return self._push_prompt_only(delta)
        if self._answer is not None:
            with failing(self._job.answer.tool_parser if self._job.answer is not None else None):
                return self._push_parsed(delta, self._answer)
        echo_text, shown = self._echo() if self._echo_pending else ("", [])
        if delta.logprobs is None:
            text, num_tokens, stop = self._text.push(delta.token_ids)
        else:
            text, num_tokens, stop = self._push_with_logprobs(delta.token_ids, delta.logprobs, shown)
        token_ids = delta.token_ids if num_tokens == len(delta.token_ids) else delta.token_ids[:num_tokens]
        self.num_tokens += num_tokens
        if stop is None and delta.finish_reason is not None:
            rest, _, stop = self._text.finish()
            text += rest
        finish_reason = "stop" if stop is not None else delta.finish_reason
        self.finished = finish_reason is not None
        return ChoiceDelta(
            self.index,
            echo_text + text,
            token_ids,
            shown if self._job.params.logprobs is not None else None,
            finish_reason,
            stop if stop is not None else self._stop_token(delta),
        )

    def _push_with_logprobs(
        self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob], shown: list[ShownLogprob]
    ) -> tuple[str, int, str | None]:
        """Push token by token, since each is shown with the position of its text."""
        text = ""
        for count, (token_id, logprob) in enumerate(zip(token_ids, logprobs, strict=True), 1):
            shown.append(ShownLogprob(token_id, logprob, self._num_echoed + self._text.num_characters))
            piece = self._text.push([token_id])
            text += piece.text
            if piece.stop is not None:
                return text, count, piece.stop
        return text, len(token_ids), None

    def _push_parsed(self, delta: Delta, answer: AnswerStream) -> ChoiceDelta:
        """Push token by token, since a call may end the answer, and reasoning tokens are counted."""
        parts: list[Part] = []
        shown: list[ShownLogprob] = []
        num_tokens, stop = 0, None
        for position, token_id in enumerate(delta.token_ids):
            if delta.logprobs is not None:
                shown.append(ShownLogprob(token_id, delta.logprobs[position], self._text.num_characters))
            piece = self._text.push([token_id])
            num_tokens += 1
            was_thinking = answer.is_thinking
            parts += answer.push(piece.text, accept_stop=self.num_tokens + num_tokens >= self._job.params.min_tokens)
            if was_thinking or answer.is_thinking:
                self.num_reasoning_tokens = self.num_tokens + num_tokens
            stop = piece.stop or answer.stop
            if stop is not None or answer.ended:
                break
        self.num_tokens += num_tokens
        if stop is None and delta.finish_reason is not None and not answer.ended:
            rest, _, stop = self._text.finish()
            parts += answer.push(rest)
        ended = stop is not None or answer.ended or delta.finish_reason is not None
        if ended:
            parts += answer.finish()
            stop = stop or answer.stop
        self.finished = ended
        return ChoiceDelta(
            self.index,
            "",
            delta.token_ids[:num_tokens],
            shown if self._job.params.logprobs is not None else None,
            self._parsed_reason(delta, stop, answer) if ended else None,
            stop if stop is not None or answer.ended else self._stop_token(delta),
            joined(parts),
        )

    def _parsed_reason(self, delta: Delta, stop: str | None, answer: AnswerStream) -> str:
        """The finish reason by OpenAI's rules: calls are a reason if the model chose to make them."""
        reason = "stop" if stop is not None or answer.ended or delta.finish_reason is None else delta.finish_reason
        assert self._job.answer is not None
        return "tool_calls" if reason == "stop" and answer.num_calls and not self._job.answer.named_tool else reason

    def _stop_token(self, delta: Delta) -> int | None:
        """The stop reason by vLLM's rule: a stop token is one, the end of sequence is not."""
        return delta.stop_token_id if delta.stop_token_id in self._job.params.stop_token_ids else None

    def _push_prompt_only(self, delta: Delta) -> ChoiceDelta:
        """Push without output: one token was generated because an engine cannot do with less; it is not shown."""
        if delta.finish_reason is None:
            return ChoiceDelta(self.index, "", (), None, None, None, pooled=delta.pooled)
        text, shown = self._echo() if self._job.echo else ("", [])
        self.finished = True
        logprobs = shown if self._job.params.logprobs is not None else None
        return ChoiceDelta(self.index, text, (), logprobs, "length", None, pooled=delta.pooled)

    def _echo(self) -> tuple[str, list[ShownLogprob]]:
        """The prompt as the beginning of the reply, with its logprobs if they were requested."""
        self._echo_pending = False
        text, shown = (self._sibling or self).shown_prompt()
        self._num_echoed = len(text)
        return text, [*shown]

    def echo_work(self, delta: Delta) -> Callable[[], object] | None:
        """A function that makes the echo of a long prompt on a thread before the first delta is pushed; None: `push`
        makes it.

        Its siblings begin after that delta, when the echo is ready.
        """
        if not self._echo_pending or self._sibling is not None or len(self.prompt.token_ids) <= _INLINE_ECHO:
            return None
        if delta.prompt_logprobs is not None:
            self._encoded_prompt_logprobs = delta.prompt_logprobs
        return self.shown_prompt if self._shown_prompt is None else None

    def shown_prompt(self) -> tuple[str, list[ShownLogprob]]:
        """The prompt as an echo shows it; computed once, and not to be changed."""
        if self._shown_prompt is None:
            self._shown_prompt = self._show_prompt()
        return self._shown_prompt

    def _show_prompt(self) -> tuple[str, list[ShownLogprob]]:
        token_ids = self.prompt.token_ids
        skip = self._job.skip_special_tokens
        text = self.prompt.text
        if text is None:
            text = self._tokenizer.decode(token_ids, skip_special_tokens=skip)
        shown: list[ShownLogprob] = []
        if self._job.params.logprobs is not None and self.prompt_logprobs is not None:
            detokenizer = self._tokenizer.detokenizer(skip_special_tokens=skip)
            offset = 0
            for token_id, logprob in zip(token_ids, self.prompt_logprobs, strict=True):
                shown.append(ShownLogprob(token_id, logprob, offset))
                offset += len(detokenizer.push(token_id))
        return text, shown


def _stops_behind_thoughts(job: Job) -> bool:
    """Whether stop strings apply to the text after the reasoning, and not to the reasoning."""
    answer = job.answer
    return answer is not None and answer.reasoning_parser is not None and not answer.stops_in_thoughts
