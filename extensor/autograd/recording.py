"""Recorded calls of a step on the CPU.

A step computes with `apply`, and each operation there is a call of a primitive's forward on arrays.
`Recording` notes these calls: which earlier result each array is, or that it comes from outside.
`extensor.autograd.program` repeats them. Python that has to run each time, such as appending to a
cache, is given to `replayed`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from extensor.autograd.mode import MODE
from extensor.errors import CaptureError

__all__ = ["Call", "Recording", "recording", "refuse_in_capture", "replayed"]

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
        python: whether Python has to run each time.
        grows: whether the results may have another shape each time.
    """

    name: str
    run: Callable[..., Any]
    sources: tuple[Any, ...]
    options: dict[str, Any]
    results: tuple[int, ...]
    python: bool = False
    grows: bool = False

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
        **kind: bool,
    ) -> None:
        """Note a call that was made; ``kind`` are the last fields of `Call`."""
        sources = tuple(self.number(array, array) for array in arrays)
        first = len(self._kept)
        numbers = tuple(range(first, first + len(results)))
        self.calls.append(Call(name, run, sources, options, numbers, **kind))
        for number, array in enumerate(results, first):
            self._numbers[id(array)] = number
        self._kept.extend(results)

    def number(self, array: Array, otherwise: Any = None) -> Any:
        """The number of a result."""
        return self._numbers.get(id(array), otherwise)

    def forget(self) -> None:
        """Let the arrays go, and their numbers; the calls stay."""
        self._numbers.clear()
        self._kept.clear()

    def refuse(self, what: str) -> None:
        """Raise the error of something that cannot be repeated."""
        raise CaptureError(
            f"capture: {what}, which a recorded step cannot repeat; move it out of the step, or "
            "call the step without capture"
        )


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


def replayed(
    name: str, run: Callable[..., Any], *arrays: Array, grows: bool = False, python: bool = True
) -> Any:
    """Python that a captured step runs again each time, such as appending to a cache.

    Args:
        name: for errors.
        run: takes arrays and gives an array, a tuple of them, or None. While it runs nothing is
            recorded.
        arrays: what it reads of the step's own results.
        grows: whether its results may have another shape each time.
        python: False if kernels do all of its work, which may then be called alone.

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
        recorded.add(name, run, arrays, results, {}, python=python, grows=grows)
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
