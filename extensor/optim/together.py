"""Many parameters in one call of a backend: the check of gradients, and fused updates.

A GPU spends less time on a small parameter than Python does on asking for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from extensor.dtypes import float32

if TYPE_CHECKING:
    from extensor.autograd.tensor import ExTensor
    from extensor.optim.optimizer import Optimizer, _Member

__all__ = ["check_finite", "moves_together", "step_together"]

Parts = list[tuple["_Member", "ExTensor"]]
"""Members with their gradients."""


def _by_backend(parts: Parts) -> list[tuple[Any, Parts]]:
    backends = {id(member.param.backend): member.param.backend for member, _ in parts}
    return [(b, [part for part in parts if part[0].param.backend is b]) for b in backends.values()]


def check_finite(parts: Parts) -> None:
    """Refuse gradients that hold NaN or infinity, naming the first.

    Raises:
        FloatingPointError: if there is one.
    """
    for backend, mine in _by_backend(parts):
        finite = backend.all_finite_each([grad.data for _, grad in mine])
        for (member, _), is_finite in zip(mine, finite, strict=True):
            if not is_finite:
                raise FloatingPointError(
                    f"step: wanted finite gradients, got NaN or infinity in that of {member.name}; "
                    "skip the step, or leave that to MXGradScaler().step(optimizer)"
                )


def moves_together(optimizer: Optimizer, member: _Member, grad: ExTensor) -> bool:
    """Whether a parameter's arrays go to the backend as they are, with those of others."""
    param = member.param
    if not (optimizer.fused and param.backend.steps_together and optimizer.states == "float32"):
        return False
    if param.dtype is not float32 or grad.dtype is not float32:
        return False
    return bool(param.data.flags.c_contiguous and grad.data.flags.c_contiguous)


def step_together(optimizer: Optimizer, parts: Parts, options: Mapping[str, Any]) -> None:
    """Update the parameters that `moves_together` lets through."""
    for backend, mine in _by_backend(parts):
        arrays = []
        for member, grad in mine:
            member.step += 1
            arrays.append((member.param.data, grad.data, member.arrays, member.step))
        optimizer.update_each(backend, arrays, options)
        for member, _ in mine:
            member.param._version[0] += 1  # written in place, and nothing else has changed
