"""Tools for many conversations, some of which have called them before."""

from script_answers import MODEL, greedy_ids

from pdkv import LLM, SamplingParams

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

if __name__ == "__main__":
    llm = LLM(model=MODEL)
    call = {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Rome"}'}}
    conversations = [
        [{"role": "user", "content": "fox"}],
        [
            {"role": "user", "content": "And in Rome?"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": "21", "tool_call_id": "c1"},
        ],
    ]
    sampling_params = SamplingParams(temperature=0.0, max_tokens=2)
    outputs = llm.chat(conversations, sampling_params, tools=TOOLS, chat_template=TEMPLATE, use_tqdm=False)
    tokenizer = llm.get_tokenizer()
    assert "[get_weather=Rome]" in tokenizer.decode(outputs[1].prompt_token_ids)
    for conversation, output in zip(conversations, outputs, strict=True):
        prompt = tokenizer.apply_chat_template(
            conversation, tools=TOOLS, chat_template=TEMPLATE, add_generation_prompt=True
        )
        assert output.prompt_token_ids == prompt
        assert output.outputs[0].token_ids == greedy_ids(prompt, 2)
