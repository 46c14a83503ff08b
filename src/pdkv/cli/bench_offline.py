"""`pd bench latency` and `pd bench throughput`: measure one engine in this process, without a server."""

import argparse
import contextlib
import json
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from pdkv.base.clock import MONOTONIC
from pdkv.cli.options import add_flags, add_vllm_flags, build, check_numbers, collect, flags_of, new_command
from pdkv.config import EngineConfig

if TYPE_CHECKING:
    from pdkv.offline.llm import LLM


def add_offline(subcommands: "argparse._SubParsersAction[Any]") -> None:
    """Add `latency` and `throughput` to `pd bench`."""
    summary = "measure how long one batch takes, in this process"
    latency = new_command(subcommands, "latency", run_latency, summary)
    _add_flags(latency, input_len=32)
    add = latency.add_argument
    add("--batch-size", type=int, default=8, metavar="N", help="prompts at a time (default: 8)")
    add("--num-iters-warmup", type=int, default=10, metavar="N", help="batches that do not count (default: 10)")
    add("--num-iters", type=int, default=30, metavar="N", help="batches that are measured (default: 30)")
    summary = "measure how many tokens a second an engine makes, in this process"
    throughput = new_command(subcommands, "throughput", run_throughput, summary)
    _add_flags(throughput, input_len=1024)
    throughput.add_argument("--num-prompts", type=int, default=1000, metavar="N", help="requests (default: 1000)")


def _add_flags(parser: argparse.ArgumentParser, *, input_len: int) -> None:
    add = parser.add_argument
    add("--input-len", type=int, default=input_len, metavar="N", help=f"tokens per prompt (default: {input_len})")
    add("--output-len", type=int, default=128, metavar="N", help="tokens per answer (default: 128)")
    add("--json", action="store_true", help="print one JSON object instead of lines")
    add_flags(parser.add_argument_group("engine"), flags_of(EngineConfig))
    add_vllm_flags(parser)


@contextlib.contextmanager
def _llm(arguments: argparse.Namespace) -> "Iterator[LLM]":
    from pdkv.cli.launch import launch_variables
    from pdkv.models.hub import with_local_model
    from pdkv.offline.llm import LLM

    values = collect(flags_of(EngineConfig), vars(arguments), known_variables=launch_variables())
    with LLM.from_config(with_local_model(build(EngineConfig, values))) as llm:
        yield llm


def _runs(llm: "LLM", arguments: argparse.Namespace, num_prompts: int, num_runs: int) -> Iterator[tuple[float, int]]:
    """Seconds, and tokens made, of each run over the same prompts; their KV is not found again."""
    from pdkv.bench.datasets import Maker
    from pdkv.sampling.params import SamplingParams

    params = SamplingParams(max_tokens=arguments.output_len, temperature=0.0, ignore_eos=True)
    vocabulary = llm.get_tokenizer().vocab_size
    for number in range(num_runs):
        make = Maker(number, as_text=False, vocabulary=vocabulary)
        prompts = [make.prompt(arguments.input_len) for _ in range(num_prompts)]
        start = MONOTONIC.now()
        outputs = llm.generate(prompts, params, use_tqdm=num_runs == 1 and sys.stderr.isatty())
        yield (MONOTONIC.now() - start, sum(len(choice.token_ids) for output in outputs for choice in output.outputs))


def run_latency(arguments: argparse.Namespace) -> int:
    """Run `pd bench latency`."""
    from pdkv.bench.report import percentile

    check_numbers(arguments, "input_len", "output_len", "batch_size", "num_iters")
    check_numbers(arguments, "num_iters_warmup", zero=True)
    skipped = arguments.num_iters_warmup
    with _llm(arguments) as llm:
        runs = _runs(llm, arguments, arguments.batch_size, skipped + arguments.num_iters)
        times = [seconds for seconds, _ in runs][skipped:]
    average = sum(times) / len(times)
    percentiles = {str(percent): percentile(times, percent) for percent in (10, 25, 50, 75, 90, 99)}
    if arguments.json:
        print(json.dumps({"avg_latency": average, "latencies": times, "percentiles": percentiles}))
    else:
        print(f"Avg latency: {average:.4f} seconds")
        for percent, value in percentiles.items():
            print(f"{percent}% percentile latency: {value:.4f} seconds")
    return 0


def run_throughput(arguments: argparse.Namespace) -> int:
    """Run `pd bench throughput`."""
    check_numbers(arguments, "input_len", "output_len", "num_prompts")
    with _llm(arguments) as llm:
        [(seconds, made)] = _runs(llm, arguments, arguments.num_prompts, 1)
    total = made + arguments.num_prompts * arguments.input_len
    report = {
        "elapsed_time": seconds,
        "num_requests": arguments.num_prompts,
        "total_num_tokens": total,
        "requests_per_second": arguments.num_prompts / seconds,
        "tokens_per_second": total / seconds,
        "output_tokens_per_second": made / seconds,
    }
    if arguments.json:
        print(json.dumps(report))
    else:
        print(
            f"Throughput: {report['requests_per_second']:.2f} requests/s, {report['tokens_per_second']:.2f} total "
            f"tokens/s, {report['output_tokens_per_second']:.2f} output tokens/s"
        )
    return 0
