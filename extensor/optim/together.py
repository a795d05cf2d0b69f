"""Many parameters in one call of a backend: the check of gradients, and fused updates.

A GPU spends less time on a small parameter than Python does on asking for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from extensor.backends.recording import Guard, Mirror, Recording
from extensor.dtypes import float32
from extensor.optim.states import tensor_number

if TYPE_CHECKING:
    from extensor.autograd.tensor import ExTensor
    from extensor.optim.optimizer import Optimizer, ParamGroup, _Member

__all__ = ["step_recorded", "step_together"]

Parts = list[tuple["_Member", "ExTensor"]]
"""Members with their gradients."""
Ready = Sequence[tuple["ParamGroup", Parts]]

MOST_UPDATES = 1024
"""Updates of a recorded step for which the device knows its factors beforehand."""


def _not_finite(member: _Member) -> FloatingPointError:
    return FloatingPointError(
        f"step: wanted finite gradients, got NaN or infinity in that of {member.name}; "
        "skip the step, or leave that to MXGradScaler().step(optimizer)"
    )


def _refuse(parts: Parts, finite: Sequence[bool]) -> None:
    for (member, _), is_finite in zip(parts, finite, strict=True):
        if not is_finite:
            raise _not_finite(member)


def _numbers(parts: Parts) -> list[int]:
    """Whose random bits the states of these are rounded with."""
    return [tensor_number(member.index) for member, _ in parts]


def _check_finite(parts: Parts) -> None:
    """Refuse gradients that hold NaN or infinity, naming the first."""
    backends = {id(member.param.backend): member.param.backend for member, _ in parts}
    for backend in backends.values():
        mine = [part for part in parts if part[0].param.backend is backend]
        _refuse(mine, backend.all_finite_multi_tensor([grad.data for _, grad in mine]))


def _common(optimizer: Optimizer, parts: Parts) -> Any:
    """The backend that takes many parameters in one call, if that serves the optimizer."""
    if not optimizer.fused:
        return None
    backends = (member.param.backend for member, _ in parts)
    return next((b for b in backends if optimizer.states in b.multi_tensor_states), None)


def _fits(member: _Member, grad: ExTensor) -> bool:
    """Whether a parameter's arrays go to the backend as they are, with those of others."""
    data = member.param.data
    if data is not member.whole:  # asked once: each question of an array costs what a launch does
        if member.param.dtype is not float32 or data.shape != member.shape:
            return False
        if not data.flags.c_contiguous:
            return False
        member.whole, member.strides = data, data.strides
    if grad.dtype is not float32:
        return False
    return bool(grad.data.strides == member.strides or grad.data.flags.c_contiguous)


def step_together(
    optimizer: Optimizer, ready: Ready, check_finite: bool
) -> list[tuple[ParamGroup, _Member, ExTensor]]:
    """Update the parameters that a backend takes in one call, and give back the others.

    Args:
        optimizer: theirs.
        ready: what has gradients.
        check_finite: whether all gradients are checked first. Where all are updated here, the
            device decides, and the host hears of it while the update runs.

    Raises:
        FloatingPointError: if a gradient holds NaN or infinity; nothing is updated then.
    """
    parts = [part for _, mine in ready for part in mine]
    backend = _common(optimizer, parts)
    together: Parts = []
    factors: list[Mapping[str, float]] = []
    apart = []
    for group, mine in ready:
        before = len(together)
        for member, grad in mine:
            if member.param.backend is backend and _fits(member, grad):
                together.append((member, grad))
            else:
                apart.append((group, member, grad))
        if steps := [member.step + 1 for member, _ in together[before:]]:
            factors += optimizer.factors_each(steps, group.options)
    if check_finite and apart:
        _check_finite(parts)
        check_finite = False
    if together:
        arrays = [(m.param.data, g.data, m.arrays) for m, g in together]
        more = {
            "check_finite": check_finite,
            "cache": optimizer._memory,
            "numbers": _numbers(together),
        }
        found = optimizer.update_each(backend, arrays, factors, **more)
        if check_finite:
            _refuse(together, found())
    for member, _ in together:
        member.step += 1
        member.param._version[0] += 1  # written in place, and nothing else has changed
    return apart


def step_recorded(optimizer: Optimizer, ready: Ready, bad: Any, recording: Recording) -> None:
    """Record an update: how many were made, and so each parameter's step, is the device's business.

    Raises:
        ValueError: for parameters that would not be updated in one call: their state would be new
            arrays, which a recording cannot carry from step to step.
    """
    recording.at_once(optimizer._mirrors.settle)  # other recordings may have made steps
    parts = [part for _, mine in ready for part in mine]
    backend = _common(optimizer, parts)
    for member, grad in parts:
        if member.param.backend is not backend or not _fits(member, grad):
            raise ValueError(
                f"step: {member.name}: a recorded step updates contiguous float32 parameters with "
                f"Adam, AdamW or SGD, got {type(optimizer).__name__}, a parameter of "
                f"{member.param.dtype.name} and a gradient of {grad.dtype.name}; use these, or "
                "leave optimizer.step() out of it"
            )
    members = [member for member, _ in parts]
    if bad is None:
        arrays = [grad.data for _, grad in parts]
        bad = recording.finite(arrays, lambda number: _not_finite(members[number]))
    made = recording.persistent(np.zeros((), np.uint32))
    pushes: list[Callable[[], None]] = []
    for number, (group, mine) in enumerate(ready):
        if mine:
            guard = _guard(optimizer, number, mine, bad, made, recording)
            arrays = [(m.param.data, g.data, m.arrays) for m, g in mine]
            factors = optimizer.factors_each([m.step + 1 for m, _ in mine], group.options)
            more = {"guard": guard, "numbers": _numbers(mine)}
            optimizer.update_each(backend, arrays, factors, **more)
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

    recording.frozen("the list of parameters whose memory was exchanged, as by loading", moved)
    recording.mirror(optimizer._mirrors, Mirror(push, pull, MOST_UPDATES))
    for member in members:
        member.param._count_write()


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
