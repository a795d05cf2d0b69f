"""Callbacks: what watches a run, behind one small protocol."""

from training.callbacks.base import Callback, RunView
from training.callbacks.early_stopping import EarlyStopping
from training.callbacks.files import JsonLines, SaveCheckpoint, TensorBoard
from training.callbacks.progress import ShowProgress
from training.callbacks.telemetry import NOISE_RATIO, Telemetry

__all__ = [
    "NOISE_RATIO",
    "Callback",
    "EarlyStopping",
    "JsonLines",
    "RunView",
    "SaveCheckpoint",
    "ShowProgress",
    "Telemetry",
    "TensorBoard",
]
