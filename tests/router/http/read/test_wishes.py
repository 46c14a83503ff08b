"""Headers that say how urgent a request is: what they ask for, who may, and what is refused."""

from pathlib import Path
from typing import Any

import pytest
from asgi_client import call
from coroutines import run
from fake_dispatcher import FakeDispatcher, say
from small_app import MODEL, ids, make_app
from starlette.datastructures import Headers

from pdkv.config import AdmissionConfig
from pdkv.errors import ConfigError, InvalidRequest
from pdkv.router.admission.admission_queue import Admission
from pdkv.router.admission.api_keys import KeyRing, make_key
from pdkv.router.admission.desk import Wishes
from pdkv.router.http.read.wishes import read_wishes

TTFT, TPOT, OBJECTIVE = "x-llm-d-slo-ttft-ms", "x-llm-d-slo-tpot-ms", "x-llm-d-inference-objective"
FAIRNESS = "x-llm-d-inference-fairness-id"
PRIORITIES = {"batch": 5, "urgent": -5}


def read(*headers: tuple[str, str]) -> Wishes:
    return read_wishes(Headers(raw=[(k.encode(), v.encode("latin-1")) for k, v in headers]), PRIORITIES)


@pytest.mark.parametrize(
    ("headers", "wishes"),
    [
        ([], Wishes()),
        ([(TTFT, "250"), (TPOT, "12.5")], Wishes(0.25, 0.0125)),
        ([("x-slo-ttft-ms", " 3600000 "), ("x-slo-tpot-ms", "0.001")], Wishes(3600.0, 1e-6)),
        ([(TTFT, "250"), ("x-slo-ttft-ms", "250")], Wishes(0.25)),
        ([(TTFT, ""), (OBJECTIVE, ""), (FAIRNESS, "")], Wishes(objective_header=OBJECTIVE)),
        ([(OBJECTIVE, "batch")], Wishes(priority=5, objective_header=OBJECTIVE)),
        ([("x-gateway-inference-fairness-id", "team-a")], Wishes(fairness_id="team-a")),
    ],
)
def test_what_headers_ask_for(headers: list[tuple[str, str]], wishes: Wishes) -> None:
    assert read(*headers) == wishes


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((TTFT, value) for value in ("0", "-1", "1000000000", "1e308", "nan", "inf", "1_000", "x", "²", "1" * 9000)),
        ("x-slo-tpot-ms", "0.0"),
        ("x-slo-tpot-ms", "3600000.1"),
        (OBJECTIVE, "unknown"),
        ("x-gateway-inference-objective", "x" * 5000),
        (FAIRNESS, "x" * 257),
        (FAIRNESS, "é"),
    ],
)
def test_a_bad_value_is_named_by_its_header(name: str, value: str) -> None:
    with pytest.raises(InvalidRequest, match=f"^{name}: ") as raised:
        read((name, value))
    assert raised.value.param == name
    assert len(str(raised.value)) < 500


def test_two_values_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="one value was expected, got 2"):
        read((TTFT, "250"), ("x-slo-ttft-ms", "300"))


@pytest.mark.parametrize("text", ["", "high", "1.5", "9" * 10])
def test_an_objective_has_a_priority(text: str) -> None:
    with pytest.raises(ConfigError, match="a priority of at most 9 digits was expected"):
        AdmissionConfig(objectives={"a": text})


@pytest.mark.parametrize(
    ("headers", "fields", "status", "param"),
    [
        ({OBJECTIVE: "batch"}, {}, 200, None),
        ({OBJECTIVE: "urgent"}, {}, 400, OBJECTIVE),
        ({OBJECTIVE: "batch"}, {"priority": 4}, 400, OBJECTIVE),
        ({TTFT: "NaN"}, {}, 400, TTFT),
        ({TTFT: "250", TPOT: "20"}, {}, 200, None),
    ],
)
def test_a_request_may_ask_for_what_its_key_may(
    headers: dict[str, str], fields: dict[str, Any], status: int, param: str | None, tmp_path: Path
) -> None:
    key, lines = make_key("a")
    file = tmp_path / "keys"
    file.write_text(lines)
    file.chmod(0o600)
    dispatcher: Any = FakeDispatcher(say(ids("ok")))
    admission = Admission(dispatcher, AdmissionConfig(objectives={k: str(v) for k, v in PRIORITIES.items()}))
    app = make_app(dispatcher, keys=KeyRing(file), admission=admission)
    body = {"model": MODEL, "prompt": "x", **fields}
    reply = run(call(app, "POST", "/v1/completions", body, headers | {"authorization": f"Bearer {key}"}))
    assert reply.status == status
    if status == 200:
        [request] = dispatcher.requests
        wishes = read(*headers.items())
        assert (request.slo_ttft_s, request.slo_tpot_s) == (wishes.slo_ttft_s, wishes.slo_tpot_s)
        assert request.priority == (wishes.priority or 0)
    else:
        assert reply.json()["error"]["param"] == param
        assert not dispatcher.requests
