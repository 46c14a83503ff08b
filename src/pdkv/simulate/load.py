"""Loads of a simulation: the data sets of `pd bench`, or a recorded trace."""

from collections.abc import Sequence
from typing import Any, NamedTuple
from zlib import crc32

from msgspec.structs import replace

from pdkv.bench.report import Run, Slo, summarize
from pdkv.bench.serve import Pace
from pdkv.bench.workload import FIRST_ID, LAST_ID, Prompt, Session
from pdkv.errors import ConfigError
from pdkv.simulate.deployment import Simulation, Topology

MAX_SECONDS = 1e6
"""Simulated seconds: the router looks after its engines ten times in each, which takes an hour of this machine's."""


class Load(NamedTuple):
    """Sessions, and when they begin."""

    sessions: Sequence[Session]
    pace: Pace

    @property
    def rate(self) -> float:
        """Sessions a second; infinite if all begin at once."""
        if not self.pace.speed:
            return self.pace.rate
        times = [session.at_s or 0.0 for session in self.sessions]
        seconds = (times[-1] - times[0]) / self.pace.speed
        return (len(times) - 1) / seconds if seconds > 0 else float("inf")

    def at_rate(self, rate: float) -> "Load":
        """The same sessions at another rate; those of a trace keep its pattern, if it has one."""
        if not self.pace.speed or self.rate == float("inf"):
            return self._replace(pace=self.pace._replace(rate=rate, speed=0.0))
        return self._replace(pace=self.pace._replace(speed=self.pace.speed * rate / self.rate))


def as_tokens(sessions: Sequence[Session]) -> list[Session]:
    """The same sessions with token ids: each word of a text is a token, equal words are equal ones."""

    def of(prompt: Prompt) -> list[int]:
        if isinstance(prompt, list):
            return prompt
        return [FIRST_ID + crc32(word.encode()) % (LAST_ID - FIRST_ID) for word in prompt.split()] or [FIRST_ID]

    return [replace(s, turns=[replace(turn, prompt=of(turn.prompt)) for turn in s.turns]) for s in sessions]


def _longest(session: Session) -> int:
    """Tokens of its longest request with the answer."""
    most = num_tokens = 0
    for turn in session.turns:
        num_tokens = (0 if turn.is_whole else num_tokens) + len(turn.prompt) + turn.max_tokens
        most = max(most, num_tokens)
    return most


def simulate(
    topology: Topology, load: Load, percents: Sequence[float], slo: Slo, *, seed: int = 0
) -> tuple[Run, dict[str, Any]]:
    """Run a load; returns the run and the report of `pd bench serve` on it.

    Raises:
        ConfigError: an engine or policy is unknown, or the engines cannot take the longest request.
    """
    if (seconds := len(load.sessions) / load.rate) > MAX_SECONDS:
        raise ConfigError(f"a load of {seconds:.3g} s, at {load.rate:.3g} sessions/s: at most {MAX_SECONDS:g} s")
    longest = max(map(_longest, load.sessions))
    if longest > topology.engine.max_model_len:
        raise ConfigError(
            f"a request of {longest} tokens: the engines take at most {topology.engine.max_model_len} (the profile's "
            "max_model_len, or all that --kv-tokens hold)"
        )
    simulation = Simulation(topology, seed=seed)
    run = simulation.run(load.sessions, load.pace)
    scaled = {} if simulation.launch is None else {"scaling": simulation.launch.describe()}
    return run, summarize(run, percents, slo) | scaled
