"""An answer with a shape, as it grows."""

import asyncio

from script_answers import MODEL, QUESTIONS

from pdkv import AsyncEngineArgs, AsyncLLM, RequestOutputKind, SamplingParams, StructuredOutputsParams


async def main():
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(model=MODEL))
    sampling_params = SamplingParams(
        max_tokens=30,
        output_kind=RequestOutputKind.DELTA,
        structured_outputs=StructuredOutputsParams(
            json='{"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 2}'
        ),
    )
    text = ""
    async for output in engine.generate(QUESTIONS[0], sampling_params, request_id="shape"):
        text += output.outputs[0].text
    values = __import__("json").loads(text)
    assert [type(value) for value in values] == [bool, bool]
    engine.shutdown()


if __name__ == "__main__":
    asyncio.run(main())
