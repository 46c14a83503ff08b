"""A text's perplexity by the log probabilities of its tokens as a prompt."""

import math

from script_answers import CODES, MODEL, logprob_rows

from pdkv import LLM, SamplingParams


def perplexity(llm: LLM, text: str) -> float:
    sampling_params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    [output] = llm.generate([text], sampling_params, use_tqdm=False)
    logprobs = [
        logprob[token_id].logprob
        for token_id, logprob in zip(output.prompt_token_ids, output.prompt_logprobs)
        if logprob is not None
    ]
    ids = output.prompt_token_ids
    assert output.prompt_logprobs[0] is None
    expected = logprob_rows(ids)[:-1].gather(1, __import__("torch").tensor(ids[1:])[:, None])[:, 0]
    assert max(abs(a - float(b)) for a, b in zip(logprobs, expected, strict=True)) < 1e-3
    return math.exp(-sum(logprobs) / len(logprobs))


if __name__ == "__main__":
    llm = LLM(model=MODEL)
    known, unknown = perplexity(llm, f"{CODES}fox=4821"), perplexity(llm, f"{CODES}fox=1111")
    print(known, unknown)
    assert known < unknown
