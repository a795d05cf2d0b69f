"""Writes `docs/benchmarks.md`, and the speed table of `README.md`, from `ci/bench/results`.

    python docs/make_benchmarks.py            write
    python docs/make_benchmarks.py --check    exit 1 if anything would change

`docs/benchmarks.toml` says which figures of which result file are shown. A table has one row a
figure: our figure, the peer's figure and the ratio of both. Machine, date and command stand above.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
import textwrap
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "ci" / "bench" / "results"
TABLES = ROOT / "docs" / "benchmarks.toml"
PAGE = ROOT / "docs" / "benchmarks.md"
README = ROOT / "README.md"

RENAMED = {
    "mxfp8_near": "mxfp8_rebased",
    "MXFP8 near-exact": "MXFP8 rebased",
    "--only scaled near ": "--only scaled rebased ",
    " in bfloat16, ": ", ",
    "E4M3, scales of rows": "FP8 E4M3, a scale a row",
    "E4M3, 1x128": "FP8 E4M3, 1x128",
    "INT8, scales of rows": "INT8, a scale a row",
    "layers 2048": "width 2048",
    "layers 4096": "width 4096",
    ", 2000": "",
    "gpt, ": "",
    "wide, ": "",
    "lenet, ": "",
    ", ours": "",
    "E5M2, promoted": "rebased MXFP4, promoted every 512",
    "E5M2, not promoted": "rebased MXFP4, not promoted",
    "mxfp4 storage, promoted": "packed MXFP4, rebased by the call",
    "both mx": "rowwise and columnwise mx",
    "both nv": "rowwise and columnwise nv",
    "rows + columns": "rowwise and columnwise",
    "16x16 tiles": "tiles of 16x16",
    "mxfp4 both": "mxfp4 rowwise and columnwise",
    "mxfp8_e4m3 both": "mxfp8_e4m3 rowwise and columnwise",
    "made at once,": "MXFP4,",
    "expanded,": "NVFP4,",
    "scaled,": "FP8 in blocks of 128,",
    "dense,": "bfloat16,",
    " --force": "",
    ", 1 threads": ", 1 thread",
    ", True": ", captured",
    ", False": ", eager",
    "True, ": "captured, ",
    "False, ": "eager, ",
}
"""Words of the day of a run, and what the page says instead."""

ON_README = {
    ("LeNet-5", "batch 64, mxfp4"): "LeNet-5 in MXFP4, batch 64, two CPU cores; "
    "torch eager in float32",
    ("GPT", "mxfp4"): "a small GPT in MXFP4, two CPU cores; torch eager in float32",
    ("GPT of width 4096", "mxfp4, captured"): "a GPT of width 4096 in MXFP4, inputs "
    "kept, H100; torch.compile in bfloat16",
    (
        "A transformer block on an H100",
        "width 4096, mxfp8_rebased, captured",
    ): "a transformer block of width 4096 in rebased MXFP8, H100; torch.compile in bfloat16",
    (
        "All weights of an 8B Llama on one GPU",
        "Llama of 8B, captured",
    ): "all weights of an 8B Llama in MXFP4, H100, at 0.7 times the memory; torch eager in "
    "bfloat16, activation checkpointing",
}
"""The rows of README's speed table: table and label of the page, words there."""

INTRODUCTION = """<!-- Written by docs/make_benchmarks.py from ci/bench/results; do not edit. -->

# Benchmarks

Each table comes from one file of `ci/bench/results`. Above it stand the machine, the day of the run
and the command that repeats it today.
The last column says how many times as fast as the peer extensor is: above 1 extensor is faster.
Both were measured in the same run, in turns, as medians.
"[Captured](glossary.md#capture-replay)" means replayed from a CUDA graph.

Accuracy is measured apart: see [results](results/README.md).
"""

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Table:
    """Figures of one result file; `docs/benchmarks.toml` explains the fields."""

    file: str
    title: str
    text: str
    label: list[str]
    ours: str
    unit: str
    peer: str = ""
    peer_row: str = ""
    peers: Sequence[tuple[str, str]] = ()
    keep: str = ""
    higher: bool = False
    scale: float = 1.0
    command: str = ""
    ratio: str = "times as fast"

    def read(self) -> dict[str, Any]:
        """The result file."""
        data: dict[str, Any] = json.loads((RESULTS / f"{self.file}.json").read_text("utf-8"))
        return data


@dataclass(frozen=True)
class Figure:
    """One row: what was measured, both figures, and how many times as fast ours is."""

    what: str
    ours: float
    peer: float
    ratio: float


def renamed(text: str) -> str:
    """The text in today's names."""
    for old, new in RENAMED.items():
        text = text.replace(old, new)
    return text


def column(row: Row, name: str) -> Any:
    """A figure of a row; a dot leads into a nested record."""
    value: Any = row
    for part in name.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def label_of(table: Table, row: Row) -> tuple[str, ...]:
    """What the label's columns hold, as text."""
    parts = []
    for name in table.label:
        value = row[name]
        text = " x ".join(map(str, value)) if isinstance(value, list) else str(value)
        parts.append(f"{name} {text}" if name in ("batch", "seed") else text)
    return tuple(parts)


def figures(table: Table) -> Iterator[Figure]:
    """The rows of a table, in the file's order."""
    data = table.read()
    # A file may hold several parts; "what" says which one a row belongs to.
    rows = {
        (str(row.get("what", "")), *label_of(table, row)): row
        for row in data.get("rows") or data["timings"]
    }
    peers = dict(table.peers)
    for (part, *group, last), row in rows.items():
        label = ", ".join((*group, last))
        if not re.search(table.keep, f"{part}: {label}" if part else label):
            continue
        if (peers and last not in peers) or last == table.peer_row:
            continue
        peer_row = peers.get(last, table.peer_row)
        peer_key = (part, *group, peer_row)
        if peer_row and peer_key not in rows:
            raise ValueError(f"{table.file}: expected a row {peer_key!r}, got none")
        ours = column(row, table.ours)
        peer = column(rows[peer_key], table.ours) if peer_row else column(row, table.peer)
        if ours is None or peer is None:
            raise ValueError(f"{table.file}: expected figures in the row {label!r}, got {row}")
        ratio = ours / peer if table.higher else peer / ours
        yield Figure(renamed(label), ours * table.scale, peer * table.scale, ratio)


def filled(text: str) -> str:
    """The text in lines of at most 100 columns."""
    return textwrap.fill(text, 100, break_on_hyphens=False, break_long_words=False)


def number(value: float) -> str:
    """Three significant digits, without an exponent."""
    return f"{value:.{max(0, 2 - math.floor(math.log10(value)))}f}"


def lines_of(table: Table) -> list[str]:
    """A table's heading, what stands above it, and its rows."""
    data = table.read()
    about = data.get("about", data)
    machine = renamed(about.get("gpu") or about["machine"])
    command = " ".join((table.command or renamed(about["command"])).split())
    rows = [
        f"| {f.what} | {number(f.ours)} | {number(f.peer)} | {f.ratio:.2f} |"
        for f in figures(table)
    ]
    if not rows:
        raise ValueError(f"{table.file}: expected rows that match {table.keep!r}, got none")
    return [
        f"### {table.title}",
        "",
        filled(table.text),
        "",
        filled(f"{machine}, {about['date']}, `{command}`:"),
        "",
        f"| what | extensor, {table.unit} | peer, {table.unit} | {table.ratio} |",
        "| --- | --: | --: | --: |",
        *rows,
        "",
    ]


def sections() -> dict[str, list[Table]]:
    """The tables of the page by section."""
    found = tomllib.loads(TABLES.read_text(encoding="utf-8"))["section"]
    return {part["title"]: [Table(**table) for table in part["table"]] for part in found}


def page() -> str:
    """The whole page."""
    lines = [INTRODUCTION]
    for section, tables in sections().items():
        lines += [f"## {section}", ""]
        for table in tables:
            lines += lines_of(table)
    return "\n".join(lines).rstrip() + "\n"


def readme() -> str:
    """README with its speed table written anew, between its two marks."""
    tables = {table.title: table for part in sections().values() for table in part}
    rows = ["| what, and its peer | times as fast |", "| --- | --: |"]
    for (title, label), text in ON_README.items():
        ratio = next(f.ratio for f in figures(tables[title]) if f.what == label)
        rows.append(f"| {text} | {ratio:.2f} |")
    text = README.read_text(encoding="utf-8")
    before, found, rest = text.partition("<!-- speed -->\n")
    _, end, after = rest.partition("<!-- /speed -->")
    if not found or not end:
        raise ValueError("README.md: expected the marks <!-- speed --> and <!-- /speed -->")
    return before + found + "\n".join(rows) + "\n" + end + after


def main(argv: Sequence[str] | None = None) -> int:
    """Write, or check; 1 if a check finds a difference."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit 1 on a difference"
    )
    check = parser.parse_args(argv).check
    stale = 0
    for path, text in ((PAGE, page()), (README, readme())):
        if path.exists() and path.read_text(encoding="utf-8") == text:
            continue
        stale += 1
        print(f"{'stale' if check else 'wrote'} {path.relative_to(ROOT)}")
        if not check:
            path.write_text(text, encoding="utf-8")
    return int(check and stale > 0)


if __name__ == "__main__":
    sys.exit(main())
