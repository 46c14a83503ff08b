"""Prompts that are handed over together: each step is taken by all of them before the next one is."""

from collections.abc import Callable, Sequence

from pdkv.connector_kit.rig.handover import Handover, in_order


class Batch:
    """Of one world, in one order. What must happen on the way is hung behind a step.

    Args:
        chunk: tokens per step of each prompt.
        is_told: whether the producer's workers hear of the hand-offs before anybody else does.
    """

    def __init__(self, trials: Sequence[Handover], *, chunk: int, is_told: bool) -> None:
        self.trials = trials
        self.order = trials[0].order
        self._chunk = chunk
        self._is_told = is_told
        self._producer, self._consumer = trials[0].producer, trials[0].consumer
        self._after: dict[str, Callable[[], None]] = {}

    def after(self, step: str, action: Callable[[], None]) -> None:
        """Have something done when a step has been taken."""
        self._after[step] = action

    def take(self) -> None:
        """All steps; the loads are under way behind them."""
        for step in in_order(self, self.order, range(0, max(trial.num_tokens for trial in self.trials), self._chunk)):
            step()

    def begin_prefill(self) -> None:
        self._each(Handover.begin_prefill, "begin_prefill")

    def compute(self, start: int) -> None:
        """The chunk from there of each prompt that is so long, in one step of the engine."""
        trials = [trial for trial in self.trials if start < trial.num_tokens]
        stops = [min(start + self._chunk, trial.num_tokens) for trial in trials]
        self._producer.step(*((trial.sender, start, stop) for trial, stop in zip(trials, stops, strict=True)))
        for trial, stop in zip(trials, stops, strict=True):
            trial.computed(stop)

    def hand_off(self) -> None:
        self._each(Handover.hand_off)
        if self._is_told:
            self._producer.step()
        self._done("hand_off")

    def find(self) -> None:
        self._each(lambda trial: trial.find(at_once=True), "find")

    def reserve(self) -> None:
        self._each(Handover.reserve, "reserve")

    def allocate(self) -> None:
        self._each(Handover.allocate, "allocate")

    def start(self) -> None:
        """All loads begin with one step."""
        self._each(Handover.post)
        self._consumer.step()
        self._done("start")

    def bring_ticket(self) -> None:
        self._each(Handover.bring_ticket, "bring_ticket")

    def _each(self, step: Callable[[Handover], None], name: str = "") -> None:
        for trial in self.trials:
            step(trial)
        self._done(name)

    def _done(self, name: str) -> None:
        if name in self._after:
            self._after[name]()
