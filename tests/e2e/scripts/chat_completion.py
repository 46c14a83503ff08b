"""A conversation, whole and streamed."""

import os

from openai import OpenAI
from script_answers import CODES, chat_ids, greedy_text

openai_api_key = "EMPTY"
openai_api_base = os.environ["API_BASE"]

client = OpenAI(api_key=openai_api_key, base_url=openai_api_base)
models = client.models.list()
model = models.data[0].id

messages = [
    {"role": "system", "content": CODES},
    {"role": "user", "content": "What is fox?"},
    {"role": "assistant", "content": "4821"},
    {"role": "user", "content": "What is hat?"},
]


def main(stream: bool) -> str:
    result = client.chat.completions.create(
        messages=messages, model=model, stream=stream, temperature=0, max_completion_tokens=6
    )
    if not stream:
        return result.choices[0].message.content
    return "".join(chunk.choices[0].delta.content or "" for chunk in result)


if __name__ == "__main__":
    assert main(False) == main(True) == greedy_text(chat_ids(messages), 6)
