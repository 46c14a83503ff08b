"""Names every process of a launch and assigns its share of the machine."""

import dataclasses
import secrets
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal

from pdkv.config import DEFAULT_MODEL, EngineConfig, ModelFiles, RouterConfig, TiersConfig
from pdkv.errors import ConfigError
from pdkv.host.huge_pages import can_share_huge_pages
from pdkv.host.memory_limits import LEAST_POOL_BYTES, check_host_memory, format_bytes, share_for_pools
from pdkv.host.processor import flags
from pdkv.kernels.compiled import isa
from pdkv.launch.config import Deployment
from pdkv.launch.cpus import AUTO, default_threads, nodes_of, numa_node, split_cpu_bind
from pdkv.launch.devices import place_on_devices, with_options
from pdkv.launch.host_memory import DIRECTORY
from pdkv.launch.kv_tiers import plan_with_tiers
from pdkv.launch.run_dir import RunDirectory
from pdkv.launch.specs import EngineSpec
from pdkv.launch.supervisor import Fleet
from pdkv.models.config import load_model_config
from pdkv.models.family import FAMILIES
from pdkv.models.hub import hub_name, with_local_model
from pdkv.models.weight_files import loaded_bytes
from pdkv.router.engines.address import EngineAddress, Role, read_split
from pdkv.router.engines.foreign_kinds import read_fallback
from pdkv.router.spec import PoolSpec, RouterSpec

_DEFAULT_NAME = "pdkv-default"  # the embedded model's name in the API

_NO_TIERS = TiersConfig()

Kind = Literal["prefill", "decode", "engine"]
"""The kind with which an engine was started, and with which its name begins; its role may change later."""

ROLES: dict[Kind, Role] = {"prefill": "prefill", "decode": "decode", "engine": "any"}


def plan_fleet(deployment: Deployment, run_dir: RunDirectory) -> Fleet:
    """The processes of a new launch. Raises ConfigError for a wrong --cpu-bind, and as `place_on_hardware` does."""
    launch = deployment.launch
    counts: dict[Kind, int] = {"prefill": launch.prefill, "decode": launch.decode}
    if launch.aggregated:
        counts = {"engine": launch.decode}
    for kind, count in counts.items():
        if (text := config_of(deployment, kind).cpu_bind) != AUTO:
            split_cpu_bind(text, count)
    engines = [
        plan_engine(deployment, run_dir, kind, index, num_engines=launch.num_engines, num_ranks=deployment.num_ranks)
        for kind, count in counts.items()
        for index in range(count)
    ]
    if not deployment.on_ray:
        engines = place_on_hardware(engines, deployment.tiers)
    model = deployment.prefill.model
    default_name = _DEFAULT_NAME if model == DEFAULT_MODEL else hub_name(model) or model.resolve().name
    names = list(launch.served_model_name) or [default_name]
    router = RouterSpec(
        router_id=f"router-{secrets.token_hex(8)}",  # of this launch: a restarted router gets it again
        engines=[
            *(plan_address(spec, run_dir) for spec in engines),
            *(EngineAddress(name, "any", endpoint) for name, endpoint in launch.remote_engines.items()),
            *launch.backends,
        ],
        model=deployment.prefill,
        served_model_names=names,
        policy=launch.policy,
        logits_processors=list(deployment.decode.logits_processors),
        run_dir=run_dir.path,
        orders=launch.orders,
        log_level=launch.log_level,
        config=_plan_router(deployment),
        drain_s=launch.drain_s,
        num_fronts=launch.router_fronts,
        cluster_key_file=launch.cluster_key_file,
        join_listen=launch.join_listen,
        engines_file=launch.engines_file,
        engines_dns=list(launch.engines_dns),
        pools=_plan_pools(deployment, names),
        split=read_split(launch.split, launch.pool),
        backend_key_file=launch.backend_key_file,
        backend_kv_events=launch.backend_kv_events,
        backend_num_seqs=deployment.decode.max_num_seqs,
        backend_model_len=deployment.decode.max_model_len,
        fallback=read_fallback(launch.fallback) if launch.fallback is not None else None,
        fallback_key_file=launch.fallback_key_file,
        fallback_wait_s=launch.fallback_wait_s,
    )
    return Fleet(
        engines=engines,
        router=router,
        connector_target=plan_with_tiers(deployment.handoff, deployment.tiers, run_dir.path, "").build,
        start_timeout_s=launch.start_timeout_s,
        use_fork_server=launch.start_method == "fork" and bool(engines),
    )


def _plan_router(deployment: Deployment) -> RouterConfig:
    """The router's options: a role of other people's servers, which no launch starts again, is taken over."""
    config = deployment.router
    if not deployment.launch.backend:
        return config
    return dataclasses.replace(config, recovery=dataclasses.replace(config.recovery, take_over=True))


def _plan_pools(deployment: Deployment, own_names: Sequence[str]) -> list[PoolSpec]:
    """The pools of other models. Raises ConfigError for a name that two models have, and a broken model directory."""
    owners, specs = dict.fromkeys(own_names, "--model"), []
    for pool, model in deployment.launch.pool.items():
        names = [pool, *(alias for alias, of in deployment.launch.pool_alias.items() if alias != of == pool)]
        for name in names:
            if (other := owners.setdefault(name, pool)) != pool:
                raise ConfigError(f"{name} is a served name of {other} and of pool {pool}: each needs names of its own")
        options = {name: getattr(deployment.prefill, name) for name in ("generation_config", "ignore_config_fields")}
        files = with_local_model(ModelFiles(model=Path(model).expanduser(), **options))
        load_model_config(files.model, ignored_fields=files.ignore_config_fields)
        specs.append(PoolSpec(name=pool, model=files, served_model_names=names))
    return specs


def plan_engine(
    deployment: Deployment, run_dir: RunDirectory, kind: Kind, index: int, *, num_engines: int, num_ranks: int
) -> EngineSpec:
    """The engine `kind`-`index` of a deployment whose numbers of engines and ranks include it.

    Raises:
        ConfigError: --cpu-bind has a list for each engine, but none for this one.
    """
    config = config_of(deployment, kind)
    cpus = _cpus(deployment, kind, index)
    own_cpus = max(1, len(cpus) // config.tp) if cpus and config.cpu_bind != AUTO else None
    name = f"{kind}-{index}"
    default = 1 if deployment.on_ray else default_threads(num_ranks)
    return EngineSpec(
        name=name,
        role=ROLES[kind],
        epoch="",
        config=dataclasses.replace(config, threads=config.threads or own_cpus or default),
        handoff=deployment.handoff,
        connector=plan_with_tiers(deployment.handoff, deployment.tiers, run_dir.path / DIRECTORY, name),
        endpoint="" if deployment.on_ray else run_dir.endpoint(name),
        num_engines=num_engines,
        run_dir=run_dir.path,
        log_level=deployment.launch.log_level,
        log_format=deployment.router.observability.log_format,
        cpus=sorted(cpus) if cpus else None,
        kv_shards=deployment.kv_shards,
        store=run_dir.path / f"{name}.ranks" if config.tp > 1 else None,
        start_timeout_s=deployment.launch.start_timeout_s,
    )


def plan_address(spec: EngineSpec, run_dir: RunDirectory) -> EngineAddress:
    """The address at which routers reach the engine."""
    return EngineAddress(spec.name, spec.role, spec.endpoint, run_dir.path / f"{spec.name}.refused")


def config_of(deployment: Deployment, kind: Kind) -> EngineConfig:
    """The options of engines of this kind."""
    return deployment.prefill if kind == "prefill" else deployment.decode


def place_on_hardware(
    specs: Sequence[EngineSpec], tiers: TiersConfig, running: Iterable[EngineSpec] = (), *, num_promised_bytes: int = 0
) -> list[EngineSpec]:
    """The same engines on their devices. Automatically sized pools share the host memory that other pools, host tiers
    and weights leave. Raises ConfigError as `place_on_devices` does.

    Args:
        running: engines that are already placed. Their automatically sized pools may still grow to their full size, and
            use `num_promised_bytes` besides.
    """
    placed, running = place_on_devices(specs, running), list(running)
    given = [spec for spec in placed if spec.config.in_host_memory and not spec.config.sizes_itself]
    given += [spec for spec in running if spec.config.sizes_itself]
    taken = num_promised_bytes + sum(spec.config.host_kv_bytes for spec in given)
    taken += (tiers.kv_host_memory or 0) * len(placed)
    present = {_weights_of(spec) for spec in running}
    taken += sum(loaded_bytes(model, how) for model, how, *_ in {_weights_of(spec) for spec in placed} - present)
    share = share_for_pools(max(sum(spec.config.sizes_itself for spec in placed), 1), taken)
    return [with_options(s, max_kv_cache_memory=min(share, s.config.max_kv_cache_memory or share)) for s in placed]


def _weights_of(spec: EngineSpec) -> tuple[Path, Literal["int8"] | None, object]:
    """The model and quantization of an engine's weights, and what tells them from those that it does not share, as far
    as that is known without torch: see models/shared_weights.py.
    """
    config = spec.config
    dtype, shipped = config.dtype, True
    if (config.model / "config.json").exists():
        model = load_model_config(config.model, config.max_model_len, config.ignore_config_fields)
        dtype, shipped = model.dtype if dtype == "auto" else dtype, model.architecture in FAMILIES.shipped
    compiled = config.cpu_linears == "auto" and isa() is not None and dtype != "float16" and "amx_bf16" not in flags()
    shares = config.in_host_memory and compiled and shipped and can_share_huge_pages()
    own = dtype, config.tp, nodes_of(spec.cpus)
    return config.model, config.quantization, own if shares else spec.name


def check_memory(
    engines: Sequence[tuple[EngineConfig, int]], tiers: TiersConfig = _NO_TIERS, *, num_promised_bytes: int = 0
) -> None:
    """Refuse engines, given as (configuration, number), that together do not fit into this host's free memory.
    Raises ConfigError.

    Args:
        num_promised_bytes: memory that running engines may still use.
    """
    pools = [
        (config.kv_cache_memory or min(config.host_kv_bytes, LEAST_POOL_BYTES), count)
        for config, count in engines
        if count > 0 and config.in_host_memory
    ]
    wanted = [f"{count} KV pool{'s' * (count > 1)} of {format_bytes(size)}" for size, count in pools]
    flags = ["--kv-cache-memory"] * bool(pools)
    num_bytes = sum(size * count for size, count in pools)
    num_engines = sum(max(count, 0) for _, count in engines)
    if tiers.kv_host_memory and num_engines:
        wanted.append(f"{format_bytes(tiers.kv_host_memory)} of host memory for each of {num_engines} engines")
        flags.append("--kv-host-memory")
        num_bytes += num_engines * tiers.kv_host_memory
        if num_promised_bytes:
            wanted.append(f"{format_bytes(num_promised_bytes)} already promised to others")
            num_bytes += num_promised_bytes
    check_host_memory(num_bytes, f"{' and '.join(wanted)} ({', '.join(flags)})")


def _cpus(deployment: Deployment, kind: Kind, index: int) -> frozenset[int] | None:
    text = config_of(deployment, kind).cpu_bind
    if text == AUTO:
        return numa_node(index + (deployment.launch.prefill if kind == "decode" else 0))
    num_lists = len(text.split("|")) if text is not None else 1
    if num_lists > 1 and index >= num_lists:
        raise ConfigError(
            f"cpu_bind has CPUs for {num_lists} engines and none for {kind}-{index}: launch with one list for all, or "
            f"with more lists, got {text!r}"
        )
    return split_cpu_bind(text, num_lists)[index if num_lists > 1 else 0]
