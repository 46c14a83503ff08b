"""Conversations, one and several, with the model's chat template."""

from script_answers import CODES, MODEL, chat_ids, greedy_text

from pdkv import LLM, SamplingParams

conversation = [
    {"role": "system", "content": CODES},
    {"role": "user", "content": "What is fox?"},
    {"role": "assistant", "content": "4821"},
    {"role": "user", "content": "What is hat?"},
]


def print_outputs(outputs):
    for output in outputs:
        print(f"Prompt: {output.prompt!r}\nGenerated text: {output.outputs[0].text!r}")
    print("-" * 80)


def main():
    sampling_params = SamplingParams(max_tokens=5, temperature=0.0)
    llm = LLM(model=MODEL)
    one = llm.chat(conversation, sampling_params, use_tqdm=False)
    print_outputs(one)
    several = llm.chat([conversation for _ in range(10)], sampling_params, use_tqdm=True)
    print_outputs(several)
    assert one[0].prompt == llm.get_tokenizer().apply_chat_template(
        conversation, tokenize=False, add_generation_prompt=True
    )
    return [*one, *several]


if __name__ == "__main__":
    expected = greedy_text(chat_ids(conversation), 5)
    assert [output.outputs[0].text for output in main()] == [expected] * 11
