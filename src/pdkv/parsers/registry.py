"""Names of parsers: `--tool-parser` and `--reasoning-parser`."""

from typing import TYPE_CHECKING

from pdkv.base.registry import Registry

if TYPE_CHECKING:
    from pdkv.parsers.reasoning import ReasoningParser
    from pdkv.parsers.tool_parser import ToolParser


AUTO, NONE = "auto", "none"

TOOL_PARSERS: "Registry[ToolParser]" = Registry(
    "tool parser",
    "pdkv.tool_parsers",
    {
        "hermes": "pdkv.parsers.hermes:HermesParser",
        "llama3_json": "pdkv.parsers.llama3_json:Llama3JsonParser",
        "mistral": "pdkv.parsers.mistral:MistralParser",
        "qwen3_coder": "pdkv.parsers.tagged:Qwen3CoderParser",
        "glm45": "pdkv.parsers.tagged:Glm45Parser",
        "pythonic": "pdkv.parsers.pythonic:PythonicParser",
    },
    "pdkv.parsers.tool_parser:ToolParser",
)

REASONING_PARSERS: "Registry[ReasoningParser]" = Registry(
    "reasoning parser",
    "pdkv.reasoning_parsers",
    {
        "deepseek_r1": "pdkv.parsers.reasoning:DeepSeekR1Parser",
        "mistral": "pdkv.parsers.reasoning:MistralThinkParser",
        "qwen3": "pdkv.parsers.reasoning:Qwen3Parser",
    },
    "pdkv.parsers.reasoning:ReasoningParser",
)


def check_parser_names(tool_parser: str, reasoning_parser: str) -> None:
    """Raise ConfigError for the name of a parser that there is not."""
    if tool_parser not in (AUTO, NONE):
        TOOL_PARSERS.target(tool_parser)
    if reasoning_parser != NONE:
        REASONING_PARSERS.target(reasoning_parser)


def find_tool_parser(name: str, chat_template: str) -> "type[ToolParser] | None":
    """The parser of that name, or with "auto" the shipped one of the model's family; None: there is none.

    Raises:
        ConfigError: no such parser.
    """
    if name == NONE:
        return None
    if name != AUTO:
        return TOOL_PARSERS.load(name)
    shipped = (TOOL_PARSERS.load(known) for known in TOOL_PARSERS.shipped)
    return next((parser for parser in shipped if parser.recognises(chat_template)), None)


def find_reasoning_parser(name: str) -> "type[ReasoningParser] | None":
    """The parser of that name; None: there is none.

    Raises:
        ConfigError: no such parser.
    """
    return None if name == NONE else REASONING_PARSERS.load(name)
