"""Dialects: where other vendors' libraries differ from the published rules, as rows.

A dialect changes defaults and the rules for special blocks, never silently: it is
named in the `QuantSpec`, and an explicit argument that contradicts it is an error.

Sources: each row names the library whose observable behaviour it records.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

__all__ = ["DIALECTS", "Dialect"]

Ties = Literal["even", "away", "zero"]


@dataclass(frozen=True)
class Dialect:
    """How one library fills in what the published rules leave open.

    Attributes:
        name: the dialect's name.
        mx_scale_rule: the E8M0 rule that library uses, or None for the format's default.
        ties: what rounding to nearest does halfway between two grid values.
        mx_inf_byte: the E8M0 byte of a block that holds an infinity and no NaN; 0xFF makes the
            whole block NaN, 0xFE keeps it and saturates.
        nvfp4_zero_scale: the e4m3 byte of an all-zero NVFP4 block.
        nvfp4_tiny_saturates: True if a block so small that its scale rounds to zero gets the
            largest code instead of zeros.
        doc: one line for tables, with the library meant.
    """

    name: str
    doc: str
    mx_scale_rule: str | None = None
    ties: Ties = "even"
    mx_inf_byte: int = 0xFF
    nvfp4_zero_scale: int = 0x00
    nvfp4_tiny_saturates: bool = False


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
        "torchao: floor scales, scale byte 0x08 for a zero NVFP4 block",
        mx_scale_rule="floor",
        nvfp4_zero_scale=0x08,
    ),
    Dialect(
        "compressed_tensors",
        "compressed-tensors: even scales, scale byte 0x20 for a zero NVFP4 block",
        mx_scale_rule="even",
        nvfp4_zero_scale=0x20,
    ),
    Dialect(
        "model_optimizer",
        "NVIDIA Model-Optimizer: rceil scales, ties towards zero, scale byte 0x38 for a zero block",
        mx_scale_rule="rceil",
        ties="zero",
        nvfp4_zero_scale=0x38,
    ),
    Dialect(
        "microxcaling",
        "microxcaling: floor scales, ties away from zero",
        mx_scale_rule="floor",
        ties="away",
    ),
)

DIALECTS: MappingProxyType[str, Dialect] = MappingProxyType({row.name: row for row in _ROWS})
"""Every dialect, by name."""
