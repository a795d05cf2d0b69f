"""Gated experts with packed weights, as functions like those of `extensor_cuda.nn`.

Eight launches, none of which waits for the host: the choices are sorted, rows go to their places,
and each of the two layers expands its matrices to bfloat16 where they lie and multiplies them in
one grouped product. With S = sum |x| |w| over K, a product is off by up to (K 2**-22 + 2**-20) S
before it is rounded to bfloat16.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, ref

import numpy as np

from extensor.backends.protocol import GatedExperts
from extensor.backends.unsupported import Unsupported
from extensor.quant.array import QuantArray
from extensor_cuda.dispatch import FLOATS, Call
from extensor_cuda.kernels.experts import rows
from extensor_cuda.kernels.gemm.gemm_sm90 import Epilogue, Packed, Scales, empty_rows, gemm
from extensor_cuda.kernels.prepare import expand as expanding
from extensor_cuda.matmul.expand import bf16_program
from extensor_cuda.matmul.partition import configure
from extensor_cuda.matmul.stored import capability_of, stored_gap
from extensor_cuda.runtime.capture import current_capture
from extensor_cuda.runtime.memory import lasting

__all__ = ["gated_experts"]

Array = Any


class _Plan(NamedTuple):
    """What a call needs to know of experts, and of which arrays it knows that.

    Attributes:
        held: the matrices and biases.
        gap: why kernels do not run them; None if they do.
        layers: tables of addresses of the matrices of both layers, see `expanding.expand_several`.
        biases: addresses of the biases of both layers, or None.
    """

    held: Sequence[ref[Any]]
    gap: Unsupported | None
    layers: tuple[Array, Array] | None
    biases: tuple[Array, Array] | None

    def is_of(self, held: Sequence[Any]) -> bool:
        """Whether these are its arrays."""
        return len(held) == len(self.held) and all(map(_is, self.held, held))


def _is(known: ref[Any], array: Any) -> bool:
    return known() is array


_PLANS: WeakKeyDictionary[QuantArray, _Plan] = WeakKeyDictionary()


def gated_experts(xp: Any, x: Array, weights: Array, chosen: Array, experts: GatedExperts) -> Call:
    """See the protocol. Waits for the GPU the first time that weights are seen."""
    if x.dtype != FLOATS[1] or not x.size or weights.dtype not in FLOATS:
        return Unsupported(f"{x.dtype} activations of shape {x.shape}; the kernels take bfloat16")
    widest = max(x.shape[1], experts.gates[0].shape[0])
    if weights.size > 1 << 30 or weights.size * widest >= 1 << 34:
        return Unsupported(f"{weights.shape} choices of up to {widest} values")
    held = [a for each in (*experts.layers, *(experts.biases or ())) for a in each]
    plan = _PLANS.get(held[0])
    if plan is None or not plan.is_of(held):
        plan = _PLANS[held[0]] = _planned(xp, experts, held)
    if plan.gap is not None:
        return plan.gap
    tokens, parts, choices = (xp.ascontiguousarray(a) for a in (x, weights, chosen))
    return partial(_run, xp, tokens, parts, choices, experts, plan)


def _planned(xp: Any, experts: GatedExperts, held: Sequence[Any]) -> _Plan:
    known, gap = [ref(a) for a in held], _gap(xp, experts)
    if gap is not None:
        return _Plan(known, gap, None, None)
    both = [w for pair in zip(experts.gates, experts.ups, strict=True) for w in pair]
    with lasting():
        tables = tuple(
            _addresses(xp, [*(w.codes for w in layer), *(w.scales for w in layer)])
            for layer in (both, experts.downs)
        )
        biases = None
        if experts.biases is not None:
            gates, ups, downs = experts.biases
            pairs = [b for pair in zip(gates, ups, strict=True) for b in pair]
            biases = _addresses(xp, pairs), _addresses(xp, downs)
    for layer, table in zip((both, experts.downs), tables, strict=True):
        flags = xp.zeros(len(layer), dtype=np.uint32)
        _expand(layer[0], table, xp, flags)
        if flags.get().any():
            return _Plan(known, Unsupported("values that bfloat16 does not hold"), None, None)
    return _Plan(known, None, tables, biases)


def _gap(xp: Any, experts: GatedExperts) -> Unsupported | None:
    """Why kernels do not run experts."""
    if len(experts.gates) > rows.MAX_EXPERTS:
        return Unsupported(f"{len(experts.gates)} experts; the kernels have {rows.MAX_EXPERTS}")
    for layer in experts.layers:
        first = layer[0]
        if (gap := stored_gap(first, first, capability_of(xp))) is not None:
            return gap
        if not first.spec.is_mx or first.spec.axis != 1:
            return Unsupported(f"{first.spec.format}, whose scales are not all of its blocks'")
        if any(not _alike(w, first) for w in layer):
            return Unsupported("matrices of several formats or shapes, or strided ones")
        if first.shape[0] % 8 or first.shape[1] % 16:
            return Unsupported(f"weights of shape {first.shape}; the kernels take n 8 x n 16")
    for biases in experts.biases or ():
        if any(b.dtype != FLOATS[1] or not _lies_whole(b) for b in biases):
            return Unsupported("biases of another dtype, or strided ones")
    return None


def _lies_whole(a: Array) -> bool:
    return bool(a.flags.c_contiguous and a.data.ptr % 16 == 0)


def _alike(w: QuantArray, first: QuantArray) -> bool:
    same = w.spec == first.spec and w.shape == first.shape
    return same and _lies_whole(w.codes) and bool(w.scales.flags.c_contiguous)


def _addresses(xp: Any, arrays: Sequence[Array]) -> Array:
    return xp.asarray(np.array([int(a.data.ptr) for a in arrays], np.uint64))


def _expand(first: QuantArray, table: Array, xp: Any, flags: Array | None = None) -> Array:
    """Matrices like the first as bfloat16, one below the other."""
    n, k = first.shape
    out = xp.empty((table.size // 2 * n, k), dtype=np.uint16)
    like = Packed(first.codes, first.scales)
    expanding.expand_several(bf16_program(first), table, like, n, out, flags)
    return out


def _product(x: Array, first: QuantArray, table: Array, offsets: Array, xp: Any) -> Array:
    """Rows times the matrices of their group, rounded to bfloat16."""
    w, groups = _expand(first, table, xp), len(offsets) - 1
    out = empty_rows(xp, len(x), len(w) // groups, FLOATS[1])
    config = configure("bf16", *out.shape, "bfloat16")
    gemm(x.view(np.uint16), w, out, config, Epilogue(Scales(), offsets=offsets))
    return out


def _run(
    xp: Any, x: Array, weights: Array, chosen: Array, experts: GatedExperts, plan: _Plan
) -> Array:
    assert plan.layers is not None
    if (capture := current_capture()) is not None:  # a graph knows addresses alone
        capture.keep(*plan.layers, *(plan.biases or ()))
    offsets, source, places = rows.route(chosen, len(experts.gates), xp)
    of_both, of_down = plan.biases or (None, None)
    hidden = rows.to_places(x, source, weights.shape[1], xp)
    hidden = _product(hidden, experts.gates[0], plan.layers[0], offsets, xp)
    hidden = rows.gate(hidden, source, chosen, of_both, experts.alpha, experts.limit, xp)
    made = _product(hidden, experts.downs[0], plan.layers[1], offsets, xp)
    return rows.from_places(made, places, chosen, weights, of_down, xp)
