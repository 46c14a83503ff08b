"""Special tokens in texts, and prompts that are cut."""

from script_answers import CODES, MODEL, QUESTIONS, greedy_ids, ids_of, tokenizer

from pdkv import LLM, SamplingParams

if __name__ == "__main__":
    llm = LLM(model=MODEL)
    shown = SamplingParams(
        temperature=0.0, skip_special_tokens=False, spaces_between_special_tokens=False, include_stop_str_in_output=True
    )
    completion = llm.generate(QUESTIONS[0], shown)[0].outputs[0]
    assert completion.text == tokenizer().decode(greedy_ids(QUESTIONS[0], 16))
    assert completion.text.endswith(tokenizer().eos_token)
    short = ids_of(QUESTIONS[1])
    cut = SamplingParams(temperature=0.0, max_tokens=5, truncate_prompt_tokens=len(short) - 1)
    [output] = llm.generate(CODES + QUESTIONS[1], cut)
    assert output.prompt_token_ids == short[1:]
    assert output.outputs[0].token_ids == greedy_ids(short[1:], 5)
