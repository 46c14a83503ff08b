"""Detokenizer and stop strings together: what counts as output and what is shown."""

import tokenizers

from pdkv.text import TextStream, Tokenizer


def test_tokens_behind_a_stop_string_do_not_count(byte_level: tokenizers.Tokenizer) -> None:
    tokenizer = Tokenizer(byte_level)
    ids = tokenizer.encode("abc")
    ids = [i for c in "abcxyz" for i in tokenizer.encode(c)]
    stream = TextStream(tokenizer.detokenizer(), stop=["cx"])
    assert stream.push(ids[:2]) == ("ab", 2, None)
    assert stream.push(ids[2:3]) == ("", 1, None)
    assert stream.push(ids[3:]) == ("", 1, "cx")
    assert stream.num_tokens == 4


def test_a_stop_token_counts_but_is_not_shown(byte_level: tokenizers.Tokenizer) -> None:
    tokenizer = Tokenizer(byte_level)
    first, last = tokenizer.encode("a")[0], tokenizer.encode("b")[0]
    stream = TextStream(tokenizer.detokenizer(), stop_token_ids=[last])
    assert stream.push([first, last]) == ("a", 2, None)
    assert stream.finish() == ("", 0, None)
    assert stream.num_tokens == 2


def test_min_tokens_puts_stop_strings_off(byte_level: tokenizers.Tokenizer) -> None:
    tokenizer = Tokenizer(byte_level)
    [a] = tokenizer.encode("a")
    stream = TextStream(tokenizer.detokenizer(), stop=["a"], min_tokens=3)
    assert stream.push([a, a, a, a]) == ("aa", 3, "a")


def test_what_was_held_back_comes_at_the_end(byte_level: tokenizers.Tokenizer) -> None:
    tokenizer = Tokenizer(byte_level)
    ids = [i for c in "xEN" for i in tokenizer.encode(c)]
    stream = TextStream(tokenizer.detokenizer(), stop=["END"])
    assert stream.push(ids) == ("x", 3, None)
    assert stream.finish() == ("EN", 0, None)
    assert stream.num_characters == 3


def test_half_a_character_at_the_end_may_complete_a_stop_string(byte_level: tokenizers.Tokenizer) -> None:
    tokenizer = Tokenizer(byte_level)
    half = next(i for i in range(tokenizer.vocab_size) if tokenizer.token_bytes(i) == b"\xe2")
    stream = TextStream(tokenizer.detokenizer(), stop=["\ufffd"])
    assert stream.push([half]) == ("", 1, None)
    assert stream.finish() == ("", 0, "\ufffd")
