"""Requests as other people's clients send them: recorded from a server's side, or made by the clients' own code.

litellm, langchain-openai, guidellm 0.8 and `vllm bench serve` of vLLM 0.32: recorded. aiperf 0.13 and lm-eval 0.4: what
their request builders make (aiperf/endpoints/openai_chat.py and openai_completions.py,
lm_eval/models/openai_completions.py). Texts are shortened.
"""

from typing import Any

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"

_HI = [{"role": "user", "content": "hi"}]
_CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
_TOOL = {
    "type": "function",
    "function": {
        "name": "f",
        "description": "doc",
        "parameters": {"properties": {"x": {"type": "integer"}}, "required": ["x"], "type": "object"},
    },
}
_PARTS = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
_LC_TEXT = {"frequency_penalty": 0, "logprobs": None, "n": 1, "presence_penalty": 0, "seed": None, "top_p": 1}

BODIES: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "litellm": [
        (CHAT, {"messages": _HI, "model": "small"}),
        (CHAT, {"messages": _HI, "model": "small", "stream": True, "stream_options": {"include_usage": True}}),
        (
            CHAT,
            {
                "messages": _HI,
                "model": "small",
                "logprobs": True,
                "max_completion_tokens": 3,
                "max_tokens": 3,
                "n": 2,
                "response_format": {"type": "text"},
                "seed": 1,
                "stop": ["x"],
                "temperature": 0.3,
                "top_logprobs": 1,
                "top_p": 0.9,
            },
        ),
        (
            CHAT,
            {
                "messages": [
                    *_HI,
                    {"role": "assistant", "tool_calls": [_CALL]},
                    {"role": "tool", "tool_call_id": "c", "name": "f", "content": "3"},
                ],
                "model": "small",
            },
        ),
        (
            CHAT,
            {
                "messages": [
                    *_HI,
                    {"content": "ab", "role": "assistant", "provider_specific_fields": {"refusal": None}},
                    *_HI,
                ],
                "model": "small",
            },
        ),
        (COMPLETIONS, {"model": "small", "prompt": "hi", "stream": True}),
        (COMPLETIONS, {"model": "small", "prompt": "hi", "logprobs": 1, "best_of": 1, "echo": True, "suffix": ""}),
    ],
    "langchain": [
        (CHAT, {"messages": _HI, "model": "small", "stream": False}),
        (CHAT, {"messages": _HI, "model": "small", "stream": True, "stream_options": {"include_usage": True}}),
        (
            CHAT,
            {
                "messages": [
                    {"content": "s", "role": "system"},
                    *_HI,
                    {"content": None, "role": "assistant", "tool_calls": [_CALL]},
                    {"content": "3", "role": "tool", "tool_call_id": "c"},
                ],
                "model": "small",
                "stream": False,
            },
        ),
        (
            CHAT,
            {
                "messages": _HI,
                "model": "small",
                "frequency_penalty": 0.1,
                "logprobs": True,
                "max_completion_tokens": 3,
                "n": 2,
                "seed": 3,
                "stop": ["x"],
                "stream": False,
                "temperature": 0.2,
                "top_logprobs": 2,
                "user": "u",
                "top_k": 3,
                "chat_template_kwargs": {"enable_thinking": False},
            },
        ),
        (CHAT, {"messages": _HI, "model": "small", "stream": False, "tool_choice": "none", "tools": [_TOOL]}),
        (COMPLETIONS, {"model": "small", "prompt": ["a", "b"], "max_tokens": 9, "temperature": 0.7, **_LC_TEXT}),
        (
            COMPLETIONS,
            {"model": "small", "prompt": "hi", "max_tokens": 9, "stream": True, "temperature": 0.7, **_LC_TEXT},
        ),
        (COMPLETIONS, {"model": "small", "prompt": ["a"], "max_tokens": 3, **_LC_TEXT, "best_of": 2, "n": 2}),
    ],
    "vllm bench serve": [
        (
            COMPLETIONS,
            {
                "model": "small",
                "prompt": "hi",
                "repetition_penalty": 1.0,
                "max_tokens": 4,
                "logprobs": None,
                "stream": True,
                "stream_options": {"include_usage": True},
                "ignore_eos": True,
            },
        ),
        (
            CHAT,
            {
                "model": "small",
                "messages": _PARTS,
                "max_completion_tokens": 4,
                "stream": True,
                "stream_options": {"include_usage": True},
                "ignore_eos": True,
            },
        ),
    ],
    "guidellm": [
        (
            COMPLETIONS,
            {
                "model": "small",
                "stream": True,
                "stream_options": {"include_usage": True, "continuous_usage_stats": True},
                "max_tokens": 4,
                "stop": None,
                "ignore_eos": True,
                "prompt": "hi",
            },
        ),
        (
            CHAT,
            {
                "model": "small",
                "stream": True,
                "stream_options": {"include_usage": True, "continuous_usage_stats": True},
                "max_completion_tokens": 4,
                "stop": None,
                "ignore_eos": True,
                "messages": [{"role": "system", "content": "s"}, *_PARTS],
            },
        ),
    ],
    "aiperf": [
        (
            CHAT,
            {
                "messages": [{"role": "system", "content": "s"}, *_PARTS],
                "model": "small",
                "stream": True,
                "max_completion_tokens": 4,
                "ignore_eos": True,
                "min_tokens": 4,
                "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            },
        ),
        (COMPLETIONS, {"prompt": ["hi"], "model": "small", "stream": False, "max_tokens": 4}),
    ],
    "lm-eval": [
        (
            COMPLETIONS,
            {
                "model": "small",
                "prompt": [[5, 6, 7], [8, 9]],
                "temperature": 0,
                "max_tokens": 1,
                "logprobs": 1,
                "seed": 1234,
                "echo": True,
            },
        ),
        (
            COMPLETIONS,
            {"prompt": ["hi"], "model": "small", "max_tokens": 9, "temperature": 0, "stop": ["\n\n"], "seed": 1234},
        ),
        (
            CHAT,
            {
                "messages": [{"role": "user", "content": "hi", "type": "text"}],
                "model": "small",
                "max_tokens": 9,
                "temperature": 0,
                "stop": ["<|endoftext|>"],
                "seed": 1234,
            },
        ),
    ],
}
