"""A step being recorded into a CUDA graph: see `extensor.backends.recording`.

Memory that the graph's steps share is made while recording and written afterwards, before the first
repetition: a fill inside would be repeated too. It comes from a pool of its own: in the step's pool
it could lie where an array lay that the step dropped before, and each repetition writes that array
again. The host's numbers lie in rows, one for each of the
next steps as far as they can be foretold; the graph's first kernel takes the next row, so that a
repetition needs no copy unless the host decided otherwise than foretold.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from extensor.backends.recording import Mirror, Mirrors
from extensor_cuda.jit import Source, launch
from extensor_cuda.kernels.optimizer import optimizer
from extensor_cuda.memory import allocate

__all__ = ["Recording", "clock_of", "current", "source"]

Array = Any

WIDTH, ROWS = 256, 256
"""Numbers of the host in a recording, and steps that are foretold at most."""
COUNTERS = 1 << 15
"""In one piece of memory, so that one copy reads many."""
NULL = np.uint64(0)

_active = threading.local()


def current() -> Recording | None:
    """The recording under way in this thread."""
    return getattr(_active, "recording", None)


@cache
def source() -> Source:
    """The program of the small kernels."""
    return Source.read(Path(__file__).parent / "kernels" / "optimizer" / "step_state.cu", {})


def clock_of(streams: Sequence[Any]) -> Any:
    """The step number that random bits take from the device; a null pointer outside a recording.

    Raises:
        RuntimeError: while recording, for streams whose step nobody counts: they would draw the
            same bits in each repetition.
    """
    drawn = [stream for stream in streams if stream is not None]
    recording = current()
    if recording is None or not drawn:
        return NULL
    clock = drawn[0].clock
    if clock is None or any(stream.clock is not clock for stream in drawn):
        raise RuntimeError(
            "random bits of a stream without a clock would repeat in each repetition of the step; "
            "round to nearest there, or draw with a stream of a RecipeState"
        )
    return recording.cell(
        ("step", id(clock)), np.uint64, lambda: clock.step, lambda ahead: clock.step + ahead
    )


class Recording:
    """Implements `extensor.backends.recording.Recording` on cupy.

    Args:
        xp: cupy.
        live: whether the step runs as it is recorded.
    """

    def __init__(self, xp: Any, live: bool = False) -> None:
        self.xp, self.live = xp, live
        self.replays = 0
        self._apart = partial(allocate, xp, xp.cuda.MemoryPool())
        self._initial: list[tuple[Array, np.ndarray]] = []
        self._kept: list[Array] = []  # what the graph alone may refer to
        self._mirrors: list[tuple[Mirrors, Mirror]] = []
        self._repeat: list[Callable[[], None]] = []
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
        self._foretold: np.ndarray = np.zeros((0, WIDTH), np.uint64)
        self._after = np.zeros(WIDTH, np.uint64)  # what was foretold of the step after those
        self._next = 0

    def begin(self) -> None:
        """The first of what is recorded."""
        _active.recording = self
        if self.live:
            return
        numbers = self._rows, self._now, self._position
        launch(source(), "advance", 1, WIDTH, *numbers, np.int32(WIDTH))

    def end(self, failed: bool) -> None:
        """Nothing more is recorded."""
        _active.recording = None
        if failed:
            for call in self._failure:
                call()
            return
        for array, initial in self._initial:
            self.write(array, initial)
        self._initial.clear()

    def warm(self) -> None:
        """Run what no live step runs, so that it is loaded before something is recorded."""
        rows, now = (self.xp.zeros(WIDTH, dtype=np.uint64) for _ in range(2))
        position = self.xp.zeros((), dtype=np.uint32)
        launch(source(), "advance", 1, WIDTH, rows, now, position, np.int32(WIDTH))

    # --- what a step asks for ---

    def persistent(self, initial: np.ndarray) -> Array:
        """See the protocol."""
        array = self._lasting(initial.shape, initial.dtype)
        if self.live:
            self.write(array, initial)
        else:
            self._initial.append((array, initial))
        return array

    def _lasting(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """Memory that nothing else of the step lies in, not even before or after."""
        with self.xp.cuda.using_allocator(self._apart):
            array = self.xp.empty(shape, dtype=dtype)
        self._kept.append(array)
        return array

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
        ahead: Callable[[int], float] | None = None,
    ) -> Array:
        """See the protocol."""
        if key not in self._cells:
            at = len(self._cells)
            if at == WIDTH:
                raise RuntimeError(
                    f"capture: the step reads more than {WIDTH} numbers of the host; use fewer "
                    "parameter groups"
                )
            place = self._now[at : at + 1].view(dtype)[0:1].reshape(())
            foretell = ahead or (lambda steps: read())
            self._cells[key] = (place, at, np.dtype(dtype), read, foretell)
            if self.live:
                self.write(place, np.array(read(), dtype))
        return self._cells[key][0]

    def frozen(self, name: str, read: Callable[[], object]) -> None:
        """See the protocol."""
        self._frozen.append((name, read, read()))

    def mirror(self, owner: Mirrors, mirror: Mirror) -> None:
        """See the protocol."""
        owner.add(mirror)
        self._mirrors.append((owner, mirror))

    def watch(self, bad: Array, error: Callable[[], Exception]) -> None:
        """See the protocol."""
        flag = self.persistent(np.zeros((), np.uint32))
        self._checks.append((flag, error))
        bad = self.xp.ascontiguousarray(bad)
        launch(source(), "watch", 1, 256, bad, np.int64(bad.size), flag, self.stop)

    def finite(self, arrays: Sequence[Array], error: Callable[[int], Exception] | None) -> Array:
        """See the protocol."""
        xp, count = self.xp, len(arrays)
        if error is None:
            flags = xp.zeros(count + 1, dtype=np.uint32)
            optimizer.find_nonfinite(arrays, flags, NULL, xp)
            return flags[count:].reshape(())
        flags = self.persistent(np.zeros(count + 1, np.uint32))
        optimizer.find_nonfinite(arrays, flags, self.stop, xp)

        def of_the_first() -> Exception:
            return error(int(flags.get()[:count].argmax()))

        self._checks.append((flags[count:], of_the_first))
        return flags[count:].reshape(())

    def count(self, made: Array, bad: Array) -> None:
        """See the protocol."""
        launch(source(), "count", 1, 1, made, bad, self.stop)

    def rescale(self, state: Array, bad: Array, rule: Sequence[float]) -> None:
        """See the protocol."""
        numbers = (np.float64(number) for number in rule)
        launch(source(), "rescale", 1, 1, state, bad, self.stop, *numbers)

    def counters(self, number: int) -> tuple[Array, int, int]:
        """So many uint64 counters that all repetitions add to, and where `read_counters` has them.

        Returns:
            The counters, the number of the memory that holds them, and their place in it.
        """
        if not self._chunks or self._used + number > len(self._chunks[-1]):
            zeros = np.zeros(max(number, COUNTERS), np.uint64)
            self._chunks.append(self.persistent(zeros))
            self._read.append((-1, zeros))
            self._used = 0
        start, self._used = self._used, self._used + number
        return self._chunks[-1][start : self._used], len(self._chunks) - 1, start

    def read_counters(self, chunk: int) -> np.ndarray:
        """What counters hold; waits for the device, once for many."""
        if self._read[chunk][0] != self.replays:
            self._read[chunk] = self.replays, self.read(self._chunks[chunk])
        return self._read[chunk][1]

    def at_once(self, push: Callable[[], None]) -> None:
        """See the protocol."""
        if self.live:
            push()

    def adds_to(self, gradients: Sequence[Any]) -> None:
        """See the protocol."""
        for gradient in gradients:
            known = self._gradients.get(id(gradient), lambda: None)
            if gradient is not None and known() is not gradient:
                raise RuntimeError(
                    "capture: the step adds to gradients that were there before it, and each "
                    "repetition would add to those of now; forget them in the step, by "
                    "optimizer.zero_grad()"
                )

    def gives(self, gradients: Sequence[Any]) -> None:
        """See the protocol."""
        self._gradients |= {id(gradient): weakref.ref(gradient) for gradient in gradients}

    def on_repeat(self, call: Callable[[], None]) -> None:
        """See the protocol."""
        self._repeat.append(call)

    def on_failure(self, call: Callable[[], None]) -> None:
        """See the protocol."""
        self._failure.append(call)

    # --- around a repetition ---

    def before(self) -> None:
        """Give the device what the host decides of the next step.

        Raises:
            RuntimeError: if something changed that was recorded as it was.
        """
        for name, read, recorded in self._frozen:
            if (now := read()) != recorded:
                raise RuntimeError(
                    f"capture: {name} was {recorded!r} when the step was recorded and is {now!r} "
                    "now; record it again with a new extensor.capture(step)"
                )
        for owner, mirror in self._mirrors:
            owner.settle(but=mirror)
            mirror.before()
        self._foretell()

    def after(self) -> None:
        """Count a repetition."""
        self.replays += 1
        for _, mirror in self._mirrors:
            mirror.after()
        for call in self._repeat:
            call()

    def settle(self) -> None:
        """Bring the host's numbers up to date; waits for the device."""
        self.check()
        for _, mirror in self._mirrors:
            mirror.settle()

    def check(self) -> None:
        """Raise what a step found; waits for the device.

        Raises:
            Exception: the first error that `watch` or `finite` was given and that happened.
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

    def _foretell(self) -> None:
        """See that the next row is what the host says; write rows where it is not."""
        if not self._cells:
            return
        row = self._row(0)
        if self._next < len(self._foretold):
            right = bool((self._foretold[self._next] == row).all())
        else:
            right = bool((self._after == row).all())
        if not right or self._next == len(self._foretold):
            # Twice as far as the last time while that was right, from the next step on if not.
            count = min(ROWS, 2 * len(self._foretold)) if right else 1
            rows = np.stack([row, *(self._row(steps) for steps in range(1, count + 1))])
            self._foretold, self._after = rows[:count], rows[count]
            self.write(self._rows[:count], self._foretold)
            self._position.fill(0)
            self._next = 0
        self._next += 1

    def _row(self, ahead: int) -> np.ndarray:
        """The host's numbers, or what they will be so many steps on."""
        row = np.zeros(WIDTH, np.uint64)
        for _, at, dtype, read, foretell in self._cells.values():
            row[at : at + 1].view(dtype)[0] = foretell(ahead) if ahead else read()
        return row
