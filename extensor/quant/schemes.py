"""Schemes as data: how post-training quantization stores weights and quantizes activations.

Activations stay float (weight only), are quantized with scales of each batch (dynamic), or with one
scale that calibration chose (static). Schemes use the records of recipes, so roles and path rules
keep layers in float32 here as they do in training.

Sources: arXiv 1712.05877 (integer products with a zero point), 1806.08342 (per-channel weights,
per-tensor activations), 2004.09602 (choosing ranges: largest value, percentile, squared error),
2210.17323 (4-bit groups), 2209.05433 (FP8), OCP MX v1.0, 2509.25149 (NVFP4).
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType

from extensor.errors import Rows, unknown_name
from extensor.quant.recipe import Gemm, LayerRecipe, OperandSpec, Recipe, Rule
from extensor.quant.spec import QuantSpec
from extensor.quant.static_scale import check_static_spec

__all__ = ["RANGES", "SCHEMES", "Scheme", "get_scheme"]

RANGES = ("minmax", "percentile", "mse")
"""How calibration chooses a static range; see `extensor.nn.calibrate`."""

FLOAT32 = LayerRecipe.uniform("float32")
_HEAD = (Rule("@head", FLOAT32),)


@dataclass(frozen=True)
class Scheme:
    """How a trained model is quantized.

    Attributes:
        name: what `quantize_model` and ``--schemes`` take.
        doc: one line.
        weights: how each layer's weight is stored, along the contraction axis of its product.
        activations: how each layer's input is quantized; ``"float32"`` or ``"bfloat16"`` is
            weight-only quantization.
        range: for static activations, one of `RANGES`; None chooses scales for each batch.
        percentile: for ``range="percentile"``, in per cent: values above it saturate, and as many
            below.
        rules: layers that keep float32 weights, by path or role, ordered as in a `Recipe`.

    Raises:
        ValueError: for specs whose codes depend on random bits or on earlier calls, an unknown
            range, a range without activations to quantize, or a rule that quantizes.

    >>> et.Scheme("w4", "4-bit weights", et.QuantSpec("int4", tile=(1, 64)), "float32").activations
    'float32'
    """

    name: str
    doc: str
    weights: QuantSpec
    activations: OperandSpec
    range: str | None = None
    percentile: float = 99.99
    rules: tuple[Rule, ...] = _HEAD

    def __post_init__(self) -> None:
        Gemm(self.activations, self.weights)  # checks both
        for spec in (self.weights, self.activations):
            if isinstance(spec, QuantSpec):
                _check_stored(self.name, spec)
        if self.range is not None:
            if self.range not in RANGES:
                raise ValueError(unknown_name("range", self.range, RANGES))
            if not isinstance(self.activations, QuantSpec):
                raise ValueError(
                    f"scheme {self.name!r}: range={self.range!r} needs activations to quantize, "
                    f"got {self.activations!r}"
                )
            check_static_spec(self.activations)
        if not 50.0 < self.percentile <= 100.0:
            raise ValueError(f"percentile: expected a number in (50, 100], got {self.percentile!r}")
        if any(rule.use != FLOAT32 for rule in self.rules):
            raise ValueError(f"scheme {self.name!r}: a rule can only keep layers in float32")

    def recipe(self, keep: tuple[str, ...] = ()) -> Recipe:
        """The scheme as a recipe for the forward GEMM.

        Args:
            keep: further layers that stay float32, by path or role.

        Returns:
            A recipe whose gradients are float32.

        Raises:
            ValueError: for an unknown role.

        >>> recipe = et.SCHEMES["nvfp4_weights"].recipe(keep=("@last",))
        >>> [rule.match for rule in recipe.rules]
        ['@last', '@head']
        """
        layer = LayerRecipe(Gemm(self.activations, self.weights), FLOAT32.dgrad, FLOAT32.wgrad)
        rules = tuple(Rule(match, FLOAT32) for match in keep) + self.rules
        return Recipe(self.name, self.doc, layer, rules)


def _check_stored(name: str, spec: QuantSpec) -> None:
    """Refuse specs whose codes depend on random bits or on earlier calls."""
    if spec.rounding != "nearest_even" or spec.statistic == "running" or spec.element_scale != 1.0:
        raise ValueError(
            f"scheme {name!r}: expected rounding to nearest, no running statistic and no "
            f"element_scale, got {spec}"
        )


def _weights_and_activations(name: str, doc: str, spec: QuantSpec) -> Scheme:
    """Weights and activations in one format, in blocks along the contraction."""
    return Scheme(name, doc, spec, spec)


_INT8 = QuantSpec("int8", tile="channel")
_INT8_ACTIVATIONS = QuantSpec("int8", tile="tensor", symmetric=False)


def _int8(name: str, how: str, range: str | None) -> Scheme:
    doc = f"INT8 W8A8: weights per channel, asymmetric activations per tensor, {how}"
    return Scheme(name, doc, _INT8, _INT8_ACTIVATIONS, range)


def _int4(size: int) -> QuantSpec:
    return QuantSpec("int4", tile=(1, size), scale_dtype="float16")


def _fp8_block(size: int) -> Scheme:
    spec = QuantSpec("fp8_e4m3", tile=(1, size), scale_dtype="float16")
    return _weights_and_activations(
        f"fp8_block{size}", f"FP8 E4M3 in blocks of {size} with float16 scales", spec
    )


def _mx(name: str, format: str, doc: str) -> Scheme:
    return _weights_and_activations(name, doc, QuantSpec(format, scale_rule="rceil"))


_FP8 = QuantSpec("fp8_e4m3", tile="tensor")
_NVFP4 = QuantSpec("nvfp4")

_ROWS = (
    _int8("int8", "the range seen in calibration", "minmax"),
    _int8("int8_percentile", "its 99.99th percentile", "percentile"),
    _int8("int8_mse", "the range of least squared error", "mse"),
    _int8("int8_dynamic", "each batch's own range", None),
    Scheme("int8_weights", "INT8 weights per channel, float32 activations", _INT8, "float32"),
    *(
        Scheme(
            f"int4_g{size}",
            f"INT4 weights in groups of {size} with float16 scales, float32 activations",
            _int4(size),
            "float32",
        )
        for size in (32, 64, 128)
    ),
    Scheme(
        "int4_g32_asym",
        "INT4 weights in groups of 32 with a zero point, float32 activations",
        _int4(32).replace(symmetric=False),
        "float32",
    ),
    Scheme(
        "int4_a8",
        "W4A8: INT4 weights in groups of 32, INT8 activations as in int8",
        _int4(32),
        _INT8_ACTIVATIONS,
        "minmax",
    ),
    Scheme("fp8_tensor", "FP8 E4M3, one scale per tensor, calibrated activations", _FP8, _FP8,
           "minmax"),
    _weights_and_activations(
        "fp8_channel",
        "FP8 E4M3, a scale per output channel and per row of activations",
        QuantSpec("fp8_e4m3", tile="channel"),
    ),
    *(_fp8_block(size) for size in (8, 16, 32, 64, 128)),
    _mx("mxfp8", "mxfp8_e4m3", "MXFP8 E4M3, rceil scales"),
    _mx("mxfp6", "mxfp6_e2m3", "MXFP6 E2M3, rceil scales"),
    _mx("mxfp4", "mxfp4", "MXFP4, rceil scales"),
    _mx("mxint8", "mxint8", "MXINT8, rceil scales"),
    Scheme(
        "mxfp4_weights",
        "MXFP4 weights, float32 activations",
        QuantSpec("mxfp4", scale_rule="rceil"),
        "float32",
    ),
    Scheme(
        "mxfp4_a8",
        "MXFP4 weights, MXFP8 activations",
        QuantSpec("mxfp4", scale_rule="rceil"),
        QuantSpec("mxfp8_e4m3", scale_rule="rceil"),
    ),
    Scheme(
        "mxfp4_a8_rebased",
        "MXFP4 weights, MXFP8 activations that share a scale in 128 x 128: FP8 products on a GPU",
        QuantSpec("mxfp4", scale_rule="rceil"),
        QuantSpec("mxfp8_e4m3", scale_rule="rceil", rebased=True),
    ),
    Scheme(
        "mxfp4_mxint8",
        "MXFP4 weights, MXINT8 activations: integer products on a CPU",
        QuantSpec("mxfp4", scale_rule="rceil"),
        QuantSpec("mxint8"),
    ),
    _weights_and_activations("nvfp4", "NVFP4", _NVFP4),
    _weights_and_activations(
        "nvfp4_4over6",
        "NVFP4 choosing 6 or 4 as each block's top value (arXiv 2512.02010)",
        _NVFP4.replace(scale_rule="four_over_six"),
    ),
    Scheme("nvfp4_weights", "NVFP4 weights, float32 activations", _NVFP4, "float32"),
)  # fmt: skip

SCHEMES: MappingProxyType[str, Scheme] = MappingProxyType(Rows("scheme", _ROWS))
"""Every scheme, by name."""


def get_scheme(name: str) -> Scheme:
    """A scheme by name.

    Args:
        name: in `SCHEMES`.

    Returns:
        The scheme.

    Raises:
        ValueError: for a name that is not in `SCHEMES`; the message lists similar ones.

    >>> from extensor.quant.schemes import get_scheme
    >>> get_scheme("int4_g128").weights.tile
    (1, 128)
    """
    if name not in SCHEMES:
        raise ValueError(unknown_name("scheme", name, SCHEMES))
    return SCHEMES[name]
