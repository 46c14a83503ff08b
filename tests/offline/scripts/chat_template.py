"""A chat template of the program's own."""

from script_answers import MODEL, QUESTIONS, greedy_text, ids_of

from pdkv import LLM, SamplingParams

CHAT_TEMPLATE = "{{ bos_token }}{% for message in messages %}{{ message['content'] }}{% endfor %}"

if __name__ == "__main__":
    llm = LLM(model=MODEL)
    conversations = [[{"role": "user", "content": question}] for question in QUESTIONS]
    outputs = llm.chat(
        conversations,
        SamplingParams(temperature=0.0, max_tokens=6),
        use_tqdm=False,
        chat_template=CHAT_TEMPLATE,
        chat_template_content_format="auto",
    )
    for question, output in zip(QUESTIONS, outputs, strict=True):
        assert output.prompt_token_ids == ids_of(question)
        assert output.outputs[0].text == greedy_text(question, 6)
