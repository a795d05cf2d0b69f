"""What every sum of one bucket's gradients offers, and the work of its collectives.

A reduction belongs to one bucket: a flat float32 array in whole blocks of 32 values for each rank.
Tensors in a bucket should begin at multiples of 32; then no result depends on the bucket either.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Iterator
from typing import Any, ClassVar

import numpy as np

from extensor.backends.registry import get as get_backend
from extensor.distributed.communicator import Communicator, Work

__all__ = [
    "BLOCK", "NONFINITE", "Array", "GradientReduction", "ReductionWork", "Steps", "padded_size",
]  # fmt: skip

Array = Any
Steps = Generator[Work, None, None]
"""The collectives of a reduction, as they are started."""

BLOCK = 32
"""Values that share an anchor or an exponent."""
NONFINITE = 255
"""The anchor or exponent of a block with NaN or infinity."""


def padded_size(size: int, ranks: int) -> int:
    """The number of values of a bucket: whole blocks for each rank.

    Args:
        size: how many values there are to hold.
        ranks: how many ranks share them.

    Returns:
        The least multiple of ``32 * ranks`` that is not below ``size``, and not 0.

    >>> from extensor.distributed.reduction import padded_size
    >>> padded_size(100, ranks=2)
    128
    """
    return max(1, -(-size // (BLOCK * ranks))) * BLOCK * ranks


class ReductionWork:
    """A `Work` of several collectives, of which each needs the result of the one before.

    Ranks must start collectives in one order. So `done` starts none: `advance` does, and is called
    at the same places on all ranks.

    Args:
        steps: yields the work of each collective, as it is started.

    >>> import numpy as np
    >>> from extensor.distributed import Exact, LocalCommunicator
    >>> mean = np.empty(32, np.float32)
    >>> work = Exact(32, LocalCommunicator()).all_reduce(mean, divisor=1)
    >>> work.done()
    False
    >>> work.wait()
    >>> work.done(), mean[0]
    (True, np.float32(0.0))
    """

    def __init__(self, steps: Iterator[Work]) -> None:
        self._steps = steps
        self._current: Work | None = next(steps, None)

    def done(self) -> bool:
        """Whether all have ended; asking also drives the current one on.

        Returns:
            True once the last one has ended and was seen to by `advance` or `wait`.

        >>> from extensor.distributed.reduction import ReductionWork
        >>> ReductionWork(iter(())).done()
        True
        """
        if self._current is not None:
            self._current.done()
        return self._current is None

    def advance(self) -> bool:
        """Wait for the current collective and start the next one.

        Returns:
            True if there was none to start.

        >>> from extensor.distributed.reduction import ReductionWork
        >>> ReductionWork(iter(())).advance()
        True
        """
        if self._current is not None:
            self._current.wait()
            self._current = next(self._steps, None)
        return self._current is None

    def wait(self) -> None:
        """Return when all have ended.

        >>> from extensor.distributed.reduction import ReductionWork
        >>> ReductionWork(iter(())).wait()
        """
        while not self.advance():
            pass


class GradientReduction(ABC):
    """The mean gradient of one bucket over micro-batches and ranks.

    Args:
        size: values in the bucket, as `padded_size` gives them.
        ranks: the communicator.
        device: the device of the gradients.
        seed: of the run.
        number: of the bucket: random bits and the order of collectives are the same on all ranks.
        clock: a `RecipeState` whose ``step`` the random bits are of, where steps are captured.
        lasting: whether whole gradients may keep memory between steps; `Float32` shares memory
            between processes only then.

    Attributes:
        size: the same.
        shard_size: values that each rank gets of `reduce_scatter`.
        count: micro-batches added since the last result.
        path: how ranks get each other's values: ``"collectives"``, perhaps with why, or ``"peer
            memory"``, which their GPUs read directly; ``"shared memory"``, which their CPUs do.

    Raises:
        ValueError: for a size that is not in whole blocks for each rank.

    >>> import numpy as np
    >>> from extensor.distributed import LocalCommunicator
    >>> from extensor.distributed.reduction import Exact
    >>> reduction, mean = Exact(32, LocalCommunicator()), np.empty(32, np.float32)
    >>> for value in (1e8, 1.0, -1e8):
    ...     reduction.add(np.full(32, value, np.float32))
    >>> reduction.all_reduce(mean, divisor=3).wait()
    >>> float(mean[0])
    0.3333333432674408
    """

    most_micro_batches: ClassVar[int] = 1 << 24
    path = "collectives"

    def __init__(
        self,
        size: int,
        ranks: Communicator,
        *,
        device: str = "cpu",
        seed: int = 0,
        number: int = 0,
        clock: Any = None,
        lasting: bool = True,
    ) -> None:
        if size <= 0 or size % (BLOCK * ranks.size):
            raise ValueError(
                f"bucket: expected a multiple of {BLOCK} values for each of {ranks.size} ranks, "
                f"got {size}; padded_size gives one"
            )
        self.size, self.shard_size, self.count = size, size // ranks.size, 0
        self.ranks, self.backend = ranks, get_backend(device)
        self.xp = self.backend.xp
        self.seed, self.number, self.clock = seed, number, clock
        self.lasting = lasting
        self._left: dict[str, Array] = {}

    def add(self, grad: Array) -> None:
        """Add the gradient of one micro-batch.

        Args:
            grad: float32 of shape (size,), C-contiguous. It is not copied: it must stay as it is
                until the next `add`, or the end of the reduction.

        Raises:
            ValueError: for another shape or dtype, and for more micro-batches than sums have room
                for.

        >>> import numpy as np
        >>> from extensor.distributed import LocalCommunicator
        >>> from extensor.distributed.reduction import Float32
        >>> reduction = Float32(32, LocalCommunicator())
        >>> reduction.add(np.ones(32, np.float32))
        >>> reduction.count
        1
        """
        if grad.dtype != np.float32 or grad.shape != (self.size,):
            raise ValueError(
                f"bucket: expected float32 of shape ({self.size},), got {grad.dtype} of shape "
                f"{grad.shape}"
            )
        most = self.most_micro_batches // self.ranks.size
        if self.count >= most:
            raise ValueError(
                f"bucket: expected at most {most} micro-batches on each of {self.ranks.size} "
                "ranks; take larger micro-batches"
            )
        self._add(grad)
        self.count += 1

    def buffer(self) -> Array:
        """Where the gradient of a step's first micro-batch is best put.

        Returns:
            float32 of shape (size,), zeros at first, for `add`. It is the same memory each time,
            or new one. It may be written until `add`, and again after the end of the reduction.

        >>> from extensor.distributed import LocalCommunicator
        >>> from extensor.distributed.reduction import Float32
        >>> Float32(32, LocalCommunicator()).buffer().shape
        (32,)
        """
        return self.xp.zeros(self.size, np.float32)

    def reduce_scatter(self, out: Array, divisor: float, step: int = 0) -> ReductionWork:
        """The mean of this rank's part of the bucket, and the end of the sum.

        Args:
            out: float32 of shape (shard_size,), for values ``rank * shard_size`` on.
            divisor: what the sum is divided by: the number of micro-batches on all ranks, where
                each one's loss is a mean.
            step: of the run, for random bits.

        Returns:
            The work; ``out`` is complete after its ``wait``. Where a micro-batch of any rank holds
            NaN or infinity, ``out`` holds NaN or infinity on the rank with that part.

        >>> import numpy as np
        >>> from extensor.distributed import run_ranks
        >>> from extensor.distributed.reduction import Exact
        >>> def program(ranks):
        ...     reduction, mean = Exact(64, ranks), np.empty(32, np.float32)
        ...     reduction.add(np.arange(64, dtype=np.float32) * ranks.rank)
        ...     reduction.reduce_scatter(mean, divisor=2).wait()
        ...     return float(mean[-1])
        >>> run_ranks(2, program)
        [15.5, 31.5]
        """
        self.count, work = 0, ReductionWork(self._reduce_scatter(out, divisor, step))
        return work

    def all_reduce(self, out: Array, divisor: float, step: int = 0) -> ReductionWork:
        """The mean of the whole bucket, the same bits on all ranks, and the end of the sum.

        Args:
            out: float32 of shape (size,).
            divisor: as for `reduce_scatter`.
            step: of the run, for random bits.

        Returns:
            The work; ``out`` is complete after its ``wait``. Where a micro-batch of any rank holds
            NaN or infinity, ``out`` holds NaN or infinity on all ranks.

        >>> import numpy as np
        >>> from extensor.distributed import run_ranks
        >>> from extensor.distributed.reduction import make_reduction
        >>> def program(ranks):
        ...     reduction, mean = make_reduction("mxint8", 64, ranks), np.empty(64, np.float32)
        ...     reduction.add(np.full(64, 1.0 + ranks.rank, np.float32))
        ...     reduction.all_reduce(mean, divisor=2).wait()
        ...     return float(mean[0])
        >>> run_ranks(2, program)
        [1.5, 1.5]
        """
        self.count, work = 0, ReductionWork(self._all_reduce(out, divisor, step))
        return work

    def wire_bytes(self, shards: bool = False) -> float:
        """Bytes that each rank sends in `all_reduce`.

        Args:
            shards: in `reduce_scatter` instead.

        Returns:
            The bytes, of algorithms that send no byte twice: (R - 1) / R of an array in a
            scatter or a gather, twice that in an all-reduce.

        >>> from extensor.distributed import LocalCommunicator
        >>> from extensor.distributed.reduction import Float32
        >>> Float32(32, LocalCommunicator()).wire_bytes()
        0.0
        """
        scatter, gather = self._value_bytes()
        return self.size * (scatter + (0 if shards else gather)) * self._share

    def state(self) -> dict[str, Array]:
        """What the next reduction depends on besides gradients.

        Returns:
            Arrays by name: for `Mxint` with error feedback what rounding left over, ``sent`` of
            shape (size,) and ``mean`` of (shard_size,); else none. They are not copies.

        >>> from extensor.distributed import Exact, LocalCommunicator
        >>> Exact(32, LocalCommunicator()).state()
        {}
        """
        return self._left

    @property
    def _share(self) -> float:
        return (self.ranks.size - 1) / self.ranks.size

    @abstractmethod
    def _value_bytes(self) -> tuple[float, float]:
        """Bytes a value that the scatter and the gather send, over `_share`."""

    @abstractmethod
    def _add(self, grad: Array) -> None: ...

    @abstractmethod
    def _reduce_scatter(self, out: Array, divisor: float, step: int) -> Steps: ...

    @abstractmethod
    def _all_reduce(self, out: Array, divisor: float, step: int) -> Steps: ...
