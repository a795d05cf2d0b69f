"""Sizes that a file claims, compared with what it holds before a model is built of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from extensor.schema import SchemaError

__all__ = ["check_sizes"]

_LAYERS, _AXES = ("layers",), ("vocab", "width", "heads", "kv_heads", "head_size", "hidden")


def check_sizes(config: Mapping[str, Any], tensors: Iterable[Any]) -> None:
    """Refuse more layers than tensors, axes longer than their values, more experts than fit.

    Args:
        config: a model's configuration, by field name.
        tensors: the file's, each with a ``shape`` and its ``nbytes``.

    Raises:
        SchemaError: naming the field.

    >>> import numpy as np
    >>> from extensor.models.sizes import check_sizes
    >>> check_sizes({"layers": 10**9}, [np.zeros(4)])
    Traceback (most recent call last):
    ...
    extensor.schema.SchemaError: layers: expected at most 1, the file's tensors, got 1000000000
    """
    held = list(tensors)
    values = 8 * max((int(tensor.nbytes) for tensor in held), default=0)
    for names, most, what in (
        (_LAYERS, len(held), "the file's tensors"),
        (_AXES, values, "the values of its largest tensor"),
    ):
        for name in names:
            if (size := config.get(name)) is not None and size > most:
                raise SchemaError(f"{name}: expected at most {most}, {what}, got {size}")
    if (experts := config.get("experts")) is not None:
        claimed = 3 * config["layers"] * experts["count"] * config["width"] * experts["hidden"]
        most = 8 * sum(int(tensor.nbytes) for tensor in held)  # a value takes a bit or more
        if claimed > most:
            raise SchemaError(
                f"experts: expected weights of at most {most} values, the whole file, got "
                f"{experts['count']} experts a layer with {claimed} in all"
            )
