"""Writes rows.hpp: the element grids of extensor/formats as constexpr rows, for the C++ core.

Run by CMake as `python rows.py PACKAGE_DIR OUTPUT`. Only the standard library is needed: the
package's own __init__ (which wants numpy) is stepped around by a stand-in package module.
"""

import sys
import types
from pathlib import Path

LINE = "    {{{index}, {bits}, {mantissa_bits}, {min_exponent}, {emax}, {top}, {nan}, {is_float}}},"


def main(package: str, output: str) -> None:
    """Write the header, only where it changed, so that nothing is compiled in vain."""
    stand_in = types.ModuleType("extensor")
    stand_in.__path__ = [package]
    sys.modules["extensor"] = stand_in
    from extensor.formats import ELEMENTS

    lines = [
        "// Written by rows.py from extensor/formats: do not edit.",
        "#pragma once",
        "struct Element {",
        "    int index, bits, mantissa_bits, min_exponent, emax, max_code, nan_code;",
        "    bool is_float;",
        "};",
        "inline constexpr Element kElements[] = {",
    ]
    rows = sorted(ELEMENTS.values(), key=lambda row: not row.has_kernels)
    for index, row in enumerate(rows):
        lines.append(
            LINE.format(
                index=index,
                bits=row.bits,
                mantissa_bits=row.mantissa_bits,
                min_exponent=row.min_exponent,
                emax=row.emax,
                top=row.max_magnitude_code,
                nan=-1 if row.nan_code is None else row.nan_code,
                is_float="true" if row.is_float else "false",
            )
            + f"  // {row.name}"
        )
    scale = [row.name for row in rows].index("e4m3")  # the grid of ue4m3 scales
    names = ", ".join(f'"{row.name}"' for row in rows)
    lines += ["};", f"inline constexpr const char* kElementNames[] = {{{names}}};"]
    lines += [f"inline constexpr int kScaleElement = {scale};"]
    lines += ["// The first ones have kernels of all kinds; products read the others as well."]
    lines += [f"inline constexpr int kQuantized = {sum(row.has_kernels for row in rows)};", ""]
    path, text = Path(output), "\n".join(lines)
    if not path.exists() or path.read_text() != text:
        path.write_text(text)


if __name__ == "__main__":
    main(*sys.argv[1:])
