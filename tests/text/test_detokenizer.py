"""The incremental detokenizers against one full decode."""

import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pdkv.text import Tokenizer
from tests.conftest import EXAMPLES

PROPERTY = settings(max_examples=60 * EXAMPLES, suppress_health_check=[HealthCheck.function_scoped_fixture])
TEXT = st.text(st.characters(codec="utf-8"), max_size=40)


def pieces(tokenizer: Tokenizer, ids: list[int], *, skip_special_tokens: bool = True) -> list[str]:
    detokenizer = tokenizer.detokenizer(skip_special_tokens=skip_special_tokens)
    return [*(detokenizer.push(token_id) for token_id in ids), detokenizer.flush()]


@PROPERTY
@given(data=st.data())
def test_any_token_sequence_gives_the_text_of_a_full_decode(data: st.DataObject, backend: tokenizers.Tokenizer) -> None:
    tokenizer = Tokenizer(backend)
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 5), max_size=30))
    for skip in (True, False):
        assert "".join(pieces(tokenizer, ids, skip_special_tokens=skip)) == backend.decode(
            ids, skip_special_tokens=skip
        )


@PROPERTY
@given(data=st.lists(st.integers(0, 255), max_size=24))
def test_any_bytes_give_the_text_of_a_full_decode(data: list[int], byte_level: tokenizers.Tokenizer) -> None:
    tokenizer = Tokenizer(byte_level)
    alphabet = {tokenizer.token_bytes(i): i for i in range(tokenizer.vocab_size)}
    ids = [alphabet[bytes([b])] for b in data]
    assert "".join(pieces(tokenizer, ids)) == byte_level.decode(ids)


@PROPERTY
@given(text=TEXT)
def test_no_piece_of_a_whole_text_holds_half_a_character(text: str, byte_level: tokenizers.Tokenizer) -> None:
    tokenizer = Tokenizer(byte_level)
    ids = tokenizer.encode(text.replace("\ufffd", ""))
    assert all("\ufffd" not in piece for piece in pieces(tokenizer, ids))


@PROPERTY
@given(text=TEXT)
def test_a_run_of_byte_tokens_comes_out_whole(text: str, byte_fallback: tokenizers.Tokenizer) -> None:
    tokenizer = Tokenizer(byte_fallback)
    ids = tokenizer.encode(text.replace("\ufffd", ""), add_special_tokens=False)
    got = pieces(tokenizer, ids)
    assert "".join(got) == byte_fallback.decode(ids)
    assert all("\ufffd" not in piece for piece in got)


def test_an_incomplete_character_waits_and_is_replaced_at_the_end(byte_level: tokenizers.Tokenizer) -> None:
    tokenizer = Tokenizer(byte_level)
    alphabet = {tokenizer.token_bytes(i): i for i in range(tokenizer.vocab_size)}
    euro = [alphabet[bytes([b])] for b in "€".encode()]
    assert pieces(tokenizer, euro) == ["", "", "€", ""]
    assert pieces(tokenizer, euro[:2]) == ["", "", "\ufffd"]
    assert pieces(tokenizer, [*euro[:2], alphabet[b"a"]]) == ["", "", "\ufffda", ""]


def test_token_bytes_of_a_split_character_join_to_it(backend: tokenizers.Tokenizer) -> None:
    tokenizer = Tokenizer(backend)
    ids = [
        i for i in tokenizer.encode("one two cats é Hello", add_special_tokens=False) if i not in tokenizer.special_ids
    ]
    joined = b"".join(tokenizer.token_bytes(i) for i in ids).decode()
    assert joined.lstrip() == tokenizer.decode(ids)


def test_a_special_token_shows_its_text_by_itself(byte_level: tokenizers.Tokenizer) -> None:
    tokenizer = Tokenizer(byte_level)
    end = byte_level.token_to_id("</s>")
    assert tokenizer.token_bytes(end) == b"</s>"
    assert pieces(tokenizer, [end]) == ["", ""]
    assert pieces(tokenizer, [end], skip_special_tokens=False) == ["</s>", ""]
