"""Callbacks: what watches a run, behind one small protocol."""

from .base import Callback, RunView
from .early_stopping import EarlyStopping, InterruptAfter
from .files import JsonLines, SaveCheckpoint, TensorBoard
from .memory import ShowMemory
from .progress import ShowProgress
from .telemetry import NOISE_RATIO, Interval, Telemetry

__all__ = [
    "NOISE_RATIO",
    "Callback",
    "EarlyStopping",
    "InterruptAfter",
    "Interval",
    "JsonLines",
    "RunView",
    "SaveCheckpoint",
    "ShowMemory",
    "ShowProgress",
    "Telemetry",
    "TensorBoard",
]
