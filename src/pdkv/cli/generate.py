"""`pd generate`: prompts from the command line or stdin through one engine in this process."""

import argparse
import json
import sys
import typing
from collections.abc import Sequence
from typing import Any

from pdkv.base.options import Option
from pdkv.cli.options import Flag, add_flags, build, capitalized, collect, flags_of
from pdkv.config import EngineConfig
from pdkv.errors import ConfigError
from pdkv.models.generation_config import SAMPLING_DEFAULTS, read_sampling_defaults
from pdkv.models.hub import with_local_model
from pdkv.sampling.params import SamplingParams

_SAMPLING_HELP = {
    "temperature": "0 = greedy",
    "top_p": "least probability mass to draw from",
    "top_k": "number of most likely tokens to draw from; 0 = all",
    "min_p": "least probability of a token, relative to the most likely one",
    "repetition_penalty": "above 1: tokens of the prompt and the output become less likely",
    "presence_penalty": "above 0: tokens of the output become less likely",
    "frequency_penalty": "above 0: tokens become less likely with each occurrence in the output",
    "seed": "the same seed gives the same tokens",
    "n": "number of completions per prompt",
    "max_tokens": "most tokens per completion",
    "min_tokens": "tokens before a completion may end",
    "logprobs": "number of alternatives to report per token (with --json)",
}


def sampling_flags() -> list[Flag]:
    """The scalar fields of SamplingParams."""
    hints = typing.get_type_hints(SamplingParams)
    defaults = SamplingParams()
    flags = []
    for name, help_text in _SAMPLING_HELP.items():
        default = getattr(defaults, name)
        item = Option.of_hint(name, hints[name], default)
        shown = help_text if default is None else f"{help_text} (default: {_default_of_model(name)}{default})"
        flags.append(Flag(name=name, option=item, help=shown))
    return flags


def _default_of_model(name: str) -> str:
    return "the model's, else " if name in SAMPLING_DEFAULTS else ""


def add_command(commands: "argparse._SubParsersAction[Any]") -> None:
    """Add `generate` to the `pd` parser."""
    summary = "complete prompts in this process, without a server"
    parser = commands.add_parser("generate", help=summary, description=f"{capitalized(summary)}.")
    parser.add_argument("prompts", nargs="*", metavar="PROMPT", help="a prompt; none: one per line of stdin")
    parser.add_argument("--json", action="store_true", help="one JSON object per prompt")
    parser.add_argument("--no-progress", dest="progress", action="store_false", help="no progress bar on stderr")
    sampling = parser.add_argument_group("sampling")
    add_flags(sampling, sampling_flags())
    sampling.add_argument("--stop", nargs="+", action="extend", metavar="TEXT", default=[], help="texts that end it")
    sampling.add_argument(
        "--stop-token-ids", nargs="+", action="extend", metavar="ID", default=[], help="ids that end it"
    )
    sampling.add_argument(
        "--allowed-token-ids", nargs="+", action="extend", metavar="ID", default=[], help="the only ids to draw from"
    )
    sampling.add_argument(
        "--bad-words",
        nargs="+",
        action="extend",
        metavar="TEXT",
        default=[],
        help="words that the output must not hold",
    )
    sampling.add_argument("--ignore-eos", action="store_true", help="continue past the end-of-sequence token")
    add_flags(parser.add_argument_group("engine"), flags_of(EngineConfig))
    parser.set_defaults(run=run)


def read_params(arguments: argparse.Namespace, config: EngineConfig) -> SamplingParams:
    """The sampling parameters that the flags ask for, else the model's. Raises ConfigError or InvalidRequest."""
    values = collect(sampling_flags(), vars(arguments), environment={})
    values |= {
        "stop": tuple(arguments.stop),
        "stop_token_ids": _whole_numbers("--stop-token-ids", arguments.stop_token_ids),
        "allowed_token_ids": _whole_numbers("--allowed-token-ids", arguments.allowed_token_ids) or None,
        "bad_words": tuple(arguments.bad_words),
        "ignore_eos": arguments.ignore_eos,
    }
    params = SamplingParams(**{**read_sampling_defaults(config.model, config.generation_config), **values})
    params.validate()
    return params


def _whole_numbers(flag: str, texts: Sequence[str]) -> tuple[int, ...]:
    try:
        return tuple(map(int, texts))
    except ValueError:
        raise ConfigError(f"{flag}: whole numbers were expected, got {texts!r}") from None


def run(arguments: argparse.Namespace) -> int:
    """Run `pd generate`."""
    from pdkv.cli.launch import launch_variables

    values = collect(flags_of(EngineConfig), vars(arguments), known_variables=launch_variables())
    config = with_local_model(build(EngineConfig, values))
    params = read_params(arguments, config)
    prompts = arguments.prompts or [line.rstrip("\n") for line in sys.stdin]
    if not prompts:
        raise ConfigError("a prompt was expected, as an argument or on stdin")
    from pdkv.offline.llm import LLM

    with LLM.from_config(config) as llm:
        outputs = llm.generate(prompts, params, progress=arguments.progress and sys.stderr.isatty())
    for output in outputs:
        if arguments.json:
            print(json.dumps(output.to_dict(), ensure_ascii=False))
        else:
            for choice in output.outputs:
                print(choice.text)
    return 0
