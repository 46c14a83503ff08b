"""Tools as a request describes them: OpenAI's functions, checked."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import msgspec

from pdkv.base.limits import clip
from pdkv.errors import InvalidRequest
from pdkv.parsers.call_object import MAX_NAME


class Tool(NamedTuple):
    """A function that the model may call."""

    name: str
    parameters: dict[str, Any] | None  # JSON schema; None: any object
    strict: bool  # whether arguments must match it even if the model chose to call
    place: str  # place of the function, such as tools[0].function


class ToolName(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A function by its name."""

    name: str


class NamedToolChoice(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The tool that is to be called."""

    type: Literal["function"]
    function: ToolName


ToolChoice = Literal["none", "auto", "required"] | NamedToolChoice


def read_tools(tools: Sequence[Mapping[str, Any]]) -> list[Tool]:
    """Read tools. Raises InvalidRequest for a tool that is not a function."""
    return [_read(tool, f"tools[{index}]") for index, tool in enumerate(tools)]


def find_tool(tools: Sequence[Tool], name: str) -> Tool:
    """The tool that `tool_choice` names. Raises InvalidRequest if it names none of the tools."""
    found = next((tool for tool in tools if tool.name == name), None)
    if found is None:
        raise InvalidRequest(
            f"tool_choice.function.name: {clip(name)!r} is not one of the tools; they are "
            f"{clip(', '.join(tool.name for tool in tools))}",
            param="tool_choice.function.name",
        )
    return found


def _read(tool: Mapping[str, Any], place: str) -> Tool:
    if tool.get("type") != "function":
        raise InvalidRequest(
            f"{place}.type: {clip(repr(tool.get('type')))} is not supported; allowed: 'function'", param=f"{place}.type"
        )
    place += ".function"
    function = tool.get("function")
    if not isinstance(function, dict):
        raise InvalidRequest(f"{place} must be an object with a name", param=place)
    name = function.get("name")
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME:
        raise InvalidRequest(
            f"{place}.name must be a text of 1 to {MAX_NAME} characters, got {clip(repr(name))}", param=f"{place}.name"
        )
    parameters = function.get("parameters")
    if parameters is not None and not isinstance(parameters, dict):
        raise InvalidRequest(
            f"{place}.parameters must be a JSON schema, which is an object, got {clip(repr(parameters))}",
            param=f"{place}.parameters",
        )
    strict = function.get("strict")
    if strict is not None and not isinstance(strict, bool):
        raise InvalidRequest(f"{place}.strict must be true or false, got {clip(repr(strict))}", param=f"{place}.strict")
    return Tool(name, parameters, strict or False, place)
