"""Completions, with several choices, log probabilities and a stream."""

import os

from openai import OpenAI
from script_answers import QUESTIONS, greedy_text

openai_api_key = "EMPTY"
openai_api_base = os.environ["API_BASE"]

client = OpenAI(api_key=openai_api_key, base_url=openai_api_base)
models = client.models.list()
model = models.data[0].id

if __name__ == "__main__":
    for stream in (False, True):
        completion = client.completions.create(
            model=model, prompt=QUESTIONS[0], echo=False, n=2, stream=stream, logprobs=3, temperature=0, max_tokens=6
        )
        if stream:
            texts = ["", ""]
            for chunk in completion:
                for choice in chunk.choices:
                    texts[choice.index] += choice.text
        else:
            texts = [choice.text for choice in completion.choices]
            assert all(len(top) >= 3 for top in completion.choices[0].logprobs.top_logprobs)
        assert texts == [greedy_text(QUESTIONS[0], 6)] * 2
