"""The state of one generation, for its driver and for anything that asks about it."""

from typing import Literal

from pdkv.base.log_fields import RequestName
from pdkv.errors import PdkvError
from pdkv.router.generations.loan import Loan, LoanKey
from pdkv.router.generations.output import Output
from pdkv.router.request import NOWHERE, Delta, GenerateRequest, Route
from pdkv.wire.kv import KVHandoff
from pdkv.wire.messages import Allocated, Failed, Finished, FinishReason, HandedOff, KVReady, Loaded, Release, Tokens
from pdkv.wire.reports import SourceCounts

FlowMessage = Tokens | Finished | HandedOff | Allocated | KVReady | Loaded | Failed | Release
"""A message of an engine about one request."""

LenderMessage = HandedOff | Failed | KVReady
"""A message of an engine that was asked for a loan."""

SideState = Literal["idle", "running", "done"]
"""State of one engine's part: not submitted, submitted, or over (it sent its last message, or is gone)."""


class FlowState:
    """The state of a flow. Only `RequestFlow` changes it."""

    def __init__(
        self, request: GenerateRequest, route: Route, *, request_id: str, transfer_id: str, loan_id: str, now: float
    ) -> None:
        """`loan_id` is the request id of its loans. `now` is the driver's monotonic clock, in seconds; the deadline is
        `now + request.timeout_s`.
        """
        self.request = request
        self.request_id = request_id
        self.transfer_id = transfer_id
        self.loan_id = loan_id
        self.deadline = now + request.timeout_s
        self.attempt = 0  # of the next Submit, and of the decode part
        self.prefill_attempt = 0  # of the prefill part and of its lease
        self.output = Output(request)
        # the engine that ran the prompt, once a token or a hand-off has come of it
        self.prompt_engine: str | None = None
        self.sources: SourceCounts | None = None  # of that engine, as last reported
        self.finish_reason: FinishReason | None = None
        self.stop_token_id: int | None = None
        self.guesses = (0, 0)  # right and wrong ones, that the engine verified which ended it
        self.is_cut = False  # its reader finished it: engines may still send messages about it for a moment
        self.trial_tokens = 0  # new tokens that it must produce alone on the engines asked from now on
        self._sources_known = False  # an earlier attempt brought tokens: its prompt sources count
        self._begin(route)

    def _begin(self, route: Route) -> None:
        self._take_route(route)
        self.prefill: SideState = "idle"
        self.decode: SideState = "idle"
        self.declined = False  # decode runs the prompt itself
        self.decode_sources: SourceCounts | None = None
        self.load: Loaded | None = None  # how decode's remote load ended
        self._num_before_decode = 0  # tokens that did not come from the decode part
        self._recovered()
        self._released = False
        self.prefill_gone = False  # the prefill engine died after its part was over
        self._pushes = False  # an earlier decode part gave a ticket
        self._ticket: bytes | None = None
        self._ticket_number = 0  # of the latest ticket, or the next one if none has come yet
        self._handoff: KVHandoff | None = None
        self._kv_ready: KVReady | None = None

    def _take_route(self, route: Route) -> None:
        self.route = route
        self.loan = Loan(route, LoanKey(self.loan_id, self.transfer_id, self.prefill_attempt))

    def _recovered(self) -> None:
        self.failure: PdkvError | None = None
        self.retryable = False
        self.failed_engine: str | None = None

    # --- what the driver asks -------------------------------------------------------------------------------------

    @property
    def name(self) -> RequestName:
        """The generation's name in log lines."""
        request = self.request
        return RequestName(self.request_id, self.attempt, label=request.label, traceparent=request.traceparent)

    @property
    def output_token_ids(self) -> list[int]:
        """All tokens so far."""
        return self.output.token_ids

    @property
    def num_duplicates(self) -> int:
        """Tokens that arrived more than once."""
        return self.output.num_duplicates

    @property
    def ended(self) -> bool:
        """Whether the generation has ended: `finish_reason` or `failure` tells how."""
        return self.finish_reason is not None or self.failure is not None

    @property
    def awaits_route(self) -> bool:
        """Whether `begin` must be called with its engines."""
        return self.route is NOWHERE and not self.ended

    @property
    def awaits_decode(self) -> bool:
        """Whether the prompt has been handed off and `bind_decode` must name the decode engine."""
        return self._handoff is not None and not self.route.decode and not self.ended

    @property
    def can_resume(self) -> bool:
        """Whether, after a failure, the prefill part continues, or its hand-off can still be read."""
        if self.route.aggregated or self.declined or self.failed_engine == self.route.prefill:
            return False
        if self.prefill == "running":
            return True
        readable = self._ticket is not None or self._kv_ready is None or self._kv_ready.ok
        return self._handoff is not None and readable and not self._released

    @property
    def engines_in_use(self) -> tuple[str, ...]:
        """Engines that run a part of the generation, or will."""
        route = self.route
        if self.ended or route is NOWHERE:
            return ()
        if route.aggregated:
            return (route.decode,)
        prefill = (route.prefill,) if self.prefill != "done" else ()
        return (*prefill, route.decode) if self.decode == "running" else prefill

    def runs_on(self, engine: str) -> bool:
        """Whether the engine has been given a part that has not ended."""
        route = self.route
        return (engine == route.decode and self.decode == "running") or (
            engine == route.prefill and self.prefill == "running"
        )

    def attempt_on(self, engine: str) -> int:
        """The attempt number under which the engine knows its part."""
        return self.attempt if engine == self.route.decode else self.prefill_attempt

    def depends_on(self, engine: str) -> bool:
        """Whether the generation cannot continue without this engine: a part runs there, or KV is read from there."""
        return engine != "" and engine in self.engines

    def is_new_on(self, engine: str) -> bool:
        """Whether this engine's part has produced no token yet."""
        if engine == self.route.decode:
            return len(self.output.token_ids) <= self._num_before_decode
        return True

    def accepts(self, engine: str, message: FlowMessage) -> bool:
        """Whether the message is about a part that this engine runs."""
        route = self.route
        if engine == route.decode and message.attempt == self.attempt:
            return True
        if message.attempt != self.prefill_attempt:
            return False
        return engine == route.prefill or (engine == route.decode and isinstance(message, Release))

    def accepts_loan(self, engine: str, message: LenderMessage) -> bool:
        """Whether a lender's message is about this attempt."""
        return engine == self.loan.lender and message.attempt == self.prefill_attempt

    def source_of(self, reader: str) -> str:
        """The engine from which `reader` has its KV, or will."""
        borrows = reader == self.route.prefill and not self.route.aggregated
        return self.loan.lender if borrows else self.route.prefill

    @property
    def awaits_kv(self) -> bool:
        """Whether a hand-off was made and decode has neither loaded its KV nor continued without it; at the end:
        whether that was so.
        """
        return self._handoff is not None and not self.declined and self.load is None and len(self.output_token_ids) < 2

    @property
    def engines(self) -> tuple[str, ...]:
        """Engines that work on the generation, will, or hold something for it: a prefill engine until its lease may
        end.
        """
        if self.ended:
            return ()
        over = self.route.aggregated or (self.prefill == "done" and self._released)
        return (self.route.decode,) if over else (self.route.prefill, self.route.decode)

    def take_delta(self) -> Delta | None:
        """All output since the last call (`Output.take`)."""
        return self.output.take(self.finish_reason, self.stop_token_id)
