"""The part of the requests that will meet an objective, for a number of engines. Pure functions of measurements."""

import math
from typing import NamedTuple

HORIZON_S = 120.0
"""Seconds that are looked at, from when new engines could be there."""


LIGHT = 0.45
"""How much faster waits of equal prompts thin out at little load than the approximation for heavy load says."""


class Prompts(NamedTuple):
    """What prefill engines have to do."""

    queued: float  # tokens to compute
    rate: float  # further ones per second
    token_s: float  # seconds of a token on one engine; 0: not known
    own_s: float  # seconds of an average prompt on an idle engine
    variation: float = 1.0  # of prompts' lengths: their variance over the square of their mean


class Answers(NamedTuple):
    """What decode engines have to do."""

    requests: float  # at the same time
    fixed_s: float  # of a step
    request_s: float  # of a step, for each request
    most: float  # requests for which one engine has places and KV


def erlang_c(num: int, load: float) -> float:
    """The part of the arrivals that wait, where `num` servers have `load` < `num` of them to do on the average."""
    blocked = 1.0
    for i in range(1, num + 1):
        blocked = load * blocked / (i + load * blocked)  # Erlang's B of i servers
    return blocked / (1 - load / num * (1 - blocked)) if load < num else 1.0


def ttft(prompts: Prompts, num: int, present: int, slo_s: float, lead_s: float) -> float:
    """The part of the requests of HORIZON_S whose first token comes within `slo_s`, where `present` engines become
    `num` after `lead_s`: the time after the queue is short enough, times what a steady queue (M/G/num) attains.

    An objective that an idle engine misses counts as one that allows to wait for one prompt.
    """
    if not prompts.token_s or not prompts.own_s:
        return 1.0
    load = prompts.rate * prompts.token_s
    if load >= num:
        return 0.0
    wait_s = max(slo_s - prompts.own_s, prompts.own_s)
    lead_s = lead_s if num > present else 0.0
    queued = max(prompts.queued * prompts.token_s + (load - present) * lead_s, 0.0)  # seconds of one engine
    late_s = max(queued - wait_s * num, 0.0) / (num - load)
    spread, idle = prompts.variation, 1 - load / num
    decay = num * idle * 2 / (1 + spread) * max(1 + LIGHT * idle * (1 - spread), 1.0) / prompts.own_s
    return max(1 - late_s / HORIZON_S, 0.0) * (1 - erlang_c(num, load) * math.exp(-decay * wait_s))


def tpot(answers: Answers, num: int, slo_s: float) -> float:
    """The part of the engines whose requests, spread at random, are few enough for steps of `slo_s`.

    An objective that one request on an engine misses counts as one that allows what an engine holds.
    """
    most = answers.most
    if answers.request_s and slo_s > answers.fixed_s + answers.request_s:
        most = min(most, (slo_s - answers.fixed_s) / answers.request_s)
    mean = answers.requests / num
    if mean <= 0 or math.isinf(most):
        return 1.0
    return 0.5 * math.erfc((mean - most - 0.5) / math.sqrt(2 * mean))
