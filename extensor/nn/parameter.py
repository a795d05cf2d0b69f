"""Parameter and Buffer: the tensors that a module owns."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Self

from extensor.autograd.tensor import ExTensor
from extensor.dtypes import DTypeLike
from extensor.quant.array import QuantArray
from extensor.quant.recipe_state import RecipeState
from extensor.quant.replay import REPLAY

__all__ = ["Buffer", "Parameter"]


def _values(data: Any, device: str | None) -> tuple[Any, str | None]:
    """What `ExTensor` takes and copies, and the device: those of a tensor, out of its graph."""
    if not isinstance(data, ExTensor):
        return data, device
    device = device or data.device
    values = data.detach().to(device).data
    if isinstance(values, QuantArray):  # which ExTensor takes as it is
        values = replace(values, **{name: part.copy() for name, part in values.parts.items()})
    return values, device


class Parameter(ExTensor):
    """A tensor that a module trains: an ExTensor with ``requires_grad=True``.

    Args:
        data: what `ExTensor` takes, or a tensor, whose values are copied; a dense float dtype,
            float32 for master weights.
        dtype: converted to this dtype.
        device: ``"cpu"`` or ``"cuda"``; None is a tensor's own, else EXTENSOR_DEVICE, and the CPU
            without it.

    >>> import numpy as np
    >>> et.nn.Parameter(np.zeros((2, 3), np.float32)).requires_grad
    True
    """

    __slots__ = ("recipe_state",)

    is_parameter = True
    recipe_state: RecipeState | None
    """Of the recipe that a layer last used the parameter under; optimizers end its steps."""

    def __init__(
        self, data: Any, dtype: DTypeLike | None = None, *, device: str | None = None
    ) -> None:
        values, device = _values(data, device)
        super().__init__(values, dtype, device=device, requires_grad=True)
        self.recipe_state = None


class Buffer(ExTensor):
    """A tensor that a module keeps but does not train, such as a running mean.

    It moves with the module and is part of its ``state_dict``.

    Args:
        data: what `ExTensor` takes, blocked dtypes included, or a tensor, whose values are copied.
        dtype: converted to this dtype.
        device: ``"cpu"`` or ``"cuda"``; None is a tensor's own, else EXTENSOR_DEVICE, and the CPU
            without it.

    >>> norm = et.nn.BatchNorm2d(8)
    >>> isinstance(norm.running_mean, et.nn.Buffer), norm.running_mean.requires_grad
    (True, False)
    """

    __slots__ = ()

    def __init__(
        self, data: Any, dtype: DTypeLike | None = None, *, device: str | None = None
    ) -> None:
        values, device = _values(data, device)
        super().__init__(values, dtype, device=device)

    def assign_(self, array: Any) -> Self:
        """Replace the data; a `checkpoint` that runs takes note of the values before.

        Args:
            array: as of `ExTensor.assign_`.

        Returns:
            This buffer.

        >>> buffer = et.nn.Buffer([1.0])
        >>> buffer.assign_(buffer.data + 1).tolist()
        [2.0]
        """
        for log in REPLAY.logs:
            log.before_write(self)
        return super().assign_(array)
