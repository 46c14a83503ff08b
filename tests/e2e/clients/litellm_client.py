"""LiteLLM: chat under both of its providers, text and responses, streamed and not, with a tool."""

import json
import sys
from typing import Any

import litellm

MODEL, ASKED, NUMBER = "pdkv-default", "Codes: fox=4821, hat=0937. What is hat?", "0937"
HI = [{"role": "user", "content": ASKED}]
FOX = [{"role": "user", "content": "What is fox?"}]
PARAMETERS = {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]}
FUNCTION = {"name": "get_code", "description": "The code of a word.", "parameters": PARAMETERS}
TOOLS = [{"type": "function", "function": FUNCTION}]
SCHEMA = {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]}
at = {"api_base": sys.argv[1], "api_key": "x", "temperature": 0}

for provider in ("openai", "hosted_vllm"):

    def ask(messages: Any = HI, provider: str = provider, **fields: Any) -> Any:
        return litellm.completion(model=f"{provider}/{MODEL}", messages=messages, **{**at, **fields})

    def streamed(*given: Any, ask: Any = ask, **fields: Any) -> Any:
        chunks = list(ask(*given, stream=True, stream_options={"include_usage": True}, **fields))
        return litellm.stream_chunk_builder(chunks).choices[0].message

    first = ask().choices[0].message
    shape = {"type": "json_schema", "json_schema": {"name": "code", "schema": SCHEMA}}
    texts = [
        first.content,
        streamed().content,
        ask(n=2, seed=1, max_tokens=8, user="u", logprobs=True, top_logprobs=1).choices[1].message.content,
        ask([*HI, first.model_dump(), *HI]).choices[0].message.content,
        json.loads(ask(response_format=shape).choices[0].message.content)["code"],
        json.loads(streamed(response_format=shape).content)["code"],
    ]
    assert texts == [NUMBER] * 6, texts
    for message in (ask(FOX, tools=TOOLS).choices[0].message, streamed(FOX, tools=TOOLS)):
        [call] = message.tool_calls
        assert (call.function.name, json.loads(call.function.arguments)) == ("get_code", {"word": "fox"}), call
        result = {"role": "tool", "tool_call_id": call.id, "name": "get_code", "content": "4821"}
        answer = ask([*FOX, message.model_dump(), result], tools=TOOLS)
        assert answer.choices[0].message.content == "4821", answer

text = {"model": f"text-completion-openai/{MODEL}", "prompt": "Codes: fox=4821, hat=0937. hat=", "max_tokens": 8, **at}
assert litellm.text_completion(**text).choices[0].text == NUMBER
echoed = litellm.text_completion(**text, best_of=1, echo=True).choices[0].text
assert echoed == text["prompt"] + NUMBER, echoed
assert "".join(chunk.choices[0].text or "" for chunk in litellm.text_completion(**text, stream=True)) == NUMBER

said = litellm.responses(model=f"openai/{MODEL}", input=ASKED, **at)
assert said.output[-1].content[0].text == NUMBER, said
kinds = [event.type for event in litellm.responses(model=f"openai/{MODEL}", input=ASKED, stream=True, **at)]
assert kinds[-1] == "response.completed", kinds
