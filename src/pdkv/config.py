"""Configuration: frozen dataclasses layered by owner. Each field's help text serves the command line and the docs."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from msgspec import Meta

from pdkv.base.options import (
    MAX_SECONDS,
    Bytes,
    Names,
    Natural,
    Options,
    Positive,
    Seconds,
    Size,
    option,
    parse_numbers,
)
from pdkv.base.secret_options import without_secrets
from pdkv.errors import ConfigError
from pdkv.host.cuda_devices import count_cuda_devices
from pdkv.host.memory_limits import LEAST_POOL_BYTES

DEFAULT_MODEL = Path(__file__).parent / "default_model"
"""The embedded model, which is served unless --model is given."""

PACED = "paced:"
"""Prefix of `model` for engines that compute nothing but wait as long as a profile says (docs/testing.md)."""

DEFAULT_GPU_MEMORY_UTILIZATION = 0.9
"""Share of a GPU's memory for all engines on it together, unless they are given shares of their own."""


Preemption = Literal["auto", "recompute", "swap"]


def is_paced(model: Path) -> bool:
    """Whether engines of that model only wait."""
    return str(model).startswith(PACED)


def paced_part(target: str) -> Any:
    """The object `module:attribute` of `pdkv.testing`, imported by name since that package stands above this one."""
    return EntryPoint("", f"pdkv.testing.{target}", "").load()


class ModelFiles(Options):
    """Which model is served, and how its directory is read."""

    model: Path = option(
        DEFAULT_MODEL,
        "Hugging Face model directory, or ORG/NAME[@REVISION] on its hub (absent: the embedded default model), or "
        "paced:PROFILE",
        metavar="MODEL",
    )
    generation_config: Literal["auto", "none"] = option(
        "auto",
        "sampling defaults of requests: those of the model's generation_config.json (model), or none of them",
        also={"vllm": "none"},
    )
    chat_template: Path | None = option(
        None, "Jinja file with the chat template of all conversations, in the place of the model's own", metavar="FILE"
    )
    chat_template_content_format: Literal["auto", "string", "openai"] = option(
        "auto",
        "how the chat template takes what turns say; auto: as it is found when the model is loaded; string: as texts; "
        "openai: as lists of text parts",
    )
    ignore_config_fields: Names = option(
        (), "fields of config.json to ignore although their effect on the model is not known", metavar="NAME"
    )


MODEL_FILES = tuple(field.name for field in fields(ModelFiles))
"""Names of the options that prefill and decode engines have in common."""


class EngineConfig(ModelFiles):
    """Configuration of one engine."""

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = option(
        "auto",
        "computation dtype; auto: the model's, but float32 instead of bfloat16 on a CPU that only emulates it",
        also={"half": "float16", "float": "float32"},
    )
    quantization: Literal["int8"] | None = option(
        None,
        "on a CPU, quantize dense weights when they are loaded; int8: 8 bits with a scale for each output, each number "
        "within 1/254 of the output's largest. Part of the model's identity",
        also={"none": None},
    )
    kv_cache_dtype: Literal["auto", "fp8"] = option(
        "auto",
        "dtype in which KV is stored; auto: the computation dtype; fp8: e4m3fn, with the checkpoint's KV scales",
        also={"fp8_e4m3": "fp8"},
    )
    device: Literal["auto", "cpu", "cuda"] = option("auto", "device to compute on; auto: cuda if available")
    devices: str | None = option(
        None,
        "CUDA devices that ranks may compute on, such as 0,1 or 0-3 (default: all); each rank takes one, and engines "
        "share devices if there are too few",
        metavar="LIST",
    )
    block_size: Annotated[int, Meta(ge=16, multiple_of=16)] = option(16, "tokens per KV block, a multiple of 16")
    kv_cache_memory: Size | None = option(
        None,
        "KV pool of one engine, such as 512MiB; must hold one request of max_model_len tokens; auto: on a CPU what "
        "max_num_seqs such requests need, up to max_kv_cache_memory; on a GPU what gpu_memory_utilization leaves",
        also={"auto": None},
    )
    max_kv_cache_memory: Size | None = option(
        None,
        "bound of a pool that sizes itself on a CPU (default: a quarter of the memory that is available at start, "
        "shared out among the engines of a launch, and at least 256MiB each)",
    )
    gpu_memory_utilization: Annotated[float, Meta(gt=0, le=1)] | None = option(
        None, "share of its GPU's memory that an engine may use (default: 0.9, divided among the engines on one GPU)"
    )
    max_num_seqs: Positive = option(256, "maximum number of requests in one step")
    max_num_batched_tokens: Positive | None = option(
        None, "most tokens in one step, at least max_num_seqs (default: 2048 on a CPU, 8192 on a GPU)"
    )
    max_model_len: Positive | None = option(None, "longest prompt + output (default: the model's)")
    max_steps_ahead: Annotated[int, Meta(ge=0, le=2)] = option(
        2, "steps planned while an earlier one computes, so that the model never waits: 0 (strictly in turn) to 2"
    )
    preemption: Preemption = option(
        "auto",
        "what to do with the KV of preempted requests: swap: reload it from host memory or a store if it is there; "
        "recompute: compute it again; auto: whichever takes less time",
    )
    enable_prefix_caching: bool = option(
        True, "reuse the KV of a prompt's first tokens if an earlier request has left it in the engine's pool"
    )
    in_turn_below_s: Annotated[float, Meta(ge=0, le=MAX_SECONDS)] = option(
        0.05, "on a CPU, steps expected to take less than this are not planned ahead, which is cheaper; 0: all are"
    )
    attention_backend: Literal["auto", "triton", "flashinfer"] = option(
        "auto",
        "attention on a GPU: pdkv's Triton kernels, or FlashInfer for steps with prompts; auto: FlashInfer if it is "
        "installed and passes a test at start",
        also={"FLASHINFER": "flashinfer", "TRITON_ATTN": "triton"},
    )
    enforce_eager: bool = option(
        False, "on a GPU, launch the kernels of every step one by one instead of decode steps as CUDA graphs"
    )
    long_prefill_token_threshold: Natural = option(
        0, "most prompt tokens of one request in a step that others run in or wait for; 0 = no bound"
    )
    threads: Positive | None = option(None, "compute threads per rank (default: cores / ranks of all engines)")
    cpu_linears: Literal["auto", "torch"] = option(
        "auto",
        "linear layers on a CPU and the passes between them: auto: pdkv's compiled kernels where they are faster "
        "than torch; torch: always torch; engines that share KV or take over streams must agree",
    )
    tp: Positive = option(1, "ranks (processes) of one engine, which share its heads, neurons and vocabulary")
    check_finite: bool = option(
        False, "check KV and logits for NaN and infinity, and fail only the requests that contain them"
    )
    rank_timeout_s: Seconds = option(30.0, "how long a rank may keep the others waiting before the engine exits")
    grammar_time_s: Seconds = option(
        2.0,
        "processor time that one grammar (JSON schema, regex, EBNF) may take; each token earns 5 ms back. Beyond it, "
        "its requests get a 400, and so do others with the same grammar for a minute",
    )
    grammar_memory: Size = option(512 << 20, "memory limit of each process that matches a tenant's grammars")
    grammar_processes: Positive = option(
        8, "maximum number of such processes of an engine; if there are more tenants, some share one"
    )
    logits_processors: Names = option(
        (),
        "logits processors that requests may ask for: names of entry points in the group "
        '"pdkv.sampling.logits_processors", or "module:Class"',
        metavar="NAME",
    )
    cpu_bind: str | None = option(
        None, "CPUs to pin engines to, such as 0-1 or 0,2; sets for several engines are separated by |", metavar="CPUS"
    )

    @property
    def host_kv_bytes(self) -> int:
        """KV pool of the engine, all ranks together, where it computes on the CPU; if it sizes itself, at most."""
        return self.kv_cache_memory or self.max_kv_cache_memory or LEAST_POOL_BYTES

    @property
    def sizes_itself(self) -> bool:
        """Whether the pool has the size that the host's memory and the model suggest."""
        return self.kv_cache_memory is None and self.in_host_memory

    @property
    def in_host_memory(self) -> bool:
        """Whether the pool will lie in host memory, as far as that is known without torch."""
        return self.device == "cpu" or (self.device == "auto" and count_cuda_devices() == 0)

    @property
    def least_step_ahead_s(self) -> float:
        """Duration in seconds from which a step is worth planning ahead: see `make_step_loop`."""
        return self.in_turn_below_s if self.in_host_memory else 0.0

    @property
    def device_numbers(self) -> tuple[int, ...] | None:
        """The CUDA devices named by `devices`; None: all."""
        return None if self.devices is None else parse_numbers("devices", self.devices)

    def __post_init__(self) -> None:
        super().__post_init__()
        most = self.max_num_batched_tokens
        if most is not None and most < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens ({most}) must be at least max_num_seqs ({self.max_num_seqs}): in a step every "
                "request that decodes takes a token"
            )
        numbers = self.device_numbers
        if numbers is not None and len(numbers) < self.tp:
            raise ConfigError(f"devices: tp {self.tp} needs as many CUDA devices, got {self.devices!r}")


class HandoffConfig(Options):
    """How engines pass KV to one another."""

    connector: str = option(
        "shared_memory",
        "KV connector, by its registered name (default: shared_memory, or nixl if KV lies on several GPUs)",
        metavar="NAME",
    )
    connector_config: Mapping[str, str] = option(
        {}, "connector options; KEY=@FILE reads the value from a file", metavar="KEY=VALUE"
    )
    kv_load_failure_policy: Literal["recompute", "fail"] = option("recompute", "what decode does when a KV load fails")
    kv_checksum: Literal["off", "sample", "on"] = option(
        "on",
        "compare digests of handed-off KV, before sending and after arrival: never, for one transfer in 16, or always",
    )
    kv_load_timeout_s: Seconds = option(30.0, "deadline of a KV load, counted from its allocation")
    lease_timeout_s: Seconds = option(
        90.0, "how long a prefill engine keeps handed-off KV; must exceed the load deadline"
    )
    max_leased_fraction: Annotated[float, Meta(gt=0)] = option(
        0.5, "share of the KV pool for leases and prompts being computed; above 1, prompts may preempt one another"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.lease_timeout_s <= self.kv_load_timeout_s:
            raise ConfigError(
                f"lease_timeout_s ({self.lease_timeout_s}) must exceed kv_load_timeout_s ({self.kv_load_timeout_s})"
            )


class TiersConfig(Options):
    """Where KV is kept below the engines' pools, next to any hand-off."""

    kv_host_memory: Annotated[Bytes, Meta(ge=1 << 20)] | None = option(
        None,
        "host memory of each engine for a copy of all KV; the least recently used is dropped first; the launch keeps "
        "it if the engine dies",
    )
    kv_store: str = option(
        "",
        "URL (or @FILE that holds it) of a store below host memory, such as redis://…, file:///directory, "
        "s3://bucket, lmcache://…; several, separated by commas, form tiers, fastest first",
        metavar="URL[,URL…]",
        secret=True,
    )

    @property
    def wanted(self) -> bool:
        """Whether any tier is configured."""
        return bool(self.kv_host_memory or self.kv_store)


class HttpApi(Options):
    """How the HTTP server reads requests."""

    unknown_fields: Literal["reject", "ignore"] = option(
        "reject", "what is done with a field that the server does not know: refuse the request, or drop the field"
    )
    tool_parser: str = option(
        "auto",
        "parser for tool calls in answers; auto: chosen by the model's chat template; none: calls stay in the text",
        metavar="NAME",
    )
    tool_parser_plugin: Path | None = option(
        None,
        "Python file that defines a tool parser, which runs in the router; it must be writable only by you",
        metavar="FILE",
    )
    reasoning_parser: str = option(
        "none", "parser that separates reasoning from the answer; none: reasoning stays in the text", metavar="NAME"
    )
    trust_request_chat_template: bool = option(
        False, "take chat_template of requests; each is rendered by a process of its own, with 2 s of a processor"
    )
    stop_in_reasoning: bool = option(
        False, "let stop strings end an answer within its reasoning, too; else they look at what follows it"
    )

    @property
    def ignores_unknown(self) -> bool:
        """Whether unknown fields are dropped."""
        return self.unknown_fields == "ignore"


class RecoveryConfig(Options):
    """What the router does with requests whose engines fail (docs/failures.md)."""

    retry_limit: Natural = option(
        3, "how many times a request may be started again on other engines before its first token"
    )
    migration_limit: Natural = option(
        3, "how many times a request may continue on another engine after its first token; 0: it fails at once"
    )
    take_over: bool = option(
        False,
        "while no engine of one role is live, let engines of the other do its work, too; otherwise requests wait "
        "for one",
    )


Reuse = Literal["auto", "always", "never"]
"""When an engine that runs a prompt reads KV that another engine has cached for it."""


LocalTurns = Literal["auto", "always", "never"]
"""Whether a decode engine that has nearly all of a prompt computes the rest itself."""


class ReuseConfig(Options):
    """How KV that some engine has already cached is reused (docs/kv-hierarchy.md)."""

    kv_reuse: Reuse = option(
        "auto",
        "whether prefill reads KV that another engine has cached; auto: if that takes less time than computing it",
    )
    local_turns: LocalTurns = option(
        "auto",
        "whether a decode engine that has nearly all of a prompt computes the rest itself; auto: if that takes less "
        "time than prefill and a hand-off; only with policy prefix_aware",
    )


class HttpLimits(Options):
    """Limits of the HTTP server, for one client and for all together."""

    max_body_bytes: Size = option(4 << 20, "size of a request body; larger ones get 413")
    max_body_memory: Size = option(
        24 << 20, "memory for request bodies that are not tokenized yet; beyond it, reading further bodies waits"
    )
    max_header_bytes: Size = option(32 << 10, "size of a request line and headers; larger ones get 431")
    max_headers: Positive = option(100, "number of headers of a request; more get 431")
    max_url_bytes: Size = option(8 << 10, "length of a URL; longer ones get 414")
    max_connections: Positive = option(
        8192, "open connections, fewer if the limit on open files is low; further ones get 503"
    )
    header_timeout_s: Seconds = option(
        10.0, "how long headers may take, from a request's first byte on; a connection's first ones: from connecting on"
    )
    body_timeout_s: Seconds = option(
        60.0, "how long a request's body may take, and how long it may wait for room before that"
    )
    idle_timeout_s: Seconds = option(75.0, "how long a connection may stay open between requests")
    request_timeout_s: Seconds = option(
        600.0,
        "how long a request may wait for its turn, for its first token, and for each further one; a client bounds the "
        "whole by the header x-pd-timeout-s",
    )
    send_timeout_s: Seconds = option(
        30.0, "how long a client may read nothing of what is there for it: it is dropped, and what it asked for ends"
    )
    stream_ping_s: Annotated[float, Meta(ge=1, le=MAX_SECONDS)] = option(
        15.0,
        "how long a stream may be silent, at least 1: then it begins without its first token, and has a comment after "
        "each such time, lest proxies cut it",
    )
    min_send_rate: Annotated[Bytes, Meta(ge=0)] = option(
        4 << 10,
        "average bytes per second that a client must read while there is something to read; slower clients are "
        "treated likewise",
    )
    max_answer_memory: Size = option(
        128 << 20,
        "memory of answers that are not streamed, until they are read, of which a client may hold as much as it leaves "
        "free; beyond it requests fail",
    )

    keep_responses_s: Annotated[float, Meta(ge=0, le=MAX_SECONDS)] = option(
        3600.0, "how long a response is kept for previous_response_id, for a client with an API key; 0: not at all"
    )
    max_kept_responses: Size = option(64 << 20, "memory of responses that are kept; beyond it the oldest are forgotten")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_body_memory < self.max_body_bytes:
            raise ConfigError(
                f"max_body_memory ({self.max_body_memory}) must be at least max_body_bytes ({self.max_body_bytes})"
            )
        if self.max_url_bytes > self.max_header_bytes:
            raise ConfigError(
                f"max_url_bytes ({self.max_url_bytes}) must be at most max_header_bytes ({self.max_header_bytes})"
            )


class AdmissionConfig(Options):
    """Limits on what may wait in the router for engines (docs/admission.md)."""

    max_queued_requests: Positive = option(
        16384, "choices of requests that may wait for engines (each prompt counts n times); further requests get 429"
    )
    max_queued_tokens: Positive = option(1 << 22, "prompt tokens of waiting requests; further requests get 429")
    best_priority: int = option(0, "most urgent priority that clients without a key may ask for; lower is more urgent")
    objectives: Mapping[str, str] = option(
        {},
        "priorities of the objectives that requests may name in the header x-llm-d-inference-objective",
        metavar="NAME=PRIORITY",
    )
    require_cache_salt: bool = option(
        False,
        "refuse requests without cache_salt, so that counts of cached tokens reveal nothing about other users' prompts",
    )

    @property
    def priorities(self) -> dict[str, int]:
        """The priority of each objective."""
        return {name: int(text) for name, text in self.objectives.items()}

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, text in self.objectives.items():
            if not re.fullmatch(r"-?[0-9]{1,9}", text):
                raise ConfigError(f"objectives: {name}: a priority of at most 9 digits was expected, got {text!r}")


class AccessConfig(Options):
    """Access rights to the router (docs/admission.md)."""

    api_key_file: Path | None = option(
        None, "TOML file of API keys, made by `pd key new`; without it, clients need no key", metavar="FILE"
    )
    protect_metrics: bool = option(False, "serve /metrics and /topology only to keys that have admin = true")
    cors_origin: Names = option((), "web origins whose pages may use the API; * = all", metavar="ORIGIN")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.protect_metrics and self.api_key_file is None:
            raise ConfigError("protect_metrics requires api_key_file: without keys there is no admin")


class TlsConfig(Options):
    """TLS of the HTTP server (docs/operations.md), with vLLM's names."""

    ssl_certfile: Path | None = option(
        None, "PEM file of the server's certificate chain; enables HTTPS and disables plain HTTP", metavar="FILE"
    )
    ssl_keyfile: Path | None = option(
        None, "PEM file of its private key, unencrypted (default: in --ssl-certfile)", metavar="FILE"
    )
    ssl_ca_certs: Path | None = option(
        None, "PEM file of the authorities that sign client certificates", metavar="FILE"
    )
    ssl_cert_reqs: Literal["none", "optional", "required"] | None = option(
        None,
        "whether clients must have a certificate (default: required with --ssl-ca-certs, else none)",
        also={"0": "none", "1": "optional", "2": "required"},
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        given = next((name for name in ("ssl_keyfile", "ssl_ca_certs") if getattr(self, name) is not None), None)
        if self.ssl_certfile is None and (given is not None or self.ssl_cert_reqs not in (None, "none")):
            raise ConfigError(f"{given or 'ssl_cert_reqs'} requires ssl_certfile: without it there is no TLS")
        if self.ssl_ca_certs is None and self.ssl_cert_reqs not in (None, "none"):
            raise ConfigError(
                f"ssl_cert_reqs {self.ssl_cert_reqs} requires ssl_ca_certs: set it to the authorities that sign "
                "client certificates"
            )
        if self.ssl_ca_certs is not None and self.ssl_cert_reqs == "none":
            raise ConfigError("ssl_ca_certs has no effect with ssl_cert_reqs none: no certificate would be looked at")

    @property
    def client_certificates(self) -> Literal["none", "optional", "required"]:
        """Whether clients must present a certificate."""
        return self.ssl_cert_reqs or ("none" if self.ssl_ca_certs is None else "required")


class HealthConfig(Options):
    """How the router finds out which engines work (docs/health.md)."""

    probe_interval_s: Annotated[float, Meta(ge=0)] = option(
        10.0, "how long an engine may have nothing to do before the router has it generate a token; 0: never"
    )


class ObservabilityConfig(Options):
    """What a deployment reports about itself besides its metrics."""

    log_format: Literal["text", "json"] = option(
        "text", "format of log lines on stderr: plain text, or one JSON object each"
    )
    access_log: bool = option(True, "log one line per request: client, outcome, engines, tokens and times")
    otlp_endpoint: str | None = option(
        None, "send request spans to this OpenTelemetry collector (OTLP over HTTP); needs pdkv[otel]", metavar="URL"
    )
    loop_watchdog_ms: Annotated[float, Meta(ge=0)] = option(
        0.0, "count and name what holds the router's event loop for longer; a thread looks at it all the time; 0 = off"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.otlp_endpoint is not None:
            _check_collector(self.otlp_endpoint)


@dataclass(frozen=True, kw_only=True)
class RouterConfig:
    """The router's configuration, by concern: everything `pd launch` passes to it, with the headings of help texts."""

    http: HttpLimits = field(default_factory=HttpLimits)
    api: HttpApi = field(default_factory=HttpApi)
    admission: AdmissionConfig = field(default_factory=AdmissionConfig)
    access: AccessConfig = field(default_factory=AccessConfig)
    tls: TlsConfig = field(default_factory=TlsConfig)
    health: HealthConfig = field(default_factory=HealthConfig)
    recovery: RecoveryConfig = field(default_factory=RecoveryConfig)
    reuse: ReuseConfig = field(default_factory=ReuseConfig)
    observability: ObservabilityConfig = field(default_factory=ObservabilityConfig)

    @property
    def reads_files(self) -> bool:
        """Whether the router has files to read again on SIGHUP."""
        return self.access.api_key_file is not None or self.tls.ssl_certfile is not None


def _check_collector(url: str) -> None:
    """Raise ConfigError for an invalid collector URL, without repeating a password in it."""
    try:
        parts = urlsplit(url)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        good = False
    if not good:
        raise ConfigError(f"otlp_endpoint must be http://HOST:PORT or https://…, got {without_secrets(url)!r}")
    if "@" in parts.netloc:
        raise ConfigError("otlp_endpoint must not contain a password: put it into OTEL_EXPORTER_OTLP_HEADERS")
