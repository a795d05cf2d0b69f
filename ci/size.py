"""How large the code is: lines of code per room, and files that outgrow the head.

    python ci/size.py [--limit 400]

Counts lines that are neither blank nor comment nor docstring (for C++, neither
blank nor comment). Exits 1 if a file is over the limit, so it can guard a merge.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("extensor", "extensor_cuda", "models", "training", "ci", "docs", "tests")
COMMENTS_CPP = re.compile(r"/\*.*?\*/|//[^\n]*", re.DOTALL)
SUFFIXES = {".py", ".cpp", ".h", ".hpp", ".cu", ".cuh"}


def docstring_lines(tree: ast.AST) -> set[int]:
    """Line numbers taken by docstrings and by bare strings that document a name."""
    lines: set[int] = set()
    for node in ast.walk(tree):
        match node:
            case ast.Expr(value=ast.Constant(value=str())):
                lines.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return lines


def code_lines(path: Path) -> int:
    """Lines of code in one file."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".py":
        return sum(1 for line in COMMENTS_CPP.sub("", text).splitlines() if line.strip())
    documented = docstring_lines(ast.parse(text))
    return sum(
        1
        for number, line in enumerate(text.splitlines(), start=1)
        if line.strip() and not line.lstrip().startswith("#") and number not in documented
    )


def room_of(path: Path) -> str:
    """The room a file belongs to: two levels inside the library, one elsewhere."""
    parts = path.relative_to(ROOT).parts
    depth = 2 if parts[0] == "extensor" and len(parts) > 2 else 1
    return "/".join(parts[:depth])


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table; 1 if a file is over the limit."""
    parser = argparse.ArgumentParser(description="lines of code per room")
    parser.add_argument("--limit", type=int, default=400, help="lines of code a file may have")
    limit = parser.parse_args(argv).limit
    files = {
        path: code_lines(path)
        for room in ROOMS
        for path in sorted((ROOT / room).rglob("*"))
        if path.suffix in SUFFIXES
    }
    lines: Counter[str] = Counter()
    count: Counter[str] = Counter()
    for path, size in files.items():
        lines[room_of(path)] += size
        count[room_of(path)] += 1
    table = Table("room", "files", "lines of code", title="extensor, lines of code")
    for room in sorted(lines):
        table.add_row(room, str(count[room]), str(lines[room]))
    table.add_row("all", str(len(files)), str(sum(lines.values())))
    console = Console()
    console.print(table)
    large = sorted((size, path) for path, size in files.items() if size > limit)
    for size, path in reversed(large):
        console.print(f"over {limit} lines: {path.relative_to(ROOT)} has {size}")
    return 1 if large else 0


if __name__ == "__main__":
    sys.exit(main())
