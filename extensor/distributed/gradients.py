"""Gradients of all micro-batches and ranks, summed in buckets while the backward pass runs.

The last layers' gradients are final first. So buckets hold parameters from last to first, and a
bucket's reduction starts as soon as the last micro-batch of this rank has all of its gradients.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np

from extensor.autograd.mode import post_accumulate_grad_hook
from extensor.autograd.tensor import ExTensor, wrap
from extensor.distributed.communicator import Array, Communicator
from extensor.distributed.reduction import BLOCK, ReductionWork, make_reduction, padded_size

__all__ = ["Bucket", "GradientBuckets"]


class Bucket:
    """Neighbouring parameters: their gradients side by side, each from a multiple of `BLOCK` on."""

    def __init__(
        self, params: Sequence[ExTensor], ranks: Communicator, name: str, how: dict[str, Any]
    ) -> None:
        self.params, self.starts = list(params), {}
        size = 0
        for param in self.params:
            self.starts[id(param)] = size
            size += -(-param.size // BLOCK) * BLOCK
        self.backend = self.params[0].backend
        self.size = padded_size(size, ranks.size)
        ends = [*self.starts.values(), self.size][1:]
        self._gaps = [
            np.zeros(end - start - param.size, np.float32)
            for param, start, end in zip(self.params, self.starts.values(), ends, strict=True)
        ]
        self.ranks = ranks
        self.reduction = make_reduction(name, self.size, ranks, device=self.backend.name, **how)
        # A reduction reads the first micro-batch's gradients until the second one's are there.
        self._flats: list[Array] = []
        self._views: dict[tuple[int, int], Array] = {}
        self._read: list[Array] = []
        self.sums: Array = self._zeros()
        self.waiting = set(self.starts)
        self.work: ReductionWork | None = None

    def put(self, param: ExTensor) -> None:
        """Take a gradient; add the bucket to the sum when it has them all."""
        self.waiting.discard(id(param))
        if self.waiting:
            return
        flat = self._alone()
        if flat is None:
            if not self._flats:
                self._flats = [self.reduction.buffer(), self._zeros()]
            flat = self._flats[self.reduction.count % 2]
            self._fill(flat)
        with self.ranks.beside(self.reduction.number):
            self.reduction.add(flat)
        self._read.append(flat)

    def _fill(self, flat: Array) -> None:
        """Copy the gradients to their places."""
        if self.backend.xp is not np:
            for param in self.params:
                view = self.lasting_view(flat, param)
                view[...] = 0.0 if param.grad is None else param.grad.data
            return
        parts = []
        for param, gap in zip(self.params, self._gaps, strict=True):
            part = np.zeros(param.size, np.float32) if param.grad is None else param.grad.data
            parts += [part.reshape(-1), gap]
        np.concatenate(parts, out=flat)

    def let_go(self) -> None:
        """Let go of gradients that were read: what is queued beside the computation is joined.

        Before, their memory would be given to the backward pass that goes on. The first is read
        again when the second comes.
        """
        self._read = self._read[-1:] if self.reduction.count == 1 else []

    def _alone(self) -> Array | None:
        """The gradient of a parameter that fills the bucket, as it lies; None to copy it."""
        param = self.params[0]
        if param.size != self.size or param.grad is None:
            return None
        grad = param.grad.data
        return grad.reshape(-1) if grad.flags.c_contiguous and grad.dtype == np.float32 else None

    def release(self) -> None:
        """Give back the memory of whole gradients, until the next ones come."""
        self._flats.clear()
        self._views.clear()

    def _zeros(self) -> Array:
        return self.backend.xp.zeros(self.size, self.backend.xp.float32)

    def view(self, flat: Array, param: ExTensor) -> Array:
        """A parameter's part of an array of the bucket."""
        start = self.starts[id(param)]
        return flat[start : start + param.size].reshape(param.shape)

    def lasting_view(self, flat: Array, param: ExTensor) -> Array:
        """The `view` of an array that the bucket keeps; cupy takes long to make one."""
        key = id(flat), id(param)
        if key not in self._views:
            self._views[key] = self.view(flat, param)
        return self._views[key]


class GradientBuckets:
    """Sums the gradients of a model's parameters over micro-batches and ranks.

    Each backward pass is one micro-batch's, inside ``with buckets.micro_batch(...)``. A parameter
    that a micro-batch gives no gradient counts as zeros.

    Args:
        params: parameters of one device, in the order of the model's layers, the same on all ranks.
        ranks: the communicator.
        name: how sums are taken: a name in `GRAD_COMM`.
        bucket_bytes: how many bytes of gradients are reduced at once; None is the communicator's.
        how: more for `make_reduction`, such as ``seed``.

    Raises:
        ValueError: for parameters that are not float32, or an unknown name.

    >>> from extensor.distributed import GradientBuckets, LocalCommunicator
    >>> layer = et.nn.Linear(2, 1, rng=0)
    >>> buckets = GradientBuckets(list(layer.parameters()), LocalCommunicator(), "exact")
    >>> for last in (False, True):
    ...     with buckets.micro_batch(last=last):
    ...         layer(et.ones((1, 2))).sum().backward()
    >>> buckets.finish(step=0)
    >>> layer.weight.grad.tolist()
    [[2.0, 2.0]]
    """

    def __init__(
        self,
        params: Sequence[ExTensor],
        ranks: Communicator,
        name: str = "float32",
        bucket_bytes: int | None = None,
        **how: Any,
    ) -> None:
        others = sorted({p.dtype.name for p in params} - {"float32"})
        if others:
            raise ValueError(f"params: expected float32 weights, got {', '.join(others)}")
        self.params, self.ranks = list(params), ranks
        most = ranks.bucket_bytes if bucket_bytes is None else bucket_bytes
        groups: list[list[ExTensor]] = [[]]
        for param in reversed(self.params):
            if groups[-1] and sum(p.nbytes for p in groups[-1]) + param.nbytes > most:
                groups.append([])
            groups[-1].append(param)
        self.buckets = [
            Bucket(group, ranks, name, {**how, "number": number})
            for number, group in enumerate(groups)
            if group
        ]
        self._of = {key: bucket for bucket in self.buckets for key in bucket.starts}
        self._started, self._last, self._step = 0, False, 0

    @contextlib.contextmanager
    def micro_batch(self, *, last: bool, step: int = 0) -> Iterator[None]:
        """Take the gradients of the one backward pass inside.

        Args:
            last: whether it is the step's last on this rank: then buckets are reduced while the
                backward pass goes on.
            step: of the run, for random bits.

        Returns:
            A context manager.

        >>> from extensor.distributed import GradientBuckets, LocalCommunicator
        >>> weight = et.nn.Parameter([1.0])
        >>> buckets = GradientBuckets([weight], LocalCommunicator())
        >>> with buckets.micro_batch(last=True):
        ...     (weight * 2).sum().backward()
        """
        self._last, self._step = last, step
        self._clear()
        with post_accumulate_grad_hook(self._final) if len(self.buckets) > 1 else nullcontext():
            yield  # nothing goes on beside the backward pass where one bucket takes all
        for bucket in self.buckets:
            for param in bucket.params:
                if id(param) in bucket.waiting:
                    bucket.put(param)
        if last:
            self._start()

    def start(self, step: int) -> None:
        """Start what has not started: other collectives may begin then, on all ranks, or `finish`.

        Args:
            step: as in `micro_batch`; a rank without any micro-batch calls this alone.

        >>> from extensor.distributed import GradientBuckets, LocalCommunicator
        >>> buckets = GradientBuckets([et.nn.Parameter([1.0])], LocalCommunicator())
        >>> buckets.start(step=0)
        """
        self._step = step
        for bucket in self.buckets:
            bucket.waiting.clear()
        self._start()

    def finish(self, step: int) -> None:
        """Start what has not started, wait for all, and make the sums the gradients.

        Args:
            step: as in `micro_batch`; a rank without any micro-batch calls this alone.

        >>> from extensor.distributed import GradientBuckets, LocalCommunicator
        >>> weight = et.nn.Parameter([1.0])
        >>> buckets = GradientBuckets([weight], LocalCommunicator())
        >>> with buckets.micro_batch(last=True):
        ...     (weight * 2).sum().backward()
        >>> buckets.finish(step=0)
        >>> weight.grad.tolist()
        [2.0]
        """
        self.start(step)
        works = [bucket.work for bucket in self.buckets if bucket.work is not None]
        while works:  # in turns: all ranks start collectives in one order
            for work in works:
                work.advance()
            works = [work for work in works if not work.done()]
        self.ranks.join()
        for bucket in self.buckets:
            bucket.let_go()
            self._publish(bucket)
            bucket.work, bucket.waiting = None, set(bucket.starts)
        self._started = 0

    def _clear(self) -> None:
        self.ranks.join()  # what reads the last micro-batch's gradients
        for bucket in self.buckets:
            bucket.let_go()
            bucket.waiting = set(bucket.starts)
            for param in bucket.params:
                param.grad = None

    def _final(self, param: ExTensor) -> None:
        bucket = self._of.get(id(param))
        if bucket is not None:
            bucket.put(param)
            if self._last and (self._started or not bucket.waiting):
                self._start()

    def _start(self) -> None:
        """Start all buckets that are complete, in one order on all ranks; drive on the others."""
        for bucket in self.buckets[: self._started]:
            if bucket.work is not None:
                bucket.work.done()
        while self._started < len(self.buckets):
            bucket = self.buckets[self._started]
            if bucket.waiting:
                return
            with self.ranks.beside(bucket.reduction.number) as queued:
                bucket.work = self._reduce(bucket)
                if queued:  # the whole reduction, of which nothing waits for this process
                    bucket.work.wait()
            self._started += 1

    def _reduce(self, bucket: Bucket) -> ReductionWork:
        return bucket.reduction.all_reduce(bucket.sums, 1.0, self._step)

    def _publish(self, bucket: Bucket) -> None:
        """Make a bucket's sums the gradients of its parameters."""
        for param in bucket.params:
            param.grad = wrap(bucket.lasting_view(bucket.sums, param), param.backend)
