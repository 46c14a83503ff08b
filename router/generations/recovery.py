"""What becomes of generations that their engines failed: whether they go on, where not, and who waits for what.

docs/failures.md is the table behind it.
"""

import logging
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

from pdkv.config import RecoveryConfig
from pdkv.errors import EngineDied, EngineGivenUp, KillsEngines, PdkvError
from pdkv.router.engines.fleet import Counters, Fleet
from pdkv.router.generations.failure_record import FailureRecord
from pdkv.router.generations.flow import Sends
from pdkv.router.generations.generation import Generation
from pdkv.router.routing.policies import Side
from pdkv.wire.messages import RequestKey

logger = logging.getLogger(__name__)

MAX_DEATHS_ALONE = 2
"""Engines that a request may kill as the only suspect there before it is given up."""


class Recovery:
    """Limits, suspects and waiting generations of one dispatcher."""

    def __init__(self, config: RecoveryConfig, fleet: Fleet, counters: Counters) -> None:
        self.config = config
        self._fleet = fleet
        self._counters = counters
        self._parked: dict[str, Generation] = {}  # by request_id, in the order in which they came
        self._trials: dict[str, Generation] = {}  # engine -> the suspect that it runs

    # --- may it go on -------------------------------------------------------------------------------------------------

    def may_go_on(self, generation: Generation) -> bool:
        """Whether its limits allow one more loss."""
        trouble, config = generation.trouble or FailureRecord(), self.config
        if trouble.spared:
            return True
        if generation.flow.output_token_ids:
            return trouble.num_migrations < config.migration_limit
        return trouble.num_retries < config.retry_limit

    def spare(self, generation: Generation) -> None:
        """Its next loss counts for no limit."""
        self._trouble_of(generation).spared = True

    @contextmanager
    def leaving(self, generation: Generation, engine: str) -> Iterator[None]:
        """It is moved off an engine: it does not go back there now, nor while that is a suspect or draining."""
        trouble = self._trouble_of(generation)
        trouble.leaving, trouble.left[engine] = engine, self._epoch(engine)
        try:
            yield
        finally:
            trouble.leaving = ""

    def after_failure(self, generation: Generation) -> Sends:
        """Keep what can be kept and let the flow await other engines, or give it up."""
        flow = generation.flow
        error = self._refuse(generation)
        if error is not None:
            flow.failure = error
            return flow.give_up()
        if not flow.can_resume:
            return flow.reset()
        sends = flow.resume()
        if flow.prefill == "done":
            generation.prompt_run_in = flow.attempt
        return sends

    def _refuse(self, generation: Generation) -> PdkvError | None:
        """The error that it ends with; None: it goes on, which is counted."""
        flow = generation.flow
        assert flow.failure is not None
        if not flow.retryable or flow.request.probe:
            return flow.failure
        trouble = self._trouble_of(generation)
        if trouble.num_deaths_alone >= MAX_DEATHS_ALONE:
            text = f"{trouble.num_deaths_alone} engines died while they ran this request alone; it is given up"
            return KillsEngines(text, request_id=flow.request_id)
        if not self.may_go_on(generation):
            return flow.failure
        migrates, spared = bool(flow.output_token_ids), trouble.spared
        trouble.num_migrations += migrates and not spared
        trouble.num_retries += not (migrates or spared)
        trouble.spared = False
        trouble.error = flow.failure
        epoch = self._epoch(flow.failed_engine or "")
        # An engine that died may be back unharmed; one that was left may get well.
        if flow.failed_engine and epoch and not isinstance(flow.failure, EngineDied | EngineGivenUp):
            trouble.failed[flow.failed_engine] = epoch
        self._counters.migrated += migrates
        self._counters.retried += not migrates
        logger.info(
            "request %s goes on elsewhere behind %d tokens: %s", flow.name, len(flow.output_token_ids), flow.failure
        )
        return None

    def excluded(self, generation: Generation) -> Collection[str]:
        """Engines that it must not be sent to: those that failed it, those that it left and that are not well yet, and
        for a suspect those that run another one.
        """
        trouble = generation.trouble
        if trouble is None:
            return ()
        names = {name for name, epoch in trouble.failed.items() if self._epoch(name) == epoch}
        names |= {name for name, epoch in trouble.left.items() if self._epoch(name) == epoch and self._is_left(name)}
        if trouble.leaving:
            names.add(trouble.leaving)
        if trouble.clear_at:
            names |= {name for name, other in self._trials.items() if other is not generation}
        return names

    # --- requests that kill engines -----------------------------------------------------------------------------------

    def engine_died(self, engine: str, victims: Sequence[Generation], handling: Collection[RequestKey]) -> None:
        """Find out who may have ended an engine. `handling`: whose messages it was taking in.

        If one suspect was on trial there, it is taken to be the one; others that were new there become suspects, too,
        for an engine may have run two such requests. Else it may have been any request of which the engine had yet to
        compute a token, or one that has been in a dying engine before: each of them is tried alone.
        """
        running = [g for g in victims if g.flow.runs_on(engine)]
        accused = [g for g in running if (g.request_id, g.flow.attempt_on(engine)) in handling]
        culprit = self._trials.pop(engine, None)
        on_trial = [g for g in running if g is culprit or (g.trouble is not None and g.trouble.clear_at)]
        if on_trial == [culprit]:
            for generation in running:
                trouble = self._trouble_of(generation)
                if generation is culprit:
                    trouble.num_deaths_alone += 1
                else:
                    trouble.spared = True
                if generation is culprit or generation in accused or generation.flow.is_new_on(engine):
                    trouble.suspect(len(generation.flow.output_token_ids))
            return
        for generation in running:
            trouble = self._trouble_of(generation)
            trouble.num_deaths += 1
            trouble.num_deaths_alone += accused == [generation]
            if generation in accused or generation.flow.is_new_on(engine) or trouble.num_deaths > 1:
                trouble.suspect(len(generation.flow.output_token_ids))

    def track(self, generation: Generation) -> bool:
        """Note where a suspect runs, or that it is none any more. True: an engine came free for another suspect."""
        trouble, flow = generation.trouble, generation.flow
        if trouble is None:
            return False
        if trouble.clear_at and len(flow.output_token_ids) >= trouble.clear_at:
            trouble.clear()
        had = [name for name, other in self._trials.items() if other is generation]
        if not (had or trouble.clear_at):
            return False
        on_trial = bool(trouble.clear_at) and not flow.ended
        has = [name for name in set(flow.route[:2]) if on_trial and flow.runs_on(name)]
        for name in had:
            if name not in has:
                del self._trials[name]
        for name in has:
            self._trials[name] = generation
        return not set(had) <= set(has)

    # --- who waits ----------------------------------------------------------------------------------------------------

    @property
    def num_parked(self) -> int:
        """Generations that wait for an engine."""
        return len(self._parked)

    def may_wait(self, generation: Generation) -> bool:
        """Whether an engine that it needs may come: back, or free of another suspect."""
        trouble = generation.trouble or FailureRecord()
        sides: tuple[Side, ...] = ("decode",) if generation.flow.awaits_decode else ("prefill", "decode")
        found = [any(self._may_come(side, trouble)) for side in sides]
        return any(found) if self.config.take_over else all(found)

    def _may_come(self, side: Side, trouble: FailureRecord) -> Iterator[bool]:
        for engine in self._fleet.engines.values():
            if engine.role not in (side, "any"):
                continue
            if engine.life != "ready":
                yield not engine.refused
            elif engine.card is not None:
                yield trouble.failed.get(engine.name) != engine.card.epoch

    def park(self, generation: Generation) -> None:
        """It waits until an engine comes, or for its deadline."""
        if generation.request_id not in self._parked:
            logger.info("request %s waits for an engine", generation.flow.name)
            self._parked[generation.request_id] = generation

    def unpark(self, generation: Generation) -> None:
        """It has its engines, or has ended. Idempotent."""
        self._parked.pop(generation.request_id, None)

    def is_parked(self, generation: Generation) -> bool:
        """Whether it waits."""
        return generation.request_id in self._parked

    def kind_of(self, generation: Generation) -> object:
        """Equal for generations for which the same engines are out of the question."""
        trouble, flow = generation.trouble, generation.flow
        if trouble is None:
            return flow.awaits_decode, flow.route.prefill
        failed, left = (tuple(sorted(names.items())) for names in (trouble.failed, trouble.left))
        return flow.awaits_decode, flow.route.prefill, bool(trouble.clear_at), failed, left

    def parked(self) -> list[Generation]:
        """Those that wait, in order."""
        return list(self._parked.values())

    def _is_left(self, engine: str) -> bool:
        """Whether requests that were moved off this engine had better stay away."""
        state = self._fleet.engines.get(engine)
        return state is not None and (state.draining or bool(state.suspicion))

    def _epoch(self, engine: str) -> str:
        """Of the engine's last incarnation; empty: it has none, or was removed."""
        state = self._fleet.engines.get(engine)
        return state.card.epoch if state is not None and state.card is not None else ""

    def _trouble_of(self, generation: Generation) -> FailureRecord:
        if generation.trouble is None:
            generation.trouble = FailureRecord()
        return generation.trouble
