"""The server's interfaces without a client library."""

import os

import httpx
from script_answers import QUESTIONS, greedy_text, ids_of

base = os.environ["API_BASE"]
root = base.removesuffix("/v1")

if __name__ == "__main__":
    assert httpx.get(f"{root}/health").status_code == 200
    assert httpx.get(f"{root}/version").json()["version"]
    assert "vllm:num_requests_running" in httpx.get(f"{root}/metrics").text
    model = httpx.get(f"{base}/models").json()["data"][0]["id"]
    tokens = httpx.post(f"{root}/tokenize", json={"model": model, "prompt": QUESTIONS[1]}).json()
    assert tokens["tokens"] == ids_of(QUESTIONS[1])
    body = {"model": model, "prompt": [tokens["tokens"]], "temperature": 0, "max_tokens": 6}
    headers = {"User-Agent": "Test Client"}
    choice = httpx.post(f"{base}/completions", json=body, headers=headers, timeout=60).json()["choices"][0]
    assert choice["text"] == greedy_text(QUESTIONS[1], 6)
