"""Error messages that say what was wanted, what came, and the way out."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

__all__ = ["AxisError", "layout_error", "unknown_name"]


class AxisError(ValueError, IndexError):
    """An axis that a tensor does not have: a bad value, and to the array standard a bad index."""


def unknown_name(kind: str, name: object, known: Iterable[str]) -> str:
    """Message for a name that is not in a table, with the nearest names first."""
    names = sorted(known)
    near = difflib.get_close_matches(str(name), names, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(repr(n) for n in near)}? " if near else ""
    return f"no {kind} named {name!r}; {hint}known: {', '.join(names)}"


def layout_error(source: str, wanted: Mapping[str, Any], came: Mapping[str, Any]) -> str | None:
    """Message for named arrays that differ from what is wanted, or None where all agree.

    Compares names, shapes and dtypes (for a blocked array: its spec).

    Args:
        source: what the arrays came in, for the message, such as ``"this checkpoint"``.
        wanted: arrays with the names, shapes and dtypes that are needed.
        came: the arrays that were given.
    """
    lines = []
    for name in sorted(wanted.keys() | came.keys()):
        want = _layout(wanted[name]) if name in wanted else "nothing"
        got = _layout(came[name]) if name in came else "nothing"
        if want != got:
            lines.append(f"{name}: wanted {want}, got {got}")
    if not lines:
        return None
    shown = lines[:8]
    more = [f"and {len(lines) - len(shown)} more"] if len(lines) > len(shown) else []
    return (
        f"{source} does not fit: {'; '.join(shown + more)}. "
        "Use the one that belongs here, or build the same model and options that wrote it"
    )


def _layout(array: Any) -> str:
    kind = getattr(array, "spec", None) or array.dtype
    return f"{kind} of shape {tuple(array.shape)}"
