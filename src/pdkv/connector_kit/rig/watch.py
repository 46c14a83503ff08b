"""Watches connector calls on the step thread: how long each is blocked, and whether it enters a transport."""

import concurrent.futures
import logging
import queue
import resource
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, TypeVar

from pdkv.base.clock import MONOTONIC
from pdkv.connector_kit.rig.protocol import CallRecord

Result = TypeVar("Result")

STRICT = frozenset(
    {
        "get_num_new_matched_tokens", "update_state_after_alloc", "build_connector_meta", "request_finished",
        "resolve_results", "update_connector_output", "has_pending_work", "start_load_kv", "save_kv_layer",
        "wait_for_save", "get_finished", "cancel",
    }
)  # fmt: skip
"""Calls that may neither enter a transport nor wait. `wait_for_layer_load` waits; the others run between steps."""

_SOCKET_CALLS = frozenset(
    {"send", "sendall", "sendmsg", "sendto", "sendfile", "recv", "recv_into", "recvfrom", "recvmsg", "recvmsg_into",
     "connect", "connect_ex", "accept", "_accept"}
)  # fmt: skip
_FILE_CALLS = frozenset(
    {"open", "read", "write", "pread", "pwrite", "stat", "listdir", "scandir", "rename", "replace", "unlink", "remove",
     "fsync", "sendfile", "waitpid", "fork_exec"}
)  # fmt: skip
_FILE_MODULES = frozenset({"posix", "io", "_io", "_posixsubprocess"})
_TRANSPORT_TYPES = ("torch._C._distributed_c10d", "torch.distributed", "sqlite3", "nixl", "zmq")
_WAITS: dict[CodeType, str] = {
    threading.Condition.wait.__code__: "threading.Condition.wait",
    threading.Thread.join.__code__: "threading.Thread.join",
    concurrent.futures.Future.result.__code__: "concurrent.futures.Future.result",
    queue.Queue.join.__code__: "queue.Queue.join",
}
_INNOCENT_FILES = frozenset({logging.__file__})
_INNOCENT_CODES = frozenset({threading.Thread.start.__code__})  # returns when the new thread runs


class StepWatch:
    """Runs connector calls and keeps records. `innocent`: the kit's own functions that a connector may call."""

    def __init__(self, innocent: Callable[..., object]) -> None:
        self.records: list[CallRecord] = []
        # Whether `entered` is determined, and waits for a processor do not count as blocked: costs much CPU time.
        self.traced = True
        self._innocent = innocent.__code__
        self._entered: list[str] = []

    def call(self, name: str, function: Callable[..., Result], *arguments: Any) -> Result:
        """Call the function, and record the call."""
        self._entered = []
        queued = _run_delay_s() if self.traced else 0.0
        start, cpu = MONOTONIC.now(), time.thread_time()
        if self.traced and name in STRICT:
            sys.setprofile(self._profile)
        try:
            return function(*arguments)
        finally:
            sys.setprofile(None)
            cpu = time.thread_time() - cpu
            blocked = MONOTONIC.now() - start - cpu
            if self.traced:
                blocked -= _run_delay_s() - queued
            self.records.append(CallRecord(name, max(blocked, 0.0), cpu, self._entered))

    def take(self) -> list[CallRecord]:
        """Records since the last call."""
        records, self.records = self.records, []
        return records

    def _profile(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "c_call":
            what = _forbidden(argument)
        elif event == "call":
            what = _WAITS.get(frame.f_code, "")
        else:
            return
        if what and not self._is_innocent(frame) and what not in self._entered:
            self._entered.append(what)

    def _is_innocent(self, frame: FrameType | None) -> bool:
        """Whether the kit's notify or a logging handler is the caller."""
        while frame is not None:
            code = frame.f_code
            if code is self._innocent or code in _INNOCENT_CODES or code.co_filename in _INNOCENT_FILES:
                return True
            frame = frame.f_back
        return False


def _forbidden(function: Any) -> str:
    """The name of a built-in function that enters a transport or waits; else empty."""
    name = getattr(function, "__name__", "")
    owner = getattr(function, "__self__", None)
    module = getattr(owner, "__name__", "") if isinstance(owner, type(sys)) else type(owner).__module__
    if isinstance(owner, socket.socket | socket.SocketType):
        return f"socket.{name}" if name in _SOCKET_CALLS else ""
    if (module == "time" and name == "sleep") or module.startswith("select"):
        return f"{module}.{name}"
    if module in _FILE_MODULES and name in _FILE_CALLS:
        return f"{module}.{name}"
    return f"{module}.{name}" if module.startswith(_TRANSPORT_TYPES) else ""


def _run_delay_s() -> float:
    """Seconds that this thread has waited for a processor since it began; 0 if the kernel does not count them."""
    try:
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError):
        return 0.0


def resident_bytes() -> int:
    """Private resident memory of this process, in bytes."""
    fields = Path("/proc/self/statm").read_text().split()
    return (int(fields[1]) - int(fields[2])) * resource.getpagesize()
