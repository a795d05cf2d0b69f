"""What a quantized layer knows while it runs: its recipe, its random streams, its counts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from extensor.quant.array import QuantStats
from extensor.quant.fixed import FixedScale
from extensor.quant.recipe import SLOTS, LayerRecipe, Operand, Recipe
from extensor.random import Stream

__all__ = ["LayerContext", "RecipeState"]

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
    """

    recipe: Recipe
    seed: int = 0
    step: int = 0
    layers: dict[str, LayerContext] = field(default_factory=dict)
    _counts: dict[tuple[str, str], QuantStats] = field(default_factory=dict)

    @property
    def telemetry(self) -> Mapping[tuple[str, str], QuantStats]:
        """Counts by (layer path, slot) since the last reset."""
        return self._counts

    def reset_telemetry(self) -> None:
        """Forget the counts."""
        self._counts.clear()


@dataclass
class LayerContext:
    """One layer's place in a `RecipeState`.

    Attributes:
        path: the layer's path in the model.
        index: the layer's number, part of its random streams.
        layer: its recipe; the gradient scaler may replace it.
        state: the model's.
        call: which use of the layer in this step, for layers that are used several times.
        fixed: the scale of the forward input, where calibration chose one beforehand.
    """

    path: str
    index: int
    layer: LayerRecipe
    state: RecipeState
    call: int = 0
    fixed: FixedScale | None = None

    def at(self, call: int) -> LayerContext:
        """The same layer in another use."""
        return self if call == self.call else replace(self, call=call)

    def operand(self, slot: str) -> Operand:
        """What the slot holds."""
        return self.layer.slot(slot)

    def stream(self, slot: str, column: bool) -> Stream:
        """The random stream of one slot in this use and step."""
        tensor = self.index + (self.call << CALL_SHIFT)
        return Stream(self.state.seed, self.state.step, tensor, SLOTS.index(slot), column)

    def record(self, slot: str, stats: QuantStats) -> None:
        """Add to the slot's counts."""
        key = (self.path, slot)
        self.state._counts[key] = self.state._counts.get(key, QuantStats()) + stats
