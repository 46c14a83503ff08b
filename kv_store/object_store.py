"""Values as objects of a bucket: S3 and what speaks its protocol, Google Cloud Storage, Azure Blob Storage.

Uses obstore, which runs requests on its own threads. A value is one object, named after its key's digest, which exists
whole or not at all. Eviction is up to the bucket's lifecycle rules.
"""

import asyncio
import atexit
import hashlib
import logging
import re
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import CancelledError
from contextlib import asynccontextmanager
from contextvars import Context
from functools import partial
from itertools import compress
from typing import Any, Literal, TypeVar, TypeVarTuple

import obstore
from obstore import exceptions
from obstore.store import from_url

from pdkv.base.service_thread import start_thread
from pdkv.errors import ConfigError, StoreTimeout, StoreUnavailable
from pdkv.kv_store.base import PART_BYTES, Arrived, Buffer, TellingStore
from pdkv.kv_store.options import StoreOptions

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

logger = logging.getLogger(__name__)

_BYTES_IN_FLIGHT = 256 << 20  # by default: each request has a connection of its own, for which no server buffers more
_MESSAGE_LENGTH = 300
_NUM_PROBES = 7
_EXIT_BOUND_S = 5.0
_BEHIND_S = 1.0
"""Seconds by which the deadline of each request in the client exceeds the call's own deadline, which is the one
reported.
"""
_NOT_IMPLEMENTED = re.compile(r"501 Not Implemented|NotImplemented")
_CAUSE = re.compile(r'Os \{[^}]*message: "([^"]+)"', re.DOTALL)


class ObjectStore(TellingStore):
    """At most `pipeline` requests of a batch run at a time, with at most `max_bytes_in_flight` bytes of values over all
    batches.

    Credentials and the region come from the same places as for the provider's own tools, such as AWS_ACCESS_KEY_ID,
    AWS_REGION or an instance's role; never from the URL, which is shown in logs.
    """

    def __init__(self, url: str, options: StoreOptions | None = None) -> None:
        """`url`: s3://bucket/prefix, gs://bucket/prefix or az://container/prefix. Connects on first use.

        Raises:
            ConfigError: the bucket's address is not valid.
        """
        self._options = options or StoreOptions()
        self._what = url
        self.bucket = _open_bucket(url, self._options)
        self._budget = _Budget(self._options.max_bytes_in_flight or _BYTES_IN_FLIGHT)
        self._loop = _LoopThread()
        self._put_mode: Literal["create", "overwrite"] = "create"

    @property
    def asks_key_by_key(self) -> bool:
        return True

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        return self._run([partial(self._has, key) for key in keys])

    def count_prefixes(self, chains: Sequence[Sequence[bytes]]) -> list[int]:
        """Asks for a few keys at a time, evenly spaced between the last one found and the first one missing; in rounds,
        each for all chains. A chain's first key is always asked for: it may be the oldest, and a bucket's rules may
        delete by age.
        """
        found, missing = [0] * len(chains), [len(chain) for chain in chains]
        while left := [i for i in range(len(chains)) if found[i] < missing[i]]:
            probes = {i: _probes(found[i], missing[i]) for i in left}
            asked = list(dict.fromkeys(chains[i][place] for i in left for place in probes[i]))
            there = set(compress(asked, self.contains(asked)))
            for i in left:
                for place in probes[i]:
                    if chains[i][place] not in there:
                        missing[i] = place
                        break
                    found[i] = place + 1
        return found

    def read(self, keys: Sequence[bytes], out: Sequence[Buffer], arrived: Arrived) -> list[bool]:
        return self._run(
            [
                partial(self._read, key, buffer, partial(arrived, index))
                for index, (key, buffer) in enumerate(zip(keys, out, strict=True))
            ]
        )

    def put(self, items: Sequence[tuple[bytes, Buffer]]) -> None:
        self._run([partial(self._put, key, value) for key, value in items])

    def delete(self, keys: Sequence[bytes]) -> None:
        names = [_name(key) for key in keys]
        if names:
            self._run([partial(obstore.delete_async, self.bucket, names)])

    def close(self) -> None:
        self._loop.close()

    def hang_up(self, *, for_good: bool = False) -> None:
        (self._loop.close if for_good else self._loop.hang_up)()

    # --- on the loop's thread ---------------------------------------------------------------------------------------

    async def _has(self, key: bytes) -> bool:
        try:
            await obstore.head_async(self.bucket, _name(key))
        except FileNotFoundError:
            return False
        return True

    async def _read(self, key: bytes, buffer: Buffer, arrived: Callable[[int], None]) -> bool:
        """False: no such object, or one of another size; one that is cut short while it is read is one of those."""
        async with self._budget.of(buffer.nbytes):
            try:
                result = await obstore.get_async(self.bucket, _name(key))
            except FileNotFoundError:
                return False
            if result.meta["size"] != buffer.nbytes:
                return False
            stop = 0
            async for part in result.stream(min_chunk_size=PART_BYTES):
                start, stop = stop, stop + len(part)
                if stop > buffer.nbytes:
                    return False
                buffer[start:stop] = memoryview(part)
                arrived(stop)
            return stop == buffer.nbytes

    async def _put(self, key: bytes, value: Buffer) -> None:
        async with self._budget.of(value.nbytes):
            try:
                # A copy: obstore may still send what a call that is over has given it.
                await self._send(_name(key), bytes(value), self._put_mode)
            except exceptions.AlreadyExistsError:
                return
            except FileNotFoundError as error:
                raise StoreUnavailable(f"{self._what}: {_in_short(error)}") from None

    async def _send(self, name: str, data: bytes, mode: Literal["create", "overwrite"]) -> None:
        """Without the condition that the object is new where the server has none: a name says what is in the object."""
        try:
            await obstore.put_async(self.bucket, name, data, mode=mode, use_multipart=False)
        except exceptions.BaseError as error:
            if mode == "overwrite" or not _NOT_IMPLEMENTED.search(str(error)):
                raise
            if self._put_mode == "create":
                logger.warning("%s: %s: from now on values are put without a condition", self._what, _in_short(error))
            self._put_mode = "overwrite"
            await self._send(name, data, "overwrite")

    # --- calls --------------------------------------------------------------------------------------------------------

    def _run(self, requests: Sequence[Callable[[], Awaitable[T]]]) -> list[T]:
        """Make the requests of one call, and wait for all of them.

        Raises:
            StoreTimeout: they did not end in time; none of them touches a buffer any more.
            StoreUnavailable: one of them failed; the others are given up.
        """
        return self._loop.run(self._gather(requests), f"{self._what} is closed") if requests else []

    async def _gather(self, requests: Sequence[Callable[[], Awaitable[T]]]) -> list[T]:
        turns, results = asyncio.Semaphore(self._options.pipeline), dict[int, T]()

        async def make(index: int, request: Callable[[], Awaitable[T]]) -> None:
            async with turns:
                results[index] = await request()

        timeout_s = self._options.operation_timeout_s
        try:
            async with asyncio.timeout(timeout_s), asyncio.TaskGroup() as group:
                for index, request in enumerate(requests):
                    group.create_task(make(index, request))
        except TimeoutError:
            raise StoreTimeout(f"{self._what} did not answer within {timeout_s:g} s") from None
        except BaseExceptionGroup as errors:
            error = errors.exceptions[0]
            if isinstance(error, StoreUnavailable) or not isinstance(error, exceptions.BaseError | OSError):
                raise error from None
            raise StoreUnavailable(f"{self._what}: {_in_short(error)}") from None
        return [results[index] for index in range(len(requests))]


class _LoopThread:
    """An event loop on a daemon thread, started with the first call, ended at the interpreter's exit at the latest."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: _Loop | None = None
        self._tasks = set[asyncio.Task[Any]]()  # of the loop's thread
        self._num_calls = 0
        self._is_closed = False

    def run(self, call: Coroutine[Any, Any, T], when_closed: str) -> T:
        """Run a coroutine that has its own deadline. Raises StoreUnavailable if `close` ends it."""
        with self._lock:
            try:
                loop = self._running_loop(when_closed)
            except StoreUnavailable:
                call.close()
                raise
            future = asyncio.run_coroutine_threadsafe(self._hold(call), loop)
            self._num_calls += 1
        try:
            return future.result()
        except CancelledError:
            raise StoreUnavailable(when_closed if self._is_closed else "the call was ended") from None
        finally:
            with self._lock:
                self._num_calls -= 1
                self._stop_if_unused()

    def _running_loop(self, when_closed: str) -> "_Loop":
        """The loop, for a caller that has the lock. Raises StoreUnavailable."""
        if self._is_closed:
            raise StoreUnavailable(when_closed)
        if self._loop is None:
            loop = _Loop()
            thread = threading.Thread(target=self._serve, args=[loop], name="pdkv-objects", daemon=True)
            try:
                start_thread(thread, StoreUnavailable)
            except StoreUnavailable:  # calls would wait for one without a deadline
                loop.close()
                raise
            atexit.register(self._end, thread)
            self._loop = loop
        return self._loop

    def close(self) -> None:
        """End running calls, and refuse others. Idempotent."""
        with self._lock:
            self._is_closed = True
        self.hang_up()
        with self._lock:
            self._stop_if_unused()

    def hang_up(self) -> None:
        """End running calls."""
        with self._lock:
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self._cancel_all)

    async def _hold(self, call: Coroutine[Any, Any, T]) -> T:
        task = asyncio.current_task()
        assert task is not None
        if self._is_closed:  # since it was queued: `_cancel_all` has not seen it
            call.close()
            raise asyncio.CancelledError
        self._tasks.add(task)
        try:
            return await call
        finally:
            self._tasks.discard(task)

    def _cancel_all(self) -> None:
        for task in self._tasks:
            task.cancel()

    def _stop_if_unused(self) -> None:
        if self._is_closed and not self._num_calls and self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._loop = None

    def _end(self, thread: threading.Thread) -> None:
        self.close()
        thread.join(timeout=_EXIT_BOUND_S)

    def _serve(self, loop: "_Loop") -> None:
        loop.run_forever()
        loop.wait_for_callers(_EXIT_BOUND_S)
        loop.close()
        atexit.unregister(self._end)


class _Loop(asyncio.SelectorEventLoop):
    """An event loop that knows which threads are working in it.

    obstore's own hand their results over by `call_soon_threadsafe`. One that is still in there when the interpreter
    goes down is ended by it, inside Rust, which takes the process down by SIGABRT.
    """

    def __init__(self) -> None:
        self._callers = threading.Condition()
        self._num_callers = 0
        super().__init__()

    def call_soon_threadsafe(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        with self._callers:
            self._num_callers += 1
        try:
            return super().call_soon_threadsafe(callback, *args, context=context)
        finally:
            with self._callers:
                self._num_callers -= 1
                self._callers.notify_all()

    def wait_for_callers(self, timeout_s: float) -> None:
        with self._callers:
            self._callers.wait_for(lambda: not self._num_callers, timeout_s)


class _Budget:
    """Limits the bytes in flight; a larger value goes alone. First come, first served. Belongs to one event loop."""

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes = self._num_free = num_bytes
        self._changed = asyncio.Condition()

    @asynccontextmanager
    async def of(self, num_bytes: int) -> AsyncIterator[None]:
        """A context in which this many bytes of values are in flight."""
        num_bytes = min(num_bytes, self._num_bytes)
        async with self._changed:
            await self._changed.wait_for(lambda: self._num_free >= num_bytes)
            self._num_free -= num_bytes
        try:
            yield
        finally:
            async with self._changed:
                self._num_free += num_bytes
                self._changed.notify_all()


def _open_bucket(url: str, options: StoreOptions) -> Any:
    client: dict[str, Any] = {"connect_timeout": f"{options.connect_timeout_s}s"}
    client["timeout"] = f"{options.operation_timeout_s + _BEHIND_S}s"
    given: dict[str, Any] = {"retry_config": {"max_retries": 2}}
    if options.endpoint is not None:
        client["allow_http"] = options.endpoint.startswith("http://")
        given["endpoint"] = options.endpoint
    if options.region is not None:
        given["region"] = options.region
    make: Any = from_url  # its overloads are by provider
    try:
        return make(url, client_options=client, **given)
    except (exceptions.BaseError, ValueError) as error:
        raise ConfigError(f"{url}: {_in_short(error)}") from None


def _probes(found: int, missing: int) -> list[int]:
    """Positions to check in [found, missing): the first, the last, and some in between."""
    gap = missing - found
    return sorted({found, *(missing - 1 - gap * i // _NUM_PROBES for i in range(_NUM_PROBES))})


def _name(key: bytes) -> str:
    return hashlib.blake2b(key, digest_size=20).hexdigest()


def _in_short(error: BaseException) -> str:
    """The first line and, for an error of the system, its words: after that, obstore prints its own internals."""
    text = str(error).strip() or type(error).__name__
    cause = _CAUSE.search(text)
    return ": ".join([text.splitlines()[0][:_MESSAGE_LENGTH], *(cause.groups() if cause else ())])
