"""A loop of the program's own around an engine: requests come while others run."""

import argparse

from script_answers import MODEL, QUESTIONS, greedy_text

from pdkv import EngineArgs, FlexibleArgumentParser, LLMEngine, RequestOutput, SamplingParams


def create_test_prompts() -> list[tuple[str, SamplingParams]]:
    return [
        (QUESTIONS[0], SamplingParams(temperature=0.0, logprobs=1, prompt_logprobs=1)),
        (QUESTIONS[1], SamplingParams(temperature=0.0, top_k=5, presence_penalty=0.0)),
        (QUESTIONS[2], SamplingParams(n=2, temperature=0.0, frequency_penalty=0.0)),
    ]


def process_requests(engine: LLMEngine, test_prompts: list[tuple[str, SamplingParams]]) -> dict[str, RequestOutput]:
    request_id = 0
    finished = {}
    while test_prompts or engine.has_unfinished_requests():
        if test_prompts:
            prompt, sampling_params = test_prompts.pop(0)
            engine.add_request(str(request_id), prompt, sampling_params)
            request_id += 1
        request_outputs: list[RequestOutput] = engine.step()
        for request_output in request_outputs:
            if request_output.finished:
                finished[request_output.request_id] = request_output
    return finished


def initialize_engine(args: argparse.Namespace) -> LLMEngine:
    engine_args = EngineArgs.from_cli_args(args)
    return LLMEngine.from_engine_args(engine_args)


if __name__ == "__main__":
    parser = FlexibleArgumentParser(description="Demo on using the LLMEngine class directly")
    parser = EngineArgs.add_cli_args(parser)
    args = parser.parse_args(["--model", MODEL, "--max-num-seqs", "2", "--enforce-eager", "--no-enable-prefix-caching"])
    finished = process_requests(initialize_engine(args), create_test_prompts())
    assert sorted(finished) == ["0", "1", "2"]
    for request_output in finished.values():
        for completion in request_output.outputs:
            assert completion.text == greedy_text(request_output.prompt, 16)
    assert len(finished["0"].prompt_logprobs) == len(finished["0"].prompt_token_ids)
    assert len(finished["2"].outputs) == 2
