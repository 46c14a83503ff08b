"""Sends a reply to its client, event by event or whole. Each API has its own format for both."""

import functools
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec

from pdkv.errors import InvalidRequest, PdkvError
from pdkv.router.http.answer.choice import Choice, ChoiceDelta, TokenCounts
from pdkv.router.http.answer.exchange import Exchange
from pdkv.router.http.answer.fanout import Fanout
from pdkv.router.http.read.job import Job
from pdkv.router.http.read.served_model import ServedModel
from pdkv.router.http.read.text_pool import TextPool
from pdkv.router.http.server.budget import ByteBudget, Held
from pdkv.router.http.server.request_body import Disconnected

_AHEAD_BYTES = 16 << 10
"""Memory for an answer is reserved in pieces of this size, not for every token."""

_BYTES_PER_POOLED = 7
"""The most memory that a byte of pooled numbers takes, with their JSON."""

INLINE_LOGPROBS = 256
"""The most tokens with logprobs to encode on the event loop; with 20 alternatives each, they take some milliseconds."""

Work = Callable[[Callable[[], Any]], Awaitable[Any]]
"""Runs a function that makes a part of a reply, on a thread if it takes long."""


class Asked(NamedTuple):
    """One request, for the code that writes its reply."""

    job: Job
    choices: Sequence[Choice]
    model: ServedModel
    serial: str  # makes the reply's ids unique
    created: int  # seconds since the epoch


class EventEncoder(Protocol):
    """Encodes the events of one streamed reply."""

    def begin(self) -> bytes:
        """Events before the first delta."""

    def encode(self, delta: ChoiceDelta) -> bytes:
        """Events of a delta; empty if it contains nothing to show."""

    def end(self, counts: TokenCounts) -> bytes:
        """Events after the last delta."""

    def fail(self, error: PdkvError) -> bytes:
        """Events sent instead if the request fails."""


class WholeReply(Protocol):
    """A reply that is sent in one piece."""

    def add(self, delta: ChoiceDelta) -> None:
        """Add the next delta of a choice."""

    @property
    def num_logprobs(self) -> int:
        """Number of tokens whose logprobs are shown."""

    async def body(self, counts: TokenCounts, work: Work) -> object:
        """The whole body, made in pieces by `work`. To be called once, after the last delta."""


class ReplyForms(NamedTuple):
    """The reply formats of one API."""

    events: Callable[[Asked], EventEncoder]
    whole: Callable[[Asked], WholeReply]


async def send_reply(
    forms: ReplyForms,
    fanout: Fanout,
    model: ServedModel,
    exchange: Exchange,
    pool: TextPool,
    answers: ByteBudget,
    key: str,
    ping_s: float,
) -> None:
    """Begin the generations and send the reply in the requested form. `ping_s`: of `Exchange.pinging`.

    Raises:
        Disconnected, and what `Fanout.begin` and `Fanout.take` raise.
    """
    asked = Asked(fanout.job, fanout.choices, model, exchange.reply_id, exchange.created)
    if fanout.job.stream:
        encoder = forms.events(asked)
        with exchange.pinging(ping_s, encoder.fail):
            await fanout.begin()
            await _stream(encoder, fanout, exchange, pool)
    else:
        await fanout.begin()
        held = Held(key)
        try:
            data = await _whole(forms.whole(asked), fanout, pool, answers, held)
            answers.give(held)
            answers.try_take(held, len(data))  # less than its objects took
            await exchange.send_whole(200, data, fanout.engines)
        finally:
            answers.give(held)


async def _stream(encoder: EventEncoder, fanout: Fanout, exchange: Exchange, pool: TextPool) -> None:
    """Stream the reply: one write per step of the engines, whatever the number of choices."""
    encode, ids = encoder.encode, exchange.ids
    if ids is not None:

        def encode(delta: ChoiceDelta) -> bytes:
            return ids.stamp(delta.choice, encoder.encode(delta))

    begin = b""
    begun = False
    shows_logprobs = fanout.job.params.logprobs is not None
    num_shown = 0  # logprobs so far
    while not fanout.finished:
        batch = fanout.take()
        if not batch:
            await fanout.news()
            continue
        if not begun:
            begun = True
            begin = encoder.begin()
            await exchange.begin_events(fanout.engines, encoder.fail)
        num_new = sum(len(delta.logprobs or ()) for delta in batch) if shows_logprobs else 0
        num_shown += num_new
        is_end = num_shown and any(delta.finish_reason is not None for delta in batch)  # which may repeat all of them
        if (num_shown if is_end else num_new) > INLINE_LOGPROBS:
            for delta in batch:
                await exchange.send_events(begin + await pool.encode(functools.partial(encode, delta)))
                begin = b""
            continue
        data = encode(batch[0]) if len(batch) == 1 else b"".join(map(encode, batch))
        if begin or data:  # of a parsed answer, a token may show nothing yet
            await exchange.send_events(begin + data)
            begin = b""
    end = functools.partial(encoder.end, fanout.counts)
    data = end() if num_shown <= INLINE_LOGPROBS else await pool.encode(end)
    await exchange.end_events(data if ids is None else ids.stamp(-1, data))


def bytes_per_token(logprobs: int | None) -> int:
    """The most memory that one token of a non-streamed answer takes, with its logprobs."""
    return 128 if logprobs is None else 128 + 256 * (logprobs + 1)


async def _whole(whole: WholeReply, fanout: Fanout, pool: TextPool, answers: ByteBudget, held: Held) -> bytes:
    """Send everything at once, as JSON, when the last choice is finished."""
    per_token, size = bytes_per_token(fanout.job.params.logprobs), 0
    while not fanout.finished:
        batch = fanout.take()
        for delta in batch:
            whole.add(delta)
            size += len(delta.token_ids) * per_token + len(delta.pooled) * _BYTES_PER_POOLED
        if size > held.size:
            _hold(answers, held, size - held.size + _AHEAD_BYTES)
        if not batch:
            await fanout.news()
    inline = whole.num_logprobs <= INLINE_LOGPROBS

    async def work(make: Callable[[], Any]) -> Any:
        if fanout.aborted:
            raise Disconnected
        return make() if inline else await pool.encode(make)

    return msgspec.json.encode(await whole.body(fanout.counts, work))


def _hold(answers: ByteBudget, held: Held, size: int) -> None:
    if answers.try_take(held, size):
        return
    if held.size < answers.limit // 4:
        raise answers.busy()
    raise InvalidRequest(
        f"the answer takes more than {held.size} bytes of memory, and a client may hold as much as it leaves free of "
        f"{answers.limit} (--max-answer-memory): stream it, or ask for fewer choices, tokens or logprobs"
    )
