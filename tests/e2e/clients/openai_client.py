"""OpenAI's client: completions, chat and responses, with a tool, with a schema, streamed and not."""

import json
import sys

from openai import OpenAI
from pydantic import BaseModel

MODEL, ASKED, NUMBER = "pdkv-default", "Codes: fox=4821, hat=0937. What is hat?", "0937"
PARAMETERS = {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]}
FUNCTION = {"name": "get_code", "description": "The code of a word.", "parameters": PARAMETERS}
ARGUMENTS = {"word": "fox"}
HI = [{"role": "user", "content": ASKED}]
FOX = [{"role": "user", "content": "What is fox?"}]
TOOLS = [{"type": "function", "function": FUNCTION}]
OWN_TOOLS = [{"type": "function", "strict": False, **FUNCTION}]


class Code(BaseModel):
    code: str


client = OpenAI(base_url=sys.argv[1], api_key="none", max_retries=0)
same = {"model": MODEL, "temperature": 0}

text = {"prompt": "Codes: fox=4821, hat=0937. hat=", "max_tokens": 8, **same}
assert client.completions.create(**text).choices[0].text == NUMBER
assert "".join(chunk.choices[0].text for chunk in client.completions.create(stream=True, **text)) == NUMBER

create = client.chat.completions.create
assert create(messages=HI, **same).choices[0].message.content == NUMBER
chunks = list(create(messages=HI, stream=True, stream_options={"include_usage": True}, **same))
assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == NUMBER
assert chunks[-1].usage.prompt_tokens > 0
assert client.chat.completions.parse(messages=HI, response_format=Code, **same).choices[0].message.parsed.code == NUMBER
with client.chat.completions.stream(messages=HI, response_format=Code, **same) as stream:
    assert stream.get_final_completion().choices[0].message.parsed.code == NUMBER

called = create(messages=FOX, tools=TOOLS, **same).choices[0].message
with client.chat.completions.stream(messages=FOX, tools=TOOLS, **same) as stream:
    streamed = stream.get_final_completion().choices[0].message
for message in (called, streamed):
    [call] = message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("get_code", ARGUMENTS), call
    result = {"role": "tool", "tool_call_id": call.id, "content": "4821"}
    answer = create(messages=[*FOX, message.model_dump(exclude_none=True), result], tools=TOOLS, **same)
    assert answer.choices[0].message.content == "4821", answer

respond = client.responses.create
assert respond(input=ASKED, **same).output_text == NUMBER
events = list(respond(input=HI, stream=True, **same))
assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == NUMBER
assert events[-1].type == "response.completed"
assert events[-1].response.output_text == NUMBER
assert client.responses.parse(input=ASKED, text_format=Code, **same).output_parsed.code == NUMBER
with client.responses.stream(input=ASKED, text_format=Code, **same) as stream:
    assert stream.get_final_response().output_parsed.code == NUMBER

called = respond(input=FOX, tools=OWN_TOOLS, **same)
streamed = list(respond(input=FOX, tools=OWN_TOOLS, stream=True, **same))[-1].response
for response in (called, streamed):
    [item] = response.output
    assert (item.type, item.name, json.loads(item.arguments)) == ("function_call", "get_code", ARGUMENTS), item
    result = {"type": "function_call_output", "call_id": item.call_id, "output": "4821"}
    answer = respond(input=[*FOX, item.model_dump(exclude_none=True), result], tools=OWN_TOOLS, **same)
    assert answer.output_text == "4821", answer
