"""The engine of an LLM is driven beside the LLM's own calls."""

from script_answers import MODEL, QUESTIONS, greedy_text

from pdkv import LLM, SamplingParams

if __name__ == "__main__":
    llm = LLM(model=MODEL)
    sampling_params = SamplingParams(temperature=0.0, max_tokens=6)
    llm.llm_engine.add_request(request_id="0", prompt=QUESTIONS[0], params=sampling_params)
    [whole] = llm.generate(QUESTIONS[1], sampling_params)
    outputs = []
    while llm.llm_engine.has_unfinished_requests():
        outputs += [output for output in llm.llm_engine.step() if output.finished]
    assert [output.outputs[0].text for output in outputs] == [greedy_text(QUESTIONS[0], 6)]
    assert whole.outputs[0].text == greedy_text(QUESTIONS[1], 6)
