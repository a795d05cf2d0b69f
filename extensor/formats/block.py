"""Blocked formats: an element grid, a scale, and the block of values that share the scale.

Each format is one frozen row, which says what is stored. How the scale is chosen and how values are
rounded is in a `QuantSpec` (extensor.quant.spec); its defaults are in the row, since they belong to
the published format.

Source: OCP MX v1.0, table 1 (mx*); NVIDIA NVFP4, arXiv 2509.25149, section 2
(nvfp4); DeepSeek-V3, arXiv 2412.19437, section 3.3 (fp8 in 1x128 and 128x128).
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from extensor.errors import Rows
from extensor.formats.element import ELEMENTS, ElementFormat

__all__ = ["FORMATS", "SCALES", "BlockFormat", "ScaleFormat", "Tile"]

Tile = tuple[int, int] | Literal["tensor", "channel"]
"""Values that share a scale: (rows, columns along the axis), a channel or the whole tensor."""


@dataclass(frozen=True)
class ScaleFormat:
    """How the scale of one block is stored.

    Attributes:
        name: the scale format's name, in `SCALES`.
        bits: stored for each block.
        doc: one line for tables.

    >>> from extensor.formats import SCALES
    >>> SCALES["e8m0"].bits
    8
    """

    name: str
    bits: int
    doc: str


@dataclass(frozen=True)
class BlockFormat:
    """One blocked storage format.

    Attributes:
        name: the format's name, also the name of the ExTensor dtype.
        element: the grid of the codes.
        scale: how a block's scale is stored.
        tile: the block shape used when none is given.
        scale_rule: the scale rule used when none is given.
        scale_rules: the rules that the format allows.
        tensor_scale: True if a float32 scale for the whole tensor is stored too.
        zero_point: True if an asymmetric variant with a zero point exists.
        outliers: how many of a row's largest values may be stored exactly.
        doc: one line for tables.

    >>> row = et.FORMATS["nvfp4"]
    >>> row.element.name, row.scale.name, row.tile, row.tensor_scale
    ('e2m1', 'ue4m3', (1, 16), True)
    """

    name: str
    element: ElementFormat
    scale: ScaleFormat
    tile: Tile
    scale_rule: str
    scale_rules: tuple[str, ...]
    doc: str
    tensor_scale: bool = False
    zero_point: bool = False
    outliers: int = 0

    @property
    def has_float_scales(self) -> bool:
        """True if blocks carry a float32 or float16 scale and the tensor carries none."""
        return self.scale.name == "float32"

    def bits_per_element(self, tile: tuple[int, int] | None = None) -> float:
        """Bits stored per element, block scales included; scales of channels or tensors as 0.

        Args:
            tile: (rows, columns) of a block; None, the format's own.

        Returns:
            Element bits plus the block's share of its scale.

        >>> et.FORMATS["mxfp4"].bits_per_element(), et.FORMATS["mxfp4"].bits_per_element((1, 16))
        (4.25, 4.5)
        """
        shape = tile or self.tile
        scale_bits = self.scale.bits / (shape[0] * shape[1]) if isinstance(shape, tuple) else 0.0
        return self.element.bits + scale_bits


SCALES: MappingProxyType[str, ScaleFormat] = MappingProxyType(
    {
        row.name: row
        for row in (
            ScaleFormat("e8m0", 8, "a power of two, 2**(byte - 127); byte 255 is NaN"),
            ScaleFormat("ue4m3", 8, "an e4m3 number used without its sign; 0x7F is NaN"),
            ScaleFormat("float32", 32, "a float32 multiplier"),
            ScaleFormat("float16", 16, "a float16 multiplier"),
        )
    }
)
"""Every scale format, by name."""

_E8M0_RULES = ("floor", "rceil", "ceil", "even", "one", "mse")
_NV_RULES = ("amax", "four_over_six")
_FLOAT_RULES = ("amax", "one")


def _mx(name: str, element: str, doc: str, rules: tuple[str, ...] = ()) -> BlockFormat:
    row = (ELEMENTS[element], SCALES["e8m0"], (1, 32))
    return BlockFormat(name, *row, "floor", (*_E8M0_RULES, *rules), doc)


def _nv(name: str, rules: tuple[str, ...], doc: str) -> BlockFormat:
    row = (ELEMENTS["e2m1"], SCALES["ue4m3"], (1, 16))
    return BlockFormat(name, *row, rules[0], rules, doc, tensor_scale=True)


def _scaled(name: str, element: str, tile: Tile, doc: str, zero_point: bool = False) -> BlockFormat:
    row = (ELEMENTS[element], SCALES["float32"], tile)
    return BlockFormat(name, *row, "amax", _FLOAT_RULES, doc, zero_point=zero_point)


_ROWS = (
    _mx("mxfp8_e4m3", "e4m3", "OCP MXFP8, more precision"),
    _mx("mxfp8_e5m2", "e5m2", "OCP MXFP8, more range"),
    _mx("mxfp6_e2m3", "e2m3", "OCP MXFP6, more precision"),
    _mx("mxfp6_e3m2", "e3m2", "OCP MXFP6, more range"),
    _mx("mxfp4", "e2m1", "OCP MXFP4", ("quest",)),
    _mx("mxint8", "int8_mx", "OCP MXINT8"),
    _nv("nvfp4", _NV_RULES, "NVIDIA NVFP4: 16 values share an e4m3 scale, a tensor a float32 one"),
    _nv("nvfp4_fp8exact", ("least_error",), "NVFP4 whose scales are 1, 1.25 or 1.5 times 2**e"),
    _scaled("fp8_e4m3", "e4m3", "tensor", "FP8 E4M3 with float32 scales"),
    _scaled("fp8_e5m2", "e5m2", "tensor", "FP8 E5M2 with float32 scales"),
    _scaled("int8", "int8", "channel", "INT8 with float scales, symmetric or not", zero_point=True),
    _scaled("int4", "int4", (1, 32), "INT4 in groups with float scales", zero_point=True),
    _scaled("int5", "int5", (1, 32), "INT5 in groups with float scales, as in GGUF's Q5_K"),
    _scaled("int6", "int6", (1, 32), "INT6 in groups with float scales, as in GGUF's Q6_K"),
    BlockFormat(
        "outlier",
        ELEMENTS["e4m3"],
        SCALES["float32"],
        "channel",
        "amax",
        _FLOAT_RULES,
        "rows without their mean, the largest values kept exactly beside FP8 codes",
        outliers=32,
    ),
)

FORMATS: MappingProxyType[str, BlockFormat] = MappingProxyType(Rows("format", _ROWS))
"""Every blocked format, by name."""
