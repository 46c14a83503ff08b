"""Tools and reasoning in a chat request: which tools answers may call, and how answers are parsed."""

from collections.abc import Sequence

from pdkv.base.limits import clip
from pdkv.errors import InvalidRequest
from pdkv.parsers.answer import AnswerFormat
from pdkv.parsers.answer_grammar import Calls
from pdkv.parsers.json_list import JsonListParser
from pdkv.parsers.reasoning import Thinking
from pdkv.parsers.registry import TOOL_PARSERS
from pdkv.parsers.tool_parser import ToolParser
from pdkv.parsers.tools import NamedToolChoice, Tool, find_tool, read_tools
from pdkv.router.http.read.bodies import ChatBody
from pdkv.router.http.read.prompts import Prompt
from pdkv.router.http.read.served_model import ServedModel


def check_tools(body: ChatBody, model: ServedModel) -> list[Tool]:
    """The tools that answers may call; none if calls are not parsed.

    Raises:
        InvalidRequest: a tool that is not a function, a choice of an unknown tool, or no parser for calls.
    """
    choice = body.tool_choice
    if not body.tools:
        if choice not in (None, "none", "auto"):
            raise InvalidRequest(f"tool_choice {_named(choice)!r} needs tools", param="tool_choice")
        return []
    if choice == "none":
        return []
    tools = read_tools(body.tools)
    if isinstance(choice, NamedToolChoice):
        find_tool(tools, choice.function.name)
    if _parser(body, model) is None:
        known = ", ".join(TOOL_PARSERS.shipped)
        raise InvalidRequest(
            f"tools with tool_choice {_named(choice)!r} need a tool parser, and the server has none, because its "
            f"model's chat template is of no known family. Start it with --tool-parser NAME (one of {known}), or send "
            "tool_choice 'none', 'required' or the name of a tool",
            param="tools",
        )
    return tools


def _parser(body: ChatBody, model: ServedModel) -> type[ToolParser] | None:
    """The parser of calls; without one for the model's own format, required calls are a JSON list."""
    is_free = body.tool_choice in (None, "auto")
    return model.tool_parser or (None if is_free else JsonListParser)


def call_rules(body: ChatBody, tools: Sequence[Tool], model: ServedModel) -> Calls | None:
    """The calls that an answer may or must hold; None: there are no tools."""
    parser = _parser(body, model)
    if not tools or parser is None:
        return None
    choice = body.tool_choice
    return Calls.chosen(
        parser,
        tools,
        required=choice == "required",
        named=choice.function.name if isinstance(choice, NamedToolChoice) else None,
        parallel=body.parallel_tool_calls is not False,
    )


def answer_format(body: ChatBody, prompt: Prompt, tools: list[Tool], model: ServedModel) -> AnswerFormat | None:
    """How the answers are parsed; None: all of it is text.

    Raises:
        InvalidRequest: reasoning is to be left out, but there is no parser for it.
    """
    if body.include_reasoning is False and model.reasoning_parser is None:
        raise InvalidRequest(
            "include_reasoning: false needs a server with --reasoning-parser NAME: without one, reasoning cannot be "
            "told apart from the answer",
            param="include_reasoning",
        )
    if model.reasoning_parser is None and not tools:
        return None
    return AnswerFormat(
        reasoning_parser=model.reasoning_parser,
        prompt=_thinking(body, prompt, model),
        shows_reasoning=body.include_reasoning is not False,
        tool_parser=_parser(body, model) if tools else None,
        tools={tool.name: tool.parameters for tool in tools},
        several_calls=body.parallel_tool_calls is not False,
        named_tool=isinstance(body.tool_choice, NamedToolChoice),
        stops_in_thoughts=model.stops_in_thoughts,
    )


def _thinking(body: ChatBody, prompt: Prompt, model: ServedModel) -> Thinking:
    """Whether the answer begins in reasoning: as the template ends the prompt, or as the continued message stands."""
    parser = model.reasoning_parser
    if parser is None:
        return "closed"
    if body.continue_final_message:
        content = body.messages[-1].content
        return "open" if isinstance(content, str) and parser.thinking_within(content) == "open" else "closed"
    if body.add_generation_prompt is False:  # the end belongs to a message, whatever it says
        return "unsaid"
    return parser.thinking_of(prompt.text or "")


def _named(choice: str | NamedToolChoice | None) -> str:
    """The tool_choice in words."""
    return clip(choice.function.name) if isinstance(choice, NamedToolChoice) else choice or "auto"
