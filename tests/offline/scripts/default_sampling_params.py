"""The model's own defaults, of which some are changed."""

from script_answers import MODEL, QUESTIONS, greedy_text

from pdkv import LLM


def main(max_tokens: int | None, temperature: float | None, top_p: float | None, top_k: int | None):
    llm = LLM(model=MODEL)
    sampling_params = llm.get_default_sampling_params()
    if max_tokens is not None:
        sampling_params.max_tokens = max_tokens
    if temperature is not None:
        sampling_params.temperature = temperature
    if top_p is not None:
        sampling_params.top_p = top_p
    if top_k is not None:
        sampling_params.top_k = top_k
    return llm.generate(QUESTIONS, sampling_params)


if __name__ == "__main__":
    for output in main(5, 0.0, None, -1):
        assert output.outputs[0].text == greedy_text(output.prompt, 5)
