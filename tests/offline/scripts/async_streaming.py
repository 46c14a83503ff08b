"""Deltas of one request after another."""

import asyncio

from script_answers import MODEL, QUESTIONS, greedy_text

from pdkv import AsyncEngineArgs, AsyncLLM, RequestOutputKind, SamplingParams


async def stream_response(engine: AsyncLLM, prompt: str, request_id: str) -> str:
    sampling_params = SamplingParams(max_tokens=8, temperature=0.0, seed=42, output_kind=RequestOutputKind.DELTA)
    text = ""
    async for output in engine.generate(request_id=request_id, prompt=prompt, sampling_params=sampling_params):
        for completion in output.outputs:
            if completion.text:
                print(completion.text, end="", flush=True)
                text += completion.text
        if output.finished:
            break
    return text


async def main():
    engine_args = AsyncEngineArgs(model=MODEL, enforce_eager=True)
    engine = AsyncLLM.from_engine_args(engine_args)
    try:
        for i, prompt in enumerate(QUESTIONS, 1):
            assert await stream_response(engine, prompt, f"stream-example-{i}") == greedy_text(prompt, 8)
    finally:
        engine.shutdown()


if __name__ == "__main__":
    asyncio.run(main())
