"""Putting a torch model under a recipe."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from torch import nn

from extensor.quant.array import QuantStats
from extensor.quant.recipe import LayerRecipe, Recipe
from extensor.quant.recipe_state import LayerContext, RecipeState
from extensor.quant.recipes import FP4_RECIPE, with_rules
from extensor.random import Stream
from extensor.torch.arrays import check_tensor
from extensor.torch.layer import LayerHandle
from extensor.torch.modules import QuantizedModule, quantized_class

__all__ = ["quantize_", "quantized_modules", "reset_telemetry", "telemetry"]

Module = TypeVar("Module", bound=nn.Module)
_LEAVE = LayerRecipe.uniform("float32")
"""Stands for a layer that stays torch's own; compared by identity."""


def quantize_(
    model: Module,
    recipe: Recipe | str = FP4_RECIPE,
    seed: int = 0,
    rules: Mapping[str, str | LayerRecipe | None] | None = None,
    step: int = 0,
) -> Module:
    """Put every Linear and Conv2d of a model under a recipe, in place.

    Parameters stay the same objects, so an optimizer made before goes on working. The layers change
    their class to a subclass of it. The first layer has the role ``@first`` and the last one
    ``@last``, as in `extensor.nn.apply_recipe`; what a transformers model calls its output
    embeddings has the role ``@head`` instead.

    Args:
        model: the model, or a single layer, with real weights.
        recipe: a recipe or its name.
        seed: of stochastic rounding.
        rules: before the recipe's own: by glob on a layer's path, the name of a recipe, a
            `LayerRecipe`, or None for a layer that stays torch's own. The first that matches wins.
        step: the optimizer step that a resumed run is at.

    Returns:
        The model itself.

    Raises:
        TypeError: for what is no module, no recipe or no rule; for parameters that no backend
            reads: float64, complex, sparse or meta.
        ValueError: for an unknown recipe, a rule that matches no layer, a model without layers, a
            recipe with `saved` rules, or a seed or step out of range. The model is unchanged then.

    >>> import extensor.torch as ext
    >>> model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.Linear(64, 2))
    >>> model = ext.quantize_(model, recipe="mxfp4", seed=0)
    >>> model[2]
    Linear(in_features=64, out_features=64, bias=True, recipe='mxfp4')
    >>> model[3]
    Linear(in_features=64, out_features=2, bias=True, recipe='mxfp4', not quantized: bfloat16)
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"quantize_: expected a torch.nn.Module, got {type(model).__name__}")
    uses: Any = rules
    if isinstance(rules, Mapping):
        uses = {match: _LEAVE if use is None else use for match, use in rules.items()}
    full = with_rules("quantize_", recipe, uses)
    if full.saved:
        raise ValueError(
            f"quantize_: recipe {full.name!r} says how other operations store what they keep, and "
            "in a torch model those are torch's; expected a recipe whose saved is ()"
        )
    Stream(seed, step)  # checks both
    layers = _layers(model)
    if not layers:
        raise ValueError(
            f"quantize_: {type(model).__name__} has no Linear or Conv2d; quantized are "
            "torch.nn.Linear, torch.nn.Conv2d and transformers' Conv1D"
        )
    chosen = full.assign(_roles(model, layers))
    for path, (module, _) in layers.items():
        for name, parameter in module.named_parameters(path):
            if chosen[path] is not _LEAVE:
                check_tensor(f"quantize_: {name}", parameter)
    state = RecipeState(full, seed)
    for index, (path, (module, cls)) in enumerate(layers.items()):
        if chosen[path] is _LEAVE:
            continue
        context = LayerContext(path, index, chosen[path], state)
        state.layers[path] = context
        module.__class__ = cls
        assert isinstance(module, QuantizedModule)
        module.set_recipe(LayerHandle(context), step)
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoderLayer):
            module.activation_relu_or_gelu = 0  # its fused inference reads weights past the layers
    return model


def _layers(model: nn.Module) -> dict[str, tuple[nn.Module, type[nn.Module]]]:
    """The layers that a recipe can quantize, each with the class that it will have."""
    found = {}
    for path, module in model.named_modules():
        if (cls := quantized_class(module)) is not None:
            for name, parameter in module.named_parameters(path):
                if isinstance(parameter, nn.parameter.UninitializedParameter):
                    raise TypeError(
                        f"quantize_: {name} has no shape yet; run the lazy module once first"
                    )
            found[path] = module, cls
    return found


def _roles(model: nn.Module, layers: Mapping[str, Any]) -> list[tuple[str, frozenset[str]]]:
    output = getattr(model, "get_output_embeddings", lambda: None)()
    heads = {path for path, (module, _) in layers.items() if module is output}
    plain = [path for path in layers if path not in heads]
    return [
        (
            path,
            frozenset({"@head"} if path in heads else ())
            | ({"@first"} if plain[:1] == [path] else set())
            | ({"@last"} if plain[-1:] == [path] else set()),
        )
        for path in layers
    ]


def quantized_modules(model: nn.Module) -> dict[str, QuantizedModule]:
    """The layers of a model that are under a recipe, by path.

    Args:
        model: any torch module.

    Returns:
        The quantized layers, in the model's order.

    >>> import extensor.torch as ext
    >>> list(ext.quantized_modules(ext.quantize_(nn.Sequential(nn.Linear(32, 32)))))
    ['0']
    """
    return {p: m for p, m in model.named_modules() if isinstance(m, QuantizedModule)}


def telemetry(model: nn.Module) -> dict[tuple[str, str], QuantStats]:
    """What quantizing did to the values, by layer and operand slot, since the last reset.

    Args:
        model: a model under a recipe.

    Returns:
        Counts by (path, slot), such as ("0", "fprop.x"). Waits for the GPU.

    >>> import extensor.torch as ext, torch
    >>> model = ext.quantize_(nn.Sequential(nn.Linear(32, 32)), recipe="mxfp4_all")
    >>> _ = model(torch.ones(2, 32))
    >>> ext.telemetry(model)["0", "fprop.w"].count
    1024
    """
    found = {}
    for path, module in quantized_modules(model).items():
        context = module.quant_layer.context
        for (own, slot), counts in context.state.telemetry.items():
            if own == context.path:
                found[path, slot] = counts
    return found


def reset_telemetry(model: nn.Module) -> None:
    """Set a model's counts to zero.

    Args:
        model: a model under a recipe.

    >>> import extensor.torch as ext
    >>> model = ext.quantize_(nn.Sequential(nn.Linear(32, 32)))
    >>> ext.reset_telemetry(model)
    >>> ext.telemetry(model)
    {}
    """
    for module in quantized_modules(model).values():
        module.quant_layer.context.state.reset_telemetry()
