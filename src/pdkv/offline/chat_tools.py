"""Tools in `chat`: which calls answers may or must contain, and how they are found in an answer's text."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

from pdkv.base.vllm_api import known_arguments
from pdkv.errors import InvalidRequest
from pdkv.parsers.answer import AnswerFormat, AnswerStream
from pdkv.parsers.answer_grammar import Calls
from pdkv.parsers.parts import WholeCall, whole_calls
from pdkv.parsers.registry import TOOL_PARSERS, find_tool_parser
from pdkv.parsers.tools import NamedToolChoice, ToolChoice, read_tools
from pdkv.sampling.params import as_type
from pdkv.text import Tokenizer


@dataclass(frozen=True, kw_only=True)
class ChatOptions:
    """The options of `chat` besides messages and sampling parameters."""

    tools: Sequence[Mapping[str, Any]] | None = None
    """Functions that the template describes to the model. Its calls are part of the text, and, if a parser knows the
    model's format, also `tool_calls` of finished choices.
    """
    tool_choice: str | Mapping[str, Any] | None = None
    """As in OpenAI's API: "none", "auto", "required", or {"type": "function", "function": {"name": …}}; the
    latter two are enforced, and so are `strict` tools."""
    parallel_tool_calls: bool = True  # whether an answer may hold several calls
    tool_parser: str = "auto"  # "auto" (by the chat template), "hermes", "llama3_json" or "mistral"
    add_generation_prompt: bool = True  # whether a prompt ends with the beginning of an answer
    continue_final_message: bool = False  # whether it ends within the last message; not with add_generation_prompt
    chat_template: str | None = None  # replaces the model's template
    chat_template_kwargs: Mapping[str, Any] | None = None  # further variables of the template, such as enable_thinking
    # neutral: a template gets the format that it accepts
    chat_template_content_format: Literal["auto", "string", "openai"] = "auto"

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Self:
        """The parser's options. Raises InvalidRequest for an unknown one."""
        return cls(**known_arguments("chat", given, cls.__dataclass_fields__))


def read_calls(options: ChatOptions, tokenizer: Tokenizer) -> Calls | None:
    """The calls that answers may contain; None: calls are text, since there are no tools, or no parser for the model.

    Raises:
        InvalidRequest: an invalid tool, choice or flag, or a choice that needs a missing parser.
        ConfigError: an unknown parser.
    """
    for option in ("parallel_tool_calls", "add_generation_prompt", "continue_final_message"):
        as_type(getattr(options, option), bool, option)
    as_type(options.chat_template, str | None, "chat_template")
    if not isinstance(options.chat_template_kwargs, Mapping | None):
        raise InvalidRequest(
            f"chat_template_kwargs must be a mapping, got {options.chat_template_kwargs!r:.80}",
            param="chat_template_kwargs",
        )
    as_type(options.chat_template_content_format, Literal["auto", "string", "openai"], "chat_template_content_format")
    choice = as_type(options.tool_choice, ToolChoice | None, "tool_choice")
    as_type(options.tools, list[dict[str, Any]] | None, "tools")
    as_type(options.tool_parser, str, "tool_parser")
    if not options.tools:
        if choice not in (None, "none", "auto"):
            raise InvalidRequest(f"tool_choice {choice!r:.80} needs tools", param="tool_choice")
        return None
    name = choice.function.name if isinstance(choice, NamedToolChoice) else None
    parser = find_tool_parser(options.tool_parser, options.chat_template or tokenizer.chat_template_source)
    tools = read_tools(options.tools)
    if choice == "none" or (parser is None and choice is None):
        return None
    if parser is None:
        known = ", ".join(TOOL_PARSERS.shipped)
        raise InvalidRequest(
            f"tool_choice {choice!r:.80} requires tool_parser, one of {known}: the chat template belongs to no known "
            "family",
            param="tool_parser",
        )
    return Calls.chosen(parser, tools, required=choice == "required", named=name, parallel=options.parallel_tool_calls)


def format_of(calls: Calls) -> AnswerFormat:
    """How answers with these calls are parsed."""
    tools = {tool.name: tool.parameters for tool in calls.tools}
    return AnswerFormat(tool_parser=calls.parser, tools=tools, several_calls=calls.several)


def calls_in(text: str, format: AnswerFormat) -> list[WholeCall]:
    """The calls in a finished answer."""
    stream = AnswerStream(format)
    return whole_calls([*stream.push(text), *stream.finish()])
