"""Applying a recipe to a model's layers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from extensor.autograd.storage import ArrayStore, SavedStorage
from extensor.dtypes import DTypeLike, as_dtype
from extensor.nn.linear import GemmLayer
from extensor.nn.module import Module
from extensor.nn.norm import LayerNorm, RMSNorm
from extensor.quant.recipe import FloatName, LayerRecipe, Recipe
from extensor.quant.recipe_state import LayerContext, RecipeState
from extensor.quant.recipes import with_rules
from extensor.quant.spec import QuantSpec
from extensor.quant.weight_cache import WeightCache
from extensor.random import Stream

__all__ = [
    "apply_recipe", "assign_recipe", "cast_weights", "gemm_layers", "round_norms", "store_saved",
    "switch_recipe",
]  # fmt: skip


def gemm_layers(model: Module) -> Iterator[tuple[str, GemmLayer]]:
    """The layers whose GEMMs a recipe can quantize, in model order.

    Args:
        model: any module.

    Returns:
        An iterator of (path, layer).

    >>> model = et.nn.Sequential(et.nn.Linear(8, 8), et.nn.ReLU(), et.nn.Linear(8, 2))
    >>> [path for path, _ in et.nn.gemm_layers(model)]
    ['0', '2']
    """
    for path, module in model.named_modules():
        if isinstance(module, GemmLayer):
            yield path, module


def apply_recipe(
    model: Module,
    recipe: Recipe | str,
    seed: int = 0,
    activations: FloatName | None = None,
    rules: Mapping[str, str | LayerRecipe] | None = None,
) -> RecipeState:
    """Apply a recipe to every Linear and Conv2d of a model.

    A layer's role is its own ``role`` (``@embedding``, ``@head``). Of the layers without one, the
    first has the role ``@first`` and the last ``@last``.

    Args:
        model: the model; its layers' ``quant`` is set.
        recipe: a recipe or the name of one.
        seed: seed of all stochastic rounding.
        activations: "float32" or "bfloat16" in place of the recipe's own.
        rules: before the recipe's own: by glob on a layer's path or by role, the name of a recipe
            or a `LayerRecipe`. The first that matches wins.

    Returns:
        The recipe's state: its ``telemetry``, and the ``step`` that random bits depend on, which
        the optimizer's steps advance.

    Raises:
        TypeError: if the model is no Module, the recipe neither a Recipe nor a name, or a rule
            neither a LayerRecipe nor a name.
        ValueError: for an unknown name, a path rule that matches no layer, or a seed out of range.
            The model is unchanged then.

    >>> model = et.nn.Sequential(et.nn.Linear(32, 32, rng=0), et.nn.ReLU(), et.nn.Linear(32, 2))
    >>> state = et.nn.apply_recipe(model, "mxfp4_all")
    >>> model(et.randn(4, 32, seed=0)).sum().backward()
    >>> state.telemetry["0", "fprop.w"].count
    1024
    >>> et.nn.apply_recipe(model, "mxfp4_all", rules={"2": "bf16"})
    RecipeState(recipe='mxfp4_all', seed=0, step=0, layers=2, 1 not quantized: '2')
    """
    if not isinstance(model, Module):
        raise TypeError(f"apply_recipe: expected a Module, got {type(model).__name__}")
    recipe = with_rules("apply_recipe", recipe, rules)
    if activations is not None:
        recipe = replace(recipe, activations=activations)
    Stream(seed)  # checks the seed
    chosen = assign_recipe(model, recipe)
    state = RecipeState(recipe, seed)
    for index, (path, module) in enumerate(gemm_layers(model)):
        state.layers[path] = LayerContext(path, index, chosen[path], state)
        module.quant = state.layers[path]
    round_norms(model, recipe.activations == "bfloat16")
    store_saved(model, state)
    return state


def switch_recipe(model: Module, state: RecipeState, recipe: Recipe) -> bool:
    """Go on with another recipe: the model keeps its state, its step and its random streams.

    Args:
        model: the model that `apply_recipe` made the state of.
        state: its recipe and its layers' are replaced; counts stay.
        recipe: the next recipe.

    Returns:
        Whether anything changed: False if the state has this recipe already.

    Raises:
        ValueError: for a rule that matches no layer or module; nothing is changed then.

    >>> model = et.nn.Sequential(et.nn.Linear(32, 32, rng=0))
    >>> state = et.nn.apply_recipe(model, "mxfp4_all", seed=1)
    >>> et.nn.switch_recipe(model, state, et.RECIPES["bf16"])
    True
    >>> state.recipe.name, state.layers["0"].operand("fprop.x")
    ('bf16', 'bfloat16')
    """
    if state.recipe == recipe:
        return False
    chosen, before = assign_recipe(model, recipe), state.recipe
    state.recipe = recipe
    try:
        store_saved(model, state)
    except ValueError:
        state.recipe = before
        raise
    for path, context in state.layers.items():
        context.layer = chosen[path]
    state.weight_cache = WeightCache()
    round_norms(model, recipe.activations == "bfloat16")
    return True


def store_saved(model: Module, state: RecipeState) -> None:
    """Set how the modules store what operations keep for backward.

    Args:
        model: its modules' ``storage`` is set.
        state: of a recipe, whose `Recipe.saved` rules are taken.

    Raises:
        ValueError: for a rule that matches no module; the model is unchanged then.

    >>> from extensor.nn.recipe import store_saved
    >>> model = et.nn.Sequential(et.nn.Linear(32, 32), et.nn.GELU())
    >>> store_saved(model, et.nn.apply_recipe(model, "mxfp4_all"))
    >>> model[1].storage is None
    True
    """
    rules = state.recipe.saved
    modules = list(model.named_modules())
    for rule in rules:
        if not any(rule.matches(path) for path, _ in modules):
            known = ", ".join(path for path, _ in modules if path) or "none"
            raise ValueError(
                f"recipe {state.recipe.name!r}: saved rule {rule.match!r} matches no module; the "
                f"model's modules: {known}"
            )
    stores = [(r, None if r.spec is None else ArrayStore(r.spec, state)) for r in rules]
    for path, module in modules:
        hits = [(rule, store) for rule, store in stores if rule.matches(path)]
        module.storage = SavedStorage(hits, state) if hits else None
    state.unmet_saved = {rule: set() for rule in rules}


def cast_weights(model: Module, dtype: DTypeLike) -> None:
    """Store parameters of two axes or more in a float dtype or in blocks, in place.

    Their gradients have the float dtype; those of blocks are bfloat16. Vectors (biases, norms) stay
    as they are: they are small, and kernels read them in float32. Make optimizers after it: see
    ``masters`` of `Optimizer`.

    Of a matrix in blocks operations read bfloat16, which holds every value of an MX format, and the
    graph keeps the blocks. A block's scale is the least power of two that saturates no value.

    Args:
        model: the model.
        dtype: "bfloat16", "float32" or another dense float dtype; or an MX format such as "mxint8",
            in blocks along the last axis.

    Raises:
        TypeError: for a dtype that is neither.
        ValueError: for blocks, of parameters of more than two axes, such as a convolution's; the
            model is unchanged then.

    >>> model = et.nn.Linear(8, 4)
    >>> et.nn.cast_weights(model, "bfloat16")
    >>> model.weight.dtype.name, model.bias.dtype.name
    ('bfloat16', 'float32')
    """
    to = as_dtype(dtype)
    blocks = to.format is not None and to.format.scale.name == "e8m0"
    if not (to.is_float or blocks):
        raise TypeError(
            f"cast_weights: expected a dense float dtype or an MX format, got {to.name}"
        )
    matrices = [(path, param) for path, param in model.named_parameters() if param.ndim > 1]
    for path, param in matrices if blocks else ():
        if param.ndim > 2:
            raise ValueError(
                f"cast_weights: {path}: blocks of {to.name} run along the rows of matrices, got "
                f"shape {param.shape}; use bfloat16"
            )
    for _, param in matrices:
        fresh = param.detach().to("float32") if param.is_blocked else param.detach()
        if blocks:
            fresh = fresh.quantize(QuantSpec(to.name, scale_rule="rceil"))
        else:
            fresh = fresh.astype(to)
        param.data, param.dtype, param.grad = fresh.data, fresh.dtype, None
        param._version[0] += 1


def round_norms(model: Module, narrow: bool) -> None:
    """Set whether norms whose results only layers read round them to bfloat16.

    Args:
        model: its norms named in `Module.feeds_layers` are set.
        narrow: True rounds.

    >>> from extensor.nn.recipe import round_norms
    >>> block = et.nn.TransformerBlock(
    ...     et.nn.MultiheadAttention(64, heads=4), et.nn.FeedForward(64, 256)
    ... )
    >>> round_norms(block, narrow=True)
    >>> block.norm1.narrow
    True
    """
    for module in model.modules():
        for name in module.feeds_layers:
            if isinstance(norm := getattr(module, name, None), (LayerNorm, RMSNorm)):
                norm.narrow = narrow


def assign_recipe(model: Module, recipe: Recipe) -> Mapping[str, LayerRecipe]:
    """The recipe of each layer of a model; roles as `apply_recipe` says.

    Args:
        model: the model, which stays as it is.
        recipe: the recipe.

    Returns:
        A `LayerRecipe` by path.

    Raises:
        ValueError: for a path rule that matches no layer.

    >>> from extensor.nn.recipe import assign_recipe
    >>> model = et.nn.Sequential(et.nn.Linear(32, 32), et.nn.Linear(32, 32), et.nn.Linear(32, 2))
    >>> chosen = assign_recipe(model, et.RECIPES["mxfp4"])
    >>> [chosen[path].fprop.unquantized for path in chosen]
    [True, False, True]
    """
    layers = list(gemm_layers(model))
    # A layer with a role of its own is neither first nor last.
    plain = [path for path, module in layers if module.role is None]
    roles: list[tuple[str, frozenset[str]]] = []
    for path, module in layers:
        marks = {f"@{module.role}"} if module.role else set()
        marks |= {"@first"} if plain[:1] == [path] else set()
        marks |= {"@last"} if plain[-1:] == [path] else set()
        roles.append((path, frozenset(marks)))
    return recipe.assign(roles)
