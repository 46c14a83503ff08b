"""The same prompts with and without prefix caching."""

from script_answers import CODES, MODEL, QUESTIONS, greedy_text

from pdkv import LLM, SamplingParams

generating_prompts = [CODES * 4 + question for question in QUESTIONS]
sampling_params = SamplingParams(temperature=0.0, max_tokens=6)


def main():
    regular_llm = LLM(model=MODEL, enable_prefix_caching=False)
    regular = [regular_llm.generate(prompt, sampling_params)[0] for prompt in generating_prompts]
    del regular_llm
    prefix_cached_llm = LLM(model=MODEL, enable_prefix_caching=True)
    prefix_cached_llm.generate(generating_prompts[0], sampling_params)
    return regular, prefix_cached_llm.generate(generating_prompts, sampling_params)


if __name__ == "__main__":
    regular, cached = main()
    texts = [output.outputs[0].text for output in cached]
    assert [output.outputs[0].text for output in regular] == texts
    assert texts == [greedy_text(prompt, 6) for prompt in generating_prompts]
    assert [output.num_cached_tokens for output in regular] == [0, 0, 0]
    assert all(output.num_cached_tokens > 0 for output in cached)
