"""Tasks: what a model is trained to do, one row each."""

from __future__ import annotations

from typing import Any

from .base import Metric, Task
from .classification import Classification
from .language import Causal, Masked

__all__ = ["TASKS", "Metric", "Task"]

TASKS: dict[str, Any] = {"classification": Classification, "causal": Causal, "masked": Masked}
"""By the name that a row of RUNS gives: subclasses of Task, made of (config, data or None)."""
