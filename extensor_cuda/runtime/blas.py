"""Float32 products by cuBLAS, in and out of CUDA graphs.

cupy refuses to call cuBLAS while a stream is captured. cuBLAS itself allows it, given memory of its
own to work in. So this module calls the library that cupy has loaded, with a handle of its own and
a workspace for each stream. All graphs share one workspace: replay those with such products one
after the other. Eager and captured products take the same path and give the same bits. Anything but
a pair of float32 arrays of two axes or more is left to cupy.

Sums are float32 (no TF32), in cuBLAS's order: |error| <= 2 K 2**-24 sum |a| |b|.
"""

from __future__ import annotations

import ctypes
import math
import threading
import types
from functools import lru_cache, partial
from typing import Any

import numpy as np

from extensor_cuda.runtime.memory import allocate

__all__ = ["Blas", "gemm_layout", "matmul", "with_matmul"]

Array = Any

_NAMES = ("libcublas.so.13", "libcublas.so.12", "libcublas.so")
_WORKSPACE = 32 << 20
"""Bytes that cuBLAS asks for on Hopper."""
_STREAMS = 4
"""How many streams, the last used ones, keep their workspaces."""
_POINTER, _INT, _I64 = ctypes.c_void_p, ctypes.c_int, ctypes.c_longlong
_PLAIN, _TRANSPOSED = 0, 1


class Blas:
    """cuBLAS on one device.

    Raises:
        RuntimeError: if the library is not found, or refuses a call.
    """

    def __init__(self, xp: Any) -> None:
        self.xp = xp
        xp.cuda.device.get_cublas_handle()  # cupy finds the library and loads it
        for name in _NAMES:
            try:
                self.library = ctypes.CDLL(name)
                break
            except OSError:
                continue
        else:
            raise RuntimeError(
                f"device 'cuda': none of {', '.join(_NAMES)} is loaded; "
                "pip install 'extensor[cuda13]'"
            )
        self.handle = ctypes.c_void_p()
        self._call("cublasCreate_v2", ctypes.byref(self.handle))
        self._lock = threading.Lock()
        self._captured_workspace = xp.empty(_WORKSPACE, dtype=xp.uint8)
        self._workspaces: dict[int, Array] = {}

    def _call(self, name: str, *arguments: Any) -> None:
        if status := getattr(self.library, name)(*arguments):
            raise RuntimeError(f"{name}: cuBLAS status {status}")

    def gemm(
        self,
        transposed: tuple[int, int],
        sizes: tuple[int, int, int],
        arrays: tuple[Array, Array, Array],
        pitches: tuple[int, int, int],
        strides: tuple[int, int, int],
        batch: int,
    ) -> None:
        """The column-major product of cublasSgemmStridedBatched, on the current stream."""
        one, zero = ctypes.c_float(1), ctypes.c_float(0)
        a, b, c = (
            (_POINTER(array.data.ptr), _INT(pitch), _I64(stride))
            for array, pitch, stride in zip(arrays, pitches, strides, strict=True)
        )
        stream = self.xp.cuda.get_current_stream()
        size = ctypes.c_size_t(_WORKSPACE)
        with self._lock:  # the handle's stream is this thread's until the product is launched
            memory = _POINTER(self._workspace(stream).data.ptr)
            self._call("cublasSetStream_v2", self.handle, _POINTER(stream.ptr))
            # Setting the stream has taken the workspace away.
            self._call("cublasSetWorkspace_v2", self.handle, memory, size)
            head = self.handle, *map(_INT, (*transposed, *sizes)), ctypes.byref(one)
            tail = *a, *b, ctypes.byref(zero), *c, _INT(batch)
            self._call("cublasSgemmStridedBatched", *head, *tail)

    def _workspace(self, stream: Any) -> Array:
        """A stream's own workspace; a freed one returns to the pool behind its stream's work."""
        if stream.is_capturing():
            return self._captured_workspace
        found = self._workspaces.pop(stream.ptr, None)
        if found is None:
            pool = self.xp.get_default_memory_pool()  # not a graph's
            with self.xp.cuda.using_allocator(partial(allocate, self.xp, pool)):
                found = self.xp.empty(_WORKSPACE, dtype=self.xp.uint8)
        self._workspaces[stream.ptr] = found
        if len(self._workspaces) > _STREAMS:
            del self._workspaces[next(iter(self._workspaces))]
        return found


@lru_cache(maxsize=16)
def _blas(device: int) -> Blas:
    import cupy

    return Blas(cupy)


def gemm_layout(x: Array, lead: tuple[int, ...], xp: Any) -> tuple[Array, int, int, int]:
    """How cuBLAS reads matrices (..., M, K), of leading axes that broadcast to ``lead``.

    Returns:
        The array or a copy; whether it is transposed; elements between rows (columns) and between
        matrices, 0 for one matrix that all share.
    """
    (rows, columns), item = x.shape[-2:], x.itemsize
    row, column = x.strides[-2:]
    column = item if columns == 1 else column  # strides of a single row or column mean nothing
    row = columns * item if rows == 1 else row
    if column == item and row >= columns * item and row % item == 0:
        transposed, pitch = _PLAIN, row // item
    elif row == item and column >= rows * item and column % item == 0:
        transposed, pitch = _TRANSPOSED, column // item
    else:
        return gemm_layout(xp.ascontiguousarray(x), lead, xp)
    stride = _stride(x, lead)
    if stride is None:
        whole = xp.broadcast_to(x, (*lead, rows, columns))
        return gemm_layout(xp.ascontiguousarray(whole), lead, xp)
    return x, transposed, pitch, stride


def _stride(x: Array, lead: tuple[int, ...]) -> int | None:
    """Elements between neighbouring matrices; None if there is no one distance."""
    mine = (1,) * (len(lead) - x.ndim + 2) + x.shape[:-2]
    strides = (0,) * (len(lead) - x.ndim + 2) + x.strides[:-2]
    if math.prod(mine) == 1:
        return 0
    if mine != lead:
        return None
    expected: int | None = None
    first = 0
    for size, stride in zip(reversed(mine), reversed(strides), strict=True):
        if size == 1:
            continue
        if expected is not None and stride != expected:
            return None
        first = stride if expected is None else first
        expected = stride * size
    return None if first % x.itemsize or first < 0 else first // x.itemsize


def matmul(a: Array, b: Array, xp: Any, blas: Any) -> Array:
    """A b of float32 (..., M, K) and (..., K, N), leading axes broadcasting, nothing empty."""
    lead = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    m, k, n = a.shape[-2], a.shape[-1], b.shape[-1]
    out = xp.empty((*lead, m, n), dtype=np.float32)
    left, a_transposed, a_pitch, a_stride = gemm_layout(a, lead, xp)
    right, b_transposed, b_pitch, b_stride = gemm_layout(b, lead, xp)
    # Row-major a b is column-major b^T a^T.
    transposed, sizes, arrays = (b_transposed, a_transposed), (n, m, k), (right, left, out)
    pitches, strides = (b_pitch, a_pitch, n), (b_stride, a_stride, m * n)
    blas.gemm(transposed, sizes, arrays, pitches, strides, math.prod(lead))
    return out


def _supports(a: Any, b: Any) -> bool:
    if not (a.dtype == b.dtype == np.float32 and a.ndim > 1 and b.ndim > 1):
        return False
    return bool(a.size and b.size and a.shape[-1] == b.shape[-2])


def with_matmul(cupy: Any) -> Any:
    """Cupy with this module's matmul: what the CUDA backend calls its array module."""
    module = types.ModuleType("cupy")
    module.__dict__.update(cupy.__dict__)
    module.__dict__["__getattr__"] = partial(getattr, cupy)  # what is imported later

    def multiply(a: Array, b: Array) -> Array:
        if not _supports(a, b):
            return cupy.matmul(a, b)
        return matmul(a, b, cupy, _blas(cupy.cuda.runtime.getDevice()))

    module.__dict__["matmul"] = multiply
    return module
