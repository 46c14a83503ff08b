"""Non-streamed replies to completions and chat completions."""

import functools
from collections.abc import Sequence
from typing import Any

import msgspec

from pdkv.parsers.parts import Content, Part, Reasoning, whole_calls
from pdkv.router.http.answer.choice import Choice, ChoiceDelta, ShownLogprob, TokenCounts, usage
from pdkv.router.http.answer.logprobs import chat_logprobs, completion_logprobs, prompt_logprobs
from pdkv.router.http.answer.replies import Asked, Work
from pdkv.router.http.read.job import Job
from pdkv.text import Tokenizer


def reply_frame(asked: Asked, kind: str) -> dict[str, Any]:
    """The first fields of a reply and of each chunk of a stream; `kind`: OpenAI's name of the object."""
    prefix = "chatcmpl-" if asked.job.chat else "cmpl-"
    return {"id": prefix + asked.serial, "object": kind, "created": asked.created, "model": asked.model.name}


class WholeCompletion:
    """Gathers all choices of a reply."""

    def __init__(self, asked: Asked) -> None:
        self._asked = asked
        self._wholes = [WholeChoice(choice) for choice in asked.choices]

    def add(self, delta: ChoiceDelta) -> None:
        """Add the next delta of a choice."""
        self._wholes[delta.choice].add(delta)

    @property
    def num_logprobs(self) -> int:
        """Number of tokens whose logprobs are shown, including the prompts'."""
        return sum(whole.num_logprobs for whole in self._wholes)

    async def body(self, counts: TokenCounts, work: Work) -> dict[str, Any]:
        """The reply; choices are encoded one by one, never all of them as objects."""
        asked = self._asked
        job, tokenizer = asked.job, asked.model.tokenizer
        choices = [await work(functools.partial(whole.encoded, job, tokenizer)) for whole in self._wholes]
        body = reply_frame(asked, "chat.completion" if job.chat else "text_completion")
        body |= {"choices": choices, "usage": usage(counts)}
        if job.chat:
            body |= await work(functools.partial(prompt_extras, asked.choices[0], job, tokenizer))
        return body


class WholeChoice:
    """Gathers the deltas of one choice of a reply that is not streamed."""

    def __init__(self, choice: Choice) -> None:
        self._choice = choice
        self._texts: list[str] = []
        self._parts: list[Part] = []
        self._token_ids: list[int] = []
        self._logprobs: list[ShownLogprob] = []
        self._last: ChoiceDelta | None = None

    def add(self, delta: ChoiceDelta) -> None:
        """Add the next delta."""
        self._texts.append(delta.text)
        if delta.parts is not None:
            self._parts.extend(delta.parts)
        self._token_ids.extend(delta.token_ids)
        if delta.logprobs is not None:
            self._logprobs.extend(delta.logprobs)
        self._last = delta

    @property
    def num_logprobs(self) -> int:
        """Number of tokens whose logprobs are shown, including the prompt's."""
        return len(self._logprobs) + self._choice.num_prompt_logprobs

    def encoded(self, job: Job, tokenizer: Tokenizer) -> msgspec.Raw:
        """The entry of `choices`, as JSON."""
        return msgspec.Raw(msgspec.json.encode(self._body(job, tokenizer)))

    def _body(self, job: Job, tokenizer: Tokenizer) -> dict[str, Any]:
        assert self._last is not None
        text = "".join(self._texts)
        format_logprobs = chat_logprobs if job.chat else completion_logprobs
        logprobs = None
        if job.params.logprobs is not None:
            logprobs = format_logprobs(self._logprobs, tokenizer, as_ids=job.return_tokens_as_ids)
        body: dict[str, Any] = {"index": self._choice.index}
        if job.chat:
            said = {"content": text} if job.answer is None else message_of(self._parts)
            body["message"] = {"role": "assistant", **said, "refusal": None}
        else:
            body["text"] = text
        body |= {"logprobs": logprobs, "finish_reason": self._last.finish_reason, "stop_reason": self._last.stop_reason}
        if job.return_token_ids:
            body["token_ids"] = self._token_ids
        if job.chat:
            return body
        return body | prompt_extras(self._choice, job, tokenizer)


def message_of(parts: Sequence[Part]) -> dict[str, Any]:
    """A whole message's content, and its reasoning and calls if there are any."""
    content = "".join([part.text for part in parts if isinstance(part, Content)])
    reasoning = "".join([part.text for part in parts if isinstance(part, Reasoning)])
    calls = whole_calls(parts)
    message: dict[str, Any] = {"content": content if content or not (reasoning or calls) else None}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in calls
        ]
    return message


def prompt_extras(choice: Choice, job: Job, tokenizer: Tokenizer) -> dict[str, Any]:
    """vLLM's extra fields about the prompt: in each choice of completions, next to the choices of chat."""
    extras: dict[str, Any] = {}
    if job.return_token_ids:
        extras["prompt_token_ids"] = choice.prompt.token_ids
    if job.num_prompt_logprobs is not None and (of_prompt := choice.prompt_logprobs) is not None:
        entries = prompt_logprobs(of_prompt, tokenizer, job.num_prompt_logprobs)
        extras["prompt_logprobs"] = msgspec.Raw(msgspec.json.encode(entries))
    return extras
