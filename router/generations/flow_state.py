"""What one generation has come to, for whoever drives it, and for whoever wants to know."""

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
"""What an engine says about one request."""

LenderMessage = HandedOff | Failed | KVReady
"""What an engine says that is asked for a loan."""

SideState = Literal["idle", "running", "done"]
"""Of one engine's part: not submitted, submitted, over (it said its last word, or it is gone)."""


class FlowState:
    """What a flow has come to. `RequestFlow` changes it; all others read it."""

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
        self.attempt = 0  # of what is submitted next, and of the decode part
        self.prefill_attempt = 0  # of the prefill part and of its lease
        self.output = Output(request)
        self.prompt_engine: str | None = None  # the one that ran the prompt, once a token or a hand-off came of it
        self.sources: SourceCounts | None = None  # of that engine, as it said last
        self.finish_reason: FinishReason | None = None
        self.stop_token_id: int | None = None
        self.is_cut = False  # it was finished by its reader: engines may say more of it for a moment
        self.trial_tokens = 0  # new tokens that engines asked from now on let it get alone
        self._sources_known = False  # an earlier attempt brought tokens: the prompt's sources are what it said
        self._begin(route)

    def _begin(self, route: Route) -> None:
        self._take_route(route)
        self.prefill: SideState = "idle"
        self.decode: SideState = "idle"
        self.declined = False  # decode prefills by itself
        self.decode_sources: SourceCounts | None = None
        self.load: Loaded | None = None  # how decode's remote load ended
        self._num_before_decode = 0  # tokens that did not come from the decode part
        self._recovered()
        self._released = False
        self.prefill_gone = False  # the prefill engine died after its part was over
        self._pushes = False  # an earlier decode part gave a ticket
        self._ticket: bytes | None = None
        self._ticket_number = 0  # of the ticket that came, or will come, last
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
        """What log lines call it."""
        request = self.request
        return RequestName(self.request_id, self.attempt, label=request.label, traceparent=request.traceparent)

    @property
    def output_token_ids(self) -> list[int]:
        """All tokens so far."""
        return self.output.token_ids

    @property
    def num_duplicates(self) -> int:
        """Tokens that came more than once."""
        return self.output.num_duplicates

    @property
    def ended(self) -> bool:
        """Whether all has been said: `finish_reason` or `failure` tells how."""
        return self.finish_reason is not None or self.failure is not None

    @property
    def awaits_route(self) -> bool:
        """Whether `begin` must name its engines."""
        return self.route is NOWHERE and not self.ended

    @property
    def awaits_decode(self) -> bool:
        """Whether the prompt is handed off, and `bind_decode` must say to whom."""
        return self._handoff is not None and not self.route.decode and not self.ended

    @property
    def can_resume(self) -> bool:
        """Whether, after a failure, the prefill part goes on, or what it has handed off can still be read."""
        if self.route.aggregated or self.declined or self.failed_engine == self.route.prefill:
            return False
        if self.prefill == "running":
            return True
        readable = self._ticket is not None or self._kv_ready is None or self._kv_ready.ok
        return self._handoff is not None and readable and not self._released

    @property
    def engines_in_use(self) -> tuple[str, ...]:
        """Engines that have a part of it, or will get one."""
        route = self.route
        if self.ended or route is NOWHERE:
            return ()
        if route.aggregated:
            return (route.decode,)
        prefill = (route.prefill,) if self.prefill != "done" else ()
        return (*prefill, route.decode) if self.decode == "running" else prefill

    def runs_on(self, engine: str) -> bool:
        """Whether the engine has been asked for a part that is not over."""
        route = self.route
        return (engine == route.decode and self.decode == "running") or (
            engine == route.prefill and self.prefill == "running"
        )

    def attempt_on(self, engine: str) -> int:
        """Under which attempt the engine knows its part."""
        return self.attempt if engine == self.route.decode else self.prefill_attempt

    def depends_on(self, engine: str) -> bool:
        """Whether it cannot go on without this engine: it runs a part there, or reads KV from there."""
        return engine != "" and engine in self.engines

    def is_new_on(self, engine: str) -> bool:
        """Whether no token has come of the part that this engine runs."""
        if engine == self.route.decode:
            return len(self.output.token_ids) <= self._num_before_decode
        return True

    def accepts(self, engine: str, message: FlowMessage) -> bool:
        """Whether the message is about a part that this engine has."""
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
        """The engine that `reader` has its KV from, or will."""
        borrows = reader == self.route.prefill and not self.route.aggregated
        return self.loan.lender if borrows else self.route.prefill

    @property
    def awaits_kv(self) -> bool:
        """Whether a hand-off is made, and decode has neither loaded its KV nor gone on without; at the end: had."""
        return self._handoff is not None and not self.declined and self.load is None and len(self.output_token_ids) < 2

    @property
    def engines(self) -> tuple[str, ...]:
        """Engines that work on it, will, or hold something for it: a prefill engine until its lease may end."""
        if self.ended:
            return ()
        over = self.route.aggregated or (self.prefill == "done" and self._released)
        return (self.route.decode,) if over else (self.route.prefill, self.route.decode)

    def take_delta(self) -> Delta | None:
        """What piled up since the last call (`Output.take`)."""
        return self.output.take(self.finish_reason, self.stop_token_id)
