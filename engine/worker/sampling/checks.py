"""Refuses sampling parameters that a vocabulary cannot serve, without torch, before a request enters the engine."""

from collections.abc import Collection

from pdkv.errors import InvalidRequest
from pdkv.sampling.params import SamplingParams


def check_for_vocab(params: SamplingParams, vocab_size: int, eos_token_ids: Collection[int] = ()) -> None:
    """Raise InvalidRequest for parameters that name tokens outside the vocabulary, forbid all of it, or lack a seed.

    `SamplingState.add` makes the same check, when it is too late for a proper answer.
    """
    for token_id in params.logit_bias:
        if not 0 <= token_id < vocab_size:
            raise InvalidRequest(f"logit_bias: token {token_id} is not in [0, {vocab_size})", param="logit_bias")
    for token_id in params.stop_token_ids:
        if not 0 <= token_id < vocab_size:
            raise InvalidRequest(f"stop_token_ids: {token_id} is not in [0, {vocab_size})", param="stop_token_ids")
    for name, token_ids in (
        ("allowed_token_ids", params.allowed_token_ids or ()),
        *(("bad_words", word) for word in params.bad_words_token_ids),
    ):
        if token_ids and not 0 <= min(token_ids) <= max(token_ids) < vocab_size:
            wrong = next(i for i in token_ids if not 0 <= i < vocab_size)
            raise InvalidRequest(f"{name}: token {wrong} is not in [0, {vocab_size})", param=name)
    if params.bad_words:
        raise InvalidRequest(
            "bad_words are texts: the engine needs their tokens, bad_words_token_ids", param="bad_words"
        )
    if params.structured_outputs is not None:
        raise InvalidRequest(
            "structured_outputs is for clients: the engine needs the grammar made from it", param="structured_outputs"
        )
    if params.min_tokens > 0:
        _check_choice_is_left(params, vocab_size, eos_token_ids)
    if params.seed is None and not params.greedy:
        raise InvalidRequest("a request that draws needs a seed, which the router sets", param="seed")


def _check_choice_is_left(params: SamplingParams, vocab_size: int, eos_token_ids: Collection[int]) -> None:
    """Before `min_tokens`, no token that stops may be drawn."""
    stops = {*params.stop_token_ids, *eos_token_ids}
    if params.allowed_token_ids is not None and stops.issuperset(params.allowed_token_ids):
        raise InvalidRequest(
            f"min_tokens is {params.min_tokens}, but every allowed_token_ids entry stops: no token is left to choose",
            param="min_tokens",
        )
    if len(stops) >= vocab_size:
        raise InvalidRequest(
            f"min_tokens is {params.min_tokens}, but stop_token_ids and the end-of-sequence tokens cover all "
            f"{vocab_size} tokens of the vocabulary: no token is left to choose",
            param="min_tokens",
        )
