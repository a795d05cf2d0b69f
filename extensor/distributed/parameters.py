"""ZeRO stage 3: each rank keeps its parts of the parameters; a layer gathers its own before use.

A bucket of parameters is gathered when a layer needs one of them, in the forward pass and again in
the backward pass, and let go when another bucket is gathered. Between, a parameter's data is NaN of
its shape, in no memory. What a recorded operation keeps of a parameter is a handle. A weight that
its layer quantizes travels packed: see `extensor.distributed.packed`.

Source: Rajbhandari, Rasley, Ruwase, He, "ZeRO", arXiv 1910.02054, section 5.3.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from extensor.autograd.mode import MODE, Observer
from extensor.autograd.storage import Kept
from extensor.autograd.tensor import ExTensor
from extensor.distributed.communicator import BUCKET_BYTES, Array, Communicator
from extensor.distributed.gradients import Bucket
from extensor.distributed.packed import PackedWeights
from extensor.distributed.zero import ShardedBuckets
from extensor.nn.linear import GemmLayer
from extensor.nn.module import Module
from extensor.ops.recipe_operands import SavedOperands
from extensor.quant.recipe import SLOTS

__all__ = ["GatheredBuckets"]

FORWARD, BACKWARD, FLOAT = "fprop.w", "dgrad.w", "float32"
"""What a bucket is whole for: a layer's product, or any use."""


class GatheredBuckets(ShardedBuckets):
    """`ShardedBuckets` of a model whose parameters are whole only while a layer uses them.

    All ranks must run the model as often, and in the same order. Where they do not, as in an
    evaluation that ranks divide, `hold` the parameters. A module that reads parameters of parts
    that it does not call names these parts in `Module.reads_weights`.

    Args:
        model: whose parameters, of one device, are shared by ``ranks``.
        ranks: the communicator.
        name: how gradients are summed: a name in `GRAD_COMM`.
        bucket_bytes: how many bytes of float32 are gathered, and reduced, at once: small,
            because a weight alone in its bucket may travel packed.
        how: more for `make_reduction`.

    Attributes:
        peak_bytes: of whole parameters that were there at once.

    Raises:
        ValueError: as `ShardedBuckets`.

    >>> from extensor.distributed import GatheredBuckets, LocalCommunicator
    >>> layer = et.nn.Linear(2, 1, rng=0)
    >>> buckets = GatheredBuckets(layer, LocalCommunicator())
    >>> layer.weight.tolist()
    [[nan, nan]]
    >>> layer(et.ones((1, 2))).shape
    (1, 1)
    """

    def __init__(
        self,
        model: Module,
        ranks: Communicator,
        name: str = "float32",
        bucket_bytes: int = BUCKET_BYTES,
        **how: Any,
    ) -> None:
        params = list(model.parameters())
        super().__init__(params, ranks, name, bucket_bytes, keep_gradients=False, **how)
        self.peak_bytes = self._float_bytes = self._held = 0
        self._whole: dict[int, Bucket]
        self._kinds: dict[int, str] = {}
        owners: Counter[int] = Counter()
        self._together: dict[int, list[Bucket]] = {}  # what a module's backward pass reads at once
        self._pins: Counter[int] = Counter()
        self._layers: dict[int, list[GemmLayer]] = {}
        self._handles = {key: _Handle(self, param) for key, param in _by_id(params).items()}
        for module in model.modules():
            read = [module, *(getattr(module, name) for name in module.reads_weights)]
            own = [v for each in read for v in vars(each).values() if id(v) in self._of]
            owners.update(map(id, own))
            if own:
                self._together.update((id(v), self._buckets_of(own)) for v in own)
                module.register_forward_pre_hook(partial(self._before, own))
                module.register_forward_hook(partial(self._after, own))
            if isinstance(module, GemmLayer):
                self._layers.setdefault(id(module.weight), []).append(module)
        for key, count in owners.items():
            if count > 1:
                del self._together[key]
        self._packed = PackedWeights(ranks, self.gathered)
        for bucket in self.buckets:
            first = id(bucket.params[0])
            layers = self._layers.get(first, ())
            self._packed.add(bucket, layers, owners[first], self.pieces[first])
        self._absent = {key: _no_values(param) for key, param in _by_id(params).items()}
        self._whole = {id(bucket): bucket for bucket in self.buckets}
        self._writes: dict[int, list[int]] = {}
        self._let_go()

    @property
    def gathered_bytes(self) -> int:
        """That this rank has received of other ranks' parameters."""
        return self._float_bytes + self._packed.received

    @property
    def packed_slots(self) -> set[tuple[str, str]]:
        """Operands of which a rank quantizes its own rows: (layer path, slot); none in `hold`."""
        return set() if self._held else self._packed.slots

    # --- what is whole --------------------------------------------------------------------------

    @contextlib.contextmanager
    def hold(self) -> Iterator[None]:
        """Keep all parameters whole inside, on all ranks.

        Returns:
            A context manager. What was written to the parameters inside is lost, unless `scatter`
            was called.

        >>> from extensor.distributed import GatheredBuckets, LocalCommunicator
        >>> layer = et.nn.Linear(1, 1, bias=False, rng=0)
        >>> buckets = GatheredBuckets(layer, LocalCommunicator())
        >>> with buckets.hold():
        ...     layer.weight.isnan().any().item()
        False
        """
        self._pin(self.buckets, FLOAT)
        self._held += 1
        self.ranks.synchronize()  # what reads the GPU next has no time limit
        try:
            yield
        finally:
            self._held -= 1
            self._unpin(self.buckets)
            self._let_go()

    def gather(self) -> None:
        """Let all parameters go: pieces have new values, which the next use gathers.

        >>> from extensor.distributed import GatheredBuckets, LocalCommunicator
        >>> buckets = GatheredBuckets(et.nn.Linear(1, 1), LocalCommunicator())
        >>> buckets.gather()
        """
        capture = self.buckets[0].backend.capturing if self.buckets else None
        if capture is not None:  # a replay updates the pieces, too
            capture.on_replay(self._forget)
        self._forget()
        self._let_go()

    def _forget(self) -> None:
        self._packed.forget()
        self._writes.clear()

    def scatter(self) -> None:
        """See :meth:`ShardedBuckets.scatter`; the parameters are whole, as inside `hold`.

        >>> from extensor.distributed import GatheredBuckets, LocalCommunicator
        >>> buckets = GatheredBuckets(et.nn.Linear(1, 1), LocalCommunicator())
        >>> with buckets.hold():
        ...     buckets.scatter()
        """
        super().scatter()
        self._forget()

    def values(self, param: ExTensor) -> Array:
        """A parameter's whole array, for the backward pass; other layers' buckets are let go.

        Args:
            param: which.

        Returns:
            float32 of its shape.

        >>> from extensor.distributed import GatheredBuckets, LocalCommunicator
        >>> layer = et.nn.Linear(1, 1, rng=0)
        >>> GatheredBuckets(layer, LocalCommunicator()).values(layer.weight).shape
        (1, 1)
        """
        together = self._together.get(id(param), [self._of[id(param)]])
        for bucket in together:
            self._check_written(bucket)
        if not all(self._serves(bucket, BACKWARD) for bucket in together):
            self._let_go()
            for bucket in together:
                self._need(bucket, BACKWARD)
        return param.data

    def _before(self, own: Sequence[ExTensor], module: Module, args: Any) -> None:
        self._pin(self._buckets_of(own), FORWARD)

    def _after(self, own: Sequence[ExTensor], module: Module, out: Any) -> None:
        self._unpin(self._buckets_of(own))

    def _buckets_of(self, own: Sequence[ExTensor]) -> list[Bucket]:
        return list({id(bucket): bucket for bucket in (self._of[id(p)] for p in own)}.values())

    def _pin(self, buckets: Sequence[Bucket], kind: str) -> None:
        for bucket in buckets:
            self._check_written(bucket)
        self._pins.update(map(id, buckets))
        if not all(self._serves(bucket, kind) for bucket in buckets):
            self._let_go()
        for bucket in buckets:
            self._need(bucket, kind)

    def _unpin(self, buckets: Sequence[Bucket]) -> None:
        self._pins.subtract(map(id, buckets))

    def _serves(self, bucket: Bucket, kind: str) -> bool:
        """Whether a bucket is whole, in float32 or as the use needs it."""
        if id(bucket) not in self._whole:
            return False
        there = self._kinds[id(bucket)]
        return there == FLOAT or (there == kind and self._packed.weights[id(bucket)].is_given(kind))

    def _need(self, bucket: Bucket, kind: str) -> None:
        if self._serves(bucket, kind):
            return
        packed = None if kind == FLOAT else self._packed.of(bucket, kind)
        for param in bucket.params:
            self._drop_operands(param)
        if packed is None:
            kind = FLOAT
            flat = self.whole(bucket, lambda param: self.pieces[id(param)].data)
            self._float_bytes += flat.nbytes - flat.nbytes // self.ranks.size
            for param in bucket.params:
                param.data = bucket.view(flat, param)
        else:
            bucket.params[0].data = self._absent[id(bucket.params[0])]
            self._packed.weights[id(bucket)].give(kind, packed)
        self._whole[id(bucket)], self._kinds[id(bucket)] = bucket, kind
        floats = (b for key, b in self._whole.items() if self._kinds[key] == FLOAT)
        there = sum(4 * b.size for b in floats) + self._packed.nbytes
        self.peak_bytes = max(self.peak_bytes, there)

    def _check_written(self, bucket: Bucket) -> None:
        """Refuse pieces that were written since the first use after `gather` or `scatter`."""
        found = [self.pieces[id(param)]._version[0] for param in bucket.params]
        if self._writes.setdefault(id(bucket), found) != found:
            raise RuntimeError(
                "sharded parameters: expected gather() after a write to a piece, got a use of the "
                "values before it; the way out: call gather() on all ranks when pieces are written"
            )

    def _let_go(self) -> None:
        """Let go of what no layer uses now, and of operands made from it."""
        for bucket in list(self._whole.values()):
            if self._pins[id(bucket)] > 0:
                continue
            del self._whole[id(bucket)]
            for param in bucket.params:
                param.data = self._absent[id(param)]
                self._drop_operands(param)

    def _drop_operands(self, param: ExTensor) -> None:
        for layer in self._layers.get(id(param), ()):
            if layer.quant is not None:
                layer.quant.state.weight_cache.drop(layer.quant.path, SLOTS)

    # --- a micro-batch --------------------------------------------------------------------------

    @contextlib.contextmanager
    def micro_batch(self, *, last: bool, step: int = 0) -> Iterator[None]:
        """See :meth:`GradientBuckets.micro_batch`; the forward pass runs inside, too.

        Args:
            last: whether it is the step's last on this rank.
            step: of the run, for random bits.

        Returns:
            A context manager.

        >>> from extensor.distributed import GatheredBuckets, LocalCommunicator
        >>> layer = et.nn.Linear(1, 1, rng=0)
        >>> buckets = GatheredBuckets(layer, LocalCommunicator())
        >>> with buckets.micro_batch(last=True):
        ...     layer(et.ones((1, 1))).sum().backward()
        """
        before = MODE.observer
        MODE.observer = _Recorder(self._handles, before)
        try:
            with super().micro_batch(last=last, step=step):
                yield
            self.ranks.synchronize()  # what reads the GPU next has no time limit
        finally:
            MODE.observer = before
            self._let_go()


class _Handle(Kept):
    """Stands for a parameter's array until the backward pass reads it."""

    arrays = ()

    def __init__(self, buckets: GatheredBuckets, param: ExTensor) -> None:
        self._buckets, self._param = buckets, param

    def values(self, backend: Any) -> Array:
        """The whole array."""
        return self._buckets.values(self._param)


class _Recorder:
    """Puts handles in place of parameters' arrays in what is recorded."""

    def __init__(self, handles: dict[int, _Handle], then: Observer | None) -> None:
        self._handles, self._then = handles, then

    def recorded(self, node: Any) -> None:
        """See `Observer`."""
        for i, edge in enumerate(node.edges):
            handle = self._handles.get(id(edge))
            if handle is None:
                continue
            if isinstance(node.arrays[i], node.backend.xp.ndarray):
                node.arrays[i] = handle
            if isinstance(node.saved, SavedOperands) and node.saved.w is not None:
                node.saved = node.saved._replace(w=None)
        if self._then is not None:
            self._then.recorded(node)

    def replaced(self, array: Any, kept: Any) -> None:
        """See `Observer`."""
        if self._then is not None:
            self._then.replaced(array, kept)

    def accumulated(self, leaves: Sequence[Any]) -> None:
        """See `Observer`."""
        if self._then is not None:
            self._then.accumulated(leaves)


def _no_values(param: ExTensor) -> Array:
    """NaN of a parameter's shape, in no memory."""
    xp = param.backend.xp
    return xp.broadcast_to(xp.full((), np.nan, np.float32), param.shape)


def _by_id(params: Sequence[ExTensor]) -> dict[int, ExTensor]:
    return {id(param): param for param in params}
