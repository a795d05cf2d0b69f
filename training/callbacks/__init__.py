"""Callbacks: one small file each, behind one small protocol."""

from training.callbacks.base import Callback
from training.callbacks.checkpoint import BEST, LAST, SaveCheckpoint
from training.callbacks.early_stopping import EarlyStopping
from training.callbacks.jsonl import METRICS, JsonLines
from training.callbacks.progress import ShowProgress
from training.callbacks.tensorboard import TensorBoard

__all__ = [
    "BEST",
    "LAST",
    "METRICS",
    "Callback",
    "EarlyStopping",
    "JsonLines",
    "SaveCheckpoint",
    "ShowProgress",
    "TensorBoard",
]
