"""Tasks: what a model is trained to do, one row each."""

from __future__ import annotations

from typing import Any

from training.tasks.base import Metric, Scores, Task
from training.tasks.classification import Classification
from training.tasks.language import Causal
from training.tasks.masked import Masked

__all__ = ["TASKS", "Metric", "Scores", "Task"]

TASKS: dict[str, Any] = {
    "classification": Classification,
    "causal": Causal,
    "masked": Masked,
}
"""By the name that a row of RUNS gives: subclasses of Task, made of (config, data or None)."""
