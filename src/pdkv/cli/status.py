"""`pd status` and `pd stop`: show how a running launch is doing, and stop it."""

import argparse
import os
import select
import signal
from typing import TYPE_CHECKING, Any

from pdkv.base.clock import MONOTONIC
from pdkv.cli.options import new_command
from pdkv.cli.running import add_launch, add_run_flag, ask_router, check_seconds, engine_state, find_launch, print_table
from pdkv.errors import StartupError
from pdkv.launch.run_dir import RunInfo, running_launches

if TYPE_CHECKING:
    from pdkv.launch.router_admin import RouterAdmin

_WAIT_S = 60.0
"""How long `pd stop` waits by default: twice as long as a launch gives its requests by default."""


def add_commands(commands: "argparse._SubParsersAction[Any]") -> None:
    """Add both commands to the `pd` parser."""
    summary = "show the requests, rates, queue and KV use of a running launch"
    status = new_command(commands, "status", run_status, summary)
    status.add_argument(
        "--interval-s",
        type=float,
        default=1.0,
        metavar="SECONDS",
        help="seconds over which rates are measured (default: 1)",
    )
    add_run_flag(status)
    add_launch(status)
    summary = "stop a running launch once its requests have finished"
    stop = new_command(commands, "stop", run_stop, summary, ", like Ctrl-C. Exit code 1: it is still running.")
    stop.add_argument(
        "--now", action="store_true", help="cut off requests that are still running, as a second Ctrl-C does"
    )
    stop.add_argument(
        "--wait-s", type=float, default=_WAIT_S, metavar="SECONDS", help="how long to wait at most (default: 60)"
    )
    add_run_flag(stop)
    add_launch(stop)


def run_status(arguments: argparse.Namespace) -> int:
    """Run `pd status`."""
    check_seconds("--interval-s", arguments.interval_s)
    launch = find_launch(arguments)

    async def read(router: "RouterAdmin") -> tuple[dict[str, float], dict[str, float], float, list[dict[str, Any]]]:
        before, start = await router.figures(), MONOTONIC.now()
        await MONOTONIC.pause(arguments.interval_s)
        after, seconds = await router.figures(), MONOTONIC.now() - start
        return before, after, seconds, await router.engines(fresh=True)

    before, after, seconds, engines = ask_router(arguments, read)

    def rate(*names: str) -> str:
        return f"{sum(after.get(name, 0.0) - before.get(name, 0.0) for name in names) / max(seconds, 1e-3):.1f}/s"

    print(f"{launch.url}  (pid {launch.pid}), started with {launch.shape}")
    running, queued = after["pdkv_requests_in_flight"], after["pdkv_queue_choices"]
    begun = rate("pdkv_generations_started_total")
    print(f"requests: {running:.0f} in flight, {queued:.0f} of their choices queued, {begun} begun")
    tokens = rate("pdkv_time_to_first_token_seconds_count", "pdkv_inter_token_seconds_count")
    print(f"tokens: {tokens} out, {rate('pdkv_prompt_tokens_total')} in prompts of finished requests")
    rows = [("NAME", "ROLE", "STATE", "RUNNING", "WAITING", "KV USED", "KV CACHED")]
    rows += [
        (e["name"], e["role"], engine_state(e), str(e["running"]), str(e["waiting"]), *_kv_use(e["blocks"]))
        for e in engines
    ]
    print_table(rows)
    return 0


def _kv_use(blocks: dict[str, int] | None) -> tuple[str, str]:
    """Shares of a pool held by requests and transfers, and by cached prefixes alone."""
    if not blocks or not blocks["total"]:
        return "-", "-"
    idle = blocks["free"] + blocks["cached"]
    return f"{1 - idle / blocks['total']:.0%}", f"{blocks['cached'] / blocks['total']:.0%}"


def run_stop(arguments: argparse.Namespace) -> int:
    """Run `pd stop`."""
    check_seconds("--wait-s", arguments.wait_s)
    launch = find_launch(arguments)
    try:
        ended = _end(launch, now=arguments.now, wait_s=arguments.wait_s)
    except ProcessLookupError:
        ended = True
    print(
        f"{launch.url} {'has stopped' if ended else f'is still running after {arguments.wait_s:g} s'} (pid "
        f"{launch.pid})"
    )
    return int(not ended)


def _end(launch: RunInfo, *, now: bool, wait_s: float) -> bool:
    """Whether the launcher ended within `wait_s` of a SIGTERM, or of two with `now`."""
    process = os.pidfd_open(launch.pid)
    try:
        if launch not in running_launches():  # its pid may belong to another process by now
            raise StartupError(f"the launch with pid {launch.pid} has just ended")
        for number in (signal.SIGTERM, signal.SIGINT)[: 1 + now]:  # two signals of one kind could be merged into one
            signal.pidfd_send_signal(process, number)
        poll = select.poll()
        poll.register(process, select.POLLIN)
        return bool(poll.poll(wait_s * 1000))
    finally:
        os.close(process)
