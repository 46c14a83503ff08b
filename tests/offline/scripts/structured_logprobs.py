"""Which of two labels is likelier, and how much."""

from script_answers import MODEL, QUESTIONS

from pdkv import LLM, SamplingParams, StructuredOutputsParams

if __name__ == "__main__":
    llm = LLM(model=MODEL)
    labels = StructuredOutputsParams(choice=["4", "0"])
    sampling_params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=5, structured_outputs=labels)
    for output, label in zip(llm.generate(QUESTIONS[:2], sampling_params), "40", strict=True):
        completion = output.outputs[0]
        assert completion.text == label
        by_text = {entry.decoded_token: entry.logprob for entry in completion.logprobs[0].values()}
        assert max(by_text, key=by_text.get) == label
