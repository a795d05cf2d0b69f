"""One layer's recipe, as the operators see it.

An operator's arguments are tensors and numbers. So an operator names a layer by a number, its
handle, and finds the recipe, the counts and the kept weight here. Handles are not stored: a copied
or unpickled layer has one of its own.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from extensor.quant.recipe import SLOTS, FloatName, LayerRecipe, Recipe
from extensor.quant.recipe_state import Counts, LayerContext, RecipeState
from extensor.quant.spec import QuantSpec
from extensor.quant.weight_cache import WeightVersion
from extensor.random import DeviceClock, Stream
from extensor.torch.arrays import to_array
from extensor.torch.handles import new_number, numbered

__all__ = [
    "ClockedContext",
    "LayerHandle",
    "layer_of",
    "optimizer_writes",
    "written_by_an_optimizer",
]


@dataclass
class ClockedContext(LayerContext):
    """A layer in one forward pass: step and use come from the layer's clock, not from the recipe's.

    Attributes:
        step: the optimizer step.
        clock: what kernels on a GPU read step and use from; None on the CPU.
        activations: "bfloat16" rounds results to that, once.
        capturing: whether torch captures a graph.
    """

    step: int = 0
    clock: DeviceClock | None = None
    activations: FloatName = "float32"
    capturing: bool = False

    def stream(self, slot: str, column: bool) -> Stream:
        """See `LayerContext.stream`."""
        stream = super().stream(slot, column)
        if self.clock is not None and slot.endswith(".w"):
            return replace(stream, clock=self.clock.without_use)
        return stream

    def record(self, slot: str, counts: Counts) -> None:
        """See `LayerContext.record`; in a capture only what its replays add to is counted."""
        if not self.capturing or getattr(counts, "replayed", False):
            super().record(slot, counts)


@dataclass(frozen=True, eq=False)
class _Held:
    """A weight's array, and when it was read; a new one is made when the weight is written."""

    tensor: weakref.ref[torch.Tensor]
    key: tuple[int, int, int]
    array: Any
    version: WeightVersion


class LayerHandle:
    """A layer's recipe and its share of the model's counts, found by `layer_of`.

    Attributes:
        context: path, number and recipe of the layer.
        number: the handle.
        stochastic: whether any operand draws random bits in each step, so that a clock is needed.
        savable: see `extensor.torch.saved.savable`; None until it is asked for.
        prepared: the passes that are prepared, or why they are not: see `extensor.torch.prepared`.
    """

    def __init__(self, context: LayerContext) -> None:
        self.context = context
        own = context.path, context.index, context.state.seed, context.layer
        self.number = new_number(self, repr(own))
        operands = map(context.layer.slot, SLOTS)
        self.stochastic = any(
            isinstance(operand, QuantSpec) and operand.is_random for operand in operands
        )
        self.savable: int | None = None
        self.prepared: dict[Any, Any] = {}
        self._held: _Held | None = None

    @classmethod
    def of_recipe(cls, recipe: Recipe, layer: LayerRecipe, seed: int, index: int) -> LayerHandle:
        """The handle of a layer that is no part of a quantized model."""
        state = RecipeState(recipe, seed)
        context = LayerContext("", index, layer, state)
        state.layers[""] = context
        return cls(context)

    def __reduce__(self) -> tuple[Callable[..., LayerHandle], tuple[LayerContext]]:
        return type(self), (self.context,)

    def at(
        self,
        clock: torch.Tensor | int | None,
        on_device: DeviceClock | None,
        activations: FloatName,
        saves: bool,
    ) -> ClockedContext:
        """The context of a pass whose clock showed this.

        Args:
            clock: the step, plus 2**32 times the use, a number or of shape (); None: no random
                bits.
            on_device: the same as kernels read it; None on the CPU.
            activations: see `ClockedContext`.
            saves: whether torch saves operands that the pass makes for the backward pass. Then it
                makes them while it reads x, unless the recipe says what is kept.
        """
        base = self.context
        step, use = 0, 0
        if clock is not None and on_device is None:
            use, step = divmod(int(clock), 1 << 32)
        kept = base.saved_input or base.state.recipe.saved_input or ("input" if saves else None)
        own = base.path, base.index, base.layer, base.state, use, None, kept, None
        return ClockedContext(*own, step, on_device, activations)

    def weight(self, weight: torch.Tensor, keep: bool) -> tuple[Any, WeightVersion | None]:
        """The weight's array, and the version by which the cache knows its operands.

        Args:
            weight: the weight.
            keep: whether its operands may be kept; not while a graph is captured.
        """
        if not keep or weight.is_inference():  # torch does not count writes to one
            return to_array(weight), None
        held, key = self._held, (weight._version, weight.data_ptr(), _Writes.count)
        if held is None or held.key != key or held.tensor() is not weight:
            array = to_array(weight.detach())  # is kept, and no graph with it
            version = WeightVersion([0], 0)
            held = self._held = _Held(weakref.ref(weight), key, array, version)
        return held.array, held.version

    def forget_weight(self) -> None:
        """Drop what is kept of the weight."""
        self._held = None
        for one in list(self.prepared.values()):  # other threads may prepare passes
            if not isinstance(one, str):
                one.forget_weight()
        self.context.state.weight_cache.drop(self.context.path, SLOTS)


class _Writes:
    count = 0


def written_by_an_optimizer() -> None:
    """Note that weights were written, also by those that hide it from version counters (FSDP)."""
    _Writes.count += 1


def optimizer_writes() -> int:
    """How often an optimizer has written."""
    return _Writes.count


def layer_of(number: int) -> LayerHandle:
    """The layer of a handle.

    Raises:
        RuntimeError: if the layer is gone.
    """
    layer: LayerHandle = numbered(number)
    return layer
