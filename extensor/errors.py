"""Error messages that say what was expected, what was given, and what to do instead."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any, Protocol, TypeVar

from extensor.schema import printable

__all__ = ["AxisError", "CaptureError", "Rows", "layout_error", "unknown_name"]


class _Named(Protocol):
    @property
    def name(self) -> str: ...


Row = TypeVar("Row", bound=_Named)


class AxisError(ValueError, IndexError):
    """An axis that a tensor does not have: a bad value, and to the array standard a bad index.

    Example:
        >>> from extensor.errors import AxisError
        >>> try:
        ...     et.zeros((2, 3)).sum(axis=2)
        ... except AxisError as error:
        ...     print(error)
        sum: axis: expected -2..1 for a tensor of 2 axes, got 2
    """


class CaptureError(RuntimeError):
    """What a captured step (`extensor.capture`) cannot repeat; the step runs without capture.

    Example:
        >>> from extensor.errors import CaptureError
        >>> issubclass(CaptureError, RuntimeError)
        True
    """


def unknown_name(kind: str, name: object, known: Iterable[str]) -> str:
    """Message for a name that is not in a table, with the nearest names first, of any case.

    Args:
        kind: what the name should be, such as "format".
        name: the name that is not known.
        known: the names that are.

    Returns:
        The message.

    Example:
        >>> from extensor.errors import unknown_name
        >>> unknown_name("format", "mxpf4", ["mxfp4", "int8"])
        "no format named 'mxpf4'; did you mean 'mxfp4'? known: int8, mxfp4"
    """
    names = sorted(known)
    folded = {each.casefold(): each for each in reversed(names)}
    given = str(name).casefold()
    near = [given] if given in folded else difflib.get_close_matches(given, folded, 3, cutoff=0.5)
    close = [folded[each] for each in near]
    hint = f"did you mean {' or '.join(repr(n) for n in close)}? " if close else ""
    return printable(f"no {kind} named {name!r}; {hint}known: {', '.join(names)}")


class Rows(dict[str, Row]):
    """A table of rows by their names; an unknown name is a KeyError that lists the known ones.

    Args:
        kind: what a row is, such as "recipe".
        rows: the rows, each with a ``name``.

    Example:
        >>> try:
        ...     et.RECIPES["mxpf4"]
        ... except KeyError as error:
        ...     print(error.args[0][:48])
        no recipe named 'mxpf4'; did you mean 'mxfp4' or
    """

    def __init__(self, kind: str, rows: Iterable[Row]) -> None:
        super().__init__({row.name: row for row in rows})
        self._kind = kind

    def __missing__(self, name: object) -> Row:
        raise KeyError(unknown_name(self._kind, name, self))


def layout_error(source: str, expected: Mapping[str, Any], given: Mapping[str, Any]) -> str | None:
    """Message for named arrays that differ from the expected ones in names, shapes or dtypes.

    Args:
        source: what the arrays came in, for the message, such as ``"this checkpoint"``.
        expected: raw arrays with the names, shapes and dtypes that are needed; of a blocked one its
            spec.
        given: the raw arrays to compare with them.

    Returns:
        The message; None if all agree.

    Example:
        >>> from extensor.errors import layout_error
        >>> w = et.zeros(2).numpy()
        >>> layout_error("this file", {"w": w}, {"w": w}) is None
        True
    """
    lines = []
    for name in sorted(expected.keys() | given.keys()):
        want = _layout(expected[name]) if name in expected else "nothing"
        got = _layout(given[name]) if name in given else "nothing"
        if want != got:
            lines.append(f"{name}: expected {want}, got {got}")
    if not lines:
        return None
    shown = lines[:8]
    more = [f"and {len(lines) - len(shown)} more"] if len(lines) > len(shown) else []
    return printable(
        f"{source} does not fit: {'; '.join(shown + more)}. "
        "Use the one that belongs here, or build the same model and options that wrote it"
    )


def _layout(array: Any) -> str:
    kind = getattr(array, "spec", None) or array.dtype
    return f"{kind} of shape {tuple(array.shape)}"
