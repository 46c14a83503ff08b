"""`pd bench`: puts load on any OpenAI server and reports what it does; measures offline engines; looks at data sets."""

import argparse
import itertools
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pdkv.base.limits import MAX_TOTAL_PROMPT_TOKENS
from pdkv.cli.bench_offline import add_offline
from pdkv.cli.options import check_numbers, new_command
from pdkv.cli.running import say
from pdkv.errors import ConfigError, StartupError

if TYPE_CHECKING:
    from pdkv.bench.datasets import Shape
    from pdkv.bench.report import Run, Sent
    from pdkv.bench.serve import Pace, Target
    from pdkv.bench.trace import Trace
    from pdkv.bench.workload import Session

DATASETS = ("random", "conversations", "agents", "sharegpt", "burstgpt", "mooncake", "custom", "trace")
PERCENTILES = "50,90,95,99"


def add_command(commands: "argparse._SubParsersAction[Any]") -> None:
    """Add `bench` and `replay` to the `pd` parser."""
    parser = new_command(commands, "bench", None, "measure servers and engines, and look at data sets")
    subcommands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    serve = new_command(
        subcommands, "serve", run_serve, "put load on any OpenAI server and print throughput and latencies"
    )
    add_target(serve)
    add_data(serve, num_prompts=1000)
    add_pace(serve)
    serve.add_argument("--trace", type=Path, metavar="FILE", help="send what a router has recorded, at its own times: "
        "--dataset-name trace --dataset-path FILE --trace-speed 1, and all of it")  # fmt: skip
    add_slo(serve)
    add_results(serve)
    sweep = new_command(subcommands, "sweep", run_sweep, "find the highest request rate at which a server meets an SLO")
    add_target(sweep)
    add_data(sweep, num_prompts=200)
    add_slo(sweep, required=True)
    add_results(sweep, requests=False)
    add = sweep.add_argument
    add("--begin-rate", type=float, default=1.0, metavar="RATE", help="first rate; it is doubled until the SLO breaks")
    add("--attainment", type=float, default=0.9, metavar="SHARE", help="requests that must be within the SLO")
    add("--refinements", type=int, default=3, metavar="N", help="bisections after the first break (default: 3)")
    add("--burstiness", type=float, default=1.0, metavar="SHAPE", help="as in `pd bench serve`")
    add("--plot", type=Path, metavar="FILE", help="draw latency over rate, and throughput over the speed that one user "
        "sees, as .png, .svg or .pdf (needs matplotlib: pdkv[plot])")  # fmt: skip
    prefix = new_command(
        subcommands, "prefix", run_prefix, "show how much of a data set repeats, as a prefix cache sees it"
    )
    add_data(prefix, num_prompts=None)
    add = prefix.add_argument
    add("--block-size", type=int, default=16, metavar="N", help="only whole blocks of N tokens count (default: 16)")
    add("--threshold", type=float, default=0.5, metavar="SHARE",
        help="a prompt repeats if at least this share of it was there before (default: 0.5)")  # fmt: skip
    add("--min-length", type=int, default=0, metavar="N", help="shorter repeats do not count (default: 0)")
    add("--json", action="store_true", help="print one JSON object instead of lines")
    add_offline(subcommands)
    replay = new_command(
        commands, "replay", run_replay, "send again what a router has recorded, and print both reports"
    )
    replay.add_argument("file", type=Path, metavar="FILE", help="what `pd launch --record-trace FILE` wrote")
    add_target(replay)
    add = replay.add_argument
    add("--speed", "--trace-speed", dest="trace_speed", type=float, default=1.0, metavar="FACTOR",
        help="so many times as fast: arrivals, and the pauses of conversations (default: 1)")  # fmt: skip
    add("--vocabulary", type=int, default=0, metavar="N", help="token ids are below N (default: 500)")
    add_slo(replay)
    add_results(replay)


def add_target(parser: argparse.ArgumentParser) -> None:
    """Add options that name the server."""
    add = parser.add_argument_group("server").add_argument
    add("url", nargs="?", metavar="URL", help="the server (default: http://127.0.0.1:8000)")
    add("--base-url", metavar="URL", help="the same as URL, under the option name of vLLM's benchmark")
    add("--model", metavar="NAME", help="its name in the API (default: the first that the server lists)")
    add("--endpoint", choices=("completions", "chat"), default="completions",
        help="completions: prompts are sent as token ids, so their lengths are exact; chat: prompts are sent as text "
        "(default: completions)")  # fmt: skip
    add("--header", action="append", default=[], metavar="NAME=VALUE", help="header of each request (repeatable); an "
        "API key is read from OPENAI_API_KEY")  # fmt: skip
    add("--extra-body", type=json.loads, default={}, metavar="JSON", help="further fields of each request's body")
    add("--no-ignore-eos", dest="ignore_eos", action="store_false", help="let the model end its answers")
    add("--tokenizer", type=Path, metavar="DIR", help="count the tokens of answers by this model's tokenizer, too")
    add("--timeout", type=float, default=600.0, metavar="SECONDS", help="time limit for each request (default: 600)")


def add_data(parser: argparse.ArgumentParser, *, num_prompts: int | None) -> None:
    """Add options of the data; `num_prompts`: their number's default."""
    add = parser.add_argument_group("data").add_argument
    add("--dataset-name", choices=DATASETS, help="random: prompts of given lengths; conversations: "
        "sessions of several turns; agents: sessions of coding agents (33 turns, 131 prompt tokens per answer token, "
        "94 percent of them seen before); else a file in that format (default: random)")  # fmt: skip
    add("--dataset-path", type=Path, metavar="FILE", help="the file of a data set")
    add(
        "--num-prompts",
        type=int,
        metavar="N",
        help=f"requests (default: {num_prompts or '1000, of a file all'}, of a trace all)",
    )
    parser.set_defaults(default_prompts=num_prompts)
    add("--input-len", "--random-input-len", type=int, default=1024, metavar="N",
        help="tokens per prompt or, in conversations, per turn (default: 1024)")  # fmt: skip
    add("--output-len", "--random-output-len", type=int, metavar="N",
        help="tokens per answer (default: the data set's, else 128)")  # fmt: skip
    add("--range-ratio", "--random-range-ratio", type=float, default=0.0, metavar="SHARE",
        help="draw each length uniformly from the given one ± this share of it (default: 0)")  # fmt: skip
    add("--prefix-len", "--random-prefix-len", type=int, default=0, metavar="N",
        help="tokens of a prefix that comes before each prompt (default: 0)")  # fmt: skip
    add("--num-prefixes", type=int, default=1, metavar="N", help="different prefixes (default: 1)")
    add("--turns", type=int, default=5, metavar="N", help="turns of a conversation (default: 5)")
    add("--pause", type=float, default=0.0, metavar="SECONDS", help="mean time between the turns of a session, for "
        "reading or for tools (default: 0)")  # fmt: skip
    add("--max-context", type=int, default=0, metavar="N", help="tokens to which an agent's session grows "
        "(default: 16384)")  # fmt: skip
    add("--vocabulary", type=int, default=0, metavar="N", help="random token ids are below N (default: 500)")
    add("--seed", type=int, default=0, metavar="N", help="equal seeds send equal prompts (default: 0)")


def add_pace(parser: argparse.ArgumentParser) -> None:
    """Add options of when requests begin."""
    add = parser.add_argument_group("pace").add_argument
    add("--request-rate", type=float, default=float("inf"), metavar="RATE",
        help="requests (or sessions) a second; inf: all at once (default: inf)")  # fmt: skip
    add("--burstiness", type=float, default=1.0, metavar="SHAPE", help="shape of the gamma distribution of the gaps: 1 "
        "is Poisson, less is burstier, inf is even (default: 1)")  # fmt: skip
    add("--trace-speed", type=float, default=0.0, metavar="FACTOR", help="replay the data set's arrival times, FACTOR "
        "times as fast")  # fmt: skip
    add("--max-concurrency", type=int, default=0, metavar="N", help="maximum number of concurrent sessions "
        "(default: no limit)")  # fmt: skip
    add("--num-warmups", type=int, default=1, metavar="N", help="warm-up requests, sent first and not counted "
        "(default: 1)")  # fmt: skip


def add_slo(parser: argparse.ArgumentParser, *, required: bool = False) -> None:
    """Add the bounds within which a request counts."""
    parser.add_argument("--goodput", nargs="+", default=[], required=required, metavar="METRIC:MS",
        help="count requests that are within these bounds in milliseconds: ttft, tpot, e2el, as in "
        "--goodput ttft:200 tpot:50")  # fmt: skip


def add_results(parser: argparse.ArgumentParser, *, requests: bool = True) -> None:
    """Add options of the report; `requests`: those of single requests, too."""
    add = parser.add_argument_group("results").add_argument
    add("--metric-percentiles", default=PERCENTILES, metavar="LIST", help=f"percentiles (default: {PERCENTILES})")
    add("--save-result", type=Path, metavar="FILE", help="write the report there as JSON")
    if requests:
        add("--save-requests", type=Path, metavar="FILE", help="write one JSON line per request there")
        add("--report-format", choices=("vllm", "llm-d"), default="vllm", help="fields of --save-result and --json: "
            "those of vLLM's benchmark, or llm-d's report, version 0.2 (default: vllm)")  # fmt: skip
    add("--json", action="store_true", help="print one JSON object instead of a table")
    add("--disable-tqdm", "--no-progress", dest="progress", action="store_false", help="show no progress bar on stderr")


# --- a server -------------------------------------------------------------------------------------------------------


def run_serve(arguments: argparse.Namespace) -> int:
    """Run `pd bench serve`. The exit code is 1 if a request failed."""
    take_trace(arguments)
    pace = read_pace(arguments)
    return _run_load(arguments, read_sessions(arguments, arguments.seed), pace)


def take_trace(arguments: argparse.Namespace) -> None:
    """Read --trace as the options that it stands for."""
    if arguments.trace is not None:
        for flag, other in (("name", arguments.dataset_name), ("path", arguments.dataset_path)):
            if other is not None:
                raise ConfigError(f"--trace {arguments.trace} is the data set: --dataset-{flag} {other} contradicts it")
        arguments.dataset_name, arguments.dataset_path = "trace", arguments.trace
        arguments.trace_speed = arguments.trace_speed or 1.0


def run_replay(arguments: argparse.Namespace) -> int:
    """Run `pd replay`. The exit code is 1 if a request failed."""
    from pdkv.bench.datasets import Maker, Shape, recorded_sessions
    from pdkv.bench.serve import Pace
    from pdkv.bench.trace import read_trace
    from pdkv.bench.workload import LAST_ID

    check_numbers(arguments, "trace_speed")
    check_numbers(arguments, "vocabulary", zero=True)
    trace = read_trace(arguments.file)
    if unread := sum(not request.prompt_tokens for request in trace.requests):
        say(f"{unread} requests had been refused before their prompts were read, and are not sent")
    shape = Shape(num_prompts=sys.maxsize, vocabulary=arguments.vocabulary or LAST_ID)
    make = Maker("replay", as_text=arguments.endpoint == "chat")
    sessions = recorded_sessions(trace, shape, make)
    if not sessions:
        raise ConfigError(f"{arguments.file}: no request with a prompt was found in it")
    arguments.dataset_name = "trace"
    return _run_load(arguments, sessions, Pace(speed=arguments.trace_speed), trace)


def _run_load(
    arguments: argparse.Namespace, sessions: "Sequence[Session]", pace: "Pace", trace: "Trace | None" = None
) -> int:
    """Check options, send the sessions, and report; beside it stands what is recorded in `trace`."""
    from pdkv.bench.replay import recorded_report
    from pdkv.bench.report import Slo, summarize
    from pdkv.config import ModelFiles
    from pdkv.host.sockets import raise_open_files_limit
    from pdkv.text import load_tokenizer

    percents, slo = read_percentiles(arguments.metric_percentiles), Slo.parse(arguments.goodput)
    check_folder(arguments.save_result, "--save-result")
    check_folder(arguments.save_requests, "--save-requests")
    tokenizer = None if arguments.tokenizer is None else load_tokenizer(ModelFiles(model=arguments.tokenizer))
    raise_open_files_limit()
    target = find_target(arguments)
    _warm_up(target, sessions, arguments)
    run = _measure(target, sessions, pace, progress=arguments.progress)
    rate = pace.rate if pace.rate < float("inf") else "inf"
    report = summarize(run, percents, slo) | {"b_sat": _saturation(target), "request_rate": rate}
    if tokenizer is not None:
        counts = [len(tokenizer.encode("".join(reply.text))) for reply in run.replies if reply.ok]
        report["total_output_tokens_retokenized"] = sum(counts)
    if trace is not None:
        report["recorded"] = recorded_report(trace, percents, slo)
    return report_run(run, report, pace, percents, arguments)


def report_run(
    run: "Run", report: dict[str, Any], pace: "Pace", percents: Sequence[float], arguments: argparse.Namespace
) -> int:
    """Print a report and save what is to be saved. Returns the exit code: 1 if a request failed."""
    from pdkv.bench.llm_d import llm_d_report
    from pdkv.bench.report import doubts, print_report, request_lines

    if not arguments.json:
        print_report(report, percents, sys.stdout)
    is_open_loop = (pace.rate < float("inf") or pace.speed > 0) and not pace.max_concurrency
    for text in doubts(report, is_open_loop=is_open_loop):
        say(f"WARNING {text}")
    is_llm_d = arguments.report_format == "llm-d"
    show_report(llm_d_report(run, report, pace, arguments.dataset_name) if is_llm_d else report, arguments)
    if arguments.save_requests:
        write_result(arguments.save_requests, request_lines(run), "--save-requests")
    return int(report["failed"] > 0)


def _saturation(target: "Target") -> float | None:
    from pdkv.bench.roofline import saturation

    try:
        return saturation(_get(target.url, "/topology", target.headers))
    except StartupError:
        return None


def run_sweep(arguments: argparse.Namespace) -> int:
    """Run `pd bench sweep`. The exit code is 1 if no rate meets the SLO."""
    from pdkv.bench import sweep
    from pdkv.bench.report import Slo, doubts, summarize
    from pdkv.bench.serve import Pace
    from pdkv.host.sockets import raise_open_files_limit

    percents, slo = read_percentiles(arguments.metric_percentiles), Slo.parse(arguments.goodput)
    if not 0 < arguments.attainment <= 1:
        raise ConfigError(f"--attainment: a share from 0 to 1 was expected, got {arguments.attainment:g}")
    check_numbers(arguments, "begin_rate", "burstiness")
    check_numbers(arguments, "refinements", zero=True)
    check_folder(arguments.save_result, "--save-result")
    drawing = None if arguments.plot is None else sweep.Plot(arguments.plot)
    raise_open_files_limit()
    sessions, target = read_sessions(arguments, arguments.seed), find_target(arguments)
    _warm_up(target, sessions, arguments)
    if arguments.dataset_name in ("sharegpt", "custom"):
        say("WARNING these prompts come again at each rate: a server with a prefix cache need not compute them")
    numbers = itertools.count()

    def measure(rate: float) -> Mapping[str, Any]:
        say(f"{rate:.3g} requests/s …")
        pace = Pace(rate=rate, burstiness=arguments.burstiness, seed=arguments.seed)
        own = read_sessions(
            arguments, f"{arguments.seed}/{next(numbers)}"
        )  # a cache has none of them from an earlier run
        report = summarize(_measure(target, own, pace, progress=arguments.progress), percents, slo)
        for text in doubts(report, is_open_loop=True):
            say(f"WARNING {text}")
        return report

    reports = sweep.find_rate(
        measure, begin=arguments.begin_rate, attainment=arguments.attainment, refinements=arguments.refinements
    )
    best = sweep.best_rate(reports, arguments.attainment)
    if not arguments.json:
        sweep.print_sweep(reports, arguments.attainment, sys.stdout)
    show_report({"best": best, "runs": reports}, arguments)
    if drawing is not None:
        drawing.save(reports)
    return int(best is None)


def find_target(arguments: argparse.Namespace) -> "Target":
    """The server that the options name. Raises ConfigError and StartupError."""
    from pdkv.bench.serve import Target

    url = arguments.url or arguments.base_url or "http://127.0.0.1:8000"
    check_numbers(arguments, "timeout")
    headers = {}
    if key := os.environ.get("OPENAI_API_KEY"):
        headers["authorization"] = f"Bearer {key}"
    for text in arguments.header:
        name, equals, value = text.partition("=")
        if not name or not equals or "\r" in text or "\n" in text:
            raise ConfigError(f"--header: NAME=VALUE was expected, got {text!r}")
        headers[name] = value
    if not isinstance(arguments.extra_body, dict):
        raise ConfigError(f"--extra-body: a JSON object was expected, got {json.dumps(arguments.extra_body)}")
    return Target(
        url,
        arguments.model or _first_model(url, headers),
        arguments.endpoint,
        headers,
        arguments.extra_body,
        ignore_eos=arguments.ignore_eos,
        timeout_s=arguments.timeout,
        keep_text=arguments.tokenizer is not None,
    )


def _first_model(url: str, headers: Mapping[str, str]) -> str:
    """The first model that the server lists. Raises ConfigError and StartupError."""
    from pdkv.bench.client import Client

    Client(url)  # refuses what is no URL of a server
    try:
        return str(_models(url, headers)[0]["id"])
    except (LookupError, TypeError):
        raise StartupError(f"{url} lists no model: name one with --model") from None


def longest_of(target: "Target") -> int | None:
    """The tokens that a sequence of the model may have, as vLLM and pdkv list it; None: the server does not say.

    Raises StartupError.
    """
    lengths = [
        card.get("max_model_len")
        for card in _models(target.url, target.headers)
        if isinstance(card, dict) and card.get("id") == target.model
    ]
    return next((length for length in lengths if isinstance(length, int) and length > 0), None)


def _models(url: str, headers: Mapping[str, str]) -> Sequence[Any]:
    """What the server lists; nothing where that is no list of models. Raises StartupError."""
    try:
        found = json.loads(_get(url, "/v1/models", headers))["data"]
    except (ValueError, LookupError, TypeError):
        return ()
    return found if isinstance(found, list) else ()


def _get(url: str, path: str, headers: Mapping[str, str]) -> bytes:
    """What the server says at a path. Raises StartupError."""
    import http.client
    import urllib.request

    where = url.rstrip("/").removesuffix("/v1") + path
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # as the load goes
    try:
        request = urllib.request.Request(where)
        for header in headers.items():
            request.add_unredirected_header(*header)  # which may be a key, for this server alone
        with opener.open(request, timeout=30) as response:
            return bytes(response.read(16 << 20))
    except (OSError, http.client.HTTPException) as error:
        raise StartupError(f"{where}: {error}") from None


def _warm_up(target: "Target", sessions: "Sequence[Session]", arguments: argparse.Namespace) -> None:
    """Send some requests that do not count, as long as the first one, of prompts that do not come again.

    Raises:
        StartupError: one failed.
    """
    from pdkv.bench.datasets import Maker
    from pdkv.bench.serve import Pace
    from pdkv.bench.workload import LAST_ID, one_turn, units

    first = sessions[0].turns[0].prompt
    make = Maker("warm-up", as_text=isinstance(first, str), vocabulary=arguments.vocabulary or LAST_ID)
    firsts = [one_turn(make.prompt(len(units(first))), 2) for _ in range(getattr(arguments, "num_warmups", 1))]
    if not firsts:
        return
    run = _measure(target, firsts, Pace(max_concurrency=1), progress=False)
    if failed := [sent.reply.error for sent in run.requests if not sent.reply.ok]:
        raise StartupError(f"{target.url}: the first request failed: {failed[0]}")


def _measure(target: "Target", sessions: "Sequence[Session]", pace: "Pace", *, progress: bool) -> "Run":
    from tqdm import tqdm

    from pdkv.bench.serve import run_loop, send

    total = sum(len(session.turns) for session in sessions)
    with tqdm(total=total, unit="req", disable=not (progress and sys.stderr.isatty()), file=sys.stderr) as bar:

        def show(_: "Sent") -> None:
            bar.update()

        return run_loop(send(target, sessions, pace, show))


def show_report(report: Mapping[str, Any], arguments: argparse.Namespace) -> None:
    """Print a report, and write it where the options say."""
    import msgspec

    line = msgspec.json.encode(report)
    if arguments.save_result:
        write_result(arguments.save_result, msgspec.json.format(line, indent=2) + b"\n", "--save-result")
    if arguments.json:
        print(line.decode())


def check_folder(path: Path | None, flag: str) -> None:
    """Raise ConfigError before anything is measured: a result could not be written there."""
    if path is not None and not path.parent.is_dir():
        raise ConfigError(f"{flag}: there is no folder {path.parent}")


def write_result(path: Path, data: bytes, flag: str) -> None:
    """Write a file. Raises ConfigError that names its option, `flag`."""
    try:
        path.write_bytes(data)
    except OSError as error:
        raise ConfigError(f"{flag}: {path}: {error.strerror}") from error


# --- data sets ------------------------------------------------------------------------------------------------------


def read_sessions(arguments: argparse.Namespace, seed: int | str) -> "Sequence[Session]":
    """The sessions of the data set that the options name. Raises ConfigError."""
    from pdkv.bench.datasets import FILES, Maker, load

    arguments.dataset_name = arguments.dataset_name or "random"
    if arguments.dataset_path is not None and arguments.dataset_name not in FILES:
        raise ConfigError(
            f"--dataset-path: {arguments.dataset_name} reads no file; --dataset-name {', '.join(FILES)} do"
        )
    shape = _shape(arguments)
    as_text = getattr(arguments, "endpoint", "completions") == "chat"
    make = Maker(seed, as_text=as_text, vocabulary=shape.vocabulary)
    return load(arguments.dataset_name, arguments.dataset_path, shape, make)


def _shape(arguments: argparse.Namespace) -> "Shape":
    from pdkv.bench.datasets import Shape
    from pdkv.bench.workload import LAST_ID

    if arguments.num_prompts is None:
        takes_all = arguments.dataset_path and (not arguments.default_prompts or arguments.dataset_name == "trace")
        arguments.num_prompts = sys.maxsize if takes_all else arguments.default_prompts or 1000
    check_numbers(arguments, "num_prompts", "input_len", "num_prefixes", "turns")
    check_numbers(arguments, "prefix_len", "pause", "max_context", "vocabulary", zero=True)
    if not 0 <= arguments.range_ratio < 1:
        raise ConfigError(f"--range-ratio: a share from 0 to below 1 was expected, got {arguments.range_ratio:g}")
    if arguments.output_len is not None:
        check_numbers(arguments, "output_len")
    for name in ("input_len", "output_len", "prefix_len"):
        length = getattr(arguments, name) or 0
        if length > MAX_TOTAL_PROMPT_TOKENS:
            flag = f"--{name.replace('_', '-')}"
            raise ConfigError(f"{flag}: at most {MAX_TOTAL_PROMPT_TOKENS} tokens were expected, got {length}")
    same = "num_prompts", "input_len", "range_ratio", "prefix_len", "num_prefixes", "turns", "max_context"
    return Shape(
        **{name: getattr(arguments, name) for name in same},
        output_len=arguments.output_len or 0,
        pause_s=arguments.pause,
        vocabulary=arguments.vocabulary or LAST_ID,
    )


def run_prefix(arguments: argparse.Namespace) -> int:
    """Run `pd bench prefix`."""
    from pdkv.bench.prefix import print_repeats, repeats

    check_numbers(arguments, "block_size")
    check_numbers(arguments, "min_length", zero=True)
    if not 0 <= arguments.threshold <= 1:
        raise ConfigError(f"--threshold: a share from 0 to 1 was expected, got {arguments.threshold:g}")
    sessions = read_sessions(arguments, arguments.seed)
    found = repeats(
        sessions, block=arguments.block_size, threshold=arguments.threshold, min_length=arguments.min_length
    )
    if arguments.json:
        print(json.dumps(found))
    else:
        unit = "words" if isinstance(sessions[0].turns[0].prompt, str) else "tokens"
        print_repeats(found, unit, sys.stdout)
    return 0


# --- shared ---------------------------------------------------------------------------------------------------------


def read_percentiles(text: str) -> list[float]:
    """Percentiles from a text such as "50,99". Raises ConfigError."""
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        found = [-1.0]
    if not all(0 < percent < 100 for percent in found):
        raise ConfigError(f"--metric-percentiles: numbers between 0 and 100 such as 50,99 were expected, got {text!r}")
    return sorted({*found, 99.0})


def read_pace(arguments: argparse.Namespace) -> "Pace":
    """When requests begin. Raises ConfigError."""
    from pdkv.bench.serve import Pace

    if not arguments.request_rate > 0:
        raise ConfigError(f"--request-rate: a number above 0, or inf, was expected, got {arguments.request_rate:g}")
    if not arguments.burstiness > 0:
        raise ConfigError(f"--burstiness: a number above 0, or inf, was expected, got {arguments.burstiness:g}")
    check_numbers(arguments, "trace_speed", "max_concurrency", "num_warmups", zero=True)
    if arguments.trace_speed and arguments.request_rate < float("inf"):
        raise ConfigError(
            "--trace-speed follows the data set's own times, as --trace does: no --request-rate was expected"
        )
    return Pace(
        arguments.request_rate, arguments.burstiness, arguments.trace_speed, arguments.max_concurrency, arguments.seed
    )
