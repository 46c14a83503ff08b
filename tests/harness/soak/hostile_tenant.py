"""A tenant with a key that means no good, in a process of its own, until its input ends; prints a JSON line of what it
did and saw.

python -m soak.hostile_tenant HOST PORT KEY [MEANS…]

Each means named, or of `MEANS`, is used again and again, all of them beside each other.
"""

import asyncio
import contextlib
import json
import os
import random
import socket
import struct
import sys
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import httpx

from soak.hostile_shapes import hostile_shapes

_BOUND_S = 120.0
_PATH = "/v1/completions"
_RESET = struct.pack("ii", 1, 0)
"""SO_LINGER: closing resets the connection."""


def stalling_grammar(rng: random.Random, count: int) -> str:
    """Cheap to compile, and ambiguous in 2^count ways behind its first 300 letters, which no trial gets past."""
    letters = "".join(rng.choices("jkqvxz", k=6))
    rules = [f'r{i} ::= r{i + 1} r{i + 1} | "b"' for i in range(count)]
    return "\n".join([f'root ::= "{letters * 50}" r0', *rules, f'r{count} ::= "a"?'])


class Hostile:
    """Counts what came of each means."""

    def __init__(self, host: str, port: int, key: str) -> None:
        self._address = (host, port)
        self._authorization = {"authorization": f"Bearer {key}"}
        limits = httpx.Limits(max_connections=None)
        self.client = httpx.AsyncClient(
            base_url=f"http://{host}:{port}", headers=self._authorization, timeout=_BOUND_S, limits=limits
        )
        self.counts: Counter[str] = Counter()
        self.used: set[str] = set()  # names of means
        self._rng = random.Random(0)

    async def post(self, what: str, body: Any, **headers: str) -> None:
        """One completion; `body` may be text that is no JSON."""
        content = body if isinstance(body, str | bytes) else json.dumps({"prompt": [5, 6, 7], **body})
        reply = await self.client.post(_PATH, content=content, headers={"content-type": "application/json", **headers})
        self.counts[f"{what}: {reply.status_code}"] += 1

    async def stalls(self) -> None:
        """One grammar that takes seconds to match, sent again when it was refused."""
        grammar = stalling_grammar(self._rng, self._rng.choice((60, 150, 240)))
        for _ in range(3):
            await self.post("stalling grammar", {"max_tokens": 400, "structured_outputs": {"grammar": grammar}})

    async def many_grammars(self) -> None:
        """60 new grammars of 23 kB at once."""
        seed = self._rng.randrange(1 << 30)
        texts = [[f"{seed}-{number}-{i}-" + "x" * 12 for i in range(900)] for number in range(60)]
        bodies = [{"max_tokens": 2, "structured_outputs": {"choice": choice}} for choice in texts]
        await asyncio.gather(*(self.post("many grammars", body) for body in bodies))

    async def refused_schemas(self) -> None:
        """300 schemas that take long to be refused."""
        name = f"d{self._rng.randrange(1 << 30)}"
        wide = [{"$ref": f"#/$defs/{name}"}] * 900
        schema = {"anyOf": wide, "$defs": {name: {"anyOf": [{"enum": [i]} for i in range(60)]}}}
        body = {"max_tokens": 2, "structured_outputs": {"json": schema}}
        await asyncio.gather(*(self.post("refused schemas", body) for _ in range(300)))

    async def shapes(self) -> None:
        """Every kind of a hostile shape."""
        for shape in hostile_shapes(20, self._rng.randrange(1 << 30)):
            await self.post(f"shape {shape.kind}", {"max_tokens": 32, **shape.fields})

    async def big_answers(self) -> None:
        """As much of an answer as a small request can ask for, held until its end."""
        body = {"prompt": [[5, i] for i in range(8)], "n": 128, "max_tokens": 100, "logprobs": 20, "ignore_eos": True}
        await self.post("big answers", body)

    async def slow_reader(self) -> None:
        """A large answer, read at some hundred bytes a second."""
        body = {"prompt": [5, 6], "n": 16, "max_tokens": 200, "logprobs": 20, "ignore_eos": True}
        async with self._connection(_PATH, body, window=4096) as connection:
            with contextlib.suppress(OSError):
                while await asyncio.get_running_loop().sock_recv(connection, 1024):
                    await asyncio.sleep(5.0)
            self.counts["slow readers that were ended"] += 1

    async def early_answers(self) -> None:
        """POSTs that are answered before their body is read, and honest ones behind them on the connection."""
        async with self._connection("/nowhere", {"x": "y" * 30_000}) as connection:
            await asyncio.get_running_loop().sock_recv(connection, 65536)
            self.counts["early answers"] += 1

    async def pipelines_and_leaves(self) -> None:
        """Sixteen long streams on one connection, which is closed at once."""
        body = {"prompt": [5, 6], "max_tokens": 200, "ignore_eos": True, "stream": True}
        async with self._connection(_PATH, body, repeat=16):
            self.counts["pipelines that were left"] += 1

    async def short_deadlines(self) -> None:
        """Deadlines that pass at once, and those that pass while tokens come."""
        bodies = [("0.001", {"max_tokens": 8}), ("5", {"max_tokens": 480, "n": 16, "ignore_eos": True})]
        for seconds, body in bodies:
            await self.post(f"deadline {seconds} s", body, **{"x-pd-timeout-s": seconds})

    async def runs_into_debt(self) -> None:
        """32 long answers at once, far beyond the key's tokens."""
        body = {"max_tokens": 400, "ignore_eos": True}
        await asyncio.gather(*(self.post("long answers", body) for _ in range(32)))

    async def urgent(self) -> None:
        """The most urgent priority that it may have, and one that it may not, with prompts as long as there are."""
        for priority in (0, -5):
            prompt = [3 + self._rng.randrange(250) for _ in range(450)]
            await self.post(f"priority {priority}", {"prompt": prompt, "n": 8, "max_tokens": 16, "priority": priority})

    async def large_bodies(self) -> None:
        """Bodies beyond every bound, and JSON of a great depth."""
        await self.post("large body", b'{"prompt": "' + b"x" * (30 << 20) + b'"}')
        await self.post("deep body", '{"prompt": ' + "[" * 50_000 + "]" * 50_000 + "}")

    # --- its own, beyond what was found before ----------------------------------------------------------------

    async def resets(self) -> None:
        """Streams that are reset after their request was sent: each is planned, and given up."""
        for number in range(50):
            body = {"prompt": [3 + number, 7], "max_tokens": 200, "ignore_eos": True, "stream": True}
            async with self._connection(_PATH, body) as connection:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            self.counts["streams that were reset"] += 1

    async def evicts(self) -> None:
        """Prompts as long as there are, each under a salt of its own: no cache keeps anything else."""
        for _ in range(4):
            salt = str(self._rng.random())
            prompt = [3 + self._rng.randrange(250) for _ in range(480)]
            await self.post("evicting prompts", {"prompt": prompt, "max_tokens": 1, "cache_salt": salt})

    async def penalties(self) -> None:
        """Sampling that costs as much as sampling can, over many choices."""
        body = {
            "n": 16, "max_tokens": 64, "temperature": 1.5, "top_k": 200, "top_p": 0.99, "min_p": 1e-6,
            "ignore_eos": True, "repetition_penalty": 1.3, "frequency_penalty": 1.0, "presence_penalty": 1.0,
            "logprobs": 20, "logit_bias": {str(i): 0.1 for i in range(3, 250)},
        }  # fmt: skip
        await self.post("costly sampling", body)

    @contextlib.asynccontextmanager
    async def _connection(self, path: str, body: object, *, repeat: int = 1, window: int = 0) -> Any:
        """A connection to which the request was sent so many times."""
        data = json.dumps(body).encode()
        key = self._authorization["authorization"]
        head = f"POST {path} HTTP/1.1\r\nhost: soak\r\nauthorization: {key}\r\ncontent-length: {len(data)}\r\n\r\n"
        with socket.socket() as connection:
            if window:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, window)
            connection.setblocking(False)
            await asyncio.get_running_loop().sock_connect(connection, self._address)
            await asyncio.get_running_loop().sock_sendall(connection, (head.encode() + data) * repeat)
            yield connection

    async def repeat(self, means: Callable[[], Awaitable[None]], pause_s: float) -> None:
        """Use one means again and again."""
        while True:
            self.used.add(means.__name__)
            try:
                async with asyncio.timeout(_BOUND_S):
                    await means()
            except (OSError, httpx.HTTPError, TimeoutError) as error:
                self.counts[f"{means.__name__}: {type(error).__name__}"] += 1
            await asyncio.sleep(pause_s)


MEANS: dict[str, float] = {
    "stalls": 5.0,
    "many_grammars": 10.0,
    "refused_schemas": 15.0,
    "shapes": 2.0,
    "big_answers": 20.0,
    "slow_reader": 1.0,
    "early_answers": 0.5,
    "pipelines_and_leaves": 2.0,
    "short_deadlines": 2.0,
    "runs_into_debt": 10.0,
    "urgent": 3.0,
    "large_bodies": 10.0,
    "resets": 2.0,
    "evicts": 2.0,
    "penalties": 5.0,
}
"""Each with the seconds before it is used again."""


async def _main(host: str, port: int, key: str, *names: str) -> None:
    tenant = Hostile(host, port, key)
    tasks = [asyncio.create_task(tenant.repeat(getattr(tenant, name), MEANS[name])) for name in names or MEANS]
    await asyncio.to_thread(sys.stdin.read)
    broken = [repr(task.exception()) for task in tasks if task.done() and not task.cancelled()]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await tenant.client.aclose()
    print(json.dumps({"counts": tenant.counts, "used": sorted(tenant.used), "broken": broken[:10]}))


if __name__ == "__main__":
    os.nice(10)  # real clients have machines of their own
    asyncio.run(_main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:]))
