"""rediss://: a server that proves who it is, or none; what every store does over it is in test_contract.py."""

import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from store_servers import RedisServer, impatient
from tls import Certificates, make_certificates, server_context, tls_in_front_of

from pdkv.errors import ConfigError, StoreTimeout, StoreUnavailable
from pdkv.kv_store.base import KVStore

Open = Callable[..., KVStore]
_WAIT_S = 20
KEY, VALUE = b"key", memoryview(b"value" * 100_000)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return make_certificates(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def redis() -> Iterator[RedisServer]:
    with RedisServer("--requirepass", "pw") as server:
        yield server


@pytest.fixture
def serve(redis: RedisServer) -> Iterator[Callable[[ssl.SSLContext], str]]:
    """serve(context) -> URL of the server behind TLS."""
    with ExitStack() as stack:
        yield (
            lambda context: (
                f"rediss://:pw@127.0.0.1:{stack.enter_context(tls_in_front_of(redis.url.partition('://')[2], context))}"
            )
        )


def put_and_get(store: KVStore) -> None:
    store.delete([KEY])
    store.put([(KEY, VALUE)])
    out = memoryview(bytearray(len(VALUE)))
    assert store.get([KEY], [out]) == [True]
    assert out == VALUE


def test_a_server_whose_certificate_the_named_authority_signed_is_spoken_to(
    files: Certificates, serve: Callable[[ssl.SSLContext], str], open_: Open
) -> None:
    """B9, and a password on the way is no stranger's to read."""
    url = serve(server_context(files))
    put_and_get(open_(url, ssl_ca_certs=str(files.authority)))
    put_and_get(open_(f"{url}/0?ssl_ca_certs={files.authority}"))


def test_an_unknown_authority_or_another_hosts_certificate_is_refused(
    files: Certificates, serve: Callable[[ssl.SSLContext], str], open_: Open, tmp_path: Path
) -> None:
    url = serve(server_context(files))
    stranger = make_certificates(tmp_path, "stranger")
    for options in ({}, {"ssl_ca_certs": str(stranger.authority)}):
        with pytest.raises(StoreUnavailable, match="CERTIFICATE_VERIFY_FAILED") as caught:
            open_(url, **options).contains([KEY])
        assert "pw@" not in str(caught.value)
    other = make_certificates(tmp_path, "other", "DNS:elsewhere.example")
    url = serve(server_context(other))
    with pytest.raises(StoreUnavailable, match="IP address mismatch"):
        open_(url, ssl_ca_certs=str(other.authority)).contains([KEY])
    put_and_get(open_(url, ssl_ca_certs=str(other.authority), ssl_check_hostname="false"))
    put_and_get(open_(url, ssl_cert_reqs="none"))


def test_a_server_may_ask_for_the_clients_certificate(
    files: Certificates, serve: Callable[[ssl.SSLContext], str], open_: Open
) -> None:
    context = server_context(files)
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(files.authority)
    url = serve(context)
    with pytest.raises(StoreUnavailable):
        open_(url, ssl_ca_certs=str(files.authority)).contains([KEY])
    own = {"ssl_certfile": str(files.certificate), "ssl_keyfile": str(files.key)}
    put_and_get(open_(url, ssl_ca_certs=str(files.authority), **own))


def test_files_that_cannot_be_read_are_named_at_once(files: Certificates, open_: Open, tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("")
    for options in (
        {"ssl_ca_certs": f"{tmp_path}/nothing"},
        {"ssl_ca_certs": f"{tmp_path}/empty"},
        {"ssl_certfile": str(files.certificate), "ssl_keyfile": f"{tmp_path}/empty"},
    ):
        with pytest.raises(ConfigError, match=f"redis at 127.0.0.1:1: TLS with .*{tmp_path}/"):
            open_("rediss://:pw@127.0.0.1:1", **options)
    for option in ("ssl_cert_reqs=maybe", "ssl_check_hostname=2"):
        with pytest.raises(ConfigError, match="was expected"):
            open_(f"rediss://127.0.0.1:1?{option}")
    with pytest.raises(ConfigError, match="unknown option 'ssl_ca_certs'"):
        open_("redis://127.0.0.1:1", ssl_ca_certs="x")


def test_a_server_without_tls_is_no_server(open_: Open) -> None:
    with RedisServer(tcp=True) as server, pytest.raises((StoreUnavailable, StoreTimeout)):
        open_(server.url.replace("redis://", "rediss://"), connect_timeout_s="0.5").contains([KEY])


def test_a_stopped_server_is_given_up_and_comes_back(
    files: Certificates, redis: RedisServer, serve: Callable[[ssl.SSLContext], str], open_: Open
) -> None:
    store = open_(serve(server_context(files)), ssl_ca_certs=str(files.authority))
    assert store.contains([KEY]) in ([True], [False])
    with redis.stopped(), impatient(store):
        with pytest.raises(StoreTimeout):
            store.get([KEY], [memoryview(bytearray(len(VALUE)))])
        with pytest.raises(StoreTimeout):  # more than the sockets on the way hold
            store.put([(b"big", memoryview(bytes(64 << 20)))])
    again = open_(serve(server_context(files)), ssl_ca_certs=str(files.authority))
    put_and_get(again)


def test_a_call_ends_when_its_store_is_closed(
    files: Certificates, redis: RedisServer, serve: Callable[[ssl.SSLContext], str], open_: Open
) -> None:
    """What another thread waits for comes as an error, never as bytes that were not decrypted."""
    store = open_(serve(server_context(files)), ssl_ca_certs=str(files.authority))
    put_and_get(store)
    ended: list[BaseException | list[bool]] = []

    def call() -> None:
        try:
            ended.append(store.get([KEY], [memoryview(bytearray(len(VALUE)))]))
        except BaseException as error:
            ended.append(error)

    with redis.stopped():
        thread = threading.Thread(target=call)
        thread.start()
        while not store._pool._busy:  # type: ignore[attr-defined]
            assert thread.is_alive()
        store.close()
        thread.join(_WAIT_S)
    assert [type(result) for result in ended] == [StoreUnavailable]
