"""HTTPS: who gets in, what a handshake may cost, certificates that are renewed, and the limits of plain connections."""

import asyncio
import contextlib
import logging
import shutil
import socket
import ssl
import subprocess
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from coroutines import clock, run
from fake_dispatcher import FakeDispatcher, say
from http_server import Client, Serving, connected, get, post, serving
from small_app import MODEL, ids, make_app
from starlette.types import Receive, Scope, Send
from tls import Certificates, client_context, make_certificates

from pdkv.config import HttpLimits, TlsConfig
from pdkv.errors import ConfigError
from pdkv.router.http.server import connections as http_connections
from pdkv.router.http.server.certificates import Tls, load_context
from pdkv.testing import VirtualLoop, VirtualUvloop

event_loop = VirtualUvloop

LOOPS = {"uvloop": VirtualUvloop, "asyncio": VirtualLoop}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return make_certificates(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return make_certificates(tmp_path_factory.mktemp("tls"), "other")


def config(files: Certificates, **fields: Any) -> TlsConfig:
    return TlsConfig(ssl_certfile=files.certificate, ssl_keyfile=files.key, **fields)


async def bytes_app(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers /N with N bytes, and says how it was asked."""
    size = int(scope["path"][1:] or 0)
    headers = [(b"content-length", b"%d" % size), (b"x-scheme", scope["scheme"].encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": bytes(size)})


async def ends(server: Serving) -> None:
    """Until no connection is left, with a handshake or without."""
    while server.room.num_open or server.state.connections or server.state.tasks:
        await asyncio.sleep(0)


@pytest.mark.parametrize("loop", LOOPS)
def test_requests_are_served_through_tls(files: Certificates, loop: str) -> None:
    async def main() -> None:
        app = make_app(FakeDispatcher(say(ids("ab"))))
        async with serving(app, tls=Tls(config(files))) as server:
            async with connected(server.port, client_context(files)) as client:
                body = b'{"model": "%s", "prompt": "x", "max_tokens": 2}' % MODEL.encode()
                await client.send(post("/v1/completions", body) + get("/health"))
                assert (await client.reply()).status == 200
                assert (await client.reply()).status == 200
                assert client.writer.get_extra_info("cipher")[1] == "TLSv1.3"
            await ends(server)
        async with serving(bytes_app, tls=Tls(config(files))) as server:
            async with connected(server.port, client_context(files)) as client:
                await client.send(get("/3000000", "connection: close"))
                reply = await client.reply()
                assert (len(reply.body), reply.headers["x-scheme"]) == (3_000_000, "https")
                assert await client.at_end()
            await ends(server)

    run(main(), LOOPS[loop])


@pytest.mark.parametrize("loop", LOOPS)
def test_a_request_that_comes_with_the_end_of_the_handshake_is_not_lost(files: Certificates, loop: str) -> None:
    """Both in one segment: it is there before anybody knows that the handshake is done."""

    async def main() -> None:
        async with serving(bytes_app, tls=Tls(config(files))) as server:
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            received, to_send = ssl.MemoryBIO(), ssl.MemoryBIO()
            tls = client_context(files).wrap_bio(received, to_send, server_hostname="127.0.0.1")
            while True:
                try:
                    tls.do_handshake()
                    break
                except ssl.SSLWantReadError:
                    writer.write(to_send.read())
                    assert received.write(await reader.read(1 << 16))
            tls.write(get("/5"))
            writer.write(to_send.read())
            reply = b""
            while not reply.endswith(bytes(5)):
                try:
                    reply += (piece := tls.read())
                    assert piece
                except ssl.SSLWantReadError:
                    assert received.write(await reader.read(1 << 16))
            assert reply.startswith(b"HTTP/1.1 200")
            writer.close()

    run(main(), LOOPS[loop])


async def test_old_versions_of_tls_are_refused(files: Certificates) -> None:
    context = client_context(files)
    context.set_ciphers("ALL:@SECLEVEL=0")
    async with serving(bytes_app, tls=Tls(config(files))) as server:
        context.maximum_version = ssl.TLSVersion.TLSv1_2
        async with connected(server.port, context) as client:
            assert client.writer.get_extra_info("cipher")[1] == "TLSv1.2"
        context.minimum_version = ssl.TLSVersion.MINIMUM_SUPPORTED
        with pytest.warns(DeprecationWarning, match="TLSv1_1"):
            context.maximum_version = ssl.TLSVersion.TLSv1_1
        with pytest.raises(OSError):  # asyncio sends no alert, and a reset
            async with connected(server.port, context):
                pass
        await ends(server)


@pytest.mark.parametrize("reqs", [None, "required", "optional"])
async def test_clients_are_known_by_their_certificates(files: Certificates, other: Certificates, reqs: Any) -> None:
    async def status(server: Serving, own: Certificates | None) -> int:
        try:
            async with connected(server.port, client_context(files, own)) as client:
                await client.send(get("/1"))
                return (await client.reply()).status
        except (OSError, EOFError):  # with TLS 1.3 a client hears of it when it reads
            return 0

    tls = Tls(config(files, ssl_ca_certs=files.authority, ssl_cert_reqs=reqs))
    async with serving(bytes_app, tls=tls) as server:
        assert await status(server, files) == 200
        assert await status(server, other) == 0
        assert await status(server, None) == (200 if reqs == "optional" else 0)
        await ends(server)


@pytest.mark.parametrize("first", [b"", b"\x16\x03\x01", b"GET / HTTP/1.1\r\n\r\n", bytes(100_000)])
@pytest.mark.parametrize("loop", LOOPS)
def test_what_is_no_handshake_ends_soon(
    files: Certificates, first: bytes, loop: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)

    async def main() -> None:
        async with serving(bytes_app, tls=Tls(config(files))) as server:
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(first)
            with contextlib.suppress(ConnectionResetError):
                assert b"HTTP" not in await (reader.read() if len(first) > 3 else clock().passing(reader.read()))
            await ends(server)
            writer.close()

    run(main(), LOOPS[loop])
    said = [record.getMessage() for record in caplog.records if record.name.startswith("pdkv")]
    assert len(said) == (len(first) > 3)
    assert all(text.startswith("TLS handshake with ('127.0.0.1', ") and ") failed: " in text for text in said)
    assert not [record for record in caplog.records if record.levelno > logging.INFO]


async def test_connections_without_a_handshake_count_and_make_room(
    files: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_connections, "_EVICTABLE_S", 0.0)
    async with serving(bytes_app, max_connections=10, tls=Tls(config(files))) as server:
        silent = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(40)]
        async with connected(server.port, client_context(files)) as client:
            assert server.room.num_open <= 10
            await client.send(get("/1"))
            assert (await client.reply()).status == 200
        monkeypatch.setattr(http_connections, "_EVICTABLE_S", 100.0)
        await server.room.send_rest(0.0)
        await ends(server)
        for _, writer in silent:
            writer.close()


async def test_without_room_a_connection_ends_before_its_handshake(files: Certificates) -> None:
    async with serving(bytes_app, max_connections=1, tls=Tls(config(files))) as server:
        async with connected(server.port, client_context(files)) as client:
            await client.send(get("/1"))
            assert (await client.reply()).status == 200
            with pytest.raises(OSError):
                async with connected(server.port, client_context(files)):
                    pass
        await ends(server)


async def test_a_renewed_certificate_is_for_those_who_come_then(
    files: Certificates, other: Certificates, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"

    def copy(source: Certificates) -> None:
        shutil.copy(source.certificate, certificate)
        shutil.copy(source.key, key)

    copy(files)
    tls = Tls(TlsConfig(ssl_certfile=certificate, ssl_keyfile=key))

    async def ask(server: Serving, trusted: Certificates) -> None:
        async with connected(server.port, client_context(trusted)) as client:
            await client.send(get("/1"))
            assert (await client.reply()).status == 200

    async with serving(bytes_app, tls=tls) as server, connected(server.port, client_context(files)) as old:
        copy(other)
        await ask(server, files)
        tls.reload()
        assert f"the certificate of {certificate} is in force" in caplog.text
        await ask(server, other)
        with pytest.raises(ssl.SSLCertVerificationError):
            await ask(server, files)
        await old.send(get("/7"))
        assert len((await old.reply()).body) == 7
        shutil.copy(files.certificate, certificate)  # and no key of it yet
        tls.reload()
        assert "keeping the previous certificate: --ssl-certfile: the certificate and the private key" in caplog.text
        await ask(server, other)


@pytest.mark.parametrize("size", [64 << 20, 4 << 20, 1000], ids=["much", "some", "little"])
@pytest.mark.parametrize("loop", LOOPS)
def test_a_client_that_does_not_read_does_not_keep_its_connection(files: Certificates, size: int, loop: str) -> None:
    """Nor does one that has everything, and says no goodbye."""

    async def main() -> None:
        async with serving(bytes_app, tls=Tls(config(files))) as server:
            with socket.socket() as plain:
                plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                await asyncio.to_thread(plain.connect, ("127.0.0.1", server.port))
                wrap = client_context(files).wrap_socket
                with await asyncio.to_thread(wrap, plain, server_hostname="127.0.0.1") as client:
                    client.sendall(get(f"/{size}", "connection: close"))
                    while not server.state.total_requests:
                        await asyncio.sleep(0)
                    await clock().passing(ends(server))

    run(main(), LOOPS[loop])


@contextlib.asynccontextmanager
async def narrow(server: Serving, files: Certificates) -> AsyncIterator[Client]:
    """A client for which its kernel takes next to nothing."""
    loop = asyncio.get_running_loop()
    with socket.socket() as plain:
        plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        plain.setblocking(False)
        await loop.sock_connect(plain, ("127.0.0.1", server.port))
        reader, writer = await asyncio.open_connection(
            sock=plain, ssl=client_context(files), server_hostname="127.0.0.1", limit=4096
        )
        try:
            yield Client(reader, writer)
        finally:
            writer.transport.abort()


@pytest.mark.parametrize("loop", LOOPS)
def test_a_client_that_reads_slowly_gets_everything(files: Certificates, loop: str) -> None:
    """Longer than it may read nothing, but never without a byte for so long."""
    size = 8 << 20

    async def main() -> None:
        async with serving(bytes_app, limits := HttpLimits(), tls=Tls(config(files))) as server:
            async with narrow(server, files) as client:
                await client.send(get(f"/{size}", "connection: close"))
                num_read = len(await client.reader.readexactly(1))
                [connection] = server.state.connections
                for _ in range(12):
                    before = connection.num_unsent
                    while before and connection.num_unsent >= before:
                        num_read += len(await client.reader.read(4096))
                    clock().advance(0.9 * limits.send_timeout_s)
                assert num_read + len(await client.reader.read()) > size
            await ends(server)

    run(main(), LOOPS[loop])


@pytest.mark.parametrize("loop", LOOPS)
def test_a_stop_waits_until_a_slow_reader_has_everything(files: Certificates, loop: str) -> None:
    async def main() -> None:
        async with serving(bytes_app, tls=Tls(config(files))) as server:
            async with narrow(server, files) as client:
                await client.send(get("/8000000"))
                assert (await client.reader.readline()).startswith(b"HTTP/1.1 200")
                while server.state.tasks:
                    await asyncio.sleep(0)
                rest = asyncio.create_task(server.room.send_rest(5.0))
                await asyncio.sleep(0)
                clock().advance(5.0)
                assert await rest == 1
                rest = asyncio.create_task(server.room.send_rest(20.0))
                assert len(await client.reader.read()) > 8_000_000
                assert await rest == 0
            await ends(server)

    run(main(), LOOPS[loop])


@pytest.mark.parametrize("loop", LOOPS)
def test_a_large_body_gets_its_413_and_no_reset(
    files: Certificates, loop: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The client sends everything before it reads anything, as many do."""

    async def main() -> None:
        async with serving(make_app(FakeDispatcher()), tls=Tls(config(files))) as server:
            async with connected(server.port, client_context(files)) as client:
                await client.send(post("/v1/completions", bytes(24 << 20)))
                reply = await client.reply()
                assert (reply.status, reply.headers["connection"]) == (413, "close")
            await ends(server)

    run(main(), LOOPS[loop])
    assert not [record for record in caplog.records if record.levelno > logging.INFO]


def encrypted(files: Certificates, path: Path) -> Path:
    command = ["openssl", "pkey", "-in", str(files.key), "-aes256", "-passout", "pass:secret", "-out", str(path)]
    subprocess.run(command, check=True, capture_output=True)
    return path


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda f, o, d: {"ssl_certfile": d / "none"}, "--ssl-certfile: DIR/none cannot be read: No such file"),
        (lambda f, o, d: {"ssl_keyfile": d / "none"}, "--ssl-keyfile: DIR/none cannot be read: No such file"),
        (lambda f, o, d: {"ssl_keyfile": d}, "--ssl-keyfile: DIR cannot be read: Is a directory"),
        (lambda f, o, d: {"ssl_ca_certs": d / "none"}, "--ssl-ca-certs: DIR/none cannot be read: No such file"),
        (lambda f, o, d: {"ssl_certfile": f.key}, "--ssl-certfile: KEY contains no PEM block of a certificate"),
        (lambda f, o, d: {"ssl_keyfile": f.certificate}, "--ssl-keyfile: CERT contains no PEM block of a private key"),
        (lambda f, o, d: {"ssl_keyfile": None}, "--ssl-keyfile: CERT contains no PEM block of a private key"),
        (lambda f, o, d: {"ssl_ca_certs": f.key}, "--ssl-ca-certs: KEY contains no PEM block of a certificate"),
        (lambda f, o, d: {"ssl_keyfile": o.key}, "the certificate and the private key in CERT and OTHER do not match"),
        (lambda f, o, d: {"ssl_keyfile": encrypted(f, d / "e")}, "the private key in DIR/e is encrypted"),
        (lambda f, o, d: {"ssl_certfile": torn(f.certificate, d)}, "--ssl-certfile: DIR/torn and KEY cannot be used: "),
        (lambda f, o, d: {"ssl_ca_certs": torn(f.authority, d)}, "--ssl-ca-certs: DIR/torn cannot be used: "),
    ],
)
def test_files_that_a_server_cannot_use_are_named(
    files: Certificates,
    other: Certificates,
    tmp_path: Path,
    make: Callable[[Certificates, Certificates, Path], dict[str, Any]],
    message: str,
) -> None:
    fields = {"ssl_certfile": files.certificate, "ssl_keyfile": files.key} | make(files, other, tmp_path)
    with pytest.raises(ConfigError) as caught:
        load_context(TlsConfig(**fields))
    names = {"DIR": tmp_path, "KEY": files.key, "CERT": files.certificate, "OTHER": other.key}
    for name, path in names.items():
        message = message.replace(name, str(path))
    assert message in str(caught.value)


def torn(path: Path, directory: Path) -> Path:
    lines = path.read_text().splitlines()
    (directory / "torn").write_text("\n".join([*lines[:3], *lines[5:]]))
    return directory / "torn"


def test_one_file_may_hold_both(files: Certificates, tmp_path: Path) -> None:
    both = tmp_path / "both.pem"
    both.write_text(files.key.read_text() + files.certificate.read_text())
    assert load_context(TlsConfig(ssl_certfile=both)).verify_mode == ssl.CERT_NONE
