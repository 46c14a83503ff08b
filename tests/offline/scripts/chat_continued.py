"""A final message that the model goes on with, and variables of the template."""

from script_answers import CODES, MODEL, greedy_text, tokenizer

from pdkv import LLM, SamplingParams

if __name__ == "__main__":
    messages = [{"role": "user", "content": f"{CODES}What is fox?"}, {"role": "assistant", "content": "48"}]
    [output] = LLM(model=MODEL).chat(
        messages,
        sampling_params=SamplingParams(temperature=0.0, max_tokens=4),
        add_generation_prompt=False,
        continue_final_message=True,
        chat_template_kwargs={"enable_thinking": False},
    )
    prompt = tokenizer().apply_chat_template(messages, continue_final_message=True, tokenize=False)
    token_ids = tokenizer().encode(prompt, add_special_tokens=False)
    assert output.prompt_token_ids == token_ids
    assert output.outputs[0].text == greedy_text(token_ids, 4)
