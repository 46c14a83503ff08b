"""Requests at the same time, each with its last output."""

import asyncio

from script_answers import MODEL, QUESTIONS, greedy_text

from pdkv import AsyncEngineArgs, AsyncLLMEngine, SamplingParams


async def generate(engine: AsyncLLMEngine, prompt: str, request_id: str):
    final_output = None
    async for request_output in engine.generate(prompt, SamplingParams(temperature=0.0, max_tokens=8), request_id):
        final_output = request_output
    return final_output


async def main():
    engine = AsyncLLMEngine.from_engine_args(AsyncEngineArgs(model=MODEL, disable_log_stats=True))
    outputs = await asyncio.gather(*(generate(engine, prompt, str(i)) for i, prompt in enumerate(QUESTIONS)))
    for prompt, output in zip(QUESTIONS, outputs, strict=True):
        assert output.finished
        assert output.outputs[0].text == greedy_text(prompt, 8)
    engine.shutdown()


if __name__ == "__main__":
    asyncio.run(main())
