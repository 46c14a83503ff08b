"""One request to a server of another engine: its body, and what of its stream is believed."""

import json
from typing import Any

import msgspec
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from pdkv.errors import InvalidRequest, RequestFailed
from pdkv.router.engines import foreign_answers
from pdkv.router.engines.foreign_answers import MAX_LINE_BYTES, Answer, Events, Salts, request_body
from pdkv.router.engines.foreign_kinds import KINDS
from pdkv.sampling.params import SamplingParams
from pdkv.text import Tokenizer
from pdkv.wire.messages import Submit, TokenLogprob, Tokens

WORDS = {"▁a": 0, "▁b": 1, "a": 2, "b": 3, "▁": 4}


def marked_tokenizer() -> Tokenizer:
    """Its words begin with a mark, which the first of a text has, too, and which decoding leaves out there."""
    backend = tokenizers.Tokenizer(models.BPE(vocab=WORDS, merges=[("▁", "a"), ("▁", "b")]))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(split=False)
    backend.decoder = decoders.Metaspace()
    return Tokenizer(backend)


def submit(output: list[int] | None = None, **params: Any) -> Submit:
    return Submit(
        request_id="r",
        transfer_id="t",
        attempt=0,
        prompt_token_ids=[0, 1],
        output_token_ids=output or [],
        params=SamplingParams(**{"max_tokens": 9, "seed": 7, **params}),
        cache_salt="secret",
    )


def body(asked: Submit, kind: str = "vllm") -> dict[str, Any]:
    return request_body(asked, kind, "m", 100, Salts())


def answer(asked: Submit, kind: str = "vllm") -> Answer:
    return Answer(asked, KINDS[kind], marked_tokenizer(), 5)


def event(**choice: Any) -> bytes:
    return json.dumps({"choices": [choice]}).encode()


def test_a_server_that_continues_gets_the_output_as_prompt_and_a_seed_of_its_own() -> None:
    first, later = body(submit(min_tokens=5)), body(submit([3, 2], min_tokens=5))
    assert (first["prompt"], first["max_tokens"], first["min_tokens"], first["seed"]) == ([0, 1], 9, 5, 7)
    assert (later["prompt"], later["max_tokens"], later["min_tokens"]) == ([0, 1, 3, 2], 7, 3)
    assert later["seed"] not in (7, body(submit([3]))["seed"])
    assert body(submit(max_tokens=None))["max_tokens"] == 98


def test_a_seed_that_no_client_gave_is_not_sent() -> None:
    assert "seed" not in body(msgspec.structs.replace(submit(), seed_drawn=True))


def test_no_salt_leaves_in_clear_and_none_where_it_means_nothing() -> None:
    assert len(body(submit())["cache_salt"]) == 48
    assert "secret" not in json.dumps(body(submit()))
    assert "cache_salt" not in body(submit(), "openai")


def test_a_salt_is_found_again_by_its_digest_until_too_many_others_came(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(foreign_answers, "MAX_SALTS", 3)
    salts = Salts()
    first, second = salts.digest("a"), salts.digest("b")
    assert (salts.find(first), salts.find(second), salts.find("a")) == ("a", "b", None)
    for number in range(2):
        salts.digest(f"s{number}")
    assert salts.find(first) is None


def test_what_counts_the_output_alone_cannot_be_continued() -> None:
    assert body(submit(presence_penalty=1.0))["presence_penalty"] == 1.0
    with pytest.raises(InvalidRequest, match="continue after 1 tokens with presence_penalty"):
        body(submit([3], presence_penalty=1.0))


def test_tokens_and_counts_become_messages() -> None:
    reading = answer(submit([3]))
    assert reading.take(event(index=0, text="a", token_ids=[2, 0])) == Tokens("r", 0, 1, [2, 0])
    assert reading.take(event(index=0, text="", token_ids=[1], finish_reason="stop", stop_reason=1)) is not None
    usage = {"prompt_tokens_details": {"cached_tokens": 99}}
    assert reading.take(json.dumps({"choices": [], "usage": usage}).encode()) is None
    reading.take(b"[DONE]")
    end = reading.finished()
    assert (end.reason, end.stop_token_id, end.sources.local_hit, end.sources.computed) == ("stop", 1, 2, 0)


def test_logprobs_are_those_of_ids() -> None:
    logprobs = {
        "tokens": ["token_id:2"],
        "token_logprobs": [-1.5],
        "top_logprobs": [{"token_id:2": -1.5, "token_id:0": -0.5}],
    }
    message = answer(submit(logprobs=1)).take(event(token_ids=[2], logprobs=logprobs))
    assert message is not None
    assert message.logprobs == [TokenLogprob(2, -1.5, 2, ((0, -0.5),))]
    with pytest.raises(RequestFailed, match="logprobs of other tokens"):
        answer(submit(logprobs=1)).take(event(token_ids=[3], logprobs=logprobs))


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (b"{", "cannot be read"),
        (b'{"choices": 5}', "cannot be read"),
        (b"[" * 100_000, "cannot be read"),
        (event(token_ids=[5]), "outside the vocabulary of 5"),
        (event(token_ids=[-1]), "outside the vocabulary"),
        (event(token_ids=[10**30]), "outside the vocabulary"),
        (event(text="a"), "no token ids"),
        (event(index=1, token_ids=[1]), "choice 1 of 1"),
        (event(token_ids=[1] * 10), "token 10 of at most 9"),
        (event(token_ids=[], finish_reason="abort"), "ended the answer by 'abort'"),
        (b'{"error": {"message": "no"}}', "reported an error"),
    ],
)
def test_what_no_honest_server_sends_fails_its_request(data: bytes, error: str) -> None:
    with pytest.raises(RequestFailed, match=error) as failure:
        answer(submit()).take(data)
    assert failure.value.retryable


def test_text_alone_is_turned_into_tokens_of_the_same_text() -> None:
    """A tokenizer alone would put a mark, and so a space, before each piece."""
    reading, tokenizer = answer(submit(), "openai"), marked_tokenizer()
    ids = [0, 1]
    for text in (" b", "a", "b a"):
        message = reading.take(event(text=text))
        assert message is not None
        ids += message.token_ids
    assert tokenizer.decode(ids) == "a b bab a"
    with pytest.raises(RequestFailed, match="cannot be turned into tokens: 'z'"):
        reading.take(event(text="z"))


def test_events_are_cut_wherever_pieces_end_and_bytes_without_tokens_are_bounded() -> None:
    events = Events(submit())
    pieces = (b": hi\n\nda", b"ta: {1}\r", b"\n\nid: 5\ndata:{2}\n\n")
    assert [data for piece in pieces for data in events.feed(piece)] == [b"{1}", b"{2}"]
    events.progressed()
    events.feed(b":\n" * (MAX_LINE_BYTES // 2))
    with pytest.raises(RequestFailed, match="bytes without a token"):
        events.feed(b":" * 100)


def test_the_body_is_json_whatever_the_parameters_are() -> None:
    params = {"logit_bias": {3: 1.0}, "bad_words": ("x",), "stop_token_ids": (1,), "top_k": 3}
    sent = json.loads(msgspec.json.encode(body(submit(**params))))
    assert (sent["logit_bias"], sent["bad_words"], sent["stop_token_ids"], sent["top_k"]) == ({"3": 1.0}, ["x"], [1], 3)
