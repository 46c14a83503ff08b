"""`pd bench serve` beside other load generators, against a server whose delays are fixed.

    python -m benchmarks.fixed_delays [--guidellm PYTHON] [--vllm PYTHON]

Every request has its first token after TTFT_S, and each following one ITL_S later; what a client reports beyond that
is its own. A percentile of `pd bench` may differ by 2 % from the delays, and from what guidellm and `vllm bench serve`
report.
"""

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import uvloop

from pdkv.config import DEFAULT_MODEL

TTFT_S, ITL_S = 0.2, 0.02
STREAMS, REQUESTS, OUTPUT_LEN = 32, 320, 64
_HEAD = b'{"id":"c","object":"text_completion","model":"fixed","choices":'
_TOKEN = _HEAD + b'[{"index":0,"text":" a","finish_reason":null}]}'
_USAGE = _HEAD + b'[],"usage":{"prompt_tokens":8,"completion_tokens":%d,"total_tokens":%d}}'
_MODELS = b'{"object":"list","data":[{"id":"fixed","object":"model"}]}'


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    loop = asyncio.get_running_loop()
    try:
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0] or 0)
            body = await reader.readexactly(length)
            if not head.startswith(b"POST"):
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n")
                writer.write(b"content-length: %d\r\n\r\n%b" % (len(_MODELS), _MODELS))
                continue
            begun, asked = loop.time(), json.loads(body)
            num = asked.get("max_tokens", OUTPUT_LEN)
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
            for number in range(num):
                await asyncio.sleep(begun + TTFT_S + number * ITL_S - loop.time())
                _send(writer, b"data: %b\n\n" % _TOKEN)
            _send(writer, b"data: %b\n\n" % (_USAGE % (num, 8 + num)))
            _send(writer, b"data: [DONE]\n\n")
            writer.write(b"0\r\n\r\n")
    except (asyncio.IncompleteReadError, ConnectionError):
        writer.close()


def _send(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(b"%x\r\n%b\r\n" % (len(data), data))


async def _serve() -> None:
    server = await asyncio.start_server(_answer, "127.0.0.1", 0, backlog=1024)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


def own(url: str) -> Mapping[str, Any]:
    """The report of `pd bench serve`."""
    flags = ["--num-prompts", str(REQUESTS), "--max-concurrency", str(STREAMS), "--input-len", "8"]
    flags += ["--output-len", str(OUTPUT_LEN), "--metric-percentiles", "50,90,95,99", "--json"]
    command = [sys.executable, "-m", "pdkv.cli", "bench", "serve", url, *flags]
    report: Mapping[str, Any] = json.loads(subprocess.run(command, check=True, capture_output=True, timeout=300).stdout)
    return report


def guidellms(url: str, python: Path) -> Mapping[str, Any]:
    """guidellm's figures under the same names."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "report.json"
        flags = ["--backend", f"kind=openai_http,target={url},model=fixed,request_format=/v1/completions"]
        flags += ["--tokenizer", f"kind=hf_auto,model={DEFAULT_MODEL}", "--disable-console"]
        flags += ["--data", f"kind=synthetic_text,prompt_tokens=8,output_tokens={OUTPUT_LEN}"]
        flags += ["--profile", f"kind=concurrent,streams={STREAMS}"]
        flags += ["--constraint", f"kind=max_requests,count={REQUESTS}", "--output", f"kind=json,path={path}"]
        subprocess.run([python, "-m", "guidellm", "run", *flags], check=True, capture_output=True, timeout=300)
        metrics = json.loads(path.read_text())["benchmarks"][0]["metrics"]
    found: dict[str, Any] = {}
    for name, theirs in (
        ("ttft", "time_to_first_token_ms"),
        ("tpot", "inter_token_latency_ms"),
        ("e2el", "request_latency"),
    ):
        figures = metrics[theirs]["successful"]
        factor = 1e3 if name == "e2el" else 1.0
        found |= {f"p{share}_{name}_ms": factor * figures["percentiles"][f"p{share}"] for share in (50, 90, 95, 99)}
    return found


def vllms(url: str, python: Path) -> Mapping[str, Any]:
    """The report of `vllm bench serve`, which has the same names."""
    with tempfile.TemporaryDirectory() as folder:
        flags = ["--base-url", url, "--backend", "openai", "--model", "fixed", "--tokenizer", str(DEFAULT_MODEL)]
        flags += ["--dataset-name", "random", "--random-input-len", "8", "--random-output-len", str(OUTPUT_LEN)]
        flags += ["--num-prompts", str(REQUESTS), "--max-concurrency", str(STREAMS)]
        flags += ["--percentile-metrics", "ttft,tpot,e2el", "--metric-percentiles", "50,90,95,99"]
        flags += ["--disable-tqdm", "--save-result", "--result-dir", folder, "--result-filename", "report.json"]
        command = [python.with_name("vllm"), "bench", "serve", *flags]
        subprocess.run(command, check=True, capture_output=True, timeout=300)
        report: Mapping[str, Any] = json.loads((Path(folder) / "report.json").read_text())
    return report


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--guidellm", type=Path, metavar="PYTHON", help="a Python that has guidellm")
    parser.add_argument("--vllm", type=Path, metavar="PYTHON", help="a Python that has vLLM")
    parser.add_argument("--serve", action="store_true", help="be the server")
    options = parser.parse_args(arguments)
    if options.serve:
        uvloop.run(_serve())
    command = [sys.executable, "-m", "benchmarks.fixed_delays", "--serve"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            url = f"http://127.0.0.1:{int(server.stdout.readline())}"
            reports = {"pd bench": own(url)}
            if options.guidellm:
                reports["guidellm"] = guidellms(url, options.guidellm)
            if options.vllm:
                reports["vllm bench"] = vllms(url, options.vllm)
        finally:
            server.kill()
    fixed = {"ttft": TTFT_S, "tpot": ITL_S, "e2el": TTFT_S + (OUTPUT_LEN - 1) * ITL_S}
    print(f"{'':<14}{'fixed':>10}" + "".join(f"{name:>12}" for name in reports) + "   ms")
    for name, seconds in fixed.items():
        for share in (50, 90, 95, 99):
            found = "".join(f"{report[f'p{share}_{name}_ms']:>12.2f}" for report in reports.values())
            print(f"{name} p{share:<10}{1e3 * seconds:>10.1f}{found}")
    print(f"CPU of pd bench: {reports['pd bench']['client_cpu_us_per_token']:.1f} us a token")
    return 0


if __name__ == "__main__":
    sys.exit(main())
