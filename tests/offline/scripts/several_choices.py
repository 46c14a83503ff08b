"""Several choices of each prompt, the same ones by the same seed."""

from script_answers import MODEL, QUESTIONS

from pdkv import LLM, SamplingParams

if __name__ == "__main__":
    llm = LLM(model=MODEL)
    sampling_params = SamplingParams(n=4, best_of=4, temperature=9.0, top_k=50, seed=42, max_tokens=8, logprobs=0)
    once, again = (llm.generate(QUESTIONS, sampling_params) for _ in range(2))
    for first, second in zip(once, again, strict=True):
        assert [choice.index for choice in first.outputs] == [0, 1, 2, 3]
        assert [choice.text for choice in first.outputs] == [choice.text for choice in second.outputs]
        best = max(first.outputs, key=lambda choice: choice.cumulative_logprob)
        print(best.text)
    assert len({choice.text for output in once for choice in output.outputs}) > 6
