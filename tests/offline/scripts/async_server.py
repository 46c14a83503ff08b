"""A small server's handler: it streams one JSON object per output."""

import asyncio
import json

from script_answers import MODEL, QUESTIONS, greedy_text

from pdkv import AsyncEngineArgs, AsyncLLMEngine, SamplingParams


async def handle(engine: AsyncLLMEngine, request: dict, request_id: str):
    prompt = request.pop("prompt")
    sampling_params = SamplingParams(**request)
    async for request_output in engine.generate(prompt, sampling_params, request_id):
        text_outputs = [request_output.prompt + output.text for output in request_output.outputs]
        yield (json.dumps({"text": text_outputs}) + "\n").encode("utf-8")


async def main():
    engine = AsyncLLMEngine.from_engine_args(AsyncEngineArgs(model=MODEL))
    request = {"prompt": QUESTIONS[0], "temperature": 0.0, "max_tokens": 6, "n": 2, "stop": None}
    lines = [line async for line in handle(engine, request, "a")]
    assert json.loads(lines[-1]) == {"text": [QUESTIONS[0] + greedy_text(QUESTIONS[0], 6)] * 2}
    engine.shutdown()


if __name__ == "__main__":
    asyncio.run(main())
