"""A prompt in progress: its choices, the effects of the engine's messages on them, and the outputs shown of them."""

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, field

from pdkv.base.clock import MONOTONIC, unix_time
from pdkv.errors import PdkvError
from pdkv.offline.chat_tools import calls_in
from pdkv.offline.outputs import CompletionOutput, Logprob, Logprobs, RequestMetrics, RequestOutput
from pdkv.parsers.answer import AnswerFormat
from pdkv.sampling.params import RequestOutputKind
from pdkv.text import TextPiece, TextStream
from pdkv.wire.failures import error_of
from pdkv.wire.messages import Abort, EngineToRouter, Failed, Finished, Submit, TokenLogprob, Tokens
from pdkv.wire.reports import SourceCounts

_ABOUT_REQUESTS = (Tokens, Finished, Failed)


class Choice:
    """One generation, running or ended. Its text is made on demand, unless a stop string may end it, so that the device
    does not wait for text that has not been read.
    """

    def __init__(
        self, submit: Submit, stream: TextStream, texts: Callable[[int], str | None], answer: AnswerFormat | None = None
    ) -> None:
        """`texts`: a token's own text; `answer`: how calls are found in the text."""
        self.submit = submit
        self.token_ids: list[int] = []
        self.logprobs: list[Logprobs] = []
        self.cumulative_logprob = 0.0
        self.prompt_logprobs: list[Logprobs | None] | None = None
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None
        self.sources = SourceCounts()
        self.pooled = b""
        self.has_news = False  # for `take`
        self._stream = stream
        self._texts = texts
        self._answer = answer
        self._text = ""  # of the first `_num_read` tokens
        self._num_read = 0
        self._is_flushed = False  # the text is complete
        self._num_shown = 0  # tokens that `take` has returned
        self._num_shown_chars = 0

    @property
    def text(self) -> str:
        """The text so far; while the choice is running, without what may be half a character or a stop string."""
        if not self.submit.params.detokenize:
            return ""
        if self._num_read < len(self.token_ids):
            self._text += self._stream.push(self.token_ids[self._num_read :]).text
            self._num_read = len(self.token_ids)
        if self.finish_reason is not None and not self._is_flushed:
            self._flush()
        return self._text

    def push(self, tokens: Tokens) -> int:
        """Take new tokens; a stop string may end the choice. Returns how many belong to it."""
        self.has_news = True
        token_ids, logprobs = tokens.token_ids, tokens.logprobs
        if self._stream.has_stops:
            piece = self._stream.push(token_ids)
            self._append(piece)
            token_ids = token_ids[: piece.num_tokens]
            self._num_read += piece.num_tokens
        self.token_ids += token_ids
        if logprobs:
            self.logprobs += map(self._describe, logprobs[: len(token_ids)])
            self.cumulative_logprob += sum(entry.logprob for entry in logprobs[: len(token_ids)])
        if tokens.prompt_logprobs is not None:
            self.prompt_logprobs = [
                self._describe(entry) if entry else None for entry in tokens.prompt_logprobs.decode()
            ]
        self.sources = tokens.sources or self.sources
        self.pooled = tokens.pooled or self.pooled
        return len(token_ids)

    def _describe(self, entry: TokenLogprob) -> Logprobs:
        shown = {entry.token_id: Logprob(entry.logprob, entry.rank, self._texts(entry.token_id))}
        for rank, (token_id, logprob) in enumerate(entry.top, 1):
            shown.setdefault(token_id, Logprob(logprob, rank, self._texts(token_id)))
        return shown

    def end(self, reason: str, stop_token_id: int | None = None) -> None:
        """End the choice: no more tokens come. Text held back for a stop string is released, and may complete one."""
        self.has_news = True
        self.finish_reason = reason
        self.stop_reason = stop_token_id if stop_token_id in self.submit.params.stop_token_ids else None
        if self._stream.has_stops:
            self._flush()

    def _flush(self) -> None:
        self._is_flushed = True
        self._append(self._stream.finish())

    def _append(self, piece: TextPiece) -> None:
        self._text += piece.text
        if piece.stop is not None:
            self.finish_reason, self.stop_reason, self._is_flushed = "stop", piece.stop, True

    def output(self, *, first_token: int = 0, first_char: int = 0) -> CompletionOutput:
        """The choice's output from token `first_token` and character `first_char` on."""
        text, answer = self.text, self._answer
        return CompletionOutput(
            index=self.submit.choice,
            text=text[first_char:],
            token_ids=self.token_ids[first_token:],
            cumulative_logprob=self.cumulative_logprob if self.submit.params.logprobs is not None else None,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            logprobs=self.logprobs[first_token:] if self.submit.params.logprobs is not None else None,
            tool_calls=calls_in(text, answer) if answer is not None and self.finish_reason else None,
        )

    def take(self) -> CompletionOutput:
        """Everything new since the last call."""
        output = self.output(first_token=self._num_shown, first_char=self._num_shown_chars)
        self._num_shown, self._num_shown_chars, self.has_news = len(self.token_ids), len(self._text), False
        return output


@dataclass(slots=True)
class Generation:
    """All choices of one prompt. The first one's prefill is the others' prefix hit, so they wait for it."""

    request_id: str
    prompt: str | None
    choices: list[Choice]
    output_kind: RequestOutputKind
    error: PdkvError | None = None  # why it is given up
    waiting: list[Choice] = field(init=False)
    metrics: RequestMetrics = field(init=False)
    _shows_prompt: bool = True

    def __post_init__(self) -> None:
        self.waiting = self.choices[1:]
        self.metrics = RequestMetrics(arrival_time=unix_time(), queued_ts=MONOTONIC.now())

    @property
    def finished(self) -> bool:
        """Whether all choices have ended."""
        return all(choice.finish_reason is not None for choice in self.choices)

    @property
    def has_news(self) -> bool:
        """Whether `take`, after a message about the generation, returns an output that the caller wants."""
        return self.output_kind != RequestOutputKind.FINAL_ONLY or self.finished

    def note_tokens(self, count: int) -> None:
        """Note that this many tokens have arrived."""
        metrics = self.metrics
        metrics.last_token_ts = MONOTONIC.now()
        metrics.first_token_ts = metrics.first_token_ts or metrics.last_token_ts
        metrics.num_generation_tokens += count

    def abort(self) -> None:
        """End the generation in its current state."""
        for choice in self.choices:
            if choice.finish_reason is None:
                choice.end("abort")

    def output(self) -> RequestOutput:
        """All choices in their current state."""
        return self._output([choice.output() for choice in self.choices])

    def take(self) -> RequestOutput:
        """The output that `output_kind` asks for. In deltas, each token and the prompt's logprobs appear once."""
        if self.output_kind != RequestOutputKind.DELTA:
            return self.output()
        output = self._output([choice.take() for choice in self.choices if choice.has_news], self._shows_prompt)
        self._shows_prompt = False
        return output

    def _output(self, outputs: list[CompletionOutput], shows_prompt: bool = True) -> RequestOutput:
        first = self.choices[0]
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=first.submit.prompt_token_ids,
            prompt_logprobs=first.prompt_logprobs if shows_prompt else None,
            num_cached_tokens=first.sources.local_hit + first.sources.remote + first.sources.store,
            outputs=outputs,
            finished=self.finished,
            metrics=copy(self.metrics),
        )


class InFlight:
    """The choices that an engine is running. Not thread-safe.

    Args:
        send: sends a message to the engine. If it raises, the generation has not begun.
    """

    def __init__(self, send: Callable[[Submit | Abort], None]) -> None:
        self._send = send
        self._choices: dict[str, tuple[Generation, Choice]] = {}
        self.num_ended = 0
        """Choices so far that have neither failed nor been given up."""
        self.num_tokens = 0

    def __len__(self) -> int:
        return len(self._choices)

    def start(self, generation: Generation) -> None:
        """Send the first choice to the engine; the others follow."""
        self._submit(generation, generation.choices[0])

    def _submit(self, generation: Generation, choice: Choice) -> None:
        self._send(choice.submit)
        self._choices[choice.submit.request_id] = (generation, choice)

    def receive(self, message: EngineToRouter) -> Generation | None:
        """Act on a message of the engine. Returns the generation that it is about, which may have failed
        because of it.
        """
        if not isinstance(message, _ABOUT_REQUESTS):
            return None
        found = self._choices.get(message.request_id)
        if found is None:
            return None  # output of its last step after a stop string
        generation, choice = found
        match message:
            case Tokens():
                num_tokens = choice.push(message)
                generation.note_tokens(num_tokens)
                self.num_tokens += num_tokens
                if choice.finish_reason is not None:
                    self._ended(choice)
                    self._send(Abort(message.request_id, message.attempt))
                if generation.waiting:
                    waiting, generation.waiting = generation.waiting, []
                    for sibling in waiting:
                        self._submit(generation, sibling)
            case Finished():
                choice.sources = message.sources
                if choice is generation.choices[0]:
                    generation.metrics.scheduled_ts = generation.metrics.queued_ts + message.queued_s
                choice.end(message.reason, message.stop_token_id)
                self._ended(choice)
            case Failed():
                del self._choices[message.request_id]
                generation.error = error_of(message)
                generation.error.request_id = generation.request_id  # the engine has names of its own
                self.give_up(generation)
        return generation

    def _ended(self, choice: Choice) -> None:
        del self._choices[choice.submit.request_id]
        self.num_ended += 1

    def give_up(self, generation: Generation) -> None:
        """End the generation's unfinished choices, which stay as they are."""
        generation.waiting = []
        submits = [choice.submit for choice in generation.choices]
        live = [submit for submit in submits if self._choices.pop(submit.request_id, None) is not None]
        for submit in live:
            self._send(Abort(submit.request_id, submit.attempt))
