"""A file and DNS as sources of engines: what is read, and what is kept when they fail."""

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import dns.asyncresolver
import dns.message
import dns.rcode
import dns.rdatatype
import dns.rrset
import pytest

from pdkv.errors import ConfigError
from pdkv.router.engines import sources
from pdkv.router.engines.sources import read_engines, split_dns_name, watch_dns, watch_file


class Heard(list[Mapping[str, str]]):
    """What was proposed."""

    def __init__(self) -> None:
        super().__init__()
        self.news = asyncio.Event()

    def __call__(self, wanted: Mapping[str, str]) -> None:
        self.append(wanted)
        self.news.set()

    async def next(self) -> Mapping[str, str]:
        await self.news.wait()
        self.news.clear()
        return self[-1]


@contextlib.asynccontextmanager
async def watching(watch: "asyncio.Future[None]") -> AsyncIterator[None]:
    try:
        yield
    finally:
        watch.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watch


def write(path: Path, text: str) -> None:
    new = path.with_suffix(".new")
    new.write_text(text)
    os.replace(new, path)


async def test_a_file_that_is_replaced_is_read_and_a_broken_one_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sources, "LOOK_S", 0.01)
    path, heard = tmp_path / "engines", Heard()
    write(path, "# ours\ndecode-b = tcp://10.0.0.2:7000  # the big one\n")
    async with watching(asyncio.ensure_future(watch_file(path, heard))):
        assert await heard.next() == {"tcp://10.0.0.2:7000": "decode-b"}
        for broken in ("decode-b=10.0.0.2:7000", ""):
            write(path, broken)
            while "engines stay as they were" not in caplog.text:
                await asyncio.sleep(0.01)
            caplog.clear()
        path.unlink()
        while "cannot be read" not in caplog.text:
            await asyncio.sleep(0.01)
        assert len(heard) == 1
        write(path, "#\n")
        assert await heard.next() == {}


async def test_a_file_that_was_refused_is_proposed_until_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sources, "LOOK_S", 0.01)
    path, heard, num_refused = tmp_path / "engines", Heard(), 0

    def propose(wanted: Mapping[str, str]) -> None:
        nonlocal num_refused
        if num_refused < 3:
            num_refused += 1
            raise ConfigError("too many engines")
        heard(wanted)

    write(path, "decode-b = tcp://10.0.0.2:7000\n")
    async with watching(asyncio.ensure_future(watch_file(path, propose))):
        assert await heard.next() == {"tcp://10.0.0.2:7000": "decode-b"}
        await asyncio.sleep(0.1)
    assert len(heard) == 1
    assert caplog.text.count("too many engines") == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a=tcp://10.0.0.2:7000\nb=tcp://10.0.0.2:7000", "line 2: 'b=tcp://10.0.0.2:7000' is there twice"),
        ("a=tcp://10.0.0.2:7000\na=tcp://10.0.0.3:7000", "line 2.*is there twice"),
        ("a/b=tcp://10.0.0.2:7000", "line 1, .*an engine's name has 1 to 64 letters"),
        ("a=tcp://host:7000", "the address of one host was expected.*'tcp://host:7000'"),
        ("a=tcp://0.0.0.0:7000", "the address of one host was expected"),
        ("", r"has 0 bytes, and 1 to 1048576 were expected"),
        ("#" * (1 << 20) + "\n", "has 1048577 bytes"),
    ],
)
def test_a_broken_file_is_refused_with_the_line(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "engines").write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_engines(tmp_path / "engines")


@pytest.mark.parametrize("text", ["", ":7000", "x:0", "x:65535", "x:y", "x:1:2"])
def test_a_name_in_dns_has_a_port_or_none(text: str) -> None:
    with pytest.raises(ConfigError, match="a name in DNS was expected"):
        split_dns_name(text)


class Server(asyncio.DatagramProtocol):
    """A DNS server with these records (text of dnspython's), or this failure; it counts the questions."""

    def __init__(self) -> None:
        self.records: dict[tuple[str, str], str] = {}
        self.failure: int | None = None
        self.asked: list[str] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def datagram_received(self, data: bytes, address: tuple[str, int]) -> None:
        query = dns.message.from_wire(data)
        (question,) = query.question
        name, kind = question.name.to_text(), dns.rdatatype.to_text(question.rdtype)
        self.asked.append(f"{name} {kind}")
        answer = dns.message.make_response(query)
        if self.failure is not None:
            answer.set_rcode(self.failure)
        elif (texts := self.records.get((name, kind))) is not None:
            ttl, *rest = texts.split("; ")
            answer.answer.append(dns.rrset.from_text(name, int(ttl), "IN", kind, *rest))
        else:
            answer.set_rcode(dns.rcode.NXDOMAIN)
        self.transport.sendto(answer.to_wire(), address)  # type: ignore[attr-defined]


@contextlib.asynccontextmanager
async def serving() -> AsyncIterator[tuple[Server, dns.asyncresolver.Resolver]]:
    transport, server = await asyncio.get_running_loop().create_datagram_endpoint(
        Server, local_addr=("127.0.0.1", 0), family=socket.AF_INET
    )
    resolver = dns.asyncresolver.Resolver(configure=False)
    resolver.nameservers, resolver.port = ["127.0.0.1"], transport.get_extra_info("sockname")[1]
    try:
        yield server, resolver
    finally:
        transport.close()


async def test_addresses_and_services_of_dns_are_followed_by_their_ttl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "MIN_TTL_S", 0.05)
    async with serving() as (server, resolver):
        server.records["decode.", "A"] = "0; 10.0.0.2; 10.0.0.3"
        heard = Heard()
        async with watching(asyncio.ensure_future(watch_dns("decode:7000", heard, resolver))):
            assert await heard.next() == {"tcp://10.0.0.2:7000": "", "tcp://10.0.0.3:7000": ""}
            server.records["decode.", "A"] = "300; 10.0.0.3"
            assert await heard.next() == {"tcp://10.0.0.2:7000": "", "tcp://10.0.0.3:7000": ""} or heard[-1]
            while heard[-1] != {"tcp://10.0.0.3:7000": ""}:
                await heard.next()
            num_asked = len(server.asked)
            await asyncio.sleep(0.2)
            assert len(server.asked) == num_asked, "its TTL is not over"
        server.records |= {
            ("_pdkv._tcp.decode.", "SRV"): "60; 0 0 7001 p-0.; 0 0 7004 p-0.; 0 0 7002 p-1.; 0 0 7003 gone.",
            ("p-0.", "A"): "60; 10.0.0.4",
            ("p-1.", "A"): "60; 10.0.0.5",
        }
        heard = Heard()
        async with watching(asyncio.ensure_future(watch_dns("_pdkv._tcp.decode", heard, resolver))):
            assert await heard.next() == dict.fromkeys(
                ("tcp://10.0.0.4:7001", "tcp://10.0.0.5:7002", "tcp://10.0.0.4:7004"), ""
            )


async def test_a_server_that_fails_or_has_nothing_costs_no_engine_at_first(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("MIN_TTL_S", "RETRY_S"):
        monkeypatch.setattr(sources, name, 0.02)
    async with serving() as (server, resolver):
        server.records["decode.", "A"] = "0; 10.0.0.2"
        heard = Heard()
        async with watching(asyncio.ensure_future(watch_dns("decode:7000", heard, resolver))):
            await heard.next()
            for failure in (dns.rcode.SERVFAIL, dns.rcode.REFUSED, dns.rcode.NXDOMAIN):
                server.failure, num_asked = failure, len(server.asked)
                while len(server.asked) < num_asked + 3:
                    await asyncio.sleep(0.01)
            assert "engines stay as they were" in caplog.text
            assert heard[-1] == {"tcp://10.0.0.2:7000": ""}
            monkeypatch.setattr(sources, "EMPTY_S", 0.0)
            while heard[-1]:
                await heard.next()
