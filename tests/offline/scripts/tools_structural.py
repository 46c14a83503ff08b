"""A call between tags, by a structural tag."""

import json

from script_answers import MODEL, QUESTIONS

from pdkv import LLM, SamplingParams, StructuredOutputsParams

if __name__ == "__main__":
    llm = LLM(model=MODEL)
    schema = {
        "type": "object",
        "properties": {"on": {"type": "boolean"}},
        "required": ["on"],
        "additionalProperties": False,
    }
    tag = {
        "type": "structural_tag",
        "format": {
            "type": "tag",
            "begin": "<call>",
            "content": {"type": "json_schema", "json_schema": schema},
            "end": "</call>",
        },
    }
    shape = StructuredOutputsParams(structural_tag=json.dumps(tag))
    text = (
        llm.generate(QUESTIONS[0], SamplingParams(temperature=0.0, max_tokens=40, structured_outputs=shape))[0]
        .outputs[0]
        .text
    )
    assert text.startswith("<call>")
    assert text.endswith("</call>")
    assert type(json.loads(text.removeprefix("<call>").removesuffix("</call>"))["on"]) is bool
