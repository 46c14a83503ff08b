"""Headers by which a client, or a gateway in front of it, says how urgent a request is: llm-d's, and their aliases."""

import re
from collections.abc import Mapping

from starlette.datastructures import Headers

from pdkv.base.limits import clip
from pdkv.errors import InvalidRequest
from pdkv.router.admission.desk import Wishes
from pdkv.router.engines.foreign_kinds import HOPS

MAX_SLO_MS = 3_600_000
"""The longest time that may be asked for."""

EXPLAIN = "x-pd-explain"
"""A header of an admin, whose answer says why its engines were chosen."""

_MILLISECONDS = re.compile(r"[0-9]{1,7}(\.[0-9]{1,6})?")
_MAX_ID = 256


def read_wishes(headers: Headers, objectives: Mapping[str, int]) -> Wishes:
    """What the headers ask for; `objectives`: their priorities. Raises InvalidRequest, which names the header."""
    objective_header, objective = _find(headers, "x-llm-d-inference-objective", "x-gateway-inference-objective")
    if objective and objective not in objectives:
        known = ", ".join(sorted(objectives)) or "none is configured (--objectives)"
        raise _wrong(objective_header, f"a known objective was expected ({known})", objective)
    name, fairness_id = _find(headers, "x-llm-d-inference-fairness-id", "x-gateway-inference-fairness-id")
    if len(fairness_id) > _MAX_ID or not fairness_id.isascii():
        raise _wrong(name, f"at most {_MAX_ID} ASCII characters were expected", fairness_id)
    return Wishes(
        _seconds(*_find(headers, "x-llm-d-slo-ttft-ms", "x-slo-ttft-ms")),
        _seconds(*_find(headers, "x-llm-d-slo-tpot-ms", "x-slo-tpot-ms")),
        objectives.get(objective) if objective else None,
        objective_header,
        fairness_id,
        _is_true(*_find(headers, EXPLAIN)),
        _number(*_find(headers, HOPS)),
    )


def _find(headers: Headers, *names: str) -> tuple[str, str]:
    """The first of these headers that is there, and its value; ("", "") if none is. Raises if two values differ."""
    found = [(name, value.strip()) for name in names for value in headers.getlist(name)]
    if len({value for _, value in found}) > 1:
        raise InvalidRequest(f"{found[0][0]}: one value was expected, got {len(found)}", param=found[0][0])
    return found[0] if found else ("", "")


def _is_true(name: str, text: str) -> bool:
    if text not in ("", "true", "false"):
        raise _wrong(name, "true or false was expected", text)
    return text == "true"


def _number(name: str, text: str) -> int:
    if not re.fullmatch("[0-9]{0,3}", text):
        raise _wrong(name, "a number below 1000 was expected", text)
    return int(text or 0)


def _seconds(name: str, text: str) -> float:
    if not text:
        return 0.0
    value = float(text) if _MILLISECONDS.fullmatch(text) else 0.0
    if not 0.0 < value <= MAX_SLO_MS:
        raise _wrong(name, f"milliseconds above 0 and at most {MAX_SLO_MS} were expected", text)
    return value / 1e3


def _wrong(name: str, expected: str, got: str) -> InvalidRequest:
    return InvalidRequest(f"{name}: {expected}, got {clip(got)!r}", param=name)
