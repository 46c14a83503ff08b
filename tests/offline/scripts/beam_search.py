"""The likeliest sequences of some length."""

from script_answers import MODEL, QUESTIONS, beams, ids_of, tokenizer

from pdkv import LLM, BeamSearchParams

if __name__ == "__main__":
    llm = LLM(model=MODEL)
    prompts = [{"prompt": question} for question in QUESTIONS[:2]]
    params = BeamSearchParams(beam_width=3, max_tokens=4, ignore_eos=True)
    for prompt, output in zip(prompts, llm.beam_search(prompts, params), strict=True):
        ids = ids_of(prompt["prompt"])
        found = [sequence.tokens[len(ids) :] for sequence in output.sequences]
        assert found == beams(prompt["prompt"], 3, 4)
        for sequence in output.sequences:
            print(sequence.text, sequence.cum_logprob)
            assert sequence.text == tokenizer().decode(sequence.tokens)
            assert len(sequence.logprobs) == 4
