"""Bad words as token sequences, by vLLM's rule."""

import pytest
import small_tokenizers
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers

from pdkv.errors import InvalidRequest
from pdkv.sampling.params import SamplingParams
from pdkv.text import Tokenizer, with_bad_word_ids
from pdkv.text.bad_words import bad_word_token_ids


def with_spaces() -> Tokenizer:
    """A space before a word is part of its token, where there is one."""
    vocab = {"cat": 0, "Ġcat": 1, "Ġ": 2, "dog": 3, "<unk>": 4}
    backend = Backend(models.WordLevel(vocab, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return Tokenizer(backend)


def test_a_word_is_forbidden_with_and_without_a_space_before_it() -> None:
    assert bad_word_token_ids(["cat"], with_spaces()) == ((0,), (1,))
    assert bad_word_token_ids([" cat", "cat"], with_spaces()) == ((0,), (1,))


def test_a_space_that_is_a_token_of_its_own_makes_no_other_sequence() -> None:
    tokenizer = Tokenizer(small_tokenizers.byte_level_backend())
    [word] = bad_word_token_ids(["zq"], tokenizer)
    assert tokenizer.decode(word) == "zq"
    assert len(word) == 2


def test_words_without_tokens_are_refused() -> None:
    empty = Tokenizer(Backend(models.BPE({"a": 0}, [])))
    with pytest.raises(InvalidRequest, match="no token for 'zz'") as raised:
        bad_word_token_ids(["zz"], empty)
    assert raised.value.param == "bad_words"


def test_tokens_are_added_to_what_is_there_and_counted() -> None:
    params = SamplingParams(bad_words=("cat",), bad_words_token_ids=((3, 3),))
    resolved = with_bad_word_ids(params, with_spaces())
    assert (resolved.bad_words, resolved.bad_words_token_ids) == ((), ((3, 3), (0,), (1,)))
    assert with_bad_word_ids(resolved, with_spaces()) is resolved
    long = SamplingParams(bad_words=("z" * 2000,))
    with pytest.raises(InvalidRequest, match="at most 1024 tokens"):
        with_bad_word_ids(long, Tokenizer(small_tokenizers.byte_level_backend()))
