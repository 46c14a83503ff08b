"""What a chat request says about tools and thoughts: how its answers are read."""

from typing import Any, NamedTuple

from pdkv.errors import InvalidRequest
from pdkv.limits import clip
from pdkv.parsers.answer import AnswerFormat
from pdkv.parsers.call_object import MAX_NAME
from pdkv.parsers.reasoning import Thinking
from pdkv.parsers.registry import TOOL_PARSERS
from pdkv.router.http.prompts import Prompt
from pdkv.router.http.protocol import ChatBody, NamedToolChoice
from pdkv.router.http.served_model import ServedModel


class Tool(NamedTuple):
    """A function that the model may call."""

    name: str
    parameters: dict[str, Any] | None  # JSON schema; None: any object


def check_tools(body: ChatBody, model: ServedModel) -> list[Tool]:
    """The tools that answers may call; none where calls are not read.

    Raises:
        InvalidRequest: a tool that is no function, a choice that is none of them, or no way to read calls.
    """
    choice = body.tool_choice
    if not body.tools:
        if choice not in (None, "none", "auto"):
            raise InvalidRequest(f"tool_choice {_named(choice)!r} needs tools", param="tool_choice")
        return []
    if choice == "none":
        return []
    tools = [_read_tool(tool, f"tools[{index}]") for index, tool in enumerate(body.tools)]
    if isinstance(choice, NamedToolChoice) and choice.function.name not in {tool.name for tool in tools}:
        raise InvalidRequest(
            f"tool_choice.function.name: {clip(choice.function.name)!r} is none of the tools; "
            f"they are {clip(', '.join(tool.name for tool in tools))}",
            param="tool_choice.function.name",
        )
    if model.tool_parser is None:
        known = ", ".join(TOOL_PARSERS.shipped)
        raise InvalidRequest(
            f"tools with tool_choice {_named(choice)!r} need a tool parser, and the server has none: its model's chat "
            f"template is of no family that it knows. Start it with --tool-parser NAME (one of {known}), or send "
            "tool_choice 'none'",
            param="tools",
        )
    if choice not in (None, "auto"):
        raise InvalidRequest(
            f"tool_choice {_named(choice)!r} is not supported, since no grammar makes the model call a tool; allowed: "
            "'auto', 'none'",
            param="tool_choice",
        )
    return tools


def answer_format(body: ChatBody, prompt: Prompt, tools: list[Tool], model: ServedModel) -> AnswerFormat | None:
    """How the answers are read; None: all of them is text.

    Raises:
        InvalidRequest: thoughts shall be left out, and no parser finds them.
    """
    if body.include_reasoning is False and model.reasoning_parser is None:
        raise InvalidRequest(
            "include_reasoning: false needs a server with --reasoning-parser NAME: without one thoughts are not told "
            "from the answer",
            param="include_reasoning",
        )
    if model.reasoning_parser is None and not tools:
        return None
    return AnswerFormat(
        reasoning_parser=model.reasoning_parser,
        prompt=_thinking(body, prompt, model),
        shows_reasoning=body.include_reasoning is not False,
        tool_parser=model.tool_parser if tools else None,
        tool_names=frozenset(tool.name for tool in tools),
        several_calls=body.parallel_tool_calls is not False,
        named_tool=isinstance(body.tool_choice, NamedToolChoice),
    )


def _thinking(body: ChatBody, prompt: Prompt, model: ServedModel) -> Thinking:
    """Where the answer begins: as the template ends the prompt, or as the message is that it goes on."""
    parser = model.reasoning_parser
    if parser is None:
        return "closed"
    if body.continue_final_message:
        content = body.messages[-1].content
        return "open" if isinstance(content, str) and parser.thinking_within(content) == "open" else "closed"
    if body.add_generation_prompt is False:  # the end is a message's, whatever it says
        return "unsaid"
    return parser.thinking_of(prompt.text or "")


def _read_tool(tool: dict[str, Any], place: str) -> Tool:
    if tool.get("type") != "function":
        raise InvalidRequest(
            f"{place}.type: {clip(repr(tool.get('type')))} is not supported; allowed: 'function'", param=f"{place}.type"
        )
    function = tool.get("function")
    if not isinstance(function, dict):
        raise InvalidRequest(f"{place}.function must be an object with a name", param=f"{place}.function")
    name = function.get("name")
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME:
        raise InvalidRequest(
            f"{place}.function.name must be a text of 1 to {MAX_NAME} characters, got {clip(repr(name))}",
            param=f"{place}.function.name",
        )
    parameters = function.get("parameters")
    if parameters is not None and not isinstance(parameters, dict):
        raise InvalidRequest(
            f"{place}.function.parameters must be a JSON schema, which is an object, got {clip(repr(parameters))}",
            param=f"{place}.function.parameters",
        )
    return Tool(name, parameters)


def _named(choice: str | NamedToolChoice | None) -> str:
    """A tool_choice in words."""
    return clip(choice.function.name) if isinstance(choice, NamedToolChoice) else choice or "auto"
