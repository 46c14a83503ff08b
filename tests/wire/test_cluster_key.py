"""The secret that a router and engines on other hosts share: who has it is let in, nobody else is."""

import asyncio
import contextlib
import os
import socket
import tempfile
from pathlib import Path

import pytest
import zmq
from another_user import NOBODY, as_nobody, needs_root
from wire_rig import KEY, TIMEOUT_S, Context, Frame, Listener, connected, encode_frame, make_card, raw_peer, receive

from pdkv.errors import ConfigError
from pdkv.router.engines.engine_client import EngineClient
from pdkv.wire.cluster_key import ClusterKey
from pdkv.wire.engine_server import EngineServer
from pdkv.wire.messages import PROTOCOL, Abort, Hello

OTHER = ClusterKey(b"o" * 32)


async def until_it_is_said(caplog: pytest.LogCaptureFixture) -> None:
    """The router says that it was not let in."""
    async with asyncio.timeout(TIMEOUT_S):
        while "--cluster-key-file" not in caplog.text:
            await asyncio.sleep(0.01)


async def test_who_has_the_key_is_let_in_and_hears_the_beats(keyed_server: EngineServer, context: Context) -> None:
    async with connected(keyed_server, context, KEY) as (client, listener):
        client.send(Abort("q", 1))
        assert await asyncio.to_thread(receive, keyed_server, 1) == [("r", Abort("q", 1))]
        await listener.until(lambda: bool(listener.beats))


async def test_another_key_does_not_get_in_and_disturbs_nobody(
    keyed_server: EngineServer, context: Context, caplog: pytest.LogCaptureFixture
) -> None:
    async with connected(keyed_server, context, KEY) as (client, _):
        stranger = EngineClient("decode-0", keyed_server.endpoint, router_id="s", context=context, key=OTHER)
        unheard = Listener()
        stranger.connect(unheard)
        await until_it_is_said(caplog)
        client.send(Abort("q", 1))
        assert await asyncio.to_thread(receive, keyed_server, 1) == [("r", Abort("q", 1))]
        assert not unheard.cards
        stranger.close()


async def test_who_has_none_and_what_is_no_handshake_are_not_heard(
    keyed_server: EngineServer, context: Context
) -> None:
    """A hello without a key, and noise: neither reaches the engine, whose next router is let in."""
    address, _, port = keyed_server.endpoint.removeprefix("tcp://").partition(":")
    stranger = raw_peer(context, keyed_server.endpoint)
    with contextlib.suppress(zmq.Again):  # there is nobody to send it to, once the handshake has failed
        stranger.send(encode_frame(Frame(0, [Hello("s", "e", PROTOCOL)])), zmq.NOBLOCK)
    with socket.create_connection((address, int(port))) as noise:
        noise.sendall(os.urandom(4096))
        async with connected(keyed_server, context, KEY) as (client, _):
            assert not stranger.poll(50)
            client.send(Abort("q", 1))
            assert await asyncio.to_thread(receive, keyed_server, 1) == [("r", Abort("q", 1))]
    stranger.close()
    assert keyed_server.num_dropped == 0


def test_an_engine_without_it_is_not_taken_for_one_that_has_it(
    context: Context, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        client = EngineClient("decode-0", server.endpoint, router_id="r", context=context, key=KEY)
        listener = Listener()
        client.connect(listener)
        await until_it_is_said(caplog)
        assert not listener.cards
        client.close()

    server = EngineServer("tcp://127.0.0.1:0", make_card())
    asyncio.run(main())
    server.close()


def test_beats_have_the_port_above() -> None:
    server = EngineServer("tcp://127.0.77.1:7000", make_card())  # an address of this test's own
    assert server.card.beats == "tcp://127.0.77.1:7001"
    server.close()


def test_a_key_file_is_private_and_long_enough(tmp_path: Path) -> None:
    path = tmp_path / "cluster.key"
    with pytest.raises(ConfigError, match=r"cluster\.key cannot be read: No such file"):
        ClusterKey.read(path)
    path.touch(mode=0o600)
    path.write_text("a" * 31 + "\n")
    with pytest.raises(ConfigError, match=r"has 31 bytes, but at least 32 .*openssl rand"):
        ClusterKey.read(path)
    path.write_text("a" * 32 + "\n")
    ClusterKey.read(path)
    path.write_text("a" * 70_000)
    with pytest.raises(ConfigError, match="more than 65536 bytes"):
        ClusterKey.read(path)
    path.write_text("a" * 32)
    path.chmod(0o640)
    with pytest.raises(ConfigError, match=r"is readable by other users: chmod 600"):
        ClusterKey.read(path)


@needs_root
def test_root_may_let_a_group_read_the_key_as_kubernetes_does() -> None:
    """A volume of a Secret belongs to root; a pod's process has the group of its files."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "cluster.key"
        path.write_text("a" * 32)
        Path(folder).chmod(0o755)
        os.chown(path, 0, NOBODY)

        def outcome() -> str:
            try:
                ClusterKey.read(path)
            except ConfigError as error:
                return str(error)
            return "read"

        path.chmod(0o440)
        assert as_nobody(outcome) == "read"
        for mode in (0o460, 0o444):
            path.chmod(mode)
            assert "is readable by other users" in as_nobody(outcome)


def test_no_repr_shows_the_key() -> None:
    assert "k" * 8 not in repr(KEY)
    assert "_Pair" not in repr(KEY)
