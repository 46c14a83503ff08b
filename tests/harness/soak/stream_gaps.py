"""Reads streams one after the other on each of some connections, in a process of its own, until its input ends; then
prints a JSON line of the gaps between their events.

python -m soak.stream_gaps HOST PORT NUM_STREAMS
"""

import asyncio
import json
import sys
import time

_MAX_TOKENS = 200
_BOUND_S = 60.0


class Gaps:
    """What all streams saw."""

    def __init__(self) -> None:
        self.gaps_ms: list[float] = []
        self.num_streams = 0
        self.failed: list[str] = []

    async def read(self, host: str, port: int, number: int) -> None:
        """Stream after stream."""
        while True:
            try:
                async with asyncio.timeout(_BOUND_S):
                    await self._read_one(host, port, [5 + number, 6, 7, 8 + self.num_streams % 50])
            except (OSError, TimeoutError) as error:
                self.failed.append(f"{type(error).__name__}: {error}")
            self.num_streams += 1

    async def _read_one(self, host: str, port: int, prompt: list[int]) -> None:
        reader, writer = await asyncio.open_connection(host, port)
        body = {"prompt": prompt, "max_tokens": _MAX_TOKENS, "temperature": 0, "ignore_eos": True, "stream": True}
        data = json.dumps(body).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nhost: soak\r\nconnection: close\r\ncontent-length: {len(data)}\r\n\r\n"
        )
        writer.write(head.encode() + data)
        try:
            last, tail = 0.0, b""
            while piece := await reader.read(65536):
                now = time.perf_counter()
                if b"data: {" in tail[-6:] + piece:
                    if last:
                        self.gaps_ms.append(1e3 * (now - last))
                    last = now
                tail = (tail + piece)[-100:]
            if b"data: [DONE]" not in tail:
                self.failed.append(f"a stream ended with {tail!r}")
        finally:
            writer.close()

    def summary(self) -> dict[str, object]:
        """JSON-ready."""
        gaps = sorted(self.gaps_ms)
        return {
            "num_streams": self.num_streams,
            "num_gaps": len(gaps),
            "median_ms": round(gaps[len(gaps) // 2], 2),
            "p99_ms": round(gaps[len(gaps) * 99 // 100], 2),
            "worst_ms": round(gaps[-1], 2),
            "failed": self.failed[:10],
        }


async def _main(host: str, port: int, num_streams: int) -> None:
    gaps = Gaps()
    tasks = [asyncio.create_task(gaps.read(host, port, number)) for number in range(num_streams)]
    await asyncio.to_thread(sys.stdin.read)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    print(json.dumps(gaps.summary()))


if __name__ == "__main__":
    asyncio.run(_main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
