"""What Codex sends to /v1/responses, by the shapes of its public source."""

from typing import Any

SHELL: dict[str, Any] = {
    "type": "function",
    "name": "shell",
    "description": "Runs a command",
    "strict": False,
    "parameters": {"type": "object", "properties": {"command": {"type": "array", "items": {"type": "string"}}}},
}
PATCH = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Edits files",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: /x/"},
}
DOCS = {"type": "namespace", "name": "mcp__docs__", "description": "d", "tools": [{**SHELL, "name": "find"}]}
CODEX: dict[str, Any] = {
    "instructions": "You are an agent.",
    "input": [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "<permissions>"}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "list files"}]},
    ],
    "tools": [
        SHELL,
        PATCH,
        {"type": "web_search", "external_web_access": False, "search_content_types": ["text"]},
        {"type": "tool_search", "execution": "client", "description": "d", "parameters": {"type": "object"}},
        {"type": "image_generation", "output_format": "png"},
        DOCS,
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": False,
    "reasoning": {"effort": "medium", "summary": "detailed", "context": "all_turns"},
    "store": False,
    "stream": True,
    "stream_options": {"reasoning_summary_delivery": "sequential_cutoff"},
    "include": ["reasoning.encrypted_content"],
    "service_tier": "priority",
    "prompt_cache_key": "0199-aa",
    "text": {"verbosity": "low"},
    "client_metadata": {"x-codex-installation-id": "0"},
}
NOTES = {"internal_chat_message_metadata_passthrough": {"turn_id": "t"}}
HISTORY: list[dict[str, Any]] = [
    *CODEX["input"],
    {"type": "reasoning", "id": "rs_1", "summary": [], "content": None, "encrypted_content": "gAAA", **NOTES},
    {
        "type": "message",
        "role": "assistant",
        "phase": "partial_answer",
        "content": [{"type": "output_text", "text": "I look."}],
        **NOTES,
    },
    {"type": "web_search_call", "status": "open", "action": {"type": "open_page", "url": "https://example.org"}},
    {
        "type": "function_call",
        "name": "find",
        "namespace": "mcp__docs__",
        "arguments": '{"q": 1}',
        "encrypted_function_args": [],
        "call_id": "c1",
        **NOTES,
    },
    {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "found"}], **NOTES},
    {"type": "custom_tool_call", "status": "completed", "call_id": "c2", "name": "apply_patch", "input": 'a "é"\n'},
    {"type": "custom_tool_call_output", "call_id": "c2", "name": "apply_patch", "output": "done"},
]
