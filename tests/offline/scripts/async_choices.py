"""Several choices as they grow, with their log probabilities."""

import asyncio

from script_answers import MODEL, QUESTIONS, greedy_ids

from pdkv import AsyncLLM, SamplingParams


async def main():
    async with AsyncLLM(model=MODEL) as engine:
        sampling_params = SamplingParams(n=3, temperature=0.0, max_tokens=6, logprobs=1)
        async for output in engine.generate(
            QUESTIONS[0], sampling_params, request_id="n", priority=0, lora_request=None
        ):
            for completion in output.outputs:
                assert len(completion.logprobs) == len(completion.token_ids)
        for completion in output.outputs:
            assert completion.token_ids == greedy_ids(QUESTIONS[0], 6)
            assert [max(entry, key=lambda i: entry[i].logprob) for entry in completion.logprobs] == completion.token_ids


if __name__ == "__main__":
    asyncio.run(main())
