"""Texts that end an answer, without and within it."""

from script_answers import MODEL, QUESTIONS, greedy_text

from pdkv import LLM, SamplingParams

if __name__ == "__main__":
    llm = LLM(model=MODEL)
    whole = greedy_text(QUESTIONS[0], 6)
    stop, before = whole[2], whole[: whole.index(whole[2])]
    for include, text in ((False, before), (True, before + stop)):
        for given in (stop, [stop, "\n\n"]):
            sampling_params = SamplingParams(temperature=0.0, stop=given, include_stop_str_in_output=include)
            completion = llm.generate(QUESTIONS[0], sampling_params)[0].outputs[0]
            assert (completion.text, completion.finish_reason, completion.stop_reason) == (text, "stop", stop)
