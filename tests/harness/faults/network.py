"""`python -m faults.network`: a bad network between two hosts under load, and what its requests came to (`make chaos`).

The router and a prefill engine are on one host, the decode engine is on the other (`hosts`); KV travels by p2p.
"""

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from deployments import Running, write_tokenizer
from hosts import Hosts, Wire
from hosts.deployment import deployed_between
from hosts.machine import two_hosts
from small_models import make_hf_model
from traffic import BOUND_S, wait_for_rest, wait_until_true

from faults.inject import Strike
from faults.load import load_on, right_answers
from faults.report import HEADER, row
from faults.run import Outcome, count, counters_of, is_well

P2P = ("--connector", "p2p", "--connector-config", "host={host}", "timeout_s=5")


class Trouble(NamedTuple):
    """What is wrong with the network, between whom, and for how long."""

    kind: str
    place: str
    seconds: float
    begin: Callable[[Wire], None]

    @property
    def name(self) -> str:
        """With how long it lasts."""
        return f"{self.kind}, {self.seconds:.0f} s" if self.seconds else self.kind


def _part(what: str) -> Callable[[Wire], None]:
    return lambda wire: wire.lose(what)


PARTED = {"router, decode": "control", "prefill, decode": "kv", "the hosts": "all"}

TROUBLES = (
    *(Trouble("partition", place, s, _part(what)) for place, what in PARTED.items() for s in (1.0, 10.0, 60.0)),
    Trouble("cut", "the hosts", 0.0, lambda wire: wire.cut()),
    Trouble("delay of 100 ms", "the hosts", 10.0, lambda wire: wire.delay(0.1)),
    Trouble("loss of 5 %", "the hosts", 10.0, lambda wire: wire.lose(share=0.05)),
    Trouble("1 MB/s", "the hosts", 10.0, lambda wire: wire.limit(1e6)),
)


async def run_trouble(
    launch: Running, wire: Wire, trouble: Trouble, expected: Sequence[list[int]], num: int, rate: float
) -> Outcome:
    """Send the load: a third of it before the trouble, and a third behind."""
    outcome = Outcome(backend="p2p", kind=trouble.name, place=trouble.place, rate=rate, stop_s=trouble.seconds)
    strike, over = Strike(), asyncio.Event()

    async def strike_it() -> None:
        strike.num_there = sum(sent.answer is None for sent in load.sent)
        await asyncio.to_thread(trouble.begin, wire)
        await asyncio.sleep(trouble.seconds)
        for undo in (wire.mend, lambda: wire.delay(0.0), lambda: wire.limit(None)):
            await asyncio.to_thread(undo)
        over.set()

    async with load_on(launch, f"network-{trouble.kind}-{trouble.seconds}".replace(" ", "_"), rate) as load:
        load.client.timeout = load.bound_s = (
            BOUND_S + trouble.seconds
        )  # what waits for the network's return does not hang
        await load.run(num // 3)
        striking = asyncio.create_task(strike_it())
        await load.run(0, until=over)
        await load.run(max(num // 3, num - len(load.sent)))
        await load.finish()
        await striking
    count(load, strike, expected, outcome)
    return outcome


def run_on(hosts: Hosts, model: Path, troubles: Sequence[Trouble], num: int, rate: float) -> list[Outcome]:
    """One deployment, one trouble after the other; behind each, all leases are over and all blocks are back."""
    outcomes = []
    with deployed_between(hosts, model, connector=P2P) as (launch, _):
        expected = asyncio.run(right_answers(launch))
        for trouble in troubles:
            before = counters_of(launch)
            outcome = asyncio.run(run_trouble(launch, hosts.wire, trouble, expected, num, rate))
            wait_until_true(lambda: is_well(launch), "all engines are back", 30.0)
            wait_for_rest(launch)
            after = counters_of(launch)
            outcome.counters = {name: max(0, after[name] - before[name]) for name in after}
            print(row(outcome), *outcome.errors[:3], sep="\n  ", flush=True)
            outcomes.append(outcome)
    return outcomes


def main() -> int:
    """Run it; the exit status is 1 where a request was lost."""
    parser = argparse.ArgumentParser(prog="faults.network", description=__doc__)
    parser.add_argument("--kinds", nargs="*", default=[], help="absent: all")
    parser.add_argument("--seconds", type=float, nargs="*", default=[], help="how long troubles last; absent: all")
    parser.add_argument("--requests", type=int, default=60, help="per trouble, at least")
    parser.add_argument("--rate", type=float, default=5.0, help="requests a second")
    options = parser.parse_args()
    troubles = [each for each in TROUBLES if not options.kinds or each.kind in options.kinds]
    troubles = [each for each in troubles if not options.seconds or each.seconds in options.seconds]
    print("\n".join(HEADER), flush=True)
    with tempfile.TemporaryDirectory(prefix="faults-model-") as directory, two_hosts() as hosts:
        model = make_hf_model(Path(directory) / "served", "llama", "float32")
        write_tokenizer(model)
        outcomes = run_on(hosts, model, troubles, options.requests, options.rate)
    lost = sum(outcome.lost for outcome in outcomes)
    print(f"{sum(outcome.requests for outcome in outcomes)} requests, {lost} lost")
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main())
