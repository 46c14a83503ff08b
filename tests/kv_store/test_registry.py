"""Stores by URL, and the ways that a URL or an option can be wrong."""

import importlib.util
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from pdkv.errors import ConfigError
from pdkv.kv_store.base import KVStore
from pdkv.kv_store.file_store import FileStore
from pdkv.kv_store.lmcache_store import LMCacheStore
from pdkv.kv_store.memory_store import MemoryStore
from pdkv.kv_store.object_store import ObjectStore
from pdkv.kv_store.redis_store import RedisStore
from pdkv.kv_store.registry import open_store
from pdkv.kv_store.tiers import TieredStore

Open = Callable[..., KVStore]


@pytest.mark.parametrize(
    ("url", "kind"),
    [
        ("memory://", MemoryStore),
        ("memory://name?capacity=1MiB", MemoryStore),
        ("redis://localhost:1/0", RedisStore),
        ("redis://user:secret@localhost:1/0", RedisStore),
        ("redis+unix:///tmp/none", RedisStore),
        ("unix:///tmp/none", RedisStore),
        ("lmcache://localhost:1", LMCacheStore),
        ("lmcache://[::1]:1?operation_timeout_s=0.5", LMCacheStore),
        ("s3://bucket/prefix?endpoint=http://localhost:1&region=nowhere", ObjectStore),
        ("gs://bucket/prefix", ObjectStore),
        ("memory://,redis://localhost:1,lmcache://localhost:1", TieredStore),
    ],
)
def test_a_url_names_a_store_and_connects_later(url: str, kind: type[KVStore], open_: Open) -> None:
    assert type(open_(url)) is kind


class Elsewhere(MemoryStore):
    """A third party's."""


def test_a_package_adds_a_scheme_and_takes_none_over(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, open_: Open
) -> None:
    """Its class is called with the address; as a tier it has `write`, and no option of another store's."""
    own = f"{__name__}:Elsewhere"
    names = {"else": own, "file": own, "gone": "no.such:Store", "odd": "pdkv.errors:ConfigError"}
    points = [EntryPoint(name, value, "pdkv.kv_stores") for name, value in names.items()]
    monkeypatch.setattr("pdkv.base.registry.entry_points", lambda group: points if group == "pdkv.kv_stores" else [])
    store = open_("else://a%20b/c")
    assert type(store) is Elsewhere
    store.put([(b"k", memoryview(b"v"))])
    with MemoryStore("a b/c") as same:
        assert same.contains([b"k"]) == [True]
    tiered = open_(f"host://{tmp_path},else://d?write=second-use")
    assert isinstance(tiered, TieredStore)
    assert type(tiered.tiers[1].store) is Elsewhere
    for url, message in (
        ("else://d?ttl_s=1", "unknown option 'ttl_s'"),
        ("gone://x", r"store 'gone' \(no.such:Store\) cannot be imported"),
        ("odd://x", "store 'odd': pdkv.errors:ConfigError is not a subclass of KVStore"),
        ("file://relative", "an absolute path was expected"),
        ("nope://x", "az://, else://, gone://, odd://$"),
    ):
        with pytest.raises(ConfigError, match=message):
            open_(url)


def test_a_directory_may_have_blanks_and_commas(tmp_path: Path, open_: Open) -> None:
    assert type(open_(f"file://{tmp_path}/a%20b,c?capacity=1GiB")) is FileStore
    assert (tmp_path / "a b,c").is_dir()


@pytest.mark.parametrize(
    ("url", "message"),
    [
        (
            "nope://x",
            r"no store 'nope://x'; known: memory://, host://, file://, redis://, rediss://, redis\+unix://, "
            r"unix://, lmcache://, mooncake://, s3://, gs://, az://",
        ),
        ("/tmp/x", "no store '/tmp/x'; known: memory://"),
        ("", "no store ''; known"),
        ("memory://,nope://x", "no store 'nope://x'"),
        ("memory://?size=1MiB", "unknown option 'size'; known: capacity"),
        ("memory://?capacity=lots", "option capacity: a size such as 512MiB was expected, got 'lots'"),
        ("memory://?capacity", "bad query field"),
        ("memory://?ttl_s=5", "unknown option 'ttl_s'"),
        ("redis://localhost:1?ttl_s=0", "option ttl_s: a number of seconds above 0 .* got '0'"),
        ("redis://localhost:1?ttl_s=nan", "option ttl_s: a number of seconds above 0 .* got 'nan'"),
        ("redis://localhost:1?pipeline=0", "option pipeline: a whole number of at least 1 was expected, got '0'"),
        ("redis://localhost:1?pipeline=x", "option pipeline: a whole number of at least 1 was expected, got 'x'"),
        ("redis://localhost:1/x", "redis://host:port/db was expected"),
        ("redis://localhost:hundred/0", "Port could not be cast"),
        ("lmcache://localhost", "lmcache://host:port was expected"),
        ("lmcache://localhost:1/x", "lmcache://host:port was expected"),
        ("mooncake://localhost", "mooncake://host:port was expected"),
        ("mooncake://localhost:1?pipeline=2", "unknown option 'pipeline'; known: .*metadata_server"),
        ("file://relative/x", "an absolute path was expected"),
        ("file://", "an absolute path was expected"),
    ],
)
def test_a_wrong_url_is_a_configuration_error_that_says_what_is_known(url: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        open_store(url)


def test_options_are_for_every_url_that_knows_them(tmp_path: Path, open_: Open) -> None:
    store = open_(f"memory://,file://{tmp_path},redis://localhost:1", ttl_s="5", operation_timeout_s="2")
    assert isinstance(store, TieredStore)
    redis = store.tiers[2].store
    assert isinstance(redis, RedisStore)
    assert (redis.options.ttl_s, redis.options.operation_timeout_s) == (5, 2)


def test_an_option_that_no_url_knows_is_refused() -> None:
    with pytest.raises(ConfigError, match="memory://: unknown option 'ttl_s'; known: capacity"):
        open_store("memory://", {"ttl_s": "5"})
    with pytest.raises(ConfigError, match="unknown option 'retry_after_s'"):
        open_store("redis://localhost:1", {"retry_after_s": "5"})


def test_a_query_wins_over_the_common_options(open_: Open) -> None:
    store = open_("redis://localhost:1?operation_timeout_s=3", operation_timeout_s="2")
    assert isinstance(store, RedisStore)
    assert store.options.operation_timeout_s == 3


def test_messages_do_not_tell_passwords() -> None:
    with pytest.raises(ConfigError) as caught:
        open_store("redis://user:secret@localhost:1?nope=1")
    assert "secret" not in str(caught.value)


def test_what_a_failing_open_had_opened_is_closed() -> None:
    with pytest.raises(ConfigError):
        open_store("memory://leak?capacity=1MiB,file://relative/x")
    open_store("memory://leak?capacity=2MiB").close()


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "redis", None)
    monkeypatch.setitem(sys.modules, "redis.connection", None)
    with pytest.raises(ConfigError, match="needs the package redis: pip install"):
        open_store("redis://localhost:1")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="needs the package mooncake: pip install"):
        open_store("mooncake://localhost:1")


def test_stores_import_neither_torch_nor_connectors() -> None:
    script = (
        "import sys, pkgutil, pdkv.kv_store as package\n"
        "for module in pkgutil.iter_modules(package.__path__): __import__('pdkv.kv_store.' + module.name)\n"
        "print(sorted(name for name in sys.modules if name.split('.')[0] in ('torch', 'lmcache', 'mooncake', 'redis')"
        " or name.startswith('pdkv.connectors')))"
    )
    reply = subprocess.run([sys.executable, "-P", "-c", script], stdout=subprocess.PIPE, text=True, check=True)
    assert reply.stdout.strip() == "[]"


def test_tiers_behind_the_first_have_write_policies(tmp_path: Path, open_: Open) -> None:
    urls = f"host://{tmp_path}/host,file://{tmp_path}/files?write=evicted,redis://localhost:1"
    store = open_(urls, write="second-use")
    assert isinstance(store, TieredStore)
    assert [tier.write for tier in store.tiers] == ["all", "evicted", "second-use"]


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("redis://localhost:1?write=second-use", "redis://: write=second-use is for tiers behind the first one"),
        ("host:///x?write=evicted,file:///y", "host://: write=evicted is for tiers behind the first one"),
        ("memory://,file:///y?write=second-use", "one that other processes see, not memory://"),
        ("file:///x,redis://localhost:1?write=evicted", "stores what host:// evicts, but the first tier is file://"),
        ("host:///x,file:///y?write=never", "option write: one of all, second-use, evicted was expected, got 'never'"),
    ],
)
def test_a_policy_that_cannot_be_kept_is_refused(url: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        open_store(url)
