"""Requests as bytes on a connection: whole ones, and those whose framing, headers or URL are wrong."""

import random
from typing import NamedTuple

from soak.http_bodies import COMPLETIONS, Body, attacks, mutated


class Exchange(NamedTuple):
    """What is sent on one connection."""

    data: bytes
    name: str
    answered: bool  # whether a response must come: else the connection may also just end
    leaves: bool = False  # the client closes without reading


def framed(body: Body, *headers: str) -> bytes:
    """An honest request around a body."""
    lines = [f"POST {body.path} HTTP/1.1", "host: soak", f"content-length: {len(body.data)}"]
    lines += ["content-type: application/json", "connection: close", *headers, "", ""]
    return "\r\n".join(lines).encode() + body.data


def chunked(body: bytes, size: int) -> bytes:
    """Chunks of `size` bytes."""
    pieces = [body[i : i + size] for i in range(0, len(body), size)]
    return b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"


_TARGETS = ["/", "/health", "/v1/models", "/v1/models/served", "/metrics", "/topology", "/v1/completions/", "*", "//",
            "/%00", "/%ff", "/v1/../health", "/?" + "a" * 100, "http://[", "/" + "é", "/v1/models/" + "x" * 4000,
            "/" + "a" * 9000]  # fmt: skip
_METHODS = ["GET", "POST", "HEAD", "PUT", "DELETE", "OPTIONS", "PATCH", "CONNECT", "TRACE", "BREW", "get", "G\x00T"]
_HEADERS = ["host: [", "host: ", "expect: 100-continue", "connection: upgrade\r\nupgrade: h2c",
            "x-request-id: \xff\xfe", "transfer-encoding: chunked", "content-length: 5", "content-length: -1",
            "content-length: 99999999999999999999",
            "content-type: text/plain", "content-type: ", "x-pd-timeout-s: nan", "x-pd-timeout-s: 1e400", "bad header",
            ": x", "x: " + "y" * 40_000, "\r\n".join(f"h{i}: v" for i in range(200)), "x: \x01", "x:\ty",
            "x-request-id: " + "r" * 300, "upgrade: websocket\r\nconnection: upgrade"]  # fmt: skip


def _odd(rng: random.Random) -> bytes:
    """A request line and headers of which some are wrong."""
    lines = [f"{rng.choice(_METHODS)} {rng.choice(_TARGETS)} {rng.choice(['HTTP/1.1', 'HTTP/1.0', 'HTTP/9', 'X'])}"]
    lines += rng.sample(_HEADERS, rng.randint(0, 3))
    body = rng.choice(["", "{}", "x" * 100])
    if rng.random() < 0.5:
        lines += ["connection: close", f"content-length: {len(body)}"]
    return ("\r\n".join(lines) + "\r\n\r\n" + body).encode("latin-1", "replace")


def draw(rng: random.Random) -> Exchange:
    """The next thing that a bad client does."""
    kind = rng.random()
    body = mutated(rng)
    if kind < 0.85:
        return Exchange(framed(body), body.name, True)
    head = f"POST {body.path} HTTP/1.1\r\nhost: soak\r\ncontent-type: application/json\r\n".encode()
    close = b"connection: close\r\n"
    if kind < 0.89:
        size = rng.choice([64, 1000, 10_000])
        return Exchange(
            head + close + b"transfer-encoding: chunked\r\n\r\n" + chunked(body.data, size), "chunked", True
        )
    if kind < 0.92:
        return Exchange(framed(body)[: rng.randrange(len(framed(body)))], "cut off", False, leaves=True)
    if kind < 0.94:
        return Exchange(framed(body), "left", False, leaves=True)
    if kind < 0.96:
        pipelined = b"GET /health HTTP/1.1\r\nhost: soak\r\n\r\n" * rng.randint(1, 50)
        return Exchange(pipelined + framed(body), "pipelined", True)
    if kind < 0.99:
        return Exchange(_odd(rng), "odd", False)
    return Exchange(rng.randbytes(rng.randint(1, 400)) + b"\r\n\r\n", "noise", False)


def named_attacks() -> list[Exchange]:
    """Those of the reviews: bodies, and headers and URLs without an end."""
    endless = b"GET /health HTTP/1.1\r\nx: " + b"y" * (8 << 20)
    many = b"GET /health HTTP/1.1\r\n" + b"".join(b"h%d: v\r\n" % i for i in range(500_000)) + b"\r\n"
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: soak\r\n".encode()
    too_large = head + b"content-length: 33554432\r\n\r\n" + bytes(32 << 20)
    tiny = head + b"transfer-encoding: chunked\r\n\r\n" + b"1\r\nx\r\n" * 500_000
    return [
        *(Exchange(framed(body), body.name, True) for body in attacks()),
        *(Exchange(framed(body), f"{body.name}, client gone", False, leaves=True) for body in attacks()),
        Exchange(endless, "endless header", True),
        Exchange(many, "half a million headers", True),
        Exchange(b"GET /" + b"a" * (8 << 20), "endless URL", True),
        Exchange(too_large, "body of 32 MiB", True),
        Exchange(tiny, "chunks of a byte", True),
    ]
