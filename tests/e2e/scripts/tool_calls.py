"""A tool that has to be called, and its result in the conversation."""

import os

from openai import OpenAI
from script_answers import CODES

openai_api_key = "EMPTY"
openai_api_base = os.environ["API_BASE"]

client = OpenAI(api_key=openai_api_key, base_url=openai_api_base)
models = client.models.list()
model = models.data[0].id

import json

tools = [
    {
        "type": "function",
        "function": {
            "name": "get_current_weather",
            "description": "Get the current weather in a given location",
            "parameters": {
                "type": "object",
                "properties": {"city": {"enum": ["Dallas", "Rome"]}, "celsius": {"type": "boolean"}},
                "required": ["city", "celsius"],
                "additionalProperties": False,
            },
        },
    }
]
available_functions = {"get_current_weather": lambda city, celsius: f"{city}: {celsius}"}

if __name__ == "__main__":
    messages = [{"role": "user", "content": f"{CODES}What is the weather?"}]
    for stream in (False, True):
        named = {"type": "function", "function": {"name": "get_current_weather"}}
        reply = client.chat.completions.create(
            model=model, messages=messages, tools=tools, tool_choice=named, max_tokens=200, temperature=0, stream=stream
        )
        if stream:
            deltas = [call for chunk in reply for call in chunk.choices[0].delta.tool_calls or []]
            name = "".join(call.function.name or "" for call in deltas)
            arguments = "".join(call.function.arguments or "" for call in deltas)
        else:
            [call] = reply.choices[0].message.tool_calls
            name, arguments = call.function.name, call.function.arguments
        answer = available_functions[name](**json.loads(arguments))
        assert answer.split(":")[0] in ("Dallas", "Rome")
