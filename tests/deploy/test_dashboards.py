"""The Grafana dashboard and the alert rules: they name metrics that exist, and each alert fires when it should."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from asgi_client import call
from fake_dispatcher import FakeDispatcher
from prometheus_client.parser import text_string_to_metric_families
from small_app import make_app

from pdkv.router.metrics.loop_watchdog import LoopWatchdog

DEPLOY = Path(__file__).parents[2] / "deploy"
ALERTS = DEPLOY / "prometheus" / "alerts.yml"
DASHBOARD = DEPLOY / "grafana" / "pdkv.json"
NAME = re.compile(r"\b(?:pdkv_|process_|vllm:)\w+")

OF_DECODE = 'job="pdkv",engine="decode-0",role="decode"'
WELL = {
    'up{job="pdkv"}': "1x60",
    'pdkv_engine_up{job="pdkv",engine="prefill-0",role="prefill"}': "1x60",
    f"pdkv_engine_up{{{OF_DECODE}}}": "1x60",
    'pdkv_engine_up{job="pdkv",engine="decode-1",role="decode"}': "1x60",
    'pdkv_requests_total{job="pdkv",endpoint="completions",outcome="ok"}': "0+60x60",
    'pdkv_requests_total{job="pdkv",endpoint="completions",outcome="engine_died"}': "0x60",
    'pdkv_queue_full_total{job="pdkv"}': "0x60",
    'pdkv_time_to_first_token_seconds_bucket{job="pdkv",le="5.0"}': "0+60x60",
    'pdkv_time_to_first_token_seconds_bucket{job="pdkv",le="10.0"}': "0+60x60",
    'pdkv_time_to_first_token_seconds_bucket{job="pdkv",le="+Inf"}': "0+60x60",
    f"pdkv_engine_deaths_total{{{OF_DECODE}}}": "0x60",
    f"pdkv_engine_suspect{{{OF_DECODE}}}": "0x60",
    f"pdkv_engine_ejected{{{OF_DECODE}}}": "0x60",
    'pdkv_bad_pairs{job="pdkv"}': "0x60",
    f'pdkv_engine_blocks{{{OF_DECODE},class="total"}}': "1000x60",
    f'pdkv_engine_blocks{{{OF_DECODE},class="free"}}': "100x60",
    f'pdkv_engine_blocks{{{OF_DECODE},class="cached"}}': "200x60",
    f"pdkv_engine_preemptions_total{{{OF_DECODE}}}": "0x60",
    f"pdkv_engine_kv_damaged_values_total{{{OF_DECODE}}}": "0x60",
    f'pdkv_connector_corrupted_transfers_total{{{OF_DECODE},connector="p2p"}}': "0x60",
    f"pdkv_engine_non_finite_requests_total{{{OF_DECODE}}}": "0x60",
    'pdkv_loop_stalls_total{job="pdkv",where="f",kind="busy"}': "0x60",
}
"""Series of a deployment that is well."""

ILL: dict[str, dict[str, str]] = {
    "PdkvRouterDown": {"up": "0x60"},
    "PdkvNotServing": {'pdkv_engine_up{job="pdkv",engine="prefill-0"': "0x60"},
    "PdkvFailures": {'pdkv_requests_total{job="pdkv",endpoint="completions",outcome="engine_died"': "0+3x60"},
    "PdkvQueueFull": {"pdkv_queue_full": "0+2x60"},
    "PdkvSlowFirstToken": {'pdkv_time_to_first_token_seconds_bucket{job="pdkv",le="5.0"': "0+50x60"},
    "PdkvEngineDown": {f"pdkv_engine_up{{{OF_DECODE}": "0x60"},
    "PdkvEngineDies": {"pdkv_engine_deaths": "0x30 1+1x29"},
    "PdkvEngineInTrouble": {"pdkv_engine_suspect": "1x60"},
    "PdkvPairsFail": {"pdkv_bad_pairs": "1x60"},
    "PdkvKVFull": {f'pdkv_engine_blocks{{{OF_DECODE},class="{name}"': "10x60" for name in ("free", "cached")},
    "PdkvPreemptions": {"pdkv_engine_preemptions": "0+30x60"},
    "PdkvDamagedKV": {"pdkv_connector_corrupted_transfers": "0x50 1x9"},
    "PdkvLoopStalls": {"pdkv_loop_stalls": "0+30x60"},
}
"""What is otherwise where an alert fires, by the beginnings of series."""


def rules() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load(ALERTS.read_text())["groups"]
    return group["rules"]


async def test_every_metric_that_they_name_exists() -> None:
    app = make_app(FakeDispatcher(), watchdog=LoopWatchdog(1.0))
    text = (await call(app, "GET", "/metrics")).body.decode()
    endings = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}
    known = {f.name + end for f in text_string_to_metric_families(text) for end in endings[f.type]}
    named = set(NAME.findall(ALERTS.read_text())) | set(NAME.findall(DASHBOARD.read_text()))
    assert len(named) > 40
    assert named <= known


def test_the_dashboard_has_panels_that_do_not_overlap() -> None:
    dashboard = json.loads(DASHBOARD.read_text())
    taken: set[tuple[int, int]] = set()
    for panel in dashboard["panels"]:
        at = panel["gridPos"]
        cells = {(at["x"] + i, at["y"] + j) for i in range(at["w"]) for j in range(at["h"])}
        assert not cells & taken, panel["title"]
        assert max(x for x, _ in cells) < 24
        taken |= cells
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool: apt-get install prometheus")
def test_each_alert_fires_for_its_reason_and_none_while_all_is_well(tmp_path: Path) -> None:
    assert {rule["alert"] for rule in rules()} == set(ILL)

    def case(name: str, changes: dict[str, str]) -> dict[str, Any]:
        values = {
            series: next((new for start, new in changes.items() if series.startswith(start)), old)
            for series, old in WELL.items()
        }
        alerts = 'count by (alertname) (ALERTS{alertstate="firing"})'
        expected = {name, "PdkvEngineDown"} if name == "PdkvNotServing" else {name} - {""}
        samples = [{"labels": f'{{alertname="{each}"}}', "value": 1} for each in sorted(expected)]
        return {
            "name": name or "all is well",
            "interval": "1m",
            "input_series": [{"series": series, "values": values[series]} for series in values],
            "promql_expr_test": [{"expr": alerts, "eval_time": "59m", "exp_samples": samples}],
        }

    tests = [case("", {}), *(case(name, changes) for name, changes in ILL.items())]
    file = tmp_path / "tests.yml"
    file.write_text(yaml.safe_dump({"rule_files": [str(ALERTS)], "tests": tests}))
    done = subprocess.run(["promtool", "test", "rules", file], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
