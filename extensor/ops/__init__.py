"""The operations, one file per family. Importing this package fills the registry."""

from __future__ import annotations

from extensor.ops import (
    activation,
    arithmetic,
    attention,
    blocked,
    comparison,
    conv,
    creation,
    einsum,
    elementwise,
    indexing,
    linalg,
    loss,
    norm,
    pool,
    reduce,
    search,
    shape,
    sort,
    standard,
    trigonometry,
)

__all__ = [
    "activation",
    "arithmetic",
    "attention",
    "blocked",
    "comparison",
    "conv",
    "creation",
    "einsum",
    "elementwise",
    "indexing",
    "linalg",
    "loss",
    "norm",
    "pool",
    "reduce",
    "search",
    "shape",
    "sort",
    "standard",
    "trigonometry",
]
