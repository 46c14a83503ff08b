"""A GPU without one: tensors that say they are on `cuda`, compute on the CPU, and refuse whatever makes the host wait.

    with DeviceTensors() as device:
        logits = device.put(torch.randn(4, 100))  # a tensor of cuda:0
        tokens = draw(logits, params)             # SyncError where the host would wait for the device
        assert device.take(tokens).tolist() == …  # and only a test may look

Inside, `pin_memory()` works, `.to("cuda")` takes pinned tensors with `non_blocking=True` alone, factories with
`device="cuda"` make such tensors, and tensors of the CPU don't mix with them, as on a GPU. `launch` stands for a
kernel.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

CUDA = torch.device("cuda:0")


class SyncError(AssertionError):
    """The host would wait for the device, or the device could not see a tensor."""


_WAITING = {
    "_local_scalar_dense": "its value is asked for",
    "is_nonzero": "its truth is asked for",
    "equal": "a comparison is asked for",
    "nonzero": "the size of the result is the device's",
    "masked_select": "the size of the result is the device's",
    "unique_consecutive": "the size of the result is the device's",
    "_unique2": "the size of the result is the device's",
    "unique_dim": "the size of the result is the device's",
    "bincount": "the size of the result is the device's",
}


_ASKING = {"numpy", "tolist", "item", "nonzero", "__bool__", "__int__", "__float__", "__index__", "__array__"}
"""Methods that don't get as far as an operator here."""


class DeviceTensor(torch.Tensor):
    """Says that it is on cuda:0; what it holds is on the CPU."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls: type["DeviceTensor"], inner: torch.Tensor) -> "DeviceTensor":
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=CUDA,
        )
        made.inner = inner
        return made

    def __init__(self, inner: torch.Tensor) -> None:
        pass

    def __repr__(self, **_: object) -> str:
        return f"DeviceTensor({tuple(self.shape)}, {self.dtype})"

    def data_ptr(self) -> int:
        return self.inner.data_ptr()

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        name = func.overloadpacket.__name__
        if name in _WAITING:
            raise SyncError(f"{func}: {_WAITING[name]}")
        if name in ("_to_copy", "copy_"):
            return _copy(func, args, kwargs)
        if name in ("index", "index_put", "index_put_", "_index_put_impl_"):
            _check_index(func, args[1])
        if name == "repeat_interleave" and kwargs.get("output_size") is None:
            raise SyncError(f"{func}: the size of the result is the device's")
        return _run(func, args, kwargs)


def _run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """On what the tensors hold. A tensor that is changed in place is returned as itself."""
    known: dict[int, DeviceTensor] = {}

    def unwrap(x: Any) -> Any:
        if isinstance(x, DeviceTensor):
            known[id(x.inner)] = x
            return x.inner
        if isinstance(x, torch.Tensor) and x.dim():
            raise SyncError(f"{func}: a tensor of the CPU {tuple(x.shape)} among those of the device")
        return x

    kwargs.pop("pin_memory", None)
    if kwargs.get("device") is not None:
        kwargs["device"] = torch.device("cpu")
    result = func(*tree_map(unwrap, args), **tree_map(unwrap, kwargs))

    def wrap(x: Any) -> Any:
        return (known[id(x)] if id(x) in known else DeviceTensor(x)) if isinstance(x, torch.Tensor) else x

    return tree_map(wrap, result)


def _copy(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Within the device; to it from pinned memory, and from it to pinned memory, without waiting."""
    if func.overloadpacket.__name__ == "_to_copy":
        target = kwargs.get("device") or CUDA
        if torch.device(target).type != "cuda":
            raise SyncError(
                f"{func}: a copy to the {target}; a pinned tensor and copy_(…, non_blocking=True) don't wait"
            )
        return _run(func, args, kwargs)
    target, source, *rest = args
    if isinstance(target, DeviceTensor) and isinstance(source, DeviceTensor):
        return _run(func, args, kwargs)
    host = source if isinstance(target, DeviceTensor) else target
    if not (is_pinned(host) and (rest or [kwargs.get("non_blocking", False)])[0]):
        raise SyncError(f"{func}: a copy between the device and {tuple(host.shape)} that is not pinned, or waits")
    _inner(target).copy_(_inner(source))
    return target


def _check_index(func: Any, indices: Any) -> None:
    for index in indices:
        if index is not None and index.dtype in (torch.bool, torch.uint8):
            raise SyncError(f"{func}: a mask as index; the size of the result is the device's")


def _inner(x: torch.Tensor) -> torch.Tensor:
    return x.inner if isinstance(x, DeviceTensor) else x


_pinned: dict[int, torch.Tensor] = {}
"""By address; kept, as an address that is used again would be taken for pinned."""


def is_pinned(x: torch.Tensor) -> bool:
    """Whether it is a tensor, or a view of one, that `pin_memory` or a factory inside `DeviceTensors` made."""
    return x.untyped_storage().data_ptr() in _pinned


def _pin(x: torch.Tensor) -> torch.Tensor:
    x = x.clone()
    _pinned[x.untyped_storage().data_ptr()] = x
    return x


class DeviceTensors(TorchFunctionMode):
    """While it is entered there is a device."""

    def put(self, x: torch.Tensor) -> torch.Tensor:
        """A copy of `x` on the device."""
        return DeviceTensor(x.clone())

    def take(self, x: torch.Tensor) -> torch.Tensor:
        """What `x` holds, on the CPU: for tests, which may wait."""
        assert isinstance(x, DeviceTensor), f"not on the device: {type(x)}"
        return x.inner.clone()

    def launch(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function` as a kernel of the device: it gets what tensors there hold, and gives some that are there."""

        def run(*args: Any, **kwargs: Any) -> Any:
            with torch._C.DisableTorchFunction():
                return _run(function, args, kwargs)

        return run

    def __torch_function__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.pin_memory:
            return _pin(args[0])
        if func is torch.Tensor.is_pinned:
            return is_pinned(args[0])
        if func in (torch.Tensor.to, torch.Tensor.cuda) and not isinstance(args[0], DeviceTensor):
            return _upload(func, args, kwargs)
        if func.__name__ in _ASKING and isinstance(args[0], DeviceTensor):
            raise SyncError(f"{func.__name__} of a tensor of the device")
        if func in (torch.Tensor.__getitem__, torch.Tensor.__setitem__) and isinstance(args[0], DeviceTensor):
            return _item(func, args)
        if func is torch.Tensor.copy_ and isinstance(args[0], DeviceTensor):
            return _copy(torch.ops.aten.copy_.default, args, kwargs)
        if func is torch.Tensor.__invert__:  # torch would ask CUDA which device is current
            func = torch.Tensor.bitwise_not
        is_pinned_wanted = kwargs.pop("pin_memory", False)
        if torch.device(kwargs.get("device") or "cpu").type == "cuda":
            return DeviceTensor(func(*args, **{**kwargs, "device": "cpu"}))
        made = func(*args, **kwargs)
        return _pin(made) if is_pinned_wanted else made


def _item(func: Any, args: tuple[Any, ...]) -> Any:
    """x[index] and x[index] = value, for which torch would ask CUDA which device is current."""
    index = args[1] if isinstance(args[1], tuple) else (args[1],)
    _check_index(func, [x for x in index if isinstance(x, torch.Tensor)])
    return _run(func, args, {})


def _upload(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    source, *places = args
    places = [*places, kwargs.get("device")]
    wanted = [place for place in places if isinstance(place, (str, torch.device))]
    if func is not torch.Tensor.cuda and not any(torch.device(place).type == "cuda" for place in wanted):
        result: torch.Tensor = func(*args, **kwargs)
        return result
    if not is_pinned(source) or not kwargs.get("non_blocking"):
        raise SyncError(f"a copy of {tuple(source.shape)} to the device that is not from pinned memory, or waits")
    dtypes = [x for x in (*places, kwargs.get("dtype")) if isinstance(x, torch.dtype)]
    return DeviceTensor(source.to(dtypes[0]) if dtypes else source.clone())
