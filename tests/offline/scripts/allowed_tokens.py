"""What may come and what may not."""

from script_answers import MODEL, QUESTIONS, greedy_ids

from pdkv import LLM, SamplingParams

if __name__ == "__main__":
    llm = LLM(model=MODEL)
    tokenizer = llm.get_tokenizer()
    digits = [tokenizer.convert_tokens_to_ids(digit) for digit in "0123456789"]
    first = greedy_ids(QUESTIONS[0], 1)[0]
    sampling_params = SamplingParams(temperature=1.0, seed=1, max_tokens=12, allowed_token_ids=digits)
    assert llm.generate(QUESTIONS[0], sampling_params)[0].outputs[0].text.isdigit()
    for banned in (
        SamplingParams(temperature=0.0, max_tokens=1, logit_bias={first: -100.0}),
        SamplingParams(temperature=0.0, max_tokens=1, bad_words=[tokenizer.decode(first)]),
    ):
        assert llm.generate(QUESTIONS[0], banned)[0].outputs[0].token_ids[0] != first
    again = SamplingParams(temperature=0.0, max_tokens=20, min_tokens=20, repetition_penalty=1.3)
    assert len(llm.generate(QUESTIONS[0], again)[0].outputs[0].token_ids) == 20
