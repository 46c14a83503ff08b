"""The model is told of tools; its call is run, and the result goes back into the conversation."""

import json

from script_answers import MODEL

from pdkv import LLM, SamplingParams, StructuredOutputsParams

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
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
TEMPLATE = (
    "{{ bos_token }}{% if tools %}<tools>{% for t in tools %}{{ t.function.name }} {% endfor %}</tools>{% endif %}"
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}[{{ c.function.name }}={{ c.function.arguments.city }}]{% endfor %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def get_weather(city: str, celsius: bool) -> str:
    return f"{city}: {29 if celsius else 85} degrees"


tool_functions = {"get_weather": get_weather}

if __name__ == "__main__":
    llm = LLM(model=MODEL)
    schema = TOOLS[0]["function"]["parameters"]
    sampling_params = SamplingParams(
        max_tokens=60, temperature=0.0, structured_outputs=StructuredOutputsParams(json=schema)
    )
    messages = [{"role": "user", "content": "Can you tell me what the temperature will be in Dallas?"}]
    outputs = llm.chat(messages, sampling_params=sampling_params, tools=TOOLS, chat_template=TEMPLATE)
    tokenizer = llm.get_tokenizer()
    assert "<tools>get_weather </tools>" in tokenizer.decode(outputs[0].prompt_token_ids)
    output = outputs[0].outputs[0].text.strip()
    call = {"name": "get_weather", "arguments": json.loads(output)}
    messages.append(
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "a12345678", "type": "function", "function": {**call, "arguments": output}}],
        }
    )
    tool_answers = [tool_functions[call["name"]](**call["arguments"])]
    messages.append(
        {"role": "tool", "content": "\n\n".join(tool_answers), "name": call["name"], "tool_call_id": "a12345678"}
    )
    [answer] = llm.chat(messages, SamplingParams(max_tokens=8, temperature=0.0), tools=TOOLS, chat_template=TEMPLATE)
    prompt = tokenizer.decode(answer.prompt_token_ids)
    assert f"[get_weather={call['arguments']['city']}]" in prompt
    assert tool_answers[0] in prompt
    [plain] = llm.generate({"prompt_token_ids": answer.prompt_token_ids}, SamplingParams(max_tokens=8, temperature=0.0))
    assert plain.outputs[0].token_ids == answer.outputs[0].token_ids
