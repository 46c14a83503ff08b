"""Counts the CUDA devices that this process sees, as far as that is known without torch."""

import os
from pathlib import Path

_CONTROL = Path("/dev/nvidiactl")
_DEVICES = Path("/proc/driver/nvidia/gpus")


def count_cuda_devices() -> int:
    """Devices that the NVIDIA driver shows and CUDA_VISIBLE_DEVICES does not hide; CUDA numbers them from 0."""
    if not _CONTROL.exists():
        return 0
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return len(list(_DEVICES.glob("*"))) or 1
    names = [name.strip() for name in visible.split(",")]
    return next((i for i, name in enumerate(names) if name in ("", "-1")), len(names))  # CUDA reads no further
