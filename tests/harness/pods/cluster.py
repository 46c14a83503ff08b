"""A small cluster in one network namespace: pods are processes with addresses of loopback, and DNS is a real server.

It does what kubelet and controllers do to the chart's pods, by the probes, hooks and periods that the chart gives them.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

from dnslib import QTYPE, RR, A, DNSRecord
from dnslib.server import DNSLogger, DNSServer
from hosts.agent import _IFF_RUNNING, _IFF_UP, _MS_BIND, _MS_PRIVATE, _MS_REC, _SIOCSIFFLAGS, _mount, _set_up

from pods import Object, command_of, pods_of, render

DNS, API = "127.0.0.53", "127.0.0.9"
TTL_S = 1
NODE_LOSS_S = 5.0
"""How long a lost node's pods stay in the DNS; 40 seconds in a cluster."""

START_S = 120.0
INSIDE = "PODS_INSIDE"


def enter() -> None:
    """Run this program in a namespace of its own, unless it does already; then set up its loopback and resolver."""
    if INSIDE not in os.environ:
        own = ["unshare", "--user", "--map-root-user", "--net", "--mount", sys.executable, *sys.orig_argv[1:]]
        os.execvpe(own[0], own, os.environ | {INSIDE: "1"})
    import struct

    _set_up("lo", _SIOCSIFFLAGS, struct.pack("h", _IFF_UP | _IFF_RUNNING))
    with tempfile.NamedTemporaryFile("w", suffix=".conf") as file:
        file.write(f"nameserver {DNS}\nsearch serving.svc.cluster.local svc.cluster.local\noptions ndots:5\n")
        file.flush()
        _mount("none", "/", None, _MS_REC | _MS_PRIVATE)
        _mount(file.name, "/etc/resolv.conf", None, _MS_BIND)


class Zone:
    """Answers for headless services: the addresses of their pods that are ready and do not end."""

    def __init__(self) -> None:
        self.addresses: dict[str, set[str]] = {}
        self.num_queries = 0

    def resolve(self, request: DNSRecord, handler: object) -> DNSRecord:
        """The interface of dnslib."""
        self.num_queries += 1
        reply, name = request.reply(), request.q.qname
        found = self.addresses.get(str(name).rstrip("."))
        if found is None:
            reply.header.rcode = 3  # NXDOMAIN
        elif request.q.qtype == QTYPE.A:
            for address in sorted(found):
                reply.add_answer(RR(name, QTYPE.A, rdata=A(address), ttl=TTL_S))
        return reply


class Pod:
    """One pod: its processes, and whether its probes find it ready."""

    def __init__(self, found: Object, name: str, address: str, files: Path, log: Path, around: dict[str, str]) -> None:
        self.name, self.address = name, address
        spec = pods_of(found)
        (container,) = spec["containers"]
        self._leave_s = container["lifecycle"]["preStop"]["sleep"]["seconds"]
        self._grace_s = spec["terminationGracePeriodSeconds"]
        self._probe: Object = container["readinessProbe"]
        argv, environment = command_of(found, name=name, address=address, files=files / name)
        for mount in container["volumeMounts"]:
            folder = files / name / mount["name"]
            if mount["name"] == "cluster":
                folder.parent.mkdir(parents=True, exist_ok=True)
                folder.symlink_to(files / "cluster")
            elif mount["name"] != "shm":
                folder.mkdir(parents=True, exist_ok=True)
        environment["TMPDIR"] = environment["HOME"]
        argv = [word.replace("0.0.0.0", address) for word in argv]  # two routers share this namespace
        with log.open("ab") as output:
            self.process = subprocess.Popen(
                argv,
                env={**around, **environment},
                stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        self.ending = False

    @property
    def has_ended(self) -> bool:
        """Whether its command has."""
        return self.process.poll() is not None

    @property
    def url(self) -> str:
        """Of a router."""
        return f"http://{self.address}:8000"

    @property
    def is_ready(self) -> bool:
        """What its readiness probe says now."""
        probe = self._probe
        if "tcpSocket" in probe:
            with contextlib.suppress(OSError), socket.create_connection((self.address, 7000), 1.0):
                return True
            return False
        with contextlib.suppress(OSError, urllib.error.URLError):
            path = probe["httpGet"]["path"]
            return bool(urllib.request.urlopen(self.url + path, timeout=5).status == 200)
        return False

    def end(self) -> int:
        """What kubelet does to a pod that is deleted; returns its exit status."""
        time.sleep(self._leave_s)
        self.process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.process.wait(self._grace_s - self._leave_s)
        self.kill()
        return -signal.SIGKILL

    def kill(self) -> None:
        """Its node is lost: nothing of it runs any more."""
        for pid in [self.process.pid, *_children(self.process.pid)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()


def _children(pid: int) -> list[int]:
    import psutil

    return [child.pid for child in psutil.Process(pid).children(recursive=True)]


class Cluster:
    """The release "demo", with its values. Use it as a context."""

    def __init__(self, values: Object, folder: Path) -> None:
        self.folder, self.programs = folder, Path(sys.executable).parent
        self._sets = {
            found["metadata"]["labels"]["app.kubernetes.io/component"]: found
            for found in render(values)
            if found["kind"] == "Deployment"
        }
        self.pods: dict[str, list[Pod]] = {name: [] for name in self._sets}
        self.zone = Zone()
        self.statuses: list[int] = []
        self.num_api_calls = 0
        self._count = 0
        self._threads: list[threading.Thread] = []
        self._over = threading.Event()

    def __enter__(self) -> "Cluster":
        (self.folder / "cluster").mkdir()
        key = self.folder / "cluster" / "cluster.key"
        key.touch(mode=0o600)
        key.write_text(os.urandom(32).hex())
        self._servers = [
            DNSServer(self.zone, address=DNS, tcp=tcp, logger=DNSLogger(logf=len)) for tcp in (False, True)
        ]
        for server in self._servers:
            server.start_thread()
        self._api = socket.create_server((API, 443))
        self._begin(self._count_api_calls)
        self._begin(self._watch)
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        with contextlib.suppress(OSError):
            self._api.shutdown(socket.SHUT_RDWR)
        for name in sorted(self.pods, key=lambda name: name != "router"):
            for pod in self.pods[name]:
                pod.kill()
        for thread in self._threads:
            thread.join()
        for server in self._servers:
            server.stop()
        self._api.close()

    def add(self, name: str) -> Pod:
        """Start a pod of a set."""
        self._count += 1
        address = f"127.0.1.{self._count}"
        pod_name = f"demo-pdkv-{name}-5f6d7c8b9d-{self._count:05}"
        around = {"KUBERNETES_SERVICE_HOST": API, "KUBERNETES_SERVICE_PORT": "443"}
        around["PATH"] = f"{self.programs}:{os.environ['PATH']}"
        log = self.folder / f"{name}.log"
        pod = Pod(self._sets[name], pod_name, address, self.folder, log, around)
        self.pods[name].append(pod)
        return pod

    def wait_ready(self, *pods: Pod) -> None:
        """Return when all are."""
        for pod in pods:
            until(lambda pod=pod: pod.is_ready or pod.has_ended, f"{pod.name} is ready", START_S)  # type: ignore[misc]
            assert not pod.has_ended, f"{pod.name} has ended with status {pod.process.returncode}"

    def delete(self, name: str, pod: Pod) -> threading.Thread:
        """It leaves the DNS, and ends meanwhile."""
        pod.ending = True
        self.pods[name].remove(pod)
        return self._begin(lambda: self.statuses.append(pod.end()))

    def replace_all(self, name: str) -> None:
        """A rollout with maxUnavailable 1 and maxSurge 0: pods are replaced one after the other."""
        for pod in list(self.pods[name]):
            ending = self.delete(name, pod)
            self.wait_ready(self.add(name))
            ending.join()

    def replace_router(self, move: Callable[[str], None]) -> None:
        """A rollout with maxSurge 1. `move` sends clients to another address, as the Service does."""
        (old,) = self.pods["router"]
        new = self.add("router")
        self.wait_ready(new)
        move(new.url)
        self.delete("router", old).join()

    def lose_node_of(self, name: str) -> None:
        """The node of one pod is gone; later its pod leaves the DNS and another one is started elsewhere."""
        pod = self.pods[name][0]
        pod.kill()
        time.sleep(NODE_LOSS_S)
        self.pods[name].remove(pod)
        self.wait_ready(self.add(name))

    def _begin(self, target: Callable[[], object]) -> threading.Thread:
        self._threads.append(threading.Thread(target=target))
        self._threads[-1].start()
        return self._threads[-1]

    def _watch(self) -> None:
        """Endpoints: the ready pods of each set. A pod that was lost stays until its node is given up."""
        seen: dict[str, bool] = {}
        while not self._over.wait(0.5):
            for name, pods in self.pods.items():
                for pod in list(pods):
                    seen[pod.name] = pod.is_ready or (seen.get(pod.name, False) and pod.has_ended)
                host = f"demo-pdkv-{name}.serving.svc.cluster.local"
                self.zone.addresses[host] = {pod.address for pod in list(pods) if seen.get(pod.name)}

    def _count_api_calls(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._api.accept()
                self.num_api_calls += 1
                connection.close()


def until(check: Callable[[], bool], what: str, bound_s: float) -> None:
    """Ask again and again until it is so."""
    deadline = time.monotonic() + bound_s
    while not check():
        assert time.monotonic() < deadline, f"not within {bound_s:.0f} s: {what}"
        time.sleep(0.2)
