"""The tokenizer of an asynchronous engine makes the prompt."""

import asyncio

from script_answers import CODES, MODEL, chat_ids, greedy_text

from pdkv import AsyncEngineArgs, AsyncLLMEngine, SamplingParams, TokensPrompt


async def main():
    engine = AsyncLLMEngine.from_engine_args(AsyncEngineArgs(MODEL, max_model_len=256))
    tokenizer = await engine.get_tokenizer()
    messages = [{"role": "user", "content": f"{CODES}What is fox?"}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    assert ids == chat_ids(messages)
    await engine.check_health()
    prompt = TokensPrompt(prompt_token_ids=ids)
    async for output in engine.generate(prompt=prompt, sampling_params=SamplingParams(temperature=0.0), request_id="1"):
        pass
    assert output.outputs[0].text == greedy_text(ids, 16)
    await engine.reset_prefix_cache()
    engine.shutdown()


if __name__ == "__main__":
    asyncio.run(main())
