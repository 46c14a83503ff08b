"""Which sampling parameters a vocabulary cannot serve; without torch, for the engine's door."""

from pdkv.errors import InvalidRequest
from pdkv.sampling_params import SamplingParams


def check_for_vocab(params: SamplingParams, vocab_size: int) -> None:
    """Raise InvalidRequest for parameters that name tokens outside the vocabulary, or that lack a needed seed.

    `SamplingState.add` makes the same check, when it is too late for a polite answer.
    """
    for token_id in params.logit_bias:
        if not 0 <= token_id < vocab_size:
            raise InvalidRequest(f"logit_bias: token {token_id} is not in [0, {vocab_size})", param="logit_bias")
    for token_id in params.stop_token_ids:
        if not 0 <= token_id < vocab_size:
            raise InvalidRequest(f"stop_token_ids: {token_id} is not in [0, {vocab_size})", param="stop_token_ids")
    if params.seed is None and not params.greedy:
        raise InvalidRequest("a request that draws needs a seed; the router gives one", param="seed")
