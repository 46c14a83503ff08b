"""TLS for tests: an authority and certificates made by the openssl command, and a server in front of another one."""

import asyncio
import contextlib
import shutil
import ssl
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

_CHUNK_BYTES = 256 * 1024
_WAIT_S = 20


class Certificates(NamedTuple):
    """PEM files."""

    authority: Path
    certificate: Path  # of `host`
    key: Path


def _openssl(*arguments: object) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)


def make_certificates(
    directory: Path, name: str = "server", host: str = "IP:127.0.0.1", *, days: int = 30
) -> Certificates:
    """An authority of its own and a certificate for one host; skips the test where there is no openssl."""
    if shutil.which("openssl") is None:
        pytest.skip("there is no openssl command")
    files = {
        kind: directory / f"{name}-{kind}.pem" for kind in ("authority", "authority-key", "request", "key", "cert")
    }
    new = ("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    _openssl(*new, "-x509", "-days", days, "-subj", f"/CN=authority of {name}",
             "-keyout", files["authority-key"], "-out", files["authority"])  # fmt: skip
    _openssl(*new, "-subj", f"/CN={name}", "-keyout", files["key"], "-out", files["request"])
    extensions = directory / f"{name}.ext"
    extensions.write_text(f"subjectAltName={host}\n")
    _openssl("x509", "-req", "-in", files["request"], "-CA", files["authority"], "-CAkey", files["authority-key"],
             "-CAcreateserial", "-days", days, "-extfile", extensions, "-out", files["cert"])  # fmt: skip
    return Certificates(files["authority"], files["cert"], files["key"])


@contextlib.contextmanager
def tls_in_front_of(socket_path: str, context: ssl.SSLContext) -> Iterator[int]:
    """The TCP port of 127.0.0.1 where the server of a unix socket is spoken to through TLS."""
    loop = asyncio.new_event_loop()
    started = threading.Event()
    stop = asyncio.Event()
    port = 0

    async def pump(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(_CHUNK_BYTES):
                target.write(data)
                await target.drain()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers = [writer]
        try:
            inner_reader, inner_writer = await asyncio.open_unix_connection(socket_path)
            writers.append(inner_writer)
            pumps = [asyncio.ensure_future(pump(*ends)) for ends in ((reader, inner_writer), (inner_reader, writer))]
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for each in writers:
                each.transport.abort()

    async def main() -> None:
        nonlocal port
        loop.set_exception_handler(lambda *_: None)  # handshakes that clients refuse
        server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
        port = server.sockets[0].getsockname()[1]
        started.set()
        await stop.wait()
        server.close()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0)  # what was aborted is closed in the next round

    def run() -> None:
        with contextlib.closing(loop):
            loop.run_until_complete(main())

    thread = threading.Thread(target=run)
    thread.start()
    assert started.wait(_WAIT_S)
    try:
        yield port
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(_WAIT_S)
        assert not thread.is_alive()


def client_context(files: Certificates, own: Certificates | None = None) -> ssl.SSLContext:
    """Of a client that trusts `files.authority`, and perhaps shows a certificate of its own."""
    context = ssl.create_default_context(cafile=files.authority)
    if own is not None:
        context.load_cert_chain(own.certificate, own.key)
    return context


def server_context(files: Certificates) -> ssl.SSLContext:
    """Of a server with that certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(files.certificate, files.key)
    return context
