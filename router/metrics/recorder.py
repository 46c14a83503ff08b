"""Records the load of a router for `pd bench serve --trace` and `pd replay`: when requests came, how long they were and
what they share (`pdkv.base.trace_format`), and nothing of what they said.
"""

import contextlib
import hmac
import logging
import os
import re
import secrets
import threading
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
from prometheus_client.core import Metric

from pdkv.base.block_keys import extend_keys, root_key
from pdkv.base.clock import MONOTONIC
from pdkv.base.service_thread import ServiceThread
from pdkv.base.trace_format import BLOCK_SIZE, VERSION, Head, TraceRequest
from pdkv.config import ObservabilityConfig
from pdkv.errors import ConfigError
from pdkv.router.metrics.exposition import counters, gauge

SLICE_S, SLICE_REQUESTS = 0.5, 64
"""Seconds between two looks at what has ended, and the most requests of one write."""

MAX_WAITING, MAX_WAITING_TOKENS = 1 << 14, 1 << 20
"""Ended choices, and tokens of their prompts, that may wait for the disk: some 40 MB."""

MAX_SESSIONS = 1 << 16
"""Conversations that may go on; of those beyond it, the next turn counts as a new one."""

CLOSE_S = 1.0
"""Seconds for the last lines to be written when the router ends."""

_NAMES = 1000  # of one path

_CODE = re.compile(r"[a-z0-9_]{1,64}")

logger = logging.getLogger(__name__)


class Ended(NamedTuple):
    """One choice of a request that has ended."""

    line: TraceRequest  # without session, key and blocks
    prompt: Sequence[int]
    num_held: int  # tokens of the prompt; 0: the choice before it holds them, too
    salt: str
    affinity: str  # names its conversation; empty: its blocks do
    tenant: str


class Recorder:
    """Writes one recording, on a thread of its own; a disk that is full or does not answer costs lines, no request."""

    def __init__(self, path: Path, max_bytes: int, model: str) -> None:
        """Begin the file `path` or, if there is one, `path`.1 and so on; only its owner may read it.

        Raises:
            ConfigError: no file can be created there.
        """
        self.began = MONOTONIC.now()
        self.counts = {"written": 0, "dropped": 0}
        self.is_on = True
        self.path, self._file = _create(path)
        self._size, self._max_bytes = 0, max_bytes
        self._waiting: deque[Ended] = deque()
        self._tokens_in = self._tokens_out = 0  # changed on the event loop alone, and on the thread alone
        self._secret = secrets.token_bytes(32)
        self._sessions: OrderedDict[bytes, tuple[int, TraceRequest]] = OrderedDict()  # their last turns
        self._num_sessions = 0
        self._keys: dict[str, int] = {}  # ordinals by tenant
        self._latest: tuple[Sequence[int], int, list[bytes]] = ((), 0, [])  # a prompt, its session and its blocks
        self._write(msgspec.json.encode(Head(pdkv_trace=VERSION, block_size=BLOCK_SIZE, model=model)) + b"\n", 0)
        self._has_news = threading.Event()
        self._thread = ServiceThread(self._run, self._has_news.set, "pdkv-recorder")
        self._thread.start_or(self.close)
        logger.info("recording requests to %s, %d bytes at most", self.path, max_bytes)

    def add(self, ended: Ended) -> None:
        """Record a choice. Never waits; it is dropped where too much waits for the disk."""
        if not self.is_on:
            return
        if len(self._waiting) >= MAX_WAITING or self._tokens_in - self._tokens_out > MAX_WAITING_TOKENS:
            self.counts["dropped"] += 1
            return
        self._tokens_in += ended.num_held
        self._waiting.append(ended)
        self._has_news.set()

    def metrics(self) -> Iterator[Metric]:
        """The metrics of the recording."""
        yield counters("pdkv_recorded_choices", "Ended choices by whether they are recorded.", "outcome", self.counts)
        yield gauge("pdkv_recording", "Whether requests are recorded: 0 after a full disk.", self.is_on)

    def close(self) -> None:
        """Write what waits, for CLOSE_S at most. Idempotent."""
        if self._thread.stop(CLOSE_S):
            self._end("")

    def _run(self, stopping: threading.Event) -> None:
        while not stopping.is_set():
            MONOTONIC.wait(self._has_news)
            MONOTONIC.wait(stopping, MONOTONIC.now() + SLICE_S)
            self._has_news.clear()
            self._flush()
        self._flush()

    def _flush(self) -> None:
        while self._waiting and self.is_on:
            ended = [self._waiting.popleft() for _ in range(min(len(self._waiting), SLICE_REQUESTS))]
            self._write(b"".join(map(self._line, ended)), len(ended))
            self._tokens_out += sum(choice.num_held for choice in ended)

    def _line(self, ended: Ended) -> bytes:
        prompt, session, blocks = self._latest
        if ended.prompt is not prompt or not prompt:
            blocks = self._blocks(ended)
            session = self._session(ended, blocks)
            self._latest = ended.prompt, session, blocks
        key = self._keys.setdefault(ended.tenant, len(self._keys))
        names = tuple(block.hex() for block in blocks)
        return msgspec.json.encode(msgspec.structs.replace(ended.line, session=session, key=key, blocks=names)) + b"\n"

    def _blocks(self, ended: Ended) -> list[bytes]:
        keys: list[bytes] = []
        root = root_key(model=ended.line.pool, layout="", cache_salt=ended.salt)
        extend_keys(keys, root, ended.prompt, hash_block_size=BLOCK_SIZE)
        return [self._hidden(key) for key in keys]

    def _hidden(self, data: bytes) -> bytes:
        return hmac.digest(self._secret, data, "sha256")[:8]

    def _session(self, ended: Ended, blocks: list[bytes]) -> int:
        """The session of its affinity, or the one that it goes on with: whose last turn has one of its blocks."""
        named = [self._hidden(f"{ended.tenant} {ended.affinity}".encode())] if ended.affinity else blocks
        for name in reversed(named):
            known = self._sessions.get(name)
            if known and (ended.affinity or ended.line.follows(known[1])):
                del self._sessions[name]
                number = known[0]
                break
        else:
            number, self._num_sessions = self._num_sessions, self._num_sessions + 1
        if named:
            self._sessions[named[-1]] = number, ended.line
        if len(self._sessions) > MAX_SESSIONS:
            self._sessions.popitem(last=False)
        return number

    def _write(self, data: bytes, num_choices: int) -> None:
        """Write whole lines, or end the recording before them."""
        if self._size + len(data) > self._max_bytes:
            self._end(f"it has reached its {self._max_bytes} bytes (--record-trace-bytes)", num_choices)
            return
        try:
            done = 0
            while done < len(data):
                done += os.write(self._file, data[done:])
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, self._size)
            self._end(str(error), num_choices)
            return
        self._size += len(data)
        self.counts["written"] += num_choices

    def _end(self, why: str, num_lost: int = 0) -> None:
        """End the recording; `why` is empty if it ends as it should."""
        if not self.is_on:
            return
        self.is_on = False
        os.close(self._file)
        self.counts["dropped"] += num_lost + len(self._waiting)
        for held in (self._waiting, self._sessions, self._keys):
            held.clear()
        text, level = "the recording %s ends after %d choices: %s", logging.ERROR if why else logging.INFO
        logger.log(level, text, self.path, self.counts["written"], why or f"{self.counts['dropped']} were dropped")


def begin_recording(options: ObservabilityConfig, model: str, *, is_restart: bool) -> Recorder | None:
    """The recorder, if one is asked for; a router that starts again serves without it where it cannot begin.

    Raises:
        ConfigError: it cannot begin.
    """
    try:
        path, size = options.record_trace, options.record_trace_bytes
        return None if path is None else Recorder(path, size, model)
    except ConfigError as error:
        if not is_restart:
            raise
        logger.error("requests are not recorded: %s", error)
        return None


def check_recording(options: ObservabilityConfig) -> None:
    """Begin a recording that is asked for, and remove it again. Raises ConfigError as `begin_recording`."""
    if options.record_trace is not None:
        name, file = _create(options.record_trace)
        os.close(file)
        name.unlink()


def shown_code(code: str) -> str:
    """An error's code as a recording may have it; engines of other versions may have sent anything."""
    return code if _CODE.fullmatch(code) else "other"


def _create(path: Path) -> tuple[Path, int]:
    for number in range(_NAMES):
        name = path if not number else path.with_name(f"{path.name}.{number}")
        try:
            return name, os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except FileExistsError:
            if not name.is_file():
                raise ConfigError(f"--record-trace: {name} is no file") from None
        except OSError as error:
            raise ConfigError(f"--record-trace: {name}: {error.strerror}") from error
    raise ConfigError(f"--record-trace: {path} and {path}.1 to .{_NAMES - 1} are there already")
