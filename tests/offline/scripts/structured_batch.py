"""Answers with and without a shape in one batch."""

from script_answers import MODEL, QUESTIONS, greedy_text

from pdkv import LLM, SamplingParams, StructuredOutputsParams

if __name__ == "__main__":
    llm = LLM(model=MODEL)
    shapes = [None, StructuredOutputsParams(regex="[a-f]{3}"), StructuredOutputsParams(choice=["yes", "no"])]
    params = [SamplingParams(temperature=0.0, max_tokens=8, structured_outputs=shape) for shape in shapes]
    free, letters, word = [output.outputs[0].text for output in llm.generate(QUESTIONS, params)]
    assert free == greedy_text(QUESTIONS[0], 8)
    assert len(letters) == 3
    assert set(letters) <= set("abcdef")
    assert word in ("yes", "no")
