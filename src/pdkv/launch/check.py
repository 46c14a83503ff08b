"""`pd launch --check`, and the checks that `pd launch` makes before it starts a process."""

import dataclasses
import ipaddress
import logging
import os
import socket
from pathlib import Path

from pdkv.base.secret_options import API_KEY
from pdkv.connectors.registry import check_installed
from pdkv.engine.proposers.registry import check_proposer
from pdkv.errors import ConfigError
from pdkv.kernels.compiled import isa
from pdkv.launch.config import Deployment
from pdkv.launch.kv_tiers import plan_with_tiers
from pdkv.launch.listening import listen_for
from pdkv.launch.plan import check_memory, plan_fleet
from pdkv.launch.run_dir import RunDirectory
from pdkv.models.config import load_model_config, resolve_max_model_len
from pdkv.models.generation_config import read_sampling_defaults
from pdkv.models.hub import with_local_model
from pdkv.models.shard import Shard
from pdkv.parsers.registry import check_parser_names
from pdkv.router.admission.api_keys import read_keys
from pdkv.router.engines.foreign_kinds import check_backends, read_fallback
from pdkv.router.engines.sources import make_resolver, read_engines
from pdkv.router.fronts.wire import MAX_BODY_BYTES
from pdkv.router.http.server.certificates import load_context
from pdkv.router.metrics.recorder import check_recording
from pdkv.router.metrics.tracing import check_tracing
from pdkv.router.routing.policies import find_policy
from pdkv.sampling.logits_processors import LOGITS_PROCESSORS
from pdkv.text import load_tokenizer
from pdkv.wire.cluster_key import ClusterKey

logger = logging.getLogger(__name__)


def check(deployment: Deployment) -> int:
    """Run `pd launch --check`: refuse what `launch` would refuse before it starts a process, and print what it would
    start; returns the exit code.

    Raises:
        ConfigError: a wrong value.
    """
    from pdkv.engine.worker.executor import describe_pool  # with torch, which takes seconds

    deployment = check_deployment(deployment)
    with listen_for(deployment.launch) as listener, RunDirectory() as run_dir:
        advise(deployment, listener)
        fleet = plan_fleet(deployment, run_dir)
    assert fleet.router is not None
    engines = [f"  {e.name}: {e.config.threads} CPU threads, {describe_pool(e.config)}" for e in fleet.engines]
    load_tokenizer(deployment.prefill)
    print(
        f"{deployment.shape}: {fleet.router.served_model_names[0]} from {deployment.prefill.model}", *engines, sep="\n"
    )
    return 0


def advise(deployment: Deployment, listener: socket.socket) -> None:
    """Warn of settings that are allowed but seldom intended."""
    if isa() is None:
        logger.warning("compiled kernels are missing: torch computes instead, which is slower on CPUs (docs/cpu.md)")
    has_keys = deployment.router.access.api_key_file is not None or bool(os.environ.get(API_KEY))
    if listener.family == socket.AF_UNIX or has_keys:
        return
    address = ipaddress.ip_address(listener.getsockname()[0].partition("%")[0])
    if not address.is_loopback:
        logger.warning(
            "%s can be reached from other hosts, but --api-key-file is not given: everyone may use it", address
        )


def check_deployment(deployment: Deployment) -> Deployment:
    """Refuse errors that can be found without a process. Returns the deployment with local models (`with_local_model`).

    Raises ConfigError.
    """
    plan = plan_with_tiers(deployment.handoff, deployment.tiers, Path("/"), "")
    if deployment.launch.prefill or deployment.launch.decode:  # engines of other hosts have packages of their own
        check_installed(plan)
    if deployment.launch.prefill and deployment.launch.order not in ("auto", *plan.orders):
        raise ConfigError(
            f"--order {deployment.launch.order} is not one of connector {plan.name}: {', '.join(plan.orders)} or auto"
        )
    launch = deployment.launch
    if launch.backend:
        check_backends(launch.backends, launch.backend_key_file)
    if launch.fallback:
        check_backends([read_fallback(launch.fallback)], launch.fallback_key_file, "fallback")
    find_policy(deployment.launch.policy)
    isa()  # PDKV_ISA may name a level that this host has not
    api = deployment.router.api
    check_parser_names(api.tool_parser, api.reasoning_parser, api.tool_parser_plugin)
    seen = deployment.router.observability
    body_bytes = deployment.router.http.max_body_bytes
    if deployment.launch.router_fronts and body_bytes > MAX_BODY_BYTES:
        raise ConfigError(
            f"--max-body-bytes is {body_bytes}: with --router-fronts, at most {MAX_BODY_BYTES} are possible"
        )
    if seen.otlp_endpoint is not None:
        check_tracing()
    check_recording(seen)
    if seen.publish_kv_events_key_file is not None:
        ClusterKey.read(seen.publish_kv_events_key_file)
    check_processors(deployment)
    for config in (deployment.prefill, deployment.decode):
        check_proposer(config.speculative_config)
    read_keys(deployment.router.access.api_key_file)
    if deployment.launch.cluster_key_file is not None:
        ClusterKey.read(deployment.launch.cluster_key_file)
    if deployment.launch.engines_file is not None:
        for name in read_engines(deployment.launch.engines_file).values():
            deployment.launch.check_pool_of(name, "engines_file")
    if deployment.launch.engines_dns:
        make_resolver()
    if deployment.router.tls.ssl_certfile is not None:
        load_context(deployment.router.tls)
    prefill, decode = with_local_model(deployment.prefill), with_local_model(deployment.decode)
    deployment = dataclasses.replace(deployment, prefill=prefill, decode=decode)
    check_models(deployment)
    if deployment.on_ray:
        check_for_ray(deployment)
    else:
        check_memory([(prefill, deployment.launch.prefill), (decode, deployment.launch.decode)], deployment.tiers)
    return deployment


def check_for_ray(deployment: Deployment) -> None:
    """Refuse what only makes sense on this host. Raises ConfigError."""
    for config in (deployment.prefill, deployment.decode):
        for name in ("cpu_bind", "devices"):
            if (value := getattr(config, name)) is not None:
                raise ConfigError(
                    f"{name} names parts of one host, but Ray chooses those of each engine; got {value!r}"
                )
    if deployment.handoff.connector == "shared_memory":
        raise ConfigError("connector shared_memory works within one host: with --cluster ray, use p2p, nixl or a store")


def check_models(deployment: Deployment) -> None:
    """Refuse an unsupported model architecture, a tp that does not divide the model's heads, lengths beyond its
    positions, and lengths that give prefill and decode different RoPE frequencies. Raises ConfigError.

    KV is useless to an engine that rotates its queries by other frequencies than those that rotated the keys.
    """
    prefill, decode = deployment.prefill, deployment.decode
    read_sampling_defaults(prefill.model, prefill.generation_config)
    models = []
    for config in (prefill, decode):
        model = load_model_config(config.model, config.max_model_len, config.ignore_config_fields)
        models.append(model.quantized_at_load(config.quantization, config.model))
        if config is decode or deployment.launch.prefill:
            resolve_max_model_len(model, config.max_model_len)
            Shard(0, config.tp).heads(model.num_kv_heads)
    if deployment.launch.prefill and prefill.quantization != decode.quantization:
        raise ConfigError(
            f"prefill engines have --quantization {prefill.quantization or 'none'} and decode engines "
            f"{decode.quantization or 'none'}: KV of one would be useless to the other; give both the same"
        )
    other, rope = (model.rope_scaling for model in models)
    if deployment.launch.prefill and prefill.model == decode.model and rope != other and rope is not None:
        raise ConfigError(
            f"{decode.model}: the RoPE frequencies of this model ({rope.kind} scaling) depend on --max-model-len, but "
            f"prefill engines ({prefill.max_model_len or 'the default'}) and decode engines "
            f"({decode.max_model_len or 'the default'}) would have different ones: give both the same length"
        )


def check_processors(deployment: Deployment) -> None:
    """Refuse an unknown logits processor, and different ones for prefill and decode. Raises ConfigError.

    Prefill draws a request's first token, decode the others.
    """
    prefill, decode = deployment.prefill.logits_processors, deployment.decode.logits_processors
    for name in {**dict.fromkeys(prefill), **dict.fromkeys(decode)}:
        LOGITS_PROCESSORS.target(name)
    if deployment.launch.prefill and {*prefill} != {*decode}:
        raise ConfigError(
            f"prefill engines would have the logits processors {list(prefill)}, but decode engines {list(decode)}: "
            "both draw tokens of every request, so give both the same (--logits-processors)"
        )
