"""The same by keywords, without a progress bar."""

from script_answers import MODEL, QUESTIONS, greedy_ids

from pdkv import LLM, RequestOutput, SamplingParams


def run(llm: LLM, prompts: list[str]) -> list[RequestOutput]:
    return llm.generate(
        prompts=prompts,
        sampling_params=SamplingParams(n=1, temperature=0, max_tokens=6),
        use_tqdm=False,
        lora_request=None,
        priority=None,
    )


if __name__ == "__main__":
    for request in run(LLM(MODEL), QUESTIONS):
        [completion] = request.outputs
        assert isinstance(request, RequestOutput)
        assert completion.token_ids == greedy_ids(request.prompt_token_ids, 6)
        assert completion.finished()
        assert request.lora_request is None
