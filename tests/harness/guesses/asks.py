"""Requests of every kind to the embedded model, which recites: some of its guesses are right, and some are not."""

import random
from typing import Any

NUM_TOKENS = 32
SAMPLED = {"temperature": 0.9, "seed": 7}
STREAM = {"stream": True, "stream_options": {"include_usage": True}}
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "days": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "days"],
    "additionalProperties": False,
}
PATTERN = "(the|fox|one|[a-f]{3}, ){9}"
TOOL = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA, "strict": True}}
WORDS = (
    "one two three four five",
    "the quick brown fox jumps over the lazy dog",
    "red, green and blue",
    "a b c d e f g",
)

KINDS: dict[str, tuple[int, dict[str, Any]]] = {
    "greedy": (20, {"temperature": 0, "logprobs": 2}),
    "sampled": (12, {**SAMPLED, "n": 4, **STREAM}),
    "filtered": (8, {**SAMPLED, "n": 2, "top_p": 0.9, "top_k": 20, "min_p": 0.01, "logprobs": 1, **STREAM}),
    "penalties": (8, {**SAMPLED, "n": 2, "repetition_penalty": 1.1, "presence_penalty": 0.3, "frequency_penalty": 0.3}),
    "stops": (8, {**SAMPLED, "n": 2, "stop": [" fo", "ee", "gr", "d e"], "ignore_eos": False, **STREAM}),
    "biased": (8, {**SAMPLED, "n": 2, "logit_bias": {"70": 3, "80": -100}, "min_tokens": 20, "bad_words": ["the"]}),
    "shaped": (6, {**SAMPLED, "n": 2, "structured_outputs": {"json": SCHEMA}, "ignore_eos": False, **STREAM}),
    "pattern": (6, {**SAMPLED, "logprobs": 1, "structured_outputs": {"regex": PATTERN}, "ignore_eos": False, **STREAM}),
    "tools": (6, {**SAMPLED, "n": 2, "tools": [TOOL], "tool_choice": "required", "ignore_eos": False, **STREAM}),
    "chat": (8, {**SAMPLED, **STREAM}),
}
"""How many requests of each kind, and what they ask for."""


def all_asks() -> dict[str, dict[str, Any]]:
    """Every request by its name; equal ones in every run."""
    return {f"{kind} {i}": _ask(kind, i, fields) for kind, (count, fields) in KINDS.items() for i in range(count)}


def predicted(ask: dict[str, Any], text: str) -> dict[str, Any]:
    """A request of kind "chat" that expects its answer but for one character."""
    middle = len(text) // 2
    return {**ask, "prediction": {"type": "content", "content": f"{text[:middle]}#{text[middle + 1 :]}"}}


def _ask(kind: str, number: int, fields: dict[str, Any]) -> dict[str, Any]:
    draw = random.Random(f"{kind} {number}")
    text = " ".join(draw.choices(WORDS, k=1 + number % 5)) + f" {draw.randrange(100)} "
    is_chat = kind in ("tools", "chat")
    prompt = {"messages": [{"role": "user", "content": text}]} if is_chat else {"prompt": text * 2}
    common = {"model": "pdkv-default", "max_tokens": NUM_TOKENS, "allowed_token_ids": None, "return_token_ids": True}
    own = {"seed": number} if "seed" in fields else {}
    if fields.get("ignore_eos", True):  # text, instead of one end after another
        own["logit_bias"] = {"1": -100, **fields.get("logit_bias", {})}
    return {**common, **prompt, **fields, **own}
