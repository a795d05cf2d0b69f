"""Optimizer steps inside backward: each parameter moves once its gradient is complete."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from extensor.autograd.row_gradient import RowGradient
from extensor.backends.capture import StepCapture
from extensor.backends.protocol import FiniteQuery
from extensor.backends.row_sums import RowSums
from extensor.optim.captured import CapturedUpdates
from extensor.optim.multi_tensor import (
    Parts,
    arrays_of,
    backend_of,
    factors_of,
    nonfinite_error,
    step_multi_tensor,
    stream_numbers,
)
from extensor.optim.one_tensor import OneTensorOptimizer, step_one
from extensor.optim.params import Array, Gradient, ParamState

__all__ = ["SingleUpdates", "row_sums", "single_updates"]


class SingleUpdates(Protocol):
    """Updates of one backward pass, parameter by parameter."""

    def add(self, number: int, member: ParamState, grad: Gradient) -> None:
        """Update a parameter of the group with this number."""
        ...

    def end(self) -> int:
        """End the pass; the number of parameters that moved.

        Raises:
            FloatingPointError: if a gradient was not finite.
        """
        ...


def row_sums(
    optimizer: OneTensorOptimizer, member: ParamState, grad: RowGradient
) -> RowSums | None:
    """The sums of rows that an update reads in place of the gradient; None: it needs the array."""
    backend, param = member.param.backend, member.param
    if param.ndim != 2 or not optimizer.is_elementwise:
        return None
    sums = grad.summed(backend)
    if backend.xp is np:
        return sums
    several = backend_of(optimizer, [(member, sums)]) is backend
    return sums if several and member.takes_multi_tensor(sums) else None


def single_updates(optimizer: OneTensorOptimizer, capture: StepCapture | None) -> SingleUpdates:
    """How the parameters of a backward pass are updated, in a capture or outside one."""
    if capture is not None:
        return _CapturedSingles(optimizer, capture)
    optimizer._mirrors.settle()
    return _EagerSingles(optimizer)


class _CapturedSingles:
    """Updates whose gradients the device checks, one after the other."""

    def __init__(self, optimizer: OneTensorOptimizer, capture: StepCapture) -> None:
        self._updates = CapturedUpdates(optimizer, capture)

    def add(self, number: int, member: ParamState, grad: Gradient) -> None:
        parts: Parts = [(member, grad)]
        self._updates.require(parts)
        self._updates.add(number, parts, self._updates.nonfinite(parts))

    def end(self) -> int:
        if self._updates.members:
            self._updates.end()
        return len(self._updates.members)


class _EagerSingles:
    """Updates that a backend's kernel makes behind the check of their gradients.

    The host does not wait for the checks: a gradient that is not finite stops the updates on the
    device, that of its own parameter and all later ones, and the host learns of it at the end.
    """

    def __init__(self, optimizer: OneTensorOptimizer) -> None:
        self._optimizer = optimizer
        self._stop: Array = None
        self._launched: list[tuple[ParamState, FiniteQuery]] = []
        self._moved = 0

    def add(self, number: int, member: ParamState, grad: Gradient) -> None:
        optimizer, parts = self._optimizer, [(member, grad)]
        group, backend = optimizer.groups[number], backend_of(optimizer, parts)
        if backend is None or not member.takes_multi_tensor(grad):
            self._settle()
            try:
                if step_multi_tensor(optimizer, [(group, parts)], True):
                    step_one(optimizer, member, grad, group.options)
            except FloatingPointError as error:
                raise self._stopped(error) from error
            self._moved += 1
            return
        if self._stop is None:
            self._stop = backend.xp.zeros((), dtype=np.uint32)
        found = optimizer.update_multi_tensor(
            backend,
            arrays_of(parts),
            factors_of(optimizer, group.options, [member.step + 1]),
            check_finite=True,
            stop=self._stop,
            cache=optimizer._cache.setdefault(f"tensor {member.index}", {}),
            numbers=stream_numbers(parts),
        )
        self._launched.append((member, found))
        member.step += 1
        member.param._version[0] += 1

    def end(self) -> int:
        self._settle()
        return self._moved

    def _settle(self) -> None:
        """Wait for the updates launched so far; those that the device did not make are undone."""
        launched, self._launched = self._launched, []
        made = len(launched)
        if launched and int(self._stop):
            made = next(i for i, (_, found) in enumerate(launched) if not all(found()))
        self._moved += made
        for member, _ in launched[made:]:
            member.step -= 1
        if made < len(launched):
            raise self._stopped(nonfinite_error(launched[made][0]))

    def _stopped(self, error: FloatingPointError) -> FloatingPointError:
        total = sum(len(group.members) for group in self._optimizer.groups)
        return FloatingPointError(
            f"{error}. {self._moved} of {total} parameters have moved in this step already; go on "
            "from a checkpoint, with a lower learning rate, or step after backward"
        )
