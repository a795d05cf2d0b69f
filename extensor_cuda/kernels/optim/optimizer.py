"""Steps of Adam, Lion and gradient descent on many parameters in one launch, to the CPU's bits.

Weights are float32, bfloat16 or in MX blocks, states of any kind in `extensor.optim.states`; narrow
ones are decoded, rounded stochastically and written by the same launch, where they lie.

And what a step does to all gradients: looking for NaN and infinity, scaling, the sum of squares;
and the largest magnitudes of weights.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from extensor.backends.capture import UpdateGuard
from extensor.backends.protocol import FiniteQuery
from extensor.backends.row_sums import RowSums
from extensor.dtypes import bfloat16
from extensor.optim.states import WEIGHT_SLOT, Blocks, Stored, block_spec
from extensor.quant.array import QuantArray
from extensor_cuda.kernels.quantize.quantize import plan_of, quantize_source
from extensor_cuda.runtime.capture import current_capture
from extensor_cuda.runtime.compile import Source
from extensor_cuda.runtime.launch import launch

__all__ = [
    "ADAM",
    "LION",
    "SGD",
    "Kernel",
    "Update",
    "find_nonfinite",
    "finite",
    "largest",
    "scale",
    "source",
    "square_sum",
    "step",
    "supports",
]

Array = Any
THREADS, PART = 256, 16384  # as in optimizer.cu

_FLOAT32, _BFLOAT16 = np.dtype(np.float32), np.dtype(bfloat16.numpy)
_STATIC = ("shrink", "take1", "keep2", "take2", "eps", "decay", "momentum", "nesterov")
_TENSOR = np.dtype(
    [(name, np.uint64) for name in ("weight", "grad", "first", "second")]
    + [(f"{name}_scales", np.uint64) for name in ("first", "second", "weight")]
    + [("slots", np.uint64)]
    + [(name, np.int64) for name in ("count", "start")]
    + [("shrink", np.float64)]
    + [(name, np.float32) for name in ("take1", "keep2", "take2", "eps", "decay", "momentum")]
    + [(name, np.uint32) for name in ("nesterov", "pace", "number", "narrow", "width")],
    align=True,
)
"""`Tensor` of optimizer.cuh."""
_PACE = ("correct", "widen", "step")  # `Row`


Kernel = tuple[str, tuple[str, ...]]
"""A kernel's name, and the columns of `_TENSOR` that each of its parts fills."""
ADAM: Kernel = ("adam", ("weight", "grad", "first", "second"))
LION: Kernel = ("lion", ("weight", "grad", "first"))
SGD: Kernel = ("sgd", ("weight", "grad", "first"))


@dataclass(frozen=True, eq=False)
class Update:
    """How an update of many tensors runs; see `Backend.adam_multi_tensor`.

    Attributes:
        guard: in a capture, what the device decides.
        check_finite: do nothing if a gradient holds NaN or infinity.
        cache: kept from call to call.
        numbers: each tensor's number in random bits.
        stop: uint32 of shape (), raised by the check; once it is, nothing is done.
    """

    guard: UpdateGuard | None = None
    check_finite: bool = False
    cache: dict[str, Any] | None = None
    numbers: Sequence[int] | int = 0
    stop: Array = None


_BITS = {"float32": 32, "bfloat16": 16, Blocks.row.name: 8}
_NARROW = {"float32": 0, "bfloat16": 1}  # `Tensor::narrow`; in blocks: 2


@cache
def source(states: str = "float32", weights: str = "float32", rows: bool = False) -> Source:
    """The program for a kind of state; that for float32 has what needs none, too.

    ``weights``: the narrowest: "bfloat16", or the format of those in blocks. ``rows``: whether a
    gradient is given by rows.
    """
    folder = Path(__file__).parent
    if states == weights == "float32" and not rows:
        return Source.read(folder / "optimizer.cu", {})
    numbers = {"STATES": _BITS[states], "NARROW": _NARROW.get(weights, 2), "ROWS": int(rows)}
    numbers["WEIGHT_SLOT"] = WEIGHT_SLOT
    macros = _codec(Blocks.row.name)
    macros |= {f"OPTIMIZER_{name}": str(number) for name, number in numbers.items()}
    for name, value in _codec(weights).items() if weights not in _NARROW else ():
        macros[name.replace("CODEC_", "OPTIMIZER_WEIGHT_")] = value
    return Source.read(folder / "optimizer_low_precision.cu", macros)


def _codec(form: str) -> dict[str, str]:
    """The quantizer's macros for blocks of a format."""
    spec = block_spec(form)
    plan = plan_of(spec, (spec.row.tile[1],))
    assert plan
    return dict(quantize_source(plan, "float32", "codes", True, False).macros)


def _kind(states: Sequence[Stored | None]) -> str:
    """Which of `extensor.optim.states.STATES` these are; float32 if there are none."""
    first = next((a for a in states if a is not None), None)
    if isinstance(first, QuantArray):
        return Blocks.row.name
    return "float32" if first is None else str(first.dtype.name)


def _narrowest(weights: Sequence[Any], table: np.ndarray) -> str:
    """How the narrowest weight is stored, as `source` takes it.

    Raises:
        ValueError: for blocks of several formats, which no launch takes.
    """
    in_blocks = np.flatnonzero(table["narrow"] > 1).tolist()
    found = {weights[i].spec.format for i in in_blocks}
    if len(found) > 1:
        raise ValueError(f"expected weights in blocks of one format, got {sorted(found)}")
    return found.pop() if found else list(_NARROW)[int(table["narrow"].max())]


def _addresses(arrays: Sequence[Array | None]) -> list[int]:
    return [0 if a is None else a.data.ptr for a in arrays]


def supports(array: Array) -> bool:
    """Whether the kernels read an array: contiguous float32 or bfloat16."""
    return bool(array.dtype in (_FLOAT32, _BFLOAT16) and array.flags.c_contiguous)


def _table(
    columns: Mapping[str, Sequence[Any]],
    cache: dict[str, Any] | None = None,
    numbers: Sequence[int] | int = 0,
) -> tuple[np.ndarray, int]:
    """A row for each tensor, and the blocks that work on them.

    ``columns`` are "grad" and others of `_TENSOR`'s first ones. The cache keeps the rows with the
    arrays that are no gradients, until these are others.
    """
    # Column by column: there are hundreds of tensors, and a GPU waits for this.
    stay = list(chain.from_iterable(a for name, a in columns.items() if name != "grad"))
    held = [] if cache is None else cache.get("arrays", [])
    if not stay or len(held) != len(stay) or not all(map(operator.is_, held, stay)):
        table = np.zeros(len(columns["grad"]), _TENSOR)
        table["number"] = numbers
        for name, arrays in columns.items():
            if any(isinstance(a, QuantArray) for a in arrays):
                table[f"{name}_scales"] = _addresses([getattr(a, "scales", None) for a in arrays])
                arrays = [getattr(a, "codes", a) for a in arrays]
            table[name] = _addresses(arrays)
        stored = columns.get("weight", columns["grad"])
        table["narrow"] = [2 if isinstance(a, QuantArray) else a.dtype == _BFLOAT16 for a in stored]
        table["count"] = [math.prod(a.shape) for a in stored]
        blocks = -(-table["count"] // PART)
        table["start"] = np.cumsum(blocks) - blocks
        cache = {} if cache is None else cache
        cache.update(arrays=stay, table=table, blocks=int(blocks.sum()))
    else:
        assert cache is not None
        cache["table"]["grad"] = _addresses(columns["grad"])
    return cache["table"], cache["blocks"]


def _paces(factors: Sequence[Mapping[str, float]]) -> tuple[list[int], list[int]]:
    """Which factors differ in what changes from step to step: each tensor's, and one of each."""
    seen: dict[Any, int] = {}
    which, first = [], []
    for i, mine in enumerate(factors):
        key = (mine["lr"], *(mine.get(name) for name in _PACE))
        if key not in seen:
            seen[key] = len(seen)
            first.append(i)
        which.append(seen[key])
    return which, first


def _pairs(paces: Sequence[Mapping[str, float]]) -> np.ndarray:
    return np.array([[mine.get(name, 1.0) for name in _PACE] for mine in paces], np.float64)


def step(
    kernel: Kernel,
    parts: Sequence[Sequence[Any]],
    factors: Sequence[Mapping[str, float]],
    update: Update,
    xp: Any,
) -> FiniteQuery:
    """Update all parameters in place, in one launch.

    Args:
        kernel: `ADAM`, `LION` or `SGD`.
        parts: arrays of each parameter that `supports` accepts, of one size, in the kernel's
            columns; weight and gradient of one dtype; states of any kind, the same in all parts. A
            gradient may be `RowSums`, of rows of a multiple of 4 values.
        factors: of each, as the optimizers make them. The rate lr / correct and what decoupled
            decay keeps, 1 - lr shrink, are computed in double from their parts on the device.
        update: how.
        xp: cupy.
    """
    entry, names = kernel
    columns = dict(zip(names, zip(*parts, strict=True), strict=False))
    rows = {i: g for i, g in enumerate(columns["grad"]) if isinstance(g, RowSums)}
    if rows:
        columns["grad"] = tuple(g.values if i in rows else g for i, g in enumerate(columns["grad"]))
    table, blocks = _table(columns, update.cache, update.numbers)
    table["slots"] = 0
    for i, g in rows.items():
        table["slots"][i], table["width"][i] = g.slots.data.ptr, g.shape[1]
    if not blocks:
        return lambda: [True] * len(parts)
    same = factors.count(factors[0]) == len(factors)
    for name in _STATIC:
        if name in factors[0]:
            table[name] = factors[0][name] if same else [mine[name] for mine in factors]
    which, first = _paces(factors[:1] if same else factors)
    table["pace"] = which[0] if same else which
    program = source(_kind(columns["first"]), _narrowest(columns["weight"], table), bool(rows))
    launched = program, entry, blocks, THREADS
    if update.guard is None:
        read = columns["grad"] if rows else None
        return _launch_eager(launched, table, [factors[i] for i in first], update, xp, read)
    _launch_captured(launched, table, first, update.guard)
    return list


Launched = tuple[Source, str, int, int]
"""A program, its kernel, blocks, and threads of one."""


def _launch_eager(
    launched: Launched,
    table: np.ndarray,
    paces: list[Mapping[str, float]],
    update: Update,
    xp: Any,
    grads: Sequence[Array] | None,
) -> FiniteQuery:
    """Upload the table of tensors with the numbers of this step, and launch.

    ``grads``: the arrays to be checked, where they are not those that the table's counts are of.
    """
    rows = _pairs(paces)
    rates = np.array([float(mine["lr"]) for mine in paces])
    sizes = np.cumsum([rows.nbytes, rates.nbytes])
    held = np.concatenate([a.view(np.uint8).reshape(-1) for a in (rows, rates, table)])
    there, number = xp.asarray(held), np.int32(len(table))
    on_device, rates = there[sizes[1] :], there[sizes[0] :]
    bad: Any = None
    found: FiniteQuery = list
    if update.check_finite:
        flags = xp.zeros(len(table) + 1, dtype=np.uint32)
        if grads is None:
            launch(source(), "finite", *launched[2:], on_device, number, flags, update.stop)
        else:
            find_nonfinite(grads, flags, update.stop, xp)
        bad, found = flags[len(table) :], _found(flags, xp)
    stop = bad if update.stop is None else update.stop
    alone = None, bad, stop, np.int32(1), np.int32(1)
    launch(*launched, on_device, number, rates, there, *alone)
    return found


def _launch_captured(
    launched: Launched, table: np.ndarray, first: Sequence[int], guard: UpdateGuard
) -> None:
    """Launch in a capture: numbers of the next updates lie on the device, pushed from the host."""
    capture = current_capture()
    assert capture is not None
    on_device = capture.persistent(table.view(np.uint8))
    if not guard.numbers:
        rows = capture.persistent(np.zeros((len(first), guard.most, len(_PACE))))

        def push() -> None:
            ahead = [guard.ahead(step) for step in range(guard.most)]
            made = [_pairs([factors[i] for i in first]) for factors in ahead]
            capture.write(rows, np.stack(made, axis=1))

        guard.numbers.append(rows)
        guard.pushes.append(push)
        capture.in_warm_up(push)
    moving = (guard.lr, guard.numbers[0], guard.made, guard.bad, capture.stop)
    lengths = np.int32(len(table)), np.int32(guard.most), np.int32(0)
    launch(*launched, on_device, lengths[0], *moving, *lengths[1:])


@cache
def _fetch_stream(xp: Any, device: int) -> Any:
    """A stream on which a result is fetched while the next kernels run."""
    return xp.cuda.Stream(non_blocking=True)


def _found(flags: Array, xp: Any) -> FiniteQuery:
    """What `find_nonfinite` raises, fetched without waiting for what is launched after it."""
    stream = _fetch_stream(xp, xp.cuda.runtime.getDevice())
    done = xp.cuda.Event(disable_timing=True)
    done.record()

    def each() -> list[bool]:
        stream.wait_event(done)
        return [not flag for flag in flags.get(stream=stream).tolist()[:-1]]

    return each


def _over(kernel: str, arrays: Sequence[Array], xp: Any, *more: Any) -> None:
    table, blocks = _table({"grad": arrays})
    if blocks:
        host, capture = table.view(np.uint8), current_capture()
        there = xp.asarray(host) if capture is None else capture.persistent(host)
        launch(source(), kernel, blocks, THREADS, there, np.int32(len(table)), *more)


def find_nonfinite(arrays: Sequence[Array], flags: Array, stop: Any, xp: Any) -> None:
    """Raise flags[i] where array i holds NaN or infinity, then the last flag and ``stop``."""
    _over("finite", arrays, xp, flags, stop)


def finite(arrays: Sequence[Array], xp: Any) -> list[bool]:
    """Whether each array is without NaN and infinity; waits for the GPU once."""
    flags = xp.zeros(len(arrays) + 1, dtype=np.uint32)
    find_nonfinite(arrays, flags, None, xp)
    return [not flag for flag in flags.get().tolist()[:-1]]


def largest(arrays: Sequence[Array], xp: Any) -> Array:
    """The bits of each array's largest finite magnitude, uint32; does not wait."""
    found = xp.zeros(len(arrays), dtype=np.uint32)
    _over("largest", arrays, xp, found)
    return found


def scale(arrays: Sequence[Array], factor: Any, xp: Any) -> None:
    """Multiply each array in place by a number, or by a float32 array of shape ()."""
    on_device = isinstance(factor, xp.ndarray)
    given = (factor, np.float32(0)) if on_device else (None, np.float32(factor))
    _over("scale", arrays, xp, *given)


def square_sum(arrays: Sequence[Array], xp: Any) -> Array:
    """The sum of all squares, float64 of shape (), in an order that depends on sizes alone."""
    blocks = sum(-(-a.size // PART) for a in arrays)
    partial, out = xp.empty(max(blocks, 1), dtype=np.float64), xp.empty((), dtype=np.float64)
    _over("squares", arrays, xp, partial)
    launch(source(), "total", 1, THREADS, partial, np.int64(blocks), out)
    return out
