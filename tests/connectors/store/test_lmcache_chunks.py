"""The `lmcache` connector beside LMCache's own engine code and server, over one model."""

import contextlib
import json
import socket
import struct
import subprocess
import sys
import threading
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from recall import make_question
from store_servers import LMCacheServer, SharedServer, StoreServer

from pdkv import LLM, SamplingParams
from pdkv.base.options import OptionTexts
from pdkv.connectors.base import RequestView
from pdkv.connectors.store.lmcache import ChunkCodec, LMCacheOptions
from pdkv.connectors.store.lmcache_keys import MAX_CHUNKS_PER_STEP, ChunkKeys, HashName
from pdkv.errors import ConfigError, StoreTimeout
from pdkv.kv_store.codecs.base import PartShape
from pdkv.kv_store.lmcache_chunks import ChunkForm, LMCacheChunks
from pdkv.kv_store.lmcache_store import GET, PUT, SUCCESS, Kind, encode_request
from pdkv.kv_store.options import StoreOptions
from pdkv.testing import VirtualClock

pytestmark = pytest.mark.processes

MODEL = Path(__import__("pdkv").__file__).parent / "default_model"
PEER = Path(__file__).parents[2] / "support" / "lmcache_peer.py"
PARAMS = SamplingParams(temperature=0, max_tokens=8)
QUESTIONS = [make_question(seed, 80) for seed in range(2)]  # 565 tokens each: two chunks
ANSWERS = [question.answer for question in QUESTIONS]


@pytest.fixture
def server() -> Iterator[StoreServer]:
    with LMCacheServer() as running:
        yield running


def make_llm(server: StoreServer, **options: str) -> LLM:
    config = {"url": server.url, "model_name": "the-model", "hash": "builtin"} | options
    return LLM(connector="lmcache", connector_config=config, kv_cache_memory=32 << 20, threads=1)


def answers_of(llm: LLM, **fields: Any) -> tuple[list[str], list[int]]:
    """Texts, and how many tokens of each prompt were not computed."""
    outputs = llm.generate([question.prompt for question in QUESTIONS], PARAMS, use_tqdm=False, **fields)
    return [output.outputs[0].text for output in outputs], [output.num_cached_tokens for output in outputs]


def peer(action: str, server: StoreServer, hash_name: str = "builtin") -> list[Any]:
    """What an LMCache engine says of the questions' chunks."""
    host, _, port = server.url.partition("://")[2].partition(":")
    prompts = json.dumps([question.prompt for question in QUESTIONS])
    command = [sys.executable, str(PEER), action, host, port, str(MODEL), hash_name, prompts]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    said: list[Any] = json.loads(done.stdout.splitlines()[-1])
    return said


TOKENS = [i * i * 37 % 150_000 for i in range(600)]
KEYS = {
    ("builtin", "0"): ["6be41a57445cc1fd", "-1dd31886a2b3fccf"],
    ("builtin", "42"): ["2b5b8fba1de592ce", "-147eaa7cc28778ad"],
    ("sha256_cbor", "0"): ["19f0a517fb45a028", "a763874a7d7818ea"],
    ("sha256_cbor", "42"): ["808a0af421c9b5", "16807c9ce71fa64e"],
}
"""By hash and PYTHONHASHSEED: what LMCache 0.5.6 beside vLLM 0.32 on Python 3.11 calls the chunks of TOKENS."""


@pytest.mark.parametrize(("hash_name", "seed"), KEYS)
def test_chunks_are_called_as_lmcache_beside_vllm_calls_them(hash_name: HashName, seed: str) -> None:
    if hash_name == "builtin" and (sys.version_info < (3, 11) or sys.hash_info.algorithm != "siphash13"):
        pytest.skip("another Python has another hash")
    keys = ChunkKeys(256, hash_name, seed).of_tokens(TOKENS)
    assert [key.decode() for key in keys if key] == KEYS[hash_name, seed]
    assert [bool(key) for key in keys] == [number % 16 == 15 for number in range(32)]


@pytest.mark.parametrize("hash_name", typing.get_args(HashName))
def test_a_step_hashes_no_more_chunks_than_it_may_wait_for(hash_name: HashName) -> None:
    """A long prompt's keys take several steps, and two prompts share what a step has."""
    tokens = TOKENS * 100
    num_chunks = len(tokens) // 256
    hashing, whole = ChunkKeys(256, hash_name, "0"), ChunkKeys(256, hash_name, "0").of_tokens(tokens)
    long, other = make_view("long", tokens), make_view("other", TOKENS)
    assert not hashing.are_ready(long)
    assert not hashing.are_ready(other), "nothing is left of the step"
    num_steps = 1
    while not hashing.are_ready(long):
        hashing.begin_step()
        num_steps += 1
    assert num_steps == -(-num_chunks // MAX_CHUNKS_PER_STEP)
    assert hashing.of(long) == whole
    assert [key.decode() for key in hashing.of(other) if key] == KEYS[hash_name, "0"]
    assert hashing.are_ready(other)


def make_view(name: str, tokens: list[int]) -> RequestView:
    return RequestView(name, 0, name, "local", len(tokens), len(tokens) - 1, [], prompt_token_ids=tokens)


def test_the_hash_is_named() -> None:
    """There is no default: which one it is decides who can make prompts that meet."""
    with pytest.raises(ConfigError, match="hash"):
        LMCacheOptions.parse(OptionTexts({"url": "lmcache://localhost:1", "model_name": "m"}, "lmcache"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_body_is_kv_2ltd(dtype: str) -> None:
    shape = PartShape(num_units=4, num_layers=3, num_heads=2, head_size=8, dtype=dtype)
    images = np.random.default_rng(0).integers(0, 256, shape.num_bytes, dtype=np.uint8)
    body, back = ChunkCodec().encode(images, shape), np.empty_like(images)
    ChunkCodec().decode(body, shape, back)
    assert (back == images).all()
    width = np.uint32 if dtype == "float32" else np.uint16
    unit, plane, layer, head, token = 2, 1, 2, 1, 5
    chunk = body.view(width).reshape(2, 3, 64, 2, 8)
    wanted = images.view(width).reshape(4, 3, 2, 2, 16, 8)[unit, layer, plane, head, token]
    assert (chunk[plane, layer, unit * 16 + token, head] == wanted).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"url": "redis://localhost:1"}, r"option url: lmcache://host:port was expected, got 'redis://localhost:1'"),
        ({"url": "lmcache://localhost"}, "option url: lmcache://host:port was expected"),
        (
            {"url": "lmcache://localhost:1", "model_name": "x" * 130},
            "keys have at most 150 bytes .*x' is not a valid name",
        ),
        ({"url": "lmcache://localhost:1", "model_name": "a@b"}, "no further '@': 'a@b' is not a valid name"),
        ({"url": "lmcache://localhost:1", "hash": "sha256"}, "hash"),
    ],
)
def test_what_no_chunk_can_have_is_refused(options: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LMCacheOptions.parse(OptionTexts({"model_name": "m", "hash": "builtin"} | options, "lmcache")).open_store()


def test_a_chunk_of_another_form_is_a_miss_and_stays(shared_server: SharedServer) -> None:
    """Other layers, another dtype, half of one: nothing of it is taken, and others find what they have put."""
    host, _, port = shared_server("lmcache").url.partition("://")[2].partition(":")

    def opened(dtype: str, layers: int) -> LMCacheChunks:
        form = ChunkForm("m", 1, dtype, (2, layers, 256, 8))
        return LMCacheChunks(host, int(port), StoreOptions(), form, trailer_bytes=64)

    keys = [b"1f@0", b"-2@0", b"3@0"]
    with opened("float32", 1) as floats, opened("float32", 2) as deep, opened("bfloat16", 2) as halves:
        chunk = memoryview(bytes(range(1, 252)) * 70)[: 2 * 256 * 8 * 4 + 64]
        floats.put([(keys[0], chunk)])
        with socket.create_connection((host, int(port))) as connection:  # of an engine that dies in the middle
            name = ChunkForm("m", 1, "float32", (2, 1, 256, 8)).name(keys[1])
            connection.sendall(encode_request(PUT, name, len(chunk) - 64, Kind(1, 4, (2, 1, 256, 8))) + b"half")
            connection.shutdown(socket.SHUT_WR)
            connection.recv(1)
        out = [memoryview(bytearray(len(chunk))) for _ in keys]
        assert floats.get(keys, out) == [True, False, False]
        assert out[0][:-64] == chunk[:-64]
        assert bytes(out[0][-64:]) == bytes(64)
        assert deep.get(keys[:1], [memoryview(bytearray(2 * len(chunk)))]) == [False]
        assert halves.contains(keys[:1]) == [False]
        floats.delete(keys)
        assert floats.contains(keys)[0]


def test_a_batch_has_one_deadline_whatever_the_server_does() -> None:
    """One that ends the connection at each GET, and takes its time to do so."""
    clock, num_gets = VirtualClock(), 0
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            nonlocal num_gets
            while num_gets < 3:
                connection, _ = listener.accept()
                with connection, contextlib.suppress(ConnectionError):
                    while (request := connection.recv(4096)) and request[:4] != struct.pack("i", GET):
                        connection.sendall(struct.pack("9i", SUCCESS, *[0] * 8))
                num_gets += 1
                clock.advance(4.0)

        thread = threading.Thread(target=serve)
        thread.start()
        form, options = ChunkForm("m", 1, "float32", (2, 1, 256, 8)), StoreOptions(operation_timeout_s=10.0)
        with LMCacheChunks("127.0.0.1", listener.getsockname()[1], options, form, trailer_bytes=0) as store:
            store.clock = clock
            with pytest.raises(StoreTimeout):
                store.get([b"%x@0" % n for n in range(20)], [memoryview(bytearray(100)) for _ in range(20)])
        thread.join()


@pytest.mark.slow
def test_what_lmcache_has_stored_is_found(server: StoreServer) -> None:
    with make_llm(server) as llm:
        assert peer("put", server) == [True] * 4
        assert answers_of(llm) == (ANSWERS, [512, 512])


@pytest.mark.slow
def test_what_was_computed_here_lmcache_finds(server: StoreServer) -> None:
    with make_llm(server) as llm:
        assert peer("get", server) == [None] * 4
        assert answers_of(llm) == (ANSWERS, [0, 0])
        assert all(distance < 0.05 for distance in peer("get", server))
    with make_llm(server) as llm:
        assert answers_of(llm) == (ANSWERS, [512, 512])
    with make_llm(server, model_name="another-model") as llm:
        assert answers_of(llm) == (ANSWERS, [0, 0])
