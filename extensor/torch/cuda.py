"""cupy on torch's current stream and in memory of torch's caching allocator.

An operator's arrays then belong to torch: a result is a tensor of its own, what is freed goes back
to the stream that used it, and a captured graph finds everything in its own pool. Nothing waits for
the GPU.

What quantizers count in a captured graph outlives it, so it lies in a reserve of cupy's memory that
passes before the capture have made.
"""

from __future__ import annotations

import warnings
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache, partial
from typing import Any

import cupy
import ml_dtypes
import numpy as np
import torch

from extensor.backends import registry
from extensor.random import DeviceClock
from extensor.torch.handles import layer_count
from extensor_cuda.runtime.counters import CAPTURED, Reserve
from extensor_cuda.runtime.memory import ALLOCATORS, allocate

__all__ = ["OnStream", "on_stream", "to_array", "to_tensor"]

Array = Any

_DTYPES = {
    torch.float32: np.dtype(np.float32),
    torch.bfloat16: np.dtype(ml_dtypes.bfloat16),
    torch.float16: np.dtype(np.float16),
    torch.int64: np.dtype(np.int64),
    torch.int32: np.dtype(np.int32),
    torch.int8: np.dtype(np.int8),
    torch.uint8: np.dtype(np.uint8),
}
_TENSOR_DTYPES = {array: tensor for tensor, array in _DTYPES.items()}
_SMALL, _CHUNK, _ALIGNED = 4096, 1 << 16, 512
"""Allocations up to so many bytes share chunks of so many, at such multiples."""
_FALLBACK = 1 << 28
"""Bytes that an operand of a product's fallback may take of torch's cache: few launches, for its
steps are launched one by one or hold much more."""
_LAYER = 12 << 9
"""Counters of a layer in a captured step: of six operands, 512 each or 1,024 if rebased."""


_is_capturing = torch._C._cuda_isCurrentStreamCapturing


class _Memory(cupy.cuda.UnownedMemory):  # type: ignore[misc]
    """A tensor's memory, as cupy names it."""

    def __init__(self, tensor: torch.Tensor, size: int) -> None:
        super().__init__(tensor.data_ptr(), size, tensor, tensor.get_device())
        self.tensor = tensor


class OnStream:
    """A context: cupy's current device, stream and allocator are torch's.

    Attributes:
        capturing: whether torch captures a graph on the stream.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._index = device.index or 0
        self._chunk: _Memory | None = None
        self._used = 0
        self._fallback = ALLOCATORS.fallback

    def __enter__(self) -> OnStream:
        self.capturing = _is_capturing()
        self._before = cupy.cuda.runtime.getDevice()
        if self._before != self._index:
            cupy.cuda.runtime.setDevice(self._index)
        self._stream = _stream(torch._C._cuda_getCurrentRawStream(self._index), self._index)
        self._memory = cupy.cuda.using_allocator(self._allocate)
        self._memory.__enter__()
        self._stream.__enter__()
        ALLOCATORS.fallback = _FALLBACK
        counts = counts_of(self._index)
        if self.capturing:  # cudaMalloc is not allowed in a capture
            CAPTURED.capture = CapturedPass(counts)
            ALLOCATORS.lasting = partial(cupy.cuda.using_allocator, self._reserved)
        else:
            ALLOCATORS.lasting = _of_cupy
            counts.refill()
        return self

    def __exit__(self, *error: Any) -> None:
        ALLOCATORS.lasting, CAPTURED.capture = nullcontext, None
        ALLOCATORS.fallback = self._fallback
        self._stream.__exit__(*error)
        self._memory.__exit__(*error)
        if self._before != self._index:
            cupy.cuda.runtime.setDevice(self._before)

    def clock(self, tensor: torch.Tensor) -> DeviceClock:
        """A layer's clock as kernels read it."""
        return DeviceClock(to_array(tensor))

    def _allocate(self, size: int) -> Any:
        if size > _SMALL:
            return cupy.cuda.MemoryPointer(self._of_torch(size), 0)
        if self._chunk is None or self._used + size > _CHUNK:
            self._chunk, self._used = self._of_torch(_CHUNK), 0
        start, self._used = self._used, self._used + -(-size // _ALIGNED) * _ALIGNED
        return cupy.cuda.MemoryPointer(self._chunk, start)

    def _reserved(self, size: int) -> Any:
        """What outlives a captured pass."""
        taken = counts_of(self._index).take(-(-size // _ALIGNED) * _ALIGNED // 8)
        return self._allocate(size) if taken is None else taken.data

    def _of_torch(self, size: int) -> _Memory:
        return _Memory(torch.empty(size, dtype=torch.uint8, device=self.device), size)


class CapturedCounts:
    """What captured passes on a device count with: see `extensor_cuda.runtime.counters.Reserve`.

    Attributes:
        reserve: the counters.
        replays: int64 of how often passes were replayed, a cell each, as torch's kernels add to it;
            None before a first pass.
    """

    def __init__(self, reserve: Reserve) -> None:
        self.reserve = reserve
        self.replays: torch.Tensor | None = None
        self._ready_for = -1  # so many layers; -1: some of it has been taken

    def refill(self) -> None:
        """Have enough for a step of every layer; outside of captures."""
        count = layer_count()
        if count == self._ready_for:
            return
        self.reserve.refill(count * _LAYER)
        if self.replays is None or len(self.replays) < 2 * count:
            with ALLOCATORS.lasting():
                cells = cupy.zeros(4 * count + 256, np.int64)
            self.replays = torch.utils.dlpack.from_dlpack(cells)
        self._ready_for = count

    def take(self, number: int) -> Array | None:
        """See `Reserve.take`."""
        self._ready_for = -1
        return self.reserve.take(number)

    def cell(self) -> torch.Tensor | None:
        """Of one pass; None if all are taken."""
        if self.replays is None or not len(self.replays):
            return None
        cell, self.replays = self.replays[0], self.replays[1:]
        return cell


class CapturedPass:
    """A pass that torch captures: `extensor_cuda.runtime.counters.CountingCapture`."""

    def __init__(self, counts: CapturedCounts) -> None:
        self._counts = counts
        self._cell: torch.Tensor | None = None
        self._made: list[Array] = []

    @property
    def replays(self) -> int:
        """How many there were; waits for the GPU."""
        return 0 if self._cell is None else int(self._cell)

    def counters(self, number: int) -> tuple[Array, int, int] | None:
        """See `StepCapture.counters`."""
        if self._cell is None:
            self._cell = self._counts.cell()
            if self._cell is not None:
                self._cell.add_(1)  # in each replay
        made = None if self._cell is None else self._counts.take(number)
        if made is None:
            warnings.warn(
                "extensor.torch: a graph is captured before a step ran, or for more layers than "
                "counters are ready for; what its replays quantize is not part of the telemetry",
                RuntimeWarning,
                stacklevel=2,
            )
            return None
        self._made.append(made)
        return made, len(self._made) - 1, 0

    def read_counters(self, chunk: int) -> np.ndarray:
        """See `StepCapture.read_counters`."""
        return np.asarray(self._made[chunk].get())


@lru_cache(maxsize=64)
def counts_of(device: int) -> CapturedCounts:
    """What captured passes on a device count with."""
    backend: Any = registry.get("cuda")
    return CapturedCounts(backend.reserve)


def _of_cupy() -> AbstractContextManager[Any]:
    pool = cupy.get_default_memory_pool()
    used: AbstractContextManager[Any] = cupy.cuda.using_allocator(partial(allocate, cupy, pool))
    return used


class _TorchStream:
    """A stream of torch's under the CUDA stream protocol."""

    def __init__(self, pointer: int) -> None:
        self._pointer = pointer

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._pointer


@lru_cache(maxsize=256)
def _stream(pointer: int, device: int) -> Any:
    return cupy.cuda.Stream.from_external(_TorchStream(pointer))


def on_stream(device: torch.device) -> AbstractContextManager[Any]:
    """See `extensor.torch.arrays.on_stream`."""
    registry.get("cuda")  # made at its first use, which cupy refuses under another allocator
    return OnStream(device)


def to_array(tensor: torch.Tensor) -> Array:
    """See `extensor.torch.arrays.to_array`."""
    dtype = _DTYPES[tensor.dtype]
    item = dtype.itemsize
    if tensor.is_contiguous():  # most are; cupy then needs no strides
        memory = _Memory(tensor.detach(), item * (tensor.numel() or 1))
        return cupy.ndarray(tuple(tensor.shape), dtype, cupy.cuda.MemoryPointer(memory, 0))
    strides = tuple([step * item for step in tensor.stride()])
    size = item + sum([(n - 1) * s for n, s in zip(tensor.shape, strides, strict=True) if n])
    memory = cupy.cuda.MemoryPointer(_Memory(tensor.detach(), size), 0)
    return cupy.ndarray(tuple(tensor.shape), dtype, memory, strides)


def to_tensor(array: Array) -> torch.Tensor:
    """See `extensor.torch.arrays.to_tensor`."""
    if not array.flags.c_contiguous:
        array = cupy.ascontiguousarray(array)
    dtype, memory = _TENSOR_DTYPES[array.dtype], array.data.mem
    if isinstance(memory, _Memory) and memory.tensor.dtype is torch.uint8:
        if memory.tensor.numel() == array.nbytes:
            return memory.tensor.view(dtype).view(array.shape)
        start = array.data.ptr - memory.ptr
        held = memory.tensor[start : start + array.nbytes].view(dtype).view(array.shape)
        return held.clone()  # a small result would keep a whole chunk
    made = torch.utils.dlpack.from_dlpack(
        array.view(np.int16) if dtype is torch.bfloat16 else array
    )
    return made.view(dtype)
