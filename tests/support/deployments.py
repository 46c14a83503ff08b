"""Real deployments: `pd launch` in a process of its own, and the check that it leaves nothing behind."""

import contextlib
import os
import shutil
import ssl
import tempfile
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import psutil
import tokenizers

from pdkv.testing.deployment import Deployment

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


class Running(Deployment):
    """With what tests ask of it."""

    @property
    def run_dir(self) -> Path:
        """The running launch's directory."""
        (path,) = self.directory.glob(f"pdkv-{self.process.pid}-*")
        return path

    def get(self, path: str, *, fresh: bool = True) -> httpx.Response:
        """GET a path of the router. `fresh`: of engines, what they say now, which is awaited for two seconds."""
        query = "?fresh=true" if fresh and path in ("/metrics", "/topology") else ""
        return httpx.get(self.url + path + query, timeout=30, verify=NO_AUTHORITIES)

    def complete(self, prompt: str | list[int], headers: dict[str, str] | None = None, **fields: Any) -> httpx.Response:
        """POST /v1/completions, greedy."""
        body = {"model": "served", "prompt": prompt, "temperature": 0, **fields}
        url = self.url + "/v1/completions"
        return httpx.post(url, json=body, headers=headers, timeout=60, verify=NO_AUTHORITIES)

    def pids(self) -> dict[str, int]:
        """Engine pids by name, from /topology."""
        return {engine["name"]: engine["pid"] for engine in self.get("/topology").json()["engines"]}

    def survivors(self) -> list[psutil.Process]:
        """Processes that descend from this launch."""
        return [psutil.Process(pid) for pid in self.pids_left()]

    def child_pid(self, name: str) -> int:
        """The pid of a child of the launcher by its process name, such as "pd router"."""
        (child,) = [c for c in psutil.Process(self.process.pid).children() if c.name() == name[:15]]
        return child.pid


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
        *flags: str, wait: bool = True, environment: dict[str, str] | None = None, engine: Sequence[str] | None = None
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
        common = defaults[:2] if "--backend" in flags else defaults  # others' servers take no options of engines
        deployment = Running([*common, *own, *flags], environment or {}, directory)
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
