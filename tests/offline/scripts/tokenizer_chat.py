"""The tokenizer makes the prompts, and the LLM completes them."""

from script_answers import CODES, MODEL, chat_ids, greedy_text
from script_answers import tokenizer as of_transformers

from pdkv import LLM, SamplingParams

if __name__ == "__main__":
    llm = LLM(model=MODEL)
    tokenizer = llm.get_tokenizer()
    messages = [{"role": "user", "content": f"{CODES}What is pin?"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert ids == chat_ids(messages) == tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    [output] = llm.generate({"prompt_token_ids": ids}, SamplingParams(temperature=0.0, max_tokens=6))
    assert tokenizer.decode(output.outputs[0].token_ids, skip_special_tokens=True) == greedy_text(ids, 6)
    theirs = of_transformers()
    assert tokenizer.decode(ids) == theirs.decode(ids)
    assert tokenizer(["fox", CODES])["input_ids"] == theirs(["fox", CODES])["input_ids"]
    for name in ("eos_token", "eos_token_id", "bos_token_id", "pad_token_id", "vocab_size", "chat_template"):
        assert getattr(tokenizer, name) == getattr(theirs, name), name
    assert tokenizer.convert_ids_to_tokens(ids) == theirs.convert_ids_to_tokens(ids)
    assert tokenizer.get_vocab() == theirs.get_vocab()
    assert len(tokenizer) == len(theirs)
