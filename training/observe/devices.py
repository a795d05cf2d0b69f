"""GPUs for runs: each run has a GPU of its own, whose seconds and joules are counted."""

from __future__ import annotations

import itertools
import os
from functools import cache
from typing import Any

from ..rundir import UsageError

__all__ = ["Place", "card", "environment", "nvml", "places", "visible"]

Place = str | None
"""A GPU as CUDA_VISIBLE_DEVICES names it; None for the device that a process has anyway."""


@cache
def nvml() -> Any:
    """The module pynvml, ready; None without the library or a GPU."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    return pynvml


def visible() -> tuple[str, ...]:
    """The GPUs that this process sees: of CUDA_VISIBLE_DEVICES, else all that NVML counts."""
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if listed is not None:  # CUDA, too, reads it up to the first that is no device
        names = (name.strip() for name in listed.split(","))
        return tuple(itertools.takewhile(lambda name: name not in ("", "-1"), names))
    library = nvml()
    return () if library is None else tuple(map(str, range(library.nvmlDeviceGetCount())))


def card(place: Place = None) -> Any:
    """NVML's handle of a GPU, the first visible one for None; None where there is none."""
    library, seen = nvml(), visible()
    name = place or (seen[0] if seen else None)
    if library is None or name is None:
        return None
    if name.isdigit():
        return library.nvmlDeviceGetHandleByIndex(int(name))
    return library.nvmlDeviceGetHandleByUUID(name)


def environment(place: Place) -> dict[str, str]:
    """What a process's environment needs so that it sees one GPU; CUDA then counts as NVML does."""
    if place is None:
        return {}
    return {"CUDA_VISIBLE_DEVICES": place, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


def places(gpus: int, jobs: int, device: str) -> list[Place]:
    """Where runs may be at once: so many on each of so many GPUs, or on a CPU.

    Raises:
        UsageError: for more GPUs than this process sees.
    """
    seen: tuple[Place, ...] = visible() if device != "cpu" else ()
    if gpus > max(len(seen), 1):
        found = "this experiment trains on the CPU" if device == "cpu" else f"it sees {len(seen)}"
        raise UsageError(
            f"--gpus: expected no more GPUs than this process sees, got {gpus}; {found}; the way "
            "out: a smaller number, or CUDA_VISIBLE_DEVICES"
        )
    return [*(seen[:gpus] or (None,))] * jobs
