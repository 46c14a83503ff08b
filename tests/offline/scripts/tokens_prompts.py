"""Prompts as token ids."""

from script_answers import MODEL, QUESTIONS, greedy_ids, ids_of

from pdkv import LLM, SamplingParams, TokensPrompt

if __name__ == "__main__":
    llm = LLM(model=MODEL, max_model_len=256)
    prompts = [TokensPrompt(prompt_token_ids=ids_of(question)) for question in QUESTIONS]
    outputs = llm.generate(prompts, SamplingParams(max_tokens=5, temperature=0))
    assert [output.prompt_token_ids for output in outputs] == [prompt["prompt_token_ids"] for prompt in prompts]
    assert [output.outputs[0].token_ids for output in outputs] == [greedy_ids(q, 5) for q in QUESTIONS]
