"""The slow oracle: block quantization one number at a time, sharing no code with extensor.

It reads a spec as a bag of attributes and keeps its own tables of formats and
dialects, grids and scale rules. Where the order of operations is part of the
rule, each step is one numpy.float32 operation, rounded once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from tests.oracle.blocks import Index, block_width, blocks, pack
from tests.oracle.grid import (
    GRIDS,
    bits_of,
    decode,
    e4m3_byte,
    encode,
    magnitude,
    negative,
    round_integer,
)
from tests.oracle.philox import hadamard_sign, word

F = np.float32
FLT_MAX = F(3.4028234663852886e38)
NAN = F(math.nan)

FORMATS = {  # element, kind of scale, default tile
    "mxfp8_e4m3": ("e4m3", "e8m0", (1, 32)),
    "mxfp8_e5m2": ("e5m2", "e8m0", (1, 32)),
    "mxfp6_e2m3": ("e2m3", "e8m0", (1, 32)),
    "mxfp6_e3m2": ("e3m2", "e8m0", (1, 32)),
    "mxfp4": ("e2m1", "e8m0", (1, 32)),
    "mxint8": ("int8_mx", "e8m0", (1, 32)),
    "nvfp4": ("e2m1", "nv", (1, 16)),
    "nvfp4_fp8exact": ("e2m1", "nv", (1, 16)),
    "fp8_e4m3": ("e4m3", "float", "tensor"),
    "fp8_e5m2": ("e5m2", "float", "tensor"),
    "int8": ("int8", "float", "channel"),
    "int4": ("int4", "float", (1, 32)),
    "outlier": ("e4m3", "outlier", "channel"),
}
DEFAULT_RULE = {"nvfp4": "amax", "nvfp4_fp8exact": "least_error"}
DIALECT_RULE = {
    "nvidia": "rceil",
    "torchao": "floor",
    "compressed_tensors": "even",
    "model_optimizer": "rceil",
    "microxcaling": "floor",
}
TIES = {"model_optimizer": "zero", "microxcaling": "away"}
ZERO_BLOCK_BYTE = {"torchao": 0x08, "compressed_tensors": 0x20, "model_optimizer": 0x38}
INFINITY_SATURATES = {"nvidia"}
TINY_SATURATES = {"nvidia"}
TRANSFORMER_ENGINE = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)
EXACT_SCALES = [8 * e + m for e in range(1, 16) for m in (0, 2, 4)]
"""e4m3 bytes of normal numbers with significand 1, 1.25 or 1.5."""


@dataclass
class Result:
    """What is stored, what it stands for, and the two counts."""

    codes: np.ndarray
    scales: np.ndarray
    values: np.ndarray
    operand: np.ndarray
    tensor_scale: np.float32 | None = None
    zero_points: np.ndarray | None = None
    row_means: np.ndarray | None = None
    outlier_index: np.ndarray | None = None
    outlier_value: np.ndarray | None = None
    saturated: int = 0
    flushed: int = 0


@dataclass
class Work:
    """One quantization under way: the coded array, its blocks and what is written for them."""

    x: np.ndarray
    axis: int
    tile: object
    spec: object
    stream: object
    previous: np.ndarray | None
    element: str
    codes: np.ndarray = field(init=False)
    values: np.ndarray = field(init=False)
    saturated: int = 0

    def __post_init__(self) -> None:
        self.codes = np.zeros(self.x.shape, np.uint8)
        self.values = np.zeros(self.x.shape, np.float32)
        self.all = list(blocks(self.x.shape, self.axis, self.tile))
        self.ties = TIES.get(self.spec.dialect, "even")
        self.factor = F(self.spec.element_scale)

    def grid_shape(self) -> tuple[int, ...]:
        if self.all:
            return tuple(1 + max(where[d] for where, _ in self.all) for d in range(self.x.ndim))
        extent = [1] * self.x.ndim
        if isinstance(self.tile, tuple):
            extent[self.axis - 1], extent[self.axis] = self.tile
        elif self.tile == "channel":
            extent[self.axis] = max(self.x.shape[self.axis], 1)
        else:
            extent = [max(n, 1) for n in self.x.shape]
        return tuple(-(-n // e) for n, e in zip(self.x.shape, extent, strict=True))

    def drawn(self, number: int, position: int) -> int | None:
        if self.spec.rounding != "stochastic":
            return None
        return word(self.stream, number, position, self.spec.rbits)

    def scaled(self, v: np.float32) -> np.float32:
        """The element factor, when it is not one."""
        return v if self.factor == 1 else F(v * self.factor)

    def put(self, at: Index, code: int, saturated: bool, value: object) -> None:
        self.codes[at] = code
        self.saturated += saturated
        self.values[at] = value

    def statistic(self, where: Index, places: list[Index | None]) -> np.float32:
        """What stands for the largest magnitude of a block of finite values."""
        sizes = sorted(abs(self.x[at]) for at in places if at is not None)
        amax = sizes[-1] if sizes else F(0)
        if self.spec.statistic == "percentile":
            rank = math.ceil(self.spec.percentile * len(sizes) / 100)
            chosen = sizes[max(rank, 1) - 1]
            return chosen if chosen > 0 else amax
        if self.spec.statistic == "running" and self.previous is not None:
            return max(amax, F(F(self.spec.decay) * F(self.previous[where])))
        return amax


# ---- E8M0 -------------------------------------------------------------------------------------


def floor_log2(units: int) -> int:
    return units.bit_length() - 1 - 149


def mx_exponent(amax: np.float32, rule: str, element: str) -> int:
    """The block exponent, before it is clamped to a byte."""
    grid = GRIDS[element]
    units = magnitude(amax)
    if rule == "one":
        return 0
    if rule == "floor":
        return floor_log2(units) - grid.emax
    if rule == "ceil":
        exact = units == 2 ** (units.bit_length() - 1)
        return floor_log2(units) + (0 if exact else 1) - grid.emax
    if rule == "even":
        raised = bits_of(amax) + 2 ** (22 - grid.mantissa)
        return raised // 2**23 - 127 - grid.emax
    assert rule == "rceil"
    bits = bits_of(F(amax * F(F(1) / F(float(grid.top)))))
    exponent, mantissa = bits // 2**23, bits % 2**23
    up = mantissa > 0x400000 if exponent == 0 else mantissa > 0
    return exponent + up - 127


def quantize_mx(work: Work, rule: str) -> np.ndarray:
    scales = np.zeros(work.grid_shape(), np.uint8)
    exponents: dict[Index, int] = {}
    for where, places in work.all:
        values = [work.x[at] for at in places if at is not None]
        if any(np.isnan(v) for v in values):
            scales[where] = 0xFF
        elif any(np.isinf(v) for v in values):
            scales[where] = 0xFE if work.spec.dialect in INFINITY_SATURATES else 0xFF
        elif any(v != 0 for v in values):
            statistic = work.statistic(where, places)
            exponents[where] = mx_exponent(statistic, rule, work.element)
        elif rule == "one":  # the study of casting without a scale: one even where nothing is
            scales[where] = 127
    if exponents and work.spec.scale_window is not None:
        lowest = max(exponents.values()) - work.spec.scale_window
        exponents = {where: max(e, lowest) for where, e in exponents.items()}
    for where, e in exponents.items():
        scales[where] = min(max(e + 127, 0), 254)
    for number, (where, places) in enumerate(work.all):
        byte = int(scales[where])
        for position, at in enumerate(places):
            if at is None:
                continue
            if byte == 255:
                work.put(at, 0, False, NAN)
                continue
            v = work.scaled(F(work.x[at] * F(math.ldexp(1, 127 - byte))))
            code, saturated = encode(v, work.element, work.drawn(number, position), work.ties)
            value = F(decode(code, work.element) * F(math.ldexp(1, byte - 127)))
            work.put(at, code, saturated, value)
    return scales


# ---- NVFP4 ------------------------------------------------------------------------------------


def nv_codes(
    work: Work, number: int | None, places: list[Index | None], sf: np.float32, s_enc: np.float32
) -> list[tuple[int, bool]]:
    """Code and saturation of each position of a block under one block scale.

    Without a block number: as the choice between scales is made, which is always with rounding to
    nearest and without the element factor.
    """
    out = []
    inverse = min(F(F(1) / F(sf * F(F(1) / s_enc))), FLT_MAX)
    for position, at in enumerate(places):
        if at is None:
            out.append((0, False))
            continue
        x = work.x[at]
        if sf == 0 and work.spec.dialect not in TINY_SATURATES:
            out.append((8 if negative(x) else 0, False))
            continue
        v, drawn = F(x * inverse), None
        if number is not None:
            v, drawn = work.scaled(v), work.drawn(number, position)
        out.append(encode(v, "e2m1", drawn, work.ties))
    return out


def squared_error(
    work: Work,
    places: list[Index | None],
    codes: list[tuple[int, bool]],
    value: object,
) -> np.float32:
    """Sum of squared differences, float32, by ascending position."""
    total = F(0)
    for at, (code, _) in zip(places, codes, strict=True):
        if at is not None:
            difference = F(value(decode(code, "e2m1")) - work.x[at])  # type: ignore[operator]
            total = F(total + F(difference * difference))
    return total


def quantize_nv(work: Work, rule: str) -> tuple[np.ndarray, np.float32]:
    finite = [abs(v) for v in work.x.ravel() if np.isfinite(v)]
    amax = max(finite, default=F(0))
    bound = F(1536 if rule == "four_over_six" else 2688)
    s_enc = min(F(bound / amax), FLT_MAX) if amax > 0 else F(1)
    tensor_scale = F(F(1) / s_enc)
    scales = np.zeros(work.grid_shape(), np.uint8)
    for number, (where, places) in enumerate(work.all):
        values = [work.x[at] for at in places if at is not None]
        if not all(np.isfinite(v) for v in values):
            scales[where] = 0x7F
            for at in places:
                if at is not None:
                    work.put(at, 0, False, NAN)
            continue
        if all(v == 0 for v in values):
            scales[where] = ZERO_BLOCK_BYTE.get(work.spec.dialect, 0)
            for at in places:
                if at is not None:
                    code = 8 if negative(work.x[at]) else 0
                    work.put(at, code, False, decode(code, "e2m1"))
            continue
        block = work.statistic(where, places)
        byte, codes = nv_block(work, rule, number, places, block, amax, s_enc)
        scales[where] = byte
        sf = decode(byte, "e4m3")
        for at, (code, saturated) in zip(places, codes, strict=True):
            if at is not None:
                value = F(F(decode(code, "e2m1") * sf) * tensor_scale)
                work.put(at, code, saturated, value)
    return scales, tensor_scale


def nv_block(
    work: Work,
    rule: str,
    number: int,
    places: list[Index | None],
    block: np.float32,
    amax: np.float32,
    s_enc: np.float32,
) -> tuple[int, list[tuple[int, bool]]]:
    """Scale byte and codes of one block that is neither zero nor special."""
    if rule == "four_over_six":
        base = F(F(block / F(6)) * s_enc)
        bytes_ = [e4m3_byte(min(base, F(448))), e4m3_byte(min(F(F(1.5) * base), F(448)))]

        def value_of(sf: np.float32) -> object:
            return lambda q: F(F(F(q * sf) * amax) / F(1536))

    else:
        base = min(F(block * F(s_enc * F(F(1) / F(6)))), F(448))
        if rule == "amax":
            byte = e4m3_byte(base)
            return byte, nv_codes(work, number, places, decode(byte, "e4m3"), s_enc)
        first = next((k for k, c in enumerate(EXACT_SCALES) if decode(c, "e4m3") >= base), 44)
        around = [k for k in (first + 1, first, first - 1, first - 2) if 0 <= k < 45]
        bytes_ = [EXACT_SCALES[k] for k in around]
        tensor_scale = F(F(1) / s_enc)

        def value_of(sf: np.float32) -> object:
            return lambda q: F(F(q * sf) * tensor_scale)

    best: tuple[np.float32, int] | None = None
    for byte in bytes_:
        sf = decode(byte, "e4m3")
        codes = nv_codes(work, None, places, sf, s_enc)
        error = squared_error(work, places, codes, value_of(sf))
        if best is None or error < best[0]:
            best = error, byte
    assert best is not None
    return best[1], nv_codes(work, number, places, decode(best[1], "e4m3"), s_enc)


# ---- float scales -----------------------------------------------------------------------------


def stored_scale(s: np.float32, name: str | None) -> np.float32:
    """A positive scale as it is stored, as a float32; one where it vanished."""
    if s == 0:
        return F(1)
    if name != "float16":
        return s
    with np.errstate(all="ignore"):
        half = np.float16(s)
    if np.isinf(half):
        half = np.float16(65504)
    if half == 0:
        half = np.float16(2.0**-24)
    return F(half)


def quantize_float(work: Work, rule: str) -> tuple[np.ndarray, np.ndarray | None]:
    grid = GRIDS[work.element]
    name = work.spec.scale_dtype
    scales = np.zeros(work.grid_shape(), np.float16 if name == "float16" else np.float32)
    zeros = None if work.spec.symmetric else np.zeros(work.grid_shape(), np.int8)
    for number, (where, places) in enumerate(work.all):
        values = [work.x[at] for at in places if at is not None]
        if not all(np.isfinite(v) for v in values):
            scales[where] = math.nan
            if zeros is not None:
                zeros[where] = -(2 ** (grid.bits - 1))  # as an all-zero block has
            for at in places:
                if at is not None:
                    work.put(at, 0, False, NAN)
            continue
        if zeros is not None:
            asymmetric_block(work, number, rule, where, places, scales, zeros)
            continue
        s = F(work.statistic(where, places) / F(float(grid.top)))
        s = F(1) if rule == "one" else stored_scale(s, name)
        scales[where] = s
        for position, at in enumerate(places):
            if at is not None:
                v = work.scaled(F(work.x[at] / s))
                code, saturated = encode(v, work.element, work.drawn(number, position), work.ties)
                work.put(at, code, saturated, F(decode(code, work.element) * s))
    return scales, zeros


def asymmetric_block(
    work: Work,
    number: int,
    rule: str,
    where: Index,
    places: list[Index | None],
    scales: np.ndarray,
    zeros: np.ndarray,
) -> None:
    """A block of integers with a zero point; scale and point by way of float64."""
    bits = GRIDS[work.element].bits
    low, high = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    values = [work.x[at] for at in places if at is not None]
    least, most = float(min([F(0), *values])), float(max([F(0), *values]))
    s = F(1) if rule == "one" else F((most - least) / (high - low))
    s = stored_scale(s, work.spec.scale_dtype)
    z = min(max(round(low - least / float(s)), low), high)  # Python rounds half to even
    scales[where], zeros[where] = s, z
    for position, at in enumerate(places):
        if at is None:
            continue
        v = work.scaled(F(work.x[at] / s))
        q = round_integer(v, work.drawn(number, position), work.ties) + z
        clamped = min(max(q, low), high)
        work.put(at, clamped % 2**bits, q != clamped, F(F(clamped - z) * s))


def quantize_outlier(work: Work, rule: str, result: dict[str, np.ndarray]) -> np.ndarray:
    """Rows without their mean; the largest values beside the codes, exactly."""
    n = work.x.shape[work.axis]
    kept = min(32, n // 8) if work.spec.outliers is None else min(work.spec.outliers, n)
    reduced, held = list(work.x.shape), list(work.x.shape)
    reduced[work.axis], held[work.axis] = 1, kept
    name = work.spec.scale_dtype
    scales = np.zeros(work.grid_shape(), np.float16 if name == "float16" else np.float32)
    means, index = np.zeros(reduced, np.float32), np.zeros(held, np.int32)
    exact = np.zeros(held, np.float32)
    for number, (where, places) in enumerate(work.all):
        line = [at for at in places if at is not None]
        row = [work.x[at] for at in line]
        if not all(np.isfinite(v) for v in row):
            scales[where] = math.nan
            for at in line:
                work.put(at, 0, False, NAN)
            for k in range(kept):  # its mean counts as zero, its first places as its largest
                slot = list(line[k])
                slot[work.axis] = k
                index[tuple(slot)], exact[tuple(slot)] = k, row[k]
            continue
        total = 0.0
        for v in row:
            total += float(v)
        mean = F(total / n)
        rest = [F(v - mean) for v in row]
        chosen = sorted(sorted(range(n), key=lambda k: (-abs(rest[k]), k))[:kept])
        means[where] = mean
        others = [abs(rest[k]) for k in range(n) if k not in chosen]
        s = F(1) if rule == "one" else F(max(others, default=F(0)) / F(448))
        s = stored_scale(s, name)
        scales[where] = s
        for place, k in enumerate(chosen):
            slot = list(line[k])
            slot[work.axis] = place
            index[tuple(slot)], exact[tuple(slot)] = k, row[k]
        for k, at in enumerate(line):
            if k in chosen:
                work.put(at, 0, False, row[k])
                continue
            v = work.scaled(F(rest[k] / s))
            code, saturated = encode(v, "e4m3", work.drawn(number, k), work.ties)
            work.put(at, code, saturated, F(F(decode(code, "e4m3") * s) + mean))
    result.update(row_means=means, outlier_index=index, outlier_value=exact)
    return scales


# ---- the Hadamard transform -------------------------------------------------------------------


def signs(transform: object) -> list[np.float32]:
    kind, size = transform.signs, transform.size  # type: ignore[attr-defined]
    if kind == "none":
        return [F(1)] * size
    if kind == "fixed":
        return [F(TRANSFORMER_ENGINE[k % 16]) for k in range(size)]
    return [F(hadamard_sign(k, transform.seed)) for k in range(size)]  # type: ignore[attr-defined]


def butterflies(v: list[np.float32]) -> list[np.float32]:
    size, stride = len(v), 1
    while stride < size:
        for start in range(0, size, 2 * stride):
            for k in range(start, start + stride):
                v[k], v[k + stride] = F(v[k] + v[k + stride]), F(v[k] - v[k + stride])
        stride *= 2
    return [F(a * F(1 / math.sqrt(size))) for a in v]


def hadamard(x: np.ndarray, axis: int, transform: object, inverse: bool = False) -> np.ndarray:
    """The transform along an axis, which is filled with zeros to a multiple of its size."""
    size = transform.size  # type: ignore[attr-defined]
    s = signs(transform)
    lines = np.moveaxis(x, axis, -1)
    length = -(-lines.shape[-1] // size) * size
    out = np.zeros((*lines.shape[:-1], length), np.float32)
    for line in np.ndindex(lines.shape[:-1]):
        row = [*lines[line], *([F(0)] * (length - lines.shape[-1]))]
        for start in range(0, length, size):
            part = row[start : start + size]
            if inverse:
                part = [F(a * b) for a, b in zip(butterflies(part), s, strict=True)]
            else:
                part = butterflies([F(a * b) for a, b in zip(part, s, strict=True)])
            out[(*line, slice(start, start + size))] = part
    return np.moveaxis(out, -1, axis)


# ---- all of it --------------------------------------------------------------------------------


def quantize(
    x: np.ndarray, spec: object, stream: object = None, previous: np.ndarray | None = None
) -> Result:
    """What must be stored for an array under a spec."""
    element, kind, tile = FORMATS[spec.format]  # type: ignore[attr-defined]
    tile = spec.tile or tile  # type: ignore[attr-defined]
    axis = spec.axis % x.ndim  # type: ignore[attr-defined]
    rule = spec.scale_rule or DEFAULT_RULE.get(spec.format)  # type: ignore[attr-defined]
    extra: dict[str, np.ndarray] = {}
    with np.errstate(all="ignore"):
        x = np.asarray(x).astype(np.float32)
        coded = x if spec.transform is None else hadamard(x, axis, spec.transform)  # type: ignore[attr-defined]
        work = Work(coded, axis, tile, spec, stream, previous, element)
        tensor_scale = zeros = None
        if kind == "e8m0":
            rule = rule or DIALECT_RULE.get(spec.dialect, "floor")  # type: ignore[attr-defined]
            scales = quantize_mx(work, rule)
        elif kind == "nv":
            assert rule is not None
            scales, tensor_scale = quantize_nv(work, rule)
        elif kind == "float":
            scales, zeros = quantize_float(work, rule or "amax")
        else:
            scales = quantize_outlier(work, rule or "amax", extra)
        values = work.values
        if spec.transform is not None:  # type: ignore[attr-defined]
            values = hadamard(values, axis, spec.transform, inverse=True)  # type: ignore[attr-defined]
            values = values[(slice(None),) * axis + (slice(x.shape[axis]),)]
    flushed = sum(v != 0 and w == 0 for v, w in zip(coded.flat, work.values.flat, strict=True))
    return Result(
        codes=pack(work.codes, axis, block_width(coded.shape, axis, tile), GRIDS[element].bits),
        scales=scales,
        values=values,
        operand=work.values,
        tensor_scale=tensor_scale,
        zero_points=zeros,
        saturated=work.saturated,
        flushed=int(flushed),
        **extra,
    )

