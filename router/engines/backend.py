"""The interface of an engine to the router: it takes messages and answers with messages.

pdkv's engines are one kind (`engine_client.py`). Servers of other engines are another (`foreign.py`): a Submit becomes
an HTTP request, and its stream becomes Tokens and Finished. An engine's card says what it can do.
"""

from typing import Protocol

from pdkv.router.engines.engine_client import EngineListener
from pdkv.wire.messages import RouterToEngine


class Backend(Protocol):
    """One engine, as dispatch sees it. Every call is made on the event loop's thread and returns at once."""

    name: str
    num_dropped: int  # unreadable messages or frames from the engine

    def connect(self, listener: EngineListener) -> None:
        """Begin to connect. The listener is told each time the engine comes up, sends messages or goes away."""

    def send(self, message: RouterToEngine) -> None:
        """Pass a message on. Only called between engine_up and engine_down."""

    def close(self) -> None:
        """Disconnect for good, without telling the listener. Idempotent."""
