"""Post-training quantization: a copy of a trained model whose layers hold packed weights.

`quantize_model` makes the copy and leaves the model as it is, so that the two can be compared
(`compare_layers`). Its layers also know how to quantize their inputs. `save_quantized` and
`load_quantized` write the copy to a file and read it back, bit for bit.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import os
from collections.abc import Iterable, Sequence
from typing import Any

from extensor.autograd.mode import no_grad
from extensor.autograd.tensor import ExTensor
from extensor.io import CheckpointError, load_checkpoint, save_checkpoint
from extensor.nn.calibrate import batches_of, calibrate, choose_scale
from extensor.nn.conv_pool import Conv2d
from extensor.nn.linear import GemmLayer, Linear
from extensor.nn.module import Module
from extensor.nn.parameter import Buffer, Parameter
from extensor.nn.recipe import assign_recipe, gemm_layers, round_norms
from extensor.quant.array import QuantArray
from extensor.quant.pages import in_large_pages
from extensor.quant.recipe import Gemm, LayerRecipe, Recipe
from extensor.quant.recipe_state import LayerContext, RecipeState
from extensor.quant.schemes import SCHEMES, Scheme, get_scheme
from extensor.quant.spec import QuantSpec
from extensor.quant.static_scale import StaticScale

__all__ = [
    "dequantize_model", "load_quantized", "packed_layers", "quantize_model", "save_quantized",
]  # fmt: skip

KEY = "quantized"
"""Where a checkpoint's metadata describes the layers."""


def quantize_model(
    model: Module,
    scheme: Scheme | str,
    calibration: Iterable[ExTensor | tuple[ExTensor, ...]] | None = None,
    keep: Sequence[str] = (),
) -> Module:
    """Quantize a copy of a trained model: its weights, and under most schemes its activations.

    Every Linear and Conv2d that no rule keeps gets a packed weight in place of its float32 one
    (`Linear.weight`, `Conv2d.weight`). Biases, norms and embeddings stay. The copy is for
    inference: packed weights get no gradients, and inputs get straight-through ones.

    Args:
        model: float32 weights; the copy is without a recipe the model was trained with.
        scheme: a `Scheme` or the name of one in `SCHEMES`.
        calibration: batches of inputs, a tuple for a model of several; needed where the scheme
            has a static range for activations. A few hundred inputs will do. Not test data.
        keep: further layers to leave in float32: globs on paths, or roles such as "@first".

    Returns:
        The copy, in the mode the model is in, without its hooks and gradients.

    Raises:
        TypeError: for what is no model, scheme or calibration set.
        ValueError: for an unknown scheme, a ``keep`` that matches no layer, no layer to quantize,
            weights that are not finite or already packed; an empty calibration set, or none where
            one is needed, one with NaN or infinity, or one that never reaches a layer.

    >>> model = et.nn.Sequential(et.nn.Linear(64, 64, rng=0), et.nn.Linear(64, 10, rng=1))
    >>> quantized = et.quantize_model(model, "nvfp4", keep=("@last",))
    >>> {path: layer.weight.dtype.name for path, layer in et.nn.gemm_layers(quantized)}
    {'0': 'nvfp4', '1': 'float32'}
    """
    if not isinstance(model, Module):
        raise TypeError(f"quantize_model: expected a Module, got {type(model).__name__}")
    if not isinstance(scheme, (Scheme, str)):
        raise TypeError(
            f"quantize_model: expected a Scheme or the name of one, got {scheme!r}; names: "
            f"{', '.join(SCHEMES)}"
        )
    if isinstance(keep, str):
        raise TypeError(f"keep: expected a list of paths or roles, got the text {keep!r}")
    scheme = get_scheme(scheme) if isinstance(scheme, str) else scheme
    if scheme.range is not None and calibration is None:
        raise ValueError(
            f"scheme {scheme.name!r} needs a calibration set to choose the activations' range; "
            "pass calibration=[batch, ...], or a dynamic scheme such as 'int8_dynamic'"
        )
    made = bare_copy(model)
    recipe = scheme.recipe(tuple(keep))
    chosen = {p: r for p, r in assign_recipe(made, recipe).items() if not r.fprop.unquantized}
    layers = {path: layer for path, layer in gemm_layers(made) if path in chosen}
    if not layers:
        raise ValueError(
            "quantize_model: no layer to quantize: expected a Linear or Conv2d that no rule keeps, "
            f"got layers {[path for path, _ in gemm_layers(made)]} and rules "
            f"{[r.match for r in recipe.rules]}"
        )
    for path, layer in layers.items():
        check_packable(path, layer)
    scales: dict[str, StaticScale] = {}
    if calibration is not None:
        seen = calibrate(made, layers, batches_of(calibration))
        if scheme.range is not None:
            scales = {path: choose_scale(row, scheme) for path, row in seen.items()}
    state = RecipeState(recipe)
    for path, layer in layers.items():
        pack_weight(
            layer,
            LayerContext(
                path, len(state.layers), chosen[path], state, static_scale=scales.get(path)
            ),
        )
    return made


def packed_layers(model: Module) -> dict[str, GemmLayer]:
    """The layers of a quantized model that hold packed weights.

    Args:
        model: any module.

    Returns:
        Layers by path, in model order; none for a float32 model.

    >>> model = et.nn.Sequential(et.nn.Linear(64, 64, rng=0), et.nn.Linear(64, 10, rng=1))
    >>> list(et.nn.packed_layers(et.quantize_model(model, "int8_weights")))
    ['0', '1']
    """
    return {path: layer for path, layer in gemm_layers(model) if layer.weight.is_blocked}


def dequantize_model(model: Module) -> Module:
    """A copy of a model whose packed weights are float32 parameters with the same values.

    Args:
        model: any module; a quantized layer's activations are no longer quantized in the copy.

    Returns:
        The copy, in the mode the model is in, without its hooks and gradients.

    >>> packed = et.quantize_model(et.nn.Sequential(et.nn.Linear(64, 64, rng=0)), "mxfp4_weights")
    >>> et.nn.dequantize_model(packed)[0].weight.dtype
    extensor.float32
    """
    made = bare_copy(model)
    fresh: dict[int, Parameter] = {}  # a weight that several modules share stays one
    for module in made.modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, (Buffer, Parameter)) and value.is_blocked:
                if id(value) not in fresh:
                    with no_grad():
                        values = value.dequantize().data
                    fresh[id(value)] = Parameter(values, device=value.device)
                setattr(module, name, fresh[id(value)])
    return made


def bare_copy(model: Module) -> Module:
    """A copy of the model without recipe, hooks and gradients."""
    without: dict[int, Any] = {}  # deepcopy's memo: replacements by the id of what they replace
    for module in model.modules():
        without |= {id(hooks): () for hooks in (module._hooks, module._pre_hooks)}
        if isinstance(module, GemmLayer):
            without[id(module.quant)] = None
    without |= {id(p.grad): None for p in model.parameters()}
    bare = copy.deepcopy(model, without)
    round_norms(bare, False)
    return bare


def check_packable(path: str, layer: GemmLayer) -> None:
    """Refuse a layer whose weight cannot be packed.

    Raises:
        ValueError: for another layer than Linear and Conv2d, or a weight that is packed or not
            finite.
    """
    weight = layer.weight
    if not isinstance(layer, (Linear, Conv2d)):
        raise ValueError(
            f"quantize_model: {path}: expected a Linear or Conv2d, got {type(layer).__name__}; "
            f"pass keep=({path!r},)"
        )
    if weight.is_blocked:
        raise ValueError(
            f"quantize_model: {path}: its weight is already {weight.dtype.name}; quantize the "
            "model with float32 weights instead"
        )
    if not bool(weight.backend.xp.isfinite(weight.data).all()):
        raise ValueError(
            f"quantize_model: {path}: its weight has NaN or infinity: the training diverged; "
            "use an earlier checkpoint"
        )


def pack_weight(layer: GemmLayer, context: LayerContext) -> None:
    """Replace a layer's float32 weight by a packed one, and record what packing did to it."""
    weight = layer.weight
    spec = context.operand("fprop.w")
    assert isinstance(spec, QuantSpec)
    with no_grad():
        matrix = weight.detach().to("float32").reshape(weight.shape[0], -1)
    spec = spec.replace(axis=1).resolve(2)
    if isinstance(spec.tile, tuple) and spec.tile[0] == 1 and spec.tile[1] > matrix.shape[1]:
        spec = spec.replace(tile="channel")  # the same block, stored without its padding
    packed, stats = weight.backend.quantize(matrix.data, spec)
    context.record("fprop.w", stats)
    _set_packed(layer, packed, context, weight.device)


def _set_packed(layer: GemmLayer, packed: QuantArray, context: LayerContext, device: str) -> None:
    layer.weight = Buffer(in_large_pages(packed), device=device)
    layer.quant = context
    context.state.layers[context.path] = context


def save_quantized(
    path: str | os.PathLike[str], model: Module, metadata: dict[str, Any] | None = None
) -> None:
    """Write a quantized model: packed weights, the rest of its state, and how inputs are quantized.

    Args:
        path: the file, a safetensors checkpoint as `save_checkpoint` writes; atomically replaced.
        model: from `quantize_model` or `load_quantized`.
        metadata: more to keep, as JSON.

    Raises:
        ValueError: if no layer is quantized, or the metadata uses this function's own key.
        OSError: as `save_checkpoint`.

    >>> import tempfile
    >>> model = et.quantize_model(et.nn.Linear(64, 10, rng=0), "mxfp4_weights")
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     et.save_quantized(f"{folder}/model.safetensors", model, {"epoch": 3})
    """
    layers = packed_layers(model)
    if not layers:
        raise ValueError("save_quantized: no layer is quantized; use save_checkpoint")
    if metadata and KEY in metadata:
        raise ValueError(f"metadata: expected no key {KEY!r}, which describes the layers")
    contexts = {name: layer.quant for name, layer in layers.items() if layer.quant is not None}
    described = {
        name: {
            "activations": _operand_json(context.operand("fprop.x")),
            "static_scale": None
            if context.static_scale is None
            else dataclasses.asdict(context.static_scale),
        }
        for name, context in contexts.items()
    }
    recipe = next(iter(contexts.values())).state.recipe
    content = {"scheme": recipe.name, "doc": recipe.doc, "layers": described}
    save_checkpoint(path, model.state_dict(), {**(metadata or {}), KEY: content})


def load_quantized(path: str | os.PathLike[str], model: Module) -> Module:
    """A copy of a float32 model with the weights that `save_quantized` wrote.

    Args:
        path: the file.
        model: of the same architecture; its own weights do not matter.

    Returns:
        The copy, in the mode the model is in.

    Raises:
        FileNotFoundError: if there is no such file.
        CheckpointError: if it is damaged, or no quantized model.
        ValueError: if its layers or shapes are not the model's.

    >>> import tempfile
    >>> model = et.nn.Sequential(et.nn.Linear(64, 10, rng=0))
    >>> quantized = et.quantize_model(model, "mxfp4_weights")
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     et.save_quantized(f"{folder}/model.safetensors", quantized)
    ...     loaded = et.load_quantized(f"{folder}/model.safetensors", model)
    >>> bool((loaded[0].weight.codes == quantized[0].weight.codes).all())
    True
    """
    checkpoint = load_checkpoint(path)
    content = checkpoint.metadata.get(KEY)
    if not isinstance(content, dict):
        raise CheckpointError(f"{os.fspath(path)}: expected a file of save_quantized, got another")
    made = bare_copy(model)
    known = dict(gemm_layers(made))
    dense = Gemm("float32", "float32")
    state: RecipeState | None = None
    try:
        for name, entry in content["layers"].items():
            weight = f"{name}.weight" if name else "weight"  # the model itself may be the layer
            packed, operand = checkpoint.tensors[weight], entry["activations"]
            if isinstance(operand, dict):
                operand = QuantSpec.from_dict(operand)
            entry_scale = entry["static_scale"]
            static = None if entry_scale is None else StaticScale(**entry_scale)
            if not isinstance(packed, QuantArray):
                raise TypeError(f"{weight} is not packed")
            layer = LayerRecipe(Gemm(operand, packed.spec), dense, dense)
            state = state or RecipeState(Recipe(content["scheme"], content["doc"], layer))
            _check_fit(name, known.get(name), packed, list(known))
            context = LayerContext(name, len(state.layers), layer, state, static_scale=static)
            _set_packed(known[name], packed, context, known[name].weight.device)
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{os.fspath(path)}: a damaged description: {error!r}") from None
    made.load_state_dict(checkpoint.tensors)
    return made


def _check_fit(name: str, layer: Module | None, packed: QuantArray, known: list[str]) -> None:
    if not isinstance(layer, (Linear, Conv2d)):
        raise ValueError(
            f"load_quantized: the file has a layer {name!r}, the model has {', '.join(known)}; "
            "build the model that was quantized"
        )
    shape = layer.weight.shape[0], math.prod(layer.weight.shape[1:])
    if packed.shape != shape:
        raise ValueError(
            f"load_quantized: {name}: expected a weight of shape {shape}, got "
            f"{packed.shape}; build the model that was quantized"
        )


def _operand_json(operand: Any) -> Any:
    if isinstance(operand, str):
        return operand
    return json.loads(json.dumps(dataclasses.asdict(operand)))  # a tile is a list there
