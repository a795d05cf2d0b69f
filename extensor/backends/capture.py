"""The interface between a captured step and objects that keep numbers on the host.

A captured step (`extensor.capture`) runs its Python once. From then on the GPU replays what was
launched, so a number that Python would have changed must live on the GPU. There are three kinds:

- A *cell* holds what the host decides before each step: the step number, the learning rate. The
  capture reads it again before each replay.
- Device memory holds what the step itself decides: how many updates were made, the loss scale. The
  host's copy is a `HostMirror`, brought up to date when somebody asks.
- A *frozen* value must not change. It is checked before each replay.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

__all__ = ["Graph", "HostMirror", "HostMirrors", "Replay", "StepCapture", "UpdateGuard"]

Array = Any


class Graph(Protocol):
    """A step that a backend can replay without Python; `extensor.capture` calls these in order."""

    @property
    def nbytes(self) -> int:
        """Device memory that the step keeps: its inputs, all it makes, kernels' workspaces."""
        ...

    def run(self, step: Callable[[], Any]) -> Any:
        """Run the step as usual, in the graph's memory."""
        ...

    def warm_up(self, step: Callable[[], Any]) -> Any:
        """Run the step once with the kernels of a replay, so that each of them is compiled."""
        ...

    def capture(self, step: Callable[[], Any]) -> Any:
        """Capture the step, which does not run; the result is memory that `replay` fills."""
        ...

    def replay(self) -> None:
        """Run the captured step, without waiting for it."""
        ...

    def check(self) -> None:
        """Raise the error that a replay found; waits for the device."""
        ...

    def close(self) -> None:
        """Let what was captured go; it is not replayed again."""
        ...


class Replay(Protocol):
    """Calls of the CPU's kernels, made again without Python on the same memory.

    Attributes:
        reads: of each call, the memory that it reads: first bytes, and those after the last.
        writes: likewise.
    """

    reads: Sequence[Sequence[tuple[int, int]]]
    writes: Sequence[Sequence[tuple[int, int]]]

    def __call__(self) -> None:
        """Make the calls."""
        ...

    def extend(self, later: Any) -> None:
        """Add the calls of a later one."""
        ...


class HostMirror:
    """The host's copy of numbers that a captured step changes on the device.

    Args:
        push: writes the host's numbers to the device.
        pull: adds what the steps since the last push changed to the host's numbers.
        most: replays allowed between two pushes; None: any number.
    """

    def __init__(
        self, push: Callable[[], None], pull: Callable[[], None], most: int | None = None
    ) -> None:
        self._push, self._pull, self._most = push, pull, most
        self._ahead = 0
        self._pushed = False

    def before(self) -> None:
        """Call before each replay."""
        if self._most is not None and self._ahead >= self._most:
            self.settle()
        if not self._pushed:
            self._push()
            self._pushed = True

    def after(self) -> None:
        """Call after each replay."""
        self._ahead += 1

    def settle(self) -> None:
        """Bring the host up to date; waits for the device if it is ahead."""
        if self._ahead:
            self._pull()
            self._ahead = 0
        self._pushed = False  # the host may change its numbers now


class HostMirrors:
    """All mirrors of one object's numbers: one for each capture that changes them."""

    def __init__(self) -> None:
        self._all: list[HostMirror] = []

    def add(self, mirror: HostMirror) -> None:
        """Add a capture's mirror."""
        self._all.append(mirror)

    def settle(self, but: HostMirror | None = None) -> None:
        """Bring the host up to date with all mirrors, or with all but one."""
        for mirror in self._all:
            if mirror is not but:
                mirror.settle()


@dataclass(eq=False)
class UpdateGuard:
    """What the device decides of a captured optimizer's update.

    Attributes:
        bad: uint32 of shape (): the update is skipped unless it is zero.
        made: uint32 of shape (): updates made since the last push.
        lr: float64 of shape (): the learning rate.
        ahead: gives the factors of each part after so many more updates.
        most: updates allowed between two pushes.
        pushes: called with each push, to write what depends on the host's numbers.
        numbers: what the backend made of `ahead` on the device, for the next call with these.
    """

    bad: Array
    made: Array
    lr: Array
    ahead: Callable[[int], Sequence[Mapping[str, float]]]
    most: int
    pushes: list[Callable[[], None]] = field(default_factory=list)
    numbers: list[Array] = field(default_factory=list)


class StepCapture(Protocol):
    """The capture under way: a backend's ``capturing``, which is None outside a capture.

    A warm-up is a capture too: the step then runs, once, with the kernels that a replay launches.
    """

    def in_warm_up(self, push: Callable[[], None]) -> None:
        """Call ``push`` now in a warm-up; in a capture a mirror's push does it before replays."""
        ...

    def persistent(self, initial: Any) -> Array:
        """Device memory that all replays share and may write to; it starts as a numpy array.

        What `GenericBackend.xp` makes is made anew in each replay instead.
        """
        ...

    def write(self, array: Array, values: Any) -> None:
        """Copy a numpy array to the device, after what was launched before."""
        ...

    def read(self, array: Array) -> Any:
        """Copy a device array to a numpy array; waits for the device."""
        ...

    def cell(
        self,
        key: object,
        dtype: Any,
        read: Callable[[], float],
        lookahead: Callable[[int], float] | None = None,
    ) -> Array:
        """A number of shape () that the host decides: ``read()``, taken before each replay.

        ``lookahead(n)`` predicts it n steps on, which saves a copy wherever it was right. Two cells
        of one key are one.
        """
        ...

    def keep(self, *arrays: Array) -> None:
        """Hold arrays that were there before the step, as long as replays may read them."""
        ...

    def frozen(self, name: str, read: Callable[[], object]) -> None:
        """Raise an error before a replay if ``read()`` has changed."""
        ...

    def mirror(self, owner: HostMirrors, mirror: HostMirror) -> None:
        """Keep an owner's mirror up to date around each replay."""
        ...

    def watch(self, bad: Array, error: Callable[[], Exception]) -> None:
        """Raise ``error()`` once an element of a bool array was true; updates stop at once."""
        ...

    def nonfinite(self, arrays: Sequence[Array], error: Callable[[int], Exception] | None) -> Array:
        """Uint32 of shape (), not zero if an array holds NaN or infinity.

        With an ``error`` it stays so for later replays, updates stop, and ``error`` of the array's
        number is raised as by `watch`. Without one it is about this step alone.
        """
        ...

    def count_update(self, made: Array, bad: Array) -> None:
        """Add one to ``made`` unless ``bad``."""
        ...

    def rescale(self, state: Array, bad: Array, rule: Sequence[float]) -> None:
        """One step of a loss scale; see `extensor.backends.generic.optim.rescale`."""
        ...

    def require_own_gradients(self, gradients: Sequence[Any]) -> None:
        """Check the gradients, or None, that a backward pass is about to add to.

        Raises:
            RuntimeError: if one was there before the step.
        """
        ...

    def own_gradients(self, gradients: Sequence[Any]) -> None:
        """Note the gradients that the step has made."""
        ...

    def on_replay(self, call: Callable[[], None]) -> None:
        """Call this Python after each replay, and after a warm-up."""
        ...

    def on_failure(self, call: Callable[[], None]) -> None:
        """Call this Python if the capture fails."""
        ...
