"""Token ids by the older keyword."""

from script_answers import MODEL, QUESTIONS, greedy_text, ids_of

from pdkv import LLM, SamplingParams

if __name__ == "__main__":
    llm = LLM(model=MODEL)
    prompt_token_ids = [ids_of(question) for question in QUESTIONS]
    outputs = llm.generate(
        prompt_token_ids=prompt_token_ids, sampling_params=SamplingParams(temperature=0.0), use_tqdm=False
    )
    assert [output.outputs[0].text for output in outputs] == [greedy_text(question, 16) for question in QUESTIONS]
