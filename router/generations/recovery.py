"""Decides what happens to generations after an engine fails them: whether they continue, which engines they avoid, and
what they wait for.

docs/failures.md is the table behind it.
"""

import logging
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

from pdkv.config import RecoveryConfig
from pdkv.errors import EngineDied, EngineGivenUp, KillsEngines, PdkvError
from pdkv.router.engines.candidate import Side
from pdkv.router.engines.faults import Fault
from pdkv.router.engines.fleet import FALLBACK, Counters, Fleet
from pdkv.router.generations.failure_record import FailureRecord, is_final
from pdkv.router.generations.flow import Sends
from pdkv.router.generations.generation import Generation
from pdkv.router.generations.trials import Trials
from pdkv.wire.types import RequestKey

logger = logging.getLogger(__name__)

MAX_DEATHS_ALONE = 2
"""Engines that may die while they run only this request before it is refused."""

MAX_DEATHS = 6
"""Engines that may die in turn while they have a request that makes no progress: an engine can also be killed before it
runs the request alone, by its message or its KV.
"""


class Recovery:
    """The limits, suspects and waiting generations of one dispatcher."""

    def __init__(self, config: RecoveryConfig, fleet: Fleet, counters: Counters) -> None:
        self.config = config
        self._fleet = fleet
        self._counters = counters
        self.parked: dict[str, Generation] = {}  # wait for an engine: by request_id, in order
        self.trials = Trials()

    # --- may it continue ------------------------------------------------------------------------------------------

    def may_go_on(self, generation: Generation) -> bool:
        """Whether the generation's limits allow it to lose another engine."""
        failures = generation.failures or FailureRecord()
        num_lost = failures.num_migrations if generation.flow.output_token_ids else failures.num_retries
        return failures.spared or num_lost < self._limit(generation)

    def _limit(self, generation: Generation) -> int:
        """How many losses a request at this stage may have."""
        return self.config.migration_limit if generation.flow.output_token_ids else self.config.retry_limit

    def spare(self, generation: Generation) -> None:
        """Exempt its next loss from the limits."""
        self._failures_of(generation).spared = True

    @contextmanager
    def leaving(self, generation: Generation, engine: str, *, alone: bool) -> Iterator[None]:
        """Note that the generation is being moved off an engine. It does not return there now, nor while that engine is
        a suspect or draining.

        `alone`: the generation may be why the engine is late, which counts like a death: it runs alone next.
        """
        failures = self._failures_of(generation)
        if alone:
            failures.suspect(len(generation.flow.output_token_ids))
        failures.leaving, failures.left[engine] = engine, self._epoch(engine)
        try:
            yield
        finally:
            failures.leaving = ""

    def after_failure(self, generation: Generation, fault: Fault) -> Sends:
        """Keep what can be kept and let the flow await other engines, or end it; count whose fault it was."""
        flow = generation.flow
        error = self._refuse(generation)
        if not flow.request.probe:
            self._counters.faults["poison" if isinstance(error, KillsEngines) else fault] += 1
        if error is not None:
            flow.failure = error
            return flow.give_up()
        if not (flow.can_resume and self._fleet.is_ready(flow.route.prefill)):
            return flow.reset()
        sends = flow.resume()
        if flow.prefill == "done":
            generation.prompt_run_in = flow.attempt
        return sends

    def _refuse(self, generation: Generation) -> PdkvError | None:
        """The error that it ends with; None: it continues, which is counted."""
        flow = generation.flow
        assert flow.failure is not None
        if not flow.retryable or flow.request.probe:
            return flow.failure
        failures = self._failures_of(generation)
        for number, most, how in (
            (failures.num_deaths_alone, MAX_DEATHS_ALONE, "alone"),
            (failures.num_deaths, MAX_DEATHS, "before it made progress"),
        ):
            if number >= most:
                text = f"{number} engines died while they ran this request {how}; it is given up"
                return KillsEngines(text, request_id=flow.request_id)
        num_tokens = len(flow.output_token_ids)
        if is_final(flow.failure) and failures.doubted:
            text = f"{flow.failure} (tried twice: on {failures.doubted} and on {flow.failed_engine})"
            twice = type(flow.failure)(text, request_id=flow.request_id)
            twice.code = flow.failure.code
            return twice
        if not self.may_go_on(generation):
            return flow.failure
        if is_final(flow.failure):
            failures.doubted, failures.doubted_at = flow.failed_engine or "", num_tokens
        migrates, spared = num_tokens > 0, failures.spared
        failures.num_migrations += migrates and not spared
        failures.num_retries += not (migrates or spared)
        failures.spared = False
        failures.error = flow.failure
        self.note_draws(generation)
        epoch = self._epoch(flow.failed_engine or "")
        # An engine that died may be back unharmed; one that it left may have recovered.
        if flow.failed_engine and epoch and not isinstance(flow.failure, EngineDied | EngineGivenUp):
            failures.failed[flow.failed_engine] = epoch
        self._counters.migrated += migrates
        self._counters.retried += not migrates
        logger.info("request %s continues elsewhere after %d tokens: %s", flow.name, num_tokens, flow.failure)
        return None

    def excluded(self, generation: Generation) -> Collection[str]:
        """Engines to which the generation must not be sent: those with too small a max_model_len, those that failed it,
        those that it left and that have not recovered, and, for a suspect, those that run another suspect.
        """
        failures, names = generation.failures, self._too_short(generation)
        if failures is None:
            return names
        names |= {name for name, epoch in failures.failed.items() if self._epoch(name) == epoch}
        names |= {name for name, epoch in failures.left.items() if self._epoch(name) == epoch and self._is_left(name)}
        if failures.leaving:
            names.add(failures.leaving)
        cards = self._fleet.cards() if failures.draws else ()
        names.update(card.engine for card in cards if card.draws != failures.draws)
        if failures.is_suspect:
            names.update(name for name, other in self.trials.suspects.items() if other is not generation)
        return names

    def note_draws(self, generation: Generation) -> None:
        """Note the version of the engine's draws: a generation that samples migrates only to engines with the same
        version.
        """
        flow = generation.flow
        engine = self._fleet.engines.get(flow.route.decode or flow.route.prefill)
        if engine is None or engine.card is None or engine.role == FALLBACK:
            return
        if flow.output_token_ids and not flow.request.params.greedy:
            failures = self._failures_of(generation)
            failures.draws = failures.draws or engine.card.draws

    # --- requests that kill engines -----------------------------------------------------------------------------------

    def engine_died(self, engine: str, victims: Sequence[Generation], handling: Collection[RequestKey]) -> None:
        """Find the requests that may have killed an engine. `handling`: requests with messages that the engine was just
        taking in.

        If there is one, or a single request ran there alone, that request is to blame. Otherwise each request may be to
        blame for which the engine had yet to compute a token, or that was on a dying engine before: these are run
        alone. If there are several, the loss counts towards no request's limits, since another one may be to blame.
        """
        alone = self.trials.engine_died(engine)
        victims = [g for g in victims if g.flow.depends_on(engine)]  # a transfer from there is its work, too
        keys = {g.request_id: (g.request_id, g.flow.attempt_on(engine)) for g in victims if g.flow.runs_on(engine)}
        accused = [key for key in keys.values() if key in handling]
        culprit = accused[0] if len(accused) == 1 else None if accused else alone
        for generation in victims:
            failures, flow = self._failures_of(generation), generation.flow
            key = keys.get(flow.request_id)
            if key is not None and key == culprit:
                failures.num_deaths_alone += 1
                failures.suspect(len(flow.output_token_ids))
                continue
            failures.spared = (alone is not None or len(victims) > 1) and self._limit(generation) > 0
            if key is not None and alone is None:
                failures.num_deaths += 1
                if key in accused or flow.is_new_on(engine) or failures.num_deaths > 1:
                    failures.suspect(len(flow.output_token_ids))

    def track(self, generation: Generation) -> bool:
        """Note where a suspect runs, or that the generation no longer is a suspect. True: an engine has become free for
        another suspect.
        """
        failures = generation.failures
        if failures is None:
            return False
        if failures.is_suspect and len(generation.flow.output_token_ids) >= failures.clear_at:
            failures.clear()
        return self.trials.track(generation)

    def trial_tokens(self, generation: Generation) -> int:
        """New tokens that the generation must produce while it runs alone; 0: it is not a suspect."""
        failures = generation.failures
        return 0 if failures is None else max(failures.clear_at - len(generation.flow.output_token_ids), 0)

    # --- waiting --------------------------------------------------------------------------------------------------

    def may_wait(self, generation: Generation) -> bool:
        """Whether an engine that the generation needs may come back, or become free of another suspect."""
        failures = generation.failures or FailureRecord()
        if is_final(failures.error):
            return False  # what may be its own fault waits for no second engine
        short = self._too_short(generation)
        found = [any(self._may_come(side, failures, short)) for side in self.sides_needed(generation)]
        return any(found) if self.config.take_over else all(found)

    def sides_needed(self, generation: Generation) -> tuple[Side, ...]:
        """The sides of which the generation needs engines to go on from the beginning, or from its hand-off."""
        alone = generation.flow.awaits_decode or self._fleet.decode_suffices(self._too_short(generation))
        return ("decode",) if alone else ("prefill", "decode")

    def _too_short(self, generation: Generation) -> set[str]:
        return self._fleet.too_short(generation.flow.request, len(generation.flow.output_token_ids))

    def _may_come(self, side: Side, failures: FailureRecord, short: Collection[str]) -> Iterator[bool]:
        if self._fleet.awaits_others and not self._fleet.sides[side].engines:
            yield True
        for engine in self._fleet.engines.values():
            if engine.role not in (side, "any"):
                continue
            if engine.life != "ready":
                yield engine.reason is None
            elif engine.card is not None:
                is_equal = failures.draws in (0, engine.card.draws)
                has_room = engine.name not in short
                yield is_equal and has_room and failures.failed.get(engine.name) != engine.card.epoch

    def park(self, generation: Generation) -> None:
        """Let the generation wait for an engine, at most until its deadline."""
        if generation.request_id not in self.parked:
            logger.info("request %s waits for an engine", generation.flow.name)
            self.parked[generation.request_id] = generation

    def unpark(self, generation: Generation) -> None:
        """Remove a generation from those waiting, once it has its engines or has ended. Idempotent."""
        self.parked.pop(generation.request_id, None)

    def kind_of(self, generation: Generation) -> object:
        """A key that is the same for generations excluded from the same engines."""
        failures, flow = generation.failures, generation.flow
        short = frozenset(self._too_short(generation))
        if failures is None:
            return flow.awaits_decode, flow.route.prefill, short
        failed, left = (tuple(sorted(names.items())) for names in (failures.failed, failures.left))
        return flow.awaits_decode, flow.route.prefill, short, failures.is_suspect, failed, left, failures.draws

    def _is_left(self, engine: str) -> bool:
        """Whether requests that were moved off this engine should stay away."""
        state = self._fleet.engines.get(engine)
        return state is not None and (state.draining or bool(state.suspicion))

    def _epoch(self, engine: str) -> str:
        """The epoch of the engine's latest incarnation; empty if it has none, or was removed."""
        state = self._fleet.engines.get(engine)
        return state.card.epoch if state is not None and state.card is not None else ""

    def _failures_of(self, generation: Generation) -> FailureRecord:
        if generation.failures is None:
            generation.failures = FailureRecord()
        return generation.failures
