"""OpenAI's Agents SDK: an agent that calls a tool, over chat and responses, streamed and not."""

import asyncio
import sys

from agents import Agent, ModelSettings, Runner, WebSearchTool, function_tool, set_tracing_disabled
from agents.models.openai_chatcompletions import OpenAIChatCompletionsModel
from agents.models.openai_responses import OpenAIResponsesModel
from openai import AsyncOpenAI
from pydantic import BaseModel

MODEL, ASKED, NUMBER = "pdkv-default", "Codes: fox=4821, hat=0937. What is hat?", "0937"
set_tracing_disabled(True)
asked_for: list[str] = []


class Code(BaseModel):
    code: str


@function_tool
def get_code(word: str) -> str:
    """The code of a word."""
    asked_for.append(word)
    return "4821"


async def main() -> None:
    client = AsyncOpenAI(base_url=sys.argv[1], api_key="x", max_retries=0)
    settings = ModelSettings(temperature=0, max_tokens=90, parallel_tool_calls=False)
    for kind, hosted in ((OpenAIChatCompletionsModel, []), (OpenAIResponsesModel, [WebSearchTool()])):
        model = kind(model=MODEL, openai_client=client)
        plain = Agent(name="plain", model=model, model_settings=settings)
        first = await Runner.run(plain, ASKED)
        assert first.final_output == NUMBER, first
        again = await Runner.run(plain, [*first.to_input_list(), {"role": "user", "content": ASKED}])
        assert again.final_output == NUMBER, again
        shaped = Agent(name="shaped", model=model, model_settings=settings, output_type=Code)
        assert (await Runner.run(shaped, ASKED)).final_output.code == NUMBER

        agent = Agent(name="a", model=model, tools=[get_code, *hosted], model_settings=settings)
        asked_for.clear()
        assert (await Runner.run(agent, "What is fox?")).final_output == "4821"
        streamed = Runner.run_streamed(agent, "What is fox?")
        kinds = {event.type async for event in streamed.stream_events()}
        assert streamed.final_output == "4821", streamed
        assert {"raw_response_event", "run_item_stream_event"} <= kinds
        assert asked_for == ["fox", "fox"]


asyncio.run(main())
