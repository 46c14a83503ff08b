"""Sends a load to a server: each session when it is due, its turns one after the other."""

import asyncio
import json
import random
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import uvloop

from pdkv.base.clock import MONOTONIC, Clock
from pdkv.bench.client import Client, Reply
from pdkv.bench.report import Run, Sent
from pdkv.bench.workload import Prompt, Session, Turn, arrivals

T = TypeVar("T")

PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}


class Target(NamedTuple):
    """The server and how it is asked."""

    url: str
    model: str
    endpoint: str = "completions"  # or "chat"
    headers: Mapping[str, str] = {}
    extra: Mapping[str, Any] = {}  # fields of each body
    ignore_eos: bool = True
    timeout_s: float = 600.0  # of one request
    keep_text: bool = False  # of answers, also where no later turn needs them


class Pace(NamedTuple):
    """When requests are sent."""

    rate: float = float("inf")  # sessions a second
    burstiness: float = 1.0
    speed: float = 0.0  # of a trace's own times; 0: by rate
    max_concurrency: int = 0  # sessions at a time; 0: no bound
    seed: int = 0


def run_loop(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on uvloop."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main)


async def send(
    target: Target, sessions: Sequence[Session], pace: Pace, progress: Callable[[Sent], None] = lambda sent: None
) -> Run:
    """Send all sessions, and wait for all answers. A failed request ends its session.

    Raises:
        ConfigError: the URL is none, or a trace without times was to be followed.
    """
    with Client(target.url, target.headers) as client:

        async def ask(ahead: "Conversation", turn: Turn, reply: Reply) -> None:
            await _ask(client, target, ahead.body(target, turn), reply)

        cpu = time.process_time()
        run = await send_by(ask, sessions, pace, progress, endpoint=target.endpoint, keep_text=target.keep_text)
        return run._replace(cpu_s=time.process_time() - cpu)


Ask = Callable[["Conversation", Turn, Reply], Awaitable[None]]
"""Has one turn of a conversation answered; returns when the reply is complete, or says why there is none."""


async def send_by(
    ask: Ask,
    sessions: Sequence[Session],
    pace: Pace,
    progress: Callable[[Sent], None],
    *,
    endpoint: str = "completions",
    keep_text: bool = False,
    clock: Clock = MONOTONIC,
) -> Run:
    """Ask all turns of all sessions, each when it is due by the clock; returns when all are answered.

    Raises:
        ConfigError: a trace without times was to be followed.
    """
    due = list(
        arrivals(sessions, random.Random(pace.seed), rate=pace.rate, burstiness=pace.burstiness, speed=pace.speed)
    )
    gate = asyncio.Semaphore(pace.max_concurrency or len(sessions))
    due_alone = not pace.max_concurrency and (pace.rate < float("inf") or bool(pace.speed))
    found: list[Sent] = []
    start = clock.now()

    async def one(number: int, session: Session, at_s: float) -> None:
        async with gate:
            is_talk = any(not turn.is_whole for turn in session.turns[1:])
            ahead = Conversation(endpoint, is_talk=is_talk)
            for index, turn in enumerate(session.turns):
                if turn.is_whole:
                    ahead = Conversation(endpoint, is_talk=False)
                ahead.ask(turn.prompt)
                reply = Reply(keep_text=is_talk or keep_text)
                await ask(ahead, turn, reply)
                late_s = max(reply.sent - start - at_s, 0.0) if reply.sent and not index and due_alone else 0.0
                sent = Sent(number, index, reply.sent - start - late_s, late_s, reply, turn.max_tokens)
                found.append(sent)
                progress(sent)
                if not reply.ok:
                    return
                ahead.answer(reply)
                if index + 1 < len(session.turns) and (pause_s := session.turns[index + 1].pause_s):
                    await clock.pause(pause_s / (pace.speed or 1.0))

    async with asyncio.TaskGroup() as group:
        for number, (session, at_s) in enumerate(zip(sessions, due, strict=True)):
            if (left := at_s - (clock.now() - start)) > 0:
                await clock.pause(left)
            group.create_task(one(number, session, at_s))
    ends = [sent.reply.stamps[-1] for sent in found if sent.reply.stamps]
    num_unsent = sum(len(session.turns) for session in sessions) - len(found)
    return Run(found, max(ends, default=clock.now()) - start, 0.0, num_unsent)


async def _ask(client: Client, target: Target, body: bytes, reply: Reply) -> None:
    try:
        async with asyncio.timeout(target.timeout_s):
            await client.stream(PATHS[target.endpoint], body, reply)
    except TimeoutError:
        reply.error = f"no end within {target.timeout_s:g} s (--timeout)"


class Conversation:
    """What a session has said so far, in the form that its endpoint takes."""

    def __init__(self, endpoint: str, *, is_talk: bool) -> None:
        """`is_talk`: there will be further turns, whose prompts hold the answers before them."""
        self._is_chat = endpoint == "chat"
        self._is_talk = is_talk
        self._messages: list[dict[str, str]] = []
        self._prompt: Prompt = ""

    @property
    def token_ids(self) -> list[int]:
        """The prompt of its next request, if it consists of token ids."""
        assert isinstance(self._prompt, list)
        return self._prompt

    def ask(self, prompt: Prompt) -> None:
        """Add the user's next text or token ids."""
        if self._is_chat:
            self._messages.append({"role": "user", "content": str(prompt)})
        elif not self._prompt:
            self._prompt = prompt
        elif isinstance(self._prompt, list) and isinstance(prompt, list):
            self._prompt = self._prompt + prompt
        else:
            self._prompt = f"{self._prompt} {prompt}"

    def answer(self, reply: Reply) -> None:
        """Add the answer; one whose token ids the server does not send is absent from a prompt of token ids."""
        if self._is_chat:
            self._messages.append({"role": "assistant", "content": "".join(reply.text)})
        elif isinstance(self._prompt, list):
            self._prompt = self._prompt + reply.token_ids
        else:
            self._prompt += "".join(reply.text)

    def body(self, target: Target, turn: Turn) -> bytes:
        """The request's body: greedy, streamed, with a usage at its end."""
        asked: dict[str, Any] = {"messages": self._messages} if self._is_chat else {"prompt": self._prompt}
        return json.dumps({
            "model": target.model, **asked, "max_tokens": turn.max_tokens, "temperature": 0.0, "stream": True,
            "stream_options": {"include_usage": True},
            **({"ignore_eos": True} if target.ignore_eos else {}),
            **({"return_token_ids": True} if self._is_talk and isinstance(self._prompt, list) else {}),
            **({"priority": turn.priority} if turn.priority else {}),
            **target.extra,
        }).encode()  # fmt: skip
