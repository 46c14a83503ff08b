"""Words that must not be generated, as the token sequences that an engine can forbid."""

from collections.abc import Sequence

import msgspec

from pdkv.base.limits import clip
from pdkv.errors import InvalidRequest
from pdkv.sampling.params import SamplingParams
from pdkv.text.tokenizer import Tokenizer


def bad_word_token_ids(words: Sequence[str], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """The token sequences of `words`, by vLLM's rule.

    A word is forbidden as tokenized at the beginning of a text and, if a preceding space gives the same number of
    different tokens, also as tokenized after a space. Other tokenizations of the word are not found, as in vLLM.

    Raises:
        InvalidRequest: a word without a token.
    """
    sequences = []
    for word in dict.fromkeys(words):
        bare, spaced = (
            tuple(tokenizer.encode(prefix + word.lstrip(), add_special_tokens=False)) for prefix in ("", " ")
        )
        if not bare:
            raise InvalidRequest(f"bad_words: the tokenizer has no token for {clip(word)!r}", param="bad_words")
        sequences.append(bare)
        if spaced and spaced[0] != bare[0] and len(spaced) == len(bare):
            sequences.append(spaced)
    return tuple(dict.fromkeys(sequences))


def with_bad_word_ids(params: SamplingParams, tokenizer: Tokenizer) -> SamplingParams:
    """The same parameters with tokens in place of `bad_words`, as an engine needs them.

    Raises:
        InvalidRequest: as in `bad_word_token_ids`, or too many sequences or tokens.
    """
    if not params.bad_words:
        return params
    token_ids = (*params.bad_words_token_ids, *bad_word_token_ids(params.bad_words, tokenizer))
    params = msgspec.structs.replace(params, bad_words=(), bad_words_token_ids=token_ids)
    params.validate()
    return params
