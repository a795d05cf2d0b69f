"""Many parameters in one call of a backend: the check of gradients, and fused updates.

A GPU spends less time on a small parameter than Python does on asking for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from extensor.backends.recording import Guard, Mirror, Recording
from extensor.dtypes import float32

if TYPE_CHECKING:
    from extensor.autograd.tensor import ExTensor
    from extensor.optim.optimizer import Optimizer, ParamGroup, _Member

__all__ = ["check_finite", "moves_together", "step_recorded", "step_together"]

Parts = list[tuple["_Member", "ExTensor"]]
"""Members with their gradients."""


def _by_backend(parts: Parts) -> list[tuple[Any, Parts]]:
    backends = {id(member.param.backend): member.param.backend for member, _ in parts}
    return [(b, [part for part in parts if part[0].param.backend is b]) for b in backends.values()]


MOST_UPDATES = 1024
"""Updates of a recorded step for which the device knows its factors beforehand."""


def _not_finite(member: _Member) -> FloatingPointError:
    return FloatingPointError(
        f"step: wanted finite gradients, got NaN or infinity in that of {member.name}; "
        "skip the step, or leave that to MXGradScaler().step(optimizer)"
    )


def check_finite(parts: Parts) -> None:
    """Refuse gradients that hold NaN or infinity, naming the first.

    Raises:
        FloatingPointError: if there is one.
    """
    for backend, mine in _by_backend(parts):
        finite = backend.all_finite_each([grad.data for _, grad in mine])
        for (member, _), is_finite in zip(mine, finite, strict=True):
            if not is_finite:
                raise _not_finite(member)


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


def step_recorded(
    optimizer: Optimizer,
    ready: Sequence[tuple[ParamGroup, _Member, ExTensor]],
    bad: Any,
    recording: Recording,
) -> None:
    """Record an update: how many were made, and so each parameter's step, is the device's business.

    Raises:
        ValueError: for parameters that would not be updated in one call: their state would be new
            arrays, which a recording cannot carry from step to step.
    """
    for _, member, grad in ready:
        if not moves_together(optimizer, member, grad):
            raise ValueError(
                f"step: {member.name}: a recorded step updates contiguous float32 parameters with "
                f"Adam, AdamW or SGD and states='float32', got {type(optimizer).__name__} with "
                f"states={optimizer.states!r}, a parameter of {member.param.dtype.name} and a "
                f"gradient of {grad.dtype.name}; use these, or leave optimizer.step() out of it"
            )
    members = [member for _, member, _ in ready]
    if bad is None:
        arrays = [grad.data for *_, grad in ready]
        bad = recording.finite(arrays, lambda number: _not_finite(members[number]))
    made = recording.persistent(np.zeros((), np.uint32))
    pushes: list[Callable[[], None]] = []
    for number, group in enumerate(optimizer.groups):
        mine = [(member, grad) for owner, member, grad in ready if owner is group]
        if mine:
            guard = _guard(optimizer, number, mine, bad, made, recording)
            arrays = [(m.param.data, g.data, m.arrays, m.step + 1) for m, g in mine]
            optimizer.update_each(mine[0][0].param.backend, arrays, group.options, guard)
            pushes += guard.pushes
    recording.count(made, bad)
    memory = [(m, m.param.data, dict(m.arrays)) for m in members]

    def moved() -> list[str]:
        """Parameters whose arrays are not those that the device writes to."""
        return [
            m.name
            for m, data, arrays in memory
            if m.param.data is not data or any(m.arrays[s] is not a for s, a in arrays.items())
        ]

    def push() -> None:
        recording.write(made, np.zeros((), np.uint32))
        for call in pushes:
            call()

    def pull() -> None:
        count = int(recording.read(made))
        for member in members:
            member.step += count

    def written() -> None:
        for member in members:
            member.param._version[0] += 1

    recording.frozen("the list of parameters whose memory was exchanged, as by loading", moved)
    recording.mirror(optimizer._mirrors, Mirror(push, pull, MOST_UPDATES))
    recording.on_repeat(written)


def _guard(
    optimizer: Optimizer, number: int, mine: Parts, bad: Any, made: Any, recording: Recording
) -> Guard:
    """Under what a group is updated; of its options only the learning rate may change."""
    group = optimizer.groups[number]

    def fixed() -> dict[str, Any]:
        return {name: value for name, value in group.options.items() if name != "lr"}

    def rate(ahead: int = 0) -> float:
        known = group.foretell if ahead else None
        return float(group.options["lr"]) if known is None else known(ahead)

    def factors(updates: int) -> Sequence[Mapping[str, float]]:
        steps = [member.step + 1 + updates for member, _ in mine]
        return optimizer.factors_each(steps, group.options)

    recording.frozen(f"the options of parameter group {number}", fixed)
    lr = recording.cell(("lr", id(optimizer), number), np.float64, rate, rate)
    return Guard(bad, made, lr, factors, MOST_UPDATES)
