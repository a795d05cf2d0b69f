"""The sum of gradients over micro-batches and ranks: in float32, or in fewer bytes, or order-free.

Floating-point addition is not associative, so that the sum of a gradient depends on the algorithm
of the collective, on the bucket, on the number of ranks. Sums of integers do not. `Exact` turns
each micro-batch's gradient into fixed-point integers, so that the mean of N micro-batches has the
same bits on any number of ranks (docs/adr/0022-order-free-gradient-sums.md proves the bound).
`Mxint` sends 8- or 16-bit integers with one exponent for 32 values.

A reduction belongs to one bucket: a flat float32 array in whole blocks of 32 values for each rank.
Tensors in a bucket should begin at multiples of 32; then no result depends on the bucket either.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Mapping
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np

from extensor.backends.registry import get as get_backend
from extensor.distributed.communicator import Communicator, Work
from extensor.errors import unknown_name
from extensor.random import Stream

__all__ = [
    "BLOCK",
    "GRAD_COMM",
    "Bfloat16",
    "Exact",
    "Float32",
    "GradientReduction",
    "Mxint",
    "ReductionWork",
    "make_reduction",
    "padded_size",
]

Array = Any
Steps = Generator[Work, None, None]

BLOCK = 32
"""Values that share an anchor or an exponent."""
NONFINITE = 255
"""The anchor or exponent of a block with NaN or infinity."""
FIRST_TENSOR = 3 << 22
"""Buckets' random streams are numbered from here; see `extensor.optim.states`."""


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

    Attributes:
        size: the same.
        shard_size: values that each rank gets of `reduce_scatter`.
        count: micro-batches added since the last result.

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

    def __init__(
        self, size: int, ranks: Communicator, *, device: str = "cpu", seed: int = 0, number: int = 0
    ) -> None:
        if size <= 0 or size % (BLOCK * ranks.size):
            raise ValueError(
                f"bucket: expected a multiple of {BLOCK} values for each of {ranks.size} ranks, "
                f"got {size}; padded_size gives one"
            )
        self.size, self.shard_size, self.count = size, size // ranks.size, 0
        self.ranks, self.backend = ranks, get_backend(device)
        self.xp = self.backend.xp
        self.seed, self.number = seed, number
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


class _FloatSum(GradientReduction):
    """Micro-batches of one rank are added in float32, in order."""

    _sum: Array = None
    _owned = False

    def _add(self, grad: Array) -> None:
        if not self.count:
            self._sum, self._owned = grad, False
        elif self._owned:
            self._sum += grad
        else:
            self._sum, self._owned = self._sum + grad, True

    def _take(self) -> Array:
        """The sum of this rank, zeros of no micro-batch; the next one begins anew."""
        total, self._sum = self._sum, None
        return self.xp.zeros(self.size, np.float32) if total is None else total


class Float32(_FloatSum):
    """Float32 sums, as the communicator makes them: the order is its own.

    >>> from extensor.distributed import LocalCommunicator
    >>> from extensor.distributed.reduction import Float32
    >>> Float32(64, LocalCommunicator()).shard_size
    64
    """

    def _value_bytes(self) -> tuple[float, float]:
        return 4.0, 4.0

    def _reduce_scatter(self, out: Array, divisor: float, step: int) -> Steps:
        yield self.ranks.reduce_scatter(self._take(), out)
        out /= np.float32(divisor)

    def _all_reduce(self, out: Array, divisor: float, step: int) -> Steps:
        out[...] = self._take()
        yield self.ranks.all_reduce(out)
        out /= np.float32(divisor)


class Bfloat16(_FloatSum):
    """Bfloat16 on the wire; the owner of a part adds in float32, in the order of ranks.

    >>> from extensor.distributed import LocalCommunicator
    >>> from extensor.distributed.reduction import Bfloat16
    >>> Bfloat16(64, LocalCommunicator()).size
    64
    """

    def _value_bytes(self) -> tuple[float, float]:
        return 2.0, 2.0

    def _encode(self, x: Array) -> Array:
        return (self.backend.bfloat16_values(x).view(np.uint32) >> np.uint32(16)).astype(np.uint16)

    def _decode(self, codes: Array) -> Array:
        return (codes.astype(np.uint32) << np.uint32(16)).view(np.float32)

    def _reduce_scatter(self, out: Array, divisor: float, step: int) -> Steps:
        send = self._encode(self._take())
        recv = self.xp.empty_like(send)
        yield self.ranks.all_to_all(send, recv)
        out[...] = 0
        for part in recv.reshape(self.ranks.size, -1):
            out += self._decode(part)
        out /= np.float32(divisor)

    def _all_reduce(self, out: Array, divisor: float, step: int) -> Steps:
        mine = self.xp.empty(self.shard_size, np.float32)
        yield from self._reduce_scatter(mine, divisor, step)
        recv = self.xp.empty(self.size, np.uint16)
        yield self.ranks.all_gather(self._encode(mine), recv)
        out[...] = self._decode(recv)


class Exact(GradientReduction):
    """Fixed-point sums: the same bits for any order, any buckets and any number of ranks.

    A block's unit is at most 2^-9 ulp of its largest gradient over all micro-batches and ranks.
    Each gradient is truncated to a multiple of the unit; the sum is exact; the mean is rounded
    once. NaN or infinity anywhere in a block makes the block NaN. A sum of zeros is +0.

    >>> import numpy as np
    >>> from extensor.distributed import run_ranks
    >>> from extensor.distributed.reduction import Exact
    >>> grads = np.random.default_rng(0).standard_normal((4, 128)).astype(np.float32)
    >>> def program(ranks):
    ...     reduction, mean = Exact(128, ranks), np.empty(128, np.float32)
    ...     for grad in grads[ranks.rank :: ranks.size]:
    ...         reduction.add(grad)
    ...     reduction.all_reduce(mean, divisor=4).wait()
    ...     return mean.tobytes()
    >>> len({mean for ranks in (1, 2, 4) for mean in run_ranks(ranks, program)})
    1
    """

    most_micro_batches = 1 << 15  # sums of 48-bit integers in 63 bits, and of 16-bit ones in 31

    _single: Array = None
    _limbs: Array = None
    _anchors: Array = None

    def _value_bytes(self) -> tuple[float, float]:
        return 8.0 + 2.0 / BLOCK, 4.0

    def _anchors_of(self, grad: Array) -> Array:
        field = self.xp.maximum(self.backend.block_max(grad) >> np.uint32(23), 1)
        return self.xp.where(field == 255, NONFINITE, field >> np.uint32(4)).astype(np.uint8)

    def _add(self, grad: Array) -> None:
        """One micro-batch is kept as it is; with the second, limbs begin."""
        anchors = self._anchors_of(grad)
        if not self.count:
            self._single, self._anchors = grad, anchors
            return
        if self._single is not None:
            if self._limbs is None:
                self._limbs = self.xp.empty((3, self.size), np.int32)
            self._limbs[...] = 0
            self.backend.add_limbs(self._limbs, self._single, self._anchors, self._anchors)
            self._single = None
        after = self.xp.maximum(self._anchors, anchors)
        self.backend.add_limbs(self._limbs, grad, self._anchors, after)
        self._anchors = after

    def _total(self) -> Generator[Work, None, tuple[Array, Array]]:
        """This rank's sum under the anchors of all ranks, and these."""
        xp, single, before = self.xp, self._single, self._anchors
        self._single = self._anchors = None
        if before is None:
            after = xp.zeros(self.size // BLOCK, np.uint8)
            yield self.ranks.all_reduce(after, "max")
            return xp.zeros(self.size, np.int64), after
        after = before.copy()
        yield self.ranks.all_reduce(after, "max")
        if single is not None:
            return self.backend.fixed_point(single, after), after
        return self.backend.limb_total(self._limbs, before, after), after

    def _reduce_scatter(self, out: Array, divisor: float, step: int) -> Steps:
        total, anchors = yield from self._total()
        mine = total
        if self.ranks.size > 1:
            mine = self.xp.empty(self.shard_size, np.int64)
            yield self.ranks.reduce_scatter(total, mine)
        anchors = anchors.reshape(self.ranks.size, -1)[self.ranks.rank]
        out[...] = self.backend.fixed_point_mean(mine, anchors, divisor)

    def _all_reduce(self, out: Array, divisor: float, step: int) -> Steps:
        if self.ranks.size == 1:
            yield from self._reduce_scatter(out, divisor, step)
            return
        mine = self.xp.empty(self.shard_size, np.float32)
        yield from self._reduce_scatter(mine, divisor, step)
        yield self.ranks.all_gather(mine, out)


class Mxint(_FloatSum):
    """Integers of 8 or 16 bits that share an exponent in blocks of 32, as in OCP's MXINT8.

    Every rank sends each part of the bucket to the part's owner, who adds integers: the result does
    not depend on algorithm, bucket or topology. The mean goes back in the same form. Micro-batches
    of one rank are added in float32 first.

    With error feedback (arXiv 1901.09847, algorithm 2) what rounding leaves over is added to the
    next step's gradient; without it rounding is stochastic. A gradient above 127/128 of 2^128
    counts as infinite. Below the least exponent, 2^-127, values round to multiples of 2^-133 (8
    bits) or 2^-141. Zeros lose their sign.

    Args:
        size: as for `GradientReduction`.
        ranks: the communicator.
        bits: 8 or 16.
        error_feedback: whether to keep what rounding leaves over.
        how: the other arguments of `GradientReduction`.

    >>> from extensor.distributed import LocalCommunicator
    >>> from extensor.distributed.reduction import Mxint
    >>> Mxint(32, LocalCommunicator(), bits=8).bits
    8
    """

    def __init__(
        self,
        size: int,
        ranks: Communicator,
        *,
        bits: int,
        error_feedback: bool = True,
        **how: Any,
    ) -> None:
        super().__init__(size, ranks, **how)
        self.bits, self._code = bits, np.dtype(f"int{bits}")
        if error_feedback:
            self._left["sent"] = self.xp.zeros(size, np.float32)
            self._left["mean"] = self.xp.zeros(self.shard_size, np.float32)

    def _value_bytes(self) -> tuple[float, float]:
        one = self.bits / 8 + 1 / BLOCK
        return one, one

    def _pack(self, x: Array, parts: int, left: str, step: int) -> Array:
        """Codes and exponents of each part, one after the other: uint8 of shape (parts, bytes)."""
        xp, residual = self.xp, self._left.get(left)
        stream = None
        if residual is not None:
            x = x + residual
        else:
            stream = Stream(self.seed, step, FIRST_TENSOR + self.number, left == "mean")
        most = self.backend.block_max(x).astype(np.int64)
        exponents = xp.minimum((most + ((1 << (25 - self.bits)) - 1)) >> 23, NONFINITE)
        exponents = exponents.astype(np.uint8)
        bad = exponents == NONFINITE
        before = None if residual is None else residual.reshape(-1, BLOCK)[bad]
        first = self.ranks.rank * len(exponents)
        codes = self.backend.mxint(x, exponents, self.bits, stream, first, residual)
        if residual is not None:  # where this step is skipped, what the last one left is not
            residual.reshape(-1, BLOCK)[bad] = before
        both = (codes.view(np.uint8).reshape(parts, -1), exponents.reshape(parts, -1))
        return xp.concatenate(both, axis=1)

    def _unpack(self, packed: Array) -> tuple[Array, Array]:
        """Codes and exponents from what `_pack` gave, a row for each part."""
        values = packed.size * BLOCK // (BLOCK * self._code.itemsize + 1) // len(packed)
        end = values * self._code.itemsize
        codes = self.xp.ascontiguousarray(packed[:, :end]).view(self._code)
        return codes, self.xp.ascontiguousarray(packed[:, end:])

    def _reduce_scatter(self, out: Array, divisor: float, step: int) -> Steps:
        send = self._pack(self._take(), self.ranks.size, "sent", step)
        recv = self.xp.empty_like(send)
        yield self.ranks.all_to_all(send, recv)
        out[...] = self.backend.mxint_mean(*self._unpack(recv), divisor)

    def _all_reduce(self, out: Array, divisor: float, step: int) -> Steps:
        mine = self.xp.empty(self.shard_size, np.float32)
        yield from self._reduce_scatter(mine, divisor, step)
        send = self._pack(mine, 1, "mean", step)
        recv = self.xp.empty((self.ranks.size, send.size), np.uint8)
        yield self.ranks.all_gather(send, recv)
        codes, exponents = self._unpack(recv)
        one = (codes.reshape(1, -1), exponents.reshape(1, -1))
        out[...] = self.backend.mxint_mean(*one, 1.0)


def _mxint(bits: int) -> Callable[..., GradientReduction]:
    def make(size: int, ranks: Communicator, **how: Any) -> GradientReduction:
        return Mxint(size, ranks, bits=bits, **how)

    return make


GRAD_COMM: Mapping[str, Callable[..., GradientReduction]] = MappingProxyType(
    {
        "float32": Float32,
        "bfloat16": Bfloat16,
        **{f"mxint{bits}": _mxint(bits) for bits in (8, 16)},
        "exact": Exact,
    }
)
"""Every way to sum gradients, by the name that ``--grad-comm`` takes."""


def make_reduction(name: str, size: int, ranks: Communicator, **how: Any) -> GradientReduction:
    """The reduction of one bucket.

    Args:
        name: a name in `GRAD_COMM`.
        size: values in the bucket, as `padded_size` gives them.
        ranks: the communicator.
        how: more for the class, as ``seed``, ``number``, ``device``, ``error_feedback``.

    Returns:
        The reduction.

    Raises:
        ValueError: for an unknown name or a size not in whole blocks for each rank.

    >>> from extensor.distributed import LocalCommunicator
    >>> from extensor.distributed.reduction import make_reduction
    >>> type(make_reduction("exact", 32, LocalCommunicator())).__name__
    'Exact'
    """
    if name not in GRAD_COMM:
        raise ValueError(unknown_name("way to sum gradients", name, GRAD_COMM))
    return GRAD_COMM[name](size, ranks, **how)
