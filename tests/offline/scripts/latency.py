"""How long requests took, by the points in time of each."""

import time

from script_answers import MODEL, QUESTIONS, greedy_text

from pdkv import LLM, SamplingParams

if __name__ == "__main__":
    llm = LLM(model=MODEL)
    sampling_params = SamplingParams(n=1, temperature=0.0, top_p=1.0, ignore_eos=True, max_tokens=4, detokenize=True)
    began = time.time()
    for output in llm.generate(QUESTIONS, sampling_params=sampling_params, use_tqdm=False):
        metrics = output.metrics
        assert began <= metrics.arrival_time <= time.time()
        assert metrics.queued_ts <= metrics.scheduled_ts <= metrics.first_token_ts <= metrics.last_token_ts
        assert metrics.first_token_latency == metrics.first_token_ts - metrics.queued_ts
        assert metrics.num_generation_tokens == 4
        assert output.outputs[0].text == greedy_text(output.prompt, 4)
