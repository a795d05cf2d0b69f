"""Recipes: which operand of which GEMM is quantized how, as data.

A linear or convolution layer has three GEMMs and so six operand slots:
fprop(x, w), dgrad(g, w), wgrad(g, x). A `LayerRecipe` fills the six; a `Recipe`
adds ordered rules that give some layers another `LayerRecipe` (first and last
layer in high precision, say). The recipes themselves stand in `RECIPES`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Literal, get_args

from extensor.errors import unknown_name
from extensor.quant.spec import QuantSpec

__all__ = [
    "FLOAT_NAMES",
    "ROLES",
    "SLOTS",
    "FloatName",
    "Gemm",
    "LayerRecipe",
    "OperandSpec",
    "Recipe",
    "Rule",
]

FloatName = Literal["float32", "bfloat16"]
FLOAT_NAMES: tuple[FloatName, ...] = get_args(FloatName)
"""What is not quantized to blocks: an operand, or a layer's result."""
OperandSpec = QuantSpec | FloatName
SLOTS = ("fprop.x", "fprop.w", "dgrad.g", "dgrad.w", "wgrad.g", "wgrad.x")
"""The operand slots; a slot's position here numbers its random bits."""
ROLES = ("@first", "@last", "@embedding", "@head")
"""Layers a rule can name by what they are; a role may match nothing, a path may not."""


@dataclass(frozen=True)
class Gemm:
    """The operands of one GEMM.

    Attributes:
        a: the activation-side operand (x, g, g).
        b: the other (w, w, x).
        output_scale: factor on the product, to undo operands' ``element_scale``.
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
        if len({isinstance(o, QuantSpec) and o.rebased for o in (self.a, self.b)}) > 1:
            raise ValueError(
                f"both operands of a GEMM are rebased or none, got {self.a} and {self.b}; set "
                "rebased in both"
            )

    @property
    def unquantized(self) -> bool:
        """True if neither operand is quantized to blocks."""
        return isinstance(self.a, str) and isinstance(self.b, str)


@dataclass(frozen=True)
class LayerRecipe:
    """The three GEMMs of one layer."""

    fprop: Gemm
    dgrad: Gemm
    wgrad: Gemm

    @classmethod
    def uniform(cls, operand: OperandSpec) -> LayerRecipe:
        """The same operand in all six slots."""
        gemm = Gemm(operand, operand)
        return cls(gemm, gemm, gemm)

    def slot(self, name: str) -> OperandSpec:
        """The operand in a slot of `SLOTS`."""
        if name not in SLOTS:
            raise ValueError(unknown_name("slot", name, SLOTS))
        gemm, side = self._place(name)
        value: OperandSpec = getattr(getattr(self, gemm), side)
        return value

    @staticmethod
    def _place(name: str) -> tuple[str, str]:
        """The GEMM a slot belongs to, and the side: `SLOTS` alternates a and b."""
        return name.partition(".")[0], "ab"[SLOTS.index(name) % 2]

    def with_slot(self, name: str, operand: OperandSpec) -> LayerRecipe:
        """A copy with one slot changed."""
        self.slot(name)
        gemm, side = self._place(name)
        return replace(self, **{gemm: replace(getattr(self, gemm), **{side: operand})})

    def rebased(self) -> LayerRecipe:
        """A copy whose quantized operands, all of them MXFP8, are `QuantSpec.rebased`."""

        def rebase(gemm: Gemm) -> Gemm:
            a, b = (o if isinstance(o, str) else o.replace(rebased=True) for o in (gemm.a, gemm.b))
            return replace(gemm, a=a, b=b)

        return LayerRecipe(rebase(self.fprop), rebase(self.dgrad), rebase(self.wgrad))


@dataclass(frozen=True)
class Rule:
    """Layers that match get ``use`` instead: a glob on the layer's path, or a role of `ROLES`."""

    match: str
    use: LayerRecipe

    def __post_init__(self) -> None:
        if self.match.startswith("@") and self.match not in ROLES:
            raise ValueError(unknown_name("role", self.match, ROLES))


@dataclass(frozen=True)
class Recipe:
    """A named training recipe.

    Attributes:
        name: what ``--recipe`` takes.
        doc: one line: what it is and where it comes from.
        layers: every layer that no rule names.
        rules: ordered; the first that matches a layer decides.
        adaptive_scale_rule: whether the gradient scaler may turn floor scales to rceil where a
            tensor saturates.
        activations: what the results of layers are rounded to, once, and stored as. Promotion does
            the rest: under "bfloat16" what is computed of them is bfloat16 until it meets float32
            (a residual stream, a norm's weights), losses are float32, a gradient has its
            tensor's dtype, and parameters with their gradients stay float32. So does torch's
            autocast. Norms whose results only layers read
            (`Module.feeds_layers`) round them, as it rounds what layers read.
    """

    name: str
    doc: str
    layers: LayerRecipe
    rules: tuple[Rule, ...] = ()
    adaptive_scale_rule: bool = False
    activations: FloatName = "float32"

    def __post_init__(self) -> None:
        if self.activations not in FLOAT_NAMES:
            raise ValueError(unknown_name("activations", self.activations, FLOAT_NAMES))

    def assign(self, layers: Sequence[tuple[str, frozenset[str]]]) -> Mapping[str, LayerRecipe]:
        """The recipe of each layer, by path.

        Args:
            layers: (path, roles) of every layer that has GEMMs, in model order.

        Raises:
            ValueError: if a path rule matches no layer.
        """
        unused = [rule for rule in self.rules if not rule.match.startswith("@")]
        chosen: dict[str, LayerRecipe] = {}
        for path, roles in layers:
            chosen[path] = self.layers
            hits = [r for r in self.rules if r.match in roles or fnmatchcase(path, r.match)]
            unused = [rule for rule in unused if rule not in hits]
            if hits:
                chosen[path] = hits[0].use
        if unused:
            known = ", ".join(path for path, _ in layers) or "none"
            raise ValueError(
                f"recipe {self.name!r}: rule {unused[0].match!r} matches no layer; "
                f"the model's layers: {known}"
            )
        return chosen
