"""Checkpoints on disk."""

from extensor.io.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from extensor.io.safetensors_format import CheckpointError

__all__ = ["Checkpoint", "CheckpointError", "load_checkpoint", "save_checkpoint"]
