"""Multi-tensor updates: one call of a backend checks or updates the arrays of many parameters.

A GPU spends less time on a small parameter than Python does on launching its kernel.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from extensor.backends.capture import HostMirrors
from extensor.backends.protocol import FiniteQuery
from extensor.backends.row_sums import RowSums
from extensor.optim.params import Array, Gradient, ParamGroup, ParamState, values_of
from extensor.optim.states import tensor_number

__all__ = [
    "MultiTensorOptimizer",
    "Parts",
    "Ready",
    "arrays_of",
    "backend_of",
    "block_format",
    "factors_of",
    "has_kernel",
    "is_taken",
    "nonfinite_error",
    "step_multi_tensor",
    "stream_numbers",
]

Parts = list[tuple[ParamState, Gradient]]
"""Parameters with their gradients."""
Ready = Sequence[tuple[ParamGroup, Parts]]


class MultiTensorOptimizer(Protocol):
    """What a multi-tensor update needs of an optimizer; see `extensor.optim.Optimizer`."""

    states: str
    groups: list[ParamGroup]
    multi_tensor: bool
    _mirrors: HostMirrors
    _cache: dict[str, Any]

    @property
    def is_elementwise(self) -> bool:
        """See `UpdateRule.is_elementwise`."""
        ...

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


def nonfinite_error(member: ParamState) -> FloatingPointError:
    """What a gradient that holds NaN or infinity raises."""
    return FloatingPointError(
        f"step: expected finite gradients, got NaN or infinity in that of {member.name}; "
        "skip the step, or leave that to MXGradScaler().step(optimizer)"
    )


def _refuse_nonfinite(parts: Parts, finite: Sequence[bool]) -> None:
    """Raise for the first gradient that is not finite."""
    for (member, _), is_finite in zip(parts, finite, strict=True):
        if not is_finite:
            raise nonfinite_error(member)


def _check_finite(parts: Parts) -> None:
    """Refuse gradients that hold NaN or infinity, naming the first."""
    backends = {id(member.param.backend): member.param.backend for member, _ in parts}
    for backend in backends.values():
        mine = [part for part in parts if part[0].param.backend is backend]
        arrays = [values_of(grad) for _, grad in mine]
        _refuse_nonfinite(mine, backend.all_finite_multi_tensor(arrays))


def stream_numbers(parts: Parts) -> list[int]:
    """The numbers of the random streams that the parameters' states are rounded with."""
    return [tensor_number(member.index) for member, _ in parts]


def arrays_of(parts: Parts) -> list[tuple[Array, Any, Mapping[str, Array]]]:
    """Weight, gradient and state of each, as `Optimizer.update_multi_tensor` takes them."""
    return [
        (member.param.data, grad if isinstance(grad, RowSums) else grad.data, member.arrays)
        for member, grad in parts
    ]


def factors_of(
    optimizer: MultiTensorOptimizer, options: Mapping[str, Any], steps: Iterable[int]
) -> list[Mapping[str, float]]:
    """The factors of each parameter; those in the same step share one mapping."""
    steps = list(steps)
    by_step = {step: optimizer.factors(options, step) for step in set(steps)}
    return [by_step[step] for step in steps]


def has_kernel(optimizer: MultiTensorOptimizer) -> bool:
    """Whether kernels make the whole update: none of them calls a `prepare`."""
    return optimizer.multi_tensor and optimizer.is_elementwise


def backend_of(optimizer: MultiTensorOptimizer, parts: Parts) -> Any:
    """The backend that updates many parameters in one call; None if there is none."""
    if not has_kernel(optimizer):
        return None
    backends = (member.param.backend for member, _ in parts)
    return next((b for b in backends if optimizer.states in b.multi_tensor_states), None)


def block_format(parts: Parts) -> Any:
    """The dtype of the first parameter in blocks: one call takes blocks of one format."""
    return next((m.param.dtype for m, _ in parts if m.param.is_blocked), None)


def is_taken(member: ParamState, grad: Gradient, backend: Any, form: Any) -> bool:
    """Whether a call of this backend, with blocks of `block_format`, moves the parameter."""
    param = member.param
    if param.backend is not backend or (param.is_blocked and param.dtype is not form):
        return False
    return member.takes_multi_tensor(grad)


def step_multi_tensor(
    optimizer: MultiTensorOptimizer, ready: Ready, check_finite: bool
) -> list[tuple[ParamGroup, ParamState, Gradient]]:
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
    backend, form = backend_of(optimizer, parts), block_format(parts)
    chosen: Parts = []
    factors: list[Mapping[str, float]] = []
    others = []
    for group, mine in ready:
        before = len(chosen)
        for member, grad in mine:
            if is_taken(member, grad, backend, form):
                chosen.append((member, grad))
            else:
                others.append((group, member, grad))
        factors += factors_of(optimizer, group.options, (m.step + 1 for m, _ in chosen[before:]))
    if check_finite and others:
        _check_finite(parts)
        check_finite = False
    if chosen:
        found = optimizer.update_multi_tensor(
            backend,
            arrays_of(chosen),
            factors,
            check_finite=check_finite,
            cache=optimizer._cache,
            numbers=stream_numbers(chosen),
        )
        if check_finite:
            _refuse_nonfinite(chosen, found())
    for member, _ in chosen:
        member.step += 1
        member.param._version[0] += 1  # written in place, and nothing else has changed
    return others
