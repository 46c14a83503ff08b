"""Names of parsers: `--tool-parser` and `--reasoning-parser`."""

import types
from pathlib import Path
from typing import TYPE_CHECKING

from pdkv.base.options import did_you_mean
from pdkv.base.registry import Registry
from pdkv.base.secret_options import read_own_file
from pdkv.errors import ConfigError

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


_PLUGIN = "the tool parser plugin"
_MAX_PLUGIN_BYTES = 1 << 20


def check_parser_names(tool_parser: str, reasoning_parser: str, plugin: Path | None = None) -> None:
    """Raise ConfigError for an unknown parser name, or a plugin that other users may write."""
    if plugin is not None:  # it runs only in the router, which knows its names
        read_own_file(plugin, _PLUGIN, _MAX_PLUGIN_BYTES)
    elif tool_parser not in (AUTO, NONE):
        TOOL_PARSERS.target(tool_parser)
    if reasoning_parser != NONE:
        REASONING_PARSERS.target(reasoning_parser)


def load_plugin(path: Path) -> "dict[str, type[ToolParser]]":
    """Run a Python file; returns the tool parsers that it defines, by class name.

    Raises:
        ConfigError: other users may write it, it fails, or it defines none.
    """
    from pdkv.parsers.tool_parser import ToolParser

    module = types.ModuleType("pdkv_tool_parser_plugin")
    text = read_own_file(path, _PLUGIN, _MAX_PLUGIN_BYTES)
    try:
        exec(compile(text, str(path), "exec"), module.__dict__)
    except Exception as error:
        raise ConfigError(f"{_PLUGIN} {path} failed: {type(error).__name__}: {error}") from error
    kinds = [kind for kind in vars(module).values() if isinstance(kind, type) and kind.__module__ == module.__name__]
    found = {kind.__name__: kind for kind in kinds if issubclass(kind, ToolParser)}
    if not found:
        raise ConfigError(f"{_PLUGIN} {path} defines no subclass of pdkv.parsers.tool_parser.ToolParser")
    return found


def find_tool_parser(name: str, chat_template: str, plugin: Path | None = None) -> "type[ToolParser] | None":
    """The parser of that name, or with "auto" the plugin's, or the shipped one of the model's family; None: there is
    none.

    Raises:
        ConfigError: unknown parser, or an invalid plugin.
    """
    own = load_plugin(plugin) if plugin is not None else {}
    if name == NONE:
        return None
    if name in own or (name == AUTO and len(own) == 1):
        return own.get(name) or next(iter(own.values()))
    if own and name == AUTO:
        raise ConfigError(f"{_PLUGIN} {plugin} defines {', '.join(own)}: choose one with --tool-parser")
    if name != AUTO:
        if own and name not in TOOL_PARSERS.shipped:
            raise ConfigError(f"{_PLUGIN} {plugin} defines no {name!r}{did_you_mean(name, own)}, only {', '.join(own)}")
        return TOOL_PARSERS.load(name)
    shipped = (TOOL_PARSERS.load(known) for known in TOOL_PARSERS.shipped)
    return next((parser for parser in shipped if parser.recognises(chat_template)), None)


def find_reasoning_parser(name: str) -> "type[ReasoningParser] | None":
    """The parser of that name; None: there is none.

    Raises:
        ConfigError: unknown parser.
    """
    return None if name == NONE else REASONING_PARSERS.load(name)
