"""``extensor formats``: tables of the library's formats, dialects and layouts."""

from __future__ import annotations

import numpy as np

from extensor.cli.printing import show
from extensor.cli.sheet import Sheet, tile_text
from extensor.formats import DIALECTS, ELEMENTS, FORMATS, SCALES, BlockFormat, Dialect
from extensor.io.layouts import LAYOUTS
from extensor.io.stored import TARGETS
from extensor.quant.rounding import decode, encode
from extensor.quant.scale_rules import E8M0_NAN, e8m0_bytes

__all__ = [
    "dialect_sheet", "element_sheet", "format_sheet", "formats", "layout_sheet", "scale_sheet",
]  # fmt: skip


def element_sheet() -> Sheet:
    """The element grids, from their rows."""
    kinds = {"none": "-", "nan": "NaN, no Inf", "ieee": "NaN and Inf"}
    rows = []
    for row in ELEMENTS.values():
        layout = (
            f"1-{row.exponent_bits}-{row.mantissa_bits}" if row.is_float else "two's complement"
        )
        normal = f"{row.min_normal:.7g}" if row.is_float else "-"
        rows.append(
            (
                row.name,
                str(row.bits),
                layout,
                str(row.bias) if row.is_float else "-",
                f"{row.max:.7g}",
                normal,
                f"{row.min_positive:.7g}",
                kinds[row.specials],
            )
        )
    columns = ("element", "bits", "sign-exp-mantissa", "bias", "max", "min normal")
    return Sheet("Element grids", (*columns, "min positive", "specials"), tuple(rows))


def format_sheet() -> Sheet:
    """The blocked formats, from their rows."""
    rows = []
    for row in FORMATS.values():
        scale = row.scale.name + (" + float32 per tensor" if row.tensor_scale else "")
        bits = f"{row.bits_per_element():g}" + ("" if isinstance(row.tile, tuple) else " + scales")
        rules = ", ".join((row.scale_rule, *(r for r in row.scale_rules if r != row.scale_rule)))
        rows.append((row.name, row.element.name, tile_text(row.tile), scale, bits, rules, row.doc))
    columns = ("format", "element", "block", "scale", "bits/element", "scale rules", "")
    return Sheet("Blocked formats (first scale rule: the default)", columns, tuple(rows))


def scale_sheet() -> Sheet:
    """The storage formats of scales, from their rows."""
    rows = tuple((row.name, str(row.bits), row.doc) for row in SCALES.values())
    return Sheet("Scales", ("scale", "bits", ""), rows)


# Magnitudes for which the scale rules differ: the largest of the narrowest grid, one step above it,
# and seven eighths of a power of two.
_ABOVE = float(np.nextafter(np.float32(6), np.float32(7)))
WORKED_AMAX = (("6", 6.0), ("just above 6", _ABOVE), ("3.5", 3.5))
WORKED_TIES = (2.5, 3.5, 5.0)


def _narrowest_mx() -> BlockFormat:
    rows = [row for row in FORMATS.values() if row.scale.name == "e8m0"]
    return min(rows, key=lambda row: row.element.bits)


def _worked(dialect: Dialect) -> tuple[str, str]:
    """Scale bytes of `WORKED_AMAX` and what `WORKED_TIES` round to, computed by the library."""
    row = _narrowest_mx()
    rule = dialect.mx_scale_rule or row.scale_rule
    amax = np.array([value for _, value in WORKED_AMAX], dtype=np.float32)
    scales = e8m0_bytes(amax, row.element, rule)
    codes, _ = encode(
        np.array(WORKED_TIES, np.float32), row.element, ties=dialect.ties_in(row.name)
    )
    values = decode(codes, row.element)
    return " ".join(str(s) for s in scales), " ".join(f"{v:g}" for v in values)


def dialect_sheet() -> Sheet:
    """The dialects side by side, with worked scale bytes."""
    row = _narrowest_mx()
    rows = []
    for dialect in DIALECTS.values():
        scales, ties = _worked(dialect)
        byte = dialect.inf_byte_in(row.element)
        infinite = "NaN" if byte == E8M0_NAN else "saturates"
        rows.append(
            (
                dialect.name,
                dialect.mx_scale_rule or "the format's",
                scales,
                f"{dialect.ties_in(row.name)}: {ties}",
                dialect.zero_sign_in(row.name)
                .replace("_positive", " +")
                .replace("_negative", " -"),
                f"0x{byte:02X}, {infinite}",
                dialect.nvfp4_order.partition("_")[0],
                f"0x{dialect.nvfp4_zero_scale:02X}, 0x{dialect.nvfp4_least_scale:02X}",
                "top code" if dialect.nvfp4_tiny_saturates else "0",
            )
        )
    worked = ", ".join(name for name, _ in WORKED_AMAX)
    ties = ", ".join(f"{value:g}" for value in WORKED_TIES)
    columns = (
        "dialect",
        "MX rule",
        f"byte for {worked}",
        f"ties ({ties})",
        "zeros",
        "Inf",
        "order",
        "zero, least scale",
        "tiny block",
    )
    title = f"Dialects: where libraries differ ({row.name}; then NVFP4: order, scales, tiny blocks)"
    return Sheet(title, columns, tuple(rows))


def layout_sheet() -> Sheet:
    """How other programs lay out four-bit codes and their scales."""
    rows = []
    for layout in LAYOUTS:
        nibbles = " | ".join(f"{low} {high}" for low, high in layout.first_bytes)
        nan = "yes" if layout.nan else "refused"
        row = (layout.name, layout.format, layout.record, nibbles, layout.tensor_scale, nan)
        rows.append(row)
    columns = ("layout", "format", "record", "first bytes: low, high nibble", "tensor scale")
    return Sheet("Storage layouts (extensor.io.layouts)", (*columns, "NaN blocks"), tuple(rows))


def target_sheet() -> Sheet:
    """The layouts of checkpoints that ``extensor convert`` writes."""
    rows = tuple((row.name, row.doc, row.container) for row in TARGETS.values())
    return Sheet("Layouts of checkpoints (extensor convert)", ("layout", "what", "files"), rows)


def formats(dialects: bool = False, layouts: bool = False) -> None:
    """List the element grids, the blocked formats and their scales.

    Args:
        layouts: List the layouts of checkpoints that `extensor convert` writes instead.
        dialects: Also show how other vendors' libraries differ, with worked scale bytes, and how
            other programs lay out the codes.
    """
    if layouts:
        show([target_sheet()])
        return
    sheets = [element_sheet(), format_sheet(), scale_sheet()]
    show(sheets + ([dialect_sheet(), layout_sheet()] if dialects else []))
