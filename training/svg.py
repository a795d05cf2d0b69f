"""Small charts as inline SVG: nothing to load, sharp at every size, colours from the page's CSS.

Text is escaped; numbers that are not finite leave a gap in a line.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

__all__ = ["Line", "bars", "lines"]

COLORS = 8
"""How many lines have a colour of their own: the classes c0 to c7 of the page's CSS."""

WIDTH, HEIGHT = 440, 230
LEFT, RIGHT, TOP, BOTTOM = 52, 12, 10, 34
DOTS = 40
"""Lines of up to so many points show each of them."""


@dataclass(frozen=True)
class Line:
    """One line of a chart: its name, and y over x (None: a gap)."""

    name: str
    x: Sequence[float]
    y: Sequence[float | None]


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round numbers in [low, high], about so many."""
    if not high > low:
        return [low]
    rough = (high - low) / max(count - 1, 1)
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(unit * m for m in (1, 2, 2.5, 5, 10) if unit * m >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [step * i for i in range(first, math.floor(high / step + 1e-9) + 1)]


def number(value: float) -> str:
    """A number for an axis: few digits, no more than it needs."""
    if value == 0:
        return "0"
    if abs(value) >= 1e5 or abs(value) < 1e-3:
        mantissa, _, exponent = f"{value:.1e}".partition("e")
        return f"{mantissa.removesuffix('.0')}e{int(exponent)}"
    return f"{value:.4g}"


class _Axes:
    """Maps data to pixels, and draws the frame with its ticks."""

    def __init__(
        self, x: tuple[float, float], y: tuple[float, float], log: bool, height: int = HEIGHT
    ) -> None:
        self.x, self.log, self.height, self.base = _wide(x), log, height, height - BOTTOM
        self.y = _wide((math.log10(y[0]), math.log10(y[1])) if log else y)

    def across(self, value: float) -> float:
        low, high = self.x
        return LEFT + (value - low) / (high - low) * (WIDTH - LEFT - RIGHT)

    def up(self, value: float) -> float:
        low, high = self.y
        share = ((math.log10(value) if self.log else value) - low) / (high - low)
        return self.base - share * (self.base - TOP)

    def level(self, kind: str, at: float) -> str:
        """A horizontal line."""
        return _tag("line", kind, x1=LEFT, x2=WIDTH - RIGHT, y1=at, y2=at)

    def frame(self, x_label: str, x_ticks: Sequence[float] | None = None, y: bool = True) -> str:
        parts = []
        for value in self._y_ticks() if y else []:
            at = self.up(value)
            parts.append(self.level("grid", at) + _text(number(value), LEFT - 6, at + 3.5, "end"))
        parts.append(self.level("axis", self.base))
        for value in ticks(*self.x, 6) if x_ticks is None else x_ticks:
            parts.append(_text(number(value), self.across(value), self.base + 14))
        parts.append(_text(x_label, (LEFT + WIDTH - RIGHT) / 2, self.height - 4))
        return "".join(parts)

    def _y_ticks(self) -> list[float]:
        if not self.log:
            return ticks(*self.y)
        whole = range(math.ceil(self.y[0] - 1e-9), math.floor(self.y[1] + 1e-9) + 1)
        if len(whole) >= 2:
            return [10.0**e for e in whole[:: max(1, len(whole) // 6)]]
        return [t for t in ticks(10 ** self.y[0], 10 ** self.y[1]) if t > 0]


def _tag(name: str, kind: str = "", inner: str = "", **attributes: object) -> str:
    """An element of a class, with floats to a tenth of a pixel."""
    given = {"class": kind} if kind else {}
    pairs = {**given, **attributes}.items()
    text = "".join(
        f' {key.replace("_", "-")}="{f"{value:.1f}" if isinstance(value, float) else value}"'
        for key, value in pairs
    )
    return f"<{name}{text}>{inner}</{name}>" if inner else f"<{name}{text}/>"


def _text(text: str, x: float, y: float, anchor: str = "middle") -> str:
    return _tag("text", "tick", escape(text), x=x, y=y, text_anchor=anchor)


def _dot(x: float, y: float, r: float, title: str, kind: str) -> str:
    """A point of a class, with a tooltip."""
    return _tag("circle", kind, f"<title>{escape(title)}</title>", cx=x, cy=y, r=str(r))


def _wide(ends: tuple[float, float]) -> tuple[float, float]:
    low, high = ends
    if high > low:
        return low, high
    return (0.0, 1.0) if low == 0.0 else (low - abs(low) / 2, low + abs(low) / 2)


def _figure(inner: str, title: str, height: int = HEIGHT) -> str:
    return (f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(title)}">'
            f"{inner}</svg>")  # fmt: skip


def lines(
    title: str,
    series: Sequence[Line],
    x_label: str,
    *,
    log: bool = False,
    threshold: tuple[float, str] | None = None,
) -> str:
    """A chart of lines with its legend; the empty text where there is nothing to draw.

    Args:
        title: what the chart shows.
        series: drawn in the order of the page's colours.
        x_label: under the axis.
        log: whether y is logarithmic; what is not above 0 is a gap then.
        threshold: a level to draw across, with its name.
    """
    good = [
        (line, [(x, y) for x, y in zip(line.x, line.y, strict=True) if _drawn(y, log)])
        for line in series
    ]
    values = [y for _, points in good for _, y in points if y is not None]
    if not values:
        return ""
    low, high = min(values), max(values)
    if threshold is not None:
        low, high = min(low, threshold[0]), max(high, threshold[0])
    room = 0.06 * (high - low)
    limits = (low / 1.15, high * 1.15) if log else (low - room, high + room)
    xs = [x for _, points in good for x, _ in points]
    axes = _Axes((min(xs), max(xs)), limits, log)
    x_ticks = ticks(*axes.x, 6)
    if all(isinstance(x, int) for x in xs):  # epochs, steps
        x_ticks = [tick for tick in x_ticks if tick == int(tick)]
    parts = [axes.frame(x_label, x_ticks)]
    for place, (line, _) in enumerate(good):
        color = f"c{place % COLORS}"
        for piece in _segments(line, log):
            path = " ".join(f"{axes.across(x):.1f},{axes.up(y):.1f}" for x, y in piece)
            parts.append(_tag("polyline", color, points=path, fill="none"))
        dots = [p for piece in _segments(line, log) for p in piece]
        for x, y in dots if len(dots) <= DOTS else []:
            what = f"{line.name}, {x_label} {number(x)}: {y:.5g}"
            parts.append(_dot(axes.across(x), axes.up(y), 2.6, what, color))
    if threshold is not None:  # last, so that its name can be read
        at = axes.up(threshold[0])
        parts.append(axes.level("mark", at) + _text(threshold[1], WIDTH - RIGHT, at + 14, "end"))
    keys = "".join(
        f'<span><i class="c{place % COLORS}"></i>{escape(line.name)}</span>'
        for place, line in enumerate(series)
    )
    legend = f'<div class="legend">{keys}</div>' if len(series) > 1 else ""
    drawn = _figure("".join(parts), title)
    return f"<figure><figcaption>{escape(title)}</figcaption>{drawn}{legend}</figure>"


def _drawn(y: float | None, log: bool) -> bool:
    return y is not None and math.isfinite(y) and (y > 0 or not log)


def _segments(line: Line, log: bool) -> list[list[tuple[float, float]]]:
    """Split a line into segments without gaps."""
    runs: list[list[tuple[float, float]]] = [[]]
    for x, y in zip(line.x, line.y, strict=True):
        if y is not None and _drawn(y, log):
            runs[-1].append((x, y))
        elif runs[-1]:
            runs.append([])
    return [run for run in runs if run]


def bars(
    title: str,
    note: str,
    edges: Sequence[float],
    density: Sequence[float],
    x_label: str,
    *,
    stems: Sequence[tuple[float, float]] = (),
    marks: Sequence[tuple[float, str]] = (),
    x_ticks: Sequence[float] | None = None,
) -> str:
    """A histogram, filled, with stems (value, share) over it and named marks on the axis.

    Heights are shares of the highest bar and of the highest stem: shapes are compared, not areas.

    Args:
        title: what it shows.
        note: smaller, beside the title.
        edges: of the bins, one more than ``density`` has.
        density: counts.
        x_label: under the axis.
        stems: where and how high.
        marks: where and what.
        x_ticks: numbers on the axis; None, round ones.
    """
    height = 150
    axes = _Axes((edges[0], edges[-1]), (0.0, 1.05), False, height)
    top, peak = max(density) or 1, max((share for _, share in stems), default=0.0) or 1
    base = height - BOTTOM
    points = [f"{axes.across(edges[0]):.1f},{base}"]
    for left, right, count in zip(edges[:-1], edges[1:], density, strict=True):
        at = axes.up(count / top)
        points += [f"{axes.across(left):.1f},{at:.1f}", f"{axes.across(right):.1f},{at:.1f}"]
    points.append(f"{axes.across(edges[-1]):.1f},{base}")
    parts = [_tag("polygon", "fill", points=" ".join(points))]
    for value, name in marks:
        at = axes.across(value)
        parts.append(_tag("line", "mark", x1=at, x2=at, y1=TOP + 8, y2=base))
        parts.append(_text(name, at, TOP + 4))
    for value, share in stems:
        at, up = axes.across(value), axes.up(share / peak)
        parts.append(_tag("line", "stem", x1=at, x2=at, y1=up, y2=base))
        parts.append(_dot(at, up, 2.4, f"{value:g}: {share:.2%}", "head"))
    parts.append(axes.frame(x_label, x_ticks, y=False))
    caption = f"{escape(title)} <small>{escape(note)}</small>"
    drawn = _figure("".join(parts), title, height)
    return f"<figure><figcaption>{caption}</figcaption>{drawn}</figure>"
