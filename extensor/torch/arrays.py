"""The one place where a torch tensor becomes a backend's array, and an array a torch tensor.

Neither direction copies: both stand for the same memory. numpy and cupy name bfloat16 by the dtype
of ml_dtypes, so a bfloat16 tensor passes as 16-bit integers that are relabelled.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np
import torch

from extensor.backends import registry
from extensor.backends.protocol import Backend

__all__ = [
    "DEVICES", "DTYPES", "READABLE", "OnCpu", "check_memory", "check_tensor", "on_device",
    "to_array", "to_tensor",
]  # fmt: skip

Array = Any

DTYPES: dict[torch.dtype, np.dtype[Any]] = {
    torch.float32: np.dtype(np.float32),
    torch.bfloat16: np.dtype(ml_dtypes.bfloat16),
    torch.float16: np.dtype(np.float16),
}
"""Dtypes of tensors that can be quantized."""

DEVICES = ("cpu", "cuda")

_BFLOAT16 = DTYPES[torch.bfloat16]
_CPU = registry.get("cpu")


_has_memory: Any = torch._C._has_storage


def check_memory(name: str, tensor: torch.Tensor) -> None:
    """Refuse a dense tensor that stands for others, as one within vmap does.

    Raises:
        RuntimeError: for one.

    >>> from extensor.torch.arrays import check_memory
    >>> check_memory("x", torch.ones(2))
    """
    if not _has_memory(tensor):
        raise RuntimeError(
            f"{name}: expected a tensor with memory of its own, got one within vmap, as "
            "is_grads_batched=True and jacobian(vectorize=True) use; take one batch or gradient "
            "after the other"
        )


def check_tensor(name: str, tensor: torch.Tensor) -> None:
    """Refuse a tensor that no backend can read.

    Raises:
        TypeError: for another dtype, another layout in memory, a meta tensor, or what is no tensor.
        ValueError: for another device.
        RuntimeError: for a tensor within one of torch.func's transforms.

    >>> from extensor.torch.arrays import check_tensor
    >>> check_tensor("x", torch.ones(2))
    """
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name}: expected a torch.Tensor, got {type(tensor).__name__}")
    if tensor.is_meta:
        raise TypeError(
            f"{name}: a meta tensor has no values to quantize; make the tensor or module on a "
            "device (module.to_empty(device=...), then load its weights)"
        )
    if tensor.layout is not torch.strided:
        raise TypeError(f"{name}: expected a dense tensor, got {tensor.layout}; use x.to_dense()")
    check_memory(name, tensor)
    if tensor.dtype not in DTYPES:
        if tensor.dtype.is_complex:
            way = "quantize its real and imaginary parts (torch.view_as_real)"
        else:
            way = "convert it with x.float()"
        raise TypeError(f"{name}: expected float32, bfloat16 or float16, got {tensor.dtype}; {way}")
    if tensor.device.type not in DEVICES:
        raise ValueError(
            f"{name}: expected a tensor on {' or '.join(DEVICES)}, got {tensor.device}; move it "
            "with x.to('cpu') or x.to('cuda')"
        )


READABLE = {
    **DTYPES,
    torch.int64: np.dtype(np.int64),
    torch.int32: np.dtype(np.int32),
    torch.int8: np.dtype(np.int8),
    torch.uint8: np.dtype(np.uint8),
}
"""Dtypes of tensors that become arrays."""
_TYPES = {dtype: array.str for dtype, array in READABLE.items()} | {torch.bfloat16: "<i2"}


class _Memory:
    """A tensor's memory for numpy, and what keeps it alive: the tensor, and its graph.

    ``tensor.numpy()`` and DLPack would forbid torch to resize the memory, as FSDP does.
    """

    __slots__ = ("__array_interface__", "tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        strides = None
        if not tensor.is_contiguous():
            strides = tuple([step * tensor.itemsize for step in tensor.stride()])
        self.__array_interface__ = {
            "version": 3,
            "typestr": _TYPES[tensor.dtype],
            "shape": tuple(tensor.shape),
            "strides": strides,
            "data": (tensor.data_ptr(), False),
        }


@cache
def _cuda() -> Any:
    """The module for GPUs. An import statement would look it up eight times in a layer's call."""
    from extensor.torch import cuda

    return cuda


def to_array(tensor: torch.Tensor) -> Array:
    """The tensor's memory as an array of its device's backend.

    >>> from extensor.torch.arrays import to_array
    >>> t = torch.zeros(3)
    >>> to_array(t)[0] = 7
    >>> t
    tensor([7., 0., 0.])
    """
    return _cuda().to_array(tensor) if tensor.is_cuda else _to_numpy(tensor)


def _to_numpy(tensor: torch.Tensor) -> Array:
    if tensor.is_neg():  # as imaginary parts of conjugates: memory holds what torch negates later
        tensor = tensor.resolve_neg()
    if not tensor.numel():
        return np.empty(tuple(tensor.shape), READABLE[tensor.dtype])
    array = np.asarray(_Memory(tensor))
    return array.view(_BFLOAT16) if tensor.dtype is torch.bfloat16 else array


def to_tensor(array: Array) -> torch.Tensor:
    """An array's memory as a contiguous tensor; the array must not be an argument's memory.

    >>> from extensor.torch.arrays import to_tensor
    >>> to_tensor(np.ones(2, np.float32))
    tensor([1., 1.])
    """
    if isinstance(array, np.ndarray):
        return _of_numpy(array)
    made: torch.Tensor = _cuda().to_tensor(array)
    return made


def _of_numpy(array: np.ndarray[Any, Any]) -> torch.Tensor:
    if not array.flags.c_contiguous:
        array = np.ascontiguousarray(array)
    if array.dtype == _BFLOAT16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


class OnCpu:
    """A context for kernels on the CPU.

    Attributes:
        backend: the device's.
        capturing: whether torch captures a graph.
        to_array: `to_array` of a tensor on the device.
        to_tensor: `to_tensor` of an array of the device's.
    """

    backend: Backend = _CPU
    capturing = False
    to_array = staticmethod(_to_numpy)
    to_tensor = staticmethod(_of_numpy)

    def __enter__(self) -> OnCpu:
        return self

    def __exit__(self, *error: Any) -> None:
        pass

    def clock(self, reading: torch.Tensor | int) -> None:
        """A layer's clock as kernels read it: the CPU's are told the number."""

    def unread(self, shape: tuple[int, ...], dtype: torch.dtype) -> Array:
        """An array for a tensor that is gone, whose values nobody reads."""
        return np.broadcast_to(np.zeros((), READABLE[dtype]), shape)


_ON_CPU = OnCpu()


def on_device(tensor: torch.Tensor) -> AbstractContextManager[Any]:
    """A context for kernels on a tensor's device.

    It gives `OnCpu`, or `extensor.torch.cuda.OnStream`, within which they run on torch's current
    stream, in memory of torch's allocator.
    """
    if not tensor.is_cuda:
        return _ON_CPU
    used: AbstractContextManager[Any] = _cuda().OnStream(tensor.device)
    return used
