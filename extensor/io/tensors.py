"""`et.save` and `et.load`: named tensors in a file, without metadata."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from extensor.autograd.tensor import ExTensor
from extensor.io.checkpoint import save_checkpoint
from extensor.io.stored.archive import open_archive

__all__ = ["load", "save"]


def save(tensors: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    """Write named tensors to a safetensors file, all or nothing.

    Args:
        tensors: ExTensors, dense or blocked, by name; or a model's ``state_dict()``.
        path: the file; its directory must exist. A file already there is replaced at the end.

    Raises:
        TypeError, ValueError, OSError: as `extensor.io.save_checkpoint`, which also stores
            metadata.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     et.save({"w": et.ones((4, 64)).to_mxfp4()}, f"{folder}/w.safetensors")
        ...     et.load(f"{folder}/w.safetensors")["w"].dtype
        extensor.mxfp4
    """
    if not isinstance(tensors, Mapping):
        raise TypeError(
            f"save: expected tensors by name, then a path, got {type(tensors).__name__}; write "
            "et.save({'x': x}, path), or et.save(model.state_dict(), path)"
        )
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(
            f"save: expected a path after the tensors, got {type(path).__name__}; write "
            'et.save(tensors, "model.safetensors")'
        )
    save_checkpoint(path, tensors)


def load(path: str | os.PathLike[str], device: str | None = None) -> dict[str, ExTensor]:
    """Read the tensors of a checkpoint by name, blocked ones as they are stored.

    Args:
        path: a safetensors file that `save` or another program wrote, a folder of them or its
            index, or a GGUF file. Layouts of blocked weights are those of `extensor.io.stored`.
        device: EXTENSOR_DEVICE, and the CPU without it, if None.

    Returns:
        Tensors by name. ``model.load_state_dict`` takes them.

    Raises:
        FileNotFoundError, CheckpointError: as `extensor.io.open_archive`, which also gives the
            metadata, and reads tensors one at a time.

    Example:
        >>> import tempfile
        >>> one, other = et.nn.Linear(4, 2, rng=0), et.nn.Linear(4, 2, rng=1)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     et.save(one.state_dict(), f"{folder}/model.safetensors")
        ...     names = other.load_state_dict(et.load(f"{folder}/model.safetensors"))
        >>> bool((one.weight == other.weight).all())
        True
    """
    return {name: ExTensor(value, device=device) for name, value in open_archive(path)}
