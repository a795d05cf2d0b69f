"""Models: one folder each, with `model.py` (`build`) and `configs.py` (`CONFIGS`, frozen records).

A folder is found by being there; nothing lists it. The package's name is `extensor.models`; its
files are in the repository's folder `models/`.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from .registry import build, config, names

__all__ = ["build", "config", "from_pretrained", "names"]


def __getattr__(name: str) -> Any:
    """`from_pretrained`, imported at its first use: it needs every architecture."""
    if name == "from_pretrained":
        return import_module(".pretrained", __name__).from_pretrained
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
