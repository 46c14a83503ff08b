"""Compressed bodies: read as what they stand for, within the bounds of that."""

import gzip
import itertools
import json
import random
import zlib
from typing import Any

import pytest
from asgi_client import Exchange
from coroutines import run
from fake_dispatcher import FakeDispatcher, say
from small_app import MODEL, ids, make_app
from starlette.types import Message

from pdkv.config import HttpLimits
from pdkv.router.http.app import body_budget

BODY = json.dumps({"model": MODEL, "prompt": "x" * 50, "max_tokens": 2, "user": "ab" * 200_000}).encode()
LIMITS = HttpLimits(max_body_bytes=1 << 20, max_body_memory=4 << 20)


def ask(data: bytes, coding: str = "gzip", pieces: int = 1) -> tuple[Exchange, int]:
    """(the reply, the most bytes of the budget that were held)."""
    bodies, worst = body_budget(LIMITS), 0
    app = make_app(FakeDispatcher(say(ids("ab"))), limits=LIMITS, bodies=bodies)
    exchange = Exchange(
        "POST", "/v1/completions", b"", {"content-type": "application/json", "content-encoding": coding}
    )
    places = [len(data) * i // pieces for i in range(pieces + 1)]
    to_send = [data[a:b] for a, b in itertools.pairwise(places)]

    async def receive() -> Message:
        nonlocal worst
        worst = max(worst, bodies.held)
        if to_send:
            return {"type": "http.request", "body": to_send.pop(0), "more_body": bool(to_send)}
        return await exchange.receive()

    async def served() -> None:
        exchange._to_send.clear()
        await app(exchange.scope, receive, exchange.send)

    run(served())
    assert bodies.held == 0
    return exchange, worst


@pytest.mark.parametrize("pieces", [1, 7, 500])
def test_a_compressed_body_is_read(pieces: int) -> None:
    exchange, worst = ask(gzip.compress(BODY), pieces=pieces)
    assert exchange.status == 200, exchange.body
    assert pieces == 1 or worst > 100_000, "what it stands for counts"
    assert ask(gzip.compress(BODY), "GZIP", pieces)[0].status == 200
    assert ask(gzip.compress(BODY), ", identity, x-gzip", pieces)[0].status == 200
    assert ask(BODY, "identity", pieces)[0].status == 200


def test_what_a_bomb_stands_for_is_not_made() -> None:
    """A megabyte that would be a gigabyte."""
    packer = zlib.compressobj(9, zlib.DEFLATED, 31)
    piece = bytes(1 << 20)
    bomb = b"".join([packer.compress(piece) for _ in range(1024)]) + packer.flush()
    assert len(bomb) <= LIMITS.max_body_bytes + 100_000
    for pieces in (1, 64):
        exchange, worst = ask(bomb[: LIMITS.max_body_bytes], pieces=pieces)
        assert (exchange.status, "at most 1048576 bytes" in exchange.json()["error"]["message"]) == (413, True)
        assert worst <= 2 << 20


def damaged() -> list[tuple[str, bytes]]:
    packed = gzip.compress(BODY)
    return [
        ("cut off", packed[:-1]),
        ("cut off early", packed[:5]),
        ("empty", b""),
        ("two members", packed + packed),
        ("something behind it", packed + b"x"),
        ("another checksum", packed[:-8] + b"\0" * 4 + packed[-4:]),
        ("no gzip", BODY),
        ("zlib's own format", zlib.compress(BODY)),
    ]


@pytest.mark.parametrize(("name", "data"), damaged(), ids=lambda v: v if isinstance(v, str) else "")
def test_what_is_no_gzip_is_refused(name: str, data: bytes) -> None:
    for pieces in (1, 9):
        exchange, _ = ask(data, pieces=pieces)
        assert exchange.status == 400, name
        assert "not valid gzip" in exchange.json()["error"]["message"]


def test_any_cut_and_any_size_of_pieces() -> None:
    draw = random.Random(3)
    for _ in range(30):
        text = bytes(draw.choices(b"abcdef", k=draw.choice([0, 1, 65_535, 65_536, 65_537, 131_072])))
        body = json.dumps({"model": MODEL, "prompt": "x", "max_tokens": 1, "user": text.decode()}).encode()
        exchange, _ = ask(gzip.compress(body, draw.randrange(10)), pieces=draw.choice([1, 2, 3, 50]))
        assert exchange.status == 200, exchange.body


@pytest.mark.parametrize("coding", ["zstd", "br", "deflate", "gzip, gzip"])
def test_other_codings_are_refused(coding: str) -> None:
    error: dict[str, Any] = ask(BODY, coding)[0].json()["error"]
    assert "content-encoding must be gzip" in error["message"]
