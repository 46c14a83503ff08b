"""Launch 2 prefill and 4 decode engines on the embedded model, ask them questions over HTTP, show what happened.

Each prompt names codes and asks for one of them: a right answer means that the KV arrived. Then a tool is called, and
JSON is written by a schema. Exits with 0 only if every answer is right, decode computed no prompt token, and the launch
ended cleanly.

    python examples/demo.py [--questions 12] [--prefill 2] [--decode 4]
"""

import argparse
import concurrent.futures
import http.client
import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from default_model.recall import RecallQuestion, make_question

READY_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 10.0
REQUEST_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Answer:
    """What one request brought, and when."""

    question: RecallQuestion
    kind: str  # completion or chat
    text: str
    prefill_engine: str
    decode_engine: str
    prompt_tokens: int
    cached_tokens: int
    ttft_s: float
    tpot_s: float

    @property
    def right(self) -> bool:
        """Whether the answer is the truth."""
        return self.text.strip() == self.question.answer


@contextmanager
def launched(num_prefill: int, num_decode: int) -> Iterator[str]:
    """`pd launch` on any free port; yields its address and ends it as Ctrl-C would.

    Every prompt is handed off, where an idle decode engine would keep a short one for itself.

    Raises:
        RuntimeError: it did not become ready, or did not end cleanly.
    """
    command = [sys.executable, "-m", "pdkv.cli", "launch", "--port", "0", "--log-level", "warning"]
    command += ["--prefill", str(num_prefill), "--decode", str(num_decode), "--local-turns", "never"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    watchdog = concurrent.futures.ThreadPoolExecutor(1)
    try:
        assert process.stdout is not None
        line = watchdog.submit(process.stdout.readline).result(READY_TIMEOUT_S)
        ready = re.match(r"ready: http://(\S+)", line)
        if ready is None:
            raise RuntimeError(f"pd launch did not become ready; it said {line!r}")
        print(line, end="")
        yield ready.group(1)
    finally:
        process.send_signal(signal.SIGINT)
        code = process.wait(STOP_TIMEOUT_S)
        watchdog.shutdown()
    if code != 0:
        raise RuntimeError(f"pd launch ended with exit code {code}")


@contextmanager
def requested(address: str, path: str, body: dict[str, Any] | None = None) -> Iterator[http.client.HTTPResponse]:
    """The answer to a POST of `body`, or without one to a GET.

    Raises:
        RuntimeError: its status is not 200.
    """
    connection = http.client.HTTPConnection(address, timeout=REQUEST_TIMEOUT_S)
    try:
        if body is None:
            connection.request("GET", path)
        else:
            connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            raise RuntimeError(f"HTTP {response.status}: {response.read().decode()}")
        yield response
    finally:
        connection.close()


def ask(address: str, question: RecallQuestion, kind: str) -> Answer:
    """Stream one question and time its tokens."""
    body: dict[str, Any] = {"model": "pdkv-default", "temperature": 0, "max_tokens": 12, "stream": True}
    body["stream_options"] = {"include_usage": True}
    if kind == "chat":
        path, body["messages"] = "/v1/chat/completions", question.messages
    else:
        path, body["prompt"] = "/v1/completions", question.prompt
    text, usage, stamps = "", {}, []
    start = time.perf_counter()
    with requested(address, path, body) as response:
        for line in response:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line.removeprefix(b"data: "))
            if "error" in event:
                raise RuntimeError(f"the stream broke: {event['error']}")
            usage = event.get("usage") or usage
            for choice in event["choices"]:
                stamps.append(time.perf_counter())
                text += choice["delta"].get("content") or "" if kind == "chat" else choice["text"]
        headers = response.headers
    return Answer(
        question=question,
        kind=kind,
        text=text,
        prefill_engine=headers["x-pd-prefill-engine"],
        decode_engine=headers["x-pd-decode-engine"],
        prompt_tokens=usage["prompt_tokens"],
        cached_tokens=usage["prompt_tokens_details"]["cached_tokens"],
        ttft_s=stamps[0] - start,
        tpot_s=(stamps[-1] - stamps[0]) / max(len(stamps) - 1, 1),
    )


TOOL = {
    "name": "get_code",
    "description": "The code of a word.",
    "parameters": {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]},
}
CODE_SCHEMA = {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]}


def chat(address: str, messages: list[dict[str, Any]], **options: Any) -> dict[str, Any]:
    """The message that answers a conversation."""
    body = {"model": "pdkv-default", "temperature": 0, "max_tokens": 100, "messages": messages, **options}
    with requested(address, "/v1/chat/completions", body) as response:
        message: dict[str, Any] = json.load(response)["choices"][0]["message"]
    return message


def call_a_tool(address: str) -> bool:
    """Have the model call a tool, give it the result, and have it write JSON; whether all of it was right."""
    tools = [{"type": "function", "function": TOOL}]
    messages: list[dict[str, Any]] = [{"role": "user", "content": "What is fox?"}]
    call = chat(address, messages, tools=tools)
    calls = [f"{each['function']['name']}({each['function']['arguments']})" for each in call.get("tool_calls") or []]
    print(f"\nWhat is fox? With a tool, the model calls {', '.join(calls) or 'none'}")
    if calls != ['get_code({"word": "fox"})']:
        return False
    result = {"role": "tool", "tool_call_id": call["tool_calls"][0]["id"], "content": "4821"}
    answer = chat(address, [*messages, call, result], tools=tools)["content"]
    shape = {"type": "json_schema", "json_schema": {"name": "code", "schema": CODE_SCHEMA}}
    asked = [{"role": "user", "content": "Codes: fox=4821, hat=0937. What is hat?"}]
    written = chat(address, asked, response_format=shape)["content"]
    print(f"Given the result 4821, it answers {answer}; asked for a code by a JSON schema, it writes {written}")
    return bool(answer == "4821" and json.loads(written) == {"code": "0937"})


def read_metrics(address: str) -> dict[str, float]:
    """What the engines counted: prompt tokens of decode by source, and bytes received."""
    totals: dict[str, float] = {}
    with requested(address, "/metrics") as response:
        lines = response.read().decode().splitlines()
    for line in lines:
        match = re.match(r'pdkv_engine_prompt_tokens_total\{.*role="decode",source="(\w+)"\} (\S+)', line)
        if match:
            totals[match.group(1)] = totals.get(match.group(1), 0.0) + float(match.group(2))
        match = re.match(r"pdkv_engine_kv_received_bytes_total\{.*\} (\S+)", line)
        if match:
            totals["bytes"] = totals.get("bytes", 0.0) + float(match.group(1))
    return totals


def show(answers: list[Answer], metrics: dict[str, float]) -> None:
    """The answers beside the truth, and what moved."""
    print("\nasked by      answer  truth         prompt  cached    TTFT      TPOT  engines")
    for a in answers:
        verdict = "ok" if a.right else "WRONG"
        timing = f"{a.ttft_s * 1e3:>6.1f} ms{a.tpot_s * 1e3:>7.2f} ms"
        answer = f"{a.kind:<11}{a.text.strip():>9}{a.question.answer:>7}  {verdict:<6}"
        print(f"{answer}{a.prompt_tokens:>6}{a.cached_tokens:>8} {timing}  {a.prefill_engine} -> {a.decode_engine}")
    right = sum(a.right for a in answers)
    print(f"\n{right} of {len(answers)} answers right")
    print(f"{metrics['bytes'] / 2**20:.2f} MiB of KV moved to the decode engines")
    print(
        f"prompt tokens on decode: {metrics['remote']:.0f} remote, {metrics['local_hit']:.0f} from their own caches, "
        f"{metrics['computed'] + metrics['recomputed']:.0f} computed"
    )


def main() -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--questions", type=int, default=12, help="how many questions to ask")
    parser.add_argument("--prefill", type=int, default=2, help="prefill engines")
    parser.add_argument("--decode", type=int, default=4, help="decode engines")
    args = parser.parse_args()
    questions = [make_question(seed, 3 + 5 * (seed % 6)) for seed in range(args.questions)]
    kinds = ["chat" if seed % 3 == 2 else "completion" for seed in range(args.questions)]
    start = time.perf_counter()
    with launched(args.prefill, args.decode) as address:
        print(f"ready after {time.perf_counter() - start:.1f} s; asking {args.questions} questions, four at a time")
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            answers = list(pool.map(lambda pair: ask(address, *pair), zip(questions, kinds, strict=True)))
        answers.append(ask(address, questions[0], kinds[0]))  # once more: the prompt is in the caches now
        metrics = read_metrics(address)
        show(answers, metrics)
        called = call_a_tool(address)
    computed = metrics["computed"] + metrics["recomputed"]
    return 0 if all(a.right for a in answers) and computed == 0 and called else 1


if __name__ == "__main__":
    sys.exit(main())
