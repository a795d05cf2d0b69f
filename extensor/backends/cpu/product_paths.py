"""Which of the C++ core's products multiplies two operands, and in which steps.

A product of blocked matrices is *bf16* where this CPU multiplies bfloat16 fast, every value is
exactly one, and no sum can leave float32's normal range (`_bf16_gap`). AMX tiles sum runs of 32
terms in float32, the even and the odd ones apart, and add them in the order of K. AVX-512's dot
products (`avx512_bf16`, on AMD's CPUs) add pairs in the order of K; where integers serve, they are
faster there and go first. Else it is *integer* where both elements are small integers times a power
of two (e2m1, e2m3, int8, int4): exact int32 sums over ``step`` elements that share both scales,
each rounded to float32, times its two scales, added in the order of K. With one float32 scale a row
on both sides it is *int8*: the same sums, on AMX tiles. Otherwise it is *float*: values as
`dequantize` gives them, multiplied and added in float32.

Products of operands (float32 arrays of decoded values, inside quantized ops) are bf16 too where
they fit (`operand_factors`), and BLAS's otherwise.

With a (M, K), b (N, K), u = 2**-24, gamma_n = n u / (1 - n u), no overflow, and S = sum |a| |b|:

    bf16      |error| <= gamma_(ceil(K / 32) + 18) S on AMX tiles, gamma_(K + 4) S by dot products
    integer   |error| <= gamma_(ceil(K / step) + 4) S
    operands  as bf16; with factors gamma_(ceil(K / 32) + 36) S and gamma_(K + 22) S
    float     |error| <= gamma_(K + 4) S
    weights   |error| <= gamma_(K + 4) S; with minimums gamma_(K + 6) S'

against the product of the exact values (codes times scales, unrounded), up to what underflows:
less than 2**-126 a term, nothing for bf16 (before a tensor scale); for weights also 2**-149 of the
term's block scale, where a block's sum of x times codes is scaled as a whole: up to four rows of
finite x below 2**60. Other weight-only products have the bits of the float32 product with the
decoded weights. S' has |scale * (code - least code)| + |minimum| in the place of |b|. Up to eight
rows of x, 16 with 6 bits and K of 256 or more, have kernels of their own on AVX-512 VNNI and VBMI,
each row by itself. E3M2 and FP8 weights are decoded. Others meet x as integers of 24 bits: 2 u T
more, where T has in the place of |a| the largest |a| of its group, eight elements from a multiple
of eight on with 4 bits, else four.

On AMX tiles a term of a bf16 product passes at most 16 multiply-adds, one addition of even to odd,
ceil(K / 32) to the result and the tensor scale: 18 + ceil(K / 32) roundings (Higham, Accuracy and
Stability of Numerical Algorithms, 3.1). Factors of operands are known to a relative 2**-21, 8 u,
each.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any
from weakref import WeakKeyDictionary

import ml_dtypes
import numpy as np

from extensor.backends.unsupported import Unsupported
from extensor.formats import ElementFormat
from extensor.quant.array import QuantArray
from extensor.quant.spec import QuantSpec

__all__ = [
    "BlockProduct",
    "choose_block_product",
    "choose_weight_only",
    "matrix",
    "operand_factors",
]

_MAX_STEP = 8192  # of an exact sum: with zero points it and its parts stay in int32
_LARGEST_PRODUCT = 2.0**100  # of two scales; with weights of scales up to 1 it is finite anyway
_BF16_DIGITS = 8  # of a bfloat16, and so of an element and its scale together
_MIN_SIDE, _MIN_WORK = 32, 1 << 19  # of operand products: below, BLAS is faster (measured)
_SMALL = 127 - 40  # of e8m0 bytes; no two blocks above it come near underflow
_MATRICES: WeakKeyDictionary[QuantArray, tuple[Any, Any, float, bool]] = WeakKeyDictionary()
_ROWS = (np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16))  # of activations beside weights
_MAGNITUDE = {4: (0x77,), 6: (0xDF, 0xF7, 0x7D), 8: (0x7F,)}  # bits of packed codes but the signs


@dataclass(frozen=True)
class BlockProduct:
    """The core's product of two blocked matrices.

    Attributes:
        kind: "bf16", "int8", "integer" or "float"; see above.
        step: elements of K in an exact integer sum; 0 for other kinds.
        why: why a product with tiles is not on them, after ": "; else empty.
        fixed: whether the values of the left operand decide nothing of this.
    """

    kind: str
    step: int
    why: str = ""
    fixed: bool = False

    @property
    def on_tiles(self) -> bool:
        """Whether it runs on tiles of bfloat16 or int8."""
        return self.kind in ("bf16", "int8")


def choose_block_product(core: Any, a: QuantArray, b: QuantArray) -> BlockProduct | Unsupported:
    """The core's product of a and b^T, or why it has none."""
    step = _block_step(a, b)
    if isinstance(step, Unsupported):
        return step
    other = "integer" if step else "float"
    if not core.gemm_has_bf16() or (step and not core.gemm_has_amx()):
        return BlockProduct(other, step, fixed=step > 0 and _largest_scale(b) <= 1)
    if step and _on_int8_tiles(a, b):
        return BlockProduct("int8", step)
    gap = _bf16_gap(a, b)
    return BlockProduct("bf16", 0) if gap is None else BlockProduct(other, step, f": {gap}")


def _matrix_gap(
    spec: QuantSpec, shape: tuple[int, ...], weights: bool = False
) -> Unsupported | None:
    """Why the core's products cannot take an operand; None if they can.

    ``weights``: whether minimums, super-blocks and codes of any number of bits are taken.
    """
    if len(shape) != 2:
        return Unsupported(f"{len(shape)} axes; the core multiplies matrices")
    if spec.axis != 1:
        return Unsupported(f"blocks along axis {spec.axis}; the core takes them along the last")
    if math.prod(shape) == 0:
        return Unsupported("empty array")
    if spec.kernel_gap and (spec.row.outliers or not weights):
        return Unsupported(spec.kernel_gap)
    if spec.transform:
        return Unsupported("a Hadamard transform to undo")
    return None


def matrix(core: Any, q: QuantArray, widen: bool = True) -> Any:
    """The core's view of a blocked matrix, kept while the matrix is and its bytes need no copy.

    Args:
        core: the extension module.
        q: (rows, K), blocked along K.
        widen: give float16 scales as float32; only weight-only products read float16.
    """
    tensor_scale = 1.0 if q.tensor_scale is None else float(q.tensor_scale)
    if (kept := _MATRICES.get(q)) is not None and kept[1:] == (core, tensor_scale, widen):
        return kept[0]
    codes, scales, zero_points = q.codes, q.scales, q.zero_points
    if widen and scales.dtype == np.float16:
        scales = scales.astype(np.float32)
    tile_rows, tile_length = _tile(q.spec, q.shape)
    made = core.Matrix(
        element=q.spec.row.element.name,
        scale=q.spec.scale_name,
        codes=np.ascontiguousarray(codes),
        scales=np.ascontiguousarray(scales),
        zero_points=None if zero_points is None else np.ascontiguousarray(zero_points),
        tensor_scale=tensor_scale,
        k=q.shape[1],
        tile_rows=tile_rows,
        tile_length=tile_length,
        **_affine_parts(q, tile_length),
    )
    if scales is q.scales and all(part.flags.c_contiguous for part in q.parts.values()):
        _MATRICES[q] = made, core, tensor_scale, widen
    return made


def _affine_parts(q: QuantArray, tile_length: int) -> dict[str, Any]:
    """Minimums and super-blocks as the core takes them; nothing where there are none."""
    if not q.spec.is_affine:
        return {}
    parts = {name: getattr(q, name) for name in ("minimums", "super_scales", "super_minimums")}
    made: dict[str, Any] = {
        name: None if part is None else np.ascontiguousarray(part) for name, part in parts.items()
    }
    return {**made, "super_tiles": (q.spec.super_block or tile_length) // tile_length}


def _block_step(a: QuantArray, b: QuantArray) -> int | Unsupported:
    """Elements of K per exact integer sum; 0 for a float product; or why the core has neither."""
    found = _step_of_specs(a.spec, a.shape, b.spec, b.shape)
    if isinstance(found, Unsupported):
        return found
    step, why = found
    if not why:
        right = _largest_scale(b)
        if right <= 1 or (largest := _largest_scale(a) * right) <= _LARGEST_PRODUCT:
            return step
        why = f"scales whose product reaches {largest:.3g}"
    if a.zero_points is not None or b.zero_points is not None:
        return Unsupported(f"zero points with {why}")
    return 0


@lru_cache(maxsize=4096)
def _step_of_specs(
    a: QuantSpec, a_shape: tuple[int, ...], b: QuantSpec, b_shape: tuple[int, ...]
) -> tuple[int, str] | Unsupported:
    """The step of blocks that meet, and why integers do not serve in it: "" where they do."""
    for spec, shape in ((a, a_shape), (b, b_shape)):
        if (gap := _matrix_gap(spec, shape)) is not None:
            return gap
    step = _step(_tile(a, a_shape)[1], _tile(b, b_shape)[1], a_shape[1])
    if step % 4:
        return step, f"blocks that meet in steps of {step}"
    integers = all(_is_integer(spec.row.element) for spec in (a, b))
    return step, "" if integers else "no small integers"


def _on_int8_tiles(a: QuantArray, b: QuantArray) -> bool:
    """Whether an integer product is one of rows under one float32 scale each."""
    floats = all(q.spec.scale_name not in ("e8m0", "ue4m3") for q in (a, b))
    return floats and all(_tile(q.spec, q.shape)[1] >= q.shape[1] for q in (a, b))


def _bf16_gap(a: QuantArray, b: QuantArray) -> str | None:
    """Why tiles of bfloat16 cannot hold this product; None if they can."""
    for q in (a, b):
        if q.spec.scale_name not in ("e8m0", "ue4m3") or q.zero_points is not None:
            what = "zero points" if q.zero_points is not None else f"{q.spec.scale_name} scales"
            return f"{what}; bfloat16 holds elements times e8m0 or ue4m3 scales"
        digits = _digits(q.spec.row.element) + (0 if q.spec.is_mx else 4)
        if digits > _BF16_DIGITS:
            return f"{q.spec.row.element.name} times {q.spec.scale_name} has {digits} digits, not 8"
    return _range_gap(_range(a), _range(b), a.shape[1])


def operand_factors(core: Any, a: Any, b: Any) -> tuple[float, float] | Unsupported:
    """For tiles: numbers that a and b are bfloat16 times of; or why tiles do not take a b^T.

    The values decide: e8m0-scaled operands are bfloat16, also under a Hadamard transform, and so
    are rounded ones. NVFP4's and those with one float32 scale are within a relative 2**-21 of
    bfloat16 times a factor, which comes of their largest value. Those with many float32 scales are
    not.
    """
    if not core.gemm_has_bf16():
        return Unsupported(f"no tiles of bfloat16 at {core.gemm_level()}; BLAS")
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[1]:
        return Unsupported("not (M, K) and (N, K)")
    if a.dtype != np.float32 or b.dtype != np.float32:
        return Unsupported(f"{a.dtype} times {b.dtype}; the core takes float32")
    for x in (a, b):
        if not x.flags.forc:
            return Unsupported("arrays that are not contiguous either way round")
    shape = (*a.shape, b.shape[0])
    if min(shape) < _MIN_SIDE or math.prod(shape) < _MIN_WORK:
        return Unsupported(f"a product of {' x '.join(map(str, shape))} is small; BLAS is faster")
    factors, ranges = [], []
    for x in (a, b):
        factor, low, high = core.bf16_range(x)
        if not factor:
            return Unsupported("values that bfloat16 does not hold")
        factors.append(factor)
        ranges.append((low - _BF16_DIGITS + 1, high + 1))
    gap = _range_gap(ranges[0], ranges[1], a.shape[1])
    return (factors[0], factors[1]) if gap is None else Unsupported(gap)


def _range_gap(a: tuple[int, int], b: tuple[int, int], k: int) -> str | None:
    """Why tiles could flush or overflow sums of k products, from the `_range` of each side.

    Every value is a multiple of its side's unit, and so is every sum of products of the product of
    the units: without underflow or overflow of those, nothing subnormal can occur.
    """
    (unit_a, top_a), (unit_b, top_b) = a, b
    if min(unit_a, unit_b) < -126 or unit_a + unit_b < -126:
        return f"values down to 2**{min(unit_a, unit_b)}, products to 2**{unit_a + unit_b}"
    if top_a + top_b + k.bit_length() > 127 or max(top_a, top_b) > 127:
        return f"values up to 2**{max(top_a, top_b)}, products to 2**{top_a + top_b}"
    return None


def _digits(element: ElementFormat) -> int:
    """Binary digits of the longest element."""
    return element.mantissa_bits + 1 if element.is_float else element.bits - 1


def _range(q: QuantArray) -> tuple[int, int]:
    """Exponents: every value is a multiple of 2**first and at most 2**second."""
    element = q.spec.row.element
    low, high = math.frexp(element.min_positive)[1] - 1, math.frexp(element.max)[1]
    if not q.spec.is_mx:
        return low - 9, high + 9  # multiples of 2**-9, at most 448
    least = int(q.scales.min())
    if least < _SMALL:
        least = _least_used(q)
    return low + least - 127, high + round(math.log2(_largest_scale(q) or 1.0))


def _least_used(q: QuantArray) -> int:
    """At most the least e8m0 byte of a block that is not all zeros, and at most `_SMALL`."""
    rows, length = _tile(q.spec, q.shape)
    bits = q.spec.row.element.bits
    period = 4 if bits == 6 else 8 // bits  # elements that fill whole bytes
    if rows > 1 or (length < q.shape[1] and length % period):
        return int(q.scales.min())  # the block's codes do not lie together
    small = q.scales < _SMALL
    codes = q.codes.reshape(*q.scales.shape, -1)[small]
    magnitude = _MAGNITUDE[bits] if q.spec.row.element.is_float else (0xFF,)
    used = (codes & np.resize(np.array(magnitude, np.uint8), codes.shape[-1])).any(axis=-1)
    return int(q.scales[small][used].min()) if used.any() else _SMALL


def choose_weight_only(core: Any, x: Any, w: QuantArray) -> Any | Unsupported:
    """The weights of x w^T as the core takes them, or why it does not take the two."""
    if w not in _MATRICES and (gap := _matrix_gap(w.spec, w.shape, weights=True)) is not None:
        return gap
    if x.ndim != 2 or x.dtype not in _ROWS:
        return Unsupported(f"{x.dtype} activations of {x.ndim} axes; the core takes float32 rows")
    if x.size == 0:
        return Unsupported("empty array")
    return matrix(core, w, widen=False)


def _is_integer(element: ElementFormat) -> bool:
    return element.max / element.min_positive <= 127


def _tile(spec: QuantSpec, shape: tuple[int, ...]) -> tuple[int, int]:
    """Rows and elements along K that share a scale."""
    rows, k = shape
    if spec.tile == "tensor":
        return rows, k
    if spec.tile == "channel":
        return 1, k
    assert isinstance(spec.tile, tuple)
    return spec.tile


def _step(a: int, b: int, k: int) -> int:
    """The longest run of K, up to the limit, within which no block of either side ends.

    ``a``, ``b``: the lengths of blocks.
    """
    lengths = [length for length in (a, b) if length < k]
    if not lengths:
        return min(_MAX_STEP, -(-k // 4) * 4)
    step = math.gcd(*lengths)
    if step <= _MAX_STEP or step % 4:
        return step
    return max(n for n in range(4, _MAX_STEP + 1, 4) if step % n == 0)


def _largest_scale(q: QuantArray) -> float:
    """The largest finite block scale; 0 where there is none."""
    if q.spec.scale_name == "ue4m3":
        return 448.0
    if q.spec.is_mx:
        top = int(q.scales.max())
        if top == 255:  # NaN, wraps around to the bottom
            top = int((q.scales + np.uint8(1)).max()) - 1
        return math.ldexp(1.0, top - 127)
    largest = max(float(q.scales.max()), -float(q.scales.min()))
    if math.isfinite(largest):  # the usual case, without a copy of the scales
        return largest
    magnitude = np.abs(q.scales)
    return float(np.max(magnitude, where=np.isfinite(magnitude), initial=0.0))
