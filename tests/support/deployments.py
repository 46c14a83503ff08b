"""Real deployments: `pd launch` in a process of its own, and the check that it leaves nothing behind."""

import contextlib
import os
import queue
import re
import shutil
import signal
import ssl
import subprocess
import sys
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import psutil
import tokenizers

START_BOUND_S = 180.0
STOP_BOUND_S = 10.0  # twice what is promised: the machine may be busy with other tests
MARK = "LAUNCH_TEST_ID"
CHAT_TEMPLATE = (
    "{% for message in messages %}[{{ message['role'] }}]{{ message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)

NO_AUTHORITIES = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""For clients that speak no TLS: without it each one reads all certificate authorities, which takes 25 ms."""

Launch = Callable[..., "Running"]


def write_tokenizer(path: Path) -> None:
    """A byte-level tokenizer of 258 tokens: bytes, BOS (0) and EOS (1); every text has as many tokens as bytes."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate(["<s>", "</s>", *alphabet])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "chat_template.jinja").write_text(CHAT_TEMPLATE)


def link_text_model(model_dir: Path, path: Path) -> Path:
    """`path`, an empty folder, with links to the model's files and a tokenizer beside them."""
    for file in model_dir.iterdir():
        (path / file.name).symlink_to(file)
    write_tokenizer(path)
    return path


class Running:
    """A `pd launch` process, or a `pd engine`. Lines of its stderr can be waited for."""

    def __init__(
        self,
        arguments: list[str],
        environment: dict[str, str],
        directory: Path,
        *,
        command: str = "launch",
        enter: Callable[..., list[str]] = lambda *arguments: [*arguments],
    ) -> None:
        """`enter` makes of a command line one that runs elsewhere."""
        self.directory = directory  # its TMPDIR
        self.mark = uuid.uuid4().hex
        self.lines: list[str] = []
        self.stopped = False
        self.elsewhere: list[Running] = []  # engines that were started by themselves
        self.listen: tuple[str, int] | None = None  # such an engine's address
        self._new_lines: queue.Queue[str | None] = queue.Queue()
        self._shared_files = shared_memory_files()
        self.process = subprocess.Popen(
            enter(sys.executable, "-P", "-m", "pdkv.cli", command, *arguments),
            env={**os.environ, "TMPDIR": str(directory), MARK: self.mark, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._reader = threading.Thread(target=self._read_stderr)
        self._reader.start()

    def _read_stderr(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line.rstrip("\n"))
            self._new_lines.put(line.rstrip("\n"))
        self._new_lines.put(None)

    @property
    def log(self) -> str:
        """Its stderr so far."""
        return "\n".join(self.lines)

    def wait_for_line(self, pattern: str, timeout_s: float = START_BOUND_S) -> re.Match[str]:
        """The next line of stderr, behind those already waited for, that has the pattern."""
        while (line := self._new_lines.get(timeout=timeout_s)) is not None:
            if match := re.search(pattern, line):
                return match
        raise AssertionError(f"no line with {pattern!r} before the end of:\n{self.log}")

    def wait_ready(self) -> str:
        """The ready line; its URL becomes `url`."""
        assert self.process.stdout is not None
        watchdog = threading.Timer(START_BOUND_S, self.process.kill)
        watchdog.start()
        line = self.process.stdout.readline().rstrip("\n")
        watchdog.cancel()
        assert line.startswith("ready: "), f"{line!r} instead of a ready line:\n{self.log}"
        self.url = line.split()[1]
        return line

    def get(self, path: str) -> httpx.Response:
        """GET a path of the router; of engines, what they say now."""
        fresh = "?fresh=true" if path in ("/metrics", "/topology") else ""
        return httpx.get(self.url + path + fresh, timeout=30, verify=NO_AUTHORITIES)

    def complete(self, prompt: str | list[int], headers: dict[str, str] | None = None, **fields: Any) -> httpx.Response:
        """POST /v1/completions, greedy."""
        body = {"model": "served", "prompt": prompt, "temperature": 0, **fields}
        url = self.url + "/v1/completions"
        return httpx.post(url, json=body, headers=headers, timeout=60, verify=NO_AUTHORITIES)

    def pids(self) -> dict[str, int]:
        """Engine pids by name, from /topology."""
        return {engine["name"]: engine["pid"] for engine in self.get("/topology").json()["engines"]}

    def child_pid(self, name: str) -> int:
        """The pid of a child of the launcher by its process name, such as "pd router"."""
        (child,) = [c for c in psutil.Process(self.process.pid).children() if c.name() == name[:15]]
        return child.pid

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Send a signal, wait, and check that nothing is left but what a kill -9 may leave. Returns the exit code."""
        self.process.send_signal(number)
        return self.finish(killed=number == signal.SIGKILL, bound_s=STOP_BOUND_S)

    def finish(self, *, killed: bool = False, bound_s: float = START_BOUND_S) -> int:
        """Wait for the end and check that nothing is left. A start that fails may take as long as one that does not."""
        self.stopped = True
        try:
            code = self.process.wait(timeout=bound_s)
        except subprocess.TimeoutExpired:
            self.kill_all()
            raise AssertionError(f"still running after {bound_s} s:\n{self.log}") from None
        rest = self.survivors()
        if killed or "a child process did not end within" in self.log:  # those see by themselves that they are alone
            psutil.wait_procs(rest, timeout=STOP_BOUND_S)
            rest = self.survivors()
        names = [f"{process.pid} {process.name()}" for process in rest]
        self.discard()
        assert not names, f"left behind: {names}\n{self.log}"
        if not killed:
            left = [path.name for path in self.directory.iterdir() if not _is_of_running_launch(path)]
            assert not left, f"left behind: {left}\n{self.log}"
        assert not shared_memory_files() - self._shared_files, "left behind in /dev/shm"
        return code

    def survivors(self) -> list[psutil.Process]:
        """Processes that descend from this launch: they carry its mark in their environment."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                if process.environ().get(MARK) == self.mark:
                    found.append(process)
        return found

    def discard(self) -> None:
        """End what a failed test left, and close the pipes: they would warn in another test. Idempotent."""
        self.kill_all()
        self.process.wait(timeout=STOP_BOUND_S)
        self._reader.join()
        for pipe in (self.process.stdout, self.process.stderr):
            assert pipe is not None
            pipe.close()

    def kill_all(self) -> None:
        """Kill every process of the launch."""
        for process in self.survivors():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


def shared_memory_files() -> set[str]:
    """Named files of this project in shared memory, anybody's."""
    return {name for name in os.listdir("/dev/shm") if "pdkv" in name}


def _is_of_running_launch(path: Path) -> bool:
    """Whether it is the run directory of another deployment that still runs."""
    match = re.match(r"pdkv-(\d+)-", path.name)
    return match is not None and psutil.pid_exists(int(match[1]))


@contextlib.contextmanager
def launches(model: Path) -> Iterator[Launch]:
    """A factory of deployments; those still running at the end are stopped and checked."""
    directory = Path(tempfile.mkdtemp(prefix="e2e-"))  # short: unix sockets lie below it
    keys = Path(tempfile.mkdtemp(prefix="e2e-keys-"))
    running: list[Running] = []
    defaults = ["--model", str(model), "--kv-cache-memory", "8MiB", "--threads", "1"]
    defaults.append("--check-finite")  # no test's model computes NaN, unless it is about that
    defaults += ["--in-turn-below-s", "0"]  # however short their steps are, they are planned ahead

    def launch(
        *flags: str,
        wait: bool = True,
        environment: dict[str, str] | None = None,
        engine: Sequence[str] | None = None,
    ) -> Running:
        """Start `pd launch` on a free port with small engines; further flags override these.

        `engine`: flags of a `pd engine` decode-b, which it finds by TCP.
        """
        own = ["--port", "0"]
        own += ["--probe-interval-s", "0", "--local-turns", "never"]  # the books of engines are compared
        address = ("127.{}.{}.{}".format(*(64 + os.getpid()).to_bytes(3)), 7000 + 2 * len(running))
        if engine is not None:
            (key := keys / f"{len(running)}.key").touch(mode=0o600)
            key.write_text(uuid.uuid4().hex)
            endpoint, shared = "tcp://{}:{}".format(*address), ["--cluster-key-file", str(key)]
            own += ["--remote-engines", f"decode-b={endpoint}", *shared]
        deployment = Running([*defaults, *own, *flags], environment or {}, directory)
        running.append(deployment)
        if engine is not None:
            named = ["--name", "decode-b", "--role", "decode", "--listen", endpoint, *shared]
            joined = Running([*defaults, *named, *engine], environment or {}, directory, command="engine")
            running.append(joined)
            deployment.elsewhere, joined.listen = [joined], address
        if wait:
            deployment.wait_ready()
        return deployment

    try:
        yield launch
        for deployment in running:
            if not deployment.stopped:
                assert deployment.stop() == 0, deployment.log
    finally:
        for deployment in running:
            deployment.discard()
        for folder in (directory, keys):
            shutil.rmtree(folder, ignore_errors=True)
