"""Completions and chat completions: what reaches the engines, and what the client gets."""

import json
from typing import Any

import pytest
from asgi_client import Exchange, call
from coroutines import run
from fake_dispatcher import FakeDispatcher, logprob, say, tokens
from small_app import MAX_MODEL_LEN, MODEL, eos, ids, make_app, tokenizer

from pdkv.router.request import Delta, GenerateRequest
from pdkv.sampling.params import SamplingParams


def complete(dispatcher: FakeDispatcher, **fields: Any) -> Exchange:
    body = {"model": MODEL, "prompt": "Hello", **fields}
    return run(call(make_app(dispatcher), "POST", "/v1/completions", body))


def chat(dispatcher: FakeDispatcher, **fields: Any) -> Exchange:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}], **fields}
    return run(call(make_app(dispatcher), "POST", "/v1/chat/completions", body))


def test_a_completion() -> None:
    dispatcher = FakeDispatcher(say([*ids("abé"), eos()]))
    dispatcher.num_cached_tokens = 1
    reply = complete(dispatcher)
    assert reply.status == 200
    body = reply.json()
    assert body.pop("id").startswith("cmpl-")
    assert isinstance(body.pop("created"), int)
    prompt = tokenizer().encode("Hello")
    assert body == {
        "object": "text_completion",
        "model": MODEL,
        "choices": [{"index": 0, "text": "abé", "logprobs": None, "finish_reason": "stop", "stop_reason": None}],
        "usage": {
            "prompt_tokens": len(prompt),
            "completion_tokens": 5,
            "total_tokens": len(prompt) + 5,
            "prompt_tokens_details": {"cached_tokens": 1},
        },
    }
    [request] = dispatcher.requests
    assert request.prompt_token_ids == prompt
    assert request.params.max_tokens == 16
    assert request.params.seed is not None


def test_a_chat_completion() -> None:
    dispatcher = FakeDispatcher(say([*ids("ok"), eos()]))
    body = chat(dispatcher).json()
    assert body["id"].startswith("chatcmpl-")
    assert body["object"] == "chat.completion"
    assert body["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "ok", "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": None,
        }
    ]
    [request] = dispatcher.requests
    assert tokenizer().decode(request.prompt_token_ids) == "user: Hello\n"
    assert request.params.max_tokens == 120, "as many as fit"


def test_every_sampling_parameter_reaches_the_engine() -> None:
    fields: dict[str, Any] = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "presence_penalty": -1.0,
        "frequency_penalty": 1.5,
        "logit_bias": {"5": -100, "6": 1.5},
        "seed": 42,
        "max_tokens": 3,
        "min_tokens": 2,
        "stop": ["x", "yz"],
        "stop_token_ids": [9],
        "ignore_eos": True,
        "prompt_logprobs": 2,
    }
    dispatcher = FakeDispatcher(say(ids("ab")))
    reply = complete(dispatcher, **fields, logprobs=4, cache_salt="tenant", priority=3, user="somebody")
    assert reply.status == 200
    [request] = dispatcher.requests
    fields |= {"logit_bias": {5: -100.0, 6: 1.5}, "stop": (), "stop_token_ids": (9,)}  # stop strings are the router's
    assert request.params == SamplingParams(**fields, logprobs=4)
    assert (request.cache_salt, request.priority) == ("tenant", 3)


def test_null_is_the_same_as_absent() -> None:
    dispatcher = FakeDispatcher(say(ids("ab")))
    nothing = dict.fromkeys(
        ("temperature", "n", "stop", "max_tokens", "seed", "stream", "logit_bias", "best_of", "suffix", "logprobs")
    )
    assert complete(dispatcher, **nothing).status == 200
    [request] = dispatcher.requests
    assert request.params == SamplingParams(seed=request.params.seed)


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("ab", [tokenizer().encode("ab")]),
        (["ab", "c"], [tokenizer().encode("ab"), tokenizer().encode("c")]),
        ([5, 6, 7], [[5, 6, 7]]),
        ([[5, 6], [7]], [[5, 6], [7]]),
    ],
)
def test_every_kind_of_prompt(prompt: Any, expected: list[list[int]]) -> None:
    dispatcher = FakeDispatcher(lambda request: [tokens(*request.prompt_token_ids, end="stop")])
    body = complete(dispatcher, prompt=prompt, return_token_ids=True).json()
    assert [choice["index"] for choice in body["choices"]] == list(range(len(expected)))
    assert [choice["token_ids"] for choice in body["choices"]] == expected
    assert [choice["prompt_token_ids"] for choice in body["choices"]] == expected
    assert body["usage"]["prompt_tokens"] == sum(map(len, expected))


def test_a_long_text_is_tokenized_as_a_short_one() -> None:
    text = "ab " * 1000
    dispatcher = FakeDispatcher(say(ids("x")))
    app = make_app(dispatcher, max_model_len=10_000)
    reply = run(call(app, "POST", "/v1/completions", {"model": MODEL, "prompt": text}))
    assert reply.status == 200
    assert dispatcher.requests[0].prompt_token_ids == tokenizer().encode(text)


def test_default_max_tokens_gives_way_to_the_models_length() -> None:
    dispatcher = FakeDispatcher(say(ids("x")))
    assert complete(dispatcher, prompt=[[5] * (MAX_MODEL_LEN - 3), [5]]).status == 200
    assert [request.params.max_tokens for request in dispatcher.requests] == [3, 16]


def test_choices_after_the_first_name_the_engine_that_ran_their_prompt() -> None:
    """And bring its keys with them: it is hashed once."""
    dispatcher = FakeDispatcher(say(ids("b")))
    complete(dispatcher, prompt=["a", "c"], n=3)
    by_prompt = [[r for r in dispatcher.requests if r.prompt_token_ids == ids(text)] for text in "ac"]
    assert [[request.near for request in requests] for requests in by_prompt] == [["", "prefill-0", "prefill-0"]] * 2
    assert [len({id(request.keys) for request in requests}) for requests in by_prompt] == [1, 1]
    assert by_prompt[0][0].keys is not by_prompt[1][0].keys


def test_choices_are_numbered_over_prompts_and_each_prompt_is_counted_once() -> None:
    def answer(request: GenerateRequest) -> list[Delta]:
        return [tokens(request.prompt_token_ids[0], *ids(str(request.choice)), end="stop")]

    dispatcher = FakeDispatcher(answer)
    dispatcher.num_cached_tokens = 2
    body = complete(dispatcher, prompt=[ids("a+++"), ids("b---")], n=3, seed=5).json()
    assert [choice["index"] for choice in body["choices"]] == list(range(6))
    assert [choice["text"] for choice in body["choices"]] == ["a0", "a1", "a2", "b0", "b1", "b2"]
    assert body["usage"]["prompt_tokens"] == 8
    assert body["usage"]["completion_tokens"] == 12
    assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 4}
    dispatcher.num_lossy_tokens = 1
    body = complete(dispatcher, prompt=[ids("a+++"), ids("b---")], n=3, seed=5).json()
    assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 4, "lossy_tokens": 2}
    assert all(
        request.params.n == 1 and request.params.seed == 5 and not request.seed_drawn for request in dispatcher.requests
    )


def test_a_seed_is_drawn_per_prompt_where_there_is_none() -> None:
    dispatcher = FakeDispatcher(say(ids("x")))
    complete(dispatcher, prompt=["a", "a"], n=2)
    seeds = [request.params.seed for request in sorted(dispatcher.requests, key=lambda r: r.choice)]
    assert None not in seeds
    assert all(request.seed_drawn for request in dispatcher.requests)
    assert len(set(seeds)) == 2


# --- ends ---------------------------------------------------------------------------------------------------------


def test_a_stop_string_cuts_text_and_tokens_and_aborts() -> None:
    dispatcher = FakeDispatcher(lambda _: [tokens(*ids("abSTOPcd")), tokens(*ids("ef"), end="length")])
    body = complete(dispatcher, stop=["STOP", "zz"], return_token_ids=True).json()
    [choice] = body["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("ab", "stop", "STOP")
    assert choice["token_ids"] == ids("abSTOP")
    assert body["usage"]["completion_tokens"] == 6
    assert dispatcher.generations[0].finished


def test_a_stop_token_is_counted_and_named_but_not_shown() -> None:
    [stop] = ids("!")
    dispatcher = FakeDispatcher(lambda _: [tokens(*ids("ab"), stop), tokens(end="stop", stop_token_id=stop)])
    body = complete(dispatcher, stop_token_ids=[stop], return_token_ids=True).json()
    [choice] = body["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("ab", "stop", stop)
    assert choice["token_ids"] == ids("ab!")


def test_half_a_character_at_the_end_is_replaced() -> None:
    dispatcher = FakeDispatcher(lambda _: [tokens(*ids("a€")[:3], end="length")])
    assert complete(dispatcher).json()["choices"][0]["text"] == "a\ufffd"


@pytest.mark.parametrize(("skip", "text"), [(None, "ab"), (True, "ab"), (False, "a<s>b")])
def test_special_tokens_are_shown_only_where_asked_for(skip: bool | None, text: str) -> None:
    answer = [*ids("a"), tokenizer().encode("<s>")[0], *ids("b"), eos()]
    dispatcher = FakeDispatcher(say(answer))
    assert complete(dispatcher, skip_special_tokens=skip).json()["choices"][0]["text"] == text


# --- logprobs and echo --------------------------------------------------------------------------------------------


def test_logprobs_of_a_completion() -> None:
    a, b = ids("ab")
    dispatcher = FakeDispatcher(lambda _: [tokens(a, b, end="length", logprobs=[logprob(a, b), logprob(b, a)])])
    assert complete(dispatcher, logprobs=2).json()["choices"][0]["logprobs"] == {
        "tokens": ["a", "b"],
        "token_logprobs": [-a / 10, -b / 10],
        "top_logprobs": [{"a": -a / 10, "b": -b / 10}, {"a": -a / 10, "b": -b / 10}],
        "text_offset": [0, 1],
    }


def test_logprobs_of_parts_of_a_character_stay_apart() -> None:
    first, second = ids("é")
    dispatcher = FakeDispatcher(lambda _: [tokens(first, end="length", logprobs=[logprob(first, second)])])
    [top] = complete(dispatcher, logprobs=2).json()["choices"][0]["logprobs"]["top_logprobs"]
    assert top == {"bytes:\\xc3": -first / 10, "bytes:\\xa9": -second / 10}


def test_logprobs_end_with_the_stop_string() -> None:
    text = ids("abXYcd")
    dispatcher = FakeDispatcher(lambda _: [tokens(*text, end="length", logprobs=[logprob(i) for i in text])])
    [choice] = complete(dispatcher, logprobs=0, stop="XY").json()["choices"]
    assert choice["text"] == "ab"
    assert choice["logprobs"]["tokens"] == list("abXY")


def test_minus_infinity_is_a_number_in_json() -> None:
    value = logprob(ids("a")[0])
    value = type(value)(value.token_id, float("-inf"), 400, [])
    dispatcher = FakeDispatcher(lambda _: [tokens(value.token_id, end="length", logprobs=[value])])
    assert complete(dispatcher, logprobs=0).json()["choices"][0]["logprobs"]["token_logprobs"] == [-9999.0]


def test_logprobs_of_a_chat_completion() -> None:
    first, second = ids("é")
    dispatcher = FakeDispatcher(
        lambda _: [tokens(first, second, end="stop", logprobs=[logprob(first, second), logprob(second)])]
    )
    [choice] = chat(dispatcher, logprobs=True, top_logprobs=2).json()["choices"]
    assert choice["message"]["content"] == "é"
    one = {"token": "\ufffd", "logprob": -first / 10, "bytes": [0xC3]}
    two = {"token": "\ufffd", "logprob": -second / 10, "bytes": [0xA9]}
    assert choice["logprobs"] == {
        "content": [one | {"top_logprobs": [one, two]}, two | {"top_logprobs": [two]}],
        "refusal": None,
    }


def test_echo_puts_the_prompt_before_the_text() -> None:
    for prompt in ("Hello", tokenizer().encode("Hello")):
        dispatcher = FakeDispatcher(say(ids(" you")))
        assert complete(dispatcher, prompt=prompt, echo=True).json()["choices"][0]["text"] == "Hello you"
        assert dispatcher.requests[0].params.prompt_logprobs is None


def test_echo_with_logprobs_has_the_prompts_too() -> None:
    dispatcher = FakeDispatcher(say(ids("c")))
    a, b, c = prompt = ids("abc")
    body = complete(dispatcher, prompt=prompt[:2], echo=True, logprobs=1, max_tokens=1).json()
    assert dispatcher.requests[0].params.prompt_logprobs == 1
    [choice] = body["choices"]
    assert choice["text"] == "abc"
    assert choice["logprobs"] == {
        "tokens": ["a", "b", "c"],
        "token_logprobs": [None, -b / 10, -c / 10],
        "top_logprobs": [None, {"b": -b / 10}, {"c": -c / 10, "d": -(c + 1) / 10}],
        "text_offset": [0, 1, 2],
    }
    assert a != b


def test_max_tokens_0_with_echo_scores_the_prompt_alone() -> None:
    dispatcher = FakeDispatcher(say(ids("c")))
    body = complete(dispatcher, prompt=ids("ab"), echo=True, logprobs=0, max_tokens=0).json()
    [choice] = body["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("ab", "length")
    assert choice["logprobs"]["tokens"] == ["a", "b"]
    assert body["usage"]["completion_tokens"] == 0
    assert dispatcher.requests[0].params.max_tokens == 1


def test_prompt_logprobs_in_vllms_form() -> None:
    dispatcher = FakeDispatcher(say(ids("c")))
    prompt = ids("ab")
    expected = [None, {str(prompt[1]): {"logprob": -prompt[1] / 10, "rank": 1, "decoded_token": "b"}}]
    assert complete(dispatcher, prompt=prompt, prompt_logprobs=1).json()["choices"][0]["prompt_logprobs"] == expected
    body = chat(dispatcher, prompt_logprobs=1).json()
    assert len(body["prompt_logprobs"]) == body["usage"]["prompt_tokens"]


def test_a_whole_reply_is_one_write_with_its_length() -> None:
    reply = complete(FakeDispatcher(say(ids("ab"))))
    assert len(reply.writes) == 1
    assert reply.headers["content-length"] == str(len(reply.body))
    assert json.loads(reply.body)


def test_parts_of_a_message_are_joined() -> None:
    dispatcher = FakeDispatcher(say(ids("x")))
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    history = {"role": "assistant", "content": "a", "refusal": None, "tool_calls": None, "function_call": None}
    chat(dispatcher, messages=[{"role": "system", "content": parts}, history])
    assert tokenizer().decode(dispatcher.requests[0].prompt_token_ids) == "system: one\ntwo\nassistant: a\n"


DEFAULTS = {"temperature": 0.25, "top_k": 20, "repetition_penalty": 1.05, "max_tokens": 40}


def with_defaults(path: str, **fields: Any) -> SamplingParams:
    """What reaches the engines of a model whose generation_config.json says DEFAULTS."""
    dispatcher = FakeDispatcher(say([*ids("ok"), eos()]))
    body = {"model": MODEL, **fields}
    reply = run(call(make_app(dispatcher, sampling_defaults=DEFAULTS), "POST", path, body))
    assert reply.status == 200, reply.json()
    [request] = dispatcher.requests
    return request.params


def test_requests_get_the_models_sampling_defaults_where_they_say_nothing() -> None:
    params = with_defaults("/v1/completions", prompt="Hello", temperature=None)
    assert (params.temperature, params.top_k, params.repetition_penalty) == (0.25, 20, 1.05)
    assert params.max_tokens == 16, "OpenAI's and vLLM's default of completions"
    params = with_defaults("/v1/chat/completions", messages=[{"role": "user", "content": "Hello"}])
    assert (params.temperature, params.max_tokens) == (0.25, 40)


def test_what_a_request_says_goes_before_the_models_sampling_defaults() -> None:
    said: dict[str, Any] = {"temperature": 0, "top_k": 0, "repetition_penalty": 1.0, "max_tokens": 50}
    chat_fields = {"messages": [{"role": "user", "content": "Hello"}]}
    for path, fields in (("/v1/completions", {"prompt": "Hello"}), ("/v1/chat/completions", chat_fields)):
        params = with_defaults(path, **fields, **said)
        assert {name: getattr(params, name) for name in said} == said
    assert with_defaults("/v1/chat/completions", **chat_fields, max_completion_tokens=7).max_tokens == 7


def test_a_default_of_more_tokens_than_there_is_room_for_is_no_error() -> None:
    prompt = "x" * (MAX_MODEL_LEN - 20)
    params = with_defaults("/v1/chat/completions", messages=[{"role": "user", "content": prompt}])
    assert params.max_tokens is not None
    assert params.max_tokens < 20
