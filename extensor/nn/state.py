"""A module's state: every parameter and buffer by path, copied out and loaded again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from extensor.autograd.mode import no_grad
from extensor.autograd.tensor import ExTensor
from extensor.errors import layout_error
from extensor.quant.array import QuantArray

__all__ = ["StateNames", "load_state", "state_of"]


class StateNames(NamedTuple):
    """What `Module.load_state_dict` did not load, under PyTorch's names.

    Attributes:
        missing_keys: paths of the module that the state does not have; they keep their values.
        unexpected_keys: paths of the state that the module does not have.

    >>> et.nn.Linear(4, 2).load_state_dict(et.nn.Linear(4, 2).state_dict()).missing_keys
    []
    """

    missing_keys: list[str]
    unexpected_keys: list[str]


def state_of(
    tensors: Iterable[tuple[str, ExTensor]],
) -> dict[str, np.ndarray[Any, Any] | QuantArray]:
    """Copies of tensors on the host, by path."""
    state: dict[str, np.ndarray[Any, Any] | QuantArray] = {}
    for path, tensor in tensors:
        host = tensor.to("cpu").data
        state[path] = host if isinstance(host, QuantArray) else host.copy()
    return state


def load_state(
    kind: str, tensors: dict[str, ExTensor], state: Mapping[str, Any], strict: bool
) -> StateNames:
    """Write a state into a module's tensors; `Module.load_state_dict` says how.

    Args:
        kind: the module's class, for messages.
        tensors: the module's, by path.
        state: arrays or tensors by path.
        strict: whether the names must be the same.
    """
    if not isinstance(state, Mapping):
        raise TypeError(
            f"load_state_dict: expected arrays by path, got {type(state).__name__}; pass "
            "et.load(path) or another model's state_dict()"
        )
    arrays = {}
    for path, value in state.items():
        arrays[path] = value.to("cpu").data if isinstance(value, ExTensor) else value
        if not isinstance(arrays[path], (np.ndarray, QuantArray)):
            raise TypeError(
                f"{path}: expected a numpy array or a tensor, got {type(value).__name__}; pass "
                "et.load(path) or another model's state_dict()"
            )
    names = StateNames(
        [path for path in tensors if path not in arrays],
        [path for path in arrays if path not in tensors],
    )
    if not strict and len(names.missing_keys) < len(tensors):
        tensors = {path: tensors[path] for path in tensors if path in arrays}
        arrays = {path: arrays[path] for path in tensors}
    expected = {path: tensor.data for path, tensor in tensors.items()}
    message = layout_error(f"this state for {kind}", expected, arrays)
    if message:
        raise ValueError(message)
    with no_grad():
        for path, tensor in tensors.items():
            tensor.assign_(ExTensor(arrays[path], device="cpu").to(tensor.device).data)
    return names
