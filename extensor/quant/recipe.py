"""Recipes as data: how each operand of each GEMM is quantized.

A linear or convolution layer has three GEMMs, and so six operand slots: fprop(x, w), dgrad(g, w)
and wgrad(g, x). A `LayerRecipe` fills the six. A `Recipe` adds ordered rules that give some layers
another `LayerRecipe`, such as the first and the last one in high precision. `RECIPES` lists them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any, Literal, get_args

from extensor.errors import unknown_name
from extensor.notebook import card, table
from extensor.quant.saved import SavedRule
from extensor.quant.spec import QuantSpec

__all__ = [
    "FLOAT_NAMES",
    "ROLES",
    "SLOTS",
    "FloatName",
    "Gemm",
    "LayerRecipe",
    "OperandRule",
    "OperandSpec",
    "Recipe",
    "Rule",
    "SavedRule",
    "operand_text",
]

FloatName = Literal["float32", "bfloat16"]
FLOAT_NAMES: tuple[FloatName, ...] = get_args(FloatName)
"""Dtypes of operands and results that are not quantized to blocks."""
OperandSpec = QuantSpec | FloatName
SLOTS = ("fprop.x", "fprop.w", "dgrad.g", "dgrad.w", "wgrad.g", "wgrad.x")
"""The operand slots. A slot's position here numbers its random stream."""
ROLES = ("@first", "@last", "@embedding", "@head")
"""Layers that a rule can name by role. A role may match no layer; a path must match one."""


def operand_text(operand: OperandSpec) -> str:
    """An operand in words: format, tile, scale rule, and all else that is not the default.

    Args:
        operand: a spec, ``"float32"`` or ``"bfloat16"``.

    Returns:
        Text for a table's cell.

    >>> from extensor.quant.recipe import operand_text
    >>> operand_text(et.QuantSpec("mxfp4", scale_rule="rceil", rounding="stochastic"))
    'mxfp4 1x32 rceil stochastic'
    """
    if isinstance(operand, str):
        return operand
    tile = operand.row.tile if operand.tile is None else operand.tile
    words = [operand.format, tile if isinstance(tile, str) else f"{tile[0]}x{tile[1]}"]
    words += [operand.rule]
    if (transform := operand.transform) is not None:
        words.append(f"Hadamard-{transform.size} {transform.signs.replace('_', ' ')}")
        words += [f"seed {transform.seed}"] if transform.seed else []
    words += [f"times {operand.element_scale:g}"] if operand.element_scale != 1.0 else []
    words += ["rebased"] if operand.rebased else []
    if operand.rounding == "stochastic":
        words.append("stochastic scales (EDEN)" if operand.eden else "stochastic")
    for field in fields(operand):
        value = getattr(operand, field.name)
        if field.name not in _IN_WORDS and value != field.default:
            words.append(f"{field.name} {value}")
    return " ".join(words)


_IN_WORDS = (
    "format", "axis", "tile", "scale_rule", "transform", "element_scale", "rebased", "rounding",
    "eden",
)  # fmt: skip
"""The fields of a spec that have words of their own in `operand_text`; a slot sets the axis."""


@dataclass(frozen=True)
class Gemm:
    """The operands of one GEMM.

    Attributes:
        a: the first operand: x, g, g.
        b: the second operand: w, w, x.
        output_scale: factor on the product, which undoes the operands' ``element_scale``.

    Raises:
        ValueError: for an unknown float dtype, a transform in one operand only, or rebasing beside
            another format than MXFP4.

    >>> from extensor.quant.recipe import Gemm
    >>> Gemm(et.QuantSpec("mxfp8_e4m3"), "bfloat16").unquantized
    False
    """

    a: OperandSpec
    b: OperandSpec
    output_scale: float = 1.0

    def __post_init__(self) -> None:
        for operand in (self.a, self.b):
            if isinstance(operand, str) and operand not in FLOAT_NAMES:
                raise ValueError(
                    f"operand: expected a QuantSpec, 'float32' or 'bfloat16', got {operand!r}"
                )
        a, b = (o.transform if isinstance(o, QuantSpec) else None for o in (self.a, self.b))
        if a != b:
            raise ValueError(
                f"a transform cancels only if both operands of a GEMM carry it, got {a} and {b}"
            )
        others = [o for o in (self.a, self.b) if not (isinstance(o, QuantSpec) and o.rebased)]
        if len(others) == 1 and not (
            isinstance(o := others[0], QuantSpec) and o.is_mx and o.row.element.bits == 4
        ):
            raise ValueError(
                f"both operands of a GEMM are rebased or none, got {self.a} and {self.b}; set "
                "rebased in both, or multiply MXFP4, which needs none"
            )

    @property
    def unquantized(self) -> bool:
        """True if neither operand is quantized to blocks."""
        return isinstance(self.a, str) and isinstance(self.b, str)


@dataclass(frozen=True)
class LayerRecipe:
    """The three GEMMs of one layer.

    Attributes:
        fprop: forward, of x and w.
        dgrad: the gradient of x, of g and w.
        wgrad: the gradient of w, of g and x.
        clip_gradient: whether a value that the forward operand clipped, one beyond its block's
            largest, gets no gradient; under a Hadamard transform, in the transform's domain
            (arXiv 2505.14669, algorithm 1).
        requantize: whether dgrad.w and wgrad.x are made from what fprop multiplied, quantized once
            more along the other axis, and not from high precision: a layer then keeps one packed
            copy of x, and no other of w (arXiv 2505.14669, algorithm 1; 2601.22813, section 5).

    Raises:
        ValueError: for ``clip_gradient`` or ``requantize`` without two quantized operands in fprop
            whose values are clipped, in blocks along the contraction.

    >>> from extensor.quant.recipe import Gemm, LayerRecipe
    >>> quantized, dense = Gemm(*[et.QuantSpec("mxfp4")] * 2), Gemm("bfloat16", "bfloat16")
    >>> LayerRecipe(fprop=quantized, dgrad=dense, wgrad=dense).slot("wgrad.g")
    'bfloat16'
    """

    fprop: Gemm
    dgrad: Gemm
    wgrad: Gemm
    clip_gradient: bool = False
    requantize: bool = False

    def __post_init__(self) -> None:
        if not self.uses_forward_operands:
            return
        for operand in (self.fprop.a, self.fprop.b):
            if isinstance(operand, str) or not operand.clips or operand.has_float_scales:
                raise ValueError(
                    "clip_gradient and requantize: expected MX or NVFP4 operands in fprop, not "
                    f"rebased, got {operand}; leave both off otherwise"
                )
            if operand.has_per_step_signs:
                raise ValueError(
                    "clip_gradient and requantize: expected signs of fprop's transform that last, "
                    "which backward undoes, got signs='per_step'; 'random' draws them once"
                )

    @property
    def uses_forward_operands(self) -> bool:
        """Whether backward reads what fprop multiplied: to mask gradients, or to requantize it."""
        return self.clip_gradient or self.requantize

    @cached_property
    def is_quantized(self) -> bool:
        """Whether any operand is; else the layer computes in float32 or bfloat16."""
        return any(isinstance(self.slot(slot), QuantSpec) for slot in SLOTS)

    @cached_property
    def has_per_step_signs(self) -> bool:
        """Whether signs of a transform are drawn anew in each step."""
        operands = (self.fprop.a, self.dgrad.a, self.wgrad.a)  # a transform is in both of a GEMM
        return any(isinstance(o, QuantSpec) and o.has_per_step_signs for o in operands)

    @classmethod
    def uniform(cls, operand: OperandSpec) -> LayerRecipe:
        """The same operand in all six slots.

        Args:
            operand: a spec, ``"float32"`` or ``"bfloat16"``.

        Returns:
            The recipe.

        >>> from extensor.quant.recipe import LayerRecipe
        >>> LayerRecipe.uniform("bfloat16").fprop.a
        'bfloat16'
        """
        gemm = Gemm(operand, operand)
        return cls(gemm, gemm, gemm)

    def slot(self, name: str) -> OperandSpec:
        """The operand in a slot.

        Args:
            name: one of `SLOTS`, such as ``"dgrad.w"``.

        Returns:
            A spec, ``"float32"`` or ``"bfloat16"``.

        Raises:
            ValueError: for an unknown slot.

        >>> et.RECIPES["mxfp8_e5m2g"].layers.slot("dgrad.g").format
        'mxfp8_e5m2'
        """
        if name not in self._operands:
            raise ValueError(unknown_name("slot", name, SLOTS))
        return self._operands[name]

    @cached_property
    def _operands(self) -> dict[str, OperandSpec]:
        """The operand in each slot, which a step asks for several times."""
        places = ((slot, *self._gemm_and_side(slot)) for slot in SLOTS)
        return {slot: getattr(getattr(self, gemm), side) for slot, gemm, side in places}

    @cached_property
    def plans(self) -> dict[Any, Any]:
        """What operations derive of the recipe alone, once, each under a key of its own."""
        return {}

    @staticmethod
    def _gemm_and_side(name: str) -> tuple[str, str]:
        """The names of a slot's GEMM and operand; `SLOTS` alternates a and b."""
        return name.partition(".")[0], "ab"[SLOTS.index(name) % 2]

    def with_slot(self, name: str, operand: OperandSpec) -> LayerRecipe:
        """A copy with another operand in one slot.

        Args:
            name: one of `SLOTS`.
            operand: a spec, ``"float32"`` or ``"bfloat16"``.

        Returns:
            The new recipe.

        Raises:
            ValueError: for an unknown slot, or an operand that does not go with the other one of
                its GEMM.

        >>> layers = et.RECIPES["mxfp4_all"].layers.with_slot("wgrad.g", "bfloat16")
        >>> layers.slot("wgrad.g"), layers.slot("wgrad.x").format
        ('bfloat16', 'mxfp4')
        """
        self.slot(name)
        gemm, side = self._gemm_and_side(name)
        return replace(self, **{gemm: replace(getattr(self, gemm), **{side: operand})})

    def with_slots(self, match: str, other: LayerRecipe) -> LayerRecipe:
        """A copy whose slots of a pattern are another recipe's.

        A GEMM whose two slots match is the other recipe's as a whole, its output scale included.

        Args:
            match: a glob on `SLOTS`, such as ``"fprop.*"``.
            other: where the operands come from.

        Returns:
            The new recipe.

        Raises:
            ValueError: if no slot matches, or an operand does not go with the other one of its
                GEMM.

        >>> layers = et.RECIPES["mxfp4_all"].layers.with_slots("*.w", et.RECIPES["mxfp6"].layers)
        >>> layers.slot("fprop.x").format, layers.slot("fprop.w").format
        ('mxfp4', 'mxfp6_e2m3')
        """
        hits = [slot for slot in SLOTS if fnmatchcase(slot, match)]
        if not hits:
            raise ValueError(f"operands: {match!r} matches no slot; slots: {', '.join(SLOTS)}")
        changed = self
        for gemm in ("fprop", "dgrad", "wgrad"):
            mine = [slot for slot in hits if slot.startswith(gemm)]
            if len(mine) == 2:
                changed = replace(changed, **{gemm: getattr(other, gemm)})
            elif mine:
                changed = changed.with_slot(mine[0], other.slot(mine[0]))
        return changed

    def rebased(self) -> LayerRecipe:
        """A copy whose quantized operands, all of them MXFP8, are `QuantSpec.rebased`.

        Returns:
            The new recipe.

        Raises:
            ValueError: for an operand in another format.

        >>> et.RECIPES["mxfp8_nvidia"].layers.rebased() == et.RECIPES["mxfp8_rebased"].layers
        True
        """

        def rebase(gemm: Gemm) -> Gemm:
            a, b = (o if isinstance(o, str) else o.replace(rebased=True) for o in (gemm.a, gemm.b))
            return replace(gemm, a=a, b=b)

        return replace(
            self,
            fprop=rebase(self.fprop),
            dgrad=rebase(self.dgrad),
            wgrad=rebase(self.wgrad),
        )


@dataclass(frozen=True)
class Rule:
    """Gives a `LayerRecipe` to the layers that match.

    Attributes:
        match: a glob on the layer's path, or a role of `ROLES`.
        use: the recipe of the layers that match.

    Raises:
        ValueError: for an unknown role.

    >>> from extensor.quant.recipe import LayerRecipe, Rule
    >>> Rule("blocks.0.*", LayerRecipe.uniform("bfloat16")).match
    'blocks.0.*'
    """

    match: str
    use: LayerRecipe

    def __post_init__(self) -> None:
        _check_role(self.match)


@dataclass(frozen=True)
class OperandRule:
    """Gives single operands of the layers that match to another recipe.

    Attributes:
        match: a glob on the layer's path, or a role of `ROLES`.
        slots: a glob on `SLOTS`.
        use: the recipe that these slots are taken from.

    Raises:
        ValueError: for an unknown role.

    >>> from extensor.quant.recipe import OperandRule
    >>> OperandRule("blocks.*", "fprop.w", et.RECIPES["mxfp6"].layers).slots
    'fprop.w'
    """

    match: str
    slots: str
    use: LayerRecipe

    def __post_init__(self) -> None:
        _check_role(self.match)


def _check_role(match: str) -> None:
    if match.startswith("@") and match not in ROLES:
        raise ValueError(unknown_name("role", match, ROLES))


@dataclass(frozen=True)
class Recipe:
    """A named training recipe.

    Attributes:
        name: what ``--recipe`` takes.
        doc: one line: what the recipe is, and its source.
        layers: the recipe of layers that no rule matches.
        rules: in order; the first that matches a layer decides.
        adaptive_scale_rule: whether the gradient scaler may change floor scales to rceil where a
            tensor saturates.
        activations: the dtype that layers' results are rounded to and stored in. Under "bfloat16"
            promotion decides the rest, as under torch's autocast: values computed from results
            are bfloat16 until they meet float32 (a residual stream, a norm's weights), losses are
            float32, a gradient has its tensor's dtype, and parameters and their gradients stay
            float32. Norms whose results only layers read (`Module.feeds_layers`) round them too.
        saved_input: what a layer keeps of its input for backward: "packed", the operand of its
            weight's gradient in its format, or "input", the input as it is. None: packed. The
            graph of a torch model keeps its inputs anyway. Gradients are the same. A convolution's
            packed patches would take more than its input, so that it keeps this rounded to odd
            (`extensor.quant.kept`).
        saved: rules for what other operations keep, in order; the first that matches the module and
            the slot decides. Gradients are those at what is stored.
        operands: changes of single operands, made one after the other once ``rules`` have chosen.

    >>> from dataclasses import replace
    >>> from extensor.quant.recipe import LayerRecipe, Rule
    >>> dense = Rule("*.down", LayerRecipe.uniform("bfloat16"))
    >>> recipe = replace(et.RECIPES["mxfp4_all"], name="mxfp4_dense_down", rules=(dense,))
    """

    name: str
    doc: str
    layers: LayerRecipe
    rules: tuple[Rule, ...] = ()
    adaptive_scale_rule: bool = False
    activations: FloatName = "float32"
    saved_input: Literal["packed", "input"] | None = None
    saved: tuple[SavedRule, ...] = ()
    operands: tuple[OperandRule, ...] = ()

    def __post_init__(self) -> None:
        if self.saved_input not in (None, "packed", "input"):
            raise ValueError(unknown_name("saved_input", self.saved_input, ("packed", "input")))
        if self.activations not in FLOAT_NAMES:
            raise ValueError(unknown_name("activations", self.activations, FLOAT_NAMES))

    def __repr__(self) -> str:
        rules = f", rules={[rule.match for rule in self.rules]}" if self.rules else ""
        return f"Recipe(name={self.name!r}, doc={self.doc!r}{rules})"

    def _repr_html_(self) -> str:
        groups = [(rule.match, rule.use) for rule in self.rules]
        groups.append(("other layers" if groups else "every layer", self.layers))
        rows = [(slot, *(operand_text(use.slot(slot)) for _, use in groups)) for slot in SLOTS]
        facts: list[tuple[str, object]] = [("activations", self.activations)]
        facts += [("scale rules", "adaptive")] if self.adaptive_scale_rule else []
        return card(
            f"Recipe {self.name}: {self.doc}",
            facts,
            table(("operand", *(n for n, _ in groups)), rows),
        )

    def assign(self, layers: Sequence[tuple[str, frozenset[str]]]) -> Mapping[str, LayerRecipe]:
        """The recipe of each layer, by path.

        Args:
            layers: (path, roles) of every layer that has GEMMs, in model order.

        Returns:
            A `LayerRecipe` by path.

        Raises:
            ValueError: if a path rule matches no layer, or a change of an operand does not fit.

        >>> layers = [("0", frozenset({"@first"})), ("1", frozenset())]
        >>> chosen = et.RECIPES["mxfp4"].assign(layers)
        >>> chosen["0"].slot("fprop.w"), chosen["1"].slot("fprop.w").format
        ('bfloat16', 'mxfp4')
        """
        named = [rule.match for rule in self.rules] + [change.match for change in self.operands]
        unused = [match for match in named if not match.startswith("@")]
        chosen: dict[str, LayerRecipe] = {}
        for path, roles in layers:
            names = {m for m in named if m in roles or fnmatchcase(path, m)}
            unused = [match for match in unused if match not in names]
            chosen[path] = next((r.use for r in self.rules if r.match in names), self.layers)
            for change in self.operands:
                if change.match in names:
                    chosen[path] = chosen[path].with_slots(change.slots, change.use)
        if unused:
            known = ", ".join(path for path, _ in layers) or "none"
            raise ValueError(
                f"recipe {self.name!r}: rule {unused[0]!r} matches no layer; "
                f"the model's layers: {known}"
            )
        return chosen
