"""`LLM.chat` with tools: calls that are required, chosen or named, and those that are found in the text."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from deployments import link_text_model

from pdkv import LLM, SamplingParams
from pdkv.errors import InvalidRequest
from pdkv.sampling.shape import StructuredOutputs

pytestmark = pytest.mark.processes  # grammars are compiled in one

USER = [{"role": "user", "content": "Hello"}]
ZONES = {"type": "object", "properties": {"zone": {"enum": ["UTC", "CET"]}}, "required": ["zone"]}
TOOLS = [
    {"type": "function", "function": {"name": "get_time", "parameters": ZONES}},
    {"type": "function", "function": {"name": "stop", "parameters": {"properties": {"now": {"const": True}}}}},
]
NAMED = {"type": "function", "function": {"name": "get_time"}}


@pytest.fixture(scope="module")
def llm(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    model = link_text_model(tiny_model_dir, tmp_path_factory.mktemp("llm"))
    with LLM(model, kv_cache_memory=8 << 20, threads=1) as llm:
        yield llm


def ending(llm: LLM, **fields: Any) -> SamplingParams:
    """Seeded, and at its end as soon as it may be."""
    [end] = llm.tokenizer.encode("</s>")
    return SamplingParams(seed=1, max_tokens=200, logit_bias={end: 100.0}, **fields)


def test_required_and_named_tools_are_called(llm: LLM) -> None:
    fields: dict[str, Any] = {"tools": TOOLS, "tool_parser": "hermes", "use_tqdm": False}
    (required,) = llm.chat(USER, ending(llm, n=6), tool_choice="required", **fields)
    names = set()
    for choice in required.outputs:
        [call] = choice.tool_calls or []
        names.add(call.name)
        assert call.name in choice.text
        if call.name == "get_time":
            assert json.loads(call.arguments)["zone"] in ("UTC", "CET")
    assert names == {"get_time", "stop"}
    (named,) = llm.chat(USER, ending(llm), tool_choice=NAMED, **fields)
    assert [call.name for call in named.outputs[0].tool_calls or []] == ["get_time"]
    [newline] = llm.tokenizer.encode("\n")
    on = msgspec.structs.replace(ending(llm), logit_bias={newline: 100.0})
    (several,) = llm.chat(USER, on, tool_choice="required", **fields)
    assert len(several.outputs[0].tool_calls or []) > 1
    (one,) = llm.chat(USER, on, tool_choice="required", parallel_tool_calls=False, **fields)
    assert len(one.outputs[0].tool_calls or []) == 1


def test_a_shape_or_a_call(llm: LLM) -> None:
    params = ending(llm, structured_outputs=StructuredOutputs(choice=("yes",)))
    for char, calls in (("<", 1), ("y", 0)):
        [first] = llm.tokenizer.encode(char)
        biased = msgspec.structs.replace(params, logit_bias={**params.logit_bias, first: 100.0})
        (output,) = llm.chat(USER, biased, tools=TOOLS, tool_choice="auto", tool_parser="hermes", use_tqdm=False)
        assert len(output.outputs[0].tool_calls or []) == calls
        assert (output.outputs[0].text == "yes") is (not calls)


def test_calls_are_text_where_none_are_read(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=5)
    (plain,) = llm.chat(USER, params, use_tqdm=False)
    for fields in ({"tools": TOOLS}, {"tools": TOOLS, "tool_choice": "none"}, {"tool_choice": "auto"}):
        (output,) = llm.chat(USER, params, use_tqdm=False, **fields)
        assert output.outputs == plain.outputs
        assert output.outputs[0].tool_calls is None
    (read,) = llm.chat(USER, params, tools=TOOLS, tool_parser="hermes", use_tqdm=False)
    assert read.outputs[0].tool_calls == []


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "required"}, "tool_parser"),
        ({"tools": TOOLS, "tool_choice": "any", "tool_parser": "hermes"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"name": "stop"}, "tool_parser": "hermes"}, "tool_choice"),
        ({"tools": [{"function": {}}]}, "tools[0].type"),
        (
            {"tools": TOOLS, "tool_choice": {**NAMED, "function": {"name": "go"}}, "tool_parser": "hermes"},
            "tool_choice.function.name",
        ),
        (
            {
                "tools": [{"type": "function", "function": {"name": "f", "parameters": {"not": {}}, "strict": True}}],
                "tool_parser": "hermes",
            },
            "tools[0].function.parameters",
        ),
    ],
)
def test_what_cannot_be_called_is_refused(llm: LLM, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        llm.chat(USER, SamplingParams(max_tokens=1), use_tqdm=False, **fields)
    assert refused.value.param == param
