"""What a step that a backend records needs of those who keep numbers on the host.

A recorded step (`extensor.capture`) runs its Python once. Afterwards the device repeats what was
launched, so a number that Python would have changed must live on the device. There are three kinds:

- what the host decides before each step (the step number, the learning rate): a *cell*, which the
  recording reads again before each repetition;
- what the step itself decides (how many updates were made, the loss scale): device memory, of
  which the host keeps a copy that a `Mirror` brings up to date when somebody asks;
- what must not change: *frozen*, checked before each repetition.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

__all__ = ["Graph", "Guard", "Mirror", "Mirrors", "Recording"]

Array = Any


class Graph(Protocol):
    """What a backend makes of a step: `extensor.capture` calls these one after the other."""

    @property
    def nbytes(self) -> int:
        """Memory of the device that the step keeps: inputs, all it makes, kernels' workspaces."""
        ...

    def run(self, step: Callable[[], Any]) -> Any:
        """The step as ever, in the graph's memory."""
        ...

    def rehearse(self, step: Callable[[], Any]) -> Any:
        """The step once as it will be repeated, so that every kernel is compiled."""
        ...

    def record(self, step: Callable[[], Any]) -> Any:
        """Record the step, which does not run; what it gives is memory that `repeat` fills."""
        ...

    def repeat(self) -> None:
        """Run the recorded step, without waiting for it."""
        ...

    def check(self) -> None:
        """Raise what a repetition found; waits for the device."""
        ...


class Mirror:
    """Numbers of the host that recorded steps move on the device.

    Args:
        push: writes the host's numbers to the device.
        pull: adds to the host's numbers what the steps since the last push changed.
        most: steps that may be made between two pushes; None: any number.
    """

    def __init__(
        self, push: Callable[[], None], pull: Callable[[], None], most: int | None = None
    ) -> None:
        self._push, self._pull, self._most = push, pull, most
        self._ahead = 0
        self._pushed = False

    def before(self) -> None:
        """Call before each repetition."""
        if self._most is not None and self._ahead >= self._most:
            self.settle()
        if not self._pushed:
            self._push()
            self._pushed = True

    def after(self) -> None:
        """Call after each repetition."""
        self._ahead += 1

    def settle(self) -> None:
        """Bring the host up to date; waits for the device if it is ahead."""
        if self._ahead:
            self._pull()
            self._ahead = 0
        self._pushed = False  # the host may change its numbers now


class Mirrors:
    """The mirrors of one owner: a recording for each shape of its inputs."""

    def __init__(self) -> None:
        self._all: list[Mirror] = []

    def add(self, mirror: Mirror) -> None:
        """One more."""
        self._all.append(mirror)

    def settle(self, but: Mirror | None = None) -> None:
        """Bring the host up to date with all of them, or with all but one."""
        for mirror in self._all:
            if mirror is not but:
                mirror.settle()


@dataclass(eq=False)
class Guard:
    """Under what an update is recorded.

    Attributes:
        bad: uint32 of shape (): the update is not made while it is not zero.
        made: uint32 of shape (): updates made since the last push.
        lr: float64 of shape (): the learning rate.
        ahead: the factors of each part after so many more updates.
        most: updates between two pushes.
        pushes: called with each push, to write what depends on the host's numbers.
    """

    bad: Array
    made: Array
    lr: Array
    ahead: Callable[[int], Sequence[Mapping[str, float]]]
    most: int
    pushes: list[Callable[[], None]] = field(default_factory=list)


class Recording(Protocol):
    """A step being recorded; a backend's ``recording``, None while nothing is.

    A recording may be live: then the step runs as it is recorded, once, with the same kernels.
    """

    def at_once(self, push: Callable[[], None]) -> None:
        """Run this now if the recording is live; else it is the mirror's business."""
        ...

    def persistent(self, initial: Any) -> Array:
        """Device memory that holds a numpy array before the first repetition, then what steps do.

        Steps write to it; what `GenericBackend.xp` makes is made anew in each repetition instead.
        """
        ...

    def write(self, array: Array, values: Any) -> None:
        """Copy a numpy array to the device, after what was launched before."""
        ...

    def read(self, array: Array) -> Any:
        """A numpy array of what is on the device; waits for it."""
        ...

    def cell(
        self,
        key: object,
        dtype: Any,
        read: Callable[[], float],
        ahead: Callable[[int], float] | None = None,
    ) -> Array:
        """A number of shape () that the host decides, as ``read`` gives it before each repetition.

        ``ahead(n)`` foretells it n steps on, which saves a copy where it was right; ``key`` is
        whose number it is: two cells of one key are one.
        """
        ...

    def frozen(self, name: str, read: Callable[[], object]) -> None:
        """What may not change from now on: an error before a repetition if it did."""
        ...

    def mirror(self, owner: Mirrors, mirror: Mirror) -> None:
        """Keep an owner's mirror up to date around each repetition."""
        ...

    def watch(self, bad: Array, error: Callable[[], Exception]) -> None:
        """An error to raise once an element of a bool array was true; updates stop at once."""
        ...

    def finite(self, arrays: Sequence[Array], error: Callable[[int], Exception] | None) -> Array:
        """Uint32 of shape (), not zero if an array holds NaN or infinity.

        With an ``error`` of the array's number that is raised as `watch` does, else it is that of
        this step alone.
        """
        ...

    def count(self, made: Array, bad: Array) -> None:
        """Add one to ``made`` unless ``bad``."""
        ...

    def rescale(self, state: Array, bad: Array, rule: Sequence[float]) -> None:
        """One step of a loss scale; see `extensor.backends.training.rescale`."""
        ...

    def adds_to(self, gradients: Sequence[Any]) -> None:
        """Leaves' gradients, or None, are to be added to.

        Raises:
            RuntimeError: if one is not of this step.
        """
        ...

    def gives(self, gradients: Sequence[Any]) -> None:
        """Leaves' gradients are of this step."""
        ...

    def on_repeat(self, call: Callable[[], None]) -> None:
        """Python to run after each repetition."""
        ...

    def on_failure(self, call: Callable[[], None]) -> None:
        """Python to run if the recording fails."""
        ...
