"""A table of the page."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

__all__ = ["table"]


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A table of HTML cells."""
    top = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    filled = f"<table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>"
    return f'<div class="scroll">{filled}</div>'
