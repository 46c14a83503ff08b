"""Requests that never stop, half of them streamed, while something is done to a deployment."""

import asyncio
import contextlib
import threading
import uuid
from collections.abc import Iterator, Sequence

from deployments import Running
from traffic import Answer, Ask, client_of, send

PROMPTS = tuple(f"{number} What many prompts begin with, some blocks long." for number in range(8))


PAUSE_S = 0.05
"""Of a client between two requests: what is done meanwhile needs the processors, too."""


class SteadyLoad:
    """So many clients on a thread of their own, each with one request at a time.

    `fresh`: no request finds the KV of another one, so that each one's travels.
    """

    def __init__(self, deployment: Running, *, num_clients: int, max_tokens: int, fresh: bool = False) -> None:
        self.answers: list[tuple[Ask, Answer]] = []
        self._deployment = deployment
        self._num_clients = num_clients
        self._max_tokens = max_tokens
        self._fresh = fresh
        self._enough = threading.Event()
        self._progress = threading.Condition()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run)

    def start(self) -> None:
        """Return when every client has had an answer."""
        self._thread.start()
        self.wait_for_answers(self._num_clients)

    def wait_for_answers(self, count: int) -> None:
        """Return when so many more have come."""
        with self._progress:
            wanted = len(self.answers) + count
            assert self._progress.wait_for(lambda: len(self.answers) >= wanted or self._error is not None, 60)

    def stop(self) -> None:
        """Each client ends with the answer that it waits for."""
        self._enough.set()
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            asyncio.run(self._send_all())
        except BaseException as error:
            self._error = error
        finally:
            with self._progress:
                self._progress.notify_all()

    async def _send_all(self) -> None:
        async with client_of(self._deployment) as client:

            async def one(number: int) -> None:
                turn = number
                while not self._enough.is_set():
                    salt = {"cache_salt": uuid.uuid4().hex} if self._fresh else {}
                    ask = Ask(PROMPTS[turn % len(PROMPTS)], self._max_tokens, stream=turn % 2 == 0, fields=salt)
                    answer = await send(client, ask)
                    with self._progress:
                        self.answers.append((ask, answer))
                        self._progress.notify_all()
                    turn += 1
                    await asyncio.sleep(PAUSE_S)

            await asyncio.gather(*map(one, range(self._num_clients)))


@contextlib.contextmanager
def steady_load(
    deployment: Running, *, num_clients: int = 6, max_tokens: int = 24, fresh: bool = False
) -> Iterator[SteadyLoad]:
    """Load for the block; behind it every answer must be whole, and the same for the same prompt."""
    load = SteadyLoad(deployment, num_clients=num_clients, max_tokens=max_tokens, fresh=fresh)
    load.start()
    try:
        yield load
    finally:
        load.stop()
    check_whole(load.answers, max_tokens)


def check_whole(answers: Sequence[tuple[Ask, Answer]], max_tokens: int) -> None:
    """Nothing was lost, nothing repeated."""
    failed = [answer for _, answer in answers if answer.token_ids is None]
    assert not failed, f"{len(failed)} of {len(answers)} failed: {failed[:3]}"
    expected: dict[object, list[int]] = {}
    for ask, answer in answers:
        assert answer.token_ids is not None
        assert len(answer.token_ids) == max_tokens
        assert answer.token_ids == expected.setdefault(ask.prompt, answer.token_ids)
