"""Mixed precision by measurement: which format each layer can bear, and the best mix for a size.

Rounding a weight by e changes the loss by about g . e + 1/2 e H e. A trained model's mean gradient
g is near zero, so the second term decides. With the Fisher matrix for H it is half the mean square
of (gradient of one token's loss) . e, which gradients of whole windows estimate: over windows of T
tokens their variance is the tokens' divided by T.

Sources: LeCun et al., "Optimal Brain Damage", NeurIPS 1989 (the expansion); Li et al., arXiv
2102.05426, section 3.2 (the Fisher matrix for quantization).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from extensor.autograd.mode import no_grad
from extensor.autograd.tensor import ExTensor
from extensor.nn.linear import GemmLayer
from extensor.nn.module import Module
from extensor.nn.ptq import bare_copy, check_packable, pack_weight
from extensor.nn.recipe import gemm_layers
from extensor.quant.recipe import Gemm, LayerRecipe, Recipe
from extensor.quant.recipe_state import LayerContext, RecipeState
from extensor.quant.spec import QuantSpec

__all__ = ["LossChange", "choose_formats", "loss_changes", "quantize_layers"]


@dataclass(frozen=True)
class LossChange:
    """One layer's weight in one format.

    Attributes:
        path: the layer.
        spec: how its weight is stored.
        nbytes: codes and scales.
        change: the predicted change of the loss, 0 or more.

    >>> et.nn.LossChange("0", et.QuantSpec("mxfp4"), nbytes=136, change=0.01).change
    0.01
    """

    path: str
    spec: QuantSpec
    nbytes: int
    change: float


def loss_changes(
    model: Module,
    batches: Iterable[ExTensor],
    loss: Callable[[Module, ExTensor], ExTensor],
    specs: Sequence[QuantSpec],
    count: int = 1,
) -> list[LossChange]:
    """Predict what storing each layer's weight in each format does to a model's loss.

    Heads and embeddings are left out, as schemes leave them.

    Args:
        model: its layers' weights are float32; its gradients are overwritten and then None.
        batches: inputs, 4 or more for an estimate; not test data.
        loss: the mean loss of a model on a batch.
        specs: ways to store a weight; the axis does not matter.
        count: how many independent losses the mean of a batch is of, such as its tokens.

    Returns:
        A row for each layer and spec, layers in model order.

    Raises:
        ValueError: for fewer than 2 batches, no specs, or a model without float layers.

    >>> model = et.nn.Sequential(et.nn.Linear(64, 64, rng=0), et.nn.Linear(64, 8, rng=1))
    >>> batches = [et.randn(16, 64, seed=seed) for seed in range(4)]
    >>> rows = et.nn.loss_changes(
    ...     model, batches, lambda m, x: (m(x) ** 2).mean(), [et.QuantSpec("mxfp4")], count=16
    ... )
    >>> [(row.path, row.change > 0) for row in rows]
    [('0', True), ('1', True)]
    """
    layers = {
        path: layer
        for path, layer in gemm_layers(model)
        if not layer.weight.is_blocked and layer.role is None
    }
    if not layers or not specs:
        raise ValueError(
            f"loss_changes: expected float layers and specs, got {len(layers)} and {len(specs)}"
        )
    before = {id(p): (p, p.requires_grad) for p in model.parameters()}
    products: dict[tuple[str, int], list[float]] = {}
    sizes: dict[tuple[str, int], int] = {}
    try:
        model.requires_grad_(False)
        for layer in layers.values():
            layer.weight.requires_grad = True
        for batch in batches:
            model.zero_grad()
            loss(model, batch).backward()
            with no_grad():
                for path, layer in layers.items():
                    for number, spec in enumerate(specs):
                        error, sizes[path, number] = _error(layer, spec)
                        gradient = layer.weight.grad
                        assert gradient is not None
                        found = (gradient.reshape(error.shape) * error).sum().item()
                        products.setdefault((path, number), []).append(found)
    finally:
        model.zero_grad()
        for parameter, flag in before.values():
            parameter.requires_grad = flag
    if len(next(iter(products.values()), ())) < 2:
        raise ValueError("loss_changes: expected 2 batches or more")
    return [
        LossChange(path, specs[number], sizes[path, number], 0.5 * count * float(np.var(row)))
        for (path, number), row in products.items()
    ]


def _error(layer: GemmLayer, spec: QuantSpec) -> tuple[ExTensor, int]:
    """What rounding a layer's weight changes, and the bytes that it is stored in."""
    matrix = layer.weight.detach().reshape((layer.weight.shape[0], -1))
    packed = matrix.quantize(spec.replace(axis=1))
    return packed.dequantize() - matrix, packed.nbytes


def choose_formats(changes: Sequence[LossChange], nbytes: int) -> dict[str, QuantSpec]:
    """The formats of least predicted loss that fit into a size.

    Every layer begins in its smallest format. Then the change that gains most per byte is made,
    as long as one fits: the best mix up to the last layer's change.

    Args:
        changes: of `loss_changes`.
        nbytes: for the weights of these layers together.

    Returns:
        The spec of each layer.

    Raises:
        ValueError: if not even the smallest formats fit.

    Source: Everett, "Generalized Lagrange multiplier method", Operations Research 11(3), 1963.

    >>> small, large = et.QuantSpec("mxfp4"), et.QuantSpec("mxfp8_e4m3")
    >>> rows = [
    ...     et.nn.LossChange(path, spec, size, change)
    ...     for path, scale in (("a", 1.0), ("b", 9.0))
    ...     for spec, size, change in ((small, 10, 0.1 * scale), (large, 20, 0.01 * scale))
    ... ]
    >>> [spec.format for spec in et.nn.choose_formats(rows, nbytes=30).values()]
    ['mxfp4', 'mxfp8_e4m3']
    """
    rows: dict[str, list[LossChange]] = {}
    for row in changes:
        rows.setdefault(row.path, []).append(row)
    chosen = {path: min(of, key=lambda row: (row.nbytes, row.change)) for path, of in rows.items()}
    used = sum(row.nbytes for row in chosen.values())
    if used > nbytes:
        raise ValueError(
            f"choose_formats: the smallest formats take {used:,} bytes, expected {nbytes:,} or "
            "fewer; allow more, or add a smaller format"
        )
    while True:
        best, rate = None, 0.0
        for row in changes:
            now = chosen[row.path]
            gain, more = now.change - row.change, row.nbytes - now.nbytes
            if gain > 0 and more <= nbytes - used and gain / max(more, 1) > rate:
                best, rate = row, gain / max(more, 1)
        if best is None:
            return {path: row.spec for path, row in chosen.items()}
        used += best.nbytes - chosen[best.path].nbytes
        chosen[best.path] = best


def quantize_layers(model: Module, specs: Mapping[str, QuantSpec]) -> Module:
    """A copy of a model with the weights of some layers packed, each by a spec of its own.

    Args:
        model: its layers' weights are float32.
        specs: how to store a layer's weight, by path.

    Returns:
        The copy; activations stay as they are.

    Raises:
        ValueError: for a path that is no layer, or a weight that cannot be packed.

    >>> model = et.nn.Sequential(et.nn.Linear(64, 64, rng=0), et.nn.Linear(64, 8, rng=1))
    >>> mixed = et.nn.quantize_layers(model, {"0": et.QuantSpec("mxfp4")})
    >>> [layer.weight.dtype.name for _, layer in et.nn.gemm_layers(mixed)]
    ['mxfp4', 'float32']
    """
    made = bare_copy(model)
    layers = dict(gemm_layers(made))
    if unknown := [path for path in specs if path not in layers]:
        raise ValueError(f"quantize_layers: no layers {unknown[:8]}; they are {list(layers)[:8]}")
    dense = Gemm("float32", "float32")
    for number, (path, spec) in enumerate(specs.items()):
        recipe = LayerRecipe(Gemm("float32", spec), dense, dense)
        state = RecipeState(Recipe("mixed", "a format for each layer", recipe))
        check_packable(path, layers[path])
        pack_weight(layers[path], LayerContext(path, number, recipe, state))
    return made
