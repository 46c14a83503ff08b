"""`pd generate`: runs prompts from the command line or stdin through one engine in this process."""

import argparse
import json
import sys
from typing import Any

from pdkv.base.options import options_of
from pdkv.cli.options import Flags, add_flags, add_vllm_flags, build, collect, flags_of, new_command
from pdkv.config import EngineConfig
from pdkv.errors import ConfigError
from pdkv.models.generation_config import read_sampling_defaults
from pdkv.models.hub import with_local_model
from pdkv.sampling.params import SamplingParams


def sampling_flags() -> Flags:
    """The sampling parameters that have a help text."""
    return {name: item for name, item in options_of(SamplingParams).items() if item.help}


def add_command(commands: "argparse._SubParsersAction[Any]") -> None:
    """Add `generate` to the `pd` parser."""
    parser = new_command(commands, "generate", run, "complete prompts in this process, without a server")
    parser.add_argument(
        "prompts", nargs="*", metavar="PROMPT", help="a prompt; if absent, one is read from each line of stdin"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object per prompt")
    parser.add_argument("--no-progress", dest="progress", action="store_false", help="show no progress bar on stderr")
    add_flags(parser.add_argument_group("sampling"), sampling_flags())
    add_flags(parser.add_argument_group("engine"), flags_of(EngineConfig))
    add_vllm_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    """Run `pd generate`."""
    from pdkv.cli.launch import launch_variables

    sampling = sampling_flags()
    values = collect({**sampling, **flags_of(EngineConfig)}, vars(arguments), known_variables=launch_variables())
    config = with_local_model(build(EngineConfig, values))
    asked = {name: values[name] for name in sampling if name in values}
    params = SamplingParams(**{**read_sampling_defaults(config.model, config.generation_config), **asked}).checked()
    prompts = arguments.prompts or [line.rstrip("\n") for line in sys.stdin]
    if not prompts:
        raise ConfigError("a prompt was expected, as an argument or on stdin")
    from pdkv.offline.llm import LLM

    with LLM.from_config(config) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=arguments.progress and sys.stderr.isatty())
    for output in outputs:
        if arguments.json:
            print(json.dumps(output.to_dict(), ensure_ascii=False))
        else:
            for choice in output.outputs:
                print(choice.text)
    return 0
