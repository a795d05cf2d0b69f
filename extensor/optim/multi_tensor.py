"""Multi-tensor updates: one call of a backend checks or updates the arrays of many parameters.

A GPU spends less time on a small parameter than Python does on launching its kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from extensor.autograd.tensor import ExTensor
from extensor.backends.capture import HostMirror, HostMirrors, StepCapture, UpdateGuard
from extensor.backends.protocol import FiniteQuery
from extensor.optim.params import Array, ParamGroup, ParamState
from extensor.optim.states import tensor_number

__all__ = ["MultiTensorOptimizer", "step_captured", "step_multi_tensor"]

Parts = list[tuple[ParamState, ExTensor]]
"""Parameters with their gradients."""
Ready = Sequence[tuple[ParamGroup, Parts]]

MAX_UPDATES = 1024
"""Updates of a captured step for which the device gets the factors beforehand."""


class MultiTensorOptimizer(Protocol):
    """What a multi-tensor update needs of an optimizer; see `extensor.optim.Optimizer`."""

    states: str
    groups: list[ParamGroup]
    multi_tensor: bool
    _mirrors: HostMirrors
    _cache: dict[str, Any]

    def factors(self, options: Mapping[str, Any], step: int) -> Mapping[str, float]:
        """The numbers that an update multiplies by."""
        ...

    def update_multi_tensor(
        self,
        backend: Any,
        parts: Sequence[tuple[Array, Array, Mapping[str, Array]]],
        factors: Sequence[Mapping[str, float]],
        **how: Any,
    ) -> FiniteQuery:
        """Update whole parameters in one call."""
        ...


def _nonfinite(member: ParamState) -> FloatingPointError:
    return FloatingPointError(
        f"step: expected finite gradients, got NaN or infinity in that of {member.name}; "
        "skip the step, or leave that to MXGradScaler().step(optimizer)"
    )


def _refuse_nonfinite(parts: Parts, finite: Sequence[bool]) -> None:
    """Raise for the first gradient that is not finite."""
    for (member, _), is_finite in zip(parts, finite, strict=True):
        if not is_finite:
            raise _nonfinite(member)


def _check_finite(parts: Parts) -> None:
    """Refuse gradients that hold NaN or infinity, naming the first."""
    backends = {id(member.param.backend): member.param.backend for member, _ in parts}
    for backend in backends.values():
        mine = [part for part in parts if part[0].param.backend is backend]
        _refuse_nonfinite(mine, backend.all_finite_multi_tensor([grad.data for _, grad in mine]))


def _stream_numbers(parts: Parts) -> list[int]:
    """The numbers of the random streams that the parameters' states are rounded with."""
    return [tensor_number(member.index) for member, _ in parts]


def _arrays(parts: Parts) -> list[tuple[Array, Array, Mapping[str, Array]]]:
    return [(member.param.data, grad.data, member.arrays) for member, grad in parts]


def _factors(
    optimizer: MultiTensorOptimizer, options: Mapping[str, Any], steps: Iterable[int]
) -> list[Mapping[str, float]]:
    """The factors of each parameter; those in the same step share one mapping."""
    steps = list(steps)
    by_step = {step: optimizer.factors(options, step) for step in set(steps)}
    return [by_step[step] for step in steps]


def _multi_tensor_backend(optimizer: MultiTensorOptimizer, parts: Parts) -> Any:
    """The backend that updates many parameters in one call; None if there is none."""
    if not optimizer.multi_tensor:
        return None
    backends = (member.param.backend for member, _ in parts)
    return next((b for b in backends if optimizer.states in b.multi_tensor_states), None)


def step_multi_tensor(
    optimizer: MultiTensorOptimizer, ready: Ready, check_finite: bool
) -> list[tuple[ParamGroup, ParamState, ExTensor]]:
    """Update the parameters that a backend takes in one call, and return the others.

    Args:
        optimizer: the one the parameters belong to.
        ready: groups, and their parameters that have gradients.
        check_finite: whether all gradients are checked first. If all parameters are updated here,
            the device decides, and the host learns of it while the update runs.

    Raises:
        FloatingPointError: if a gradient holds NaN or infinity; nothing is updated then.
    """
    parts = [part for _, mine in ready for part in mine]
    backend = _multi_tensor_backend(optimizer, parts)
    chosen: Parts = []
    factors: list[Mapping[str, float]] = []
    others = []
    for group, mine in ready:
        before = len(chosen)
        for member, grad in mine:
            if member.param.backend is backend and member.takes_multi_tensor(grad):
                chosen.append((member, grad))
            else:
                others.append((group, member, grad))
        factors += _factors(optimizer, group.options, (m.step + 1 for m, _ in chosen[before:]))
    if check_finite and others:
        _check_finite(parts)
        check_finite = False
    if chosen:
        found = optimizer.update_multi_tensor(
            backend,
            _arrays(chosen),
            factors,
            check_finite=check_finite,
            cache=optimizer._cache,
            numbers=_stream_numbers(chosen),
        )
        if check_finite:
            _refuse_nonfinite(chosen, found())
    for member, _ in chosen:
        member.step += 1
        member.param._version[0] += 1  # written in place, and nothing else has changed
    return others


def step_captured(
    optimizer: MultiTensorOptimizer, ready: Ready, bad: Any, capture: StepCapture
) -> None:
    """Capture an update; the device counts the updates made, and with them each parameter's step.

    Raises:
        ValueError: for parameters that no multi-tensor update takes: their state would be new
            arrays, which a captured step cannot carry from step to step.
    """
    capture.in_warm_up(optimizer._mirrors.settle)  # other captures may have made steps
    parts = [part for _, mine in ready for part in mine]
    backend = _multi_tensor_backend(optimizer, parts)
    for member, grad in parts:
        if member.param.backend is not backend or not member.takes_multi_tensor(grad):
            raise ValueError(
                f"step: {member.name}: a captured step updates contiguous float32 parameters, and "
                "bfloat16 ones with masters=False, with Adam, AdamW or SGD, got "
                f"{type(optimizer).__name__}, a parameter of {member.param.dtype.name} and a "
                f"gradient of {grad.dtype.name}; use these, or leave optimizer.step() out of it"
            )
    members = [member for member, _ in parts]
    if bad is None:
        grads = [grad.data for _, grad in parts]
        bad = capture.nonfinite(grads, lambda number: _nonfinite(members[number]))
    made = capture.persistent(np.zeros((), np.uint32))
    pushes: list[Callable[[], None]] = []
    for number, (group, mine) in enumerate(ready):
        if mine:
            guard = _guard(optimizer, number, mine, bad, made, capture)
            factors = _factors(optimizer, group.options, (m.step + 1 for m, _ in mine))
            optimizer.update_multi_tensor(
                backend, _arrays(mine), factors, guard=guard, numbers=_stream_numbers(mine)
            )
            pushes += guard.pushes
    capture.count_update(made, bad)
    captured = [(m, m.param.data, dict(m.arrays)) for m in members]

    def replaced() -> list[str]:
        """Parameters whose arrays are no longer those that the device writes to."""
        return [
            m.name
            for m, data, arrays in captured
            if m.param.data is not data or any(m.arrays[s] is not a for s, a in arrays.items())
        ]

    def push() -> None:
        capture.write(made, np.zeros((), np.uint32))
        for call in pushes:
            call()

    def pull() -> None:
        count = int(capture.read(made))
        for member in members:
            member.step += count

    capture.frozen("the list of parameters whose memory was exchanged, as by loading", replaced)
    capture.mirror(optimizer._mirrors, HostMirror(push, pull, MAX_UPDATES))
    for member in members:
        member.param._count_write()


def _guard(
    optimizer: MultiTensorOptimizer,
    number: int,
    mine: Parts,
    bad: Any,
    made: Any,
    capture: StepCapture,
) -> UpdateGuard:
    """The conditions of a group's captured update; only its learning rate may change later."""
    group = optimizer.groups[number]

    def fixed() -> dict[str, Any]:
        return {name: value for name, value in group.options.items() if name != "lr"}

    def rate(ahead: int = 0) -> float:
        known = group.lookahead if ahead else None
        return float(group.options["lr"]) if known is None else known(ahead)

    def factors(updates: int) -> Sequence[Mapping[str, float]]:
        return _factors(optimizer, group.options, (m.step + 1 + updates for m, _ in mine))

    capture.frozen(f"the options of parameter group {number}", fixed)
    lr = capture.cell(("lr", id(optimizer), number), np.float64, rate, rate)
    return UpdateGuard(bad, made, lr, factors, MAX_UPDATES)
