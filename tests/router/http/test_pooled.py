"""/v1/embeddings and /v1/rerank before a fake dispatcher: shapes, limits, and errors that name value and bound."""

import array
import base64
import dataclasses
import json
import math
from collections.abc import Sequence
from typing import Any, cast

import pytest
import small_tokenizers
from asgi_client import Exchange, call
from coroutines import run
from fake_dispatcher import FakeDispatcher, tokens
from small_app import MAX_MODEL_LEN, TEMPLATE, ids, make_app, model_config, served

from pdkv.models.pooling_config import Pooling
from pdkv.router.generations.dispatch import Dispatcher
from pdkv.router.http.app import create_app, served_model
from pdkv.router.http.read import job, pooled_job
from pdkv.router.request import Delta, GenerateRequest
from pdkv.text import Tokenizer

EMBEDDINGS, RERANK = "/v1/embeddings", "/v1/rerank"


def pooling(request: GenerateRequest) -> Sequence[Delta]:
    """The first token and twice it; of a ranking: the prompt's length as the logit of yes. The end comes later."""
    first = float(request.prompt_token_ids[0])
    numbers = [0.0, len(request.prompt_token_ids) / 100] if request.params.pooling == "logits" else [first, 2 * first]
    return [tokens(7, pooled=array.array("f", numbers).tobytes()), tokens(end="length")]


def ask(path: str, body: Any, answer: Any = pooling, **changes: Any) -> tuple[Exchange, FakeDispatcher]:
    """With a tokenizer that has yes and no."""
    backend = small_tokenizers.byte_level_backend()
    backend.add_tokens(["yes", "no"])
    model = served_model(Tokenizer(backend, chat_template=TEMPLATE), model_config(), ["small"])
    dispatcher = FakeDispatcher(answer)
    app = create_app(cast(Dispatcher, dispatcher), dataclasses.replace(model, **changes))
    return run(call(app, "POST", path, body)), dispatcher


def test_embeddings_have_length_one_and_the_order_of_the_inputs() -> None:
    from openai.types import CreateEmbeddingResponse

    got, dispatcher = ask(EMBEDDINGS, {"input": ["a", "bc", "d"], "user": "u", "encoding_format": "float"})
    body = got.json()
    CreateEmbeddingResponse.model_validate(body)
    assert [entry["index"] for entry in body["data"]] == [0, 1, 2]
    for entry in body["data"]:
        assert entry["embedding"] == pytest.approx([1 / math.sqrt(5), 2 / math.sqrt(5)], abs=1e-6)
    assert (body["usage"]["prompt_tokens"], body["usage"]["total_tokens"]) == (4, 4)
    params = dispatcher.generations[0].request.params
    assert (params.pooling, params.max_tokens) == ("last", 1)


def test_base64_raw_states_and_dimensions() -> None:
    body = {"input": [ids("a")], "encoding_format": "base64", "normalize": False, "dimensions": 1}
    got, _ = ask(EMBEDDINGS, body, pooling=Pooling("mean", may_cut=True, size=2))
    data = base64.b64decode(got.json()["data"][0]["embedding"])
    assert array.array("f", data).tolist() == [float(ids("a")[0])]


def test_a_ranking_is_sorted_and_cut() -> None:
    body = {"query": "q", "documents": ["a", {"text": "a long document"}, "abc"], "top_n": 2}
    got, dispatcher = ask(RERANK, body, max_model_len=1024)
    assert [entry["index"] for entry in got.json()["results"]] == [1, 2]
    assert got.json()["results"][0]["document"] == {"text": "a long document"}
    request = dispatcher.generations[1].request
    expected = 1 / (1 + math.exp(-len(request.prompt_token_ids) / 100))
    assert got.json()["results"][0]["relevance_score"] == pytest.approx(expected)
    assert len(request.params.allowed_token_ids or ()) == 2
    bare, _ = ask("/rerank", {**body, "return_documents": False}, max_model_len=1024)
    assert "document" not in bare.json()["results"][0]


@pytest.mark.parametrize(
    ("path", "fields", "param", "words"),
    [
        (EMBEDDINGS, {"input": ""}, "input", "must not be empty"),
        (EMBEDDINGS, {"input": []}, "input", "must not be empty"),
        (EMBEDDINGS, {"input": ["a", ""]}, "input", "must not be empty"),
        (EMBEDDINGS, {"input": ["a", 3]}, "input", "of one kind"),
        (EMBEDDINGS, {"input": "a" * MAX_MODEL_LEN}, "input", f"{MAX_MODEL_LEN} tokens"),
        (EMBEDDINGS, {"input": [5] * 200}, "input", "200 tokens"),
        (EMBEDDINGS, {"input": [[99999]]}, "input", "99999"),
        (EMBEDDINGS, {"input": ["a"] * 2049}, "input", "2048, got 2049"),
        (EMBEDDINGS, {"input": "a", "dimensions": 1}, "dimensions", "is_matryoshka"),
        (EMBEDDINGS, {"input": "a", "encoding_format": "int8"}, "encoding_format", "'base64', 'float'"),
        (EMBEDDINGS, {"input": "a", "priority": 2**40}, "priority", "32-bit"),
        (EMBEDDINGS, {"input": "a", "model": "other"}, "model", "does not exist"),
        (EMBEDDINGS, {"input": "a", "stream": True}, "stream", "not a known field"),
        (EMBEDDINGS, {}, "input", "required"),
        (RERANK, {"query": "q", "documents": []}, "documents", "got 0"),
        (RERANK, {"query": "q", "documents": ["a"], "model": "other"}, "model", "does not exist"),
        (RERANK, {"query": "q", "documents": ["a"], "top_n": 0}, "top_n", "at least 1, got 0"),
        (RERANK, {"query": "q", "documents": ["a" * 9999]}, "documents", f"{MAX_MODEL_LEN} tokens"),
        (RERANK, {"query": "q" * 200, "documents": ["a"]}, "documents", f"{MAX_MODEL_LEN} tokens"),
    ],
)
def test_what_cannot_work_is_refused_by_name(path: str, fields: Any, param: str, words: str) -> None:
    got, dispatcher = ask(path, fields)
    error = got.json()["error"]
    assert (got.status in (400, 404), error["param"], words in error["message"]) == (True, param, True), error
    assert dispatcher.generations == []


def test_engines_and_models_that_cannot_pool_are_named() -> None:
    for changes, words in (
        ({"lacks": {"pooling": "vllm-0 (vllm)"}}, "vllm-0 (vllm) lacks it"),
        ({"pooling": Pooling(None, "pooling_mode_cls_token")}, "--pooling last or mean"),
        ({"pooling": Pooling("last", may_cut=True, lengths=(8, 16))}, "one of [8, 16], got 9"),
    ):
        got, _ = ask(EMBEDDINGS, {"input": "a", **({"dimensions": 9} if "one of" in words else {})}, **changes)
        assert (got.status, words in got.json()["error"]["message"]) == (400, True), got.json()
    got, _ = ask(RERANK, {"query": "q", "documents": ["d" * 9999]}, lacks={"pooling": "vllm-0 (vllm)"})
    assert (got.status, "vllm-0 (vllm) lacks it" in got.json()["error"]["message"]) == (400, True), got.json()
    got = run(call(make_app(FakeDispatcher()), "POST", RERANK, {"query": "q", "documents": ["d"]}))
    assert (got.status, "one token for no and one for yes" in got.json()["error"]["message"]) == (400, True)


def test_a_query_is_not_tokenized_for_more_documents_than_fit_together(monkeypatch: pytest.MonkeyPatch) -> None:
    encoded = []
    encode = pooled_job.encode
    monkeypatch.setattr(pooled_job, "encode", lambda *a, **k: encoded.append(1) or encode(*a, **k))
    monkeypatch.setattr(job, "MAX_TOTAL_PROMPT_TOKENS", 500)
    got, _ = ask(RERANK, {"query": "q", "documents": ["a"] * 100}, max_model_len=1024)
    assert (got.status, got.json()["error"]["param"], len(encoded) < 4) == (400, "documents", True), got.json()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_numbers_that_are_not_finite_are_an_error(bad: float) -> None:
    def answer(request: GenerateRequest) -> Sequence[Delta]:
        return [tokens(7, end="length", pooled=array.array("f", [1.0, bad]).tobytes())]

    for path, body in ((EMBEDDINGS, {"input": ["a", "b"]}), (RERANK, {"query": "q", "documents": ["d"]})):
        got, _ = ask(path, body, answer, max_model_len=1024)
        assert (got.status, json.loads(got.body)["error"]["code"]) == (500, "non_finite_logits")


def test_the_served_model_pools_by_its_last_token() -> None:
    assert served().pooling == Pooling("last")
