"""What an engine runs on: versions of libraries, and with CUDA those of its driver and its device, for its card."""

from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version

import torch

LIBRARIES: Mapping[str, tuple[str, ...]] = {"NIXL": ("nixl-cu12", "nixl-cu13")}
"""Libraries that carry KV, and the packages that have them."""


def describe_platform(device: torch.device) -> dict[str, str]:
    """Versions by name; what is not there is left out."""
    found = {"torch": str(torch.__version__)}
    if device.type == "cuda":
        driver: int = torch._C._cuda_getDriverVersion()  # type: ignore[attr-defined]  # absent from torch's stubs
        major, minor = torch.cuda.get_device_capability(device)
        found |= {"CUDA": str(torch.version.cuda), "CUDA driver": f"{driver // 1000}.{driver % 1000 // 10}"}
        found |= {"compute capability": f"{major}.{minor}"}
    for name, packages in LIBRARIES.items():
        for package in packages:
            with suppress(PackageNotFoundError):
                found[name] = version(package)
    return found
