"""Tokens a second of random prompts of some length."""

import random
import time

from script_answers import MODEL, greedy_ids

from pdkv import LLM, SamplingParams, TokensPrompt


def run(requests: list[list[int]], output_len: int):
    llm = LLM(model=MODEL, max_num_seqs=8, enable_prefix_caching=False, disable_log_stats=True)
    prompts = [TokensPrompt(prompt_token_ids=ids) for ids in requests]
    sampling_params = [
        SamplingParams(n=1, temperature=0.0, ignore_eos=True, max_tokens=output_len, detokenize=False) for _ in prompts
    ]
    start = time.perf_counter()
    outputs = llm.generate(prompts, sampling_params, use_tqdm=True)
    return outputs, time.perf_counter() - start


if __name__ == "__main__":
    random.seed(0)
    requests = [[random.randrange(20, 60) for _ in range(24)] for _ in range(12)]
    outputs, elapsed_time = run(requests, 3)
    total_num_tokens = sum(len(o.prompt_token_ids) + len(o.outputs[0].token_ids) for o in outputs)
    print(f"Throughput: {len(requests) / elapsed_time:.2f} requests/s, {total_num_tokens / elapsed_time:.2f} tokens/s")
    assert total_num_tokens == 12 * (24 + 3)
    assert {output.outputs[0].text for output in outputs} == {""}
    assert outputs[0].outputs[0].token_ids[0] == greedy_ids(requests[0], 1)[0]
