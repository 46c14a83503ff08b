"""Every failure of pdkv as a type."""

from typing import Self


class PdkvError(Exception):
    """Base of every error that pdkv raises on purpose."""

    code = "internal_error"
    """Short stable name of the type, on the wire and in metrics."""

    status = 500
    """HTTP's, where a client meets it."""

    request_id: str | None = None
    """The request that it ended, if one; of `LLM` and its like, by the caller's name."""

    def anew(self) -> Self:
        """A copy to keep, or to raise again: the traceback of a raised error keeps alive what its frames refer to, such
        as a peer's memory.
        """
        new = type(self).__new__(type(self), *self.args)  # copy() calls __init__, which may need more than the message
        vars(new).update(vars(self))
        return new


class InvalidRequest(PdkvError):
    """A request that can never work; `param` names the field and `status` is the HTTP status."""

    code = "invalid_request_error"

    def __init__(self, message: str, *, param: str | None = None, status: int = 400, code: str = "") -> None:
        """`code`: instead of the class's own."""
        super().__init__(message)
        self.param = param
        self.status = status
        if code:
            self.code = code


class GrammarGivenUp(InvalidRequest):
    """A grammar took more time or memory than allowed; router and engines refuse it for a minute by its digest."""

    code = "grammar_given_up"


class ConfigError(PdkvError):
    """A wrong flag, file or value at start; the command line prints it and exits with 2."""

    code = "config_error"


class ModelError(ConfigError):
    """A model directory that is missing, broken or not supported."""

    code = "model_error"


class UnknownConnector(ConfigError):
    """A connector name that is not provided; the message lists the known ones."""

    code = "unknown_connector"


class IncompatiblePeers(ConfigError):
    """Two engines whose cards say that they cannot exchange KV; the message has both values."""

    code = "incompatible_peers"


class StartupError(PdkvError):
    """A child process that died or stayed silent before it was ready."""

    code = "startup_error"


class DiedEarly(StartupError):
    """A child closed its acknowledgements, or ended, before it was ready."""


class OtherRankGone(StartupError):
    """A rank could not start without another one, which ended before it was ready and has the reason."""


class RankError(PdkvError):
    """One rank of an engine failed: the engine ends, and the launcher starts it again."""

    code = "rank_error"


class RankTimeout(RankError):
    """A rank did not answer in time."""

    code = "rank_timeout"


class RankGone(RankError):
    """A rank is gone."""

    code = "rank_gone"


class MalformedMessage(PdkvError):
    """Bytes from a peer that cannot be decoded; the receiver counts and drops them."""

    code = "malformed_message"


class UnsendableMessage(PdkvError):
    """A message to a peer that is too long for a frame, or has a value that the wire cannot express."""

    code = "unsendable_message"


class EngineUnavailable(PdkvError):
    """No engine can take the request now."""

    code = "engine_unavailable"
    status = 503


class NoEngine(EngineUnavailable):
    """No engine of a role is ready. The request may wait for one."""


class ServerBusy(PdkvError):
    """The router, or an engine, has reached one of its limits; the same request may succeed `retry_after_s` later."""

    code = "server_busy"
    status = 503

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Draining(ServerBusy):
    """The router takes no new requests, since it is about to stop."""

    code = "draining"


class TooManyRequests(PdkvError):
    """The queue is full, or a key has reached its limit; try again after `retry_after_s`, whole seconds."""

    code = "rate_limit_exceeded"
    status = 429

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Unauthorized(PdkvError):
    """There is no API key, an unknown one, or (status 403) one without the necessary rights."""

    code = "invalid_api_key"

    def __init__(self, message: str, *, status: int = 401) -> None:
        super().__init__(message)
        self.status = status


class RequestFailed(PdkvError):
    """One request ended with an error; `retryable` says whether another engine may try."""

    code = "request_failed"

    def __init__(self, message: str, *, request_id: str, retryable: bool = False) -> None:
        super().__init__(message)
        self.request_id = request_id
        self.retryable = retryable


class RequestTimeout(RequestFailed):
    """The request's deadline passed."""

    code = "timeout"
    status = 504


class RequestAborted(RequestFailed):
    """The client or the router gave the request up."""

    code = "aborted"
    status = 503


class NonFiniteLogits(RequestFailed):
    """The model computed NaN or infinity for the request, on a second engine, too, if there is one."""

    code = "non_finite_logits"


class LogitsProcessorFailed(RequestFailed):
    """A logits processor raised an error or returned invalid logits, on a second engine, too, if there is one."""

    code = "logits_processor_failed"


class EngineDied(RequestFailed):
    """The engine that ran the request is gone."""

    code = "engine_died"
    status = 503


class EngineGivenUp(RequestFailed):
    """The engine that ran the request is alive but seems unable to continue, and no other engine could take over."""

    code = "engine_given_up"
    status = 503


class KillsEngines(RequestFailed):
    """Engines died whenever they ran this request; it is not tried on another one."""

    code = "kills_engines"


class TransferError(PdkvError):
    """One KV transfer ended with an error; `key`, a TransferKey, names it."""

    code = "transfer_failed"

    def __init__(self, message: str, *, key: tuple[object, ...] | None = None) -> None:
        super().__init__(message)
        self.key = key


class TransferTimeout(TransferError):
    """The transfer's deadline passed."""

    code = "transfer_timeout"


class TransferCancelled(TransferError):
    """The owner of the transfer cancelled it."""

    code = "transfer_cancelled"


class StaleGeneration(TransferError):
    """The source blocks were reused while they were read; the data is refused."""

    code = "stale_generation"


class KVCorrupted(TransferError):
    """The received KV is not what the source had: the digests differ, or the source's are missing."""

    code = "kv_corrupted"


class KVNotCodable(TransferError):
    """A store's codec cannot express the KV: NaN, infinity, or numbers out of its range."""

    code = "kv_not_codable"


class StaleEpoch(TransferError):
    """The transfer names an incarnation of the peer that is gone."""

    code = "stale_epoch"


class PeerGone(TransferError):
    """The peer is gone."""

    code = "peer_gone"


class Unauthenticated(TransferError):
    """The other end of a connection is not the peer, or its messages were tampered with."""

    code = "unauthenticated"


class KVNotFound(TransferError):
    """The source does not have the blocks, or no longer has them."""

    code = "kv_not_found"


class StoreError(TransferError):
    """A KV store failed."""

    code = "store_error"


class StoreUnavailable(StoreError):
    """The store cannot be reached, or can no longer be reached."""

    code = "store_unavailable"


class StoreTimeout(StoreError):
    """The store did not answer in time."""

    code = "store_timeout"


class StoreFull(StoreError):
    """The store has no room and may not evict."""

    code = "store_full"


class StoreReadOnly(StoreError):
    """The store takes no writes now: a replica, one with failing snapshots, or one that this user may only read."""

    code = "store_read_only"


class StoreUnsupported(StoreError):
    """The store cannot do what was requested, whatever its content."""

    code = "store_unable"
