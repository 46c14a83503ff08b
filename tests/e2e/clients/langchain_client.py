"""LangChain's OpenAI models: chat, text and responses, streamed and not, with a tool and a schema."""

import sys
from functools import reduce
from operator import add

from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel

MODEL, ASKED, NUMBER = "pdkv-default", "Codes: fox=4821, hat=0937. What is hat?", "0937"
at = {"model": MODEL, "base_url": sys.argv[1], "api_key": "x", "temperature": 0}


class Code(BaseModel):
    """A code."""

    code: str


@tool
def get_code(word: str) -> str:
    """The code of a word."""
    return "4821"


text, prompt = OpenAI(max_tokens=8, **at), "Codes: fox=4821, hat=0937. hat="
assert text.invoke(prompt) == NUMBER
assert "".join(text.stream(prompt)) == NUMBER
several = OpenAI(max_tokens=8, n=2, best_of=2, **at).generate([prompt])
assert [each.text for each in several.generations[0]] == [NUMBER] * 2

for chat in (ChatOpenAI(stream_usage=True, **at), ChatOpenAI(use_responses_api=True, **at)):
    history = [SystemMessage("Be brief."), HumanMessage(ASKED)]
    assert chat.invoke(ASKED).text == NUMBER
    assert "".join(chunk.text for chunk in chat.stream(ASKED)) == NUMBER
    assert chat.invoke([HumanMessage(ASKED), chat.invoke(ASKED), HumanMessage(ASKED)]).text == NUMBER
    assert NUMBER in chat.invoke(history).text
    assert chat.with_structured_output(Code).invoke(ASKED).code == NUMBER
    assert list(chat.with_structured_output(Code).stream(ASKED))[-1].code == NUMBER
    bound, fox = chat.bind_tools([get_code]), HumanMessage("What is fox?")
    for called in (bound.invoke([fox]), reduce(add, bound.stream([fox]))):
        [call] = called.tool_calls
        assert (call["name"], call["args"]) == ("get_code", {"word": "fox"}), called
        result = get_code.invoke(call)
        assert isinstance(result, ToolMessage)
        assert bound.invoke([fox, called, result]).text == "4821"
    written = AIMessage("", tool_calls=[{"name": "get_code", "args": {"word": "fox"}, "id": "c"}])
    assert bound.invoke([fox, written, ToolMessage("4821", tool_call_id="c")]).text == "4821"

hints = ChatOpenAI(use_responses_api=True, verbosity="low", reasoning={"summary": "auto"}, **at)
assert hints.invoke(ASKED).text == NUMBER
assert ChatOpenAI(n=2, seed=3, logprobs=True, top_logprobs=2, max_tokens=8, **at).invoke(ASKED).text == NUMBER
