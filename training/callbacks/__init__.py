"""Callbacks: one small file each, behind one small protocol."""

from training.callbacks.base import Callback
from training.callbacks.checkpoint import BEST, LAST, SaveCheckpoint
from training.callbacks.early_stopping import EarlyStopping
from training.callbacks.jsonl import METRICS, JsonLines
from training.callbacks.progress import ShowProgress
from training.callbacks.telemetry import NOISE_RATIO, TELEMETRY, Telemetry
from training.callbacks.tensorboard import TensorBoard

__all__ = [
    "BEST",
    "LAST",
    "METRICS",
    "NOISE_RATIO",
    "TELEMETRY",
    "Callback",
    "EarlyStopping",
    "JsonLines",
    "SaveCheckpoint",
    "ShowProgress",
    "Telemetry",
    "TensorBoard",
]
