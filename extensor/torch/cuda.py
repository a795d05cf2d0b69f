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
from functools import cache, lru_cache, partial
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

__all__ = [
    "DTYPES",
    "FALLBACK",
    "TENSOR_DTYPES",
    "CapturedCounts",
    "OnStream",
    "backend",
    "counts_of",
    "to_array",
    "to_tensor",
]

Array = Any

DTYPES = {
    torch.float32: np.dtype(np.float32),
    torch.bfloat16: np.dtype(ml_dtypes.bfloat16),
    torch.float16: np.dtype(np.float16),
    torch.int64: np.dtype(np.int64),
    torch.int32: np.dtype(np.int32),
    torch.int8: np.dtype(np.int8),
    torch.uint8: np.dtype(np.uint8),
}
TENSOR_DTYPES = {array: tensor for tensor, array in DTYPES.items()}
_SMALL, _CHUNK, _ALIGNED = 4096, 1 << 16, 512
"""Allocations up to so many bytes share chunks of so many, at such multiples."""
FALLBACK = 1 << 28
"""Bytes that an operand of a product's fallback may take of torch's cache: few launches, for its
steps are launched one by one or hold much more."""
_LAYER = 12 << 9
"""Counters of a layer in a captured step: of six operands, 512 each or 1,024 if rebased."""


_empty = torch.empty
_is_capturing = torch._C._cuda_isCurrentStreamCapturing
_get_device = cupy.cuda.runtime.getDevice
_get_allocator = cupy.cuda.memory._get_thread_local_allocator
_set_allocator = cupy.cuda.memory._set_thread_local_allocator
_pointer, _array, _Unowned = cupy.cuda.MemoryPointer, cupy.ndarray, cupy.cuda.UnownedMemory


@cache
def backend() -> Any:
    """That of GPUs."""
    return registry.get("cuda")


class _Made(cupy.cuda.UnownedMemory):  # type: ignore[misc]
    """The memory of a contiguous tensor that was made for cupy: its ``_owner``."""

    __slots__ = ()


def to_array(tensor: torch.Tensor) -> Array:
    """See `extensor.torch.arrays.to_array`."""
    dtype = DTYPES[tensor.dtype]
    if tensor.is_neg():
        tensor = tensor.resolve_neg()
    if tensor.is_contiguous():  # most are; cupy then needs no strides
        memory = _Unowned(tensor.data_ptr(), tensor.nbytes, tensor, tensor.get_device())
        return _array(tensor.shape, dtype, _pointer(memory, 0))
    item = dtype.itemsize
    strides = tuple([step * item for step in tensor.stride()])
    size = item + sum([(n - 1) * s for n, s in zip(tensor.shape, strides, strict=True) if n])
    memory = _Unowned(tensor.data_ptr(), size, tensor, tensor.get_device())
    return _array(tensor.shape, dtype, _pointer(memory, 0), strides)


def to_tensor(array: Array) -> torch.Tensor:
    """See `extensor.torch.arrays.to_tensor`."""
    if not array._c_contiguous:
        array = cupy.ascontiguousarray(array)
    dtype, memory = TENSOR_DTYPES[array.dtype], array.data.mem
    if type(memory) is _Made:
        tensor: torch.Tensor = memory._owner
        if array.nbytes != memory.size:  # a small result would keep a whole chunk
            start = array.data.ptr - memory.ptr
            tensor = tensor.view(-1).view(torch.uint8)[start : start + array.nbytes].clone()
        if tensor.dtype is not dtype:
            tensor = tensor.view(-1).view(dtype)
        return tensor if tensor.shape == array.shape else tensor.view(array.shape)
    made = torch.utils.dlpack.from_dlpack(
        array.view(np.int16) if dtype is torch.bfloat16 else array
    )
    return made.view(dtype)


class OnStream:
    """A context: cupy's current device, stream and allocator are torch's.

    Attributes:
        backend: that of GPUs.
        capturing: whether torch captures a graph on the stream.
        to_array: see `extensor.torch.arrays.OnCpu`.
        to_tensor: likewise.
    """

    __slots__ = (
        "_before", "_chunk", "_device", "_index", "_others", "_stream", "_used",
        "backend", "capturing",
    )  # fmt: skip
    to_array = staticmethod(to_array)
    to_tensor = staticmethod(to_tensor)

    def __init__(self, device: torch.device) -> None:
        # Made at its first use, which cupy refuses under another allocator.
        self.backend = backend()
        self._device = device
        self._index = device.index or 0
        self._chunk: Any = None
        self._used = 0

    def __enter__(self) -> OnStream:
        self.capturing = _is_capturing()
        self._before = _get_device()
        if self._before != self._index:
            cupy.cuda.runtime.setDevice(self._index)
        current = torch._C._cuda_getCurrentRawStream(self._index)
        self._stream = None
        if cupy.cuda.get_current_stream().ptr != current:
            self._stream = _stream(current, self._index)
            self._stream.__enter__()
        # What cupy.cuda.using_allocator does, at a third of its time.
        self._others = _get_allocator(), ALLOCATORS.fallback
        _set_allocator(self._allocate)
        ALLOCATORS.fallback, ALLOCATORS.empty = FALLBACK, self._empty
        counts = counts_of(self._index)
        if self.capturing:  # cudaMalloc is not allowed in a capture
            CAPTURED.capture = CapturedPass(counts)
            ALLOCATORS.lasting = partial(cupy.cuda.using_allocator, self._reserved)
        else:
            ALLOCATORS.lasting = _of_cupy
            counts.refill()
        return self

    def __exit__(self, *error: Any) -> None:
        ALLOCATORS.lasting, ALLOCATORS.empty, CAPTURED.capture = nullcontext, None, None
        allocator, ALLOCATORS.fallback = self._others
        _set_allocator(allocator)
        if self._stream is not None:
            self._stream.__exit__(*error)
        if self._before != self._index:
            cupy.cuda.runtime.setDevice(self._before)

    def clock(self, tensor: torch.Tensor) -> DeviceClock:
        """A layer's clock as kernels read it."""
        return DeviceClock(to_array(tensor))

    def unread(self, shape: tuple[int, ...], dtype: torch.dtype) -> Array:
        """An array for a tensor that is gone, which no kernel may read."""
        return to_array(_empty(1, dtype=dtype, device=self._device).expand(shape))

    def _allocate(self, size: int) -> Any:
        if size > _SMALL:
            return self._of_torch(size)
        if self._chunk is None or self._used + size > _CHUNK:
            self._chunk, self._used = self._of_torch(_CHUNK), 0
        start, self._used = self._used, self._used + -(-size // _ALIGNED) * _ALIGNED
        return self._chunk + start

    def _empty(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """See `extensor_cuda.runtime.memory.empty`: a tensor's memory, for `to_tensor`."""
        kind = TENSOR_DTYPES.get(dtype)
        if kind is None:
            return cupy.empty(shape, dtype)
        return _array(shape, dtype, self._made(_empty(shape, dtype=kind, device=self._device)))

    def _reserved(self, size: int) -> Any:
        """What outlives a captured pass."""
        taken = counts_of(self._index).take(-(-size // _ALIGNED) * _ALIGNED // 8)
        return self._allocate(size) if taken is None else taken.data

    def _of_torch(self, size: int) -> Any:
        return self._made(_empty(size, dtype=torch.uint8, device=self._device))

    def _made(self, tensor: torch.Tensor) -> Any:
        """A pointer to the memory of a new tensor, which it keeps alive."""
        return _pointer(_Made(tensor.data_ptr(), tensor.nbytes, tensor, self._index), 0)


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
    return CapturedCounts(backend().reserve)


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
