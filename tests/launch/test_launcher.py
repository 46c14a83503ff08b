"""The plan of a launch: names, roles, endpoints, and every engine's share of the machine."""

import contextlib
import dataclasses
import os
import socket
from pathlib import Path
from typing import Any

import pytest
from small_models import make_hf_config

from pdkv.config import DEFAULT_MODEL, EngineConfig, HandoffConfig, HttpLimits, RouterConfig, TiersConfig
from pdkv.connectors.plan import NO_PLAN
from pdkv.errors import ConfigError
from pdkv.launch.check import check_deployment
from pdkv.launch.config import Deployment, HostedEngine, LaunchConfig
from pdkv.launch.cpus import default_threads
from pdkv.launch.engine_host import plan_hosted
from pdkv.launch.listening import listen_at
from pdkv.launch.plan import plan_fleet
from pdkv.launch.run_dir import RunDirectory
from pdkv.launch.supervisor import Fleet


@pytest.fixture(autouse=True)
def twelve_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(12)))


def plan(run_dir: RunDirectory, launch: LaunchConfig, prefill: EngineConfig, decode: EngineConfig) -> Fleet:
    return plan_fleet(Deployment(launch=launch, handoff=HandoffConfig(), prefill=prefill, decode=decode), run_dir)


def test_engines_have_names_roles_endpoints_and_an_equal_share_of_threads(run_dir: RunDirectory) -> None:
    fleet = plan(run_dir, LaunchConfig(prefill=2, decode=4), EngineConfig(), EngineConfig())
    assert [(spec.name, spec.role) for spec in fleet.engines] == [
        ("prefill-0", "prefill"), ("prefill-1", "prefill"),
        ("decode-0", "decode"), ("decode-1", "decode"), ("decode-2", "decode"), ("decode-3", "decode"),
    ]  # fmt: skip
    assert {spec.config.threads for spec in fleet.engines} == {2}
    assert len({spec.endpoint for spec in fleet.engines}) == 6
    assert [(e.name, e.role, e.endpoint) for e in fleet.router.engines] == [
        (s.name, s.role, s.endpoint) for s in fleet.engines
    ]


def test_engines_elsewhere_are_the_routers_to_find_and_nobody_starts_them(run_dir: RunDirectory) -> None:
    """Where there are such, --prefill 0 means none here, and not that decode engines do both."""
    key = Path("cluster.key")
    launch = LaunchConfig(
        prefill=0, decode=1, remote_engines={"prefill-b": "tcp://10.0.0.2:7000"}, cluster_key_file=key, kv_shards=4
    )
    fleet = plan(run_dir, launch, EngineConfig(), EngineConfig())
    assert [(spec.name, spec.role, spec.kv_shards) for spec in fleet.engines] == [("decode-0", "decode", 4)]
    assert fleet.router is not None
    assert [(e.name, e.endpoint) for e in fleet.router.engines][1:] == [("prefill-b", "tcp://10.0.0.2:7000")]
    assert fleet.router.cluster_key_file == key


def test_an_engine_for_another_host_listens_there_and_has_this_one_to_itself(run_dir: RunDirectory) -> None:
    hosted = HostedEngine(name="b", role="decode", listen="tcp://10.0.0.2:7000", cluster_key_file=Path("k"))
    spec = plan_hosted(hosted, EngineConfig(tp=2), HandoffConfig(), NO_PLAN, run_dir, TiersConfig())
    assert (spec.name, spec.role, spec.endpoint) == ("b", "decode", "tcp://10.0.0.2:7000")
    assert (spec.config.threads, spec.kv_shards, spec.cluster_key_file) == (6, 2, Path("k"))
    with pytest.raises(ConfigError, match=r"kv_shards must be a multiple of tp \(2\), got 3"):
        plan_hosted(
            dataclasses.replace(hosted, kv_shards=3),
            EngineConfig(tp=2),
            HandoffConfig(),
            NO_PLAN,
            run_dir,
            TiersConfig(),
        )


def test_without_prefill_engines_the_others_do_it_all(run_dir: RunDirectory) -> None:
    fleet = plan(run_dir, LaunchConfig(prefill=0, decode=2), EngineConfig(), EngineConfig())
    assert [(spec.name, spec.role) for spec in fleet.engines] == [("engine-0", "any"), ("engine-1", "any")]


def test_roles_have_their_own_options_and_bound_engines_as_many_threads_as_cpus(run_dir: RunDirectory) -> None:
    launch = LaunchConfig(prefill=1, decode=2)
    fleet = plan(run_dir, launch, EngineConfig(threads=3, block_size=32), EngineConfig(cpu_bind="0-1|4,5,6"))
    prefill, *decodes = fleet.engines
    assert (prefill.config.threads, prefill.config.block_size, prefill.cpus) == (3, 32, None)
    assert [(spec.config.threads, spec.cpus) for spec in decodes] == [(2, [0, 1]), (3, [4, 5, 6])]
    with pytest.raises(ConfigError, match="2 separated by"):
        plan(run_dir, launch, EngineConfig(), EngineConfig(cpu_bind="0|1|2"))


def test_engines_of_both_roles_take_numa_nodes_in_turn(run_dir: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdkv.launch.plan.numa_node", lambda index: frozenset({index, index + 8}))
    config = EngineConfig(cpu_bind="auto")
    fleet = plan(run_dir, LaunchConfig(prefill=1, decode=2), config, config)
    assert [spec.cpus for spec in fleet.engines] == [[0, 8], [1, 9], [2, 10]]
    assert {spec.config.threads for spec in fleet.engines} == {default_threads(3)}  # nodes may be shared


def test_ranks_share_the_machine_and_every_engine_cuts_stored_heads_alike(run_dir: RunDirectory) -> None:
    launch = LaunchConfig(prefill=1, decode=2)
    fleet = plan(run_dir, launch, EngineConfig(tp=4), EngineConfig(tp=6, cpu_bind="0-11|0-2"))
    prefill, *decodes = fleet.engines
    assert prefill.config.threads == 1  # 16 ranks, 12 CPUs
    assert [spec.config.threads for spec in decodes] == [2, 1]
    assert {spec.kv_shards for spec in fleet.engines} == {12}
    assert len({spec.store for spec in fleet.engines}) == 3
    (alone,) = plan(run_dir, LaunchConfig(prefill=0, decode=1), EngineConfig(tp=4), EngineConfig()).engines
    assert (alone.kv_shards, alone.store, alone.config.threads) == (1, None, 12)


def test_the_model_is_served_under_its_directorys_name_unless_told_otherwise(run_dir: RunDirectory) -> None:
    config = EngineConfig(model=Path("some/where/llama-small"))
    assert plan(run_dir, LaunchConfig(), config, config).router.served_model_names == ["llama-small"]
    named = LaunchConfig(served_model_name=("mine", "too"))
    assert plan(run_dir, named, config, config).router.served_model_names == ["mine", "too"]
    embedded = plan(run_dir, LaunchConfig(), EngineConfig(), EngineConfig()).router
    assert (embedded.model.model, embedded.served_model_names) == (DEFAULT_MODEL, ["pdkv-default"])
    snapshot = EngineConfig(model=Path("hub/models--ORG--Some-Model/snapshots/0123abc"))
    assert plan(run_dir, LaunchConfig(), snapshot, snapshot).router.served_model_names == ["ORG/Some-Model"]


def test_lengths_that_give_prefill_and_decode_other_rope_frequencies_are_refused(tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0}
    model = make_hf_config(tmp_path, rope_scaling=rope, max_position_embeddings=64)

    def check(prefill: int | None, decode: int | None, num_prefill: int = 1) -> None:
        configs = [EngineConfig(model=model, max_model_len=length) for length in (prefill, decode)]
        launch = LaunchConfig(prefill=num_prefill)
        check_deployment(Deployment(launch=launch, handoff=HandoffConfig(), prefill=configs[0], decode=configs[1]))

    check(32, 64)
    check(None, 128)
    check(100, 128, num_prefill=0)
    with pytest.raises(ConfigError, match=r"dynamic.*prefill engines \(100\).*decode engines \(the default\)"):
        check(100, None)


def test_a_body_that_fits_no_frame_between_front_and_dispatcher_is_refused(tmp_path: Path) -> None:
    config, most = EngineConfig(model=make_hf_config(tmp_path)), 63 << 20

    def check(num_fronts: int, max_body_bytes: int) -> None:
        launch = LaunchConfig(router_fronts=num_fronts)
        router = RouterConfig(http=HttpLimits(max_body_bytes=max_body_bytes, max_body_memory=1 << 28))
        check_deployment(
            Deployment(launch=launch, router=router, handoff=HandoffConfig(), prefill=config, decode=config)
        )

    check(0, most + 1)
    check(2, most)
    with pytest.raises(ConfigError, match=f"--max-body-bytes is {most + 1}.*at most {most}"):
        check(2, most + 1)


def test_an_order_that_the_connector_does_not_allow_is_refused(tmp_path: Path) -> None:
    config = EngineConfig(model=make_hf_config(tmp_path))

    def check(connector: str, num_prefill: int = 1) -> None:
        launch, handoff = LaunchConfig(prefill=num_prefill, order="concurrent"), HandoffConfig(connector=connector)
        check_deployment(Deployment(launch=launch, handoff=handoff, prefill=config, decode=config))

    check("p2p")
    check("shared_memory", num_prefill=0)
    with pytest.raises(ConfigError, match="--order concurrent is not one of connector shared_memory: prefill_first"):
        check("shared_memory")


def test_sampling_defaults_are_checked_before_anything_starts_and_are_the_routers(
    tmp_path: Path, run_dir: RunDirectory
) -> None:
    model = make_hf_config(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"top_p": 7}')

    def deployment(**fields: Any) -> Deployment:
        config = EngineConfig(model=model, **fields)
        return Deployment(launch=LaunchConfig(), handoff=HandoffConfig(), prefill=config, decode=config)

    with pytest.raises(
        ConfigError, match=r"generation_config\.json: top_p must be a number above 0 and up to 1, got 7"
    ):
        check_deployment(deployment())
    check_deployment(deployment(generation_config="none"))
    for source in ("auto", "none"):
        fleet = plan_fleet(deployment(generation_config=source), run_dir)
        assert fleet.router.model.generation_config == source


@pytest.mark.parametrize("backend", [(), ("vllm-prefill=http://a", "vllm-decode=http://b")])
def test_the_work_of_a_server_that_no_launch_restarts_is_taken_over(
    run_dir: RunDirectory, backend: tuple[str, ...]
) -> None:
    """100 streams waited for ever for a vLLM that decoded, beside one that could have."""
    launch = LaunchConfig(backend=backend, **({"prefill": 0, "decode": 0} if backend else {}))
    fleet = plan(run_dir, launch, EngineConfig(), EngineConfig())
    assert fleet.router.config.recovery.take_over == bool(backend)


def test_routers_of_two_launches_never_have_one_id(run_dir: RunDirectory) -> None:
    """An engine takes the second of an id for the first one's successor, and ends what that one asked for."""
    fleets = [plan(run_dir, LaunchConfig(), EngineConfig(), EngineConfig()) for _ in range(2)]
    assert len({fleet.router.router_id for fleet in fleets}) == 2


def test_a_unix_socket_is_there_while_it_is_listened_on(tmp_path: Path) -> None:
    path = tmp_path / "pd.sock"
    with listen_at(path), socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))
        with pytest.raises(ConfigError, match="in use"), listen_at(path):
            raise AssertionError("two listen at one path")
    assert not path.exists()


def test_a_socket_at_which_a_successor_listens_stays(tmp_path: Path) -> None:
    """A launch that drains listens no longer: another one begins at its path, and must be found there afterwards."""
    path = tmp_path / "pd.sock"
    with contextlib.ExitStack() as launches:
        with listen_at(path) as first:
            first.close()
            launches.enter_context(listen_at(path))
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))
    assert not path.exists()


def test_a_socket_that_a_killed_launch_left_is_replaced_and_nothing_else_is(tmp_path: Path) -> None:
    path = tmp_path / "pd.sock"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    with listen_at(path):
        pass
    path.write_text("mine")
    with pytest.raises(ConfigError, match="in use"), listen_at(path):
        raise AssertionError("a file was replaced")
    assert path.read_text() == "mine"
    for other in (tmp_path / "nowhere" / "s", tmp_path / ("x" * 120)):
        with pytest.raises(ConfigError, match="cannot listen on"), listen_at(other):
            raise AssertionError(f"{other} is listened on")
