"""Other people's clients against a real deployment: no request of theirs is refused."""

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from client_programs import python_with, run_program
from codex_bodies import CODEX, HISTORY
from deployments import Launch, Running
from response_events import typed_events, whole_of

from pdkv.config import DEFAULT_MODEL

NUM_REQUESTS = 4
PROGRAMS = Path(__file__).with_name("clients")


@pytest.fixture(scope="module")
def deployment(module_launch: Launch) -> Running:
    return module_launch("--prefill", "1", "--decode", "1")


@pytest.fixture(scope="module")
def embedded(module_launch: Launch) -> Running:
    """1P1D of the embedded model, which answers questions, calls a tool and writes by a schema."""
    return module_launch("--model", str(DEFAULT_MODEL), "--prefill", "1", "--decode", "1", "--kv-cache-memory", "64MiB")


@pytest.mark.clients
@pytest.mark.parametrize(
    ("package", "program"),
    [
        ("openai", "openai_client.py"),
        ("litellm", "litellm_client.py"),
        ("langchain_openai", "langchain_client.py"),
        ("agents", "agents_client.py"),
    ],
)
def test_a_client_library_gets_the_answers_of_the_model(
    package: str, program: str, request: pytest.FixtureRequest
) -> None:
    python = python_with(package)
    deployment: Running = request.getfixturevalue("embedded")
    variables = {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    asyncio.run(run_program(python, str(PROGRAMS / program), deployment.url + "/v1", **variables))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("given", [CODEX["input"], HISTORY], ids=["first", "later"])
def test_requests_of_codex_are_served(given: list[dict[str, Any]], stream: bool, embedded: Running) -> None:
    body = {**CODEX, "model": "pdkv-default", "input": given, "stream": stream, "temperature": 0}
    body["stream_options"] = CODEX["stream_options"] if stream else None
    for choice, own in (("auto", {"message"}), ("required", set[str]())):
        reply = httpx.post(f"{embedded.url}/v1/responses", json={**body, "tool_choice": choice}, timeout=60)
        assert reply.status_code == 200, reply.text
        response = whole_of(typed_events(reply.content)) if stream else reply.json()
        assert response["status"] == "completed", response
        assert {item["type"] for item in response["output"]} <= {"function_call", "custom_tool_call", *own}


def count_replies(deployment: Running) -> dict[str, int]:
    """Requests that generate, by outcome."""
    counts: dict[str, int] = {}
    for line in deployment.get("/metrics").text.splitlines():
        if line.startswith("pdkv_requests_total{"):
            outcome = line.partition('outcome="')[2].partition('"')[0]
            counts[outcome] = counts.get(outcome, 0) + int(float(line.split()[-1]))
    return counts


def served_by(deployment: Running, before: dict[str, int]) -> dict[str, int]:
    """How requests ended since `before`."""
    now = count_replies(deployment)
    return {outcome: now[outcome] - before.get(outcome, 0) for outcome in now if now[outcome] != before.get(outcome, 0)}


@pytest.mark.clients
@pytest.mark.parametrize("streaming", [True, False])
@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_aiperf_is_served(
    endpoint: str, streaming: bool, request: pytest.FixtureRequest, served_model: Path, tmp_path: Path
) -> None:
    python = python_with("aiperf")
    deployment: Running = request.getfixturevalue("deployment")
    (tmp_path / "served").symlink_to(served_model)
    before = count_replies(deployment)
    flags = ["--model", "served", "--url", deployment.url, "--endpoint-type", endpoint, "--ui", "none"]
    flags += ["--tokenizer", "./served", "--synthetic-input-tokens-mean", "8", "--output-tokens-mean", "4"]
    flags += ["--request-count", str(NUM_REQUESTS), "--concurrency", "2", *(["--streaming"] if streaming else [])]
    program = Path(python).with_name("aiperf")
    asyncio.run(run_program(str(program), "profile", *flags, directory=tmp_path))
    assert served_by(deployment, before) == {"ok": NUM_REQUESTS}


GENERATE = """
task: generate
output_type: generate_until
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["\\n"], max_gen_toks: 4, do_sample: false}
metric_list: [{metric: exact_match}]
"""

CHOOSE = """
task: choose
output_type: multiple_choice
doc_to_choice: ["1", "2"]
doc_to_target: 0
metric_list: [{metric: acc}]
"""


@pytest.mark.clients
@pytest.mark.parametrize(
    ("model", "path", "tasks"),
    [
        ("local-completions", "/v1/completions", {"generate": GENERATE, "choose": CHOOSE}),
        ("local-chat-completions", "/v1/chat/completions", {"generate": GENERATE}),
    ],
)
def test_lm_eval_is_served(
    model: str, path: str, tasks: dict[str, str], request: pytest.FixtureRequest, served_model: Path, tmp_path: Path
) -> None:
    """Texts that are generated, and prompts whose log probabilities are asked for."""
    python = python_with("lm_eval")
    deployment: Running = request.getfixturevalue("deployment")
    questions = tmp_path / "questions.json"
    rows = [{"question": f"What is {number} + 1? ", "answer": str(number + 1)} for number in range(NUM_REQUESTS)]
    questions.write_text("\n".join(map(json.dumps, rows)))
    data = f'dataset_path: json\ndataset_kwargs: {{data_files: {{test: "{questions}"}}}}\ntest_split: test\n'
    for name, task in tasks.items():
        (tmp_path / f"{name}.yaml").write_text(f'{task}{data}doc_to_text: "{{{{question}}}}"\n')
    before = count_replies(deployment)
    where = f"base_url={deployment.url}{path},model=served,tokenizer={served_model},tokenizer_backend=huggingface"
    flags = ["--model", model, "--model_args", f"{where},num_concurrent=2,max_retries=1"]
    flags += ["--tasks", ",".join(tasks), "--include_path", str(tmp_path)]
    flags += ["--apply_chat_template"] if "chat" in model else []
    variables = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(tmp_path / "home")}
    asyncio.run(run_program(python, "-m", "lm_eval", *flags, directory=tmp_path, **variables))
    served = served_by(deployment, before)
    assert set(served) == {"ok"}
    assert served["ok"] >= NUM_REQUESTS
