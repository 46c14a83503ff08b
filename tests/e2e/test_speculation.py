"""Expected answers over a hand-off: the same answer, sooner, and charged; and a wrong configuration ends the launch."""

import json
import re
from typing import Any

import httpx
import pytest
import warm
from deployments import Launch

BODY: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Say the numbers from one to ten."}],
    "max_tokens": 40,
    "temperature": 0,
    "ignore_eos": True,
}


def test_a_prediction_changes_no_token_and_is_told_in_usage(launch: Launch) -> None:
    config = json.dumps({"method": "prediction", "adaptive": False})
    deployment = launch("--prefill", "1", "--decode", "1", "--speculative-config", config)

    def ask(**fields: Any) -> dict[str, Any]:
        reply = httpx.post(f"{deployment.url}/v1/chat/completions", json={**BODY, **fields}, timeout=60)
        assert reply.status_code == 200, reply.text
        found: dict[str, Any] = reply.json()
        return found

    plain = ask()
    text = plain["choices"][0]["message"]["content"]
    assert "completion_tokens_details" not in plain["usage"]
    for content in (text, [{"type": "text", "text": text[:9]}, {"type": "text", "text": text[9:]}]):
        right = ask(prediction={"type": "content", "content": content})
        assert right["choices"] == plain["choices"]
        assert right["usage"]["completion_tokens_details"]["accepted_prediction_tokens"] > 8
        assert right["usage"]["prompt_tokens"] == plain["usage"]["prompt_tokens"]
    wrong = ask(prediction={"type": "content", "content": text[:30] + " no, never " * 9})
    assert wrong["choices"] == plain["choices"]
    assert wrong["usage"]["completion_tokens_details"]["rejected_prediction_tokens"] > 0
    metrics = httpx.get(f"{deployment.url}/metrics").text
    assert re.search(r'vllm:spec_decode_num_accepted_tokens_per_pos_total\{engine="decode-0",.*position="0"', metrics)
    assert "accepted_guesses=" in deployment.log


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ('{"method": "ngram", "num_speculative_tokens": 0}', "num_speculative_tokens: a whole number of at least 1"),
        ('{"method": "eagle3", "num_speculative_tokens": 2}', "unknown proposer 'eagle3'"),
        ('{"method": "ngram"', "a JSON object was expected"),
    ],
)
def test_a_wrong_configuration_ends_the_launch(config: str, message: str) -> None:
    ended = warm.run([*warm.COMMAND, "launch", "--check", "--speculative-config", config])
    assert ended.returncode == 2
    assert message in ended.stderr
