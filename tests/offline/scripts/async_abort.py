"""A request is aborted, another one cancelled, and the engine goes on."""

import asyncio

from script_answers import MODEL, QUESTIONS, greedy_text

from pdkv import AsyncEngineArgs, AsyncLLM, RequestOutputKind, SamplingParams


async def main():
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(model=MODEL))
    endless = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True)
    reasons = []
    async for output in engine.generate(QUESTIONS[0], endless, request_id="aborted"):
        reasons.append(output.outputs[0].finish_reason)
        if len(reasons) == 3:
            await engine.abort("aborted")
    assert reasons[-1] == "abort"

    async def watch(begun: asyncio.Event):
        async for _ in engine.generate(QUESTIONS[1], endless, request_id="cancelled"):
            begun.set()

    begun = asyncio.Event()
    task = asyncio.create_task(watch(begun))
    await begun.wait()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    last = SamplingParams(temperature=0.0, max_tokens=8, output_kind=RequestOutputKind.FINAL_ONLY)
    [output] = [output async for output in engine.generate(QUESTIONS[2], last, request_id="cancelled")]
    assert output.outputs[0].text == greedy_text(QUESTIONS[2], 8)
    engine.shutdown()


if __name__ == "__main__":
    asyncio.run(main())
