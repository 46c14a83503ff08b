"""Options of an engine and of sampling from a command line."""

from script_answers import MODEL, QUESTIONS, greedy_text

from pdkv import LLM, EngineArgs, FlexibleArgumentParser


def create_parser():
    parser = FlexibleArgumentParser()
    EngineArgs.add_cli_args(parser)
    parser.set_defaults(model=MODEL)
    sampling_group = parser.add_argument_group("Sampling parameters")
    sampling_group.add_argument("--max-tokens", type=int)
    sampling_group.add_argument("--temperature", type=float)
    return parser


def main(args: dict):
    max_tokens = args.pop("max_tokens")
    temperature = args.pop("temperature")
    llm = LLM(**args)
    assert llm.config.max_model_len == 128
    sampling_params = llm.get_default_sampling_params()
    if max_tokens is not None:
        sampling_params.max_tokens = max_tokens
    if temperature is not None:
        sampling_params.temperature = temperature
    return llm.generate(QUESTIONS, sampling_params)


if __name__ == "__main__":
    parser = create_parser()
    args: dict = vars(parser.parse_args(["--max-model-len", "128", "--temperature", "0", "--max-tokens", "4"]))
    for output in main(args):
        assert output.outputs[0].text == greedy_text(output.prompt, 4)
