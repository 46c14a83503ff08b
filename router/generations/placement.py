"""Gives engines to generations that wait for them, or lets them wait longer."""

from collections.abc import Callable
from typing import Any

from pdkv.errors import EngineUnavailable, NoEngine
from pdkv.router.engines.candidate import Side
from pdkv.router.engines.fleet import FALLBACK
from pdkv.router.generations.fallback import ELSEWHERE, Fallback
from pdkv.router.generations.flow import RequestFlow, Sends
from pdkv.router.generations.generation import Generation
from pdkv.router.generations.recovery import Recovery
from pdkv.router.request import Route
from pdkv.router.routing.decision import hindsight
from pdkv.router.routing.holdings import Holdings, PromptKV
from pdkv.router.routing.route_chooser import RouteChooser


class Placement:
    """Chooses routes for generations without one, and decode engines for prompts that are handed off."""

    def __init__(
        self,
        routes: RouteChooser,
        holdings: Holdings,
        recovery: Recovery,
        fallback: Fallback,
        clock: Callable[[], float],
    ) -> None:
        self._routes = routes
        self._holdings = holdings
        self._recovery = recovery
        self._fallback = fallback
        self._clock = clock

    def place(self, generation: Generation) -> Sends:
        """Choose the generation's engines. If none can be used, it is parked if one may yet come, and otherwise fails
        with its last error.
        """
        try:
            sends = self._try(generation)
        except EngineUnavailable as error:
            if self._fallback.is_down() and (reason := self._leaves(generation)):
                return self._send_away(generation, reason)
            if isinstance(error, NoEngine) and self._recovery.may_wait(generation):
                self._recovery.park(generation)
                return ()
            failures = generation.failures
            sends = generation.flow.fail(error if failures is None or failures.error is None else failures.error)
        self._recovery.unpark(generation)
        return sends

    def give(self, generation: Generation, prompt: PromptKV, route: Route, now: float) -> None:
        """Note that its prompt is given to the first engine of a route."""
        generation.chose(prompt, self._holdings.given(prompt, route.prefill, route.offer, now))

    def can_leave(self, generation: Generation, engine: str) -> bool:
        """Whether other engines can take over the engine's part of it; if it does all of it, both sides' parts."""
        route = generation.flow.route
        one: tuple[Side, ...] = ("decode",) if engine == route.decode else ("prefill",)
        sides = self._recovery.sides_needed(generation) if route.aggregated else one
        self._recovery.note_draws(generation)
        without = {*self._recovery.excluded(generation), engine}
        if all(self._routes.can_go_on(side, self._clock(), without) for side in sides):
            return True
        return self.goes_elsewhere and self.may_leave(generation) and FALLBACK not in without

    @property
    def goes_elsewhere(self) -> bool:
        """Whether no engine here can serve, and another deployment takes requests."""
        return self._fallback.takes_over(self._clock())

    def takes_part(self, flow: RequestFlow) -> bool:
        """Whether its decode engine, if it has one, may hear of a part of the prompt."""
        return not flow.route.decode or self._routes.reads_parts(flow.route.decode)

    def may_leave(self, generation: Generation) -> bool:
        """Whether another deployment could go on with it."""
        return self._fallback.fits(generation.flow.request, len(generation.flow.output_token_ids))

    def _leaves(self, generation: Generation) -> str:
        """Why another deployment goes on with it; "": it stays. What killed an engine alone is passed on to none."""
        failures, flow = generation.failures, generation.flow
        if (failures is not None and failures.num_deaths_alone) or FALLBACK in self._recovery.excluded(generation):
            return ""
        self._fallback.look(now := self._clock())
        return self._fallback.reason(flow.request, now, len(flow.output_token_ids))

    def _send_away(self, generation: Generation, reason: str) -> Sends:
        flow, now = generation.flow, self._clock()
        self._fallback.began(reason)
        prompt = self._holdings.of(flow.request, now)
        prompt.stays = reason
        generation.chose(prompt, len(flow.request.prompt_token_ids))
        sends = [*(flow.reset() if flow.awaits_decode else ()), *flow.begin(ELSEWHERE, now)]
        self._recovery.unpark(generation)
        return sends

    def look_back(self, generation: Generation) -> dict[str, Any] | None:
        """What the best engine for its prompt would have been, by what caches have now; None: nothing is recorded."""
        sources, prompt = generation.sources, self._holdings.of(generation.flow.request, self._clock())
        choices, size = generation.choices or (), len(prompt.request.prompt_token_ids)
        shown = {c.engine for choice in choices for c in choice.candidates} - {generation.prefill_engine}
        lacking = {engine: max(size - prompt.cached.get(engine, 0), 1) for engine in shown}
        return hindsight(choices, generation.prefill_engine, sources.computed + sources.recomputed, lacking)

    def _try(self, generation: Generation) -> Sends:
        """Choose its engines. Raises EngineUnavailable."""
        flow, now = generation.flow, self._clock()
        without = self._recovery.excluded(generation)
        flow.trial_tokens = self._recovery.trial_tokens(generation)
        prompt = self._holdings.of(flow.request, now)
        prompt.choices = None if generation.choices is None else []
        if flow.awaits_decode or flow.may_bind_decode:
            prefill = flow.route.prefill
            if self._routes.has_engine("decode", now, {*without, prefill}):
                engine = self._routes.choose_decode(prompt, prefill, now, without=without)
                if not (flow.awaits_decode or self._routes.reads_parts(engine)):
                    return ()
                generation.chose(prompt)
                return flow.bind_decode(engine, now)
        if not (flow.awaits_decode or flow.awaits_route):
            return ()  # it is soon enough once the prompt is done
        route = self._routes.choose(prompt, now, without=without, num_output=len(flow.output_token_ids))
        self.give(generation, prompt, route, now)
        if flow.awaits_decode:  # only the engine that ran it could decode it
            return [*flow.reset(), *flow.begin(route, now)]
        return flow.begin(route, now)
