"""A tensor's values for Python, numpy and other libraries: ``item``, ``numpy``, DLPack."""

from __future__ import annotations

from typing import Any

import numpy as np

from extensor.autograd import dlpack
from extensor.autograd.creation import share_writes
from extensor.autograd.mode import MODE
from extensor.autograd.node import TensorState

__all__ = ["ValueMethods", "to_host"]


class ValueMethods(TensorState):
    """Methods of `ExTensor` that give its values to something else; a blocked one refuses."""

    __slots__ = ()

    def numpy(self) -> np.ndarray[Any, Any]:
        """The values as a read-only numpy array, sharing memory on the CPU.

        Returns:
            An array of the tensor's shape; bfloat16 has the dtype of ml_dtypes.

        Raises:
            TypeError: for a blocked tensor; use ``x.dequantize().numpy()``.

        Example:
            >>> et.ExTensor([1.0, 2.0]).numpy()
            array([1., 2.], dtype=float32)
        """
        if self.dtype.is_blocked:
            raise TypeError(
                f"numpy(): a {self.dtype.name} tensor is codes and scales; use "
                "x.dequantize().numpy(), or x.codes and x.scales"
            )
        view: np.ndarray[Any, Any] = to_host(self.data).view()
        view.flags.writeable = False  # a write here would not raise the version counter
        return view

    def item(self) -> Any:
        """The only element, as a Python number.

        Returns:
            An int, float, bool or complex.

        Raises:
            ValueError: if there is not exactly one element.

        Example:
            >>> et.ExTensor([[2.5]]).item()
            2.5
        """
        if self.size != 1:
            raise ValueError(
                f"item(): expected a tensor of one element, got shape {self.shape}; index it first"
            )
        data = self.backend.dequantize(self.data) if self.dtype.is_blocked else self.data
        number = to_host(data).reshape(()).item()
        return float(number) if self.dtype.kind in ("float", "blocked") else number

    def tolist(self) -> Any:
        """The values as nested lists of Python numbers.

        Returns:
            A list; a number for a tensor without axes.

        Raises:
            TypeError: for a blocked tensor; use ``x.dequantize().tolist()``.

        Example:
            >>> et.ExTensor([[1, 2], [3, 4]]).tolist()
            [[1, 2], [3, 4]]
        """
        return self.numpy().tolist()

    def __float__(self) -> float:
        return float(self.item())

    def __complex__(self) -> complex:
        return complex(self.item())

    def __int__(self) -> int:
        return int(self.item())

    def __format__(self, spec: str) -> str:
        """One number as Python formats it, as in ``f"{loss:.3f}"``; `repr` without a spec."""
        if not spec:
            return str(self)
        if self.size != 1:
            raise TypeError(
                f"format {spec!r}: expected one element, got shape {self.shape}; use x.tolist()"
            )
        return format(self.item(), spec)

    def __bool__(self) -> bool:
        if self.size != 1:
            raise ValueError(
                f"truth of a tensor of shape {self.shape}: expected one element; use any() or all()"
            )
        return bool(self.item())

    def __index__(self) -> int:
        if not self.dtype.is_integer:
            raise TypeError(f"index: expected an integer tensor, got {self.dtype.name}")
        return int(self.item())

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        return np.array(self.numpy(), dtype=dtype, copy=copy)

    def __dlpack__(
        self,
        *,
        stream: Any = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        options = {
            "stream": stream, "max_version": max_version, "dl_device": dl_device, "copy": copy
        }  # fmt: skip
        given = {name: value for name, value in options.items() if value is not None}
        capsule = dlpack.export(self._exported(), **given)
        if not copy:
            share_writes(self)
        return capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        data = self.data.codes if self.dtype.is_blocked else self.data
        where: tuple[int, int] = data.__dlpack_device__()
        return where

    def _exported(self) -> Any:
        if self.dtype.is_blocked:
            raise BufferError(
                f"DLPack: a {self.dtype.name} tensor is codes and scales; export x.dequantize(), "
                "or x.codes and x.scales"
            )
        if self._requires_grad:
            raise BufferError(
                "DLPack: this tensor requires a gradient, and writes by its new owner would not be "
                "part of it; export x.detach()"
            )
        return self.data


def to_host(array: Any) -> Any:
    """A device array as a numpy array; itself if it is one."""
    if MODE.recording is not None:
        MODE.recording.refuse("it reads a tensor's values")
    return array if isinstance(array, np.ndarray) else array.get()
