"""Optimizers in a captured step: the device counts the updates of each parameter."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from extensor.backends.capture import HostMirror, StepCapture, UpdateGuard
from extensor.optim.multi_tensor import (
    MultiTensorOptimizer,
    Parts,
    Ready,
    arrays_of,
    backend_of,
    block_format,
    factors_of,
    is_taken,
    nonfinite_error,
    stream_numbers,
)
from extensor.optim.params import ParamState, values_of
from extensor.optim.states import Stored
from extensor.quant.array import QuantArray

__all__ = ["CapturedUpdates", "step_captured"]

MAX_UPDATES = 1024
"""Updates of a captured step for which the device gets the factors beforehand."""


def step_captured(
    optimizer: MultiTensorOptimizer, ready: Ready, bad: Any, capture: StepCapture
) -> None:
    """Capture an update of all parameters at once.

    Args:
        optimizer: the one the parameters belong to.
        ready: groups, and their parameters that have gradients.
        bad: uint32 of shape () on the device, what `Optimizer.step_unless` got; None: checked here.
        capture: the capture under way.

    Raises:
        ValueError: as `CapturedUpdates.add`.
    """
    updates = CapturedUpdates(optimizer, capture)
    parts = [part for _, mine in ready for part in mine]
    updates.require(parts)
    if bad is None:
        bad = updates.nonfinite(parts)
    for number, (_, mine) in enumerate(ready):
        if mine:
            updates.add(number, mine, bad)
    updates.end()


def _same_memory(now: Stored, then: Stored) -> bool:
    """Whether arrays, or the parts of what is in blocks, are the same ones."""
    if not isinstance(now, QuantArray) or not isinstance(then, QuantArray):
        return now is then
    return all(now.parts.get(name) is part for name, part in then.parts.items())


class CapturedUpdates:
    """The updates of one captured step, one call after the other.

    Args:
        optimizer: the one the parameters belong to.
        capture: the capture under way.
    """

    def __init__(self, optimizer: MultiTensorOptimizer, capture: StepCapture) -> None:
        capture.in_warm_up(optimizer._mirrors.settle)  # other captures may have made steps
        self._optimizer, self._capture = optimizer, capture
        self._made = capture.persistent(np.zeros((), np.uint32))
        self._pushes: list[Callable[[], None]] = []
        self._guards: dict[tuple[int, ...], UpdateGuard] = {}
        self._bad: Any = None
        self.members: list[ParamState] = []

    def require(self, parts: Parts) -> None:
        """Refuse what no multi-tensor update takes.

        Raises:
            ValueError: naming the parameter: its state would be new arrays, which a captured step
                cannot carry from step to step.
        """
        optimizer, backend = self._optimizer, backend_of(self._optimizer, parts)
        form = block_format(parts)
        for member, grad in parts:
            param = member.param
            if not is_taken(member, grad, backend, form):
                raise ValueError(
                    f"step: {member.name}: a captured step updates contiguous float32 parameters, "
                    "and with masters=False those in bfloat16 or in blocks of one format, in rows "
                    "of whole blocks, with Adam, AdamW, Lion or SGD, got "
                    f"{type(optimizer).__name__}, a parameter of shape {param.shape} in "
                    f"{param.dtype.name} and a gradient of {grad.dtype.name}; use these, or leave "
                    "the optimizer out of it"
                )

    def nonfinite(self, parts: Parts) -> Any:
        """Uint32 of shape (): whether a gradient is not finite, which stops all later updates."""
        grads, members = [values_of(grad) for _, grad in parts], [member for member, _ in parts]
        return self._capture.nonfinite(grads, lambda number: nonfinite_error(members[number]))

    def add(self, number: int, parts: Parts, bad: Any) -> None:
        """Capture the update of parameters of a group, unless ``bad``.

        Args:
            number: the group's.
            parts: the parameters and their gradients, as `require` allows them.
            bad: uint32 of shape () on the device.
        """
        guard = replace(self._guard(number, parts), bad=bad)
        optimizer = self._optimizer
        options, steps = optimizer.groups[number].options, [m.step + 1 for m, _ in parts]
        optimizer.update_multi_tensor(
            parts[0][0].param.backend,
            arrays_of(parts),
            factors_of(optimizer, options, steps),
            guard=guard,
            numbers=stream_numbers(parts),
        )
        self._bad = bad
        for member, _ in parts:
            member.param._count_write()  # each replay outdates what was made from it
            self.members.append(member)

    def _guard(self, number: int, parts: Parts) -> UpdateGuard:
        """The conditions of a group's update; only its learning rate may change later.

        Calls whose parameters have had as many updates share them, and the numbers on the device.
        """
        steps = [member.step + 1 for member, _ in parts]
        if (key := (number, *steps)) in self._guards:
            return self._guards[key]
        optimizer, capture = self._optimizer, self._capture
        group = optimizer.groups[number]

        def fixed() -> dict[str, Any]:
            return {name: value for name, value in group.options.items() if name != "lr"}

        def rate(ahead: int = 0) -> float:
            known = group.lookahead if ahead else None
            return float(group.options["lr"]) if known is None else known(ahead)

        def factors(updates: int) -> Sequence[Mapping[str, float]]:
            now = [member.step + 1 + updates for member, _ in parts]
            return factors_of(optimizer, group.options, now)

        if not any(other == number for other, *_ in self._guards):
            capture.frozen(f"the options of parameter group {number}", fixed)
        lr = capture.cell(("lr", id(optimizer), number), np.float64, rate, rate)
        guard = UpdateGuard(None, self._made, lr, factors, MAX_UPDATES, self._pushes)
        return self._guards.setdefault(key, guard)

    def end(self) -> None:
        """Count the step, and keep the host's numbers up to date around each replay."""
        capture, members, made, pushes = self._capture, self.members, self._made, self._pushes
        capture.count_update(made, self._bad)
        captured = [(m, m.param.data, dict(m.arrays)) for m in members]

        def replaced() -> list[str]:
            """Parameters whose arrays are no longer those that the device writes to."""
            return [
                m.name
                for m, data, arrays in captured
                if not _same_memory(m.param.data, data)
                or not all(_same_memory(m.arrays[s], a) for s, a in arrays.items())
            ]

        def push() -> None:
            capture.write(made, np.zeros((), np.uint32))
            for call in pushes:
                call()

        def pull() -> None:
            count = int(capture.read(made))
            for member in members:
                member.step += count

        what = "the list of parameters whose memory was exchanged, as by loading"
        capture.frozen(what, replaced)
        capture.mirror(self._optimizer._mirrors, HostMirror(push, pull, MAX_UPDATES))
