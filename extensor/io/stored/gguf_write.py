"""Writing a model as a GGUF file: every tensor in its place, experts of a layer as one tensor."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from extensor.io.gguf.types import GGUF_TYPES, GgufType, gguf_type_of
from extensor.io.stored.certificate import TensorCertificate, compare
from extensor.io.stored.forms import new_form
from extensor.io.stored.gguf_config import gguf_metadata, rope_tensor
from extensor.io.stored.gguf_models import heads_of, reordered, transposed
from extensor.io.stored.gguf_names import ROPE_FACTORS, GgufArchitecture, gguf_name
from extensor.io.stored.targets import Target
from extensor.io.stored.writer import GgufWriter
from extensor.quant.array import QuantArray
from extensor.quant.views import slice_blocks

__all__ = ["GgufModelWriter"]

Array = npt.NDArray[Any]
Stored = Array | QuantArray

_FILE_TYPES = {"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "Q4_K": 15, "Q5_K": 17}
_FILE_TYPES |= {"Q6_K": 18, "BF16": 32, "MXFP4": 38}


@dataclass
class _Stack:
    """Experts of one GGUF tensor, until all of the layer have come."""

    type: GgufType
    shape: tuple[int, ...]
    contents: dict[int, Array] = field(default_factory=dict)
    scales: dict[int, Array] = field(default_factory=dict)


class GgufModelWriter:
    """Writes a model's tensors, given by Hugging Face's names, to a GGUF file.

    Args:
        path: the file; its folder must exist.
        target: the layout.
        config: config.json's contents.
        metadata: further values, such as a vocabulary.

    Raises:
        ValueError: for a model type that GGUF files are not written of, or what they cannot say.
    """

    def __init__(
        self, path: Path, target: Target, config: Mapping[str, Any], metadata: Mapping[str, Any]
    ) -> None:
        self.target, self.config = target, config
        self.row, values = gguf_metadata(config)
        values |= metadata
        values.setdefault("tokenizer.ggml.model", "none")
        if target.gguf is not None and target.gguf.name in _FILE_TYPES:
            values["general.file_type"] = _FILE_TYPES[target.gguf.name]
        values["general.quantization_version"] = 2
        self._writer = GgufWriter(path, values)
        self._stacks: dict[str, _Stack] = {}
        self._experts = int(config[self.row.keys[0][1]]) if self.row.has_experts else 0
        if (factors := rope_tensor(config)) is not None:
            self._writer.add(ROPE_FACTORS, GGUF_TYPES["F32"], factors.shape, factors)

    def add(self, name: str, value: Stored) -> list[TensorCertificate]:
        """Write one of Hugging Face's tensors.

        Args:
            name: its name.
            value: its values.

        Returns:
            What each of its parts lost.

        Raises:
            ValueError: if GGUF has no name or no type for it.
        """
        return [
            self._add(part, gguf, expert, piece)
            for part, gguf, expert, piece in _parts(self.row, name, value)
        ]

    def finish(self) -> list[Path]:
        """Write the file; its path.

        Raises:
            ValueError: if experts of a layer are missing.
        """
        for name, stack in self._stacks.items():
            raise ValueError(
                f"GGUF: {name}: expected {self._experts} experts, got {len(stack.contents)}"
            )
        return self._writer.finish()

    def close(self) -> None:
        """Let go of the temporary file, after `finish` or without it."""
        self._writer.close()

    def _add(self, name: str, gguf: str, expert: int | None, value: Stored) -> TensorCertificate:
        made = new_form(self.target, name, value)
        heads = heads_of(name, self.config) if self.row.permuted else None
        moved = made if heads is None else reordered(made, heads, to_gguf=True)
        kind: GgufType | None = gguf_type_of(moved)
        if kind is None:
            raise ValueError(f"GGUF: no type stores {name!r}, {getattr(moved, 'dtype', 'blocked')}")
        shape, content = tuple(moved.shape), kind.write(moved)
        back = kind.read(content, shape)
        scale: Array | None = None
        if isinstance(moved, QuantArray) and moved.tensor_scale is not None:
            assert isinstance(back, QuantArray)
            scale = np.asarray(moved.tensor_scale, np.float32).reshape(1)
            back = dataclasses.replace(back, tensor_scale=scale.reshape(()))
        if expert is None:
            self._write(gguf, kind, shape, content, scale)
        else:
            self._stack(gguf, expert, kind, shape, content, scale)
        return compare(
            name, value, back if heads is None else reordered(back, heads, to_gguf=False)
        )

    def _write(
        self, name: str, kind: GgufType, shape: tuple[int, ...], content: Array, scale: Array | None
    ) -> None:
        if scale is not None:
            of = name.removesuffix(".weight") + ".scale"
            self._writer.add(of, GGUF_TYPES["F32"], scale.shape, scale)
        self._writer.add(name, kind, shape, content)

    def _stack(
        self,
        name: str,
        expert: int,
        kind: GgufType,
        shape: tuple[int, ...],
        content: Array,
        scale: Array | None,
    ) -> None:
        """Keep an expert; with the last one of its layer, write them all."""
        if scale is not None and any(tensor.transposed for tensor in self.row.layer):
            raise ValueError(
                f"GGUF: {name}: {kind.name} gives each expert a tensor scale, and experts of "
                f"{self.row.model_type} share one tensor; write gguf-mxfp4 instead"
            )
        stack = self._stacks.setdefault(name, _Stack(kind, shape))
        if (stack.type, stack.shape) != (kind, shape):
            raise ValueError(
                f"GGUF: {name}: expected experts of one type and shape, got {stack.type.name} "
                f"{stack.shape} and {kind.name} {shape}"
            )
        stack.contents[expert] = np.asarray(content).reshape(-1).view(np.uint8)
        if scale is not None:
            stack.scales[expert] = scale
        if len(stack.contents) < self._experts:
            return
        order = range(self._experts)
        scales = np.concatenate([stack.scales[e] for e in order]) if stack.scales else None
        whole = np.concatenate([stack.contents[e] for e in order])
        self._write(name, kind, (self._experts, *shape), whole, scales)
        del self._stacks[name]


def _parts(
    row: GgufArchitecture, name: str, value: Stored
) -> Iterator[tuple[str, str, int | None, Stored]]:
    """What of a tensor goes where: a name for the certificate, GGUF's, the expert, the values."""
    place = gguf_name(row, name)
    if place is None:
        raise ValueError(f"GGUF: {name!r} has no name in a {row.name} file")
    if place.expert is not None or "_exps" not in place.names[0]:
        yield name, place.names[0], place.expert, value
        return
    if place.transposed:
        value = transposed(value)
    for expert in range(value.shape[0]):
        for turn, gguf in enumerate(place.names):
            part = _expert(value, expert, slice(turn, None, len(place.names)))
            yield f"{name}[{expert}] ({gguf.split('.')[2]})", gguf, expert, part


def _expert(value: Stored, expert: int, rows: slice) -> Stored:
    """Some rows of one expert of a stack."""
    if not isinstance(value, QuantArray):
        return np.ascontiguousarray(value[expert, rows])
    return slice_blocks(value, (expert, rows, slice(None)))
