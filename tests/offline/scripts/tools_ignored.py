"""A template that knows no tools leaves them out, as in transformers."""

from script_answers import CODES, MODEL, chat_ids, greedy_text

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

if __name__ == "__main__":
    messages = [{"role": "user", "content": f"{CODES}What is fox?"}]
    [output] = LLM(model=MODEL).chat(messages, SamplingParams(temperature=0.0, max_tokens=6), tools=TOOLS)
    with_tools = chat_ids(messages)
    if "tools" not in LLM(model=MODEL).get_tokenizer().chat_template:
        assert output.prompt_token_ids == with_tools
        assert output.outputs[0].text == greedy_text(with_tools, 6)
