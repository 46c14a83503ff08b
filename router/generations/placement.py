"""Gives engines to generations that wait for them, or lets them wait longer."""

from collections.abc import Callable

from pdkv.errors import EngineUnavailable, NoEngine
from pdkv.router.generations.flow import Sends
from pdkv.router.generations.generation import Generation
from pdkv.router.generations.recovery import Recovery
from pdkv.router.routing.holdings import Holdings
from pdkv.router.routing.route_chooser import RouteChooser


class Placement:
    """Chooses routes for generations without one, and decode engines for prompts that are handed off."""

    def __init__(
        self, routes: RouteChooser, holdings: Holdings, recovery: Recovery, clock: Callable[[], float]
    ) -> None:
        self._routes = routes
        self._holdings = holdings
        self._recovery = recovery
        self._clock = clock

    def place(self, generation: Generation) -> Sends:
        """Choose the generation's engines. If none can be used, it is parked if one may yet come, and otherwise fails
        with its last error.
        """
        try:
            sends = self._try(generation)
        except EngineUnavailable as error:
            if isinstance(error, NoEngine) and self._recovery.may_wait(generation):
                self._recovery.park(generation)
                return ()
            failures = generation.failures
            sends = generation.flow.fail(error if failures is None or failures.error is None else failures.error)
        self._recovery.unpark(generation)
        return sends

    def _try(self, generation: Generation) -> Sends:
        """Choose its engines. Raises EngineUnavailable."""
        flow, now = generation.flow, self._clock()
        without = self._recovery.excluded(generation)
        flow.trial_tokens = self._recovery.trial_tokens(generation)
        prompt = self._holdings.of(flow.request, now)
        if flow.awaits_decode:
            prefill = flow.route.prefill
            if self._routes.has_engine("decode", now, {*without, prefill}):
                engine = self._routes.choose_decode(prompt, prefill, now, without=without)
                return flow.bind_decode(engine, now)
        route = self._routes.choose(prompt, now, without=without, num_output=len(flow.output_token_ids))
        generation.num_uncached = self._holdings.given(prompt, route.prefill, route.offer, now)
        if flow.awaits_decode:  # only the engine that ran it could decode it
            return [*flow.reset(), *flow.begin(route, now)]
        return flow.begin(route, now)
