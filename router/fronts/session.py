"""One request of a front, in the dispatcher: its visit, its generations, and what its front was told of them."""

import asyncio
import contextlib
import logging
import secrets
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from pdkv.errors import MalformedMessage, PdkvError, RequestFailed
from pdkv.router.admission.admission_queue import Visit
from pdkv.router.admission.desk import Asked, Replay, Terms
from pdkv.router.admission.tenants import Tenant
from pdkv.router.fronts.wire import Facts, Link, Problem, as_list, encode
from pdkv.router.http.answer.request_report import record
from pdkv.router.http.read.job import Job
from pdkv.router.http.read.prompts import Prompt
from pdkv.router.http.server.budget import Held
from pdkv.router.metrics.recorder import Recorder
from pdkv.router.metrics.requests import RequestMetrics
from pdkv.router.request import GenerateRequest, PromptKeys

if TYPE_CHECKING:
    from pdkv.router.generations.dispatch import Generation

logger = logging.getLogger(__name__)

_told = msgspec.msgpack.Decoder(list[tuple[str, int, int, msgspec.Raw]])

TOLD_IN_A_ROW = 512
"""Calls that a front is told again in one turn of the event loop: half a millisecond."""


class Keeper(Protocol):
    """What has the sessions that may be taken up again."""

    makes_spans: bool
    """Whether fronts make spans of what they are told."""

    def try_admit(self, session: "Session", num_bytes: int) -> bool:
        """Let it be taken up from now on, if there is memory for the body of its request."""

    def keep(self, session: "Session") -> None:
        """Take it over: it has no front, or is over."""

    def drop(self, session: "Session") -> None:
        """End it for good."""


class Run:
    """One choice."""

    __slots__ = (
        "_is_over", "_last_at", "_num_changes", "choice", "finish_reason", "generation", "num_sent", "num_shown",
        "session",
    )  # fmt: skip

    def __init__(self, session: "Session", choice: int, generation: "Generation") -> None:
        self.session, self.choice, self.generation = session, choice, generation
        self.num_sent = 0  # tokens
        self.num_shown: int | None = None  # those before the end of its text; None: all
        self.finish_reason: str | None = None  # None: it has not ended, or failed
        self._is_over = False
        self._last_at = 0.0
        self._num_changes = 0  # of its timeline, as its front was told
        self._tell_facts()
        self.attach(session.link)

    def attach(self, link: Link | None) -> None:
        """Have what is new, from now on, sent by this connection; None: it stays with the generation."""
        self.generation.on_wake = None if link is None else partial(link.ask_for_news, self.tell_news)
        if link is not None:
            link.ask_for_news(self.tell_news)

    def tell_news(self) -> None:
        """Tell what is new, once."""
        generation, session = self.generation, self.session
        if self._is_over or session.link is None or session.is_behind:
            return
        try:
            delta = generation.take()
            if delta is None:
                if not generation.ended:
                    return
                raise RequestFailed("the generation ended without a reason", request_id=generation.request_id)
            self._last_at = session.metrics.arrived(generation.take_arrivals(), self._last_at)
            is_changed = session.makes_spans and generation.timeline.num_changes != self._num_changes
            if not self.num_sent or delta.finish_reason is not None or is_changed:
                self._tell_facts()
            session.tell("delta", self.choice, delta)
        except PdkvError as error:
            self._is_over = True
            self._tell_facts()
            session.tell("failed", self.choice, Problem.of(error))
            return
        num_tokens = len(delta.token_ids)
        session.visit.came(num_tokens)
        self.num_sent += num_tokens
        if delta.finish_reason is not None:
            self._is_over, self.finish_reason = True, delta.finish_reason

    def stop(self, num_tokens: int) -> None:
        """End it: its text is over after so many of the tokens that were sent."""
        self.num_shown = min(max(num_tokens, 0), self.num_sent)
        self._is_over, self.finish_reason = True, self.finish_reason or "stop"
        self.generation.finish()

    @property
    def num_tokens(self) -> int:
        """Tokens that its client was, or will be, charged."""
        return self.num_sent if self.num_shown is None else self.num_shown

    def _tell_facts(self) -> None:
        facts = {name: getattr(self.generation, name) for name in Facts._fields}
        self._num_changes = facts["timeline"].num_changes
        if not self.session.makes_spans:
            del facts["timeline"]
        self.session.tell("facts", self.choice, Facts(**facts))


class Session:
    """A request between its arrival and its end, and for some time after that."""

    def __init__(
        self, keeper: Keeper, path: str, visit: Visit, metrics: RequestMetrics, recorder: Recorder | None
    ) -> None:
        """The session ends the visit."""
        self.id = secrets.token_urlsafe(18)
        self.path, self.visit, self.metrics = path, visit, metrics
        self.makes_spans = keeper.makes_spans
        self.owner = visit.tenant.keeper  # who may take it up again
        self.link: Link | None = None  # to its front, and its number there
        self._number = 0
        self.kept: Replay | None = None  # set: it can be taken up again
        self.stack = contextlib.ExitStack()
        self.stack.enter_context(visit)
        self.timer: asyncio.TimerHandle | None = None
        self.held_body = Held(visit.tenant.digest)  # of its request, as far as it is kept
        self._keeper, self._recorder = keeper, recorder
        self._is_over = False
        self._runs: dict[int, Run] = {}
        self._asked: Asked | None = None
        self._terms: Terms | None = None
        self._requests: dict[int, GenerateRequest] = {}
        self._told = list[bytearray]()  # encoded calls, TOLD_IN_A_ROW in each, if it can be taken up again
        self._num_told = 0
        self.is_behind = False  # its front is told again what another one was
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def num_bytes(self) -> int:
        """Memory for what is kept, roughly."""
        of_tokens = 48 * sum(run.num_sent for run in self._runs.values())
        requests = self._requests.values()
        of_prompts = 36 * sum(len(each.prompt_token_ids) + len(each.prediction_token_ids) for each in requests)
        of_calls, of_body = sum(map(len, self._told)), len(self.kept.body) if self.kept is not None else 0
        return 4096 + of_tokens + of_prompts + of_calls + of_body

    def tell(self, name: str, choice: int, what: object) -> None:
        """Tell its front something of a choice, and each front that takes it up."""
        call = encode((name, self._number, choice, what))
        if self.link is not None:
            self.link.put(call)
        if self.kept is not None:
            if not self._num_told % TOLD_IN_A_ROW:
                self._told.append(bytearray())
            self._told[-1] += call
            self._num_told += 1

    def join(self, link: Link, number: int) -> None:
        """Belong to a front, which numbers it, and is told everything that another one was."""
        if self.link is not None:
            del self.link.objects[self._number]
            self.link.send(self._number, "taken")
        self._number, link.objects[number] = number, self
        self.link, self.is_behind = link, True
        answer(link, number, self.visit.tenant, None, self.id, self.kept)
        self._tell_again(link, number, 0)

    def _tell_again(self, link: Link, number: int, index: int) -> None:
        """Tell a front what another one was told, part by part as it reads them; and then what is new. What comes
        meanwhile may be told twice: facts and failures, which change nothing the second time.
        """
        if (self.link, self._number) != (link, number):  # it has left, or another one has come
            return
        if index == len(self._told):
            self.is_behind = False
            self._attach(link)
            return
        num = min(TOLD_IN_A_ROW, self._num_told - index * TOLD_IN_A_ROW)
        for name, _, choice, what in _told.decode(as_list(num, self._told[index])):
            link.send(number, name, choice, what)
        link.ask_for_news(partial(self._tell_again, link, number, index + 1))

    def left(self) -> None:
        """Note that its front is gone."""
        self._attach(None)
        self._keeper.keep(self)

    def _attach(self, link: Link | None) -> None:
        self.link = link
        for run in self._runs.values():
            run.attach(link)

    def on_admit(self, asked: Asked, replay: Replay) -> None:
        """What it asks for, and what is kept if it can be taken up again."""
        problem = None
        try:
            if self._asked is not None:
                raise MalformedMessage("a request that asks twice")
            self.metrics.of_pool(asked.pool)
            self._terms = self.visit.judge(asked)
            self._asked = asked
            self.metrics.prepared(len(asked.prompt_lengths) * asked.n)
            if replay.body and self._keeper.try_admit(self, len(replay.body)):
                self.kept = replay
        except MalformedMessage:
            raise
        except PdkvError as error:
            problem = Problem.of(error)
        assert self.link is not None
        answer(self.link, self._number, self.visit.tenant, problem)

    def on_start(self, choice: int, request: GenerateRequest) -> None:
        """Begin a choice when its turn comes, unless it has begun for another front. Its prompt comes with the first
        choice of the prompt; the terms are the dispatcher's.
        """
        if choice not in self._requests:
            self._requests[choice] = self._request(choice, request)
            task = asyncio.get_running_loop().create_task(self._start(choice))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def _request(self, choice: int, request: GenerateRequest) -> GenerateRequest:
        """The request of a choice, on its tenant's terms. Raises MalformedMessage for one that was not admitted."""
        asked, terms = self._asked, self._terms
        if asked is None or terms is None or not 0 <= choice < len(asked.prompt_lengths) * asked.n:
            raise MalformedMessage(f"a start of choice {choice}, which was not asked for")
        first, prompt = self._requests.get(choice - choice % asked.n), request.prompt_token_ids
        if first is None and len(prompt) != asked.prompt_lengths[choice // asked.n]:
            raise MalformedMessage(f"a prompt of {len(prompt)} tokens, which was not asked for")
        if len(request.prediction_token_ids) != asked.num_predicted:
            raise MalformedMessage("a prediction of another length than was asked for")
        return msgspec.structs.replace(
            request,
            prompt_token_ids=prompt if first is None else first.prompt_token_ids,
            keys=PromptKeys() if first is None else first.keys,
            choice=choice % asked.n,
            probe=False,
            **terms._asdict(),
        )

    async def _start(self, choice: int) -> None:
        try:
            await self.visit.start(self._requests[choice], partial(self._begun, choice))
            return
        except PdkvError as error:
            problem = Problem.of(error)
        except Exception:
            logger.exception("a generation failed to begin")
            problem = Problem.of(PdkvError("internal error"))
        self.tell("failed", choice, problem)

    def _begun(self, choice: int, generation: "Generation") -> None:
        self.metrics.dispatched()
        self._runs[choice] = Run(self, choice, generation)

    def on_stop(self, choice: int, num_tokens: int) -> None:
        """The text of a choice has ended after so many tokens."""
        if (run := self._runs.get(choice)) is not None and not self._is_over:
            run.stop(num_tokens)

    def on_end(self, outcome: str, stalls: list[float]) -> None:
        """End a request: "ok", "disconnected" or an error's code. `stalls`: seconds that tokens waited to be read."""
        for seconds in stalls:
            self.metrics.client_stall(seconds)
        assert self.link is not None
        del self.link.objects[self._number]
        self.close(outcome[:64])
        if outcome == "ok":
            self._keeper.keep(self)
        else:
            self._keeper.drop(self)

    def close(self, outcome: str) -> None:
        """End it: "ok", "disconnected" or an error's code. Idempotent."""
        self._attach(None)
        if self._is_over:
            return
        self._is_over = True
        for run in self._runs.values():
            run.generation.abort()
            if run.finish_reason is not None:
                self.metrics.choice_ended(run.finish_reason)
        n = self._asked.n if self._asked is not None else 1
        firsts = [run for choice, run in self._runs.items() if choice % n == 0]
        num_prompt = sum(len(self._requests[run.choice].prompt_token_ids) for run in firsts)
        num_completion = sum(run.num_tokens for run in self._runs.values())
        num_cached = sum(run.generation.num_cached_tokens for run in firsts)
        num_predicted = sum(len(self._requests[choice].prediction_token_ids) for choice in self._runs)
        self.visit.used(num_prompt + num_predicted + num_completion, num_cached)
        if outcome == "ok" and self._asked is not None:
            self.metrics.served(
                num_prompt_tokens=num_prompt, num_cached_tokens=num_cached, num_completion_tokens=num_completion, n=n
            )
        self.stack.close()
        self.metrics.ended(outcome)
        if self._recorder is not None:
            begun = {choice: run.generation for choice, run in self._runs.items()}
            record(self._recorder, self._job(), begun, self.metrics, outcome, self.visit.tenant.digest)

    def _job(self) -> Job | None:
        """What is recorded of it; None: no choice was to begin."""
        asked, first = self._asked, next(iter(self._requests.values()), None)
        if asked is None or first is None:
            return None
        firsts = (self._requests.get(index * asked.n) for index in range(len(asked.prompt_lengths)))
        prompts = [Prompt(request.prompt_token_ids if request is not None else [], None) for request in firsts]
        form: dict[str, Any] = {"chat": False, "stream": asked.stream, "include_usage": False}
        return Job(prompts=prompts, params=first.params, n=asked.n, **form, **first.common())


def answer(
    link: Link, number: int, tenant: Tenant | None, problem: Problem | None, resume_id: str = "",
    replay: Replay | None = None,
) -> None:  # fmt: skip
    """Answer a request, with what is now left of its key's limits."""
    name, models = (tenant.name, tenant.models) if tenant is not None and tenant.digest else (None, ())
    rates = list(tenant.rate_headers()) if tenant is not None else []
    link.send(number, "answer", problem, name, models, rates, resume_id, replay)
