"""Passwords: masked wherever a text is shown, read from files, and warned of on a command line."""

import logging
from pathlib import Path

import pytest

from pdkv.base.secret_options import MAX_FILE_BYTES, has_secret, read_option, without_secrets
from pdkv.cli.options import connector_options, warn_of_secrets
from pdkv.config import HandoffConfig, TiersConfig
from pdkv.errors import ConfigError
from pdkv.kv_store.registry import open_store
from pdkv.launch.logs import configure_logging


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("redis://:pw@host:1/0", "redis://***@host:1/0"),
        ("rediss://me:pw@host", "rediss://***@host"),
        ("unix://:pw@/run/redis.sock", "unix://***@/run/redis.sock"),
        ("redis://:p@w@host", "redis://***@host"),
        ("redis://:p/w@host", "redis://***@host"),
        ("redis://:p,w@host", "redis://***@host"),
        ("redis://host/0?password=pw&ttl_s=3", "redis://host/0?password=***&ttl_s=3"),
        ("memory://,redis://:a@h1,redis://:b@h2", "memory://,redis://***@h1,redis://***@h2"),
        ("url='redis://:pw@host' failed", "url='redis://***@host' failed"),
        ("file:///data/a@b", "file:///data/a@b"),
        ("mail me@here, see http://host/x", "mail me@here, see http://host/x"),
        ("redis://host:1/0", "redis://host:1/0"),
    ],
)
def test_what_stands_before_the_host_is_masked(text: str, shown: str) -> None:
    assert without_secrets(text) == shown
    assert has_secret(text) == (text != shown)
    assert without_secrets(shown) == shown


def test_a_long_text_of_urls_without_a_host_is_masked_in_linear_time() -> None:
    text = "a://" * 500_000
    assert without_secrets(text) == text


@pytest.mark.parametrize("content", ["redis://:pw@host", "redis://:pw@host\n", "redis://:pw@host\r\n"])
def test_an_option_is_read_from_a_file(tmp_path: Path, content: str) -> None:
    (tmp_path / "url").write_bytes(content.encode())
    assert read_option(f"@{tmp_path}/url", "x") == "redis://:pw@host"
    assert connector_options([f"url=@{tmp_path}/url", "name=@@x"]) == {"url": "redis://:pw@host", "name": "@x"}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "--connector-config: url: {path}: No such file or directory"),
        (b"\xff", "--connector-config: url: {path} is not UTF-8 text"),
        (b"x" * (MAX_FILE_BYTES + 1), "--connector-config: url: {path} has more than 65536 bytes"),
    ],
)
def test_a_file_that_cannot_be_an_option_is_named(tmp_path: Path, content: bytes | None, message: str) -> None:
    path = tmp_path / "url"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        connector_options([f"url=@{path}"])
    assert str(caught.value).startswith(message.format(path=path))


@pytest.mark.parametrize("name", ["~no-such-user/url", "a\0b"])
def test_a_name_that_no_file_can_have_is_an_error_of_ours(name: str) -> None:
    with pytest.raises(ConfigError, match=r"^--connector-config: url: "):
        connector_options([f"url=@{name}"])


def test_a_url_without_its_key_is_refused_without_its_password() -> None:
    with pytest.raises(ConfigError) as caught:
        connector_options(["redis://:p=w@host"])
    assert str(caught.value) == "--connector-config: KEY=VALUE was expected, got 'redis://***@host'"


def test_a_password_on_the_command_line_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    texts = ["a=redis://:pw1@host", "b=redis://:pw2@host"]
    assert connector_options(texts) == {"a": "redis://:pw1@host", "b": "redis://:pw2@host"}
    (record,) = caplog.records
    assert "use a=@FILE" in record.getMessage()
    assert "pw" not in record.getMessage()
    caplog.clear()
    connector_options(["url=redis://host", "path=@@me"])
    assert not caplog.records


@pytest.mark.parametrize(
    ("flag", "text", "advice"),
    [
        ("--kv-store", "redis://:pw@host/0?x=1", "use --kv-store @FILE, --config FILE or the variable PDKV_KV_STORE"),
        (
            "--connector-config",
            "url=redis://:pw@h",
            "use url=@FILE, --config FILE or the variable PDKV_CONNECTOR_CONFIG",
        ),
    ],
)
def test_a_warning_says_how_else_the_password_may_be_given(
    flag: str, text: str, advice: str, caplog: pytest.LogCaptureFixture
) -> None:
    warn_of_secrets(flag, [text])
    assert advice in caplog.text
    assert "pw" not in caplog.text


def test_a_configuration_does_not_show_what_may_hold_a_password() -> None:
    assert "pw" not in repr(HandoffConfig(connector_config={"url": "redis://:pw@host"}))
    assert "pw" not in repr(TiersConfig(kv_store="redis://:pw@host"))


@pytest.mark.parametrize("url", ["redis://:pw@host:1/0/1", "redis://:pw@host:x", "rédis://:p/w@host", "redis://:p/w@h"])
def test_a_url_that_is_refused_is_named_without_its_password(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        open_store(url)
    assert "***@h" in str(caught.value)
    assert "w@" not in str(caught.value)


def test_log_lines_and_tracebacks_are_masked(capsys: pytest.CaptureFixture[str]) -> None:
    root = logging.getLogger()
    before, level, ours = root.handlers[:], root.level, logging.getLogger("pdkv").level
    try:
        configure_logging("test", "info")
        try:
            raise ValueError("redis://:pw@host")
        except ValueError:
            logging.getLogger("pdkv.x").exception("at %s", "redis://:pw@host")
    finally:
        root.handlers[:] = before
        root.setLevel(level)
        logging.getLogger("pdkv").setLevel(ours)
    shown = capsys.readouterr().err
    assert shown.count("redis://***@host") == 3
    assert "pw" not in shown
