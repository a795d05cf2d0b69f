"""What layers check about their arguments."""

from __future__ import annotations

__all__ = ["check_probability", "check_size"]


def check_size(name: str, value: object, least: int = 1) -> int:
    """An int of at least ``least``.

    Raises:
        TypeError, ValueError: for anything else.
    """
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name}: wanted an int, got {value!r}")
    if value < least:
        raise ValueError(f"{name}: wanted {least} or more, got {value}")
    return value


def check_probability(name: str, value: object) -> float:
    """A number in [0, 1).

    Raises:
        ValueError: for anything else.
    """
    if isinstance(value, (int, float)) and not isinstance(value, bool) and 0.0 <= value < 1.0:
        return float(value)
    raise ValueError(f"{name}: wanted a number in [0, 1), got {value!r}")
