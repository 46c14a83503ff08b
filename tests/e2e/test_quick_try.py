"""A quick try: a unix socket, one key from the environment, and OpenAI's client over both."""

from pathlib import Path
from typing import Any

import httpx
import pytest
from deployments import Launch

KEY = "sk-only-for-a-try"
SHELL = {
    "type": "function",
    "name": "shell",
    "strict": False,
    "parameters": {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"]},
}
CODEX: dict[str, Any] = {
    "instructions": "You are an agent.",
    "reasoning": {"effort": "low", "summary": "auto"},
    "tools": [SHELL, {"type": "web_search"}, {"type": "namespace", "name": "n__", "tools": [{**SHELL, "name": "f"}]}],
    "extra_body": {"client_metadata": {"x": "y"}, "text": {"verbosity": "low"}},
    "max_output_tokens": 12,
    "store": False,
}


def test_openais_client_over_a_unix_socket_with_the_key_of_the_environment(launch: Launch, tmp_path: Path) -> None:
    import openai

    path = tmp_path / "pd.sock"
    flags = ("--prefill", "1", "--decode", "1", "--uds", str(path), "--tool-parser", "hermes")
    deployment = launch(*flags, environment={"PDKV_API_KEY": KEY})
    assert deployment.url == f"unix:{path}"
    transport = httpx.HTTPTransport(uds=str(path))
    with httpx.Client(transport=transport, base_url="http://localhost") as http:
        assert http.get("/health").status_code == 200
        assert http.get("/v1/models").status_code == 401
        client = openai.OpenAI(api_key=KEY, base_url="http://localhost/v1", http_client=http, max_retries=0)
        model = client.models.list().data[0].id
        messages: list[Any] = [{"role": "user", "content": "Hello"}]
        whole = client.chat.completions.create(model=model, messages=messages, max_tokens=8, temperature=0)
        chunks = client.chat.completions.create(
            model=model, messages=messages, max_tokens=8, temperature=0, stream=True
        )
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        assert text == whole.choices[0].message.content
        first = client.responses.create(model=model, input="Hello", max_output_tokens=8, temperature=0)
        events = list(
            client.responses.create(
                model=model, input="And?", previous_response_id=first.id, max_output_tokens=8, stream=True
            )
        )
        assert events[-1].type in ("response.completed", "response.incomplete")
        assert events[-1].response.previous_response_id == first.id
        codex = client.responses.create(model=model, input="list files", temperature=0, **CODEX)
        assert [tool.type for tool in codex.tools] == ["function", "namespace"]
        called = client.responses.create(
            model=model,
            input="list files",
            tool_choice="required",
            parallel_tool_calls=False,
            **{**CODEX, "max_output_tokens": 200},
        )
        assert {item.type for item in called.output} == {"function_call"}
        numbers = (
            client.embeddings.create(model=model, input="x").data[0].embedding
        )  # in base64, of which it tells nothing
        assert sum(number**2 for number in numbers) == pytest.approx(1.0, abs=1e-4)
        headers = {"authorization": f"Bearer {KEY}"}
        again = {"model": model, "messages": messages, "max_tokens": 1}
        usage = http.post("/v1/chat/completions", json=again, headers=headers).json()["usage"]
        assert http.get("/server_info", headers=headers).json()["tool_parser"] == "HermesParser"
        assert http.post("/reset_prefix_cache", headers=headers).status_code == 200
        now = http.post("/v1/chat/completions", json=again, headers=headers).json()["usage"]
        assert now["prompt_tokens_details"]["cached_tokens"] == 0 < usage["prompt_tokens_details"]["cached_tokens"]
    assert KEY not in deployment.log
    assert not any(KEY in word for process in deployment.survivors() for word in process.cmdline())
    assert deployment.stop() == 0
    assert not path.exists()
