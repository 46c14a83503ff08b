"""A request that finds its prefix by content, computed by another engine or kept in a store."""

from pdkv.connector_kit.rig.content import Text
from pdkv.connector_kit.rig.engine import Engine
from pdkv.connector_kit.rig.handover import new_name
from pdkv.connector_kit.rig.rank import HostedRank
from pdkv.connector_kit.rig.request import Request
from pdkv.connector_kit.rig.world import World, require


class ContentRead:
    """Looks for the first `num_tokens` tokens (whole blocks) of a text on one engine, and loads those found."""

    def __init__(self, world: World, engine: Engine, text: Text, num_tokens: int) -> None:
        self._world = world
        self._engine = engine
        self._text = text
        self._num_tokens = num_tokens
        self._is_layerwise = False

    def num_found(self) -> int:
        """Tokens that can be loaded now; 0 while the connector is still looking."""
        return self._ask(self._new_request())

    def appears_within(self, seconds: float) -> bool:
        """Whether anything is found within that time, during which the engines run."""
        request = self._new_request()
        return self._world.runs_until(lambda: self._ask(request) > 0, seconds)

    def load(self) -> str:
        """Load the tokens found now. Returns what is wrong with them; empty if nothing is, or nothing was found."""
        request = self._new_request()
        num_tokens = self._ask(request)
        if not num_tokens:
            return ""
        engine = self._engine
        engine.allocate(request, num_tokens + self._is_layerwise, resume_at=num_tokens)
        engine.start_load(request, num_tokens)
        engine.step_with_load(request, num_tokens, is_layerwise=self._is_layerwise)
        self._world.until(lambda: request.transfer_key in engine.received, f"the load of {num_tokens} tokens ends")
        engine.free(request)
        return engine.wrong.get(request.transfer_key, "")

    def require_nothing(self, when: str, seconds: float) -> None:
        """Raise Violation if anything is found in that time."""
        require(not self.appears_within(seconds), f"{when}: the KV can be found")

    def _new_request(self) -> Request:
        return Request(
            self._text, self._num_tokens + 1, kv="local", transfer_id=new_name(), attempt=0, layout=self._engine.layout
        )

    def _ask(self, request: Request) -> int:
        matched = self._engine.ask(HostedRank.match, request.view(), 0)
        self._is_layerwise = matched.mode == "layerwise"
        return 0 if matched.ask_again else matched.num_tokens
