"""Log probabilities of the output, by token id."""

from script_answers import MODEL, QUESTIONS, logprob_rows

from pdkv import LLM, SamplingParams

if __name__ == "__main__":
    llm = LLM(model=MODEL)
    sampling_params = SamplingParams(temperature=0.0, max_tokens=4, logprobs=3, ignore_eos=True)
    for output in llm.generate(QUESTIONS, sampling_params):
        completion = output.outputs[0]
        rows = logprob_rows(output.prompt_token_ids + completion.token_ids)[len(output.prompt_token_ids) - 1 :]
        total = 0.0
        for row, token_id, position in zip(rows, completion.token_ids, completion.logprobs):
            for alternative, logprob in position.items():
                print(f"{logprob.decoded_token!r} (rank {logprob.rank}): {logprob.logprob:.3f}")
                assert abs(logprob.logprob - float(row[alternative])) < 1e-3
                assert int((row > row[alternative]).sum()) + 1 == logprob.rank
            assert len(position) == 3
            assert max(position, key=lambda t: position[t].logprob) == token_id
            total += position[token_id].logprob
        assert "".join(p[t].decoded_token for p, t in zip(completion.logprobs, completion.token_ids)) == completion.text
        assert abs(completion.cumulative_logprob - total) < 1e-6
