"""What a checkpoint can be converted to: one row for each name that ``--layout`` takes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Literal

import ml_dtypes
import numpy as np

from extensor.errors import unknown_name
from extensor.io.gguf.types import GGUF_TYPES, GgufType
from extensor.io.stored.rows import WEIGHT_LAYOUTS, WeightLayout
from extensor.quant.spec import QuantSpec

__all__ = ["TARGETS", "Target", "takes_blocks"]


@dataclass(frozen=True)
class Target:
    """One layout of a whole checkpoint.

    Attributes:
        name: as ``--layout`` takes it.
        doc: one line for tables.
        container: of the files.
        layout: the row of the blocked weights; None where there is none.
        gguf: the type of matrices; None keeps each in its own.
        dtype: of all weights, for dense layouts; None keeps each in its own.
        as_stored: True for this project's own files, which hold any spec.
        dense: dtype of floating-point weights outside the blocks; None keeps each in its own, and
            decodes a blocked one to the smallest that holds every value.

    >>> from extensor.io.stored import TARGETS
    >>> TARGETS["gguf-q4_1"].gguf.size
    20
    """

    name: str
    doc: str
    container: Literal["safetensors", "gguf"] = "safetensors"
    layout: WeightLayout | None = None
    gguf: GgufType | None = None
    dtype: np.dtype[Any] | None = None
    as_stored: bool = False
    dense: np.dtype[Any] | None = None

    @property
    def spec(self) -> QuantSpec | None:
        """How float matrices are quantized; None where they stay floats."""
        if self.layout is not None:
            return self.layout.spec
        return None if self.gguf is None else self.gguf.spec

    def with_dense(self, dtype: str | None) -> Target:
        """This layout, with floating-point weights outside the blocks in one dtype.

        Args:
            dtype: "bfloat16", "float16" or "float32"; None keeps each in its own.

        Returns:
            A target.

        Raises:
            ValueError: for another dtype, or a layout that sets the dtype of dense weights itself.

        >>> from extensor.io.stored import TARGETS
        >>> TARGETS["modelopt-nvfp4"].with_dense("float16").dense
        dtype('float16')
        """
        if dtype is None:
            return self
        if dtype not in DENSE_DTYPES:
            raise ValueError(unknown_name("dense dtype", dtype, DENSE_DTYPES))
        if self.layout is None:
            raise ValueError(
                f"dense dtype: expected a layout with blocks in safetensors files, such as "
                f"compressed-tensors-nvfp4; {self.name} keeps or sets the dtype of every weight "
                "itself"
            )
        return replace(self, dense=DENSE_DTYPES[dtype])


DENSE_DTYPES = MappingProxyType(
    {str(d): d for d in map(np.dtype, (ml_dtypes.bfloat16, np.float16, np.float32))}
)
"""What floating-point weights outside the blocks can be cast to, by name."""

_ROWS = (
    Target("float32", "Hugging Face's, every weight float32", dtype=np.dtype(np.float32)),
    Target("bfloat16", "Hugging Face's, every weight bfloat16", dtype=np.dtype(ml_dtypes.bfloat16)),
    Target("float16", "Hugging Face's, every weight float16", dtype=np.dtype(np.float16)),
    Target("extensor", "this project's: every weight as it is", as_stored=True),
    *(Target(row.name, row.doc, layout=row) for row in WEIGHT_LAYOUTS.values()),
    Target("gguf", "GGUF, every weight in the type that it has", "gguf"),
    *(
        Target(f"gguf-{name.lower()}", f"GGUF with matrices of type {name}", "gguf", gguf=row)
        for name, row in GGUF_TYPES.items()
        if row.spec is not None or name in ("F32", "F16", "BF16")
    ),
)

TARGETS: MappingProxyType[str, Target] = MappingProxyType({row.name: row for row in _ROWS})
"""Every layout of a checkpoint, by name."""

_KEPT = ("embed", "wte", "wpe", "lm_head", "norm", "router", ".gate.weight", "pooler", "score.")


def takes_blocks(target: Target, name: str, shape: tuple[int, ...]) -> bool:
    """Whether a layout stores this weight in blocks: matrices, by the rules of its program.

    Args:
        target: the layout.
        name: the weight's, in Hugging Face's terms.
        shape: its shape.

    Returns:
        True for matrices of linear layers; in GGUF for the embedding too; in gpt-oss's layout for
        its experts alone.

    >>> from extensor.io.stored import TARGETS, takes_blocks
    >>> takes_blocks(TARGETS["modelopt-nvfp4"], "lm_head.weight", (64, 32))
    False
    """
    spec = target.spec
    if spec is None:
        return False
    size = target.gguf.values if target.gguf is not None else 1
    if isinstance(spec.tile or spec.row.tile, tuple) and target.gguf is None:
        size = (spec.tile or spec.row.tile)[1]  # type: ignore[assignment]
        size = 1 if target.layout is not None and target.layout.tiles[0] == (128, 128) else size
    if target.gguf is not None:
        router = name.endswith((".router.weight", ".gate.weight"))  # llama.cpp's are float32
        return len(shape) == 2 and shape[-1] % size == 0 and not router
    assert target.layout is not None
    if target.layout.packing == "blocks":
        return len(shape) == 3 and "experts" in name and shape[-2] % 32 == 0
    linear = len(shape) == 2 and name.endswith(".weight") and not any(k in name for k in _KEPT)
    return linear and shape[-1] % size == 0
