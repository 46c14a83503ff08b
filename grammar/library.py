"""The library that compiles and matches grammars, loaded where it is first needed."""

import contextlib
import ctypes
import importlib
import signal
import sys
import threading
import types
from collections.abc import Iterator
from typing import Any

from pdkv.errors import ConfigError

_owns_process = False
_loading = threading.Lock()
_SIGACTION_BYTES = 1024
"""More than any system's `struct sigaction`."""


def own_process() -> None:
    """Nobody else's code imports modules here while xgrammar is loaded: see `load_xgrammar`."""
    global _owns_process
    _owns_process = True


def load_xgrammar() -> Any:
    """The library. Importing it takes seconds, so that nobody does who sees no grammar.

    Most of them are for transformers, of which it wants to know whether tokenizers are of its classes. None is here, so
    in processes of pdkv's own something else stands for that package meanwhile.

    Raises:
        ConfigError: it is not installed.
    """
    with _loading:
        if "xgrammar" in sys.modules:
            return sys.modules["xgrammar"]
        try:
            with _without_transformers(), _same_segfault_handler():
                return importlib.import_module("xgrammar")
        except ImportError as error:
            raise ConfigError(f"structured outputs need xgrammar: pip install 'pdkv[grammar]' ({error})") from error


class _StandIn(types.ModuleType):
    """Has every class that is asked for."""

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


@contextlib.contextmanager
def _without_transformers() -> Iterator[None]:
    if not _owns_process or "transformers" in sys.modules:
        yield
        return
    sys.modules["transformers"] = _StandIn("transformers")
    try:
        yield
    finally:
        del sys.modules["transformers"]


@contextlib.contextmanager
def _same_segfault_handler() -> Iterator[None]:
    """tvm_ffi, which xgrammar stands on, sets a handler that allocates: a process that crashes in malloc would hang.

    The C library is asked, as `signal.signal` works in the main thread alone and knows of no handlers in C.
    """
    libc, before = ctypes.CDLL(None), ctypes.create_string_buffer(_SIGACTION_BYTES)
    libc.sigaction(signal.SIGSEGV, None, before)
    try:
        yield
    finally:
        libc.sigaction(signal.SIGSEGV, before, None)
