"""Parameters that only vLLM has, in extra_body."""

import os

from openai import OpenAI
from script_answers import CODES, QUESTIONS, chat_ids, greedy_text

openai_api_key = "EMPTY"
openai_api_base = os.environ["API_BASE"]

client = OpenAI(api_key=openai_api_key, base_url=openai_api_base)
models = client.models.list()
model = models.data[0].id

if __name__ == "__main__":
    completion = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": f"{CODES}What is pin?"}],
        temperature=0,
        max_tokens=20,
        extra_body={
            "top_k": -1,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "ignore_eos": True,
            "min_tokens": 2,
            "skip_special_tokens": True,
            "spaces_between_special_tokens": True,
            "add_generation_prompt": True,
            "include_stop_str_in_output": False,
            "priority": 0,
            "return_token_ids": True,
        },
    )
    assert completion.usage.completion_tokens == 20
    ids = completion.model_dump()["prompt_token_ids"]
    assert ids == chat_ids([{"role": "user", "content": f"{CODES}What is pin?"}])
    assert completion.choices[0].message.content.startswith(greedy_text(ids, 3))
    assert QUESTIONS
