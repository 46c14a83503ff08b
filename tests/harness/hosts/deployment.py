"""A deployment of two hosts: `pd launch` with a prefill engine on the first, `pd engine` to decode on the second."""

import contextlib
import secrets
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from deployments import Running

from hosts.machine import Host, Hosts

CONTROL_PORT = 7000


def write_cluster_key(path: Path) -> Path:
    """A new cluster key in a file that only its owner can read."""
    path.touch(mode=0o600)
    path.write_text(secrets.token_hex(32))
    return path


@contextlib.contextmanager
def deployed_between(
    hosts: Hosts,
    model: Path,
    *flags: str,
    connector: Sequence[str],
    prefill: Sequence[str] = (),
    decode: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> Iterator[tuple[Running, Running]]:
    """The launch, reachable from here, and the engine.

    `flags` and `connector` are options of both; "{host}" in the latter is the address of either.

    At the end both are stopped, and nothing of them is left.
    """
    directory = Path(tempfile.mkdtemp(prefix="two-"))
    key = write_cluster_key(directory / "cluster.key")
    running: list[Running] = []

    def start(host: Host, command: str, *own: str) -> Running:
        (place := directory / command).mkdir()
        common = ["--model", str(model), "--cluster-key-file", str(key), "--kv-cache-memory", "16MiB", "--threads", "1"]
        common += ["--check-finite", "--in-turn-below-s", "0", *flags]
        common += [flag.format(host=host.address) for flag in connector]
        running.append(Running([*own, *common], dict(environment or {}), place, command=command, enter=host.command))
        return running[-1]

    endpoint = f"tcp://{hosts.second.address}:{CONTROL_PORT}"
    try:
        engine = start(hosts.second, "engine", "--name", "decode-b", "--role", "decode", "--listen", endpoint, *decode)
        launch = start(
            hosts.first, "launch", "--prefill", "1", "--decode", "0", "--local-turns", "never",
            "--remote-engines", f"decode-b={endpoint}",
            "--probe-interval-s", "0", *prefill,
        )  # fmt: skip
        launch.wait_ready()
        launch.url = hosts.first.router_url
        yield launch, engine
        for deployment in (launch, engine):
            if not deployment.stopped:
                assert deployment.stop() == 0, deployment.log
    finally:
        for deployment in running:
            deployment.discard()
        shutil.rmtree(directory, ignore_errors=True)
