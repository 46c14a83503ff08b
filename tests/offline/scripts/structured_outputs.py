"""Answers of one of some texts, of a pattern, of a schema and of a grammar."""

import json
import re

from script_answers import MODEL, QUESTIONS

from pdkv import LLM, SamplingParams, StructuredOutputsParams

MAX_TOKENS = 40
SCHEMA = {
    "type": "object",
    "properties": {"known": {"type": "boolean"}, "kind": {"enum": ["animal", "thing"]}},
    "required": ["known", "kind"],
    "additionalProperties": False,
}
GRAMMAR = """
root ::= "SELECT " column " from " table
column ::= "col_1" | "col_2"
table ::= "table_1" | "table_2"
"""


def generate_output(prompt: str, sampling_params: SamplingParams, llm: LLM) -> str:
    return llm.generate(prompt, sampling_params=sampling_params)[0].outputs[0].text


def main():
    llm = LLM(model=MODEL, max_model_len=256)
    choice = StructuredOutputsParams(choice=["Positive", "Negative"])
    assert generate_output(QUESTIONS[0], SamplingParams(structured_outputs=choice), llm) in ("Positive", "Negative")
    regex = StructuredOutputsParams(regex=r"\w+@\w+\.com\n")
    text = generate_output(QUESTIONS[0], SamplingParams(seed=1, structured_outputs=regex, max_tokens=MAX_TOKENS), llm)
    assert re.fullmatch(r"\w+@\w+\.com\n|\w+@?\w*\.?c?o?m?", text), text
    of_schema = SamplingParams(structured_outputs=StructuredOutputsParams(json=SCHEMA), max_tokens=MAX_TOKENS)
    answer = json.loads(generate_output(QUESTIONS[0], of_schema, llm))
    assert sorted(answer) == ["kind", "known"]
    assert answer["kind"] in ("animal", "thing")
    of_grammar = SamplingParams(structured_outputs=StructuredOutputsParams(grammar=GRAMMAR), max_tokens=MAX_TOKENS)
    assert re.fullmatch("SELECT col_[12] from table_[12]", generate_output(QUESTIONS[0], of_grammar, llm))


if __name__ == "__main__":
    main()
