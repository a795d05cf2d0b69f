"""What a quantized layer knows while it runs: its recipe, its random streams, its counts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from extensor.quant.array import QuantStats
from extensor.quant.recipe import SLOTS, LayerRecipe, OperandSpec, Recipe
from extensor.quant.static_scale import StaticScale
from extensor.quant.weight_cache import WeightCache
from extensor.random import Stream

__all__ = ["Counts", "LayerContext", "RecipeState"]

Counts = QuantStats | Callable[[], QuantStats]
"""What quantizing counted, or, where a GPU is still at it, what waits for that.

Such a function with a true attribute ``replayed`` belongs to a step that the GPU repeats: each call
gives what was counted since the one before.
"""

_MOST_PENDING = 4096

CALL_SHIFT = 12
"""A stream numbers its tensor with 24 bits: 4096 layers, each used up to 4096 times in a step."""


@dataclass
class RecipeState:
    """A recipe at work on one model.

    Attributes:
        recipe: the recipe.
        seed: seed of all stochastic rounding.
        step: the optimizer step; the training loop sets it before each one, so that random bits are
            a function of (seed, step, layer, slot) and a resumed run repeats an uninterrupted one.
        layers: every layer with GEMMs, by path.
        weight_cache: the GEMM operands of their weights.
    """

    recipe: Recipe
    seed: int = 0
    step: int = 0
    layers: dict[str, LayerContext] = field(default_factory=dict)
    _counts: dict[tuple[str, str], QuantStats] = field(default_factory=dict)
    _amax_states: dict[tuple[str, int, str], dict[str, Any]] = field(
        default_factory=dict, repr=False, compare=False
    )
    weight_cache: WeightCache = field(default_factory=WeightCache, repr=False, compare=False)
    _pending: list[tuple[tuple[str, str], Callable[[], QuantStats]]] = field(default_factory=list)
    _standing: list[tuple[tuple[str, str], Callable[[], QuantStats]]] = field(default_factory=list)

    def __getstate__(self) -> dict[str, Any]:
        """What a copy takes over: not what is kept of weights, which are others then."""
        return {**self.__dict__, "weight_cache": WeightCache()}

    @property
    def telemetry(self) -> Mapping[tuple[str, str], QuantStats]:
        """Counts by (layer path, slot) since the last reset; waits for a GPU that still counts."""
        self._settle()
        return self._counts

    def reset_telemetry(self) -> None:
        """Forget the counts."""
        self._pending.clear()
        for _, counts in self._standing:
            counts()
        self._counts.clear()

    def record(self, key: tuple[str, str], counts: Counts) -> None:
        """Add to the counts of a (layer path, slot), without waiting for a GPU."""
        if isinstance(counts, QuantStats):
            self._add(key, counts)
            return
        if getattr(counts, "replayed", False):
            self._standing.append((key, counts))
            return
        self._pending.append((key, counts))
        if len(self._pending) >= _MOST_PENDING:
            self._settle()

    def _settle(self) -> None:
        for key, counts in self._pending:
            self._add(key, counts())
        self._pending.clear()
        for key, counts in self._standing:
            if (gained := counts()).count:
                self._add(key, gained)

    def _add(self, key: tuple[str, str], stats: QuantStats) -> None:
        self._counts[key] = self._counts.get(key, QuantStats()) + stats


@dataclass
class LayerContext:
    """One layer's place in a `RecipeState`.

    Attributes:
        path: the layer's path in the model.
        index: the layer's number, part of its random streams.
        layer: its recipe; the gradient scaler may replace it.
        state: the model's.
        call: which use of the layer in this step, for layers that are used several times.
        static_scale: the scale of the forward input, where calibration chose one beforehand.
    """

    path: str
    index: int
    layer: LayerRecipe
    state: RecipeState
    call: int = 0
    static_scale: StaticScale | None = None

    def at(self, call: int) -> LayerContext:
        """The same layer in another use."""
        return self if call == self.call else replace(self, call=call)

    def operand(self, slot: str) -> OperandSpec:
        """What the slot holds."""
        return self.layer.slot(slot)

    def stream(self, slot: str, column: bool) -> Stream:
        """The random stream of one slot in this use and step."""
        tensor = self.index + (self.call << CALL_SHIFT)
        state = self.state
        return Stream(state.seed, state.step, tensor, SLOTS.index(slot), column, state)

    def amax_state(self, slot: str) -> dict[str, Any]:
        """What a backend keeps of the slot's tensor from step to step; it decides no value."""
        return self.state._amax_states.setdefault((self.path, self.call, slot), {})

    def record(self, slot: str, counts: Counts) -> None:
        """Add to the slot's counts."""
        self.state.record((self.path, slot), counts)
