"""Parameters as optimizers hold them: groups that share options, state, and the checks of both."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from extensor.autograd.tensor import ExTensor
from extensor.backends.row_sums import RowSums
from extensor.dtypes import bfloat16, float32, float64
from extensor.optim.states import Stored, block_spec
from extensor.quant.array import QuantArray, tile_extent

__all__ = [
    "MASTER",
    "Gradient",
    "Option",
    "ParamGroup",
    "ParamState",
    "Segment",
    "check_betas",
    "check_range",
    "values_of",
    "wide_dtype",
]

Array = Any
Option = float | bool
Gradient = ExTensor | RowSums
"""Of a parameter: all of it; or the rows of an embedding that are not zero."""

MASTER = "master"
"""Where `ParamState.arrays` has a float32 copy that takes the updates."""


class Segment(NamedTuple):
    """What one call of `Optimizer.update` moves: a slice of a parameter, or all of it.

    Attributes:
        weight: float32 (float64 for a float64 parameter); updates write to it.
        grad: of the same shape and dtype; nobody writes to it.
        state: arrays by slot, of the same shape and dtype; updates write to them.
        scratch: two arrays of the same shape and dtype, of any content.
    """

    weight: Array
    grad: Array
    state: Mapping[str, Array]
    scratch: tuple[Array, ...] = ()


@dataclass(eq=False)
class ParamState:
    """One parameter, its number in the optimizer, and its state: flat arrays as they are stored."""

    name: str
    param: ExTensor
    shape: tuple[int, ...]
    index: int
    arrays: dict[str, Stored]
    step: int = 0
    whole: Array = None
    """The parameter's array, once it is known to be contiguous, of its shape and fit to be one."""
    strides: tuple[int, ...] = ()
    """The strides of `whole`, and of most gradients."""

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"whole": None}

    def takes_multi_tensor(self, grad: Gradient) -> bool:
        """Whether a multi-tensor update can use the parameter's and the gradient's own arrays.

        Both float32; or, where the parameter is its own master, both bfloat16, or the parameter in
        whole blocks. Rows are of whole vectors, and their kernel counts in 32 bits.
        """
        param, data = self.param, self.param.data
        if data is not self.whole:  # checked once: each look at an array costs what a launch does
            narrow = (param.dtype is bfloat16 or param.is_blocked) and MASTER not in self.arrays
            if not (narrow or param.dtype is float32) or data.shape != self.shape:
                return False
            if not (_in_whole_blocks(data) if param.is_blocked else data.flags.c_contiguous):
                return False
            self.whole, self.strides = data, () if param.is_blocked else data.strides
        dtype = bfloat16 if param.is_blocked else param.dtype
        if isinstance(grad, RowSums):
            whole = grad.shape[1] % 4 == 0 and param.size < 1 << 32
            return bool(grad.dtype == dtype.numpy and whole)
        if grad.dtype is not dtype:
            return False
        return bool(grad.data.strides == self.strides or grad.data.flags.c_contiguous)


@dataclass(eq=False)
class ParamGroup:
    """Parameters that share options; an optimizer makes them.

    Attributes:
        options: the options in force, ``lr`` among them; changes take effect in the next step.
        base_lr: the learning rate that schedules multiply.
        members: the parameters with their state.
        lookahead: the learning rate a number of steps after this one, as far as a schedule
            knows it.

    >>> optimizer = et.optim.SGD([et.nn.Parameter([1.0])], lr=0.1)
    >>> optimizer.groups[0].options["lr"] = 0.01
    >>> optimizer.groups[0].base_lr
    0.1
    """

    options: dict[str, Option]
    base_lr: float
    members: list[ParamState] = field(default_factory=list)
    lookahead: Callable[[int], float] | None = field(default=None, repr=False)
    """The learning rate a number of steps after this one, as far as a schedule knows it."""

    @property
    def params(self) -> list[ExTensor]:
        """The group's parameters."""
        return [member.param for member in self.members]


def _in_whole_blocks(data: QuantArray) -> bool:
    """Whether a matrix is as `extensor.nn.cast_weights` makes it, its rows of whole blocks."""
    spec = block_spec(data.spec.format)
    along = data.spec.replace(axis=0, rounding=spec.rounding)
    _, block = tile_extent(data.spec, data.shape)
    whole = data.spec.axis == len(data.shape) - 1 and data.shape[-1] % block == 0
    return whole and along == spec and all(p.flags.c_contiguous for p in data.parts.values())


def values_of(grad: Gradient) -> Array:
    """All values of a gradient that may differ from zero, as an array."""
    return grad.values if isinstance(grad, RowSums) else grad.data


def wide_dtype(param: ExTensor) -> Any:
    """The precision in which a parameter is updated."""
    return np.float64 if param.dtype is float64 else np.float32


def check_range(name: str, value: Any, low: float, below: float = math.inf) -> None:
    """Refuse an option outside [low, below).

    Raises:
        TypeError: if it is not a number.
        ValueError: if it is out of range or not finite.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name}: expected a number, got {value!r}")
    if not low <= value < below:
        raise ValueError(f"{name}: expected a finite number in [{low}, {below}), got {value!r}")


def check_betas(betas: object) -> tuple[Any, Any]:
    """Split a pair of decay rates; `check_range` checks their values.

    Raises:
        TypeError: for anything but two values.
    """
    if not isinstance(betas, (tuple, list)) or len(betas) != 2:
        raise TypeError(f"betas: expected two numbers, got {betas!r}")
    return betas[0], betas[1]


def check_param(name: object, param: object) -> None:
    """Refuse what an optimizer cannot update.

    Raises:
        TypeError: for a name that is no string, and for what is no dense float tensor, nor blocks
            that `extensor.nn.cast_weights` made.
        ValueError: for a tensor that requires no gradient.
    """
    if not isinstance(name, str):
        raise TypeError(f"params: expected a name and a tensor, got {name!r}")
    if not isinstance(param, ExTensor):
        raise TypeError(f"params: {name}: expected an ExTensor, got {type(param).__name__}")
    if not (param.dtype.is_float or param.is_blocked_parameter):
        raise TypeError(
            f"params: {name}: expected a dense float tensor, got {param.dtype}; keep master "
            "weights in float32 and quantize in the forward pass, or store the weights of a model "
            "in blocks with nn.cast_weights"
        )
    if not param.requires_grad:
        raise ValueError(f"params: {name} requires no gradient; set requires_grad, or leave it out")
