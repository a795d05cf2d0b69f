"""The CPU backend."""

from __future__ import annotations

import numpy as np

from extensor.backends.generic import GenericBackend

__all__ = ["make_backend"]


def make_backend() -> GenericBackend:
    """The CPU backend on numpy."""
    return GenericBackend("cpu", np)
