"""Configuration values: sizes, and what the dataclasses refuse."""

import math
from pathlib import Path
from typing import Any

import pytest

from pdkv.base.options import parse_size
from pdkv.config import (
    AdmissionConfig,
    EngineConfig,
    HandoffConfig,
    HealthConfig,
    HttpLimits,
    ObservabilityConfig,
    RecoveryConfig,
    TlsConfig,
)
from pdkv.errors import ConfigError
from pdkv.launch.config import LaunchConfig


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1", 1), ("1000000", 10**6), ("512MiB", 512 << 20), ("2GiB", 2 << 30), ("1.5KiB", 1536), ("3KB", 3000),
        ("2GB", 2 * 10**9), (" 7 MiB ", 7 << 20), ("7mib", 7 << 20), ("9B", 9),
    ],
)  # fmt: skip
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "MiB", "0", "-1", "-1MiB", "x", "1XiB", "nan", "inf", "1 2"])
def test_what_is_no_size_is_named(text: str) -> None:
    with pytest.raises(ConfigError, match="a size such as 512MiB was expected, got"):
        parse_size(text)


@pytest.mark.parametrize(
    ("config", "field", "value"),
    [
        (EngineConfig, "block_size", 0),
        (EngineConfig, "block_size", 24),
        (EngineConfig, "max_num_seqs", 0),
        (EngineConfig, "max_num_batched_tokens", 0),
        (EngineConfig, "max_model_len", -1),
        (EngineConfig, "threads", 0),
        (EngineConfig, "long_prefill_token_threshold", -1),
        (HandoffConfig, "kv_load_timeout_s", 0.0),
        (HandoffConfig, "lease_timeout_s", 30.0),
        (HandoffConfig, "max_leased_fraction", 0.0),
        (LaunchConfig, "prefill", -1),
        (LaunchConfig, "decode", 0),
        (LaunchConfig, "port", 65536),
        (LaunchConfig, "start_timeout_s", 0.0),
        (LaunchConfig, "start_timeout_s", 86401.0),
        (LaunchConfig, "drain_s", 86401.0),
        (LaunchConfig, "drain_s", math.inf),
        (LaunchConfig, "served_model_name", ("",)),
        (EngineConfig, "gpu_memory_utilization", 1.5),
        (EngineConfig, "rank_timeout_s", math.nan),
        (AdmissionConfig, "max_queued_requests", 0),
        (HealthConfig, "probe_interval_s", math.nan),
        (HttpLimits, "send_timeout_s", math.inf),
        (ObservabilityConfig, "loop_watchdog_ms", -1.0),
        (RecoveryConfig, "retry_limit", -1),
    ],
)
def test_a_value_out_of_its_range_is_refused_by_name(config: type, field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=field) as caught:
        config(**{field: value})
    assert str(value) in str(caught.value)


def test_a_step_has_a_token_for_each_of_its_requests() -> None:
    with pytest.raises(ConfigError, match=r"max_num_batched_tokens \(255\) must be at least max_num_seqs \(256\)"):
        EngineConfig(max_num_batched_tokens=255)
    assert EngineConfig(max_num_batched_tokens=256).max_num_seqs == 256


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"ssl_keyfile": Path("k")}, "ssl_keyfile requires ssl_certfile"),
        ({"ssl_ca_certs": Path("a")}, "ssl_ca_certs requires ssl_certfile"),
        ({"ssl_cert_reqs": "required"}, "ssl_cert_reqs requires ssl_certfile"),
        ({"ssl_certfile": Path("c"), "ssl_cert_reqs": "optional"}, "ssl_cert_reqs='optional' needs ssl_ca_certs"),
        (
            {"ssl_certfile": Path("c"), "ssl_ca_certs": Path("a"), "ssl_cert_reqs": "none"},
            "ssl_ca_certs has no effect with ssl_cert_reqs none",
        ),
    ],
)
def test_tls_options_that_would_protect_nothing_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TlsConfig(**fields)


def test_an_authority_of_clients_means_that_they_need_a_certificate() -> None:
    assert TlsConfig(ssl_certfile=Path("c")).client_certificates == "none"
    assert TlsConfig(ssl_certfile=Path("c"), ssl_ca_certs=Path("a")).client_certificates == "required"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"publish_kv_events": "tcp://10.0.0.1:5557"}, "needs a --publish-kv-events-key-file"),
        ({"publish_kv_events": "ipc:///run/x", "publish_kv_events_key_file": Path("k")}, "nothing else does"),
        ({"publish_kv_events_key_file": Path("k")}, "nothing else does"),
        ({"publish_kv_events": "http://a"}, "tcp://ADDRESS:PORT or ipc:///PATH was expected, got 'http://a'"),
        (
            {"publish_kv_events": "tcp://a:65536", "publish_kv_events_key_file": Path("k")},
            "was expected, got 'tcp://a:65536'",
        ),
    ],
)
def test_no_stranger_hears_what_is_cached(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ObservabilityConfig(**fields)
    assert ObservabilityConfig(publish_kv_events="ipc:///run/x").publish_kv_events is not None


REMOTE: dict[str, Any] = {"remote_engines": {"decode-b": "tcp://10.0.0.2:7000"}, "cluster_key_file": Path("k")}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"cluster_key_file": None}, "remote_engines need a --cluster-key-file"),
        ({"remote_engines": {}, "decode": 0}, "decode must be at least 1 where there are no --remote-engines"),
        ({"remote_engines": {"a/b": "tcp://10.0.0.2:7000"}}, "an engine's name has 1 to 64 letters.*'a/b'"),
        ({"remote_engines": {"b": "10.0.0.2:7000"}}, "such as tcp://10.0.0.2:7000 was expected.*'10.0.0.2:7000'"),
        ({"remote_engines": {"b": "tcp://10.0.0.2:65535"}}, "ports 1 to 65534"),
        ({"remote_engines": {"b": "tcp://10.0.0.2:0"}}, "ports 1 to 65534"),
        ({"backend": ("vllm=http://a",), "prefill": 0}, "backend excludes engines of this launch.*--prefill 0"),
        ({"backend_key_file": Path("k")}, "backend_key_file is given, but no --backend"),
    ],
)
def test_engines_elsewhere_that_nobody_could_find_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LaunchConfig(**(REMOTE | fields))


def test_engines_elsewhere_may_be_all_that_there_are() -> None:
    launch = LaunchConfig(**REMOTE, prefill=0, decode=0)
    assert launch.num_engines == 1
    assert not launch.aggregated
    assert LaunchConfig(prefill=0, decode=2).aggregated
