"""Checkpoints on disk: extensor's own here, those of other programs in `stored` and `gguf`."""

from extensor.io.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from extensor.io.safetensors_format import CheckpointError
from extensor.io.stored.archive import Archive, open_archive
from extensor.io.tensors import load, save

__all__ = [
    "Archive", "Checkpoint", "CheckpointError", "load", "load_checkpoint", "open_archive", "save",
    "save_checkpoint",
]  # fmt: skip


def __dir__() -> list[str]:
    return sorted([*__all__, "gguf", "layouts", "stored"])
