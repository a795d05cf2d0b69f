"""Packed checkpoints of torch models, in every layout that `extensor.io.stored` writes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from extensor.io.stored import TARGETS, Conversion, takes_blocks, write_checkpoint
from extensor.torch.arrays import READABLE, check_tensor, to_array

__all__ = ["export"]

_PACKED = (
    "matrices of linear layers, named PATH.weight, whose rows are whole blocks",
    "stacks of experts",
)


def export(model: nn.Module, path: str | os.PathLike[str], layout: str) -> Conversion:
    """Write a torch model's weights in blocks, as another program or `extensor.io` reads them.

    Clocks and modules' extra states are left out. A transformers model's configuration is written
    beside the weights.

    Args:
        model: quantized or not; its parameters are what is packed.
        path: a new folder, or a ``.safetensors`` or ``.gguf`` file, as the layout wants.
        layout: a name of `extensor.io.stored.TARGETS`.

    Returns:
        What was written, with the error of each weight.

    Raises:
        TypeError: for a tensor whose values are not here, such as a shard, or of another dtype.
        ValueError: for an unknown layout, a weight that it cannot hold, or a model of which it
            packs no weight, such as a single layer, whose weight has no path.

    >>> import extensor as et, extensor.torch as ext, tempfile, torch
    >>> model = ext.quantize_(torch.nn.Sequential(torch.nn.Linear(128, 8)))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     done = ext.export(model, f"{folder}/m", "compressed-tensors-int4")
    >>> [file.name for file in done.files]
    ['model.safetensors', 'certificate.json']
    """
    _check_packs(model, layout)
    for name, tensor in _tensors(model):
        _check_readable(name, tensor)
    config: Any = getattr(model, "config", None)
    described = config.to_dict() if hasattr(config, "to_dict") else None
    return write_checkpoint(Path(path), layout, _weights(model), config=described)


def _check_packs(model: nn.Module, layout: str) -> None:
    """Refuse to write a packed layout's files without a packed weight."""
    target = TARGETS.get(layout)
    if target is None or target.spec is None:
        return
    shapes = {name: tuple(tensor.shape) for name, tensor in _tensors(model)}
    if not any(takes_blocks(target, name, shape) for name, shape in shapes.items()):
        found = ", ".join(f"{name} {shape}" for name, shape in list(shapes.items())[:4])
        raise ValueError(
            f"export: {layout} would pack no weight of {type(model).__name__} ({found}). It packs "
            f"{_PACKED[target.layout is not None and target.layout.packing == 'blocks']}. Wrap a "
            "single layer in torch.nn.Sequential, which gives its weight a path, or choose another "
            "layout"
        )


def _tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and buffers by name, without what modules hold beside them (`get_extra_state`)."""
    for name, value in model.state_dict(keep_vars=True).items():
        if name.rpartition(".")[2] != "_extra_state":
            yield name, value


def _check_readable(name: str, tensor: torch.Tensor) -> None:
    """Refuse a tensor whose values are not here, or of a dtype that no array has."""
    if type(tensor) not in (torch.Tensor, nn.Parameter):
        way = "gather it first, with get_model_state_dict of torch.distributed.checkpoint"
        raise TypeError(f"export: {name} is a {type(tensor).__name__}; {way}")
    if tensor.is_meta or tensor.layout is not torch.strided:
        check_tensor(f"export: {name}", tensor)
    if tensor.dtype not in READABLE:
        known = ", ".join(str(dtype).removeprefix("torch.") for dtype in READABLE)
        raise TypeError(
            f"export: {name}: expected one of {known}, got {tensor.dtype}; convert it with "
            "tensor.to(dtype), or take it out of the state_dict with persistent=False"
        )


def _weights(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Parameters and buffers by name; tied ones once, clocks never."""
    seen = set()
    for name, tensor in _tensors(model):
        if name.rpartition(".")[2] != "quant_clock" and id(tensor) not in seen:
            seen.add(id(tensor))
            yield name, to_array(tensor.detach().cpu().contiguous())
