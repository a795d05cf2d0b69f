"""ZeRO stages 1 and 2: each rank keeps and updates its part of the optimizer state (and gradients).

A bucket of parameters is a flat array, of which rank r owns the r-th of equal parts, in whole
blocks of 32 values. Gradients are reduced to their owners (a reduce-scatter), owners update their
parts, and all ranks gather the new weights. Optimizers that work value by value make the same bits
as on one rank.

Source: Rajbhandari, Rasley, Ruwase, He, "ZeRO", arXiv 1910.02054, section 5.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from extensor.autograd.mode import no_grad
from extensor.autograd.tensor import ExTensor, wrap
from extensor.distributed.communicator import Array, Communicator
from extensor.distributed.gradients import Bucket, GradientBuckets
from extensor.distributed.reduction import ReductionWork
from extensor.nn.parameter import Parameter
from extensor.optim import Optimizer

__all__ = ["SHARDS", "ShardedBuckets", "ShardedOptimizer"]

SHARDS = ("none", "states", "gradients", "parameters")
"""What ``--shard`` takes: nothing, ZeRO-1, ZeRO-2, ZeRO-3."""


class ShardedBuckets(GradientBuckets):
    """`GradientBuckets` whose sums, and the parameters' pieces, are of this rank's parts alone.

    Args:
        params: as for `GradientBuckets`.
        ranks: the communicator.
        name: how sums are taken.
        bucket_bytes: how many bytes of gradients are reduced at once; None is the communicator's.
        keep_gradients: whether a bucket's whole gradients keep their memory between steps (ZeRO-1);
            without, it is given back as soon as a bucket is reduced (ZeRO-2).
        how: more for `make_reduction`.

    Attributes:
        pieces: a flat parameter for each one given, by its ``id``: the values that this rank owns,
            perhaps none.

    Raises:
        ValueError: as `GradientBuckets`, and if a rank would own no value at all.

    >>> from extensor.distributed import LocalCommunicator, ShardedBuckets
    >>> layer = et.nn.Linear(2, 1, rng=0)
    >>> buckets = ShardedBuckets(list(layer.parameters()), LocalCommunicator())
    >>> [piece.shape for piece in buckets.pieces.values()]
    [(1,), (2,)]
    """

    def __init__(
        self,
        params: Sequence[ExTensor],
        ranks: Communicator,
        name: str = "float32",
        bucket_bytes: int | None = None,
        *,
        keep_gradients: bool = True,
        **how: Any,
    ) -> None:
        super().__init__(params, ranks, name, bucket_bytes, lasting=keep_gradients, **how)
        self.keep_gradients = keep_gradients
        self._owned: dict[int, slice] = {}
        self.pieces: dict[int, Parameter] = {}
        for bucket in self.buckets:
            shard = bucket.reduction.shard_size
            bucket.sums = bucket.backend.xp.zeros(shard, np.float32)
            for param in bucket.params:
                begin = ranks.rank * shard - bucket.starts[id(param)]
                ends = (min(max(end, 0), param.size) for end in (begin, begin + shard))
                self._owned[id(param)] = slice(*ends)
                values = param.data.reshape(-1)[self._owned[id(param)]].copy()
                self.pieces[id(param)] = Parameter(values, device=param.device)
        if not any(piece.size for piece in self.pieces.values()):
            raise ValueError(
                f"shards: expected values for each of {ranks.size} ranks, got none for rank "
                f"{ranks.rank}; the way out: fewer ranks for so small a model, or no shards"
            )

    def _reduce(self, bucket: Bucket) -> ReductionWork:
        return bucket.reduction.reduce_scatter(bucket.sums, 1.0, self._step)

    def _publish(self, bucket: Bucket) -> None:
        """The pieces' gradients are views of the shard's sums."""
        for param in bucket.params:
            view = bucket.sums[self._part(bucket, param)]
            self.pieces[id(param)].grad = wrap(view, param.backend)
            param.grad = None
        if not self.keep_gradients:
            bucket.release()

    def _part(self, bucket: Bucket, param: ExTensor) -> slice:
        """Where a parameter's piece lies in this rank's part of its bucket."""
        owned, first = self._owned[id(param)], self.ranks.rank * bucket.reduction.shard_size
        begin = bucket.starts[id(param)] + owned.start - first
        return slice(begin, begin + owned.stop - owned.start)

    def finish(self, step: int) -> None:
        """As `GradientBuckets.finish`; and if a rank's sums are not finite, no rank's are.

        Args:
            step: of the run.

        >>> from extensor.distributed import LocalCommunicator, ShardedBuckets
        >>> weight = et.nn.Parameter([1.0])
        >>> buckets = ShardedBuckets([weight], LocalCommunicator())
        >>> with buckets.micro_batch(last=True):
        ...     (weight * 2).sum().backward()
        >>> buckets.finish(step=0)
        >>> buckets.pieces[id(weight)].grad.tolist()
        [2.0]
        """
        super().finish(step)
        sums, backend = [bucket.sums for bucket in self.buckets], self.buckets[0].backend
        if (capture := backend.capturing) is not None:
            with self.ranks.beside():
                flag = capture.nonfinite(sums, None).reshape(1)
                self.ranks.all_reduce(flag, "max").wait()
            self.ranks.join()
            for array in sums:
                array[...] = backend.xp.where(flag != 0, np.float32(np.nan), array)
            return
        bad = np.array([int(not all(map(backend.all_finite, sums)))])
        self.ranks.all_reduce(bad, "max").wait()
        if bad[0]:
            for array in sums:
                array[...] = np.nan

    def gather(self) -> None:
        """Give all parameters the values of their pieces on all ranks.

        >>> from extensor.distributed import LocalCommunicator, ShardedBuckets
        >>> weight = et.nn.Parameter([1.0])
        >>> buckets = ShardedBuckets([weight], LocalCommunicator())
        >>> with et.no_grad():
        ...     buckets.pieces[id(weight)][...] = 3.0
        >>> buckets.gather()
        >>> weight.tolist()
        [3.0]
        """
        with no_grad():
            for bucket in self.buckets:
                flat = self.whole(bucket, lambda param: self.pieces[id(param)].data)
                for param in bucket.params:
                    param.assign_(bucket.view(flat, param))

    def scatter(self) -> None:
        """Give the pieces their parameters' values, as after loading a model.

        >>> from extensor.distributed import LocalCommunicator, ShardedBuckets
        >>> weight = et.nn.Parameter([1.0])
        >>> buckets = ShardedBuckets([weight], LocalCommunicator())
        >>> with et.no_grad():
        ...     weight[...] = 2.0
        >>> buckets.scatter()
        >>> buckets.pieces[id(weight)].tolist()
        [2.0]
        """
        with no_grad():
            for bucket in self.buckets:
                for param in bucket.params:
                    self.pieces[id(param)].assign_(self.owned(param, param.data).copy())

    def whole(self, bucket: Bucket, piece: Callable[[ExTensor], Array]) -> Array:
        """Gather an array of a bucket from the arrays of its parameters' pieces.

        Args:
            bucket: which.
            piece: gives the array of this rank's values of a parameter.

        Returns:
            float32 of the bucket's size, the same on all ranks.

        >>> from extensor.distributed import LocalCommunicator, ShardedBuckets
        >>> weight = et.nn.Parameter([1.0])
        >>> buckets = ShardedBuckets([weight], LocalCommunicator())
        >>> float(buckets.whole(buckets.buckets[0], lambda param: param.data)[0])
        1.0
        """
        xp = bucket.backend.xp
        mine = xp.zeros(bucket.reduction.shard_size, np.float32)
        for param in bucket.params:
            mine[self._part(bucket, param)] = piece(param)
        if self.ranks.size == 1:
            return mine
        return self.gathered([mine])[0]

    def gathered(self, parts: Sequence[Array]) -> list[Array]:
        """Flat arrays of all ranks, one after the other; a GPU waits for them, not this process.

        Args:
            parts: this rank's, as long as the other ranks'.

        Returns:
            A whole array for each part.

        >>> import numpy as np
        >>> from extensor.distributed import LocalCommunicator, ShardedBuckets
        >>> buckets = ShardedBuckets([et.nn.Parameter([1.0])], LocalCommunicator())
        >>> buckets.gathered([np.ones(2), np.zeros(1)])
        [array([1., 1.]), array([0.])]
        """
        xp = self.buckets[0].backend.xp
        with self.ranks.beside():
            wholes = [xp.empty(self.ranks.size * part.size, part.dtype) for part in parts]
            self.ranks.all_gather_coalesced(parts, wholes).wait()
        self.ranks.join()
        return wholes

    def owned(self, param: ExTensor, array: Array) -> Array:
        """This rank's values of an array of a parameter's shape.

        Args:
            param: the parameter.
            array: of its shape.

        Returns:
            A flat view where the array is contiguous.

        >>> import numpy as np
        >>> from extensor.distributed import LocalCommunicator, ShardedBuckets
        >>> weight = et.nn.Parameter([1.0, 2.0])
        >>> ShardedBuckets([weight], LocalCommunicator()).owned(weight, np.ones(2)).tolist()
        [1.0, 1.0]
        """
        return array.reshape(-1)[self._owned[id(param)]]


class ShardedOptimizer:
    """An optimizer of which each rank keeps the state of its parts, used like the whole one.

    Its state dict is the whole optimizer's, gathered: all ranks must ask for it together. So a run
    goes on with any number of ranks, sharded or not.

    Args:
        optimizer: new, of the same parameters as ``buckets``; it is changed to update the pieces.
        buckets: the parameters' pieces, and where their gradients come from.

    Attributes:
        groups: the optimizer's, with the pieces as members.

    Raises:
        ValueError: for an optimizer that needs whole tensors (Muon, LARS), or narrow states.

    >>> from extensor.distributed import LocalCommunicator, ShardedBuckets, ShardedOptimizer
    >>> weight = et.nn.Parameter([1.0])
    >>> buckets = ShardedBuckets([weight], LocalCommunicator())
    >>> optimizer = ShardedOptimizer(et.optim.SGD([weight], lr=0.5), buckets)
    >>> with buckets.micro_batch(last=True):
    ...     (weight * 2).sum().backward()
    >>> buckets.finish(step=0)
    >>> optimizer.step_unless(None)
    >>> weight.tolist()
    [0.0]
    """

    def __init__(self, optimizer: Any, buckets: ShardedBuckets) -> None:
        name = type(optimizer).__name__
        if not isinstance(optimizer, Optimizer) or not optimizer.is_elementwise:
            raise ValueError(
                f"shards: expected an optimizer that updates each value by itself, got {name}; the "
                "way out: SGD, Adam, AdamW, Lion or RMSprop, or no shards"
            )
        if optimizer.states != "float32":
            raise ValueError(
                f"shards: expected optimizer states in float32, got {optimizer.states}, whose "
                "rounding counts the values of whole tensors; the way out: float32, or no shards"
            )
        self._optimizer, self._buckets = optimizer, buckets
        self._whole = {
            member.name: member.param for group in optimizer.groups for member in group.members
        }
        optimizer.replace_params(lambda param: buckets.pieces[id(param)])
        self.groups = optimizer.groups

    @property
    def params(self) -> list[ExTensor]:
        """This rank's pieces, some of them empty."""
        return self._optimizer.params

    @property
    def nbytes(self) -> int:
        """Bytes of this rank's state."""
        return self._optimizer.nbytes

    def zero_grad(self) -> None:
        """See :meth:`extensor.optim.Optimizer.zero_grad`."""
        self._optimizer.zero_grad()
        for param in self._whole.values():
            param.grad = None

    def step_unless(self, bad: Any) -> None:
        """See :meth:`extensor.optim.Optimizer.step_unless`. Then the new weights are gathered."""
        for param in self._whole.values():
            if (state := getattr(param, "recipe_state", None)) is not None:
                self._buckets.pieces[id(param)].recipe_state = state  # the optimizer ends its step
        self._optimizer.step_unless(bad)
        if bad is not True:
            self._buckets.gather()

    def state_share(self) -> dict[str, Any]:
        """The part of the whole state that this rank writes into a checkpoint.

        All ranks call this together.

        Returns:
            As `state_dict`, but with the arrays of every size-th bucket alone: the ranks' parts
            make up the whole.

        >>> from extensor.distributed import LocalCommunicator, ShardedBuckets, ShardedOptimizer
        >>> weight = et.nn.Parameter([1.0])
        >>> buckets = ShardedBuckets([weight], LocalCommunicator())
        >>> optimizer = ShardedOptimizer(et.optim.SGD([("w", weight)], lr=0.5), buckets)
        >>> optimizer.state_share()["step.w"]
        0
        """
        ranks = self._buckets.ranks
        return self._gather(lambda bucket: bucket % ranks.size == ranks.rank)

    def state_dict(self) -> dict[str, Any]:
        """See :meth:`extensor.optim.Optimizer.state_dict`; of the whole parameters."""
        return self._gather(lambda bucket: True)

    def _gather(self, keep: Callable[[int], bool]) -> dict[str, Any]:
        """The state with whole arrays, of the buckets to keep alone."""
        state = self._optimizer.state_dict()
        names = {id(param): name for name, param in self._whole.items()}
        slots = {m.name: sorted(m.arrays) for g in self.groups for m in g.members}
        for number, bucket in enumerate(self._buckets.buckets):
            for slot in sorted({s for param in bucket.params for s in slots[names[id(param)]]}):

                def piece(param: ExTensor, slot: str = slot) -> Array:
                    found = state.get(f"state.{names[id(param)]}.{slot}")
                    return 0.0 if found is None else bucket_array(param, found)

                flat = self._buckets.whole(bucket, piece)
                for param in bucket.params:
                    key = f"state.{names[id(param)]}.{slot}"
                    if not keep(number):
                        state.pop(key, None)
                    elif slot in slots[names[id(param)]]:
                        host = wrap(bucket.view(flat, param), param.backend).to("cpu").data
                        state[key] = host.copy()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See :meth:`extensor.optim.Optimizer.load_state_dict`; the parameters are loaded before.

        The state is that of the whole parameters.
        """
        mine = dict(state)
        for name, param in self._whole.items():
            for key, value in state.items():
                whole = isinstance(value, np.ndarray) and value.shape == param.shape
                if whole and key.rpartition(".")[0] == f"state.{name}":
                    mine[key] = self._buckets.owned(param, value)
        self._optimizer.load_state_dict(mine)
        self._buckets.scatter()


def bucket_array(param: ExTensor, host: Array) -> Array:
    """A host array on the parameter's device."""
    return param.backend.xp.asarray(host)
