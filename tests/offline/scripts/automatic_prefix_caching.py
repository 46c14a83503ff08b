"""The second question about a long text finds what the first one computed."""

import time

from script_answers import CODES, MODEL, greedy_text

from pdkv import LLM, SamplingParams

LONG_PROMPT = CODES * 6


def get_generation_time(llm, sampling_params, prompts):
    start_time = time.time()
    output = llm.generate(prompts, sampling_params=sampling_params)
    print(f"Output: {output[0].outputs[0].text}\nGeneration time: {time.time() - start_time} seconds.")
    return output[0]


if __name__ == "__main__":
    llm = LLM(model=MODEL, enable_prefix_caching=True)
    sampling_params = SamplingParams(temperature=0, max_tokens=5)
    first = get_generation_time(llm, sampling_params, LONG_PROMPT + "fox=")
    second = get_generation_time(llm, sampling_params, LONG_PROMPT + "hat=")
    assert first.num_cached_tokens == 0
    assert second.num_cached_tokens >= 64
    for output in (first, second):
        assert output.outputs[0].text == greedy_text(output.prompt, 5)
