"""What the router knows of an engine's kind: something that takes messages and answers with messages.

pdkv's engines are one kind (`engine_client.py`). Another translates: it answers a Submit by asking an HTTP
server, and what streams from there becomes Tokens and Finished. What an engine can do is said by its card.
"""

from typing import Protocol

from pdkv.router.engines.engine_client import EngineListener
from pdkv.wire.messages import RouterToEngine


class Backend(Protocol):
    """One engine, as dispatch sees it. All calls come from the event loop's thread and return at once."""

    name: str
    num_dropped: int  # messages of the engine, or frames of them, that could not be read

    def connect(self, listener: EngineListener) -> None:
        """Begin. The listener hears when the engine is up, what it says, and when it is gone, over and over."""

    def send(self, message: RouterToEngine) -> None:
        """Pass a message on. Only called between engine_up and engine_down."""

    def close(self) -> None:
        """End for good; the listener hears nothing more. Idempotent."""
