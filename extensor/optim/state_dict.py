"""What an optimizer writes to a checkpoint, and takes over from one."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

from extensor.autograd.tensor import wrap
from extensor.backends.registry import get as get_backend
from extensor.errors import layout_error
from extensor.optim.params import Array, Option, ParamGroup
from extensor.optim.states import Stored
from extensor.quant.array import QuantArray

__all__ = ["StoredOptimizer", "load_state", "state_of"]


class StoredOptimizer(Protocol):
    """What is stored of an optimizer; see `extensor.optim.Optimizer`."""

    groups: list[ParamGroup]

    def state_dict(self) -> dict[str, Any]:
        """Everything a resumed run needs."""
        ...

    def _check_options(self, options: Mapping[str, Option]) -> None: ...


def state_of(optimizer: StoredOptimizer) -> dict[str, Any]:
    """See `extensor.optim.Optimizer.state_dict`."""
    state: dict[str, Any] = {"optimizer": type(optimizer).__name__}
    for i, group in enumerate(optimizer.groups):
        state[f"group.{i}.base_lr"] = group.base_lr
        state |= {f"group.{i}.{name}": value for name, value in group.options.items()}
        for member in group.members:
            state[f"step.{member.name}"] = member.step
            for slot, stored in member.arrays.items():
                host = _moved(stored, member.param.backend, "cpu")
                whole = isinstance(host, QuantArray)
                state[f"state.{member.name}.{slot}"] = (
                    host if whole else host.reshape(member.param.shape)
                )
    return state


def load_state(optimizer: StoredOptimizer, state: Mapping[str, Any]) -> None:
    """See `extensor.optim.Optimizer.load_state_dict`."""
    mine = optimizer.state_dict()
    stored = (np.ndarray, QuantArray)
    arrays = [{k: v for k, v in s.items() if isinstance(v, stored)} for s in (mine, state)]
    message = layout_error("this optimizer state", *arrays)
    if message:
        raise ValueError(message)
    scalars = {k: v for k, v in state.items() if not isinstance(v, stored)}
    for name in sorted(scalars.keys() | (mine.keys() - arrays[0].keys())):
        got, expected = scalars.get(name), mine.get(name)
        if type(got) is not type(expected) or (name == "optimizer" and got != expected):
            raise ValueError(
                f"this optimizer state does not fit: {name}: expected "
                f"{expected if name == 'optimizer' else type(expected).__name__}, got {got!r}; "
                "use the one this optimizer wrote"
            )
    options = [
        {name: scalars[f"group.{i}.{name}"] for name in group.options}
        for i, group in enumerate(optimizer.groups)
    ]
    for group_options in options:
        optimizer._check_options(group_options)
    for i, group in enumerate(optimizer.groups):
        group.base_lr, group.options = scalars[f"group.{i}.base_lr"], options[i]
        for member in group.members:
            member.step = scalars[f"step.{member.name}"]
            for slot in member.arrays:
                host = state[f"state.{member.name}.{slot}"]
                flat = host if isinstance(host, QuantArray) else host.reshape(-1)
                fresh = _moved(flat, get_backend("cpu"), member.param.device)
                if member.param.backend.xp is np:
                    member.arrays[slot] = fresh
                    continue
                old = member.arrays[slot]
                for array, values in zip(_parts(old), _parts(fresh), strict=True):
                    array[...] = values  # a captured step writes to these arrays


def _moved(stored: Stored, backend: Any, device: str) -> Stored:
    """A copy of what is stored on a backend, on a device."""
    return copy.deepcopy(wrap(stored, backend).to(device).data)


def _parts(stored: Stored) -> list[Array]:
    return list(stored.parts.values()) if isinstance(stored, QuantArray) else [stored]
