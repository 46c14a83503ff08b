"""Every feature of the API through the official client, against one launched 2P4D, streamed and not."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from deployments import Launch, Running
from openai_replies import chat, client_of, complete, gather

from pdkv.text import Tokenizer

if TYPE_CHECKING:
    from openai import AsyncOpenAI, OpenAI

PROMPT = "To be, or not to be, that is the question: whether it is nobler"  # 63 tokens: not a whole number of blocks
ALPHABET = "abcdefghijklmnopqrstuvwxyz"
END = 1  # the model's end of sequence


@pytest.fixture(scope="module")
def deployment(module_launch: Launch) -> Running:
    return module_launch("--prefill", "2", "--decode", "4", "--served-model-name", "served")


@pytest.fixture(scope="module")
def client(deployment: Running) -> Iterator["OpenAI"]:
    with client_of(deployment.url) as client:
        yield client


@pytest.fixture(scope="module")
def letter_ids(client: "OpenAI") -> list[int]:
    """The token ids of a to z."""
    reply = client.completions.create(
        model="served", prompt=ALPHABET, max_tokens=1, extra_body={"return_token_ids": True}
    )
    ids: list[int] = reply.choices[0].model_dump()["prompt_token_ids"]
    assert len(ids) == len(ALPHABET)
    return ids


@pytest.fixture(scope="module")
def spelled(letter_ids: list[int]) -> dict[str, Any]:
    """Fields with which the model writes nothing but lower-case letters, and does not repeat itself much."""
    return {"logit_bias": {str(token_id): 100 for token_id in letter_ids}, "frequency_penalty": 2}


@pytest.fixture(scope="module")
def text(client: "OpenAI", spelled: dict[str, Any]) -> str:
    """What the model writes behind the prompt in 24 letters."""
    return complete(client, PROMPT, max_tokens=24, **spelled).only["text"]  # type: ignore[no-any-return]


def test_a_chat_is_its_template_completed(client: "OpenAI", spelled: dict[str, Any]) -> None:
    messages = [
        {"role": "system", "content": "You count."},
        {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
        {"role": "assistant", "content": "three"},
        {"role": "user", "content": "four"},
    ]
    rendered = "[system]You count.[user]one\ntwo[assistant]three[user]four[assistant]"
    reply = chat(client, messages, max_completion_tokens=12, **spelled)
    assert reply.only["text"] == complete(client, rendered, max_tokens=12, **spelled).only["text"]
    assert reply.usage["prompt_tokens"] == len(rendered)
    assert chat(client, messages, max_tokens=12, **spelled).choices == reply.choices


def test_a_chat_without_a_limit_goes_on_to_the_end_of_the_context(client: "OpenAI") -> None:
    prompt = "x" * 900
    reply = client.chat.completions.create(
        model="served", messages=[{"role": "user", "content": prompt}], extra_body={"ignore_eos": True}
    )
    assert reply.choices[0].finish_reason == "length"
    assert reply.usage is not None
    assert reply.usage.total_tokens == 1024


def test_a_stop_string_is_cut_and_named(client: "OpenAI", text: str, spelled: dict[str, Any]) -> None:
    stop = text[7:10]
    cut = text[: text.index(stop)]
    for stops in (stop, ["no such text", stop]):
        reply = complete(client, PROMPT, max_tokens=24, **spelled, stop=stops)
        assert (reply.only["text"], reply.only["finish_reason"], reply.only["stop_reason"]) == (cut, "stop", stop)
        assert reply.usage["completion_tokens"] == len(cut) + len(stop)
    first = chat(client, "hi", max_tokens=9, **spelled).only["text"]
    reply = chat(client, "hi", max_tokens=9, **spelled, stop=first[4:6])
    assert (reply.only["text"], reply.only["finish_reason"]) == (first[: first.index(first[4:6])], "stop")


def test_the_first_token_may_complete_a_stop_string(client: "OpenAI", text: str, spelled: dict[str, Any]) -> None:
    reply = complete(client, PROMPT, max_tokens=24, **spelled, stop=text[0])
    assert (reply.only["text"], reply.only["stop_reason"]) == ("", text[0])


def test_the_end_of_sequence_ignored_and_put_off(client: "OpenAI") -> None:
    end: dict[str, Any] = {"max_tokens": 10, "logit_bias": {str(END): 100}}
    ends = complete(client, PROMPT, **end)
    assert (ends.only["text"], ends.only["finish_reason"], ends.usage["completion_tokens"]) == ("", "stop", 1)
    ignored = complete(client, PROMPT, **end, extra_body={"ignore_eos": True, "return_token_ids": True})
    assert (ignored.only["finish_reason"], ignored.only["token_ids"]) == ("length", [END] * 10)
    later = complete(client, PROMPT, **end, extra_body={"min_tokens": 5, "return_token_ids": True})
    assert (later.only["finish_reason"], len(later.only["token_ids"])) == ("stop", 6)
    assert END not in later.only["token_ids"][:5]


def test_logit_bias_forces_and_bans(
    client: "OpenAI", letter_ids: list[int], text: str, spelled: dict[str, Any]
) -> None:
    assert complete(client, PROMPT, max_tokens=4, logit_bias={str(letter_ids[4]): 100}).only["text"] == "eeee"
    banned = {**spelled["logit_bias"], str(letter_ids[ALPHABET.index(text[0])]): -100}
    assert text[0] not in complete(client, PROMPT, max_tokens=8, logit_bias=banned).only["text"]


def test_a_repeated_prompt_is_cached_but_not_under_another_salt(client: "OpenAI") -> None:
    prompt = "What only this test asks, and long enough for some blocks of tokens."

    def cached(salt: str | None) -> int:
        extra = {"cache_salt": salt} if salt is not None else None
        reply = client.completions.create(model="served", prompt=prompt, max_tokens=2, temperature=0, extra_body=extra)
        assert reply.usage is not None
        assert reply.usage.prompt_tokens == len(prompt)
        assert reply.usage.prompt_tokens_details is not None
        return reply.usage.prompt_tokens_details.cached_tokens or 0

    assert cached(None) == 0
    assert cached(None) == 64
    assert cached("mine") == 0
    assert cached("mine") == 64
    assert cached("yours") == 0


def test_a_tiny_deadline_is_a_timeout_of_the_server(client: "OpenAI") -> None:
    from openai import InternalServerError

    with pytest.raises(InternalServerError) as late:
        client.completions.create(
            model="served", prompt="x" * 900, max_tokens=100, extra_headers={"x-pd-timeout-s": "0.001"}
        )
    assert (late.value.status_code, late.value.code) == (504, "timeout")


def test_many_requests_at_once(client: "OpenAI", deployment: Running, spelled: dict[str, Any]) -> None:
    """Completions and chat, streamed and not, of 3 to 500 tokens: each gets what it gets alone."""
    from openai import AsyncOpenAI

    prompts = [f"{number}: " + "go on " * (number % 7 * 13) for number in range(32)]
    common: dict[str, Any] = {"model": "served", "max_tokens": 10, "temperature": 0.8, **spelled}

    async def ask(client: "AsyncOpenAI", number: int) -> str:
        fields = {**common, "seed": number, "stream": bool(number & 1)}
        if number & 2:
            messages = [{"role": "user", "content": prompts[number]}]
            reply: Any = await client.chat.completions.create(messages=messages, **fields)
        else:
            reply = await client.completions.create(prompt=prompts[number], **fields)
        parts = [chunk.model_dump() async for chunk in reply] if fields["stream"] else [reply.model_dump()]
        [choice] = gather(parts)
        assert choice["finish_reason"] == "length"
        return str(choice["text"])

    async def ask_all(*, at_once: bool) -> list[str]:
        base_url = deployment.url + "/v1"
        async with AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0, timeout=60) as client:
            if at_once:
                return await asyncio.gather(*(ask(client, number) for number in range(32)))
            return [await ask(client, number) for number in range(32)]

    together = asyncio.run(ask_all(at_once=True))
    assert len(set(together)) == 32
    assert together == asyncio.run(ask_all(at_once=False))


def test_embeddings_are_those_of_transformers_and_of_prefill_engines(
    deployment: Running, client: "OpenAI", served_model: Path
) -> None:
    """More inputs than an engine runs at once, as text and as token ids."""
    texts = [PROMPT[: i % 60 + 1] for i in range(300)]
    raw = client.embeddings.with_raw_response.create(model="served", input=texts)
    assert {raw.headers[f"x-pd-{side}-engine"].split("-")[0] for side in ("prefill", "decode")} == {"prefill"}
    reply = raw.parse()
    assert [entry.index for entry in reply.data] == [*range(300)]
    assert (reply.usage.prompt_tokens, reply.usage.total_tokens) == (sum(map(len, texts)),) * 2
    ids = Tokenizer.from_dir(served_model).encode(texts[59])
    [of_ids] = client.embeddings.create(model="served", input=ids, encoding_format="float").data
    from openai import BadRequestError
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(served_model, dtype=torch.float32)
    with torch.inference_mode():
        state = model(torch.tensor([ids]), output_hidden_states=True).hidden_states[-1][0, -1]
    expected = torch.nn.functional.normalize(state, dim=0).tolist()
    for found in (of_ids.embedding, reply.data[59].embedding):
        assert found == pytest.approx(expected, abs=1e-4)
    for given, words in (("", "must not be empty"), ("x" * 2000, "2000 tokens"), (["x"] * 2049, "2048, got 2049")):
        with pytest.raises(BadRequestError, match=words):
            client.embeddings.create(model="served", input=given)


def test_the_topology_names_every_engine_and_all_blocks_are_free(deployment: Running) -> None:
    engines = deployment.get("/topology").json()["engines"]
    names = [engine["name"] for engine in engines]
    assert sorted(names) == ["decode-0", "decode-1", "decode-2", "decode-3", "prefill-0", "prefill-1"]
    assert len({engine["pid"] for engine in engines}) == 6
    for engine in engines:
        assert engine["role"] == engine["name"].split("-")[0]
        assert engine["state"] == "ready"
        assert (engine["waiting"], engine["running"]) == (0, 0)
        blocks = engine["blocks"]
        assert set(blocks) == {"total", "free", "cached", "active", "leased", "quarantined"}
        assert blocks["free"] + blocks["cached"] == blocks["total"] > 0


def test_a_completion_says_who_made_it_and_is_the_same_on_every_engine(deployment: Running) -> None:
    prompt = "The same prompt of some length, so that it has full blocks and a partial one."
    answers = [deployment.complete(prompt, max_tokens=12) for _ in range(8)]
    assert {answer.status_code for answer in answers} == {200}
    assert len({answer.json()["choices"][0]["text"] for answer in answers}) == 1
    assert {answer.headers["x-pd-prefill-engine"].split("-")[0] for answer in answers} == {"prefill"}
    assert {answer.headers["x-pd-decode-engine"].split("-")[0] for answer in answers} == {"decode"}
    usage = answers[0].json()["usage"]
    assert usage["prompt_tokens"] == len(prompt)
    assert usage["completion_tokens"] == 12
    assert answers[-1].json()["usage"]["prompt_tokens_details"]["cached_tokens"] >= 64
