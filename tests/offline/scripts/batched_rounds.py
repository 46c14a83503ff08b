"""Rounds of a conversation for many users at once."""

from script_answers import CODES, MODEL, chat_ids, greedy_text

from pdkv import LLM, SamplingParams

if __name__ == "__main__":
    llm = LLM(model=MODEL, max_num_seqs=16)
    sampling_params = SamplingParams(temperature=0.0, max_tokens=5)
    conversations = [[{"role": "system", "content": CODES}] for _ in range(4)]
    for word in ("fox", "pin"):
        for conversation in conversations:
            conversation.append({"role": "user", "content": f"What is {word}?"})
        expected = [greedy_text(chat_ids(conversation), 5) for conversation in conversations]
        outputs = llm.chat(conversations, sampling_params=sampling_params, use_tqdm=False)
        assert [output.outputs[0].text for output in outputs] == expected
        for conversation, output in zip(conversations, outputs, strict=True):
            conversation.append({"role": "assistant", "content": output.outputs[0].text})
