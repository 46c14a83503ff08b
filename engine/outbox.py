"""Messages of an engine that its loop has yet to send."""

from pdkv.wire.messages import EngineToRouter


class Outbox:
    """Messages by router, in order."""

    def __init__(self) -> None:
        self._messages: dict[str, list[EngineToRouter]] = {}

    def __call__(self, router_id: str, message: EngineToRouter) -> None:
        self._messages.setdefault(router_id, []).append(message)

    def take(self) -> list[tuple[str, list[EngineToRouter]]]:
        """All messages since the last call."""
        messages, self._messages = self._messages, {}
        return list(messages.items())
