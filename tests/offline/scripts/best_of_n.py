"""Copies of parameters, changed per prompt; the most likely of several answers."""

from script_answers import MODEL, QUESTIONS, greedy_text

from pdkv import LLM, SamplingParams

if __name__ == "__main__":
    llm = LLM(model=MODEL)
    base = SamplingParams.from_optional(temperature=0.0, max_tokens=3, top_k=None, stop=None, logit_bias=None, n=None)
    params = [base.clone() for _ in QUESTIONS]
    params[1].max_tokens = 1
    assert base.max_tokens == 3
    outputs = llm.generate(QUESTIONS, params)
    assert [output.outputs[0].text for output in outputs] == [
        greedy_text(question, count) for question, count in zip(QUESTIONS, (3, 1, 3), strict=True)
    ]
    assert [output.outputs[0].finish_reason for output in outputs] == ["length"] * 3
