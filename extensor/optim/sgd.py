"""Stochastic gradient descent, and LARS, which scales its steps by tensor norms."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from extensor.backends.protocol import FiniteQuery
from extensor.optim.optimizer import Optimizer
from extensor.optim.params import Array, Option, Segment
from extensor.optim.rule import FRACTION, POSITIVE

__all__ = ["LARS", "SGD"]


class SGD(Optimizer):
    """Gradient descent with momentum, Nesterov's lookahead and L2 weight decay.

    With g' = g + weight_decay w and the buffer b = momentum b + g', the weight moves by -lr d,
    where d = g' + momentum b under ``nesterov``, else d = b (Sutskever et al., ICML 2013, in the
    form that keeps lr out of the buffer).

    Args:
        params: see `Optimizer`.
        lr: learning rate, 0 or more.
        momentum: in [0, 1).
        nesterov: whether to look ahead; needs momentum.
        weight_decay: 0 or more.
        states: how the state is stored; see `Optimizer`.
        masters: whether bfloat16 parameters have float32 copies; see `Optimizer`.

    Raises:
        ValueError: for an option out of range, or Nesterov without momentum.

    >>> w = et.nn.Parameter([1.0, 2.0])
    >>> optimizer = et.optim.SGD([w], lr=0.5, momentum=0.9)
    >>> w.square().sum().backward()
    >>> optimizer.step()
    >>> w.tolist()
    [0.0, 0.0]
    """

    ranges = MappingProxyType({**Optimizer.ranges, "momentum": FRACTION})
    multi_tensor = True

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        momentum: float = 0.0,
        nesterov: bool = False,
        weight_decay: float = 0.0,
        *,
        states: str = "float32",
        masters: bool = True,
    ) -> None:
        super().__init__(
            params,
            states=states,
            masters=masters,
            lr=lr,
            momentum=momentum,
            nesterov=nesterov,
            weight_decay=weight_decay,
        )

    def _check_options(self, options: Mapping[str, Option]) -> None:
        super()._check_options(options)
        if options["nesterov"] and not options["momentum"]:
            raise ValueError("nesterov: expected momentum above 0 with it, got 0")

    def slots(self, options: Mapping[str, Option]) -> tuple[str, ...]:
        """See :meth:`extensor.optim.Optimizer.slots`: a momentum buffer, if there is momentum."""
        return ("momentum",) if options["momentum"] else ()

    def update(self, backend: Any, part: Segment, options: Mapping[str, Any], step: int) -> None:
        """See :meth:`extensor.optim.Optimizer.update`."""
        buffer = part.state["momentum"] if options["momentum"] else None
        by = self.factors(options, step)
        numbers = (by["lr"], by["momentum"], by["decay"])
        backend.sgd(part.weight, part.grad, buffer, *numbers, options["nesterov"])

    def update_multi_tensor(
        self,
        backend: Any,
        parts: Sequence[tuple[Array, Array, Mapping[str, Array]]],
        factors: Sequence[Mapping[str, float]],
        **how: Any,
    ) -> FiniteQuery:
        """See :meth:`extensor.optim.Optimizer.update_multi_tensor`."""
        arrays = [
            (w, g, state["momentum"] if mine["momentum"] else None)
            for (w, g, state), mine in zip(parts, factors, strict=True)
        ]
        found: FiniteQuery = backend.sgd_multi_tensor(arrays, factors, **how)
        return found

    def factors(self, options: Mapping[str, Any], step: int) -> dict[str, float]:
        """See :meth:`extensor.optim.Optimizer.factors`."""
        return {
            "lr": options["lr"],
            "momentum": options["momentum"],
            "decay": options["weight_decay"],
            "nesterov": options["nesterov"],
            "step": step,
        }


class LARS(SGD):
    """Momentum SGD whose step in each tensor is proportional to the tensor's norm.

    With g' = g + weight_decay w, the gradient is multiplied by
    ``trust |w| / (|g| + weight_decay |w|)``, or by 1 where either norm is 0 (arXiv 1708.03888,
    section 5); then momentum as in `SGD`.

    Args:
        params: see `Optimizer`; biases and norms are best left to a group with SGD.
        lr: learning rate, 0 or more.
        momentum: in [0, 1).
        weight_decay: 0 or more.
        trust: the share of a tensor's norm that a step may be, above 0.
        states: how the state is stored; see `Optimizer`.
        masters: whether bfloat16 parameters have float32 copies; see `Optimizer`.

    Raises:
        ValueError: for an option out of range.

    >>> w = et.nn.Parameter([3.0, 4.0])
    >>> optimizer = et.optim.LARS([w], lr=1.0, momentum=0.0, trust=0.1)
    >>> w.sum().backward()
    >>> optimizer.step()
    >>> w.numpy().round(4)
    array([2.6464, 3.6464], dtype=float32)
    """

    ranges = MappingProxyType({**SGD.ranges, "trust": POSITIVE})
    multi_tensor = False  # `prepare` comes first

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust: float = 0.001,
        *,
        states: str = "float32",
        masters: bool = True,
    ) -> None:
        super(SGD, self).__init__(
            params,
            states=states,
            masters=masters,
            lr=lr,
            momentum=momentum,
            nesterov=False,
            weight_decay=weight_decay,
            trust=trust,
        )

    def prepare(
        self, xp: Any, whole: Segment, options: Mapping[str, Any]
    ) -> tuple[Array, Mapping[str, Any]]:
        """See :meth:`extensor.optim.Optimizer.prepare`.

        The gradient with its weight decay, scaled to the weight's norm.
        """
        decay = options["weight_decay"]
        size, slope = (float(xp.linalg.norm(a)) for a in (whole.weight, whole.grad))
        ratio = options["trust"] * size / (slope + decay * size) if size and slope else 1.0
        scaled = (whole.grad + decay * whole.weight) * ratio
        return scaled, {**options, "weight_decay": 0.0}
