"""Translates tools of a response to functions, the only kind that chat knows.

Functions of a namespace are prefixed with its name, a custom tool becomes a function with one text parameter, and tools
that OpenAI's own servers run are left out, since this server has none.
"""

import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from pdkv.base.limits import clip
from pdkv.base.log_limit import LogLimit
from pdkv.errors import InvalidRequest

_HOSTED = frozenset(
    {
        *("web_search", "web_search_preview", "file_search", "code_interpreter", "image_generation", "computer"),
        *("computer_use_preview", "mcp", "local_shell", "shell", "apply_patch", "tool_search"),
    }
)

_PLAIN_NAMESPACE = "functions"
"""Namespace in which clients put functions that have none."""

_MAX_GRAMMAR = 16 * 1024
"""The most characters of a custom tool's grammar that the model is told in its description."""

_log_limit = LogLimit(10.0)
logger = logging.getLogger(__name__)


class OwnTool(NamedTuple):
    """The client's tool behind a function of the model."""

    name: str
    namespace: str | None
    is_custom: bool  # its input is a text, not JSON


class OwnTools(NamedTuple):
    """The tools of one request."""

    functions: list[dict[str, Any]]  # as functions of chat
    places: list[str]  # the place of each in the request
    names: dict[str, OwnTool]  # by their function names
    kept: list[dict[str, Any]]  # those of the request that the model is told of


def read_own_tools(tools: Sequence[Mapping[str, Any]]) -> OwnTools:
    """Read the tools. Raises InvalidRequest for anything but functions, custom tools, namespaces of these, and server
    tools.
    """
    own = OwnTools([], [], {}, [])
    left_out = set()
    for index, tool in enumerate(tools):
        place, kind = f"tools[{index}]", tool.get("type")
        if isinstance(kind, str) and (kind in _HOSTED or kind.startswith(("web_search_preview_", "web_search_20"))):
            left_out.add(clip(kind))
            continue
        own.kept.append(dict(tool))
        if kind != "namespace":
            _add(own, tool, place, None)
            continue
        name, members = tool.get("name"), tool.get("tools")
        if not isinstance(name, str) or not isinstance(members, list):
            raise InvalidRequest(f"{place} is a namespace, so it must have a name and a list of tools", param=place)
        for number, member in enumerate(members):
            _add(own, member, f"{place}.tools[{number}]", name)
    if left_out and _log_limit.passes():
        logger.info("left out tools that this server does not have: %s", ", ".join(sorted(left_out)))
    return own


def function_name(namespace: str | None, name: str) -> str:
    """The function name that the model sees."""
    if not namespace or namespace == _PLAIN_NAMESPACE:
        return name
    return namespace + name if namespace.endswith("__") else f"{namespace}__{name}"


def custom_arguments(given: str) -> str:
    """A custom tool's input as the arguments of its function."""
    return json.dumps({"input": given}, ensure_ascii=False)


def custom_input(arguments: str) -> str:
    """The reverse of `custom_arguments`; arguments of another form are returned unchanged."""
    try:
        return msgspec.json.decode(arguments, type=dict[str, str])["input"]
    except (msgspec.MsgspecError, KeyError):
        return arguments


def _add(own: OwnTools, tool: object, place: str, namespace: str | None) -> None:
    kind = tool.get("type") if isinstance(tool, dict) else None
    if not isinstance(tool, dict) or kind not in ("function", "custom"):
        allowed = "'function', 'custom'" + ("" if namespace is not None else ", 'namespace'")
        raise InvalidRequest(
            f"{place}.type: {clip(repr(kind))} is not supported; allowed: {allowed}", param=f"{place}.type"
        )
    function = {key: tool[key] for key in tool if key not in ("type", "format")}
    if kind == "custom":
        one_text = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
        function |= {"description": _described(tool), "parameters": one_text}
    name = tool.get("name")
    if isinstance(name, str):  # else it is refused with the others that have none
        function["name"] = known = function_name(namespace, name)
        meant = OwnTool(name, namespace, kind == "custom")
        if own.names.setdefault(known, meant) != meant:
            raise InvalidRequest(
                f"{place}.name: {clip(known)!r} is also the name of another tool", param=f"{place}.name"
            )
    own.functions.append({"type": "function", "function": function})
    own.places.append(place)


def _described(tool: Mapping[str, Any]) -> str:
    """A custom tool's description with the grammar of its input, which the model learns in no other way."""
    about, format = tool.get("description"), tool.get("format")
    text = about if isinstance(about, str) else ""
    definition = format.get("definition") if isinstance(format, dict) else None
    if isinstance(definition, str):
        text += f"\n\nIts input follows this grammar:\n{definition[:_MAX_GRAMMAR]}"
    return text
