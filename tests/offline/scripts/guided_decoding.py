"""The same by the older name."""

from script_answers import MODEL, QUESTIONS, greedy_text

from pdkv import LLM, GuidedDecodingParams, SamplingParams

if __name__ == "__main__":
    llm = LLM(model=MODEL)
    guided_decoding_params = GuidedDecodingParams(choice=["4821", "0937"])
    sampling_params = SamplingParams(temperature=0.0, guided_decoding=guided_decoding_params)
    outputs = llm.generate(prompts=QUESTIONS[:2], sampling_params=sampling_params)
    assert [output.outputs[0].text for output in outputs] == [greedy_text(question, 16) for question in QUESTIONS[:2]]
    forced = SamplingParams(
        temperature=0.0, guided_decoding=GuidedDecodingParams(regex="9[0-9]{2}", backend="guidance")
    )
    text = llm.generate(QUESTIONS[0], forced)[0].outputs[0].text
    assert len(text) == 3
    assert text[0] == "9"
