"""Which suspected request each engine has, and which of them currently runs alone (docs/failures.md)."""

from pdkv.router.generations.generation import Generation
from pdkv.wire.messages import Trial
from pdkv.wire.types import RequestKey


class Trials:
    """Suspects of one dispatcher, one per engine at a time. An engine says when it runs its suspect alone."""

    def __init__(self) -> None:
        self.suspects: dict[str, Generation] = {}  # by engine
        self._alone: dict[str, RequestKey] = {}  # by engine: runs there alone

    def hear(self, engine: str, message: Trial) -> None:
        """Note that an engine begins or ends running a suspect alone, and answer it."""
        if message.begins:
            self._alone[engine] = (message.request_id, message.attempt)
        else:
            self._alone.pop(engine, None)

    def engine_died(self, engine: str) -> RequestKey | None:
        """Forget the engine. Returns the request that ran there alone."""
        self.suspects.pop(engine, None)
        return self._alone.pop(engine, None)

    def track(self, generation: Generation) -> bool:
        """Note where a suspect runs, or that the generation no longer is one. True: an engine has become free for
        another suspect.
        """
        failures, flow = generation.failures, generation.flow
        had = {name for name, other in self.suspects.items() if other is generation}
        on_trial = failures is not None and failures.is_suspect and not flow.ended
        has = {name for name in set(flow.route[:2]) if on_trial and flow.runs_on(name)}
        for name in had - has:
            del self.suspects[name]
        for name in has:
            self.suspects[name] = generation
        return not had <= has
