"""The failures of one generation so far."""

from dataclasses import dataclass, field
from typing import TypeGuard

from pdkv.errors import PdkvError, RequestFailed

TOKENS_TO_CLEAR = 2
"""New tokens after which a request is no longer suspect: one may be prefill's, the other is decode's."""


def is_final(error: PdkvError | None) -> TypeGuard[RequestFailed]:
    """Whether the error claims that any engine would fail the request. One engine's claim alone is not believed."""
    return isinstance(error, RequestFailed) and not error.retryable


@dataclass(slots=True)
class FailureRecord:
    """The failures of one generation; exists only for generations that some engine failed."""

    failed: dict[str, str] = field(default_factory=dict)  # engine -> epoch of the incarnation that failed it last
    left: dict[str, str] = field(default_factory=dict)  # the same, for engines that it was moved off
    leaving: str = ""  # the engine that it is now being moved off
    doubted: str = ""  # the engine whose final failure is neither confirmed nor contradicted by another
    doubted_at: int = 0  # output tokens at that failure
    num_retries: int = 0
    num_migrations: int = 0
    num_deaths: int = 0  # engines that died while running it, among others
    num_deaths_alone: int = 0  # engines that died while running only it
    clear_at: int = 0  # output tokens at which it is no longer suspect; 0: it is not
    spared: bool = False  # the next loss does not count: it is not at fault, or the fault is yet to be found
    # version of the draws that its output is made of, where others would end it otherwise; 0: none would
    draws: int = 0
    error: PdkvError | None = None  # the latest failure

    @property
    def is_suspect(self) -> bool:
        """Whether it may have killed an engine."""
        return self.clear_at > 0

    def suspect(self, num_tokens: int) -> None:
        """Note that its engine died, perhaps because of this request. `num_tokens`: its output so far."""
        self.clear_at = num_tokens + TOKENS_TO_CLEAR

    def clear(self) -> None:
        """Clear the suspicion: the generation made progress, so it did not kill the engine."""
        self.clear_at = self.num_deaths = self.num_deaths_alone = 0
