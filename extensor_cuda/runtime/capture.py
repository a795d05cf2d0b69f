"""The state of a step being captured into a CUDA graph: see `extensor.backends.capture`.

Memory that all replays share is made during the capture and written after it, before the first
replay: a fill inside the capture would be replayed too. This memory comes from a pool of its own.
In the step's pool it could lie where the step dropped an array before, which each replay writes
again.

The host's numbers lie in rows, one row for each of the next steps as far as they can be predicted.
The graph's first kernel takes the next row, so that a replay needs no copy unless the host decided
otherwise than predicted.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from extensor.backends.capture import HostMirror, HostMirrors
from extensor.errors import CaptureError
from extensor.random import DeviceClock, Stream
from extensor_cuda.runtime.compile import Source
from extensor_cuda.runtime.launch import launch
from extensor_cuda.runtime.memory import allocate

__all__ = [
    "FindNonfinite",
    "StepCapture",
    "clock_of",
    "current_capture",
    "random_arguments",
    "source",
]

Array = Any
FindNonfinite = Callable[[Sequence[Array], Array, Any, Any], None]
"""Called as (arrays, flags, stop, xp): raises flags[i] where array i holds NaN or infinity, and
then the last flag and ``stop``."""

WIDTH, ROWS = 256, 256
"""Numbers of the host in a capture, and steps of lookahead at most."""
COUNTERS = 1 << 15
"""How many counters share an allocation, so that one copy reads many."""

_active = threading.local()


def current_capture() -> StepCapture | None:
    """The capture under way in this thread."""
    return getattr(_active, "capture", None)


@cache
def source() -> Source:
    """The program of a capture's own small kernels."""
    return Source.read(Path(__file__).parents[1] / "kernels" / "optim" / "step_state.cu", {})


def clock_of(streams: Sequence[Any]) -> Array | None:
    """The step number on the device that random bits depend on; None if the host has it.

    Raises:
        RuntimeError: in a capture, for streams without a clock: each replay would draw the same
            bits.
    """
    drawn = [stream for stream in streams if stream is not None]
    capture = current_capture()
    clock = drawn[0].clock if drawn else None
    given = isinstance(clock, DeviceClock)
    if not drawn or not (given or capture):
        return None
    if clock is None or any(stream.clock is not clock for stream in drawn):
        raise RuntimeError(
            "random bits of a stream without a clock would be the same in each replay of the step; "
            "round to nearest there, or draw with a stream of a RecipeState"
        )
    if given:
        return clock.array
    assert capture is not None
    past = drawn[0].step - clock.step  # updates of this captured step before the draw
    return capture.cell(
        ("step", id(clock), past),
        np.uint64,
        lambda: clock.step + past,
        lambda ahead: clock.step + past + ahead,
    )


def random_arguments(*streams: Stream | None) -> list[Any]:
    """What kernels are told of the random bits of streams: `clock_of`, and four words of each."""
    words: list[int] = []
    for stream in streams:
        words += (0, 0, 0, 0) if stream is None else (*stream.key, *stream.counter_high)
    return [clock_of(streams), *map(np.uint32, words)]


class StepCapture:
    """Implements `extensor.backends.capture.StepCapture` on cupy.

    Args:
        xp: cupy.
        find_nonfinite: launches the kernel that looks for NaN and infinity.
        warm_up: whether the step runs now, instead of being captured.
    """

    def __init__(self, xp: Any, find_nonfinite: FindNonfinite, warm_up: bool = False) -> None:
        self.xp, self.warm_up = xp, warm_up
        self._find_nonfinite = find_nonfinite
        self.replays = 0
        self._apart = partial(allocate, xp, xp.cuda.MemoryPool())
        self._zeros: dict[int, Array] = {}
        self._initial: list[tuple[Array, np.ndarray]] = []
        self._kept: list[Array] = []  # what the graph alone may refer to
        self._mirrors: list[tuple[HostMirrors, HostMirror]] = []
        self._on_replay: list[Callable[[], None]] = []
        self._gradients: dict[int, Callable[[], Any]] = {}
        self._failure: list[Callable[[], None]] = []
        self._frozen: list[tuple[str, Callable[[], object], object]] = []
        self._checks: list[tuple[Array, Callable[[], Exception]]] = []
        self._cells: dict[object, tuple[Array, int, Any, Callable[[], float], Any]] = {}
        self._rows = self._lasting((ROWS, WIDTH), np.uint64)
        self._now = self.persistent(np.zeros(WIDTH, np.uint64))
        self._position = self.persistent(np.zeros((), np.uint32))
        self.stop = self.persistent(np.zeros((), np.uint32))
        self._chunks: list[Array] = []
        self._read: list[tuple[int, np.ndarray]] = []
        self._used = 0
        self._predicted: np.ndarray = np.zeros((0, WIDTH), np.uint64)
        self._after = np.zeros(WIDTH, np.uint64)  # predicted for the step after those
        self._next = 0

    def begin(self) -> None:
        """Start the capture; the step is run after this."""
        _active.capture = self
        if self.warm_up:
            return
        numbers = self._rows, self._now, self._position
        launch(source(), "advance", 1, WIDTH, *numbers, np.int32(WIDTH))

    def end(self, failed: bool) -> None:
        """End the capture, and give persistent memory its first values."""
        _active.capture = None
        if failed:
            for call in self._failure:
                call()
            return
        for array, initial in self._initial:
            self.write(array, initial)
        self._initial.clear()

    def load(self) -> None:
        """Run the kernel that no warm-up runs, so that it is loaded before a capture."""
        rows, now = (self.xp.zeros(WIDTH, dtype=np.uint64) for _ in range(2))
        position = self.xp.zeros((), dtype=np.uint32)
        launch(source(), "advance", 1, WIDTH, rows, now, position, np.int32(WIDTH))

    # --- called by the step ---

    def persistent(self, initial: np.ndarray) -> Array:
        """See the protocol."""
        array = self._lasting(initial.shape, initial.dtype)
        if self.warm_up:
            self.write(array, initial)
        else:
            self._initial.append((array, initial))
        return array

    def _lasting(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """Memory apart from the step's pool: nothing of the step lies there at any time."""
        with self.xp.cuda.using_allocator(self._apart):
            array = self.xp.empty(shape, dtype=dtype)
        self._kept.append(array)
        return array

    def zeros(self, count: int) -> Array:
        """So many uint32 zeros that every launch of the step leaves as it found them."""
        if count not in self._zeros:
            self._zeros[count] = self.persistent(np.zeros(count, np.uint32))
        return self._zeros[count]

    def write(self, array: Array, values: np.ndarray) -> None:
        """See the protocol."""
        array[...] = self.xp.asarray(values)

    def read(self, array: Array) -> np.ndarray:
        """See the protocol."""
        self.check()
        return np.asarray(array.get())

    def cell(
        self,
        key: object,
        dtype: Any,
        read: Callable[[], float],
        lookahead: Callable[[int], float] | None = None,
    ) -> Array:
        """See the protocol."""
        if key not in self._cells:
            at = len(self._cells)
            if at == WIDTH:
                raise CaptureError(
                    f"capture: the step reads more than {WIDTH} numbers of the host; use fewer "
                    "parameter groups"
                )
            place = self._now[at : at + 1].view(dtype)[0:1].reshape(())
            predict = lookahead or (lambda steps: read())
            self._cells[key] = (place, at, np.dtype(dtype), read, predict)
            if self.warm_up:
                self.write(place, np.array(read(), dtype))
        return self._cells[key][0]

    def keep(self, *arrays: Array) -> None:
        """See the protocol."""
        self._kept.extend(arrays)

    def frozen(self, name: str, read: Callable[[], object]) -> None:
        """See the protocol."""
        self._frozen.append((name, read, read()))

    def mirror(self, owner: HostMirrors, mirror: HostMirror) -> None:
        """See the protocol."""
        owner.add(mirror)
        self._mirrors.append((owner, mirror))

    def watch(self, bad: Array, error: Callable[[], Exception]) -> None:
        """See the protocol."""
        flag = self.persistent(np.zeros((), np.uint32))
        self._checks.append((flag, error))
        bad = self.xp.ascontiguousarray(bad)
        launch(source(), "watch", 1, 256, bad, np.int64(bad.size), flag, self.stop)

    def nonfinite(self, arrays: Sequence[Array], error: Callable[[int], Exception] | None) -> Array:
        """See the protocol."""
        xp, count = self.xp, len(arrays)
        if error is None:
            flags = xp.zeros(count + 1, dtype=np.uint32)
            self._find_nonfinite(arrays, flags, None, xp)
            return flags[count:].reshape(())
        flags = self.persistent(np.zeros(count + 1, np.uint32))
        self._find_nonfinite(arrays, flags, self.stop, xp)

        def of_the_first() -> Exception:
            return error(int(flags.get()[:count].argmax()))

        self._checks.append((flags[count:], of_the_first))
        return flags[count:].reshape(())

    def count_update(self, made: Array, bad: Array) -> None:
        """See the protocol."""
        launch(source(), "count", 1, 1, made, bad, self.stop)

    def rescale(self, state: Array, bad: Array, rule: Sequence[float]) -> None:
        """See the protocol."""
        launch(source(), "rescale", 1, 1, state, bad, self.stop, *map(np.float64, rule))

    def counters(self, number: int) -> tuple[Array, int, int]:
        """So many uint64 counters that all replays add to, and where `read_counters` has them.

        Returns:
            The counters, the number of the chunk that holds them, and their place in it.
        """
        if not self._chunks or self._used + number > len(self._chunks[-1]):
            zeros = np.zeros(max(number, COUNTERS), np.uint64)
            self._chunks.append(self.persistent(zeros))
            self._read.append((-1, zeros))
            self._used = 0
        start, self._used = self._used, self._used + number
        return self._chunks[-1][start : self._used], len(self._chunks) - 1, start

    def read_counters(self, chunk: int) -> np.ndarray:
        """A chunk's counters on the host; waits for the device once for a whole chunk."""
        if self._read[chunk][0] != self.replays:
            self._read[chunk] = self.replays, self.read(self._chunks[chunk])
        return self._read[chunk][1]

    def in_warm_up(self, push: Callable[[], None]) -> None:
        """See the protocol."""
        if self.warm_up:
            push()

    def require_own_gradients(self, gradients: Sequence[Any]) -> None:
        """See the protocol."""
        for gradient in gradients:
            known = self._gradients.get(id(gradient), lambda: None)
            if gradient is not None and known() is not gradient:
                raise CaptureError(
                    "capture: the step adds to gradients that were there before it, and each "
                    "replay would add to those of the capture; reset them in the step, by "
                    "optimizer.zero_grad()"
                )

    def own_gradients(self, gradients: Sequence[Any]) -> None:
        """See the protocol."""
        self._gradients |= {id(gradient): weakref.ref(gradient) for gradient in gradients}

    def on_replay(self, call: Callable[[], None]) -> None:
        """See the protocol."""
        self._on_replay.append(call)

    def on_failure(self, call: Callable[[], None]) -> None:
        """See the protocol."""
        self._failure.append(call)

    # --- around a replay ---

    def before(self) -> None:
        """Give the device the host's numbers of the next step.

        Raises:
            RuntimeError: if a frozen value has changed.
        """
        for name, read, captured in self._frozen:
            if (now := read()) != captured:
                raise CaptureError(
                    f"capture: {name} was {captured!r} when the step was captured and is {now!r} "
                    "now; capture it again with a new extensor.capture(step)"
                )
        for owner, mirror in self._mirrors:
            owner.settle(but=mirror)
            mirror.before()
        self._write_rows()

    def after(self) -> None:
        """Count a replay."""
        self.replays += 1
        for _, mirror in self._mirrors:
            mirror.after()
        for call in self._on_replay:
            call()

    def settle(self) -> None:
        """Bring the host's numbers up to date; waits for the device."""
        self.check()
        for _, mirror in self._mirrors:
            mirror.settle()

    def check(self) -> None:
        """Raise the error that a replay found; waits for the device.

        Raises:
            Exception: the first that happened of those given to `watch` and `nonfinite`.
        """
        if not int(self.stop):
            return
        for flag, error in self._checks:
            if int(flag.reshape(())):
                found = error()
                found.add_note(
                    "found in a captured step: since then no update was made; capture anew to go on"
                )
                raise found

    def _write_rows(self) -> None:
        """Write rows of the host's numbers, unless the next row on the device is right already."""
        if not self._cells:
            return
        row, there = self._row(0), self._next < len(self._predicted)
        right = bool(((self._predicted[self._next] if there else self._after) == row).all())
        if not right or self._next == len(self._predicted):
            # Twice as far as the last time while that was right, from the next step on if not.
            count = min(ROWS, 2 * len(self._predicted)) if right else 1
            rows = np.stack([row, *(self._row(steps) for steps in range(1, count + 1))])
            self._predicted, self._after = rows[:count], rows[count]
            self.write(self._rows[:count], self._predicted)
            self._position.fill(0)
            self._next = 0
        self._next += 1

    def _row(self, ahead: int) -> np.ndarray:
        """The host's numbers now, or their prediction so many steps ahead."""
        row = np.zeros(WIDTH, np.uint64)
        for _, at, dtype, read, predict in self._cells.values():
            row[at : at + 1].view(dtype)[0] = predict(ahead) if ahead else read()
        return row
