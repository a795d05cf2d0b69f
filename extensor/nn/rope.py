"""Rotary position embedding: angles of positions, and how models stretch them to longer contexts.

Angles are computed in float64 on the host, so that they are the same on every device.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from extensor.autograd.tensor import ExTensor

__all__ = ["Rope", "RopeScaling", "RotaryTable"]

Array = npt.NDArray[Any]
Kind = Literal["linear", "dynamic", "llama3", "yarn"]


@dataclass(frozen=True)
class RopeScaling:
    """How a model that was trained on short contexts turns the positions of longer ones.

    Attributes:
        kind: "linear" divides all angles by the factor (arXiv 2306.15595); "dynamic" raises the
            base with the length beyond ``context`` (NTK-aware); "llama3" divides those of long
            waves only, as Llama 3.1 does; "yarn" blends both by wave length, and scales queries and
            keys (arXiv 2309.00071).
        factor: how much longer contexts become; above 0.
        context: the length that the model was trained on; not read by "linear".
        low: "llama3": waves longer than context / low are divided by the factor.
        high: "llama3": waves shorter than context / high stay.
        fast: "yarn": angles that turn so often within the context stay.
        slow: "yarn": angles that turn fewer times are divided by the factor.
        whole: "yarn": round the bounds of the blend to whole components.
        attention: "yarn": factor on rotated queries and keys; None for 0.1 ln(factor) + 1.

    Raises:
        ValueError: for an unknown kind, or numbers not above 0.

    >>> et.nn.RopeScaling("linear", factor=4.0).factor
    4.0
    """

    kind: Kind
    factor: float
    context: int = 0
    low: float = 1.0
    high: float = 4.0
    fast: float = 32.0
    slow: float = 1.0
    whole: bool = True
    attention: float | None = None

    def __post_init__(self) -> None:
        if self.kind not in ("linear", "dynamic", "llama3", "yarn"):
            raise ValueError(
                f"RopeScaling: expected 'linear', 'dynamic', 'llama3' or 'yarn', got {self.kind!r}"
            )
        if not self.factor > 0 or (self.kind != "linear" and self.context < 1):
            raise ValueError(
                "RopeScaling: expected a factor above 0 and the context that the model was trained "
                f"on, got {self}"
            )


@dataclass(frozen=True)
class Rope:
    """A model's rotary position embedding.

    Attributes:
        size: how many components of each head turn, an even number.
        base: of the angles, base^(-2i / size) for the i-th pair.
        interleaved: pairs are components 2i and 2i + 1; else i and i + size / 2.
        scaling: for long contexts; None for none.

    Raises:
        ValueError: for an odd size, a base not above 0, or dynamic scaling of a size of 2.

    Source: Su et al., arXiv 2104.09864, section 3.2.2.

    >>> et.nn.Rope(4, base=100.0).angles(length=1)
    (array([1. , 0.1]), 1.0)
    """

    size: int
    base: float = 10000.0
    interleaved: bool = False
    scaling: RopeScaling | None = None

    def __post_init__(self) -> None:
        if self.size < 2 or self.size % 2 or not 0.0 < self.base < math.inf:
            raise ValueError(
                f"Rope: expected an even size and a base above 0, got {self.size} and {self.base}"
            )
        if self.size == 2 and self.scaling is not None and self.scaling.kind == "dynamic":
            raise ValueError(
                "Rope: dynamic scaling divides by size - 2, so it expects a size of 4 or more, got "
                "2; the way out: linear scaling"
            )

    def angles(self, length: int) -> tuple[Array, float]:
        """The angle from one position to the next of each pair, and the factor on both tables.

        Args:
            length: tokens of the longest sequence; read by "dynamic" scaling only.

        Returns:
            float64 (size / 2,), and a float.

        >>> scaled = et.nn.Rope(4, 100.0, scaling=et.nn.RopeScaling("linear", 2.0))
        >>> scaled.angles(length=1)
        (array([0.5 , 0.05]), 1.0)
        """
        scaling, exponents = self.scaling, np.arange(0, self.size, 2) / self.size
        plain = self.base**-exponents
        if scaling is None:
            return plain, 1.0
        if scaling.kind == "linear":
            return plain / scaling.factor, 1.0
        if scaling.kind == "dynamic":
            longer = max(length, scaling.context) / scaling.context
            grown = scaling.factor * longer - (scaling.factor - 1.0)
            return (self.base * grown ** (self.size / (self.size - 2))) ** -exponents, 1.0
        if scaling.kind == "llama3":
            turns = scaling.context * plain / (2 * math.pi)  # within the context
            blend = np.clip((turns - scaling.low) / (scaling.high - scaling.low), 0.0, 1.0)
            return plain * (blend + (1 - blend) / scaling.factor), 1.0
        blend = 1 - self._yarn_ramp(scaling)
        attention = scaling.attention
        if attention is None:
            attention = 0.1 * math.log(scaling.factor) + 1.0 if scaling.factor > 1 else 1.0
        return plain * (blend + (1 - blend) / scaling.factor), attention

    def _yarn_ramp(self, scaling: RopeScaling) -> Array:
        """0 for pairs that keep their angle, 1 for those divided by the factor (section 3.2)."""

        def pair_of(turns: float) -> float:
            """The pair, not rounded, that turns so often within the context."""
            longest = scaling.context / (turns * 2 * math.pi)
            return self.size * math.log(longest) / (2 * math.log(self.base))

        low, high = pair_of(scaling.fast), pair_of(scaling.slow)
        if scaling.whole:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0.0), min(high, self.size - 1.0)
        if low == high:
            high += 0.001
        return np.clip((np.arange(self.size // 2) - low) / (high - low), 0.0, 1.0)


class RotaryTable:
    """Cosines and sines of positions, kept from call to call and made longer when asked for.

    Args:
        rope: the embedding.

    >>> cos, sin = et.nn.RotaryTable(et.nn.Rope(4)).rows(slice(0, 3), length=3, like=et.ones(1))
    >>> cos.shape, sin.shape
    ((3, 2), (3, 2))
    """

    def __init__(self, rope: Rope) -> None:
        self.rope = rope
        self._tables: dict[str, tuple[ExTensor, ExTensor]] = {}
        self._length = 0

    def rows(
        self, positions: slice | ExTensor, length: int, like: ExTensor
    ) -> tuple[ExTensor, ExTensor]:
        """The tables' rows at some positions.

        Args:
            positions: a range, or integers of any shape (...).
            length: tokens of the longest sequence, above every position.
            like: a tensor on the device that the tables are for.

        Returns:
            Cosines and sines, float32 (..., size / 2).

        >>> table = et.nn.RotaryTable(et.nn.Rope(4))
        >>> table.rows(et.ExTensor([[1, 1]]), length=2, like=et.ones(1))[0].shape
        (1, 2, 2)
        """
        length = self._needed(length)
        if length != self._length:
            self._tables, self._length = {}, length
        if like.device not in self._tables:
            self._tables[like.device] = self._made(self._length, like.device)
        cos, sin = self._tables[like.device]
        return cos[positions], sin[positions]

    def _needed(self, length: int) -> int:
        """Rows to keep. With "dynamic" scaling longer texts than trained on have own angles."""
        scaling, kept, most = self.rope.scaling, self._length, None
        if scaling is not None and scaling.kind == "dynamic":
            if length > scaling.context:
                return length
            most, kept = scaling.context, kept if kept <= scaling.context else 0
        grown = kept if length <= kept else max(2 * kept, length, 64)
        return grown if most is None else min(grown, most)

    def _made(self, length: int, device: str) -> tuple[ExTensor, ExTensor]:
        step, factor = self.rope.angles(length)
        angle = np.arange(length)[:, None] * step
        cos, sin = ((f(angle) * factor).astype(np.float32) for f in (np.cos, np.sin))
        return ExTensor.from_numpy(cos).to(device), ExTensor.from_numpy(sin).to(device)
