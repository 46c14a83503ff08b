"""A server of another engine as a backend: each Submit is a POST /v1/completions, its stream becomes Tokens.

One task per server finds out whether it serves: it asks for its health and its model, with growing pauses until both
are well, then for its health from time to time and whenever a stream breaks. Requests have a task each; how one ends
says nothing about the others, unless the server does not answer any more.
"""

import asyncio
import contextlib
import logging
import random
import secrets
import ssl
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from http.cookiejar import CookieJar, DefaultCookiePolicy
from typing import Any

import httpcore
import httpx
import msgspec
import zmq

from pdkv.base.block_keys import HASH_BLOCK_SIZE, root_key
from pdkv.base.clock import MONOTONIC
from pdkv.errors import EngineUnavailable, IncompatiblePeers, InvalidRequest, PdkvError, RequestFailed, ServerBusy
from pdkv.router.engines.engine_client import EngineListener
from pdkv.router.engines.foreign_answers import Answer, Events, Salts, fault, handed_off, prefill_body, request_body
from pdkv.router.engines.foreign_cache import ForeignCache
from pdkv.router.engines.foreign_events import EventFollower
from pdkv.router.engines.foreign_kinds import HOPS, KINDS, Source, lacks, split_endpoint
from pdkv.text import Tokenizer
from pdkv.wire.kv import EngineCard, KVLayout
from pdkv.wire.messages import (
    MAX_ERROR_CHARS,
    Abort,
    AskReport,
    EngineToRouter,
    Failed,
    KVEvent,
    KVEvents,
    Resync,
    RouterToEngine,
    Submit,
)
from pdkv.wire.reports import BlockCounts, LoadReport
from pdkv.wire.tiers import CacheOrder
from pdkv.wire.types import RequestKey

logger = logging.getLogger(__name__)

CONNECT_S, ANSWER_S = 2.0, 5.0
"""Seconds for a connection; and for an answer about health or models, with its body."""

KEEP_S = 1.5
"""Seconds for which an idle connection is used again: less than servers keep theirs."""

HEALTH_S = 5.0
"""Seconds between two questions for the health of a server that is well."""

FIRST_PAUSE_S, MAX_PAUSE_S = 0.1, 5.0
"""Pauses before a server is asked again that was not well: each twice as long as the last, half of it drawn."""

FIRST_TOKEN_S, TOKEN_S, END_S = 300.0, 30.0, 5.0
"""Seconds for a first token, for each further one, and for the counts behind the last."""

PIECES_IN_A_ROW = 16
"""Pieces of an answer between two turns of others: two milliseconds."""

httpcore.AsyncHTTP11Connection.READ_NUM_BYTES = 4096
"""Bytes that it parses between two turns of others: 25 ms of 1xx answers."""

MAX_PAGE_BYTES = 1 << 20
"""Longest list of models; other pages and errors are cut."""

_PATH, _JSON = "/v1/completions", {"content-type": "application/json"}

_MODEL = "served by other engines"
"""The identity on the cards: the operator says that they all have the model whose directory the router reads."""


@dataclass(frozen=True, kw_only=True)
class Terms:
    """What a router wants of such servers, and knows of their model."""

    tokenizer: Tokenizer
    vocab_size: int
    num_positions: int
    max_model_len: int | None  # that they must have; None: any that the model can have
    names: tuple[str, ...]  # of the model, there
    max_num_seqs: int  # requests that each is given at once
    key: str = ""  # sent to each; empty: none
    role: str = ""  # on their cards; "": by kind
    num_hops: int = 0  # that requests have behind them there
    first_token_s: float = FIRST_TOKEN_S
    salts: Salts = field(default_factory=Salts)
    kv_events: Mapping[str, Source] = field(default_factory=dict)  # by names of servers
    context: "zmq.Context[zmq.Socket[bytes]] | None" = None  # for these


class _Model(msgspec.Struct):
    id: str
    max_model_len: int | None = None
    parent: str | None = None


class _Models(msgspec.Struct):
    data: list[_Model]


class _Unwell(Exception):
    """Why a server does not serve. `gone`: nothing listens there."""

    def __init__(self, text: str, *, gone: bool = False) -> None:
        super().__init__(text)
        self.gone = gone


class ForeignEngine:
    """A `Backend`: an engine whose requests are HTTP's."""

    def __init__(self, name: str, endpoint: str, terms: Terms) -> None:
        """`endpoint`: KIND+URL."""
        self.name = name
        self.kind, self.url = split_endpoint(endpoint)
        self.num_dropped = 0  # answers that could not be used
        self._terms = terms
        self._model = ""  # its name there
        self._card: EngineCard | None = None
        self._listener: EngineListener | None = None
        self._living: asyncio.Task[None] | None = None
        self._requests: dict[RequestKey, asyncio.Task[None]] = {}
        self._num_heard = 0  # pieces of streams
        self._doubts: list[asyncio.Future[None]] = []  # of streams that broke, until the server was asked
        self._is_doubted = asyncio.Event()
        self._said = ""  # why it last did not serve
        self._cache: ForeignCache | None = None  # what it says that it has cached
        self._follower: EventFollower | None = None
        self._following: set[asyncio.Task[None]] = set()
        self._num_events = 0

    def connect(self, listener: EngineListener) -> None:
        """Begin, in the running event loop; the server may come up later. Returns at once."""
        self._listener = listener
        headers = {"authorization": f"Bearer {self._terms.key}"} if self._terms.key else {}
        headers |= {HOPS: str(self._terms.num_hops)} if self._terms.num_hops else {}
        self._http = httpx.AsyncClient(
            base_url=self.url,
            headers={"accept-encoding": "identity", "user-agent": "pdkv", **headers},
            timeout=httpx.Timeout(ANSWER_S, connect=CONNECT_S, read=None, pool=None),  # reading has its own deadlines
            transport=httpx.AsyncHTTPTransport(
                limits=httpx.Limits(max_connections=None, max_keepalive_connections=64, keepalive_expiry=KEEP_S),
                verify=ssl.create_default_context() if self.url.startswith("https:") else False,
                trust_env=False,
                retries=1,  # of a connection: nothing was sent
            ),
            cookies=CookieJar(DefaultCookiePolicy(allowed_domains=())),  # they would bind all requests to a replica
            trust_env=False,
        )
        self._living = asyncio.create_task(self._live())

    def send(self, message: RouterToEngine) -> None:
        """Take a message; those about KV mean nothing to such a server."""
        match message:
            case Submit():
                key = message.request_id, message.attempt
                self._requests[key] = task = asyncio.create_task(self._run(message))
                task.add_done_callback(partial(self._ended, key))
            case Abort() if (running := self._requests.get((message.request_id, message.attempt))) is not None:
                running.cancel()
            case AskReport():
                asyncio.get_running_loop().call_soon(self._report, message.number)
            case Resync() if self._follower is not None:
                self._keep(self._follower.resync())
            case CacheOrder():
                text = f"the router does not manage caches of {self.kind} servers"
                asyncio.get_running_loop().call_soon(self._tell, message.failed("not_supported", text))

    def close(self) -> None:
        """Disconnect for good, without telling the listener. Idempotent."""
        listener, self._listener = self._listener, None
        self._end_requests()
        self._unfollow()
        if listener is not None and self._living is not None:
            self._living.cancel()
            self._living.add_done_callback(lambda _: asyncio.ensure_future(self._http.aclose()))

    # --- whether it serves ----------------------------------------------------------------------------------------

    async def _live(self) -> None:
        pause_s = FIRST_PAUSE_S
        while True:
            try:
                await self._begin()
                pause_s = FIRST_PAUSE_S
                await self._watch()
            except IncompatiblePeers as error:
                if self._card is not None:
                    self._go_down(str(error))
                if self._listener is not None:
                    self._listener.engine_refused(self.name, error)
            except _Unwell as error:
                self._go_down(str(error))
            except Exception:
                logger.exception("%s: an error while looking after it", self.name)
                self._go_down("an error in the router")
            await MONOTONIC.pause(pause_s * random.uniform(0.5, 1.0))
            pause_s = min(2 * pause_s, MAX_PAUSE_S)

    async def _begin(self) -> None:
        """Take the server into use. Raises _Unwell, or IncompatiblePeers if it has another model."""
        await self._check_health()
        self._model, length = await self._ask_model()
        self._card = self._make_card(length)
        if self._listener is not None:
            self._listener.engine_up(self.name, self._card)
            self._report(0)
            self._follow(self._card)

    async def _ask_model(self) -> tuple[str, int]:
        """The name of its model there, and the length. Raises as `_begin`."""
        try:
            models = msgspec.json.decode(await self._page("/v1/models"), type=_Models).data
        except (msgspec.DecodeError, RecursionError) as error:
            raise _Unwell(f"its list of models cannot be read: {error}") from None
        model = self._own(models)
        return model.id, self._length(model.max_model_len)

    def _own(self, models: list[_Model]) -> _Model:
        named = [model for model in models if model.id in self._terms.names]
        bases = [model for model in models if model.parent is None]
        if not named and len(bases) != 1:
            names = ", ".join(model.id for model in models[:8])
            wanted = ", ".join(self._terms.names)
            raise IncompatiblePeers(f"{self.name} has the models {names or 'none'}, and none is named {wanted}"[:1000])
        return (named or bases)[0]

    def _length(self, theirs: int | None) -> int:
        """The max_model_len there. Raises IncompatiblePeers, with both values."""
        wanted, most = self._terms.max_model_len, self._terms.num_positions
        if theirs is not None and wanted not in (None, theirs):
            raise IncompatiblePeers(f"{self.name} has max_model_len {theirs}, --max-model-len is {wanted}")
        if theirs is not None and not 1 <= theirs <= most:
            raise IncompatiblePeers(
                f"{self.name} has max_model_len {theirs}, and the model of --model {most} positions: not the same model"
            )
        return theirs or wanted or most

    def _make_card(self, length: int) -> EngineCard:
        terms, role = self._terms, KINDS[self.kind].role
        return EngineCard(
            engine=self.name, epoch=secrets.token_hex(8), role=terms.role or role, pid=0,
            connector="none" if role == "any" else self.kind.partition("-")[0], kind="store", content_addressed=False,
            orders=[] if role == "any" else ["prefill_first"],
            model=_MODEL, hash_block_size=HASH_BLOCK_SIZE,
            layout=KVLayout(1, 1, 1, HASH_BLOCK_SIZE, "unknown", 1),
            num_blocks=min(terms.max_num_seqs * -(-length // HASH_BLOCK_SIZE), 1 << 24),  # its pool is not known
            max_model_len=length, max_num_seqs=terms.max_num_seqs,
            backend=self.kind, lacks=lacks(self.kind),
        )  # fmt: skip

    async def _watch(self) -> None:
        """Return never. Raises _Unwell once it does not answer, and sends no tokens meanwhile."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(HEALTH_S):
                    await self._is_doubted.wait()
            self._is_doubted.clear()
            doubts, self._doubts = self._doubts, []
            num_heard = self._num_heard
            try:
                await self._check_health()
                if await self._ask_model() != (self._model, self._card and self._card.max_model_len):
                    raise _Unwell("it began again with another model or length", gone=True)
            except _Unwell as error:
                if error.gone or num_heard == self._num_heard:
                    raise
            for doubt in doubts:
                if not doubt.done():
                    doubt.set_result(None)
            self._report(0)

    async def _check_health(self) -> None:
        await self._page(KINDS[self.kind].health)

    async def _page(self, path: str) -> bytes:
        """The body of a page. Raises _Unwell."""
        try:
            once = {"connection": "close"}  # so that each question is one for a connection, too
            async with asyncio.timeout(ANSWER_S), self._http.stream("GET", path, headers=once) as response:
                body = await _read(response, MAX_PAGE_BYTES)
        except TimeoutError:
            raise _Unwell(f"GET {path} was not answered within {ANSWER_S:g} s") from None
        except (httpx.HTTPError, OSError) as error:
            raise _Unwell(f"GET {path} failed: {_words(error)}", gone=isinstance(error, httpx.ConnectError)) from None
        if response.status_code != 200:
            raise _Unwell(f"GET {path} was answered with HTTP {response.status_code}")
        return body

    def _go_down(self, reason: str) -> None:
        was_up, self._card = self._card is not None, None
        self._end_requests()
        self._unfollow()
        if was_up and self._listener is not None:
            self._listener.engine_down(self.name, reason)
        elif reason != self._said:
            logger.info("%s at %s does not serve: %s", self.name, self.url, reason)
        self._said = reason

    def _end_requests(self) -> None:
        requests, self._requests, self._doubts = self._requests, {}, []
        for task in requests.values():
            task.cancel()

    # --- what it has cached ---------------------------------------------------------------------------------------

    def _follow(self, card: EngineCard) -> None:
        source, context = self._terms.kv_events.get(self.name), self._terms.context
        if source is None or context is None:
            return
        identity = card.layout.identity

        def root_of(salt: str) -> bytes | None:
            own = self._terms.salts.find(salt) if salt else ""
            return None if own is None else root_key(model=card.model, layout=identity, cache_salt=own)

        self._cache = cache = ForeignCache(root_of, card.num_blocks)
        self._follower = follower = EventFollower(self.name, source, cache, partial(self._tell_events, cache))

        async def run() -> None:
            while True:
                try:
                    await follower.run(context)
                except Exception:
                    logger.exception("%s: cannot follow its KV events, trying again", self.name)
                    await MONOTONIC.pause(MAX_PAUSE_S)

        self._keep(run())

    def _unfollow(self) -> None:
        for task in self._following:
            task.cancel()
        self._cache = self._follower = None
        self._following = set()

    def _keep(self, work: Coroutine[None, None, None]) -> None:
        """Have work on the cache done until it ends, or the server goes down."""
        task = asyncio.create_task(work)
        self._following.add(task)
        task.add_done_callback(self._following.discard)

    def _tell_events(self, cache: ForeignCache, changes: Sequence[KVEvent]) -> None:
        if cache is self._cache:  # otherwise it is of an earlier time
            self._num_events += 1
            self._tell(KVEvents(self._num_events, list(changes)))

    # --- requests -------------------------------------------------------------------------------------------------

    async def _run(self, submit: Submit) -> None:
        """Run a request to its last message. If its stream breaks, the others may be lost, too: the server is asked."""
        try:
            await self._exchange(submit)
        except PdkvError as error:
            self._fail(submit, error)
        except TimeoutError:
            self._fail(submit, fault(submit, "no token came in time"))
        except (httpx.HTTPError, OSError) as error:
            await self._ask_health()
            self._fail(submit, fault(submit, f"the stream broke: {_words(error)}"))
        except Exception as error:
            logger.exception("%s: an error in a request", self.name)
            self._fail(submit, fault(submit, f"an error in the router: {type(error).__name__}"))

    def _ended(self, key: RequestKey, task: asyncio.Task[None]) -> None:
        """Forget a task, even one that was cancelled before it began."""
        if self._requests.get(key) is task:
            del self._requests[key]

    async def _ask_health(self) -> None:
        """Return once the server has been well since now. If it is not, this task is cancelled."""
        doubt = asyncio.get_running_loop().create_future()
        self._doubts.append(doubt)
        self._is_doubted.set()
        await doubt

    async def _exchange(self, submit: Submit) -> None:
        terms, own = self._terms, KINDS[self.kind]
        parts = {"handoff": "prefill", "await_peer": "decode", "local": own.role}
        if parts[submit.kv] != own.role or submit.until == "cached" or self._card is None:
            raise fault(submit, f"a {self.kind} server does not do this part of a request")
        body = request_body(submit, self.kind, self._model, self._card.max_model_len, terms.salts)
        if submit.kv == "handoff":
            await self._prefill(submit, prefill_body(body), self._card)
        else:
            answer = Answer(submit, own, terms.tokenizer, terms.vocab_size)
            await self._stream(submit, answer, msgspec.json.encode(body))
            self._tell(answer.finished())

    async def _stream(self, submit: Submit, answer: Answer, content: bytes) -> None:
        events, loop = Events(submit), asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._terms.first_token_s) as limit:
                async with self._http.stream("POST", _PATH, content=content, headers=_JSON) as response:
                    if response.status_code != 200:
                        raise await _refusal(submit, response)
                    async for data in _pieces(response):
                        self._num_heard += 1
                        was_over = answer.has_ended
                        messages = [m for event in events.feed(data) if (m := answer.take(event)) is not None]
                        if messages:
                            events.progressed()
                            self._tell(*messages)
                        if (messages or answer.has_ended) and not was_over:
                            limit.reschedule(loop.time() + (END_S if answer.has_ended else TOKEN_S))
                        if answer.is_whole:
                            break
                    if not answer.has_ended:
                        raise ConnectionError("it ended without a finish_reason")
        except (TimeoutError, httpx.HTTPError, OSError):
            if not answer.has_ended:
                raise

    async def _prefill(self, submit: Submit, body: dict[str, Any], card: EngineCard) -> None:
        """Have the prompt computed, and hand over what the server says of where its KV is."""
        content = msgspec.json.encode(body)
        async with asyncio.timeout(FIRST_TOKEN_S):
            async with self._http.stream("POST", _PATH, content=content, headers=_JSON) as response:
                if response.status_code != 200:
                    raise await _refusal(submit, response)
                data = await _read(response, MAX_PAGE_BYTES)
        self._num_heard += 1
        self._tell(handed_off(submit, data, card))

    def _fail(self, submit: Submit, error: PdkvError) -> None:
        retryable = isinstance(error, ServerBusy | EngineUnavailable) or getattr(error, "retryable", False)
        self.num_dropped += isinstance(error, RequestFailed)
        text, param = f"{self.name}: {error}"[:MAX_ERROR_CHARS], ""
        if isinstance(error, InvalidRequest):
            param = error.param or ""
        self._tell(Failed(submit.request_id, submit.attempt, error.code, text, retryable, param))

    def _tell(self, *messages: EngineToRouter) -> None:
        if self._listener is not None and self._card is not None:
            self._listener.engine_messages(self.name, messages)

    def _report(self, number: int) -> None:
        """Report as far as it is known: what waits there, and what its pool holds, is not."""
        if self._card is not None:
            total = self._card.num_blocks
            cached = self._cache.num_keys if self._cache is not None else 0
            blocks = BlockCounts(total=total, free=total - cached, cached=cached, active=0, leased=0, quarantined=0)
            self._tell(LoadReport(waiting=0, running=len(self._requests), blocks=blocks, answers=number))


async def _pieces(response: httpx.Response) -> AsyncIterator[bytes]:
    """What comes, piece by piece; others have their turn though many tiny ones come at once."""
    num = 0
    async for data in response.aiter_raw():
        yield data
        num += 1
        if not num % PIECES_IN_A_ROW:
            await asyncio.sleep(0)


async def _read(response: httpx.Response, most: int) -> bytes:
    """The body, or its first bytes."""
    body = b""
    async for data in _pieces(response):
        body += data
        if len(body) > most:
            break
    return body[:most]


async def _refusal(submit: Submit, response: httpx.Response) -> PdkvError:
    """The failure that an answer without a stream means. What it says is the request's own fault is tried once more."""
    status = response.status_code
    if status in (401, 403):  # what such answers say of the operator's key is for no client
        return fault(submit, f"HTTP {status}: the key that it was sent is not accepted there")
    text = f"HTTP {status}: {(await _read(response, 300)).decode('utf-8', 'replace')}"
    if status in (429, 503):
        return ServerBusy(text)
    return fault(submit, text, retryable=status >= 500 or status in (404, 408))


def _words(error: Exception) -> str:
    return f"{type(error).__name__} {error}".strip()
