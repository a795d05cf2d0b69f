"""Writes in place: ``x[...] = v``, ``copy_`` and ``assign_``, and the version that they raise."""

from __future__ import annotations

import operator
from dataclasses import replace
from typing import Any, Self

import numpy as np

from extensor.autograd.mode import MODE
from extensor.autograd.node import TensorState
from extensor.autograd.positions import check_positions, raw_key
from extensor.dtypes import dtype_of
from extensor.quant.array import QuantArray

__all__ = ["REPLACED", "WriteMethods"]

REPLACED = [0]
"""How often a tensor on the CPU got other memory: recorded steps that read the old are outdated."""

_ORDER = {"bool": 0, "int": 1, "float": 2, "complex": 3}


class WriteMethods(TensorState):
    """Methods of `ExTensor` that change its memory; each raises the version counter."""

    __slots__ = ()

    def __setitem__(self, key: Any, value: Any) -> None:
        """Write into the memory; views see it, and gradients that need the old values refuse.

        Raises:
            RuntimeError: if the tensor is part of a graph being recorded.
            TypeError: for a blocked tensor, or a value of a wider kind of dtype.
            ValueError: for a value that does not broadcast to the selection, or a tensor whose
                values share memory.
        """
        self._check_write()
        shared = any(
            n > 1 and not step for n, step in zip(self.shape, self.data.strides, strict=True)
        )  # numpy marks such arrays read-only, cupy does not
        if shared or not getattr(self.data.flags, "writeable", True):
            why = "broadcast_to made its values share memory" if shared else (
                "so is the array that it was made from"
            )  # fmt: skip
            raise ValueError(f"write: this tensor is read-only: {why}; write to x.clone()")
        source = value.data if isinstance(value, TensorState) else np.asarray(value)
        if isinstance(source, QuantArray):
            source = value.dequantize().data
        if isinstance(value, (TensorState, np.ndarray)):
            got = dtype_of(source)
            if _ORDER[got.kind] > _ORDER[self.dtype.kind]:
                raise TypeError(
                    f"write: {got.name} values do not fit a {self.dtype.name} tensor; convert them"
                )
        indices = raw_key(key)
        try:
            check_positions(self.backend, self.shape, indices)
            self.data[indices] = source
        except IndexError as error:
            raise IndexError(f"index of a tensor of shape {self.shape}: {error}") from error
        except ValueError as error:
            raise ValueError(
                f"write: expected values that broadcast to the selection of a tensor of shape "
                f"{self.shape}, got shape {tuple(source.shape)} ({error})"
            ) from error
        self._count_write()

    def copy_(self, source: TensorState) -> Self:
        """Write the values of another tensor into this tensor's memory.

        Args:
            source: broadcasts to this tensor's shape.

        Returns:
            This tensor.

        Raises:
            RuntimeError: if the tensor is part of a graph being recorded.
            TypeError: for a blocked tensor, or a source of a wider kind of dtype.
            ValueError: for a source that does not broadcast, or a tensor whose values share memory.

        Example:
            >>> et.zeros(3).copy_(et.ExTensor([1.0, 2.0, 3.0])).tolist()
            [1.0, 2.0, 3.0]
        """
        self[...] = source
        return self

    def assign_(self, array: Any) -> Self:
        """Replace the data by ``array``: the update of an optimizer. On the CPU without a copy.

        On a device the values go to the memory that is there: a captured step finds them.

        Args:
            array: a raw array of the device, of this tensor's shape and dtype, that nothing else
                will write to; of a blocked tensor a QuantArray of its spec. On the CPU views keep
                the old values, as ``numpy()`` arrays do.

        Returns:
            This tensor.

        Raises:
            RuntimeError: if the tensor requires a gradient and gradients are being recorded.
            TypeError, ValueError: for another device, dtype, spec or shape.

        Example:
            >>> x = et.zeros(2)
            >>> x.assign_(x.data + 1).tolist()
            [1.0, 1.0]
        """
        self._check_recorded()
        if isinstance(self.data, QuantArray):
            self._assign_blocks(self.data, array)
            return self
        if not isinstance(array, self.backend.xp.ndarray):
            raise TypeError(
                f"assign_: expected an array of device {self.device}, got {type(array).__name__}; "
                "x.copy_(et.ExTensor(values)) takes values from anywhere"
            )
        if array.shape != self.data.shape:
            raise ValueError(f"assign_: expected shape {self.shape}, got {tuple(array.shape)}")
        if array.dtype != self.data.dtype:
            raise TypeError(f"assign_: expected dtype {self.dtype.name}, got {array.dtype.name}")
        if self.backend.xp is np:
            self.data = array
            REPLACED[0] += 1
        else:
            self.data[...] = array
        self._count_write()
        return self

    def _assign_blocks(self, old: QuantArray, new: Any) -> None:
        """`assign_` of a blocked tensor."""
        if not isinstance(new, QuantArray) or (new.spec, new.shape) != (old.spec, old.shape):
            got = f"{new.spec}, {new.shape}" if isinstance(new, QuantArray) else type(new).__name__
            raise ValueError(
                f"assign_: expected a QuantArray of {old.spec}, {old.shape}, got {got}; pack the "
                "values with the tensor's spec"
            )
        if self.backend.xp is np:
            self.data = new
            REPLACED[0] += 1
        else:
            for name, part in old.parts.items():
                part[...] = new.parts[name]
            self.data = replace(old)  # products remember what they found out about the old values
        self._count_write()

    def _count_write(self) -> None:
        """Raise the version: now and, while a step is recorded, with each repetition."""
        cell = self._version
        cell[0] += 1
        if MODE.recording is not None:
            MODE.recording.refuse("it writes to a tensor in place")
        if (capture := self.backend.capturing) is not None:
            capture.on_replay(lambda: operator.setitem(cell, 0, cell[0] + 1))

    def _check_write(self) -> None:
        if self.dtype.is_blocked:
            raise TypeError(
                f"write in place: a {self.dtype.name} tensor shares scales between values; use "
                "x.dequantize(), write, and quantize again"
            )
        self._check_recorded()

    def _check_recorded(self) -> None:
        if self._requires_grad and MODE.enabled:
            raise RuntimeError(
                "write in place: this tensor requires a gradient, and the write would not be part "
                "of it; write inside `with et.no_grad():`, or compute a new tensor with et.where"
            )
