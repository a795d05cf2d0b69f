"""The CPU backend's optimizer steps: the bytes that numpy gives, in one pass over memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from extensor.backends.cpu.core import CpuCore, first_arrays, ready, runs_in_core, stream_words
from extensor.backends.protocol import Array
from extensor.backends.unsupported import Unsupported
from extensor.dtypes import bfloat16
from extensor.random import Stream

__all__ = ["CpuOptim"]

_ADAM_FACTORS = ("keep", "take1", "keep2", "take2", "widen", "eps", "rate")
_LION_FACTORS = ("keep", "momentum", "take1", "keep2", "take2", "lr")
_TINY = float(np.finfo(np.float32).tiny)


class CpuOptim(CpuCore):
    """Updates of one parameter, and the search for values that are not finite."""

    def _choose_sgd(self, weight: Array, grad: Array, buffer: Array | None, *factors: Any) -> Any:
        written = [weight] if buffer is None else [weight, buffer]
        core = self.update_core(grad, *written)
        for number in factors:
            if -_TINY < number < _TINY and number:
                return Unsupported("a factor that underflows in float32")
        return core

    @runs_in_core(_choose_sgd)
    def sgd(
        self,
        core: Any,
        weight: Array,
        grad: Array,
        buffer: Array | None,
        lr: float,
        momentum: float,
        decay: float,
        nesterov: bool,
    ) -> None:
        """See the protocol."""
        core.sgd(weight, ready(grad), buffer, lr, momentum, decay, nesterov)

    def _choose_adam(self, weight: Array, grad: Array, *states_and_factors: Any) -> Any:
        return self.update_core(grad, weight, *states_and_factors[:2])

    @runs_in_core(_choose_adam)
    def adam(
        self,
        core: Any,
        weight: Array,
        grad: Array,
        mean: Array,
        square: Array,
        factors: Mapping[str, float],
    ) -> None:
        """See the protocol."""
        numbers = np.array([factors[name] for name in _ADAM_FACTORS], dtype=np.float32)
        core.adam(weight, ready(grad), mean, square, numbers)

    def _choose_lion(self, weight: Array, grad: Array, mean: Array, factors: Any) -> Any:
        return self.update_core(grad, weight, mean)

    @runs_in_core(_choose_lion)
    def lion(
        self, core: Any, weight: Array, grad: Array, mean: Array, factors: Mapping[str, float]
    ) -> None:
        """See the protocol."""
        numbers = np.array([factors[name] for name in _LION_FACTORS], dtype=np.float32)
        core.lion(weight, ready(grad), mean, numbers)

    @runs_in_core(first_arrays(1))
    def stochastic_bfloat16(self, core: Any, values: Array, stream: Stream) -> Array:
        """See the protocol."""
        return core.stochastic_bfloat16(ready(values), stream_words(stream)).view(bfloat16.numpy)

    @runs_in_core(CpuCore.float32_core)
    def all_finite(self, core: Any, x: Array) -> bool:
        """See the protocol."""
        return bool(core.all_finite(ready(x)))
