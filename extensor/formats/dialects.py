"""Dialects: how other libraries differ from the published rules, one row each.

A dialect changes defaults, the order of operations and the rules for special blocks. It is always
named in the `QuantSpec`, and an argument that contradicts it is an error.

Sources: each row names the library whose observable behaviour it records. `tests/peers` compares
the bytes with the library itself if it runs on a CPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, TypeVar

from extensor.errors import Rows
from extensor.formats.element import ElementFormat

__all__ = ["DIALECTS", "Dialect"]

Ties = Literal["even", "away", "zero"]
ZeroSign = Literal["kept", "zeros_positive", "zeros_negative", "codes_positive"]
NVFP4Order = Literal["transformer_engine", "torchao", "model_optimizer"]
_Value = TypeVar("_Value")
_PerFormat = tuple[tuple[str, _Value], ...]
"""(format, value) pairs: what differs from the default, for these formats only."""


@dataclass(frozen=True)
class Dialect:
    """How one library differs from the published rules, or fills in what they leave open.

    Attributes:
        name: the dialect's name.
        doc: one line for tables, with the library meant.
        mx_scale_rule: the E8M0 rule that library uses, or None for the format's default.
        ties: how rounding to nearest resolves ties between two grid values.
        ties_of: formats whose ties differ from that.
        zero_sign: the sign bit of a floating-point code that is zero. ``"kept"``: the value's own;
            ``"zeros_positive"`` and ``"zeros_negative"``: values that are exactly zero lose it or
            get it, those that round to zero keep theirs; ``"codes_positive"``: never set.
        zero_sign_of: formats whose zeros differ from that.
        mx_inf_byte: the E8M0 byte of a block that holds an infinity and no NaN. 0xFF makes the
            whole block NaN; any other keeps it, and the infinity saturates; None is the byte that
            the floor rule gives for 2**128 (`inf_byte_in`).
        mx_least_divisor: the smallest exponent that values are divided by, -127 in the published
            rules, whatever smaller scale is stored.
        nvfp4_order: the order of NVFP4's operations; see `extensor.quant.nvfp4`.
        nvfp4_zero_scale: the e4m3 byte of an all-zero NVFP4 block.
        nvfp4_least_scale: the smallest e4m3 byte of any other NVFP4 block.
        nvfp4_tiny_saturates: True if a block so small that its scale rounds to zero gets the
            largest code instead of zeros.

    >>> et.DIALECTS["nvidia"].mx_scale_rule
    'rceil'
    """

    name: str
    doc: str
    mx_scale_rule: str | None = None
    ties: Ties = "even"
    ties_of: _PerFormat[Ties] = ()
    zero_sign: ZeroSign = "kept"
    zero_sign_of: _PerFormat[ZeroSign] = ()
    mx_inf_byte: int | None = 0xFF
    mx_least_divisor: int = -127
    nvfp4_order: NVFP4Order = "transformer_engine"
    nvfp4_zero_scale: int = 0x00
    nvfp4_least_scale: int = 0x00
    nvfp4_tiny_saturates: bool = False

    def ties_in(self, format_name: str) -> Ties:
        """How rounding to nearest resolves ties between two codes of a format.

        Args:
            format_name: a name in `FORMATS`.

        Returns:
            ``"even"``, ``"away"`` or ``"zero"``.

        >>> et.DIALECTS["gguf"].ties_in("mxfp4"), et.DIALECTS["gguf"].ties_in("nvfp4")
        ('zero', 'even')
        """
        return dict(self.ties_of).get(format_name, self.ties)

    def inf_byte_in(self, element: ElementFormat) -> int:
        """The E8M0 byte of a block with an infinity and no NaN, for an element grid.

        Args:
            element: the grid of the codes.

        Returns:
            The byte, 0 to 255.

        >>> et.DIALECTS["ocp"].inf_byte_in(et.ELEMENTS["e2m1"])
        255
        """
        if self.mx_inf_byte is None:
            return 128 - element.emax + 127
        return self.mx_inf_byte

    def zero_sign_in(self, format_name: str) -> ZeroSign:
        """The sign of a format's zeros.

        Args:
            format_name: a name in `FORMATS`.

        Returns:
            What ``zero_sign`` says, or ``zero_sign_of`` for this format.

        >>> et.DIALECTS["gguf"].zero_sign_in("mxfp4")
        'codes_positive'
        """
        return dict(self.zero_sign_of).get(format_name, self.zero_sign)


_ROWS = (
    Dialect("ocp", "the published rules; this project's default"),
    Dialect(
        "nvidia",
        "Transformer Engine: rceil scales, infinities saturate under scale byte 0xFE",
        mx_scale_rule="rceil",
        mx_inf_byte=0xFE,
        nvfp4_tiny_saturates=True,
    ),
    Dialect(
        "torchao",
        "torchao: floor scales also for infinities, NVFP4 scales of 2**-6 and more",
        mx_scale_rule="floor",
        mx_inf_byte=None,
        mx_least_divisor=-126,
        nvfp4_order="torchao",
        nvfp4_zero_scale=0x08,
        nvfp4_least_scale=0x08,
    ),
    Dialect(
        "compressed_tensors",
        "compressed-tensors: even scales, scale byte 0x20 for a zero NVFP4 block",
        mx_scale_rule="even",
        zero_sign="zeros_positive",
        nvfp4_zero_scale=0x20,
    ),
    Dialect(
        "model_optimizer",
        "NVIDIA Model-Optimizer: rceil scales, mxfp4 ties towards zero, NVFP4 by divisions",
        mx_scale_rule="rceil",
        ties_of=(("mxfp4", "zero"),),
        zero_sign_of=(("mxfp4", "zeros_negative"), ("nvfp4", "zeros_positive")),
        nvfp4_order="model_optimizer",
        nvfp4_zero_scale=0x38,
        nvfp4_least_scale=0x01,
    ),
    Dialect(
        "microxcaling",
        "microxcaling: floor scales, ties away from zero",
        mx_scale_rule="floor",
        ties="away",
    ),
    Dialect(
        "gguf",
        "gguf (llama.cpp): floor scales, mxfp4 by the nearest table entry, the first of two",
        mx_scale_rule="floor",
        ties_of=(("mxfp4", "zero"),),
        zero_sign_of=(("mxfp4", "codes_positive"),),
    ),
)

DIALECTS: MappingProxyType[str, Dialect] = MappingProxyType(Rows("dialect", _ROWS))
"""Every dialect, by name."""
