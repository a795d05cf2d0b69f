"""Recorded calls of a step on the CPU, and the program that repeats them.

A step computes with `apply`, and each operation there is a call of a primitive's forward on arrays.
`Recording` notes these calls: which earlier result each array is, or that it comes from outside.
`Program` makes the same calls again in the same order, on new inputs. No tensor is made, nothing is
checked and no layer's Python runs, so the results are the step's own, bit for bit.

What Python computes beside the operations is not seen. Therefore a step is recorded twice and both
recordings must agree: the same operations with the same options, and the same arrays from outside.
An array that Python makes anew in each call is an error. Python that has to run
each time, such as appending to a cache, is given to `replayed`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from extensor.autograd.mode import MODE
from extensor.quant.array import QuantArray

__all__ = ["Program", "Recording", "recording", "refuse_in_capture", "replayed"]

Array = Any


@dataclass(frozen=True, eq=False)
class Call:
    """One call of a step.

    Attributes:
        name: of the operation, for errors.
        run: takes the arrays and gives the results, one array or a tuple.
        sources: for each array its number among all results, or the array itself.
        options: what ``run`` depends on beside the arrays.
        results: the numbers of the results.
    """

    name: str
    run: Callable[..., Any]
    sources: tuple[Any, ...]
    options: dict[str, Any]
    results: tuple[int, ...]

    @property
    def read(self) -> set[int]:
        """The numbers of the results that it reads."""
        return {source for source in self.sources if isinstance(source, int)}


class Recording:
    """The calls of one run of a step, in order.

    Args:
        inputs: the arrays that the step is given; the first results.
    """

    def __init__(self, inputs: Sequence[Array]) -> None:
        self.calls: list[Call] = []
        self.inputs = len(inputs)
        self._numbers = {id(array): i for i, array in enumerate(inputs)}
        self._kept: list[Array] = list(inputs)  # so that no other array gets the same id

    def add(
        self,
        name: str,
        run: Callable[..., Any],
        arrays: Sequence[Array],
        results: Sequence[Array],
        options: dict[str, Any],
    ) -> None:
        """Note a call that was made."""
        sources = tuple(self.number(array, array) for array in arrays)
        first = len(self._kept)
        self.calls.append(
            Call(name, run, sources, options, tuple(range(first, first + len(results))))
        )
        for number, array in enumerate(results, first):
            self._numbers[id(array)] = number
        self._kept.extend(results)

    def number(self, array: Array, otherwise: Any = None) -> Any:
        """The number of a result."""
        return self._numbers.get(id(array), otherwise)

    def refuse(self, what: str) -> None:
        """Raise the error of something that cannot be repeated."""
        raise RuntimeError(
            f"capture: {what}, which a recorded step cannot repeat; move it out of the step, or "
            "call the step without capture"
        )


class Program:
    """Calls that are made again on other inputs.

    Args:
        before: an earlier recording of the same step.
        recorded: the recording that is repeated.
        outputs: the arrays that the step gave in it.

    Raises:
        RuntimeError: where the two recordings differ, naming the operation.
    """

    def __init__(self, before: Recording, recorded: Recording, outputs: Sequence[Array]) -> None:
        _compare(before, recorded)
        numbers = []
        for array in outputs:
            if (number := recorded.number(array)) is None:
                recorded.refuse("the step's result is made by Python, not by an operation")
            numbers.append(number)
        self._run = _compiled(recorded, numbers)

    def __call__(self, inputs: Sequence[Array]) -> tuple[Array, ...]:
        """The outputs for these inputs, whose shapes are those of the recording."""
        with np.errstate(all="ignore"):
            found: tuple[Array, ...] = self._run(*inputs)
        return found


def _compiled(recorded: Recording, outputs: Sequence[int]) -> Callable[..., tuple[Array, ...]]:
    """The calls as straight-line Python, each result forgotten after its last use."""
    last = {number: at for at, call in enumerate(recorded.calls) for number in call.read}
    scope: dict[str, Any] = {}
    lines = [f"def run({', '.join(f'v{i}' for i in range(recorded.inputs))}):"]
    for at, call in enumerate(recorded.calls):
        scope[f"f{at}"] = call.run
        names = []
        for place, source in enumerate(call.sources):
            if not isinstance(source, int):
                scope[f"c{at}_{place}"] = source
            names.append(f"v{source}" if isinstance(source, int) else f"c{at}_{place}")
        made = "".join(f"v{number}, " for number in call.results)
        made = made[:-2] if len(call.results) == 1 else made
        lines.append(f"    {made}{' = ' if made else ''}f{at}({', '.join(names)})")
        dead = {n for n in call.read if last[n] == at} | {n for n in call.results if n not in last}
        if dead := dead - set(outputs):
            lines.append(f"    del {', '.join(f'v{number}' for number in sorted(dead))}")
    lines.append(f"    return ({''.join(f'v{number}, ' for number in outputs)})")
    exec("\n".join(lines), scope)
    run: Callable[..., tuple[Array, ...]] = scope["run"]
    return run


def _compare(before: Recording, recorded: Recording) -> None:
    names = [[call.name for call in side.calls] for side in (before, recorded)]
    if names[0] != names[1]:
        recorded.refuse("two calls of the step ran different operations")
    for one, two in zip(before.calls, recorded.calls, strict=True):
        if not _same(one.options, two.options):
            recorded.refuse(f"an option of {two.name} changed between two calls of the step")
        for a, b in zip(one.sources, two.sources, strict=True):
            if not _same(a, b):
                recorded.refuse(f"{two.name} reads an array that Python makes anew in each call")


def _same(a: Any, b: Any) -> bool:
    """Whether two calls were given the same: one object, or equal plain values."""
    if a is b:
        return True
    if type(a) is not type(b) or isinstance(a, QuantArray):
        return False
    if isinstance(a, np.ndarray):  # a number beside a tensor becomes an array in each call
        return a.size == b.size == 1 and a.dtype == b.dtype and a.tobytes() == b.tobytes()
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, (tuple, list)):
        return len(a) == len(b) and all(map(_same, a, b))
    return bool(a == b)


@contextmanager
def recording(inputs: Sequence[Array]) -> Iterator[Recording]:
    """Record what this thread computes from some arrays."""
    if MODE.recording is not None:
        MODE.recording.refuse("it calls another captured step")
    MODE.recording = found = Recording(inputs)
    try:
        yield found
    finally:
        MODE.recording = None


def replayed(name: str, run: Callable[..., Any], *arrays: Array) -> Any:
    """Python that a captured step runs again each time, such as appending to a cache.

    Args:
        name: for errors.
        run: takes arrays and gives an array, a tuple of them, or None. While it runs nothing is
            recorded.
        arrays: what it reads of the step's own results.

    Returns:
        What ``run`` gives.

    >>> from extensor.autograd.recording import replayed
    >>> replayed("twice", lambda x: 2 * x, et.ones(2).data)
    array([2., 2.], dtype=float32)
    """
    recorded, MODE.recording = MODE.recording, None
    try:
        found = run(*arrays)
    finally:
        MODE.recording = recorded
    if recorded is not None:
        results = () if found is None else found if isinstance(found, tuple) else (found,)
        recorded.add(name, run, arrays, results, {})
    return found


def refuse_in_capture(what: str) -> None:
    """Raise an error while a captured step is recorded.

    Args:
        what: cannot be repeated, and why: "...", which a recorded step cannot repeat.

    Raises:
        RuntimeError: while this thread records.

    >>> from extensor.autograd.recording import refuse_in_capture
    >>> refuse_in_capture("the order of the layers is drawn")
    """
    if MODE.recording is not None:
        MODE.recording.refuse(what)
