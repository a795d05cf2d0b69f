"""What error feedback keeps between steps, by the names of parameters: for checkpoints.

Each rank keeps what rounding left over of the gradients that it sent, and the owner of a part what
rounding left over of the mean. Files name both by parameter, so that they do not depend on buckets.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from extensor.autograd.tensor import ExTensor, wrap
from extensor.distributed.communicator import Array
from extensor.distributed.gradients import Bucket, GradientBuckets

__all__ = ["load_residuals", "rescale_residuals", "residuals"]


def residuals(buckets: GradientBuckets, params: Mapping[str, ExTensor]) -> dict[str, Array]:
    """This rank's part of what error feedback keeps. All ranks call this together.

    Args:
        buckets: whose reductions keep it.
        params: the parameters by name.

    Returns:
        Host arrays of the parameters' shapes, none without error feedback: ``sent.<rank>.<name>``
        of all parameters, and ``mean.<name>`` of those in every size-th bucket.

    >>> from extensor.distributed import GradientBuckets, LocalCommunicator
    >>> from extensor.distributed.residuals import residuals
    >>> w = et.nn.Parameter([1.0])
    >>> buckets = GradientBuckets([w], LocalCommunicator(), "mxint8")
    >>> sorted(residuals(buckets, {"w": w}))
    ['mean.w', 'sent.0.w']
    """
    names = {id(param): name for name, param in params.items()}
    found: dict[str, Array] = {}
    for number, bucket in enumerate(buckets.buckets):
        state, ranks = bucket.reduction.state(), bucket.reduction.ranks
        if not state:
            continue
        mean = state["mean"]
        if ranks.size > 1:
            mean = bucket.backend.xp.empty(bucket.size, np.float32)
            ranks.all_gather(state["mean"], mean).wait()
        for param in bucket.params:
            name = names[id(param)]
            found[f"sent.{ranks.rank}.{name}"] = _host(bucket, state["sent"], param)
            if number % ranks.size == ranks.rank:
                found[f"mean.{name}"] = _host(bucket, mean, param)
    return found


def _host(bucket: Bucket, flat: Array, param: ExTensor) -> Array:
    return wrap(bucket.view(flat, param), bucket.backend).to("cpu").numpy().copy()


def load_residuals(
    buckets: GradientBuckets, params: Mapping[str, ExTensor], tensors: Mapping[str, Any]
) -> None:
    """Go on with what all ranks' `residuals` returned, on any number of ranks.

    On as many ranks as before everything is as it was. On others, new rank r takes over what the
    old ranks r, r + size, and so on had sent too little; nothing is lost.

    Args:
        buckets: as for `residuals`.
        params: likewise.
        tensors: the arrays of all ranks by name.

    Raises:
        ValueError: for a name or shape that does not fit.

    >>> from extensor.distributed import GradientBuckets, LocalCommunicator
    >>> from extensor.distributed.residuals import load_residuals, residuals
    >>> w = et.nn.Parameter([1.0])
    >>> buckets = GradientBuckets([w], LocalCommunicator(), "mxint8")
    >>> load_residuals(buckets, {"w": w}, residuals(buckets, {"w": w}))
    """
    places = {id(param): bucket for bucket in buckets.buckets for param in bucket.params}
    means: dict[int, Array] = {}
    for bucket in buckets.buckets:
        if state := bucket.reduction.state():
            state["sent"][...] = 0
            means[id(bucket)] = bucket.backend.xp.zeros(bucket.size, np.float32)
    expected = {f"mean.{name}" for name in params} if means else set()
    if missing := sorted(expected - tensors.keys()):
        raise ValueError(f"residuals: expected {missing[0]}, which is not there")
    for key in sorted(tensors, key=_order):
        kind, _, rest = key.partition(".")
        rank, _, name = rest.partition(".") if kind == "sent" else ("0", "", rest)
        param, value = params.get(name), tensors[key]
        bad = param is None or kind not in ("sent", "mean") or not rank.isdigit() or not means
        if param is None or bad or value.shape != param.shape or value.dtype != np.float32:
            raise ValueError(f"residuals: {key!r} of shape {value.shape} fits no parameter here")
        bucket = places[id(param)]
        ranks = bucket.reduction.ranks
        array = bucket.backend.xp.asarray(value)
        if kind == "mean":
            bucket.view(means[id(bucket)], param)[...] = array
        elif int(rank) % ranks.size == ranks.rank:
            view = bucket.view(bucket.reduction.state()["sent"], param)
            view += array
    for bucket in buckets.buckets:
        if id(bucket) in means:
            parts = means[id(bucket)].reshape(bucket.reduction.ranks.size, -1)
            bucket.reduction.state()["mean"][...] = parts[bucket.reduction.ranks.rank]


def _order(key: str) -> tuple[int, str]:
    """Old ranks in the order of their numbers."""
    second = key.split(".", 2)[1]
    return (int(second) if second.isdigit() else 0, key)


def rescale_residuals(buckets: GradientBuckets, factor: float) -> None:
    """Multiply what error feedback keeps, when gradients get another loss scale.

    Args:
        buckets: whose reductions keep it.
        factor: the new scale over the old one.

    >>> from extensor.distributed import GradientBuckets, LocalCommunicator
    >>> from extensor.distributed.residuals import rescale_residuals
    >>> rescale_residuals(GradientBuckets([et.nn.Parameter([1.0])], LocalCommunicator()), 0.5)
    """
    for bucket in buckets.buckets:
        for array in bucket.reduction.state().values():
            array *= np.float32(factor)
