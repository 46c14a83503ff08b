"""Assigns CUDA devices to the ranks of a launch, and shares of a device's memory to engines."""

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from pdkv.config import DEFAULT_GPU_MEMORY_UTILIZATION
from pdkv.errors import ConfigError
from pdkv.host.cuda_devices import count_cuda_devices
from pdkv.launch.specs import EngineSpec

_LEAST_SHARE = 0.01


@dataclass(slots=True)
class _Device:
    """The engines on one device."""

    number: int
    engines: list[str] = field(default_factory=list)
    given: float = 0.0  # share of its memory given to engines with an explicit share
    num_sharing: int = 0  # engines without one

    def add(self, engine: EngineSpec) -> None:
        self.engines.append(engine.name)
        self.given += engine.config.gpu_memory_utilization or 0.0
        self.num_sharing += engine.config.gpu_memory_utilization is None

    @property
    def share(self) -> float:
        """Each such engine's share of the device's memory."""
        return (DEFAULT_GPU_MEMORY_UTILIZATION - self.given) / self.num_sharing

    def check(self) -> None:
        """Raise ConfigError if more is requested than there is."""
        if self.given > 1.0 + 1e-9 or (self.num_sharing and self.share < _LEAST_SHARE):
            others = ", which leaves nothing to the others" if self.num_sharing else ""
            raise ConfigError(
                f"gpu_memory_utilization: {', '.join(self.engines)} share CUDA device {self.number}, and "
                f"{self.given:.0%} of its memory is given away{others}: give each less, or use more --devices"
            )


def place_on_devices(specs: Sequence[EngineSpec], running: Iterable[EngineSpec] = ()) -> list[EngineSpec]:
    """The same engines with devices, one per rank, and a share of their memory for those that compute on CUDA.

    A rank gets the device with the fewest others.

    Args:
        specs: engines to start. `config.devices` limits their devices; None: all.
        running: engines placed before, which keep their devices.

    Raises:
        ConfigError: an engine has more ranks than there are devices, or a device has not enough memory for its engines.
    """
    devices = [_Device(number) for number in range(count_cuda_devices())]
    for engine in running:
        for device in _allowed(engine, devices):
            device.add(engine)
    placed: dict[str, list[_Device]] = {}
    for spec in specs:
        if not spec.config.in_host_memory:
            placed[spec.name] = _choose(spec, devices)
            for device in placed[spec.name]:
                device.add(spec)
    for device in devices:
        device.check()
    return [_placed(spec, placed[spec.name]) if spec.name in placed else spec for spec in specs]


def keep_devices(spec: EngineSpec, before: EngineSpec) -> EngineSpec:
    """The spec of an engine that replaces `before`, on the same devices and with the same share of their memory, or of
    the host's.
    """
    names = ("devices", "gpu_memory_utilization", "max_kv_cache_memory")
    return with_options(spec, **{name: getattr(before.config, name) for name in names})


def with_options(spec: EngineSpec, **fields: Any) -> EngineSpec:
    """The engine with these values in its configuration."""
    return msgspec.structs.replace(spec, config=dataclasses.replace(spec.config, **fields))


def _allowed(engine: EngineSpec, devices: Sequence[_Device]) -> Sequence[_Device]:
    if engine.config.in_host_memory:
        return ()
    numbers = engine.config.device_numbers
    if numbers is None:
        return devices
    missing = [number for number in numbers if number >= len(devices)]
    if missing:
        raise ConfigError(
            f"devices: there are {len(devices)} CUDA devices, numbered from 0, and no {missing[0]}; "
            f"got {engine.config.devices!r}"
        )
    return [devices[number] for number in numbers]


def _choose(spec: EngineSpec, devices: Sequence[_Device]) -> list[_Device]:
    allowed, tp = _allowed(spec, devices), spec.config.tp
    if len(allowed) < tp:
        raise ConfigError(f"{spec.name}: tp={tp} needs {tp} CUDA devices, but there are {len(allowed)}")
    chosen = sorted(allowed, key=lambda device: (len(device.engines), device.number))[:tp]
    return sorted(chosen, key=lambda device: device.number)


def _placed(spec: EngineSpec, devices: Sequence[_Device]) -> EngineSpec:
    share = spec.config.gpu_memory_utilization or min(device.share for device in devices)
    numbers = ",".join(str(device.number) for device in devices)
    return with_options(spec, devices=numbers, gpu_memory_utilization=share)
