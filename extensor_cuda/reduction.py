"""Gradient sums on the GPU: the kernel that runs each step, or why there is none.

Functions as in `extensor_cuda.nn`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from extensor.backends.protocol.reduction import PeerRows
from extensor.backends.unsupported import Unsupported
from extensor.random import Stream
from extensor_cuda.dispatch import Call, dtype_gap, unless
from extensor_cuda.kernels.reduction import peer_barrier as barrier
from extensor_cuda.kernels.reduction import reduction as kernels

__all__ = [
    "add_limbs", "block_max", "fixed_point", "fixed_point_mean", "limb_total", "mxint_pack",
    "mxint_repack", "mxint_unpack", "peer_barrier",
]  # fmt: skip

Array = Any
_ALIGNMENT = 16
"""Bytes that a thread reads at once."""


def _gap(*arrays: Array | None) -> Unsupported | None:
    """Why no kernel reads or writes these arrays, the first of them of gradients."""
    given = [a for a in arrays if a is not None]
    if not all(a.flags.c_contiguous and a.data.ptr % _ALIGNMENT == 0 for a in given):
        return Unsupported("arrays that are strided or not aligned to 16 bytes")
    return dtype_gap(given[:1]) if given else None


def _packed_gap(packed: Array | PeerRows) -> Unsupported | None:
    """Why no kernel reads or writes these rows of bytes."""
    if isinstance(packed, PeerRows):
        return _packed_gap(packed.rows[0])
    if not packed.size:
        return Unsupported("an empty array")
    return None if packed.flags.c_contiguous else Unsupported("strided rows of bytes")


def block_max(xp: Any, x: Array) -> Call:
    """See the protocol."""
    return unless(_gap(x), lambda: kernels.block_max(x, xp))


def fixed_point(xp: Any, x: Array, anchors: Array) -> Call:
    """See the protocol."""
    return unless(_gap(x), lambda: kernels.fixed_point(x, anchors, xp))


def add_limbs(xp: Any, limbs: Array, x: Array, before: Array, after: Array) -> Call:
    """See the protocol."""
    return unless(_gap(x, limbs), lambda: kernels.add_limbs(limbs, x, before, after))


def limb_total(xp: Any, limbs: Array, before: Array, after: Array) -> Call:
    """See the protocol."""
    gap = None if limbs.flags.c_contiguous else Unsupported("strided limbs")
    return unless(gap, lambda: kernels.limb_total(limbs, before, after, xp))


def fixed_point_mean(xp: Any, total: Array, anchors: Array, divisor: float) -> Call:
    """See the protocol."""
    gap = None if total.flags.c_contiguous else Unsupported("strided sums")
    return unless(gap, lambda: kernels.fixed_point_mean(total, anchors, divisor, xp))


def mxint_pack(
    xp: Any,
    x: Array,
    bits: int,
    stream: Stream | None,
    first_block: int,
    residual: Array | None,
    out: Array,
) -> Call:
    """See the protocol. One launch."""
    args = (x, bits, stream, first_block, residual, out)
    return unless(_gap(x, residual) or _packed_gap(out), lambda: kernels.pack(*args))


def mxint_unpack(
    xp: Any, packed: Array | PeerRows, bits: int, divisor: float, add: bool, out: Array
) -> Call:
    """See the protocol. One launch."""
    gap = _gap(out) or _packed_gap(packed)
    return unless(gap, lambda: kernels.unpack(packed, bits, divisor, add, out))


def mxint_repack(
    xp: Any,
    packed: Array | PeerRows,
    bits: int,
    divisor: float,
    stream: Stream | None,
    first_block: int,
    residual: Array | None,
    out: Array,
) -> Call:
    """See the protocol. One launch."""
    bytes_out = out.dtype == np.uint8
    gap = _packed_gap(out) if bytes_out else _gap(out)
    args = (packed, bits, divisor, stream, first_block, residual, out)
    gap = gap or _packed_gap(packed) or (None if residual is None else _gap(residual))
    return unless(gap, lambda: kernels.repack(*args))


def peer_barrier(xp: Any, flags: PeerRows, rank: int, stop: Array) -> Call:
    """See the protocol. One launch of one warp."""
    return unless(None, lambda: barrier.peer_barrier(flags, rank, stop))
