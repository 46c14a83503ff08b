"""Answers to three questions at once, as they come, beside a request without end whose task is cancelled.

python examples/async_llm/run.py
"""

import asyncio
import contextlib

from pdkv import AsyncLLM, RequestOutputKind, SamplingParams

CODES = "Codes: fox=4821, hat=0937, bell=6245. "


async def ask(llm: AsyncLLM, name: str) -> None:
    params = SamplingParams(temperature=0, max_tokens=8, output_kind=RequestOutputKind.DELTA)
    text = ""
    async for output in llm.generate(f"{CODES}{name}=", params):
        text += output.outputs[0].text
        print(f"{name}: {text}")


async def go_on(llm: AsyncLLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    async for _ in llm.generate(CODES, params, request_id="endless"):
        pass


async def main() -> None:
    async with AsyncLLM() as llm:
        endless = asyncio.create_task(go_on(llm))
        await asyncio.gather(*[ask(llm, name) for name in ("fox", "hat", "bell")])
        endless.cancel()  # the engine gives its KV blocks back
        with contextlib.suppress(asyncio.CancelledError):
            await endless


if __name__ == "__main__":
    asyncio.run(main())
