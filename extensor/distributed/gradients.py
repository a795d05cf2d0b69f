"""Gradients of all ranks, added up in buckets while the backward pass runs.

The last layers' gradients are final first. So buckets hold parameters from last to first, and a
bucket's reduction starts as soon as all of its gradients are there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from extensor.autograd.apply import wrap
from extensor.autograd.mode import post_accumulate_grad_hook
from extensor.autograd.tensor import ExTensor
from extensor.distributed.communicator import Array, Communicator, Work

__all__ = ["BUCKET_BYTES", "GradientBuckets"]

BUCKET_BYTES = 4 << 20
"""A bucket is full with so many bytes of float32: enough for MPI's and NCCL's full bandwidth."""


class _Bucket:
    """Neighbouring parameters, and their gradients side by side in one array."""

    def __init__(self, params: Sequence[ExTensor]) -> None:
        self.params = list(params)
        backend = self.params[0].backend
        self.flat: Array = backend.xp.zeros(sum(p.size for p in params), backend.xp.float32)
        self.views: dict[int, Array] = {}
        start = 0
        for param in self.params:
            part = self.flat[start : start + param.size]
            self.views[id(param)] = part.reshape(param.shape)
            start += param.size
        self.waiting = set(self.views)
        self.work: Work | None = None


class GradientBuckets:
    """Adds up the gradients of a model's parameters over ranks, in float32.

    ``with buckets.overlapping():`` goes around the last backward pass before `finish`. A parameter
    that has no gradient on this rank counts as zeros, and has the others' sum afterwards.

    Args:
        params: parameters of one device, in the order of the model's layers, the same on all ranks.
        ranks: the communicator.
        bucket_bytes: how many bytes of gradients are reduced at once.

    Raises:
        ValueError: for parameters that are not float32.

    >>> from extensor.distributed import GradientBuckets, LocalCommunicator
    >>> layer = et.nn.Linear(2, 1, rng=0)
    >>> buckets = GradientBuckets(list(layer.parameters()), LocalCommunicator())
    >>> with buckets.overlapping():
    ...     layer(et.ones((1, 2))).sum().backward()
    >>> buckets.finish()
    >>> layer.weight.grad.tolist()
    [[1.0, 1.0]]
    """

    def __init__(
        self,
        params: Sequence[ExTensor],
        ranks: Communicator,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        others = sorted({p.dtype.name for p in params} - {"float32"})
        if others:
            raise ValueError(f"params: expected float32 weights, got {', '.join(others)}")
        self.ranks = ranks
        self.buckets: list[_Bucket] = []
        group: list[ExTensor] = []
        for param in reversed(params):
            if group and sum(p.nbytes for p in group) + param.nbytes > bucket_bytes:
                self.buckets.append(_Bucket(group))
                group = []
            group.append(param)
        if group:
            self.buckets.append(_Bucket(group))
        self._of = {key: bucket for bucket in self.buckets for key in bucket.views}
        self._started = 0

    @contextlib.contextmanager
    def overlapping(self) -> Iterator[None]:
        """Reduce buckets while the backward pass inside computes the gradients of earlier layers.

        Returns:
            A context manager for one backward pass, the step's last.

        >>> from extensor.distributed import GradientBuckets, LocalCommunicator
        >>> buckets = GradientBuckets([et.nn.Parameter([1.0])], LocalCommunicator())
        >>> with buckets.overlapping():
        ...     (buckets.buckets[0].params[0] * 2).sum().backward()
        """
        with post_accumulate_grad_hook(self._final):
            yield

    def finish(self) -> None:
        """Start what has not started, wait for all, and make the sums the gradients.

        >>> from extensor.distributed import GradientBuckets, LocalCommunicator
        >>> weight = et.nn.Parameter([1.0])
        >>> buckets = GradientBuckets([weight], LocalCommunicator())
        >>> (weight * 2).sum().backward()
        >>> buckets.finish()
        >>> weight.grad.tolist()
        [2.0]
        """
        for bucket in self.buckets:
            for param in bucket.params:
                if id(param) in bucket.waiting:
                    self._put(bucket, param)
        self._start()
        for bucket in self.buckets:
            assert bucket.work is not None
            bucket.work.wait()
            for param in bucket.params:
                param.grad = wrap(bucket.views[id(param)], param.backend)
            bucket.work, bucket.waiting = None, set(bucket.views)
        self._started = 0

    def _final(self, param: ExTensor) -> None:
        bucket = self._of.get(id(param))
        if bucket is not None:
            self._put(bucket, param)
            self._start()

    def _put(self, bucket: _Bucket, param: ExTensor) -> None:
        view = bucket.views[id(param)]
        view[...] = 0.0 if param.grad is None else param.grad.data
        bucket.waiting.discard(id(param))

    def _start(self) -> None:
        """Start all buckets that are complete, in one order on all ranks; drive on the others."""
        for bucket in self.buckets[: self._started]:
            if bucket.work is not None:
                bucket.work.done()
        while self._started < len(self.buckets):
            bucket = self.buckets[self._started]
            if bucket.waiting:
                return
            bucket.work = self.ranks.all_reduce(bucket.flat)
            self._started += 1
