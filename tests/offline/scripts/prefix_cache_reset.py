"""The cache is emptied between two rounds, and kept apart by salts."""

from script_answers import CODES, MODEL, greedy_text

from pdkv import LLM, SamplingParams

if __name__ == "__main__":
    llm = LLM(model=MODEL)
    sampling_params = SamplingParams(temperature=0.0, max_tokens=5)
    prompt = CODES * 3 + "hat="

    def cached(given) -> int:
        [output] = llm.generate(given, sampling_params)
        assert output.outputs[0].text == greedy_text(prompt, 5)
        return output.num_cached_tokens

    assert (cached(prompt), cached(prompt) > 0) == (0, True)
    assert llm.reset_prefix_cache()
    assert (cached(prompt), cached(prompt) > 0) == (0, True)
    salted = {"prompt": prompt, "cache_salt": "of another user"}
    assert (cached(salted), cached(salted) > 0) == (0, True)
    assert (
        llm.generate(prompt, SamplingParams(temperature=0.0, skip_reading_prefix_cache=True))[0].num_cached_tokens == 0
    )
