"""What has gone wrong for one generation so far."""

from dataclasses import dataclass, field
from typing import TypeGuard

from pdkv.errors import PdkvError, RequestFailed

TOKENS_TO_CLEAR = 2
"""New tokens after which a suspect is none any more: one may be prefill's, the other is decode's."""


def is_final(error: PdkvError | None) -> TypeGuard[RequestFailed]:
    """Whether an engine says that another one would fail the request, too. It is not believed of one engine alone."""
    return isinstance(error, RequestFailed) and not error.retryable


@dataclass(slots=True)
class FailureRecord:
    """Of a generation that some engine failed; others have none."""

    failed: dict[str, str] = field(default_factory=dict)  # engine -> epoch of the incarnation that failed it last
    left: dict[str, str] = field(default_factory=dict)  # the same of those that it was moved off
    leaving: str = ""  # the engine that it is being moved off
    doubted: str = ""  # the engine whose final failure no other one has confirmed or contradicted
    doubted_at: int = 0  # output tokens at that failure
    num_retries: int = 0
    num_migrations: int = 0
    num_deaths: int = 0  # engines that died while they ran it, among others
    num_deaths_alone: int = 0  # those that died while they ran nothing else
    clear_at: int = 0  # output tokens at which it is no suspect any more; 0: it is none
    spared: bool = False  # the next loss does not count: nothing is wrong with it, or what is wrong is yet to be found
    draws: int = (
        0  # version of the draws that its output is made of, where others would end it otherwise; 0: none would
    )
    error: PdkvError | None = None  # what happened last

    @property
    def is_suspect(self) -> bool:
        """Whether it may have ended an engine."""
        return self.clear_at > 0

    def suspect(self, num_tokens: int) -> None:
        """Its engine died, and this request may be why. `num_tokens`: of its output so far."""
        self.clear_at = num_tokens + TOKENS_TO_CLEAR

    def clear(self) -> None:
        """It got on: it has ended nobody."""
        self.clear_at = self.num_deaths = self.num_deaths_alone = 0
