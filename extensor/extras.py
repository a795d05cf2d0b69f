"""Packages that training and text need and that only an extra of the distribution brings."""

from __future__ import annotations

import importlib.util

__all__ = ["EXTRAS", "lacking", "missing"]

EXTRAS = {
    "train": {
        "jinja2": "jinja2",
        "matplotlib": "matplotlib",
        "tensorboardX": "tensorboardX",
    },
    "text": {"tokenizers": "tokenizers", "jinja2": "jinja2>=3.1.6"},
}
"""By extra: the packages' import names, and the names they are installed by."""


def lacking(extra: str) -> list[str]:
    """The packages of an extra that are not installed, by the names they are installed by."""
    rows = EXTRAS[extra].items()
    return [name for package, name in rows if importlib.util.find_spec(package) is None]


def missing(what: str, package: str) -> str | None:
    """The error message if ``what`` needs a package that is not installed; None if it is there."""
    if importlib.util.find_spec(package) is not None:
        return None
    extra, name = next((e, row[package]) for e, row in EXTRAS.items() if package in row)
    return (
        f"{what} needs {name}, which is not installed; the way out: pip install 'extensor[{extra}]'"
    )
