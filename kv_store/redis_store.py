"""Values in a Redis server: pipelined commands, and values that go from the socket straight into their buffers.

redis-py opens the connections (addresses, AUTH, SELECT). Since redis-py copies what it reads several times, commands
are written and replies read here: 2.5 to 5 times as fast for values from 256 KiB to 4 MiB.
"""

import re
import socket
import ssl
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from pdkv.base.clock import MONOTONIC, Clock, unix_time
from pdkv.errors import ConfigError, StoreError, StoreFull, StoreReadOnly, StoreTimeout, StoreUnavailable
from pdkv.kv_store.base import Arrived, Buffer, Item
from pdkv.kv_store.connections import Channel, Deadline
from pdkv.kv_store.options import TTL_MAX_S, StoreOptions
from pdkv.kv_store.pipeline import Command
from pdkv.kv_store.server_store import ServerStore
from pdkv.kv_store.terms import NO_TERMS, Terms

KEY_PREFIX = b"pdkv:"
MAX_VALUE_BYTES = 512 << 20  # of a Redis string, unless proto-max-bulk-len says otherwise

_CRLF = b"\r\n"
_NUMBER = re.compile(rb"-?\d{1,19}")
_NOT_NOW = frozenset({"LOADING", "MASTERDOWN", "BUSY", "CLUSTERDOWN", "NOAUTH", "NOPERM"})
_NO_WRITES = frozenset({"READONLY", "MISCONF", "NOPERM"})
_MAY_BE_ELSEWHERE = frozenset({"READONLY", "MASTERDOWN", "LOADING", "NOAUTH"})
"""Errors after a failover: a new connection leads to the new master, while old ones still end at the old one."""


def _encode(*parts: bytes) -> bytes:
    """A command in the protocol's form."""
    return b"*%d\r\n" % len(parts) + b"".join(b"$%d\r\n%b\r\n" % (len(part), part) for part in parts)


def _name(key: bytes) -> bytes:
    return KEY_PREFIX + key


def _code(text: str) -> str:
    return text.partition(" ")[0]


def _as_error(text: str, what: str, *, is_write: bool) -> StoreError:
    """The type of an error reply."""
    code, message = _code(text), f"{what}: {text}"
    if code == "OOM":
        return StoreFull(message)
    if is_write and code in _NO_WRITES:
        return StoreReadOnly(message)
    if code in ("MOVED", "ASK"):
        return StoreUnavailable(f"{message}: a node of a Redis Cluster, where a single server or a proxy was expected")
    return (StoreUnavailable if code in _NOT_NOW else StoreError)(message)


class _Reply(NamedTuple):
    """A reply's first line. A value (kind b"$") that is not read by `receive` stays on the channel."""

    channel: Channel
    kind: bytes  # b"+", b"-", b":" or b"$"
    text: bytes


def _read_reply(channel: Channel, what: str) -> _Reply:
    line = channel.read_line()
    reply = _Reply(channel, line[:1], line[1:])
    if reply.kind in (b"+", b"-") or (reply.kind in (b":", b"$") and _NUMBER.fullmatch(reply.text)):
        return reply
    raise StoreUnavailable(f"{what}: {line[:40]!r} is not a reply of Redis")


def _read_value(reply: _Reply, out: Buffer, arrived: Callable[[int], None]) -> bool:
    """Read the value behind its first line. False: there is none, or it has another size."""
    size = int(reply.text)
    if size < 0:
        return False
    if size != len(out):
        reply.channel.skip(size + len(_CRLF))
        return False
    reply.channel.read_into(out, arrived)
    reply.channel.skip(len(_CRLF))
    return True


def _tls_arguments(options: StoreOptions, what: str) -> dict[str, Any]:
    """Arguments for redis-py's TLS connections. Raises ConfigError for files that it could not load later."""
    try:
        context = ssl.create_default_context(cafile=options.ssl_ca_certs)
        if options.ssl_certfile is not None:
            context.load_cert_chain(options.ssl_certfile, options.ssl_keyfile)
    except OSError as error:  # ssl.SSLError is one
        files = ", ".join(filter(None, (options.ssl_ca_certs, options.ssl_certfile, options.ssl_keyfile)))
        raise ConfigError(f"{what}: TLS with {files}: {error.strerror or error}") from None
    return {
        "ssl_ca_certs": options.ssl_ca_certs,
        "ssl_certfile": options.ssl_certfile,
        "ssl_keyfile": options.ssl_keyfile,
        "ssl_cert_reqs": options.ssl_cert_reqs,
        "ssl_check_hostname": options.ssl_check_hostname and options.ssl_cert_reqs != "none",
    }


class RedisStore(ServerStore):
    """A value is one Redis string. With `ttl_s` it expires that long after its put, however often it is read, or at its
    own expiry if that is earlier.
    """

    def __init__(
        self,
        url: str,
        options: StoreOptions | None = None,
        unix_time: Callable[[], float] = unix_time,
        clock: Clock = MONOTONIC,
    ) -> None:
        """`url`: redis://[user:password@]host:port/db, rediss:// for TLS, or unix://[user:password@]/path. `unix_time`:
        the clock by which values expire.

        Raises:
            ConfigError: redis-py is not installed or refuses the URL, or a file of certificates cannot be read.
        """
        try:
            from redis.connection import Connection, parse_url
        except ModuleNotFoundError as error:
            raise ConfigError("the redis store needs the package redis: pip install 'pdkv[redis]'") from error
        parts = urlsplit(url)
        super().__init__(f"redis at {parts.netloc.rpartition('@')[2]}{parts.path}", options, clock)
        try:
            self._arguments = dict(parse_url(url))  # type: ignore[no-untyped-call]
        except ValueError as error:
            raise ConfigError(f"{self.what}: {error}") from None
        self._unix_time = unix_time
        self._connection_class = self._arguments.pop("connection_class", Connection)
        if parts.scheme == "rediss":
            self._arguments |= _tls_arguments(self.options, self.what)

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        return self._contains(keys, self._deadline())

    def read(self, keys: Sequence[bytes], out: Sequence[Buffer], arrived: Arrived) -> list[bool]:
        found = [False] * len(keys)
        commands = [
            Command([_encode(b"GET", _name(key))], len(buffer)) for key, buffer in zip(keys, out, strict=True)
        ]  # fmt: skip

        def receive(reply: _Reply, index: int) -> None:
            found[index] = reply.kind == b"$" and _read_value(reply, out[index], partial(arrived, index))

        self._run_commands(commands, self._deadline(), receive)
        return found

    def put(self, items: Sequence[tuple[bytes, Buffer]]) -> None:
        self.put_on_terms(items, {})

    def put_on_terms(self, items: Sequence[Item], terms: Mapping[bytes, Terms]) -> None:
        deadline = self._deadline()
        now = self._unix_time()
        items = [item for item in items if not terms.get(item[0], NO_TERMS).are_over(now)]
        present = self._contains([key for key, _ in items], deadline)  # spares the way of what is there
        missing = [item for item, found in zip(items, present, strict=True) if not found]
        for _, value in missing:
            if len(value) > MAX_VALUE_BYTES:
                raise StoreFull(f"{self.what}: a value has {len(value)} bytes; at most {MAX_VALUE_BYTES} are possible")
        lives_s = [self._life_s(terms.get(key, NO_TERMS), now) for key, _ in missing]
        commands = [self._set(*item, life_s) for item, life_s in zip(missing, lives_s, strict=True)]
        self._run_commands(commands, deadline, is_write=True)

    def delete(self, keys: Sequence[bytes]) -> None:
        commands = [Command([_encode(b"UNLINK", _name(key))]) for key in keys]
        self._run_commands(commands, self._deadline(), is_write=True)

    def connect(self, timeout_s: float) -> Channel:
        import redis
        from redis.backoff import NoBackoff
        from redis.retry import Retry

        try:
            connection = self._connection_class(  # reads files: those of redis-py's metadata
                **self._arguments,
                protocol=2,
                retry=Retry(NoBackoff(), 0),
                socket_connect_timeout=timeout_s,
                socket_timeout=timeout_s,
            )
            connection.connect()
        except redis.TimeoutError as error:
            raise StoreTimeout(f"{self.what}: no connection within {timeout_s:g} s") from error
        except (redis.RedisError, OSError, ValueError) as error:  # ValueError: a number in an answer is none
            raise StoreUnavailable(f"{self.what}: {error}") from error
        sock = connection._sock  # redis-py has no public way to it
        assert isinstance(sock, socket.socket)
        return Channel(sock, self.what, owner=connection)

    def _contains(self, keys: Sequence[bytes], deadline: Deadline) -> list[bool]:
        found = [False] * len(keys)

        def receive(reply: _Reply, index: int) -> None:
            found[index] = reply.kind == b":" and int(reply.text) == 1

        self._run_commands([Command([_encode(b"EXISTS", _name(key))]) for key in keys], deadline, receive)
        return found

    def _life_s(self, terms: Terms, now: float) -> float | None:
        """How long the server keeps a value; None: without a limit."""
        left_s = min(terms.expires_at - now, TTL_MAX_S) if terms.expires_at else None
        return min((life_s for life_s in (left_s, self.options.ttl_s) if life_s is not None), default=None)

    def _set(self, key: bytes, value: Buffer, life_s: float | None) -> Command:
        options = [b"NX"]
        if life_s is not None:
            options += [b"PX", b"%d" % max(1, int(life_s * 1000))]
        name = _name(key)
        head = b"*%d\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (3 + len(options), len(name), name, len(value))
        tail = _CRLF + b"".join(b"$%d\r\n%b\r\n" % (len(option), option) for option in options)
        return Command([head, value, tail], len(value))

    def _run_commands(
        self,
        commands: Sequence[Command],
        deadline: Deadline,
        receive: Callable[[_Reply, int], None] = lambda reply, index: None,
        *,
        is_write: bool = False,
    ) -> None:
        """Run a batch to its end, then raise the first error in a reply, so that the connection stays in step. It is
        given up if another one may lead to a server that accepts the commands.
        """
        refused: dict[int, str] = {}

        def receive_one(channel: Channel, index: int) -> None:
            reply = _read_reply(channel, self.what)
            refused.pop(index, None)  # by the server of a connection that was given up
            if reply.kind == b"-":
                refused[index] = reply.text.decode(errors="replace")
            else:
                receive(reply, index)
            if index == len(commands) - 1:
                for text in refused.values():
                    if _code(text) in _MAY_BE_ELSEWHERE:
                        raise _as_error(text, self.what, is_write=is_write)

        self._run(commands, receive_one, deadline)
        if refused:
            raise _as_error(refused[min(refused)], self.what, is_write=is_write)
