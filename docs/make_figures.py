"""Draws the number formats from their rows, a measured timeline, and the tables made for the docs.

    python docs/make_figures.py            write
    python docs/make_figures.py --check    exit 1 if anything would change

Nothing here states a fact about a format: a new row appears in every figure and table.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from extensor.cli.formats import (
    dialect_sheet,
    element_sheet,
    format_sheet,
    layout_sheet,
    scale_sheet,
)
from extensor.cli.sheet import Sheet
from extensor.formats import ELEMENTS, FORMATS, BlockFormat, ElementFormat
from extensor.quant.recipe import SLOTS, LayerRecipe, operand_text
from extensor.quant.recipes import ALIASES, RECIPES

DOCS = Path(__file__).resolve().parent
BENCHMARKS = DOCS.parent / "ci" / "bench" / "results"
OVERLAP = "2026-11-27-distributed-4-gpus-scaling-h100"
BATCHES = "2026-11-27-cuda-memory-batch-h200"

INK, FAINT, PAPER = "#24292f", "#8c959f", "#ffffff"
SIGN, EXPONENT, MANTISSA, SCALE = "#d4574e", "#e0a32e", "#3f7fbf", "#5a9e6f"
NAME_WIDTH = 78


def text(x: float, y: float, words: str, anchor: str = "start", colour: str = INK) -> str:
    """One line of text."""
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" fill="{colour}">{words}</text>'


def line(x1: float, y1: float, x2: float, y2: float, colour: str = INK, width: float = 1) -> str:
    """A straight line."""
    place = f'x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}"'
    return f'<line {place} stroke="{colour}" stroke-width="{width:g}"/>'


def ticks(places: Sequence[float], y: float, colour: str) -> str:
    """Short vertical strokes, as one path."""
    path = "".join(f"M{x:.1f} {y - 8:g}v16" for x in places)
    return f'<path d="{path}" stroke="{colour}"/>'


def box(x: float, y: float, width: float, height: float, colour: str) -> str:
    """A filled rectangle with a thin white edge."""
    place = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"'
    return f'<rect {place} fill="{colour}" stroke="{PAPER}"/>'


def drawing(width: float, height: float, parts: Iterable[str], title: str) -> str:
    """A whole SVG file on white paper, so that it reads on a dark page too."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" '
        f'width="{width:g}" height="{height:g}" font-family="monospace" font-size="12" role="img">'
    )
    paper = f'<rect width="{width:g}" height="{height:g}" fill="{PAPER}"/>'
    return "\n".join([head, f"<title>{title}</title>", paper, *parts, "</svg>"]) + "\n"


def bit_layouts() -> str:
    """Each element's bits, high to low: sign, exponent, mantissa."""
    cell, row_height = 26, 30
    parts = []
    for number, row in enumerate(ELEMENTS.values()):
        y = 12 + number * row_height
        parts.append(text(8, y + 15, row.name))
        exponents = range(1, 1 + row.exponent_bits)
        for bit in range(row.bits):
            kind = SIGN if bit == 0 else EXPONENT if bit in exponents else MANTISSA
            parts.append(box(NAME_WIDTH + bit * cell, y, cell, 20, kind))
        note = f"max {row.max:g}, smallest {row.min_positive:g}"
        parts.append(text(NAME_WIDTH + 8 * cell + 14, y + 15, note, colour=FAINT))
    y = 18 + len(ELEMENTS) * row_height
    legend = (("sign", SIGN), ("exponent", EXPONENT), ("mantissa or integer", MANTISSA))
    for number, (name, colour) in enumerate(legend):
        x = NAME_WIDTH + number * 110
        parts += [box(x, y, 14, 14, colour), text(x + 20, y + 12, name)]
    return drawing(NAME_WIDTH + 8 * cell + 250, y + 26, parts, "Bits of the element grids")


def positive_values(row: ElementFormat) -> list[float]:
    """The finite positive values of a grid, ascending."""
    return sorted({v for v in row.values if math.isfinite(v) and v > 0})


def grid_lines() -> str:
    """Positive grid values on one logarithmic axis: range is width, precision is density."""
    rows = list(ELEMENTS.values())
    low = min(math.log2(positive_values(row)[0]) for row in rows)
    high = max(math.log2(row.max) for row in rows)
    width, row_height = 640, 30

    def place(value: float) -> float:
        return NAME_WIDTH + (math.log2(value) - low) / (high - low) * width

    parts = []
    bottom = 14 + len(rows) * row_height
    for exponent in range(math.ceil(low / 4) * 4, math.floor(high) + 1, 4):
        x = place(2.0**exponent)
        parts += [line(x, 8, x, bottom, "#e4e7eb"), text(x, bottom + 14, f"2^{exponent}", "middle")]
    for number, row in enumerate(rows):
        y = 24 + number * row_height
        values = positive_values(row)
        parts.append(text(8, y + 4, row.name))
        parts.append(line(place(values[0]), y, place(values[-1]), y, FAINT, 0.6))
        normal = [v for v in values if not row.is_float or v >= row.min_normal]
        parts.append(ticks([place(v) for v in normal], y, MANTISSA))
        parts.append(ticks([place(v) for v in values[: len(values) - len(normal)]], y, EXPONENT))
    parts.append(text(NAME_WIDTH, bottom + 32, "orange: subnormal", colour=EXPONENT))
    return drawing(NAME_WIDTH + width + 24, bottom + 44, parts, "Element grids, logarithmic axis")


def small_grids() -> str:
    """Grids of 6 bits and fewer on a linear axis, zero to the largest value: where the gaps are."""
    rows = [row for row in ELEMENTS.values() if row.bits <= 6]
    width, row_height = 640, 44
    parts = []
    for number, row in enumerate(rows):
        y = 20 + number * row_height
        parts += [text(8, y + 4, row.name), line(NAME_WIDTH, y, NAME_WIDTH + width, y, FAINT, 0.6)]
        values = [0.0, *positive_values(row)]
        places = [NAME_WIDTH + value / row.max * width for value in values]
        parts.append(ticks(places, y, MANTISSA))
        for value, x in zip(values, places, strict=True):
            if len(values) <= 8 or value == row.max:
                parts.append(text(x, y + 21, f"{value:g}", "middle"))
    return drawing(NAME_WIDTH + width + 24, 16 + len(rows) * row_height, parts, "Small grids")


def block_layouts() -> str:
    """Bytes of 32 values along the axis in each format with a fixed tile: codes, then scales."""
    rows = [row for row in FORMATS.values() if isinstance(row.tile, tuple)]
    unit, row_height = 14, 30
    parts = []
    for number, row in enumerate(rows):
        y = 12 + number * row_height
        parts.append(text(8, y + 13, row.name))
        codes, scales = block_bytes(row)
        x0 = NAME_WIDTH + 34
        parts += [box(x0 + i * unit, y, unit, 18, MANTISSA) for i in range(codes)]
        parts += [box(x0 + (codes + i) * unit, y, unit, 18, SCALE) for i in range(scales)]
        label = f"{row.bits_per_element():g} bits"
        parts.append(text(x0 + (codes + scales) * unit + 8, y + 13, label, colour=FAINT))
    y = 16 + len(rows) * row_height
    x = NAME_WIDTH + 34
    parts += [box(x, y, 14, 14, MANTISSA), text(x + 20, y + 12, "a byte of codes")]
    parts += [box(x + 160, y, 14, 14, SCALE), text(x + 180, y + 12, "a byte of scales")]
    return drawing(NAME_WIDTH + 34 + 38 * unit + 60, y + 26, parts, "Storage of 32 values")


def block_bytes(row: BlockFormat, values: int = 32) -> tuple[int, int]:
    """Bytes of codes and of scales that ``values`` elements take."""
    assert isinstance(row.tile, tuple)
    codes = values * row.element.bits // 8
    return codes, values // (row.tile[0] * row.tile[1]) * row.scale.bits // 8


def overlap() -> str:
    """Steps of four GPUs on the GPU's clock: computing above, each bucket's reduction below."""
    rows = json.loads((BENCHMARKS / f"{OVERLAP}.json").read_text("utf-8"))["rows"]
    rows = [row for row in rows if "block" in row["model"] and "timeline_ms" in row]
    scale, parts = 620 / max(row["step_ends_ms"] for row in rows), []
    for number, row in enumerate(rows):
        y, (backward, end) = 24 + 88 * number, (row["backward_ends_ms"], row["step_ends_ms"])
        title = f"{row['model']}, {row['recipe']}: {row['hidden']:.0%} of the sums' time hidden"
        parts += [
            text(NAME_WIDTH, y - 6, title),
            text(8, y + 15, "computing"),
            box(NAME_WIDTH, y, backward * scale, 20, MANTISSA),
            box(NAME_WIDTH + backward * scale, y, (end - backward) * scale, 20, SCALE),
        ]
        for lane in range(2):
            parts.append(text(8, y + 34 + 16 * lane, f"sums {lane + 1}"))
            for begin, done in row["timeline_ms"][lane::2]:
                x, width = NAME_WIDTH + begin * scale, (done - begin) * scale
                parts.append(box(x, y + 24 + 16 * lane, width, 14, EXPONENT))
        parts.append(text(NAME_WIDTH + end * scale + 6, y + 15, f"{end:.1f} ms", colour=FAINT))
    y = 24 + 88 * len(rows)
    legend = (("forward and backward", MANTISSA), ("waiting, update", SCALE), ("sum", EXPONENT))
    for number, (name, colour) in enumerate(legend):
        x = NAME_WIDTH + number * 190
        parts += [box(x, y, 14, 14, colour), text(x + 20, y + 12, name)]
    return drawing(NAME_WIDTH + 620 + 80, y + 26, parts, "A step of one of four GPUs")


def batch_memory() -> str:
    """A GPT's training step by batch: memory of each contestant, up to the largest that ran."""
    rows = json.loads((BENCHMARKS / f"{BATCHES}.json").read_text("utf-8"))["rows"]
    curves: dict[str, list[tuple[float, float]]] = {}
    for row in sorted(rows, key=lambda row: row["windows"]):
        curves.setdefault(row["step"], []).append((row["windows"], row["device_gb"]))
    left, top, width, height = 48, 16, 600, 300
    first, most, full = 4, max(row["windows"] for row in rows), 150

    def place(windows: float, gb: float) -> tuple[float, float]:
        x = math.log(windows / first) / math.log(most / first)
        return left + x * width, top + (1 - gb / full) * height

    parts = []
    for gb in range(0, full + 1, 50):
        x, y = place(first, gb)
        parts += [line(x, y, x + width, y, "#e4e7eb"), text(x - 6, y + 4, f"{gb}", "end")]
    x, y = place(first, 80)
    parts += [line(x, y, x + width, y, FAINT), text(x - 6, y + 4, "80", "end")]
    windows = first
    while windows <= most:
        parts.append(text(place(windows, 0)[0], top + height + 18, f"{windows}", "middle"))
        windows *= 2
    colours = (SIGN, MANTISSA, SCALE, EXPONENT, FAINT, INK)
    for number, (name, points) in enumerate(curves.items()):
        colour = colours[number]
        places = [place(*point) for point in points]
        path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
        parts.append(f'<path d="{path}" stroke="{colour}" stroke-width="2" fill="none"/>')
        x, y = places[-1]
        parts.append(text(x, y - 8, f"{points[-1][0]}", "middle", colour))
        x, y = left + number % 3 * 215, top + height + 34 + number // 3 * 22
        parts += [box(x, y, 14, 14, colour), text(x + 20, y + 12, BATCH_NAMES.get(name, name))]
    end = top + height + 34 + 22 * -(-len(curves) // 3)
    return drawing(left + width + 24, end, parts, "GB of a step by windows in a batch")


BATCH_NAMES = {
    "ours, captured": "ours",
    "ours, captured, run again": "ours, blocks run again",
    "ours, float32": "float32 weights, inputs kept",
    "torch": "torch AMP",
    "torch, compiled": "torch AMP, compiled",
    "torch float8, compiled": "torchao float8, compiled",
}
"""What the figure calls a contestant of the benchmark."""

FIGURES = {
    "overlap.svg": overlap,
    "memory_batch.svg": batch_memory,
    "bits.svg": bit_layouts,
    "grids.svg": grid_lines,
    "small_grids.svg": small_grids,
    "blocks.svg": block_layouts,
}


def layer_text(layer: LayerRecipe) -> str:
    """The one operand that fills all six slots, or a count of different ones."""
    different = {operand_text(layer.slot(slot)) for slot in SLOTS}
    return different.pop() if len(different) == 1 else f"{len(different)} kinds of operand"


def gemm_text(layer: LayerRecipe, gemm: str) -> str:
    """The two operands of a GEMM; one text where they are alike."""
    slots = [slot for slot in SLOTS if slot.startswith(f"{gemm}.")]
    texts = [operand_text(layer.slot(slot)) for slot in slots]
    if texts[0] == texts[1]:
        return texts[0]
    return "; ".join(f"{slot[-1]}: {text}" for slot, text in zip(slots, texts, strict=True))


def recipe_sheet() -> Sheet:
    """The recipes, GEMM by GEMM."""
    rows = []
    for recipe in RECIPES.values():
        gemms = tuple(gemm_text(recipe.layers, gemm) for gemm in ("fprop", "dgrad", "wgrad"))
        others: dict[str, list[str]] = {}
        for rule in recipe.rules:
            others.setdefault(layer_text(rule.use), []).append(rule.match)
        rules = "; ".join(f"{', '.join(names)}: {text}" for text, names in others.items())
        rows.append((recipe.name, recipe.doc, *gemms, rules or "-"))
    columns = ("recipe", "what it is", "fprop x, w", "dgrad g, w", "wgrad g, x", "other layers")
    return Sheet("Recipes", columns, tuple(rows))


def alias_sheet() -> Sheet:
    """The short names."""
    return Sheet("Aliases", ("short", "recipe"), tuple(ALIASES.items()))


PAGES = {
    "formats.md": {
        "elements": element_sheet,
        "formats": format_sheet,
        "scales": scale_sheet,
        "dialects": dialect_sheet,
        "layouts": layout_sheet,
    },
    "recipes.md": {"recipes": recipe_sheet, "aliases": alias_sheet},
}


def markdown(sheet: Sheet) -> str:
    """A table of the command line as Markdown."""
    rows = [sheet.columns, tuple("---" for _ in sheet.columns), *sheet.rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in r) + " |" for r in rows)


def page(path: Path, sheets: dict[str, Callable[[], Sheet]]) -> str:
    """A page with every generated table brought up to date."""
    result = path.read_text(encoding="utf-8")
    for name, sheet in sheets.items():
        begin, end = f"<!-- generated: {name} -->\n", "<!-- end -->"
        head, found, rest = result.partition(begin)
        _, closed, tail = rest.partition(end)
        if not (found and closed):
            raise SystemExit(f"{path.name}: expected {begin.strip()} ... {end}, found none")
        result = f"{head}{begin}{markdown(sheet())}\n{end}{tail}"
    return result


def outputs() -> dict[Path, str]:
    """Every generated file and what it should hold."""
    made = {DOCS / "figures" / name: draw() for name, draw in FIGURES.items()}
    pages = {DOCS / name: page(DOCS / name, sheets) for name, sheets in PAGES.items()}
    return {**made, **pages}


def main(argv: Sequence[str] | None = None) -> int:
    """Write or check the generated files."""
    parser = argparse.ArgumentParser(description="figures and tables of the docs")
    parser.add_argument("--check", action="store_true", help="change nothing, exit 1 if stale")
    check = parser.parse_args(argv).check
    stale = {
        path: expected
        for path, expected in outputs().items()
        if not path.exists() or path.read_text(encoding="utf-8") != expected
    }
    for path, expected in stale.items():
        print(f"{'stale' if check else 'written'}: {path.relative_to(DOCS.parent)}")
        if not check:
            path.parent.mkdir(exist_ok=True)
            path.write_text(expected, encoding="utf-8")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
