"""The operators and methods of ExTensor that are operations.

Each calls the public operation of its name in the registry, where arguments,
defaults and errors are documented.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic

from extensor.autograd.node import Tensor
from extensor.autograd.primitive import FUNCTIONS

__all__ = ["OpMethods"]

_op = FUNCTIONS
Operand = Any
"""An ExTensor, a Python number or a numpy array."""
Axis = int | Sequence[int] | None


class OpMethods(Generic[Tensor]):
    """Operators and methods that call public operations by name."""

    __slots__ = ()
    __hash__ = object.__hash__  # `==` is elementwise, identity is what sets and dicts want

    # Arithmetic.

    def __add__(self, other: Operand) -> Tensor:
        return _op["add"](self, other)

    def __radd__(self, other: Operand) -> Tensor:
        return _op["add"](other, self)

    def __sub__(self, other: Operand) -> Tensor:
        return _op["subtract"](self, other)

    def __rsub__(self, other: Operand) -> Tensor:
        return _op["subtract"](other, self)

    def __mul__(self, other: Operand) -> Tensor:
        return _op["multiply"](self, other)

    def __rmul__(self, other: Operand) -> Tensor:
        return _op["multiply"](other, self)

    def __truediv__(self, other: Operand) -> Tensor:
        return _op["divide"](self, other)

    def __rtruediv__(self, other: Operand) -> Tensor:
        return _op["divide"](other, self)

    def __floordiv__(self, other: Operand) -> Tensor:
        return _op["floor_divide"](self, other)

    def __rfloordiv__(self, other: Operand) -> Tensor:
        return _op["floor_divide"](other, self)

    def __mod__(self, other: Operand) -> Tensor:
        return _op["remainder"](self, other)

    def __rmod__(self, other: Operand) -> Tensor:
        return _op["remainder"](other, self)

    def __pow__(self, other: Operand) -> Tensor:
        return _op["power"](self, other)

    def __rpow__(self, other: Operand) -> Tensor:
        return _op["power"](other, self)

    def __matmul__(self, other: Operand) -> Tensor:
        return _op["matmul"](self, other)

    def __rmatmul__(self, other: Operand) -> Tensor:
        return _op["matmul"](other, self)

    def __and__(self, other: Operand) -> Tensor:
        return _op["bitwise_and"](self, other)

    def __rand__(self, other: Operand) -> Tensor:
        return _op["bitwise_and"](other, self)

    def __or__(self, other: Operand) -> Tensor:
        return _op["bitwise_or"](self, other)

    def __ror__(self, other: Operand) -> Tensor:
        return _op["bitwise_or"](other, self)

    def __xor__(self, other: Operand) -> Tensor:
        return _op["bitwise_xor"](self, other)

    def __rxor__(self, other: Operand) -> Tensor:
        return _op["bitwise_xor"](other, self)

    def __lshift__(self, other: Operand) -> Tensor:
        return _op["bitwise_left_shift"](self, other)

    def __rlshift__(self, other: Operand) -> Tensor:
        return _op["bitwise_left_shift"](other, self)

    def __rshift__(self, other: Operand) -> Tensor:
        return _op["bitwise_right_shift"](self, other)

    def __rrshift__(self, other: Operand) -> Tensor:
        return _op["bitwise_right_shift"](other, self)

    def __neg__(self) -> Tensor:
        return _op["negative"](self)

    def __abs__(self) -> Tensor:
        return _op["abs"](self)

    def __invert__(self) -> Tensor:
        return _op["bitwise_invert"](self)

    def __pos__(self) -> Tensor:
        return _op["clone"](self)

    # Comparison, elementwise.

    def __eq__(self, other: Operand) -> Tensor:  # type: ignore[override]
        return _op["equal"](self, other)

    def __ne__(self, other: Operand) -> Tensor:  # type: ignore[override]
        return _op["not_equal"](self, other)

    def __lt__(self, other: Operand) -> Tensor:
        return _op["less"](self, other)

    def __le__(self, other: Operand) -> Tensor:
        return _op["less_equal"](self, other)

    def __gt__(self, other: Operand) -> Tensor:
        return _op["greater"](self, other)

    def __ge__(self, other: Operand) -> Tensor:
        return _op["greater_equal"](self, other)

    # Elementwise.

    def abs(self) -> Tensor:
        """See :func:`extensor.abs`."""
        return _op["abs"](self)

    def sign(self) -> Tensor:
        """See :func:`extensor.sign`."""
        return _op["sign"](self)

    def exp(self) -> Tensor:
        """See :func:`extensor.exp`."""
        return _op["exp"](self)

    def expm1(self) -> Tensor:
        """See :func:`extensor.expm1`."""
        return _op["expm1"](self)

    def log(self) -> Tensor:
        """See :func:`extensor.log`."""
        return _op["log"](self)

    def log1p(self) -> Tensor:
        """See :func:`extensor.log1p`."""
        return _op["log1p"](self)

    def log2(self) -> Tensor:
        """See :func:`extensor.log2`."""
        return _op["log2"](self)

    def log10(self) -> Tensor:
        """See :func:`extensor.log10`."""
        return _op["log10"](self)

    def sqrt(self) -> Tensor:
        """See :func:`extensor.sqrt`."""
        return _op["sqrt"](self)

    def rsqrt(self) -> Tensor:
        """See :func:`extensor.rsqrt`."""
        return _op["rsqrt"](self)

    def square(self) -> Tensor:
        """See :func:`extensor.square`."""
        return _op["square"](self)

    def sin(self) -> Tensor:
        """See :func:`extensor.sin`."""
        return _op["sin"](self)

    def cos(self) -> Tensor:
        """See :func:`extensor.cos`."""
        return _op["cos"](self)

    def tan(self) -> Tensor:
        """See :func:`extensor.tan`."""
        return _op["tan"](self)

    def tanh(self) -> Tensor:
        """See :func:`extensor.tanh`."""
        return _op["tanh"](self)

    def sigmoid(self) -> Tensor:
        """See :func:`extensor.sigmoid`."""
        return _op["sigmoid"](self)

    def relu(self) -> Tensor:
        """See :func:`extensor.relu`."""
        return _op["relu"](self)

    def erf(self) -> Tensor:
        """See :func:`extensor.erf`."""
        return _op["erf"](self)

    def ceil(self) -> Tensor:
        """See :func:`extensor.ceil`."""
        return _op["ceil"](self)

    def floor(self) -> Tensor:
        """See :func:`extensor.floor`."""
        return _op["floor"](self)

    def round(self) -> Tensor:
        """See :func:`extensor.round`."""
        return _op["round"](self)

    def trunc(self) -> Tensor:
        """See :func:`extensor.trunc`."""
        return _op["trunc"](self)

    def isnan(self) -> Tensor:
        """See :func:`extensor.isnan`."""
        return _op["isnan"](self)

    def isinf(self) -> Tensor:
        """See :func:`extensor.isinf`."""
        return _op["isinf"](self)

    def isfinite(self) -> Tensor:
        """See :func:`extensor.isfinite`."""
        return _op["isfinite"](self)

    def clone(self) -> Tensor:
        """See :func:`extensor.clone`."""
        return _op["clone"](self)

    def clip(self, low: Operand = None, high: Operand = None) -> Tensor:
        """See :func:`extensor.clip`; ``low`` and ``high`` are its ``min`` and ``max``."""
        return _op["clip"](self, low, high)

    # Reductions.

    def sum(self, axis: Axis = None, keepdims: bool = False) -> Tensor:
        """See :func:`extensor.sum`."""
        return _op["sum"](self, axis, keepdims)

    def mean(self, axis: Axis = None, keepdims: bool = False) -> Tensor:
        """See :func:`extensor.mean`."""
        return _op["mean"](self, axis, keepdims)

    def prod(self, axis: Axis = None, keepdims: bool = False) -> Tensor:
        """See :func:`extensor.prod`."""
        return _op["prod"](self, axis, keepdims)

    def max(self, axis: Axis = None, keepdims: bool = False) -> Tensor:
        """See :func:`extensor.max`."""
        return _op["max"](self, axis, keepdims)

    def min(self, axis: Axis = None, keepdims: bool = False) -> Tensor:
        """See :func:`extensor.min`."""
        return _op["min"](self, axis, keepdims)

    def any(self, axis: Axis = None, keepdims: bool = False) -> Tensor:
        """See :func:`extensor.any`."""
        return _op["any"](self, axis, keepdims)

    def all(self, axis: Axis = None, keepdims: bool = False) -> Tensor:
        """See :func:`extensor.all`."""
        return _op["all"](self, axis, keepdims)

    def logsumexp(self, axis: Axis = None, keepdims: bool = False) -> Tensor:
        """See :func:`extensor.logsumexp`."""
        return _op["logsumexp"](self, axis, keepdims)

    def median(self, axis: Axis = None, keepdims: bool = False) -> Tensor:
        """See :func:`extensor.median`."""
        return _op["median"](self, axis, keepdims)

    def var(self, axis: Axis = None, keepdims: bool = False, correction: float = 0) -> Tensor:
        """See :func:`extensor.var`."""
        return _op["var"](self, axis, keepdims, correction)

    def std(self, axis: Axis = None, keepdims: bool = False, correction: float = 0) -> Tensor:
        """See :func:`extensor.std`."""
        return _op["std"](self, axis, keepdims, correction)

    def argmax(self, axis: int | None = None, keepdims: bool = False) -> Tensor:
        """See :func:`extensor.argmax`."""
        return _op["argmax"](self, axis, keepdims)

    def argmin(self, axis: int | None = None, keepdims: bool = False) -> Tensor:
        """See :func:`extensor.argmin`."""
        return _op["argmin"](self, axis, keepdims)

    def cumsum(self, axis: int) -> Tensor:
        """See :func:`extensor.cumsum`."""
        return _op["cumsum"](self, axis)

    def softmax(self, axis: int = -1) -> Tensor:
        """See :func:`extensor.softmax`."""
        return _op["softmax"](self, axis)

    def log_softmax(self, axis: int = -1) -> Tensor:
        """See :func:`extensor.log_softmax`."""
        return _op["log_softmax"](self, axis)

    # Shape.

    def __getitem__(self, key: Any) -> Tensor:
        """See `extensor.getitem`."""
        return _op["getitem"](self, key)

    def reshape(self, *shape: Any) -> Tensor:
        """See :func:`extensor.reshape`."""
        return _op["reshape"](self, shape[0] if len(shape) == 1 else shape)

    def flatten(self, start: int = 0, end: int = -1) -> Tensor:
        """See :func:`extensor.flatten`."""
        return _op["flatten"](self, start, end)

    def ravel(self) -> Tensor:
        """See :func:`extensor.ravel`."""
        return _op["ravel"](self)

    def squeeze(self, axis: Axis = None) -> Tensor:
        """See :func:`extensor.squeeze`."""
        return _op["squeeze"](self, axis)

    def unsqueeze(self, axis: int | tuple[int, ...]) -> Tensor:
        """See :func:`extensor.expand_dims`."""
        return _op["expand_dims"](self, axis)

    def expand_dims(self, axis: int | tuple[int, ...]) -> Tensor:
        """See :func:`extensor.expand_dims`."""
        return _op["expand_dims"](self, axis)

    def broadcast_to(self, shape: Any) -> Tensor:
        """See :func:`extensor.broadcast_to`."""
        return _op["broadcast_to"](self, shape)

    def transpose(self, *axes: Any) -> Tensor:
        """See :func:`extensor.transpose`."""
        return _op["transpose"](self, *axes)

    def permute(self, *axes: Any) -> Tensor:
        """See :func:`extensor.permute`."""
        return _op["permute"](self, axes[0] if len(axes) == 1 else axes)

    def swapaxes(self, first: int, second: int) -> Tensor:
        """See :func:`extensor.swapaxes`."""
        return _op["swapaxes"](self, first, second)

    @property
    def T(self) -> Tensor:
        """All axes reversed, as numpy's ``T``."""
        return _op["transpose"](self)

    @property
    def mT(self) -> Tensor:  # noqa: N802 - the name of the standard
        """The last two axes exchanged."""
        return _op["matrix_transpose"](self)

    def flip(self, axis: Axis = None) -> Tensor:
        """See :func:`extensor.flip`."""
        return _op["flip"](self, axis)

    def roll(self, shift: Any, axis: Any = None) -> Tensor:
        """See :func:`extensor.roll`."""
        return _op["roll"](self, shift, axis)

    def take(self, indices: Any, axis: int = 0) -> Tensor:
        """See :func:`extensor.take`."""
        return _op["take"](self, indices, axis)

    def gather(self, indices: Any, axis: int = -1) -> Tensor:
        """See :func:`extensor.gather`."""
        return _op["gather"](self, indices, axis)

    def split(self, sections: Any, axis: int = 0) -> list[Tensor]:
        """See :func:`extensor.split`."""
        return _op["split"](self, sections, axis)

    def dot(self, other: Operand) -> Tensor:
        """See :func:`extensor.dot`."""
        return _op["dot"](self, other)

    def matmul(self, other: Operand) -> Tensor:
        """See :func:`extensor.matmul`."""
        return _op["matmul"](self, other)
