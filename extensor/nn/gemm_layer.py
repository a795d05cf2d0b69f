"""GemmLayer: what layers with matrix products have in common."""

from __future__ import annotations

from extensor.autograd.tensor import ExTensor
from extensor.nn.module import Module
from extensor.quant.recipe_state import LayerContext

__all__ = ["GemmLayer"]


class GemmLayer(Module):
    """A layer whose GEMMs a recipe can quantize; subclasses set both attributes.

    Attributes:
        weight: float32, output channels first; or in blocks, by `quantize_model`.
        quant: the layer's place in a recipe; None computes in the dtype of the operands.
    """

    weight: ExTensor
    quant: LayerContext | None
