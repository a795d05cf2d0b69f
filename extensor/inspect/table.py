"""A table of text."""

from __future__ import annotations

from dataclasses import dataclass

from extensor.notebook import table

__all__ = ["Table"]


@dataclass(frozen=True)
class Table:
    """Titles and rows of text; ``str()`` aligns them, the first column left, the others right.

    Attributes:
        columns: the titles.
        rows: as many cells in each as there are columns.

    Raises:
        ValueError: for a row of another length.

    >>> print(et.inspect.Table(("layer", "bits"), (("fc1", "4.25"), ("head", "16"))))
    layer  bits
    fc1    4.25
    head     16
    """

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(f"row: expected {len(self.columns)} cells, got {row}")

    def _repr_html_(self) -> str:
        return table(self.columns, self.rows)

    def __str__(self) -> str:
        lines = (self.columns, *self.rows)
        widths = [max(len(line[i]) for line in lines) for i in range(len(self.columns))]

        def aligned(line: tuple[str, ...]) -> str:
            rest = [cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True)]
            return "  ".join([line[0].ljust(widths[0]), *rest]).rstrip()

        return "\n".join(aligned(line) for line in lines)
