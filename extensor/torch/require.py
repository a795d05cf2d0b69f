"""Which torch the package works with; imported before anything else that imports torch."""

from __future__ import annotations

import importlib
import re
from typing import Any

__all__ = ["MINIMUM", "load_torch"]

MINIMUM = (2, 11)
"""The oldest torch that the tests have run with. docs/how-to/torch.md names it, too."""


def load_torch() -> Any:
    """The module torch, once its version is known to be new enough.

    Raises:
        ImportError: without torch, or with one older than `MINIMUM`.

    >>> from extensor.torch.require import load_torch
    >>> load_torch().__name__
    'torch'
    """
    try:
        torch = importlib.import_module("torch")
    except ImportError as error:
        raise ImportError(
            f"extensor.torch needs PyTorch, which cannot be imported ({error}); "
            "pip install 'extensor[torch]'"
        ) from error
    found = tuple(int(part) for part in re.findall(r"\d+", torch.__version__)[:2])
    if found < MINIMUM:
        raise ImportError(
            f"extensor.torch: expected torch {'.'.join(map(str, MINIMUM))} or newer, got "
            f"{torch.__version__}; pip install --upgrade torch"
        )
    return torch
