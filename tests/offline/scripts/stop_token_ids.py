"""Token ids that end an answer, and the end of sequence."""

from script_answers import MODEL, QUESTIONS, greedy_ids, greedy_text, tokenizer

from pdkv import LLM, SamplingParams

if __name__ == "__main__":
    llm = LLM(model=MODEL)
    ids = greedy_ids(QUESTIONS[0], 6)
    third = ids[2]
    for include in (False, True):
        sampling_params = SamplingParams(temperature=0.0, stop_token_ids=[third], include_stop_str_in_output=include)
        completion = llm.generate(QUESTIONS[0], sampling_params)[0].outputs[0]
        assert completion.token_ids == ids[:3]
        assert completion.text == tokenizer().decode(ids[: 2 + include])
        assert (completion.finish_reason, completion.stop_reason) == ("stop", third)
    ended = llm.generate(QUESTIONS[0], SamplingParams(temperature=0.0))[0].outputs[0]
    assert (ended.text, ended.finish_reason, ended.stop_reason) == (greedy_text(QUESTIONS[0], 16), "stop", None)
