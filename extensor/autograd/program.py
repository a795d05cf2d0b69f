"""The program that repeats a step's recorded calls on the CPU.

The same calls are made again in the same order, on new inputs. No tensor is made, nothing is
checked and no layer's Python runs, so the results are the step's own, bit for bit.

What Python computes beside the operations is not seen. Therefore a step is recorded twice and both
recordings must agree: the same operations with the same options, and the same arrays from outside.
An array that Python makes anew in each call is an error.

The program's first run asks the backend which kernels an operation calls. Where these calls are all
of the operation, and its result is small, the operation's memory is kept and the kernels are called
again without Python. Neighbouring calls become one. Everything else is straight-line Python.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from extensor.autograd.recording import Call, Recording
from extensor.backends.capture import Replay
from extensor.backends.protocol import Backend
from extensor.quant.array import QuantArray

__all__ = ["Program"]

Array = Any
Span = tuple[int, int]

_KEPT = 1 << 20
"""Bytes of a result that is kept between runs; calls for larger ones hardly notice Python."""
_SHAPED_BY_FIRST = ("scaled_dot_product_attention",)
"""Operations whose result has the shape of their first operand, however the others grow."""


class Program:
    """Calls that are made again on other inputs; one thread at a time runs them.

    Args:
        before: an earlier recording of the same step.
        recorded: the recording that is repeated.
        outputs: the arrays that the step gave in it.
        backend: computes the step.

    Raises:
        RuntimeError: where the two recordings differ, naming the operation.
    """

    def __init__(
        self, before: Recording, recorded: Recording, outputs: Sequence[Array], backend: Backend
    ) -> None:
        _compare(before, recorded)
        self._outputs: list[int] = []
        for array in outputs:
            if (number := recorded.number(array)) is None:
                recorded.refuse("the step's result is made by Python, not by an operation")
            self._outputs.append(number)
        self._recorded: Recording | None = recorded
        self._backend = backend
        self._run: Callable[..., tuple[Array, ...]] | None = None
        self._lock = threading.Lock()

    def __call__(self, inputs: Sequence[Array]) -> tuple[Array, ...]:
        """Copies of the outputs for these inputs, whose shapes are those of the recording."""
        with self._lock, np.errstate(all="ignore"):  # the next run writes to the same memory
            if self._run is None:
                assert self._recorded is not None
                writer = _Writer(self._recorded, self._outputs, self._backend)
                found = writer.run(inputs)
                self._run, self._recorded = writer.compiled(), None
            else:
                found = self._run(*inputs)
            return tuple([array.copy() for array in found])


class _Writer:
    """Runs the calls once, and writes what repeats them."""

    def __init__(self, recorded: Recording, outputs: Sequence[int], backend: Backend) -> None:
        self.calls, self.inputs = recorded.calls, recorded.inputs
        self.outputs, self.backend = outputs, backend
        self.made: dict[int, Array] = {}  # by Python in each run, or given
        self.kept: dict[int, Array] = {}  # memory of its own; of what Python makes, a copy
        self.copied: set[int] = set()  # made by Python, and read from the copy
        self.growing: set[int] = set()
        self.steps: list[Replay | Call] = []

    def run(self, inputs: Sequence[Array]) -> tuple[Array, ...]:
        """Run the calls; the outputs."""
        self._keep(dict(enumerate(inputs)))
        for call in self.calls:
            self._one(call)
        return tuple(self.kept.get(n, self.made.get(n)) for n in self.outputs)

    def _keep(self, made: dict[int, Array]) -> None:
        """Note what Python gives in each run."""
        self.made.update(made)
        for number, array in made.items():
            if isinstance(array, np.ndarray) and array.nbytes <= _KEPT:
                self.kept[number] = array.copy(order="K")

    def _one(self, call: Call) -> None:
        growing = bool(call.read & self.growing)
        if call.python or growing or not self.kept.keys() >= call.read:
            arrays = [self.made.get(s, self.kept.get(s)) if isinstance(s, int) else s
                      for s in call.sources]  # fmt: skip
            found = call.run(*arrays)
        else:
            arrays = [self.kept[s] if isinstance(s, int) else s for s in call.sources]
            found, replay = self.backend.noted(lambda: call.run(*arrays))
            if self._in_core(call, arrays, found, replay):
                return
        made = found if len(call.results) != 1 or isinstance(found, tuple) else (found,)
        results = dict(zip(call.results, () if found is None else made, strict=True))
        if call.grows or (growing and call.name not in _SHAPED_BY_FIRST):
            self.growing.update(results)
            self.made.update(results)
        else:
            self._keep(results)
        self.steps.append(call)

    def _in_core(
        self, call: Call, arrays: Sequence[Any], result: Any, replay: Replay | None
    ) -> bool:
        """Whether a call that was made is a view, or kernels that need no Python, and no more."""
        if replay is None or not isinstance(result, np.ndarray) or result.nbytes > _KEPT:
            return False
        known = [_span(array) for array in arrays if isinstance(array, np.ndarray)]
        if replay.writes:
            if not _complete(replay, known, result):
                return False
        elif not _within(_span(result), known):
            return False
        (number,) = call.results
        self.kept[number] = result
        self.copied |= call.read & self.made.keys()
        if not replay.writes:
            return True
        if self.steps and not isinstance(self.steps[-1], Call):
            self.steps[-1].extend(replay)
        else:
            self.steps.append(replay)
        return True

    def compiled(self) -> Callable[..., tuple[Array, ...]]:
        """The steps as straight-line Python, each array forgotten after its last use."""
        last: dict[int, int] = {}
        for at, step in enumerate(self.steps):
            if isinstance(step, Call):
                last.update(dict.fromkeys(step.read & self.made.keys(), at))
        scope: dict[str, Any] = {"copyto": np.copyto}
        lines = [f"def run({', '.join(f'v{i}' for i in range(self.inputs))}):"]
        lines += self._copies(range(self.inputs), scope)
        for at, step in enumerate(self.steps):
            scope[f"f{at}"] = step if not isinstance(step, Call) else step.run
            if not isinstance(step, Call):
                lines.append(f"    f{at}()")
                continue
            names = []
            for place, source in enumerate(step.sources):
                if isinstance(source, int) and source in self.made:
                    names.append(f"v{source}")
                    continue
                names.append(f"c{at}_{place}")
                scope[names[-1]] = self.kept[source] if isinstance(source, int) else source
            made = "".join(f"v{number}, " for number in step.results)
            made = made[:-2] if len(step.results) == 1 else made
            lines.append(f"    {made}{' = ' if made else ''}f{at}({', '.join(names)})")
            lines += self._copies(step.results, scope)
            dead = {n for n in step.read if last.get(n) == at}
            dead |= {n for n in step.results if n not in last}
            if dead := dead - set(self.outputs):
                lines.append(f"    del {', '.join(f'v{number}' for number in sorted(dead))}")
        given = []
        for number in self.outputs:
            given.append(f"v{number}" if number in self.made else f"o{number}")
            scope[f"o{number}"] = self.kept.get(number)
        lines.append(f"    return ({''.join(f'{name}, ' for name in given)})")
        exec("\n".join(lines), scope)
        run: Callable[..., tuple[Array, ...]] = scope["run"]
        return run

    def _copies(self, numbers: Iterable[int], scope: dict[str, Any]) -> list[str]:
        """Lines that bring to kernels what Python made."""
        chosen = sorted(self.copied.intersection(numbers))
        scope.update({f"k{number}": self.kept[number] for number in chosen})
        return [f"    copyto(k{number}, v{number})" for number in chosen]


def _span(array: Array) -> Span:
    """The first byte of an array's memory, and the one after the last."""
    low, high = np.lib.array_utils.byte_bounds(array)
    return int(low), int(high)


def _within(span: Span, known: Sequence[Span]) -> bool:
    return any(low <= span[0] and span[1] <= high for low, high in known)


def _complete(replay: Replay, known: Sequence[Span], result: Array) -> bool:
    """Whether a replay makes a result again from arrays that stay where they are."""
    seen = list(known)
    for reads, writes in zip(replay.reads, replay.writes, strict=True):
        if not all(_within(span, seen) for span in reads):
            return False
        seen.extend(writes)
    if not _within(_span(result), [span for writes in replay.writes for span in writes]):
        return False
    expected = result.copy()
    others = np.frombuffer(expected.tobytes(), np.uint8) ^ np.uint8(255)  # every bit is another
    result[...] = others.view(result.dtype).reshape(result.shape)
    replay()
    if result.tobytes() == expected.tobytes():
        return True
    result[...] = expected
    return False


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
