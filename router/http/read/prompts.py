"""Prompts of a request: texts or token ids, checked, tokenized, and truncated if the client asks for it."""

from collections.abc import Sequence
from typing import Literal, NamedTuple, cast

from pdkv.base.limits import MAX_CHOICES
from pdkv.errors import InvalidRequest
from pdkv.router.http.read.served_model import Cancelled, ServedModel, check_wanted

SAMPLE_CHARS_PER_TOKEN = 16
"""Characters per token of the model's length above which only one end of a text is tokenized first."""

_MARGIN_TOKENS = 64
"""Distance from the cut, in characters, beyond which a cut text has the tokens of the whole text."""


class Prompt(NamedTuple):
    """One prompt."""

    token_ids: list[int]
    text: str | None  # as the client wrote it; None: the client gave token ids, or they were truncated


class Truncation(NamedTuple):
    """The part of a prompt that is kept."""

    num_tokens: int
    side: Literal["left", "right"]  # on which tokens are dropped

    def cut(self, token_ids: list[int]) -> list[int]:
        """Truncate to `num_tokens`."""
        if len(token_ids) <= self.num_tokens:
            return token_ids
        return token_ids[-self.num_tokens :] if self.side == "left" else token_ids[: self.num_tokens]

    def kept_end(self, text: str, num_chars: int) -> str:
        """This many characters from the end of the text that is kept."""
        if len(text) <= num_chars:
            return text
        return text[-num_chars:] if self.side == "left" else text[:num_chars]


def read_truncation(
    num_tokens: int | None, side: Literal["left", "right"] | None, model: ServedModel
) -> Truncation | None:
    """Read `truncate_prompt_tokens` and `truncation_side`; -1 leaves room for one token. As in vLLM, the end is kept.

    Raises:
        InvalidRequest: a number that is neither -1 nor a possible number of tokens.
    """
    if num_tokens is None:
        return None
    longest = model.max_model_len - 1
    if num_tokens != -1 and not 1 <= num_tokens <= model.max_model_len:
        raise InvalidRequest(
            f"truncate_prompt_tokens must be -1 (as many as fit) or in [1, {model.max_model_len}], got {num_tokens}",
            param="truncate_prompt_tokens",
        )
    return Truncation(longest if num_tokens == -1 else num_tokens, side or "left")


def read_prompts(
    prompt: str | list[str | int | list[int]],
    n: int,
    model: ServedModel,
    cancelled: Cancelled,
    *,
    add_special_tokens: bool = True,
    truncation: Truncation | None = None,
    most: int = MAX_CHOICES,
    param: str = "prompt",
) -> list[Prompt]:
    """Read at most `most` prompts, times n: a text, a list of texts, token ids or a list of them. `param`: the field
    that they are given in.

    Raises:
        InvalidRequest: none, too many, too long, or not of one kind.
        RequestAborted: the request was cancelled.
    """
    parts = [prompt] if isinstance(prompt, str) else prompt
    if not parts:
        raise InvalidRequest(f"{param} must not be empty", param=param)
    if isinstance(parts[0], int):
        if truncation is None:
            check_length(len(parts), None, model, param)
    elif len(parts) * n > most:
        raise InvalidRequest(f"{param}s times n must be at most {most}, got {len(parts)} * {n}", param=param)
    kinds = {type(part) for part in parts}  # no set(map(…)): with a million parts, it keeps other threads waiting
    if len(kinds) > 1:
        raise InvalidRequest(f"{param} must be of one kind: texts, token ids, or lists of token ids", param=param)
    if kinds == {str}:
        prompts = _read_texts(cast(list[str], parts), model, cancelled, add_special_tokens, truncation, param)
    else:
        lists = cast(list[list[int]], [parts] if kinds == {int} else parts)
        prompts = _read_token_ids(lists, model, truncation, param)
    if any(not token_ids or text == "" for token_ids, text in prompts):
        raise InvalidRequest(f"{param} must not be empty", param=param)
    return prompts


def _read_texts(
    texts: list[str],
    model: ServedModel,
    cancelled: Cancelled,
    add_special_tokens: bool,
    truncation: Truncation | None,
    param: str,
) -> list[Prompt]:
    if truncation is None:
        for text in texts:
            check_chars(len(text), model, param)
    prompts = []
    for text in texts:
        token_ids = encode(text, model, param, cancelled, add_special_tokens=add_special_tokens, truncation=truncation)
        kept = token_ids if truncation is None else truncation.cut(token_ids)
        prompts.append(Prompt(kept, text if kept is token_ids else None))
    return prompts


def _read_token_ids(
    lists: list[list[int]], model: ServedModel, truncation: Truncation | None, param: str
) -> list[Prompt]:
    prompts = [Prompt(ids if truncation is None else truncation.cut(ids), None) for ids in lists]
    check_length(max(len(token_ids) for token_ids, _ in prompts), None, model, param)
    for token_ids, _ in prompts:
        model.check_token_ids(token_ids, param)
    return prompts


def encode(
    text: str,
    model: ServedModel,
    param: str,
    cancelled: Cancelled,
    *,
    add_special_tokens: bool,
    truncation: Truncation | None = None,
) -> list[int]:
    """Tokens of a text; with a truncation, at least the tokens that it keeps, for the caller to cut.

    The tokenizer cannot be interrupted, so for a text that will hardly fit, one end is tokenized first. If that end
    alone has twice the model's length, the text cannot fit, and the far half of its tokens is the same as in the whole
    text (a cut changes only the few tokens next to it).

    Raises:
        InvalidRequest: it cannot fit.
        RequestAborted: the request was cancelled.
    """
    limit = model.max_model_len
    if truncation is None:
        check_chars(len(text), model, param)
        sample = text[: limit * SAMPLE_CHARS_PER_TOKEN]
    else:
        text = truncation.kept_end(text, (limit + _MARGIN_TOKENS) * model.tokenizer.max_token_chars)
        sample = truncation.kept_end(text, limit * SAMPLE_CHARS_PER_TOKEN)
    token_ids: list[int] = []
    for piece in (sample, text) if len(sample) < len(text) else (text,):
        check_wanted(cancelled)
        token_ids = model.tokenizer.encode(piece, add_special_tokens=add_special_tokens)
        if piece is not text and len(token_ids) >= 2 * limit:
            if truncation is None:
                raise too_long(
                    f"the prompt has {len(text)} characters, the first {len(piece)} of which have {len(token_ids)} "
                    f"tokens, but the model's length is {limit} tokens",
                    param,
                )
            break
    return token_ids


def check_chars(num_chars: int, model: ServedModel, param: str) -> None:
    """Check before tokenizing whether a text can fit at all. Raises InvalidRequest."""
    if num_chars > model.max_model_len * model.tokenizer.max_token_chars:
        raise too_long(
            f"the prompt has {num_chars} characters, but the model's length is {model.max_model_len} tokens "
            f"of at most {model.tokenizer.max_token_chars} characters",
            param,
        )


def check_length(num_prompt: int, max_tokens: int | None, model: ServedModel, param: str) -> None:
    """Check that the prompt and the requested output fit into the model's length. Raises InvalidRequest."""
    limit = model.max_model_len
    if num_prompt >= limit:
        raise too_long(
            f"the prompt has {num_prompt} tokens, but the model's length is {limit} tokens "
            "and at least one must be generated",
            param,
        )
    if max_tokens is not None and num_prompt + max_tokens > limit:
        raise too_long(
            f"the prompt has {num_prompt} tokens and max_tokens is {max_tokens}: "
            f"together more than the model's length of {limit} tokens",
            "max_tokens",
        )


def too_long(message: str, param: str) -> InvalidRequest:
    """The error for a prompt that does not fit, with OpenAI's code."""
    return InvalidRequest(message, param=param, code="context_length_exceeded")


def longest(prompts: Sequence[Prompt]) -> int:
    """Tokens of the longest prompt."""
    return max(len(prompt.token_ids) for prompt in prompts)
