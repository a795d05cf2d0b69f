"""Checkpoints on disk."""

from extensor.io.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from extensor.io.safetensors_format import CheckpointError
from extensor.io.tensors import load, save

__all__ = ["Checkpoint", "CheckpointError", "load", "load_checkpoint", "save", "save_checkpoint"]


def __dir__() -> list[str]:
    return sorted([*__all__, "layouts"])
