"""Answers with a shape."""

import os

from openai import OpenAI
from script_answers import CODES

openai_api_key = "EMPTY"
openai_api_base = os.environ["API_BASE"]

client = OpenAI(api_key=openai_api_key, base_url=openai_api_base)
models = client.models.list()
model = models.data[0].id

import json
import re

SCHEMA = {
    "type": "object",
    "properties": {"known": {"type": "boolean"}, "kind": {"enum": ["animal", "thing"]}},
    "required": ["known", "kind"],
    "additionalProperties": False,
}


def ask(**fields):
    messages = [{"role": "user", "content": f"{CODES}What is fox?"}]
    reply = client.chat.completions.create(model=model, messages=messages, max_tokens=40, temperature=0, **fields)
    return reply.choices[0].message.content


if __name__ == "__main__":
    assert ask(extra_body={"structured_outputs": {"choice": ["positive", "negative"]}}) in ("positive", "negative")
    assert re.fullmatch("[a-z]{4}@x", ask(extra_body={"structured_outputs": {"regex": "[a-z]{4}@x"}}))
    of_schema = ask(response_format={"type": "json_schema", "json_schema": {"name": "word", "schema": SCHEMA}})
    assert sorted(json.loads(of_schema)) == ["kind", "known"]
    assert re.fullmatch("a|bb", ask(extra_body={"structured_outputs": {"grammar": 'root ::= "a" | "bb"'}}))
