"""Asks with the official client, whole and streamed; both must say the same."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from openai import OpenAI


class Reply(NamedTuple):
    """What both ways have in common."""

    choices: list[dict[str, Any]]  # text, finish_reason, stop_reason, logprobs; where asked for also token_ids
    usage: dict[str, Any]  # of the first of the two requests, as cached_tokens differ

    @property
    def texts(self) -> list[str]:
        """The text of each choice."""
        return [choice["text"] for choice in self.choices]

    @property
    def only(self) -> dict[str, Any]:
        """The one choice."""
        [choice] = self.choices
        return choice


@contextmanager
def client_of(url: str, timeout_s: float = 120) -> Iterator["OpenAI"]:
    """A client that does not retry. The package takes a second to import: only tests that run need it."""
    from openai import OpenAI

    with OpenAI(base_url=url + "/v1", api_key="none", max_retries=0, timeout=timeout_s) as client:
        yield client


def complete(client: "OpenAI", prompt: Any, **fields: Any) -> Reply:
    """POST /v1/completions twice: whole, then streamed."""
    fields = {"model": "served", "prompt": prompt, "temperature": 0, **fields}
    whole = client.completions.create(**fields).model_dump()
    chunks = client.completions.create(**fields, stream=True, stream_options={"include_usage": True})
    return _compare(whole, [chunk.model_dump() for chunk in chunks])


def chat(client: "OpenAI", messages: list[dict[str, Any]] | str, **fields: Any) -> Reply:
    """POST /v1/chat/completions twice: whole, then streamed."""
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    fields = {"model": "served", "messages": messages, "temperature": 0, **fields}
    whole = client.chat.completions.create(**fields).model_dump()
    chunks = client.chat.completions.create(**fields, stream=True, stream_options={"include_usage": True})
    return _compare(whole, [chunk.model_dump() for chunk in chunks])


def gather(chunks: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The choices of a stream's chunks, each put together again."""
    choices: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for part in chunk["choices"]:
            whole = choices.setdefault(part["index"], {"text": "", "finish_reason": None})
            assert whole["finish_reason"] is None, "a choice goes on behind its end"
            whole["text"] += _text(part)
            whole["finish_reason"] = part["finish_reason"]
            whole["stop_reason"] = part.get("stop_reason")
            if part.get("logprobs") is not None:
                _extend(whole, "logprobs", part["logprobs"])
            if "token_ids" in part:
                whole.setdefault("token_ids", []).extend(part["token_ids"])
    return [choices[index] for index in sorted(choices)]


def _compare(whole: dict[str, Any], chunks: list[dict[str, Any]]) -> Reply:
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert chunks[-1]["choices"] == []
    assert {chunk["id"] for chunk in chunks} == {chunks[0]["id"]} != {whole["id"]}
    [*choices] = gather([whole])
    assert gather(chunks) == choices
    assert _counts(chunks[-1]["usage"]) == _counts(whole["usage"])
    return Reply(choices, whole["usage"])


def _text(part: dict[str, Any]) -> str:
    message = part.get("message") or part.get("delta")
    return str(part["text"]) if message is None else message["content"] or ""


def _extend(whole: dict[str, Any], name: str, lists: dict[str, Any]) -> None:
    kept = whole.setdefault(name, {})
    for key, values in lists.items():
        kept[key] = kept.get(key, []) + values if isinstance(values, list) else values


def _counts(usage: dict[str, Any]) -> tuple[int, int, int]:
    return usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]
