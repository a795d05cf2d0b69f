"""The sizes from which each product's path is the faster one on this GPU, as measured once.

`extensor tune` (`extensor_cuda.matmul.tuning`) writes a table per GPU, driver and sources, and
nothing else does; without one a fixed default stands. A table decides which path a product takes.
That never changes the bits of quantized operands, nor how a kernel multiplies: its tiles, its order
of K and into how many splits K is cut follow from the shape alone. It may change sums: FP8's,
moved to float32 every 512, differ from cupy's of float32 values within the bounds that
`extensor_cuda.matmul.product` states.
"""

from __future__ import annotations

import hashlib
import json
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from extensor.backends.unsupported import Unsupported
from extensor_cuda.runtime.compile import cache_folder

__all__ = [
    "MIN_WORK",
    "PATHS",
    "always",
    "folder",
    "hopper_gap",
    "load",
    "min_work",
    "path_of",
    "refusal",
    "save",
    "source_digest",
]

MIN_WORK = 1 << 30
"""M N K below which a product is left to cupy without a table: launches take longer than it."""
PATHS = ("fused", "float scales", "expanded", "bf16")
"""How operands are made: the names of `extensor_cuda.matmul.prepare.PREPARERS`."""

_asked: list[int] = []


def folder() -> Path:
    """Where tables are kept: extensor/tune in the user's cache folder (XDG_CACHE_HOME)."""
    return cache_folder().parent / "tune"


@cache
def source_digest() -> str:
    """A digest of all kernels and of the Python that launches them."""
    here = Path(__file__).parents[1]
    files = sorted(p for p in here.rglob("*") if p.suffix in (".cu", ".cuh", ".py"))
    return hashlib.sha256(b"\0".join(p.read_bytes() for p in files)).hexdigest()[:16]


def path_of(gpu: str, driver: int) -> Path:
    """The table's file for a GPU's name and a driver's version."""
    return folder() / f"{re.sub(r'[^A-Za-z0-9]+', '-', gpu)}-{driver}-{source_digest()}.json"


def load(path: Path) -> dict[str, int] | None:
    """The least M N K of each path, from a table; None if there is none.

    A damaged table is warned of and counts as none.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))["min_work"]
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        found = error
    numbers = isinstance(found, dict) and all(isinstance(n, int) for n in found.values())
    if numbers and set(found) <= set(PATHS):
        return {path: max(n, 1) for path, n in found.items()}
    warnings.warn(
        f"{path} is no table of `extensor tune`; the defaults stand: run it again, or delete the "
        "file",
        RuntimeWarning,
        stacklevel=2,
    )
    return None


def save(path: Path, least: Mapping[str, int], about: Mapping[str, Any]) -> None:
    """Write a table with what was measured beside it, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".new")
    record = {"min_work": dict(least), **about}
    temporary.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    temporary.replace(path)
    _table.cache_clear()


@lru_cache(maxsize=64)
def _table(device: int) -> Mapping[str, int]:
    """The table of one of cupy's devices; empty where there is none."""
    import cupy

    runtime = cupy.cuda.runtime
    name = runtime.getDeviceProperties(device)["name"].decode()
    return load(path_of(name, runtime.driverGetVersion())) or {}


def min_work(path: str) -> int:
    """The M N K, 1 or more, from which a path pays: asked for, measured here, or `MIN_WORK`.

    A work of 0 says that a product has another kind of operand too: it has no such path.
    """
    if _asked:
        return _asked[-1]
    try:
        import cupy

        device = cupy.cuda.runtime.getDevice()
    except (ImportError, RuntimeError):  # cupy may be there without a driver
        return MIN_WORK
    return _table(device).get(path, MIN_WORK)


def hopper_gap(capability: str) -> Unsupported | None:
    """Why there are no tensor-core products on a GPU of a compute capability such as "90"."""
    if capability == "90":
        return None
    return Unsupported(
        f"compute capability {capability}; the tensor-core kernel is for 90 (H100, H200)"
    )


def refusal(path: str, work: int, capability: str) -> Unsupported | None:
    """Why a product of M N K = work does not take a path of `PATHS` on a GPU; None if it may."""
    if (gap := hopper_gap(capability)) is not None:
        return gap
    if work < (least := min_work(path)):
        return Unsupported(f"{work} multiplications, fewer than {least}")
    return None


@contextmanager
def always() -> Iterator[None]:
    """Within it every product takes its kernel, whatever its size."""
    _asked.append(1)
    try:
        yield
    finally:
        _asked.pop()
