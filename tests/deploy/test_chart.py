"""The Helm chart: what it renders is what Kubernetes takes, its commands are ours, and its doors are closed."""

import argparse
import json
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator
from pods import CHART, DEPLOY, VALUES, Object, command_of, pods_of, read_values, render

from pdkv.cli import engine as cli_engine
from pdkv.cli.launch import all_flags, build_handoff, build_tiers, launch_variables, read_deployment
from pdkv.cli.main import make_parser
from pdkv.cli.options import build, collect
from pdkv.config import EngineConfig
from pdkv.launch.config import HostedEngine
from pdkv.launch.kv_tiers import plan_with_tiers

CUSTOM: dict[str, Any] = yaml.safe_load((Path(__file__).parent / "custom_resources.yaml").read_text())
EVERYTHING = {
    "keda": {"enabled": True},
    "monitoring": {"serviceMonitor": True, "rules": True, "dashboard": True},
    "inferencePool": {"enabled": True, "endpointPicker": {"name": "picker"}},
}


@pytest.fixture(autouse=True, scope="module")
def helm() -> Any:
    """85 MB of a library with threads of its own, which no process shall have that only collects this file."""
    return pytest.importorskip("helm_python", reason="no wheel of helm-python-sdk for this platform")


@pytest.fixture(scope="module")
def kubernetes() -> Any:
    package = pytest.importorskip("kubernetes_validate")
    package.utils.schema_contents = cache(package.utils.schema_contents)  # a megabyte per object
    return package


by_file = pytest.mark.parametrize("file", VALUES, ids=lambda file: file.stem)


def of_kind(objects: list[Object], kind: str) -> dict[str, Object]:
    return {found["metadata"]["name"]: found for found in objects if found["kind"] == kind}


@by_file
def test_it_lints_and_what_it_renders_is_valid(file: Path, helm: Any, kubernetes: Any) -> None:
    values = read_values(file)
    report = helm.lint(CHART, values, strict=True)
    assert not report["errors"]
    for found in render(values):
        if found["kind"] in CUSTOM:
            Draft202012Validator(CUSTOM[found["kind"]] | {"$defs": CUSTOM["$defs"]}).validate(found)
        else:
            kubernetes.validate(found, "1.37", strict=True)


@by_file
def test_its_commands_have_options_of_ours_with_values_that_they_take(file: Path, tmp_path: Path) -> None:
    if "engines_dns" not in all_flags():
        pytest.skip("needs --engines-dns")
    for name, text in {"cluster/cluster.key": "k" * 32, "store/url": "redis://store:6379/0"}.items():
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(text)
    for name, found in of_kind(render(read_values(file)), "Deployment").items():
        command = command_of(found, name=f"{name}-5f6d7c8b9d-x2x4z", address="10.0.0.7", files=tmp_path)
        check(make_parser().parse_args(command.argv[1:]))


def check(arguments: argparse.Namespace) -> None:
    """Refuse what the command would refuse before it reads a model."""
    if arguments.run is not cli_engine.run:
        deployment = read_deployment(arguments, {})
        plan_with_tiers(deployment.handoff, deployment.tiers, Path("/"), "")
        return
    flags = {name: item for group in cli_engine.flag_groups().values() for name, item in group.items()}
    values = collect(flags, vars(arguments), environment={}, known_variables=launch_variables(), file=None)
    build(HostedEngine, values)
    handoff = build_handoff(values, [build(EngineConfig, values)])
    plan_with_tiers(handoff, build_tiers(values), Path("/"), "")


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"replicas": 2}, "replicas"),
        ({"engines": {"prefill": {"role": "both"}}}, "role"),
        ({"engines": {"prefill": {"replicas": "three"}}}, "replicas"),
        ({"engines": {"Prefill": {}}}, "Prefill"),
        ({"router": {"options": {"api-key-file": "/tmp/keys"}}}, "api-key-file"),
        ({"keda": {"ttftSeconds": "0.3"}}, "ttftSeconds"),
        ({"engine": {"resources": {"limits": {"memory": "lots"}}}}, "memory"),
    ],
    ids=lambda case: case if isinstance(case, str) else "",
)
def test_nonsense_is_refused_by_name(values: Object, named: str, helm: Any) -> None:
    with pytest.raises(helm.HelmError, match=named):
        render(values)


def test_pods_have_no_rights_and_never_ask_the_api_server() -> None:
    objects = render(EVERYTHING)
    assert not {found["kind"] for found in objects} & {"Role", "ClusterRole", "RoleBinding", "ServiceAccount"}
    for found in of_kind(objects, "Deployment").values():
        pod = pods_of(found)
        assert pod["automountServiceAccountToken"] is False
        assert pod["enableServiceLinks"] is False  # or PDKV_PORT would be in the environment, which is an option
        assert pod["securityContext"]["runAsNonRoot"] is True
        for container in pod["containers"]:
            rights = container["securityContext"]
            assert rights["readOnlyRootFilesystem"] is True
            assert rights["allowPrivilegeEscalation"] is False
            assert rights["capabilities"] == {"drop": ["ALL"]}


def test_an_ending_pod_has_the_time_that_its_requests_may_take() -> None:
    for name, found in of_kind(render({}), "Deployment").items():
        pod = pods_of(found)
        leaves = pod["containers"][0]["lifecycle"]["preStop"]["sleep"]["seconds"]
        if name.endswith("router"):  # it answers them itself, after SIGTERM
            (drain,) = [word for word in pod["containers"][0]["args"] if word.startswith("--drain-s=")]
            leaves += int(drain.partition("=")[2])
        else:
            assert leaves >= 30 + 60  # the DNS, and the drain of routers
        assert pod["terminationGracePeriodSeconds"] >= leaves + 10


def test_every_selector_finds_the_pods_that_it_means() -> None:
    objects = render(EVERYTHING)
    labels = {
        name: set(found["spec"]["template"]["metadata"]["labels"].items())
        for name, found in of_kind(objects, "Deployment").items()
    }
    assert set(labels) == {"demo-pdkv-router", "demo-pdkv-prefill", "demo-pdkv-decode"}

    def pods(wanted: Object) -> set[str]:
        return {name.removeprefix("demo-pdkv-") for name, has in labels.items() if set(wanted.items()) <= has}

    for found in objects:
        name = found["metadata"]["name"].removeprefix("demo-pdkv").removeprefix("-") or "router"
        match found["kind"]:
            case "Service":
                assert pods(found["spec"]["selector"]) == {name}
            case "PodDisruptionBudget" | "Deployment" | "InferencePool":
                assert pods(found["spec"]["selector"]["matchLabels"]) == {name}
    policies = of_kind(objects, "NetworkPolicy")
    router, engines = (policies[f"demo-pdkv-{name}"]["spec"] for name in ("router", "engines"))
    assert pods(router["podSelector"]["matchLabels"]) == {"router"}
    assert pods(engines["podSelector"]["matchLabels"]) == {"prefill", "decode"}
    for rule, whom in zip(engines["ingress"], ({"router"}, {"prefill", "decode"}), strict=True):
        (peer,) = rule["from"]
        assert pods(peer["podSelector"]["matchLabels"]) == whom
    assert {each["port"] for each in engines["ingress"][0]["ports"]} == {"control", "beats"}
    (service,) = [found for name, found in of_kind(objects, "Service").items() if name == "demo-pdkv"]
    (monitor,) = of_kind(objects, "ServiceMonitor").values()
    assert set(monitor["spec"]["selector"]["matchLabels"].items()) <= set(service["metadata"]["labels"].items())


def test_the_router_asks_for_the_headless_services_at_the_port_that_engines_listen_at() -> None:
    objects = render({})
    (arguments,) = [
        pods_of(found)["containers"][0]["args"]
        for name, found in of_kind(objects, "Deployment").items()
        if name.endswith("router")
    ]
    headless = [name for name, found in of_kind(objects, "Service").items() if found["spec"].get("clusterIP") == "None"]
    at = arguments.index("--engines-dns") + 1
    assert arguments[at : at + 2] == [f"{name}.serving.svc.cluster.local.:7000" for name in sorted(headless)]


def test_dashboard_and_alerts_are_those_of_this_checkout() -> None:
    objects = render(EVERYTHING)
    (dashboard,) = of_kind(objects, "ConfigMap").values()
    assert json.loads(dashboard["data"]["pdkv.json"]) == json.loads((DEPLOY / "grafana" / "pdkv.json").read_text())
    (rules,) = of_kind(objects, "PrometheusRule").values()
    assert rules["spec"] == yaml.safe_load((DEPLOY / "prometheus" / "alerts.yml").read_text())


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool: apt-get install prometheus")
def test_what_scales_engines_has_the_values_that_it_should(tmp_path: Path) -> None:
    """Of 100 first tokens a minute 90 come in time, where 95 should: twice as many miss it as may."""
    queries = [
        trigger["metadata"]["query"]
        for scaled in of_kind(render(EVERYTHING), "ScaledObject").values()
        for trigger in scaled["spec"]["triggers"]
    ]
    of = 'job="pdkv",namespace="serving"'
    series = {
        f"pdkv_queue_pending_tokens{{{of}}}": "5000x10",
        f'pdkv_time_to_first_token_seconds_bucket{{{of},le="1.0"}}': "0+90x10",
        f"pdkv_time_to_first_token_seconds_count{{{of}}}": "0+100x10",
        f'vllm:kv_cache_usage_perc{{{of},engine="demo-pdkv-decode-5f6d7c8b9d-x2x4z"}}': "0.5x10",
        f'vllm:kv_cache_usage_perc{{{of},engine="demo-pdkv-prefill-5f6d7c8b9d-x2x4z"}}': "0.9x10",
    }
    expected = [0, 0.5, 5000, 2]  # no token after the first has come, which nobody waits for
    assert len(queries) == len(expected)
    tests = {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "promql_expr_test": [
            {"expr": f"round({query}, 0.001)", "eval_time": "10m", "exp_samples": [{"labels": "{}", "value": value}]}
            for query, value in zip(queries, expected, strict=True)
        ],
    }
    file = tmp_path / "tests.yml"
    file.write_text(yaml.safe_dump({"tests": [tests]}))
    done = subprocess.run(["promtool", "test", "rules", file], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
