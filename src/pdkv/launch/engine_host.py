"""`pd engine`: one engine, supervised, for the router of a launch on another host."""

import asyncio
import dataclasses
import logging

from pdkv.config import EngineConfig, HandoffConfig, TiersConfig
from pdkv.connectors.plan import ConnectorPlan
from pdkv.errors import ConfigError
from pdkv.launch.announcer import Announcer
from pdkv.launch.config import HostedEngine
from pdkv.launch.cpus import default_threads, split_cpu_bind
from pdkv.launch.host_memory import DIRECTORY, HostMemory
from pdkv.launch.kv_tiers import plan_with_tiers
from pdkv.launch.launcher import ReadyLog, StopSignals, run_supervised, start_unless_stopped
from pdkv.launch.plan import check_memory, place_on_hardware
from pdkv.launch.run_dir import RunDirectory
from pdkv.launch.specs import EngineSpec
from pdkv.launch.supervisor import Fleet, Supervisor
from pdkv.models.config import load_model_config
from pdkv.models.hub import with_local_model
from pdkv.wire.cluster_key import ClusterKey

logger = logging.getLogger(__name__)


def host_engine(hosted: HostedEngine, config: EngineConfig, handoff: HandoffConfig, tiers: TiersConfig) -> int:
    """Run an engine until SIGINT, SIGTERM or SIGHUP; one that dies is started again. Returns the exit code.

    Raises:
        ConfigError: a wrong value, found here or by a child.
        StartupError: a child did not become ready.
    """
    ClusterKey.read(hosted.cluster_key_file)
    config = with_local_model(config)
    model = load_model_config(config.model, config.max_model_len, config.ignore_config_fields)
    model.quantized_at_load(config.quantization, config.model)
    check_memory([(config, 1)], tiers)

    async def serve(run_dir: RunDirectory, lifeline_fd: int) -> None:
        connector = plan_with_tiers(handoff, tiers, run_dir.path / DIRECTORY, hosted.name)
        spec = plan_hosted(hosted, config, handoff, connector, run_dir, tiers)
        fleet = Fleet(
            engines=[spec],
            router=None,
            connector_target=connector.build,
            start_timeout_s=hosted.start_timeout_s,
            use_fork_server=config.tp > 1,  # with one process, its import of torch is not shared
        )
        supervisor = Supervisor(fleet, listen_fd=-1, lifeline_fd=lifeline_fd, on_ready=ReadyLog(1))
        with HostMemory(run_dir.path, tiers.kv_host_memory) as host_memory:
            host_memory.keep(spec)
            await _serve(hosted, supervisor)

    run_supervised(serve)
    return 0


def plan_hosted(
    hosted: HostedEngine,
    config: EngineConfig,
    handoff: HandoffConfig,
    connector: ConnectorPlan,
    run_dir: RunDirectory,
    tiers: TiersConfig,
) -> EngineSpec:
    """The engine with this host to itself. Raises ConfigError for wrong --cpu-bind, --devices or --kv-shards."""
    kv_shards = hosted.kv_shards or config.tp
    if kv_shards % config.tp:
        raise ConfigError(f"kv_shards must be a multiple of tp ({config.tp}), got {kv_shards}")
    cpus = split_cpu_bind(config.cpu_bind, 1)[0]
    threads = config.threads or (max(1, len(cpus) // config.tp) if cpus else default_threads(config.tp))
    spec = EngineSpec(
        name=hosted.name,
        role=hosted.role,
        epoch="",
        config=dataclasses.replace(config, threads=threads),
        handoff=handoff,
        connector=connector,
        endpoint=hosted.listen,
        num_engines=2,  # it has peers somewhere, or it would be a launch
        run_dir=run_dir.path,
        log_level=hosted.log_level,
        log_format=hosted.log_format,
        cpus=sorted(cpus) if cpus else None,
        kv_shards=kv_shards,
        store=run_dir.path / f"{hosted.name}.ranks" if config.tp > 1 else None,
        start_timeout_s=hosted.start_timeout_s,
        cluster_key_file=hosted.cluster_key_file,
    )
    return place_on_hardware([spec], tiers)[0]


async def _stay(hosted: HostedEngine, signals: StopSignals, hurried: asyncio.Event) -> None:
    """Wait for a signal, and then for the router that the engine has joined, if there is one."""
    if hosted.join is None:
        await signals.stopped.wait()
        return
    signals.drain_s = hosted.drain_s
    key = ClusterKey.read(hosted.cluster_key_file)
    announcer = Announcer(hosted.join, hosted.name, hosted.reachable_at, key, hosted.pool)
    await announcer.run(signals.stopped, hurried, hosted.drain_s)


async def _serve(hosted: HostedEngine, supervisor: Supervisor) -> None:
    """Start the engine, report that it is ready, and end it when a signal asks for that."""
    signals = StopSignals(supervisor, reloads=False)
    try:
        if await start_unless_stopped(supervisor, signals):
            print(f"ready: {hosted.name} ({hosted.role}) at {hosted.listen}", flush=True)
            await _stay(hosted, signals, supervisor.hurried)
    finally:
        await supervisor.stop()
        if signals.stopped.is_set():
            logger.info("stopped")
