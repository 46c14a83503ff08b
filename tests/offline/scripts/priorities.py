"""Urgent prompts first."""

from script_answers import MODEL, QUESTIONS, greedy_text

from pdkv import LLM, SamplingParams

if __name__ == "__main__":
    llm = LLM(model=MODEL, scheduling_policy="priority", max_num_seqs=1)
    sampling_params = SamplingParams(temperature=0.0, max_tokens=6)
    outputs = llm.generate(QUESTIONS, sampling_params, priority=[3, 2, 1])
    assert [output.outputs[0].text for output in outputs] == [greedy_text(question, 6) for question in QUESTIONS]
    begun = [output.metrics.scheduled_ts for output in outputs]
    assert begun == sorted(begun, reverse=True)
