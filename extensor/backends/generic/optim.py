"""Optimizer steps in place on any array module; states are float32."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np

from extensor.backends.capture import UpdateGuard
from extensor.backends.generic.core import GenericCore
from extensor.backends.protocol import Array, FiniteQuery
from extensor.dtypes import bfloat16
from extensor.random import Stream, random_words

__all__ = ["GenericOptim", "rescale"]

PER_CALL = 1 << 12
"""Random words that are drawn as one block."""
BLOCKS = 1 << 10
"""Blocks of words that are in memory at once: Philox takes 64 bits for each of a word's 32."""


class GenericOptim(GenericCore):
    """Updates of parameters and of lists of arrays, one array after the other."""

    multi_tensor_states: Collection[str] = ()

    def sgd(
        self,
        weight: Array,
        grad: Array,
        buffer: Array | None,
        lr: float,
        momentum: float,
        decay: float,
        nesterov: bool,
    ) -> None:
        """One step of gradient descent in place, on vectors; see `extensor.optim.SGD`.

        d = weight decay + grad (with decay);  buffer = buffer momentum + d (with a buffer);
        d = buffer momentum + d under ``nesterov``, else buffer;  weight = weight - d lr.
        """
        d = grad
        if decay:
            d = weight * decay
            d += grad
        if buffer is not None:
            buffer *= momentum
            buffer += d
            if nesterov:
                ahead = buffer * momentum
                ahead += d
                d = ahead
            else:
                d = buffer
        weight -= d * lr

    def adam(
        self,
        weight: Array,
        grad: Array,
        mean: Array,
        square: Array,
        factors: Mapping[str, float],
    ) -> None:
        """One step of Adam (arXiv 1412.6980) in place, on vectors; see `extensor.optim.Adam`.

        mean += (grad - mean) take1;  square = square keep2 + grad^2 take2;
        weight = weight keep - mean / (sqrt(square) widen + eps) rate.
        """
        xp = self.xp
        one = grad - mean
        one *= factors["take1"]
        mean += one
        xp.multiply(grad, grad, out=one)
        one *= factors["take2"]
        square *= factors["keep2"]
        square += one
        xp.sqrt(square, out=one)
        one *= factors["widen"]
        one += factors["eps"]
        xp.divide(mean, one, out=one)
        one *= factors["rate"]
        weight *= factors["keep"]
        weight -= one

    def lion(self, weight: Array, grad: Array, mean: Array, factors: Mapping[str, float]) -> None:
        """One step of Lion (arXiv 2302.06675) in place, on vectors; see `extensor.optim.Lion`.

        weight = weight keep - sign(mean momentum + grad take1) lr;
        mean = mean keep2 + grad take2.
        """
        xp = self.xp
        one, two = mean * factors["momentum"], grad * factors["take1"]
        one += two
        xp.sign(one, out=one)
        one *= factors["lr"]
        weight *= factors["keep"]
        weight -= one
        mean *= factors["keep2"]
        xp.multiply(grad, factors["take2"], out=two)
        mean += two

    def sgd_multi_tensor(
        self,
        parts: Sequence[tuple[Array, Array, Array | None]],
        factors: Sequence[Mapping[str, float]],
        guard: UpdateGuard | None = None,
        check_finite: bool = False,
        cache: dict[str, Any] | None = None,
        numbers: Sequence[int] | int = 0,
        stop: Array | None = None,
    ) -> FiniteQuery:
        """See the protocol."""

        def update(mine: Mapping[str, float], weight: Array, grad: Array, buffer: Array) -> None:
            more = (mine["lr"], mine["momentum"], mine["decay"], bool(mine["nesterov"]))
            self.sgd(weight, grad, buffer, *more)

        return self._update_each(parts, factors, check_finite, update)

    def adam_multi_tensor(
        self,
        parts: Sequence[tuple[Array, Array, Array, Array]],
        factors: Sequence[Mapping[str, float]],
        guard: UpdateGuard | None = None,
        check_finite: bool = False,
        cache: dict[str, Any] | None = None,
        numbers: Sequence[int] | int = 0,
        stop: Array | None = None,
    ) -> FiniteQuery:
        """See the protocol."""

        def update(
            mine: Mapping[str, float], weight: Array, grad: Array, mean: Array, square: Array
        ) -> None:
            grad = grad + weight * mine["decay"] if mine["decay"] else grad
            self.adam(weight, grad, mean, square, mine)

        return self._update_each(parts, factors, check_finite, update)

    def lion_multi_tensor(
        self,
        parts: Sequence[tuple[Array, Array, Array]],
        factors: Sequence[Mapping[str, float]],
        guard: UpdateGuard | None = None,
        check_finite: bool = False,
        cache: dict[str, Any] | None = None,
        numbers: Sequence[int] | int = 0,
        stop: Array | None = None,
    ) -> FiniteQuery:
        """See the protocol."""

        def update(mine: Mapping[str, float], weight: Array, grad: Array, mean: Array) -> None:
            self.lion(weight, grad, mean, mine)

        return self._update_each(parts, factors, check_finite, update)

    def _update_each(
        self,
        parts: Sequence[tuple[Array | None, ...]],
        factors: Sequence[Mapping[str, float]],
        check_finite: bool,
        update: Callable[..., None],
    ) -> FiniteQuery:
        """Part after part, flat; none if a gradient that is checked is not finite."""
        found = self.all_finite_multi_tensor([part[1] for part in parts]) if check_finite else []
        if all(found):
            for part, mine in zip(parts, factors, strict=True):
                update(mine, *(None if a is None else a.reshape(-1) for a in part))
        return lambda: found

    def stochastic_bfloat16(self, values: Array, stream: Stream) -> Array:
        """See the protocol; in segments, whose random words are several times as large."""
        xp, packed = self.xp, self.xp.empty(values.size, np.uint16)
        for begin in range(0, values.size, BLOCKS * 2 * PER_CALL):
            part = values[begin : begin + BLOCKS * 2 * PER_CALL]
            first = begin // (2 * PER_CALL)
            blocks = xp.arange(first, first - (-part.size // (2 * PER_CALL)))
            words = random_words(stream, blocks, PER_CALL, 32, xp)
            low, high = words & xp.uint32(0xFFFF), words >> xp.uint32(16)
            noise = xp.stack([low, high], axis=-1).reshape(-1)[: part.size]
            bits = part.astype(np.float32).view(np.uint32)
            finite = (bits & xp.uint32(0x7F800000)) != xp.uint32(0x7F800000)
            rounded = bits + noise * finite.astype(np.uint32)
            packed[begin : begin + part.size] = rounded >> xp.uint32(16)
        return packed.view(bfloat16.numpy)

    def scale_multi_tensor(self, arrays: Sequence[Array], factor: float | Array) -> None:
        """See the protocol."""
        for x in arrays:
            if x.dtype == bfloat16.numpy:  # the factor stays float32
                number = self.xp.asarray(factor, dtype=np.float32)
                x[...] = self.cast(self.cast(x, np.dtype(np.float32)) * number, bfloat16.numpy)
                continue
            number = factor if isinstance(factor, float) else factor.astype(x.dtype)
            self.xp.multiply(x, number, out=x)

    def square_sum_multi_tensor(self, arrays: Sequence[Array]) -> float | Array:
        """See the protocol."""
        return sum((square_sum(x, self.xp) for x in arrays), 0.0)

    def all_finite(self, x: Array) -> bool:
        """See the protocol."""
        xp = self.xp
        with np.errstate(over="ignore", invalid="ignore"):
            # A sum shows NaN and infinity in one pass; only if it overflows are all values checked.
            return bool(xp.isfinite(x.sum())) or bool(xp.isfinite(x).all())

    def all_finite_multi_tensor(self, arrays: Sequence[Array]) -> list[bool]:
        """See the protocol."""
        return [self.all_finite(x) for x in arrays]


def rescale(state: Array, bad: bool, rule: Sequence[float]) -> None:
    """One step of a loss scale, in place, on float64 (scale, good steps in a row, made, skipped).

    ``rule``: growth and back-off factor, good steps before a growth, least scale.
    """
    growth, backoff, interval, least = rule
    if bad:
        state[:] = max(state[0] * backoff, least), 0, state[2], state[3] + 1
        return
    good, scale = state[1] + 1, state[0]
    if good == interval:
        good, scale = 0, scale * growth
    state[:] = scale, good, state[2] + 1, state[3]


def square_sum(x: Array, xp: Any) -> float:
    """Sum of squares in float64: neither overflow nor a thread-dependent order."""
    flat, total = x.reshape(-1), 0.0
    segment = 1 << 16 if xp is np else max(flat.size, 1)
    for begin in range(0, flat.size, segment):
        wide = flat[begin : begin + segment].astype(xp.float64)
        wide *= wide
        total += float(wide.sum())
    return total
