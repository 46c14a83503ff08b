"""Configuration: frozen dataclasses layered by owner. Each field's help text serves the command line and the docs."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple
from urllib.parse import urlsplit

from msgspec import Meta

from pdkv.base.options import (
    MAX_SECONDS,
    TCP,
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
    """Whether the model is a profile of paced engines, which only wait."""
    return str(model).startswith(PACED)


def paced_part(target: str) -> Any:
    """The object `module:attribute` of `pdkv.testing`, imported by name since that package stands above this one."""
    return EntryPoint("", f"pdkv.testing.{target}", "").load()


class ModelFiles(Options):
    """Which model is served, and how its directory is read."""

    model: Path = option(
        DEFAULT_MODEL,
        "Hugging Face model directory, or ORG/NAME[@REVISION] on its hub (absent: the embedded default model), or "
        "paced:PROFILE (a simulated engine without weights, for load tests)",
        metavar="MODEL",
    )
    generation_config: Literal["auto", "none"] = option(
        "auto",
        "sampling defaults of requests; auto: the model's generation_config.json; none: ignore it",
        also={"vllm": "none"},
    )
    chat_template: Path | None = option(
        None, "Jinja file with the chat template to use instead of the model's own", metavar="FILE"
    )
    chat_template_content_format: Literal["auto", "string", "openai"] = option(
        "auto",
        "form in which messages' content is passed to the chat template; auto: detected when the model is loaded; "
        "string: plain text; openai: lists of text parts",
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
        "on a CPU, quantize dense weights when they are loaded; int8: 8 bits, one scale per output channel; "
        "rounding error at most 1/254 of that channel's largest weight. Part of the model's identity",
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
        "size of one engine's KV pool, such as 512MiB; it must hold one request of max_model_len tokens; auto: on a "
        "CPU, what max_num_seqs requests of that length need, up to max_kv_cache_memory; on a GPU, what is left of "
        "gpu_memory_utilization",
        also={"auto": None},
    )
    max_kv_cache_memory: Size | None = option(
        None,
        "upper limit of an automatically sized pool on a CPU (default: a quarter of the memory that is available at "
        "start, divided among the launch's engines, and at least 256MiB each)",
    )
    gpu_memory_utilization: Annotated[float, Meta(gt=0, le=1)] | None = option(
        None, "share of the GPU's memory that an engine may use (default: 0.9, divided among the engines on one GPU)"
    )
    max_num_seqs: Positive = option(256, "maximum number of requests in one step")
    max_num_batched_tokens: Positive | None = option(
        None, "maximum number of tokens in one step, at least max_num_seqs (default: 2048 on a CPU, 8192 on a GPU)"
    )
    max_model_len: Positive | None = option(
        None, "maximum length of prompt and output together, in tokens (default: the model's)"
    )
    max_steps_ahead: Annotated[int, Meta(ge=0, le=2)] = option(
        2, "steps to plan while the model still computes an earlier one, so that it never waits; 0: none; at most 2"
    )
    preemption: Preemption = option(
        "auto",
        "how preempted requests get their KV back; swap: reload it from host memory or a store if it is there; "
        "recompute: compute it again; auto: whichever takes less time",
    )
    enable_prefix_caching: bool = option(
        True, "reuse the KV of a prompt's first tokens if an earlier request has left it in the engine's pool"
    )
    in_turn_below_s: Annotated[float, Meta(ge=0, le=MAX_SECONDS)] = option(
        0.05,
        "on a CPU, plan steps shorter than this one at a time, because planning ahead costs more than it saves; 0: "
        "always plan ahead",
    )
    enforce_eager: bool = option(False, "on a GPU, launch every kernel individually; do not use CUDA graphs")
    long_prefill_token_threshold: Natural = option(
        0,
        "maximum prompt tokens that one request may have in a step while other requests are running or waiting; 0: no "
        "limit",
    )
    threads: Positive | None = option(
        None, "compute threads per rank (default: the host's cores divided by the ranks of all engines)"
    )
    cpu_linears: Literal["auto", "torch"] = option(
        "auto",
        "which kernels compute linear layers and the element-wise operations between them on a CPU; auto: pdkv's "
        "compiled kernels where they are faster than torch; torch: always torch; must be the same on all engines that "
        "share KV or take over one another's streams",
    )
    tp: Positive = option(1, "ranks (processes) per engine, among which heads, neurons and vocabulary are divided")
    check_finite: bool = option(
        False, "check KV and logits for NaN and infinity, and fail only the requests that contain them"
    )
    rank_timeout_s: Seconds = option(30.0, "how long a rank may keep the others waiting before the engine exits")
    grammar_time_s: Seconds = option(
        2.0,
        "CPU time that one grammar (JSON schema, regex, EBNF) may take; each generated token adds 5 ms to it. Once it "
        "is used up, the grammar's requests get a 400, as do new ones with the same grammar for a minute",
    )
    grammar_memory: Size = option(512 << 20, "memory limit of each process that matches a tenant's grammars")
    grammar_processes: Positive = option(
        8, "maximum number of grammar processes per engine; if there are more tenants, some share a process"
    )
    logits_processors: Names = option(
        (),
        "logits processors that requests may use: names of entry points in the group "
        '"pdkv.logits_processors", or "module:Class"',
        metavar="NAME",
    )
    speculative_config: Mapping[str, str] = option(
        {},
        "guess tokens to come and verify them several at a time, which changes no token: a JSON object or KEY=VALUE, "
        "with the method (ngram, suffix, prediction, or one that is plugged in) and its keys",
        metavar="JSON",
    )
    cpu_bind: str | None = option(
        None,
        "CPUs to pin engines to, such as 0-1 or 0,2; sets for several engines are separated by |; auto: each "
        "engine of a launch has the CPUs of one NUMA node, and so its memory; the nodes are taken in turn",
        metavar="CPUS",
    )

    @property
    def host_kv_bytes(self) -> int:
        """Bytes of the engine's KV pool on a CPU, all ranks together; an upper limit if the pool is sized
        automatically.
        """
        return self.kv_cache_memory or self.max_kv_cache_memory or LEAST_POOL_BYTES

    @property
    def sizes_itself(self) -> bool:
        """Whether the pool is sized automatically, by the host's memory and the model."""
        return self.kv_cache_memory is None and self.in_host_memory

    @property
    def in_host_memory(self) -> bool:
        """Whether the pool will lie in host memory, as far as that is known without torch."""
        return self.device == "cpu" or (self.device == "auto" and count_cuda_devices() == 0)

    @property
    def least_step_ahead_s(self) -> float:
        """Expected duration in seconds from which on a step is planned ahead: see `make_step_loop`."""
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
                f"max_num_batched_tokens ({most}) must be at least max_num_seqs ({self.max_num_seqs}): every "
                "decoding request takes one token of each step"
            )
        numbers = self.device_numbers
        if numbers is not None and len(numbers) < self.tp:
            raise ConfigError(f"devices: tp={self.tp} needs {self.tp} CUDA devices, got {self.devices!r}")


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
        "compare a digest made before sending with one made after arrival; off: never; sample: for one transfer in 16; "
        "on: always",
    )
    kv_load_timeout_s: Seconds = option(30.0, "deadline of a KV load, counted from when its blocks are allocated")
    lease_timeout_s: Seconds = option(
        90.0,
        "how long at most a prefill engine keeps handed-off KV that its reader has not released; must exceed "
        "kv_load_timeout_s",
    )
    max_leased_fraction: Annotated[float, Meta(gt=0)] = option(
        0.5,
        "limit on blocks held by leases and by prompts in prefill, as a multiple of the KV pool; above 1, more prompts "
        "are admitted than fit, and may preempt one another",
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
        "host memory per engine for copies of its KV, least recently used dropped first; survives the engine's death",
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


PoolingKind = Literal["auto", "last", "mean"]
"""How prompts become embeddings; auto: as the model's files say, or by the last token."""


class HttpApi(Options):
    """How the HTTP server reads requests."""

    unknown_fields: Literal["reject", "ignore"] = option(
        "reject", "what to do with unknown fields; reject: refuse the request; ignore: drop the field"
    )
    tool_parser: str = option(
        "auto",
        "parser for tool calls in answers; auto: chosen by the model's chat template; none: calls stay in the text",
        metavar="NAME",
    )
    tool_parser_plugin: Path | None = option(
        None,
        "Python file that defines a tool parser, which runs in the router; the file must be writable only by you",
        metavar="FILE",
    )
    reasoning_parser: str = option(
        "none", "parser that separates reasoning from the answer; none: reasoning stays in the text", metavar="NAME"
    )
    trust_request_chat_template: bool = option(
        False, "accept chat_template from requests; each is rendered in its own process, limited to 2 s of CPU time"
    )
    stop_in_reasoning: bool = option(
        False,
        "let stop strings end an answer within its reasoning, too; by default they apply only to the text after it",
    )

    pooling: PoolingKind = option(
        "auto",
        "how hidden states become an embedding: the last token's, or the mean of all; auto: as the model's "
        "1_Pooling/config.json says, else the last one's",
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
        3,
        "how many times a request may continue on another engine after its first token; 0: it fails if its engine dies",
    )
    take_over: bool = option(
        False,
        "while no engine of one role is live, let engines of the other role do its work, too; otherwise requests wait "
        "until one is live",
    )


Reuse = Literal["auto", "always", "never"]
"""When an engine that runs a prompt reads KV that another engine has cached for it."""


LocalTurns = Literal["auto", "always", "never"]
"""Whether a decode engine that has nearly all of a prompt computes the rest itself."""


class ReuseConfig(Options):
    """How KV that some engine has already cached is reused (docs/kv-hierarchy.md)."""

    kv_reuse: Reuse = option(
        "auto",
        "whether prefill engines read KV that another engine has cached; auto: if that takes less time than computing "
        "it",
    )
    local_turns: LocalTurns = option(
        "auto",
        "whether a decode engine that has nearly all of a prompt's KV computes the rest itself; auto: if that takes "
        "less time than prefill and a hand-off; only with policy prefix_aware",
    )


class HttpLimits(Options):
    """Limits of the HTTP server, for one client and for all together."""

    max_body_bytes: Size = option(4 << 20, "maximum size of a request body; larger ones get 413")
    max_body_memory: Size = option(
        24 << 20, "memory for request bodies that are not tokenized yet; beyond it, reading further bodies waits"
    )
    max_header_bytes: Size = option(32 << 10, "maximum size of a request's line and headers; larger ones get 431")
    max_headers: Positive = option(100, "maximum number of a request's headers; more get 431")
    max_url_bytes: Size = option(8 << 10, "maximum length of a URL; longer ones get 414")
    max_connections: Positive = option(
        8192, "maximum number of open connections, lower if the limit on open files is low; further ones get 503"
    )
    header_timeout_s: Seconds = option(
        10.0,
        "time allowed for a request's headers, counted from the request's first byte; for the first request of a "
        "connection, from when the client connected",
    )
    body_timeout_s: Seconds = option(
        60.0, "time allowed for a request's body to arrive, and for it to wait for memory before that"
    )
    idle_timeout_s: Seconds = option(75.0, "how long a connection may stay open between requests")
    request_timeout_s: Seconds = option(
        600.0,
        "how long a request may wait for its turn, for its first token, and for each further one; clients limit the "
        "total time with the header x-pd-timeout-s",
    )
    send_timeout_s: Seconds = option(
        30.0,
        "how long a client may leave waiting data unread before its connection is closed and its requests are aborted",
    )
    stream_ping_s: Annotated[float, Meta(ge=1, le=MAX_SECONDS)] = option(
        15.0,
        "seconds of silence (at least 1) after which a stream sends an SSE comment, so that proxies do not close it; "
        "if no token has come yet, the response starts with it; repeated while the silence lasts",
    )
    min_send_rate: Annotated[Bytes, Meta(ge=0)] = option(
        4 << 10,
        "average bytes per second that a client must read while data waits for it; slower clients are disconnected too",
    )
    max_answer_memory: Size = option(
        128 << 20,
        "memory for non-streamed answers not yet read; a client that holds some of it gets more only if at least as "
        "much as it then holds is left free for the others; requests that would exceed it fail",
    )

    keep_responses_s: Annotated[float, Meta(ge=0, le=MAX_SECONDS)] = option(
        3600.0, "how long responses to clients with an API key are kept for previous_response_id; 0: they are not kept"
    )
    max_kept_responses: Size = option(64 << 20, "memory for kept responses; beyond it the oldest are dropped")

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
        16384,
        "maximum number of choices waiting for engines (a request counts its prompts times its `n`); further requests "
        "get 429",
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
                f"ssl_cert_reqs={self.ssl_cert_reqs!r} needs ssl_ca_certs: set it to the authorities that sign "
                "client certificates"
            )
        if self.ssl_ca_certs is not None and self.ssl_cert_reqs == "none":
            raise ConfigError("ssl_ca_certs has no effect with ssl_cert_reqs none: no certificate would be checked")

    @property
    def client_certificates(self) -> Literal["none", "optional", "required"]:
        """Whether clients must present a certificate."""
        return self.ssl_cert_reqs or ("none" if self.ssl_ca_certs is None else "required")


class HealthConfig(Options):
    """How the router finds out which engines work (docs/health.md)."""

    probe_interval_s: Annotated[float, Meta(ge=0)] = option(
        10.0, "idle time after which the router probes an engine by making it generate one token; 0: never"
    )


class ObservabilityConfig(Options):
    """What a deployment reports about itself besides its metrics."""

    log_format: Literal["text", "json"] = option(
        "text", "format of log lines on stderr; text: plain text; json: one JSON object per line"
    )
    access_log: bool = option(True, "log one line per request: client, outcome, engines, tokens and times")
    explain_share: Annotated[float, Meta(ge=0, le=1)] = option(
        0.0, "share of requests whose choices of engines are logged, and shown by GET /admin/requests/ID"
    )
    publish_kv_events: str | None = option(
        None,
        "publish what engines have cached, by keys, in the form of vLLM's KV events",
        metavar="tcp://ADDRESS:PORT|ipc://PATH",
    )
    publish_kv_events_key_file: Path | None = option(
        None,
        "file with the secret that subscribers of --publish-kv-events must have, too; needed for tcp://",
        metavar="FILE",
    )
    otlp_endpoint: str | None = option(
        None, "send request spans to this OpenTelemetry collector (OTLP over HTTP); needs pdkv[otel]", metavar="URL"
    )
    record_trace: Path | None = option(
        None,
        "record arrivals, lengths and keyed hashes of prompts, never what they say, to this file or, if it is there, "
        "to FILE.1 and so on; pd replay sends them again",
        metavar="FILE",
    )
    record_trace_bytes: Annotated[Bytes, Meta(ge=4096)] = option(1 << 30, "size at which a recording ends")
    loop_watchdog_ms: Annotated[float, Meta(ge=0)] = option(
        0.0,
        "count and log whatever blocks the router's event loop for longer than this; costs one busy watcher thread; "
        "0: off",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.otlp_endpoint is not None:
            _check_collector(self.otlp_endpoint)
        _check_publisher(self.publish_kv_events, self.publish_kv_events_key_file is not None)


class Bounds(NamedTuple):
    """The least and the most engines of a role."""

    least: int
    most: int

    @classmethod
    def parse(cls, text: str) -> "tuple[str, Bounds]":
        """The role and its bounds from a text such as prefill=1..4. Raises ConfigError."""
        found = re.fullmatch(r"(prefill|decode)=([0-9]{1,4})\.\.([0-9]{1,4})", text)
        bounds = cls(int(found[2]), int(found[3])) if found is not None else cls(0, 0)
        if found is None or not 1 <= bounds.least <= bounds.most:
            raise ConfigError(
                f"autoscale: prefill=MIN..MAX or decode=MIN..MAX was expected, with 1 <= MIN <= MAX, such as "
                f"prefill=1..4, got {text!r}"
            )
        return found[1], bounds


class AutoscaleConfig(Options):
    """How a launch chooses the number of its engines (docs/autoscaling.md)."""

    autoscale: Names = option(
        (), "choose the number of engines by the load, between bounds such as prefill=1..4,decode=1..6",
        metavar="ROLE=MIN..MAX",
    )  # fmt: skip
    slo_ttft_ms: Annotated[float, Meta(gt=0, le=1e9)] = option(
        1000.0, "milliseconds within which --autoscale would have the first token of a request"
    )
    slo_tpot_ms: Annotated[float, Meta(gt=0, le=1e9)] = option(
        50.0, "milliseconds that --autoscale would have each further token take"
    )
    slo_attainment: Annotated[float, Meta(gt=0, lt=1)] = option(
        0.95, "part of the requests that should meet each of the two"
    )
    scale_down_after_s: Annotated[float, Meta(ge=1, le=86_400)] = option(
        120.0, "for so long --autoscale must not have needed an engine before it is taken away"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.bounds) < len(self.autoscale):
            raise ConfigError(f"autoscale: a role was expected once, got {','.join(self.autoscale)}")

    @property
    def bounds(self) -> dict[str, Bounds]:
        """Bounds of the number of engines by role; empty: it stays as it is."""
        return dict(map(Bounds.parse, self.autoscale))

    def check(self, prefill: int, decode: int) -> None:
        """Refuse numbers of engines at the beginning that lie outside of the bounds. Raises ConfigError."""
        for role, bounds in self.bounds.items():
            count = prefill if role == "prefill" else decode
            if not bounds.least <= count <= bounds.most:
                none = ": a launch of aggregated engines has bounds for decode alone" if not count else ""
                raise ConfigError(f"{role}: {bounds.least} to {bounds.most} was expected, got {count}{none}")


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
    autoscaling: AutoscaleConfig = field(default_factory=AutoscaleConfig)

    @property
    def reads_files(self) -> bool:
        """Whether the router has files to read again on SIGHUP."""
        return self.access.api_key_file is not None or self.tls.ssl_certfile is not None


def _check_publisher(endpoint: str | None, has_key: bool) -> None:
    """Raise ConfigError for an endpoint at which nothing can be published, or to which strangers could subscribe."""
    found = re.fullmatch(rf"{TCP}|ipc:///\S+", endpoint or "ipc:///none")
    if found is None or int(found[2] or 0) > 65535:  # ZeroMQ would take the port's lower 16 bits
        raise ConfigError(f"publish_kv_events: tcp://ADDRESS:PORT or ipc:///PATH was expected, got {endpoint!r}")
    if (endpoint or "").startswith("tcp:") != has_key:
        raise ConfigError(
            "publish_kv_events at tcp:// needs a --publish-kv-events-key-file, and nothing else does: keys tell those "
            "who guess a prompt that it was asked, and only this user can open ipc://"
        )


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
