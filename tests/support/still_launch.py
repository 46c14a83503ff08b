"""A launch whose engines are never started, and what stands for its router: tests of who commands it."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

from pdkv.config import EngineConfig, HandoffConfig
from pdkv.errors import StartupError
from pdkv.launch.config import Deployment, LaunchConfig
from pdkv.launch.fleet_control import FleetControl
from pdkv.launch.host_memory import HostMemory
from pdkv.launch.plan import plan_fleet
from pdkv.launch.router_admin import RouterAdmin
from pdkv.launch.run_dir import ADMIN_SOCKET, RunDirectory
from pdkv.launch.supervisor import Supervisor


class StillSupervisor(Supervisor):
    """Knows the engines that it would run, and starts none: what is tested here must not get that far."""

    async def add_engine(self, *_: Any) -> None:
        raise StartupError("this is as far as it goes")


def make_control(run_dir: RunDirectory, launch: LaunchConfig, **engine: Any) -> FleetControl:
    config = EngineConfig(**engine)
    deployment = Deployment(launch=launch, handoff=HandoffConfig(), prefill=config, decode=config)
    fleet = plan_fleet(deployment, run_dir)
    supervisor = StillSupervisor(fleet, listen_fd=-1, lifeline_fd=-1, on_ready=lambda name, seconds: None)
    return FleetControl(
        deployment=deployment, run_dir=run_dir, supervisor=supervisor, router=RouterAdmin(run_dir.path),
        host_memory=HostMemory(run_dir.path, None), chooses_spin=True,
    )  # fmt: skip


@contextlib.asynccontextmanager
async def commanded(control: FleetControl, *, answer: bytes | None = None) -> AsyncIterator[None]:
    """With a router that says which engines it has, or always the same."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        engines = ",".join(
            f'{{"name":"{spec.name}","role":"{spec.role}"}}' for spec in control.supervisor.engines.values()
        )
        body = f'{{"engines":[{engines}]}}'.encode()
        writer.write(answer or b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))
        writer.close()

    async with await asyncio.start_unix_server(serve, str(control.run_dir.path / ADMIN_SOCKET)):
        yield
