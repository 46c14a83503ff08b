"""`pd simulate` and `pd plan`: a deployment on a virtual clock, and the one that a load needs."""

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pdkv.cli.bench import (
    add_data,
    add_pace,
    add_results,
    add_slo,
    check_folder,
    read_pace,
    read_percentiles,
    read_sessions,
    report_run,
    show_report,
    take_trace,
)
from pdkv.cli.options import check_numbers, new_command
from pdkv.errors import ConfigError

if TYPE_CHECKING:
    from pdkv.config import AutoscaleConfig
    from pdkv.simulate.deployment import Failure
    from pdkv.simulate.engine import EngineOptions
    from pdkv.simulate.load import Load


def add_commands(commands: "argparse._SubParsersAction[Any]") -> None:
    """Add `simulate` and `plan` to the `pd` parser."""
    summary = "run a load through a deployment's router and schedulers on a virtual clock, and report as `pd bench`"
    simulate = new_command(commands, "simulate", run_simulate, summary)
    add = simulate.add_argument_group("deployment").add_argument
    add("--prefill", type=int, default=1, metavar="N", help="prefill engines; 0: engines that do both (default: 1)")
    add("--decode", type=int, default=1, metavar="N", help="decode engines, or engines that do both (default: 1)")
    add("--policy", default="prefix_aware", metavar="NAME", help="routing policy (default: prefix_aware)")
    add("--order", choices=("auto", "prefill_first", "decode_first"), default="auto", help="decode_first: a decode "
        "engine that lacks few tokens of a prompt computes them itself (default: auto)")  # fmt: skip
    add("--kill", action="append", default=[], metavar="NAME@AT[+BACK]", help="kill an engine at this second; it comes "
        "back after BACK seconds (repeatable)")  # fmt: skip
    add("--stop", action="append", default=[], metavar="NAME@AT[+BACK]", help="have an engine's process stand still "
        "from this second on, for BACK seconds (repeatable)")  # fmt: skip
    add("--slow", action="append", default=[], metavar="NAME@AT[+BACK]xTIMES", help="have its steps take so many times "
        "longer from this second on, for BACK seconds (repeatable)")  # fmt: skip
    add("--autoscale", nargs="+", default=[], metavar="ROLE=MIN..MAX", help="let the "
        "autoscaler choose the numbers of engines from then on, within these, so as to meet --goodput")  # fmt: skip
    add("--scale-down-after", type=float, default=120.0, metavar="SECONDS", help="for so long an engine must not have "
        "been needed before it is taken away (default: 120)")  # fmt: skip
    add("--start", type=float, default=20.0, metavar="SECONDS", help="that the start of an engine takes (default: 20)")
    _add_engine(simulate)
    _add_trace(simulate)
    add_data(simulate, num_prompts=1000)
    add_pace(simulate)
    add_slo(simulate)
    add_results(simulate)

    summary = "recommend how to divide engines into prefill and decode for a load, or not to"
    plan = new_command(commands, "plan", run_plan, summary)
    add = plan.add_argument_group("question").add_argument
    add("--engines", type=int, required=True, metavar="N", help="engines, all of one kind")
    add("--slo-ttft-ms", required=True, metavar="MS", help="time to first token that a request may take: 500, 500ms or "
        "0.5s")  # fmt: skip
    add("--slo-tpot-ms", required=True, metavar="MS", help="time that each further token may take: 50, 50ms or 0.05s")
    add("--rate", type=float, metavar="RATE", help="requests (or sessions) a second (default: the trace's own)")
    add(
        "--attainment",
        type=float,
        default=0.9,
        metavar="SHARE",
        help="requests that must be within both (default: 0.9)",
    )
    _add_engine(plan)
    _add_trace(plan)
    add_data(plan, num_prompts=1000)
    add_results(plan, requests=False)


def _add_engine(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("engines").add_argument
    add("--profile", default="h100", metavar="NAME", help="their curves: a name, or a file of `pd profile` (default: "
        "h100)")  # fmt: skip
    add("--kv-tokens", type=int, default=0, metavar="N", help="tokens that a pool holds (default: the profile's)")
    add("--kv-host-tokens", type=int, default=0, metavar="N", help="tokens that each engine's host memory holds "
        "(default: none)")  # fmt: skip
    add("--push", action="store_true", help="prefill engines write each hand-off into the decode engine's pool while "
        "they compute it (default: decode engines read it)")  # fmt: skip
    add("--block-size", type=int, default=16, metavar="N", help="tokens per KV block (default: 16)")
    add("--max-num-seqs", type=int, default=256, metavar="N", help="requests in one step (default: 256)")
    add("--max-num-batched-tokens", type=int, default=2048, metavar="N", help="tokens in one step (default: 2048)")
    add("--hop", type=float, default=0.0003, metavar="SECONDS", help="that a message between two processes takes "
        "(default: 0.0003)")  # fmt: skip


def _add_trace(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--trace", type=Path, metavar="FILE", help="what a router has recorded, at its own times")


def run_simulate(arguments: argparse.Namespace) -> int:
    """Run `pd simulate`. The exit code is 1 if a request failed."""
    from pdkv.bench.report import Slo
    from pdkv.simulate.deployment import Topology
    from pdkv.simulate.load import simulate

    percents, slo = read_percentiles(arguments.metric_percentiles), Slo.parse(arguments.goodput)
    check_folder(arguments.save_result, "--save-result")
    check_folder(arguments.save_requests, "--save-requests")
    check_numbers(arguments, "decode")
    check_numbers(arguments, "prefill", zero=True)
    orders: dict[str, Any] = {} if arguments.order == "auto" else {"orders": [arguments.order]}
    topology = Topology(
        _engine(arguments), arguments.prefill, arguments.decode, arguments.policy,
        failures=[_failure(kind, text) for kind in ("kill", "stop", "slow") for text in getattr(arguments, kind)],
        **orders,
        autoscale=_autoscale(arguments, slo.bounds), start_s=arguments.start,
    )  # fmt: skip
    load = _load(arguments)
    run, report = simulate(topology, load, percents, slo, seed=arguments.seed)
    rate = load.pace.rate if load.pace.rate < float("inf") else "inf"
    return report_run(run, report | {"request_rate": rate}, load.pace, percents, arguments)


def run_plan(arguments: argparse.Namespace) -> int:
    """Run `pd plan`. The exit code is 1 if no division of the engines serves the load within the SLO."""
    from pdkv.simulate.plan import Question, plan, print_plan

    check_folder(arguments.save_result, "--save-result")
    check_numbers(arguments, "engines")
    ttft_s, tpot_s = (_slo_s(arguments, name) for name in ("slo_ttft_ms", "slo_tpot_ms"))
    if not 0 < arguments.attainment <= 1:
        raise ConfigError(f"--attainment: a share from 0 to 1 was expected, got {arguments.attainment:g}")
    if arguments.rate is not None:
        check_numbers(arguments, "rate")
    elif arguments.trace is None:
        raise ConfigError("--rate: requests a second were expected, since only a --trace has times of its own")
    arguments.request_rate, arguments.trace_speed = float("inf"), 0.0
    arguments.burstiness, arguments.max_concurrency, arguments.num_warmups = 1.0, 0, 0
    load = _load(arguments)
    load = load if arguments.rate is None else load.at_rate(arguments.rate)
    if load.rate == float("inf"):
        raise ConfigError("--rate: requests a second were expected, since all of the trace begin at once")
    question = Question(load, arguments.engines, _engine(arguments), ttft_s, tpot_s, arguments.attainment)
    answer = plan(question)
    if not arguments.json:
        print_plan(question, answer, sys.stdout)
    show_report(answer.describe(), arguments)
    return int(answer.best.rate < load.rate)


def _slo_s(arguments: argparse.Namespace, name: str) -> float:
    """The seconds of an objective, which a launch's autoscaler would read in the same way."""
    from pdkv.base.options import options_of
    from pdkv.config import AutoscaleConfig

    try:
        return float(options_of(AutoscaleConfig)[name].convert(getattr(arguments, name))) / 1e3
    except ConfigError as error:
        raise ConfigError(f"--{name.replace('_', '-')}: {error}") from None


def _autoscale(arguments: argparse.Namespace, slo: Mapping[str, float]) -> "AutoscaleConfig | None":
    from pdkv.config import AutoscaleConfig

    if not arguments.autoscale:
        return None
    if not {"ttft", "tpot"} <= slo.keys():
        raise ConfigError("--autoscale: --goodput with ttft and tpot was expected, as in ttft:1000 tpot:50")
    check_numbers(arguments, "start", zero=True)
    texts = tuple(text for given in arguments.autoscale for text in given.split(","))
    config = AutoscaleConfig(
        autoscale=texts, slo_ttft_ms=slo["ttft"], slo_tpot_ms=slo["tpot"],
        scale_down_after_s=arguments.scale_down_after,
    )  # fmt: skip
    config.check(arguments.prefill, arguments.decode)
    return config


def _engine(arguments: argparse.Namespace) -> "EngineOptions":
    from pdkv.config import PACED
    from pdkv.simulate.engine import EngineOptions
    from pdkv.testing.paced import read_profile

    check_numbers(arguments, "block_size", "max_num_seqs", "max_num_batched_tokens")
    check_numbers(arguments, "kv_tokens", "kv_host_tokens", "hop", zero=True)
    if arguments.block_size % 16:
        raise ConfigError(f"--block-size: a multiple of 16 was expected, got {arguments.block_size}")
    if 0 < arguments.kv_host_tokens < 64:
        raise ConfigError(f"--kv-host-tokens: 0, or 64 and more, was expected, got {arguments.kv_host_tokens}")
    if arguments.max_num_batched_tokens < arguments.max_num_seqs:
        raise ConfigError(
            f"--max-num-batched-tokens: at least --max-num-seqs, {arguments.max_num_seqs}, was expected, got "
            f"{arguments.max_num_batched_tokens}"
        )
    return EngineOptions(
        read_profile(Path(PACED + arguments.profile)), arguments.kv_tokens, arguments.block_size,
        arguments.max_num_seqs, arguments.max_num_batched_tokens, hop_s=arguments.hop, push=arguments.push,
        host_tokens=arguments.kv_host_tokens,
    )  # fmt: skip


def _load(arguments: argparse.Namespace) -> "Load":
    from pdkv.simulate.load import Load, as_tokens

    take_trace(arguments)
    pace = read_pace(arguments)
    return Load(as_tokens(read_sessions(arguments, arguments.seed)), pace)


def _failure(kind: str, text: str) -> "Failure":
    from pdkv.simulate.deployment import Failure

    name, _, rest = text.partition("@")
    rest, slows, slowness = rest.partition("x")
    at, _, back = rest.partition("+")
    try:
        found = Failure(name, float(at), float(back or 0), kind, float(slowness) if slows else 1.0)
    except ValueError:
        found = Failure(name, -1.0)
    given = (found.at_s, found.back_s, found.slowness - 1.0)
    if not all(0 <= value < float("inf") for value in given) or bool(slows) != (kind == "slow"):
        times = "xTIMES" if kind == "slow" else ""
        raise ConfigError(
            f"--{kind} {text}: NAME@AT{times} or NAME@AT+BACK{times} with seconds was expected, as in "
            f"decode-0@5+2{times and 'x10'}"
        )
    return found
