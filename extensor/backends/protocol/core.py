"""What a backend is called, its array module, and the services every family of methods uses."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from extensor.backends.capture import Graph, Replay, StepCapture
from extensor.quant.array import QuantArray

__all__ = ["Array", "CoreMethods", "MemoryLog", "Window"]

Array = Any


@dataclass(frozen=True)
class Window:
    """A sliding window: kernel, stride, padding, dilation, each (height, width)."""

    kernel: tuple[int, int]
    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int] = (0, 0)
    dilation: tuple[int, int] = (1, 1)

    def output_size(self, size: tuple[int, int]) -> tuple[int, int]:
        """Height and width of the output for an input of ``size``; below 1 if it does not fit."""
        out = [
            (n + 2 * p - d * (k - 1) - 1) // s + 1
            for n, k, s, p, d in zip(
                size, self.kernel, self.stride, self.padding, self.dilation, strict=True
            )
        ]
        return out[0], out[1]


class MemoryLog(Protocol):
    """A log of the blocks of memory that arrays take, while it is entered as a context."""

    def __enter__(self) -> object:
        """Begin the log."""

    def __exit__(self, *error: object) -> None:
        """End the log."""

    def mark(self, block: int, label: int) -> None:
        """Note that the block has a label, from 0 up; -1: that it was given back."""
        ...

    def events(self) -> np.ndarray[Any, Any]:
        """Int64 (events, 2): the block, and bytes taken, -1 given back, or -2 - label."""
        ...


class CoreMethods(Protocol):
    """A backend's name and array module, and what all of its families share."""

    name: str
    xp: Any
    bfloat16: Collection[str]
    """Primitives whose methods here take bfloat16, beside float32, as it is.

    They compute in float32. What they give is that, or rounded once to what the arrays promote to.
    """
    captured_heads: Collection[int] | None
    """Sizes of heads whose `cached_attention` a captured step repeats; None: any."""

    accumulating_vjps: Collection[str]
    """Primitives whose gradients' methods here take ``addend``, to be added to the first of them.

    It is float32, of the input's shape: a gradient that was there before.
    """
    overwriting_vjps: Collection[str]
    """Primitives whose gradients' methods here take ``overwrites``: they may write over ``g``."""

    def reads_stored(self, vjp: str, q: QuantArray, others: Sequence[Array]) -> bool:
        """Whether the gradient's method of a primitive takes its first input in flat blocks.

        ``others`` are the other inputs. Such an input is decoded as it is read.
        """
        ...

    @property
    def capturing(self) -> StepCapture | None:
        """The step that is being recorded, None while nothing is; see `extensor.capture`."""
        ...

    def new_graph(self) -> Graph | None:
        """What repeats a step without Python; None where Python is all there is."""
        ...

    def noted(self, call: Callable[[], Any]) -> tuple[Any, Replay | None]:
        """``call()``, and what repeats its kernels without Python; None where nothing does."""
        ...

    def memory_log(self) -> MemoryLog:
        """A new log of this device's memory.

        Raises:
            RuntimeError: where nothing can log it.
        """
        ...

    def raising(self) -> AbstractContextManager[Any]:
        """A context in which the array module's ``linalg`` raises LinAlgError, as numpy's does."""
        ...

    def refuse(self, bad: Array, error: Callable[[], Exception]) -> None:
        """Raise ``error()`` if an element of a bool array is true; waits for a device.

        In a capture nothing waits: updates stop then, and the error is raised afterwards.
        """
        ...

    def cast(self, x: Array, dtype: np.dtype[Any]) -> Array:
        """The values in another dtype, rounded to nearest even; x itself where it has that."""
        ...
