"""HTML that notebooks show: tables and small histograms, without scripts, style sheets or images.

Colours are the page's own and half-transparent ones, so that light and dark themes can be read.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

__all__ = ["Html", "bars", "beside", "card", "table", "text"]

FRAME = "border:1px solid rgba(128,128,128,.4);border-radius:6px;padding:.5em .8em;"
LINE = "border-bottom:1px solid rgba(128,128,128,.25);"
CELL = "padding:.1em .7em;white-space:nowrap;vertical-align:top;background:none;"
FILL = "#4c8fcf"
WIDTH, HEIGHT, EDGE = 420, 74, 14


class Html(str):
    """Markup: every other text is escaped."""

    __slots__ = ()


def text(value: object) -> Html:
    """A value as markup."""
    return value if isinstance(value, Html) else Html(escape(str(value)))


def card(title: str, facts: Iterable[tuple[str, object]], *parts: Html) -> str:
    """What a notebook shows for an object: a title, facts in a line, and larger parts below."""
    line = " &nbsp; ".join(
        f'<span><span style="opacity:.65">{text(name)}</span> {text(value)}</span>'
        for name, value in facts
    )
    inner = "".join(f'<div style="margin-top:.5em;overflow-x:auto">{part}</div>' for part in parts)
    return (
        f'<div class="extensor" style="{FRAME}display:inline-block;max-width:100%;color:inherit">'
        f"<div><b>{text(title)}</b></div><div>{line}</div>{inner}</div>"
    )


def table(columns: Sequence[object], rows: Iterable[Sequence[object]], note: str = "") -> Html:
    """A table, its first column left and the others right; without titles, of numbers alone.

    A note stands below.
    """

    def cells(row: Sequence[object], tag: str) -> str:
        sides = ["left" if columns else "right"] + ["right"] * len(row)
        return "".join(
            f'<{tag} style="{CELL}text-align:{side}">{text(cell)}</{tag}>'
            for cell, side in zip(row, sides, strict=False)
        )

    head = f'<tr style="{LINE}">{cells(columns, "th")}</tr>' if columns else ""
    body = "".join(f'<tr style="background:none">{cells(row, "td")}</tr>' for row in rows)
    below = f'<div style="opacity:.65">{text(note)}</div>' if note else ""
    style = "border-collapse:collapse;font-size:90%;font-variant-numeric:tabular-nums;margin:0"
    return Html(f'<table style="{style}">{head}{body}</table>{below}')


def beside(*parts: Html) -> Html:
    """Parts in a row."""
    style = "display:flex;flex-wrap:wrap;gap:.2em 2em"
    return Html(f'<div style="{style}">{"".join(f"<div>{part}</div>" for part in parts)}</div>')


def bars(title: str, shares: Sequence[tuple[str, float]]) -> Html:
    """A histogram of named shares, such as "1" or "1 to 2"; a bar's tooltip has its share."""
    top = max((share for _, share in shares), default=0.0) or 1.0
    step = WIDTH / max(len(shares), 1)
    parts = []
    for place, (name, share) in enumerate(shares):
        high = (HEIGHT - 16) * share / top
        parts.append(
            f'<rect x="{place * step + 0.1 * step:.2f}" y="{HEIGHT - 14 - high:.2f}" '
            f'width="{0.8 * step:.2f}" height="{high:.2f}" fill="{FILL}">'
            f"<title>{text(name)}: {share:.2%}</title></rect>"
        )
    every = max(1, -(-len(shares) // (16 if len(shares) <= 16 else 8)))
    for place in range(0, len(shares), every):
        name = shares[place][0].partition(" to ")[0]
        parts.append(
            f'<text x="{(place + 0.5) * step:.2f}" y="{HEIGHT - 2}" font-size="9" '
            f'text-anchor="middle" fill="currentColor">{text(name)}</text>'
        )
    base = HEIGHT - 14
    parts.append(
        f'<line x1="0" x2="{WIDTH}" y1="{base}" y2="{base}" stroke="currentColor" opacity=".5"/>'
    )
    return Html(
        f'<div style="opacity:.65">{text(title)}</div><svg width="{WIDTH}" height="{HEIGHT}" '
        f'viewBox="{-EDGE} 0 {WIDTH + 2 * EDGE} {HEIGHT}" role="img" aria-label="{text(title)}">'
        f"{''.join(parts)}</svg>"
    )
