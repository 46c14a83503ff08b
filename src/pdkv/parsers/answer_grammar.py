"""The grammar of an answer: its reasoning, tool calls and shaped text, composed so that the parsers can read them.

Reasoning is free up to its closing tag. After it come calls, if they are required; otherwise the requested shape, or
calls; otherwise free text, in which calls that begin are well-formed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from pdkv.errors import InvalidRequest
from pdkv.grammar.formats import Format, either, json_of, structural_tag
from pdkv.grammar.normal_forms import normalize
from pdkv.grammar.prepare import make_format, make_grammar, naming
from pdkv.grammar.schema_time import SchemaTime
from pdkv.parsers.reasoning import ReasoningParser, Thinking
from pdkv.parsers.tool_parser import CallFormat, CallSyntax, KnowsToken, ToolParser, failing
from pdkv.parsers.tools import Tool, find_tool
from pdkv.sampling.shape import Grammar, StructuredOutputs


class AskedShape(NamedTuple):
    """The shape of an answer's text."""

    outputs: StructuredOutputs
    param: str  # the field that asks for it


@dataclass(frozen=True, kw_only=True)
class Calls:
    """The calls of its tools that a request allows."""

    parser: type[ToolParser]
    tools: Sequence[Tool]  # those that may be called
    required: bool  # the answer must be a call; otherwise the model chooses
    several: bool

    @classmethod
    def chosen(
        cls, parser: type[ToolParser], tools: Sequence[Tool], *, required: bool, named: str | None, parallel: bool
    ) -> "Calls":
        """The calls for a request's choice, "required" or the name of a tool.

        Raises:
            InvalidRequest: no tool has that name.
        """
        if named is not None:
            return cls(parser=parser, tools=[find_tool(tools, named)], required=True, several=False)
        return cls(parser=parser, tools=tools, required=required, several=parallel)


@dataclass(frozen=True, kw_only=True)
class AnswerRules:
    """The rules for an answer."""

    shape: AskedShape | None = None
    calls: Calls | None = None
    reasoning_parser: type[ReasoningParser] | None = None
    prompt: Thinking = "closed"  # where it leaves the model

    @property
    def param(self) -> str:
        """The field that asks for the grammar, and is at fault if it does not compile."""
        if self.calls is not None and (self.calls.required or self.shape is None):
            return "tool_choice" if self.calls.required else "tools"
        return "" if self.shape is None else self.shape.param

    def grammar(self, knows: KnowsToken, time: SchemaTime) -> Grammar | None:
        """The grammar for engines; None: the answer is free.

        A tool's arguments are free if the model chooses to call it and the tool is not `strict`, as in vLLM.

        Raises:
            InvalidRequest: a schema cannot be enforced; names the field and the place in it.
            RequestAborted: the request was cancelled.
        """
        calls, shape = self.calls, self.shape
        if calls is not None and (calls.required or shape is not None or any(tool.strict for tool in calls.tools)):
            format = self._with_calls(calls, knows, time)
        elif shape is None:
            return None
        else:
            with naming(shape.param):
                if self.reasoning_parser is None or self.prompt == "closed":
                    return make_grammar(shape.outputs, time)
                format = make_format(shape.outputs, time)
        if self.reasoning_parser is not None:
            format = self.reasoning_parser.with_thoughts(self.prompt, format)
        return structural_tag(format)

    def _with_calls(self, calls: Calls, knows: KnowsToken, time: SchemaTime) -> Format:
        syntax = self._syntax(calls, knows, time)
        if calls.required:
            return syntax.calls_alone(several=calls.several)
        if self.shape is None:
            return syntax.text_with_calls(several=calls.several)
        with naming(self.shape.param):
            shape = make_format(self.shape.outputs, time)
        return either([syntax.calls_alone(several=calls.several), shape])

    def _syntax(self, calls: Calls, knows: KnowsToken, time: SchemaTime) -> CallSyntax:
        formats = [
            CallFormat(tool.name, _arguments(tool, time), tool.parameters, is_enforced=True, time=time)
            if calls.required or tool.strict
            else CallFormat(tool.name, json_of(_ANY_OBJECT))
            for tool in calls.tools
        ]
        with naming("tools"), failing(calls.parser):
            syntax = calls.parser.syntax(formats, knows, several=calls.several)
        if syntax is None:
            raise InvalidRequest(
                f"calls cannot be enforced: the tool parser {calls.parser.__name__} defines no syntax for them; "
                "send tool_choice 'auto', tools that are not strict, and no response_format",
                param="tool_choice",
            )
        return syntax


_ANY_OBJECT = normalize({"type": "object"})


def _arguments(tool: Tool, time: SchemaTime) -> Format:
    """The objects that match a tool's schema: arguments are always objects."""
    if tool.parameters is None:
        return json_of(_ANY_OBJECT)
    param = f"{tool.place}.parameters"
    given = tool.parameters.get("type", "object")
    if given != "object" and "object" not in (given if isinstance(given, list) else ()):
        raise InvalidRequest(f"{param}.type must be 'object', since arguments are an object", param=param)
    schema: dict[str, Any] = {**tool.parameters, "type": "object"}
    with naming(param):
        try:
            return json_of(normalize(schema, time=time))
        except RecursionError:
            raise InvalidRequest("the schema is nested too deeply") from None
