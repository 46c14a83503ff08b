"""One request of a front, in the dispatcher: its visit, its generations, and what was sent of them."""

import asyncio
import contextlib
import logging
import secrets
from array import array
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Protocol

import msgspec

from pdkv.errors import MalformedMessage, PdkvError, RequestFailed
from pdkv.router.admission.admission_queue import Visit
from pdkv.router.admission.desk import Asked, Terms
from pdkv.router.fronts.wire import Admit, Answer, Facts, Kept, Message, News, Problem, Start, Stop
from pdkv.router.metrics.requests import RequestMetrics
from pdkv.router.request import GenerateRequest, PromptKeys
from pdkv.wire.messages import PromptLogprobs, TokenLogprob

if TYPE_CHECKING:
    from pdkv.router.generations.dispatch import Generation

logger = logging.getLogger(__name__)


class Front(Protocol):
    """The connection of a front."""

    def send(self, message: Message) -> None:
        """Send it with this turn's frame."""

    def has_news(self, run: "Run") -> None:
        """Take the run's news into the next frame."""


class Run:
    """One choice, and how its tokens were grouped when they were sent."""

    __slots__ = (
        *("_cuts", "_finish", "_last_at", "_logprobs", "_problem", "_prompt_logprobs"),
        *("choice", "generation", "num_sent", "num_shown", "session"),
    )

    def __init__(self, session: "Session", choice: int, generation: "Generation") -> None:
        self.session, self.choice, self.generation = session, choice, generation
        self.num_sent = 0  # tokens
        self.num_shown: int | None = None  # those before the end of its text; None: all
        self._cuts = array("H")  # tokens of each delta
        self._logprobs: list[TokenLogprob] = []
        self._prompt_logprobs: PromptLogprobs | None = None
        self._finish: News | None = None  # the last delta
        self._problem: Problem | None = None
        self._last_at = 0.0
        self.attach(session.front)

    def attach(self, front: Front | None) -> None:
        """Have what is new, from now on, sent by this front; None: it stays with the generation."""
        if front is None:
            self.generation.on_wake = None
        else:
            self.generation.on_wake = partial(front.has_news, self)
            front.has_news(self)

    @property
    def finish_reason(self) -> str | None:
        """Why it ended; None: it has not, or failed."""
        if self._finish is not None:
            return self._finish.finish_reason
        return "stop" if self.num_shown is not None else None

    def news(self) -> News | None:
        """What is new, once; None: nothing."""
        if self._problem is not None or self._finish is not None or self.num_shown is not None:
            return None
        generation, session = self.generation, self.session
        try:
            delta = generation.take()
            if delta is None and generation.ended:
                raise RequestFailed("the generation ended without a reason", request_id=generation.request_id)
        except PdkvError as error:
            self._problem = Problem.of(error)
            return News(session.number, self.choice, [], problem=self._problem, facts=self._facts())
        if delta is None:
            return None
        token_ids, logprobs, prompt_logprobs, reason, stop_token_id = delta
        self._last_at = session.metrics.arrived(generation.take_arrivals(), self._last_at)
        session.visit.came(len(token_ids))
        self.num_sent += len(token_ids)
        if reason is None and logprobs is None and self._cuts:  # nearly all of them
            self._cuts.append(len(token_ids))
            return News(session.number, self.choice, token_ids)
        if prompt_logprobs is not None:
            self._prompt_logprobs = prompt_logprobs
        if logprobs is not None:
            self._logprobs += logprobs
        facts = self._facts() if not self._cuts or reason is not None else None
        self._cuts.append(len(token_ids))
        news = News(
            session.number, self.choice, token_ids, logprobs, prompt_logprobs, reason, stop_token_id, facts
        )  # fmt: skip
        if reason is not None:
            self._finish = news
        return news

    def again(self) -> Iterator[News]:
        """Everything that was sent, in the same pieces."""
        number, choice, finish, begin = self.session.number, self.choice, self._finish, 0
        token_ids, facts = self.generation.flow.output.token_ids, self._facts()
        for index, count in enumerate(self._cuts):
            end = begin + count
            last = finish if index == len(self._cuts) - 1 else None
            yield News(
                number, choice, token_ids[begin:end],
                self._logprobs[begin:end] if self._logprobs else None,
                None if index else self._prompt_logprobs,
                last.finish_reason if last is not None else None,
                last.stop_token_id if last is not None else None,
                facts,
            )  # fmt: skip
            begin = end
        if self._problem is not None:
            yield News(number, choice, [], problem=self._problem, facts=facts)

    def stop(self, num_tokens: int) -> None:
        """End it: its text is over after so many of the tokens that were sent."""
        self.num_shown = min(max(num_tokens, 0), self.num_sent)
        self.generation.finish()

    @property
    def num_tokens(self) -> int:
        """Tokens that its client was, or will be, charged."""
        return self.num_sent if self.num_shown is None else self.num_shown

    def _facts(self) -> Facts:
        of = self.generation
        return Facts(
            of.prefill_engine,
            of.decode_engine,
            of.sources,
            of.num_cached_tokens,
            of.num_lossy_tokens,
            of.num_attempts,
            of.stays,
        )


class Session:
    """A request between its arrival and its end, and for some time after that."""

    def __init__(self, front: Front, number: int, path: str, visit: Visit, metrics: RequestMetrics) -> None:
        """`number`: the front's for it. The session ends the visit."""
        self.id = secrets.token_urlsafe(18)
        self.front: Front | None = front
        self.number, self.path, self.visit, self.metrics = number, path, visit, metrics
        self.keeper = visit.tenant.keeper  # who may take it up again
        self.kept: Kept | None = None  # set: it can be taken up again
        self.is_over = False
        self.stack = contextlib.ExitStack()
        self.stack.enter_context(visit)
        self.runs: dict[int, Run] = {}
        self.timer: asyncio.TimerHandle | None = None
        self._asked: Asked | None = None
        self._terms: Terms | None = None
        self._requests: dict[int, GenerateRequest] = {}
        self._problems: dict[int, Problem] = {}  # of choices that could not begin
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def num_bytes(self) -> int:
        """Memory for what is kept, roughly."""
        of_tokens = sum(run.num_sent * (48 + 256 * bool(run._logprobs)) for run in self.runs.values())
        of_prompts = sum(36 * len(request.prompt_token_ids) for request in self._requests.values())
        return 4096 + of_tokens + of_prompts + (len(self.kept.body) if self.kept is not None else 0)

    def tell(self, message: Message) -> None:
        """Send a message to its front, if it has one."""
        if self.front is not None:
            self.front.send(message)

    def admit(self, message: Admit) -> None:
        """Reserve what it asks for. Raises what `Visit.judge` does."""
        if self._asked is not None:
            raise MalformedMessage("a request that asks twice")
        self._terms = self.visit.judge(message.asked)
        self._asked = message.asked
        self.metrics.prepared(len(message.asked.prompt_lengths) * message.asked.n)
        if message.body:
            self.kept = Kept(message.body, message.reply_id, message.created, message.label)

    def start(self, message: Start) -> None:
        """Begin a choice when its turn comes; one that has begun is only told of."""
        if (run := self.runs.get(message.choice)) is not None:
            self.tell(Answer(self.number, message.choice, engine=run.generation.prefill_engine))
        elif (problem := self._problems.get(message.choice)) is not None:
            self.tell(Answer(self.number, message.choice, problem))
        elif message.choice not in self._requests:
            request = self._requests[message.choice] = self._request(message)
            task = asyncio.get_running_loop().create_task(self._start(message.choice, request))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def _request(self, message: Start) -> GenerateRequest:
        """The request of a choice, on its tenant's terms. Raises MalformedMessage for one that was not admitted."""
        asked, terms, choice = self._asked, self._terms, message.choice
        if asked is None or terms is None or not 0 <= choice < len(asked.prompt_lengths) * asked.n:
            raise MalformedMessage(f"a start of choice {choice}, which was not asked for")
        first, prompt = self._requests.get(choice - choice % asked.n), message.request.prompt_token_ids
        if first is None and len(prompt) != asked.prompt_lengths[choice // asked.n]:
            raise MalformedMessage(f"a prompt of {len(prompt)} tokens, which was not asked for")
        return msgspec.structs.replace(
            message.request,
            prompt_token_ids=prompt if first is None else first.prompt_token_ids,
            keys=PromptKeys() if first is None else first.keys,
            choice=choice % asked.n,
            probe=False,
            **terms._asdict(),
        )

    async def _start(self, choice: int, request: GenerateRequest) -> None:
        try:
            await self.visit.start(request, partial(self._begun, choice))
            return
        except PdkvError as error:
            problem = Problem.of(error)
        except Exception:
            logger.exception("a generation failed to begin")
            problem = Problem.of(PdkvError("internal error"))
        self._problems[choice] = problem
        self.tell(Answer(self.number, choice, problem))

    def _begun(self, choice: int, generation: "Generation") -> None:
        self.metrics.dispatched()
        self.runs[choice] = Run(self, choice, generation)
        self.tell(Answer(self.number, choice, engine=generation.prefill_engine))

    def stop(self, message: Stop) -> None:
        """End a choice whose text is over."""
        if (run := self.runs.get(message.choice)) is not None and not self.is_over:
            run.stop(message.num_tokens)

    def attach(self, front: Front | None) -> None:
        """Belong to this front from now on."""
        self.front = front
        for run in self.runs.values():
            run.attach(front)

    def again(self) -> None:
        """Send everything anew."""
        for run in self.runs.values():
            for news in run.again():
                self.tell(news)

    def close(self, outcome: str) -> None:
        """End it: "ok", "disconnected" or an error's code. Idempotent."""
        if self.is_over:
            return
        self.is_over = True
        for run in self.runs.values():
            run.attach(None)
            run.generation.abort()
            if run.finish_reason is not None:
                self.metrics.choice_ended(run.finish_reason)
        begun = [(choice, run) for choice, run in self.runs.items() if self._asked and choice % self._asked.n == 0]
        num_prompt = sum(len(self._requests[choice].prompt_token_ids) for choice, _ in begun)
        num_completion = sum(run.num_tokens for run in self.runs.values())
        num_cached = sum(run.generation.num_cached_tokens for _, run in begun)
        self.visit.used(num_prompt + num_completion, num_cached)
        if outcome == "ok" and self._asked is not None:
            self.metrics.served(
                num_prompt_tokens=num_prompt,
                num_cached_tokens=num_cached,
                num_completion_tokens=num_completion,
                n=self._asked.n,
            )
        self.stack.close()
        self.metrics.ended(outcome)
