"""--backend on the command line, and what such servers lack."""

from pathlib import Path

import pytest

from pdkv.errors import ConfigError
from pdkv.router.engines.address import EngineAddress
from pdkv.router.engines.foreign_kinds import (
    Source,
    check_backends,
    check_sources,
    is_foreign,
    lacking,
    read_backend_key,
    read_backends,
    read_source,
)


def test_a_word_without_a_kind_has_that_of_the_word_before() -> None:
    assert read_backends(["vllm=http://a:1/v1/", "https://b", "openai=http://c/x", "vllm=http://d:2"]) == [
        EngineAddress("vllm-0", "any", "vllm+http://a:1"),
        EngineAddress("vllm-1", "any", "vllm+https://b"),
        EngineAddress("openai-0", "any", "openai+http://c/x"),
        EngineAddress("vllm-2", "any", "vllm+http://d:2"),
    ]


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["http://a"], "KIND=URL was expected, got the kind ''; known: vllm, vllm-prefill, vllm-decode, sglang,"),
        (["vlm=http://a"], r"got the kind 'vlm' \(did you mean 'vllm'\?\)"),
        (["vllm=ftp://a"], "such as http://10.0.0.2:8000.*got 'ftp://a'"),
        (["vllm=http://"], "got 'http://'"),
        (["vllm=http://a:99999"], "got 'http://a:99999'"),
        (["vllm=http://a?x=1"], "got"),
        (["vllm= http://a"], "got ' http://a'"),
        (["vllm=http://1.2.3.999"], "got 'http://1.2.3.999'"),
        (["vllm=http://a,http://b"], "got 'http://a,http://b'"),
        (["vllm=http://user:secret@a"], r"see --backend-key-file.*got 'http://\*\*\*@a'"),
        (["vllm=http://a", "vllm=http://a/"], "http://a is given twice"),
        (["vllm-prefill=http://a"], "need one another, and no other kind, got vllm-prefill"),
        (["vllm-prefill=http://a", "vllm-decode=http://b", "vllm=http://c"], "no other kind"),
    ],
)
def test_a_wrong_address_is_named(words: list[str], error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        read_backends(words)


def test_a_name_that_no_client_can_decode_is_refused() -> None:
    """It was a traceback in the log, for each question about its health."""
    check_backends(read_backends(["vllm=http://xn--mnchen-3ya:1", "http://[::1]:2"]), None)
    with pytest.raises(ConfigError, match=r"backend: a server's URL was expected, got 'http://xn--abc:1': Codepoint"):
        check_backends(read_backends(["vllm=http://xn--abc:1"]), None)


@pytest.mark.parametrize(
    ("text", "source"),
    [
        ("tcp://10.0.0.2:5557", Source("tcp://10.0.0.2:5557", "")),
        ("tcp://[::1]:5557/5558", Source("tcp://[::1]:5557", "tcp://[::1]:5558")),
    ],
)
def test_the_source_of_events_has_one_port_or_two(text: str, source: Source) -> None:
    assert read_source(text) == source


@pytest.mark.parametrize(
    ("sources", "error"),
    [
        ({"vllm-1": "tcp://a:1"}, r"no server of --backend is called 'vllm-1' \(did you mean 'vllm-0'\?\)"),
        ({"openai-0": "tcp://a:1"}, "openai-0 is a server of the kind openai, which has no KV events"),
        ({"vllm-0": "tcp://*:1"}, r"tcp://HOST:PORT/REPLAY_PORT expected, got 'tcp://\*:1'"),
        ({"vllm-0": "tcp://a:1/99999"}, "got 'tcp://a:1/99999'"),
        ({"vllm-0": "http://a:1"}, "got 'http://a:1'"),
    ],
)
def test_a_source_that_is_none_is_named(sources: dict[str, str], error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        check_sources(sources, read_backends(["vllm=http://a", "openai=http://b"]))


def test_what_one_engine_lacks_is_lacking() -> None:
    own = EngineAddress("engine-0", "any", "ipc:///x")
    mixed = lacking([own, *read_backends(["vllm=http://a", ["openai=http://b", "http://c"][0]])])
    assert (mixed["seed"], mixed["prompt_logprobs"]) == ("openai-0 (openai)", "vllm-0 (vllm)")
    assert {"stop", "temperature", "n"} & mixed.keys() == set()
    assert (lacking([own]), is_foreign(own.endpoint)) == ({}, False)


def test_a_key_that_could_not_be_a_header_is_refused(tmp_path: Path) -> None:
    (tmp_path / "good").write_text("sk-1\n")
    (tmp_path / "bad").write_text("a\r\nhost: b")
    assert read_backend_key(tmp_path / "good") == "sk-1"
    with pytest.raises(ConfigError, match="one line of ASCII"):
        read_backend_key(tmp_path / "bad")
