"""Codes and scales of every block, one number at a time, for each kind of scale.

Where the order of operations is part of the rule, each step is one numpy.float32
operation, rounded once.
"""

from __future__ import annotations

import math

import numpy as np

from tests.oracle.blocks import Index
from tests.oracle.grid import (
    GRIDS,
    bits_of,
    decode,
    e4m3_byte,
    encode,
    magnitude,
    round_integer,
)
from tests.oracle.work import (
    FLT_MAX,
    INFINITY_BYTE,
    MIN_DIVISOR,
    MIN_SCALE,
    NAN,
    ORDER,
    TINY_SATURATES,
    ZERO_BLOCK_BYTE,
    F,
    Work,
)

EXACT_SCALES = [8 * e + m for e in range(1, 16) for m in (0, 2, 4)]
"""e4m3 bytes of normal numbers with significand 1, 1.25 or 1.5."""


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


def searched_byte(work: Work, rule: str, places: list[Index | None], amax: np.float32) -> int:
    """The scale byte under a rule that reads the block's values."""
    values = [work.x[at] for at in places if at is not None]
    if rule == "quest":
        power = min(max(floor_log2(magnitude(amax)), -126), 126)
        total = F(0)
        for v in values:
            scaled = F(v * F(math.ldexp(1, -power)))
            total = F(total + F(scaled * scaled))
        scale = F(np.sqrt(F(total / F(len(values)))) * F(2.92247856 / 6))
        return min(max(floor_log2(magnitude(scale)) + power + 127, 0), 254)
    whole = min(max(mx_exponent(amax, "rceil", work.element) + 127, 0), 254)
    if whole - 1 < max(MIN_DIVISOR.get(work.spec.dialect, -127) + 127, 0):
        return whole
    errors = []
    for byte in (whole, whole - 1):
        total = F(0)
        for v in values:
            scaled = F(v * F(math.ldexp(1, 127 - byte)))
            code, _ = work.coded(scaled, None)
            off = F(decode(code, work.element) - scaled)
            total = F(total + F(off * off))
        errors.append(total)
    return whole - 1 if F(errors[1] * F(0.25)) < errors[0] else whole


def quantize_mx(work: Work, rule: str) -> np.ndarray:
    scales = np.zeros(work.grid_shape(), np.uint8)
    exponents: dict[Index, int] = {}
    for where, places in work.all:
        values = [work.x[at] for at in places if at is not None]
        if any(np.isnan(v) for v in values):
            scales[where] = 0xFF
        elif any(np.isinf(v) for v in values):
            byte_of = INFINITY_BYTE.get(work.spec.dialect, lambda emax: 0xFF)
            scales[where] = byte_of(GRIDS[work.element].emax)
        elif any(v != 0 for v in values):
            statistic = work.statistic(where, places)
            if rule in ("mse", "quest"):
                exponents[where] = searched_byte(work, rule, places, statistic) - 127
            else:
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
            divisor = max(byte - 127, MIN_DIVISOR.get(work.spec.dialect, -127))
            v = work.scaled(F(work.x[at] * F(math.ldexp(1, -divisor))))
            code, saturated = work.coded(v, work.drawn(number, position))
            value = F(decode(code, work.element) * F(math.ldexp(1, byte - 127)))
            work.put(at, code, saturated, value)
    return scales


# ---- NVFP4 ------------------------------------------------------------------------------------


def nv_order(work: Work, rule: str) -> str:
    """Whose order of operations: the rules that choose a scale know one only."""
    named = work.spec.dialect
    return named if rule == "amax" and named in ORDER else "transformer_engine"


def nv_scaled(
    work: Work, rule: str, x: np.float32, sf: np.float32, tensor_scale: np.float32
) -> np.float32:
    """What is rounded to e2m1."""
    order = nv_order(work, rule)
    if order == "model_optimizer":
        return F(x / max(F(sf * tensor_scale), F(2.0**-149)))
    if order == "torchao":
        return F(x * min(F(F(F(1) / tensor_scale) / sf), FLT_MAX))
    if sf == 0 and work.spec.dialect not in TINY_SATURATES:
        return F(x * F(0))
    return F(x * min(F(F(1) / F(sf * tensor_scale)), FLT_MAX))


def nv_codes(
    work: Work,
    rule: str,
    number: int | None,
    places: list[Index | None],
    sf: np.float32,
    tensor_scale: np.float32,
) -> list[tuple[int, bool]]:
    """Code and saturation of each position of a block under one block scale.

    Without a block number: as the choice between scales is made, which is always with rounding to
    nearest and without the element factor.
    """
    out = []
    for position, at in enumerate(places):
        if at is None:
            out.append((0, False))
            continue
        v, drawn = nv_scaled(work, rule, work.x[at], sf, tensor_scale), None
        if number is not None:
            v, drawn = work.scaled(v), work.drawn(number, position)
        out.append(work.coded(v, drawn, "e2m1"))
    return out


def squared_error(
    work: Work, places: list[Index | None], codes: list[tuple[int, bool]], value: object
) -> np.float32:
    """Sum of squared differences, float32, by ascending position."""
    total = F(0)
    for at, (code, _) in zip(places, codes, strict=True):
        if at is not None:
            difference = F(value(decode(code, "e2m1")) - work.x[at])
            total = F(total + F(difference * difference))
    return total


def quantize_nv(work: Work, rule: str) -> tuple[np.ndarray, np.float32]:
    finite = [abs(v) for v in work.x.ravel() if np.isfinite(v)]
    amax = max(finite, default=F(0))
    if work.spec.eden:
        return quantize_eden(work, amax)
    bound = F(1536 if rule == "four_over_six" else 2688)
    s_enc = min(F(bound / amax), FLT_MAX) if amax > 0 else F(1)
    tensor_scale = F(F(1) / s_enc)
    if nv_order(work, rule) != "transformer_engine":
        tensor_scale = F(amax / F(2688))
        tensor_scale = F(1) if tensor_scale == 0 else tensor_scale
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
                    code, _ = work.coded(F(work.x[at] * F(0)), None, "e2m1")
                    work.put(at, code, False, decode(code, "e2m1"))
            continue
        block = work.statistic(where, places)
        tensor = (amax, s_enc, tensor_scale)
        byte, codes = nv_block(work, rule, number, places, block, tensor)
        scales[where] = byte
        sf = decode(byte, "e4m3")
        for at, (code, saturated) in zip(places, codes, strict=True):
            if at is not None:
                value = F(F(decode(code, "e2m1") * sf) * tensor_scale)
                work.put(at, code, saturated, value)
    return scales, tensor_scale


def quantize_eden(work: Work, amax: np.float32) -> tuple[np.ndarray, np.float32]:
    """MS-EDEN: codes to nearest, scales corrected over a transform and rounded stochastically."""
    top = 6 / (17 / 16 * 0.93)
    s_enc = min(F(F(256 * top) / amax), FLT_MAX) if amax > 0 else F(1)
    tensor_scale = F(F(1) / s_enc)
    scales = np.zeros(work.grid_shape(), np.uint8)
    sums: dict[tuple[object, ...], list[np.float32]] = {}
    members, per = [], work.spec.transform.size // 16
    for number, (where, places) in enumerate(work.all):
        values = [work.x[at] for at in places if at is not None]
        if not all(np.isfinite(v) for v in values):
            scales[where] = 0x7F
            for at in places:
                if at is not None:
                    work.put(at, 0, False, NAN)
            continue
        block = max(abs(v) for v in values)
        sf = decode(e4m3_byte(min(F(block * F(s_enc * F(1 / top))), F(448))), "e4m3")
        inverse = F(0) if sf == 0 else min(F(F(1) / F(sf * tensor_scale)), FLT_MAX)
        codes, total = [], [F(0), F(0)]
        for at in places:
            y = F(work.x[at] * inverse)
            codes.append(work.coded(y, None, "e2m1"))
            q = F(decode(codes[-1][0], "e2m1"))
            total = [F(total[0] + F(y * y)), F(total[1] + F(y * q))]
        group = (*where[: work.axis], where[work.axis] // per, *where[work.axis + 1 :])
        before = sums.setdefault(group, [F(0), F(0)])
        sums[group] = [F(a + b) for a, b in zip(before, total, strict=True)]
        members.append((number, where, places, codes, sf, group, block))
    for number, where, places, codes, sf, group, block in members:
        yy, yq = sums[group]
        corrected = F(sf * (F(1) if yq == 0 else F(yy / yq)))
        byte = encode(corrected, "e4m3", work.drawn(number, 0))[0] if block > 0 else 0
        scales[where] = byte
        for at, (code, saturated) in zip(places, codes, strict=True):
            value = F(F(decode(code, "e2m1") * decode(byte, "e4m3")) * tensor_scale)
            work.put(at, code, saturated, value)
    return scales, tensor_scale


def nv_block(
    work: Work,
    rule: str,
    number: int,
    places: list[Index | None],
    block: np.float32,
    tensor: tuple[np.float32, np.float32, np.float32],
) -> tuple[int, list[tuple[int, bool]]]:
    """Scale byte and codes of one block that is neither zero nor special."""
    amax, s_enc, tensor_scale = tensor
    order = nv_order(work, rule)
    if order != "transformer_engine":
        if order == "torchao":
            base = F(F(block / F(6)) / tensor_scale)
        else:
            base = F(block / F(F(6) * tensor_scale))
            base = F(1) if base == 0 else base
        byte = max(e4m3_byte(min(base, F(448))), MIN_SCALE[order])
        return byte, nv_codes(work, rule, number, places, decode(byte, "e4m3"), tensor_scale)
    if rule == "four_over_six":
        base = F(F(block / F(6)) * s_enc)
        bytes_ = [e4m3_byte(min(base, F(448))), e4m3_byte(min(F(F(1.5) * base), F(448)))]

        def value_of(sf: np.float32) -> object:
            return lambda q: F(F(F(q * sf) * amax) / F(1536))

    else:
        base = min(F(block * F(s_enc * F(F(1) / F(6)))), F(448))
        if rule == "amax":
            byte = e4m3_byte(base)
            return byte, nv_codes(work, rule, number, places, decode(byte, "e4m3"), tensor_scale)
        first = next((k for k, c in enumerate(EXACT_SCALES) if decode(c, "e4m3") >= base), 44)
        around = [k for k in (first + 1, first, first - 1, first - 2) if 0 <= k < 45]
        bytes_ = [EXACT_SCALES[k] for k in around]

        def value_of(sf: np.float32) -> object:
            return lambda q: F(F(q * sf) * tensor_scale)

    best: tuple[np.float32, int] | None = None
    for byte in bytes_:
        sf = decode(byte, "e4m3")
        codes = nv_codes(work, rule, None, places, sf, tensor_scale)
        error = squared_error(work, places, codes, value_of(sf))
        if best is None or error < best[0]:
            best = error, byte
    assert best is not None
    return best[1], nv_codes(work, rule, number, places, decode(best[1], "e4m3"), tensor_scale)


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
                code, saturated = work.coded(v, work.drawn(number, position))
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
        # A row with NaN or Inf is worked on as zeros; only its NaN scale matters.
        usable = row if all(np.isfinite(v) for v in row) else [F(0)] * n
        total = 0.0
        for v in usable:
            total += float(v)
        means[where] = mean = F(total / n)
        rest = [F(v - mean) for v in usable]
        chosen = sorted(sorted(range(n), key=lambda k, rest=rest: (-abs(rest[k]), k))[:kept])
        for place, k in enumerate(chosen):
            slot = list(line[k])
            slot[work.axis] = place
            index[tuple(slot)], exact[tuple(slot)] = k, row[k]
        others = [abs(rest[k]) for k in range(n) if k not in chosen]
        if usable is not row or not all(np.isfinite(v) for v in others):
            scales[where] = math.nan
            for at in line:
                work.put(at, 0, False, NAN)
            continue
        s = F(1) if rule == "one" else F(max(others, default=F(0)) / F(448))
        s = stored_scale(s, name)
        scales[where] = s
        for k, at in enumerate(line):
            if k in chosen:
                work.put(at, 0, False, row[k])
                continue
            v = work.scaled(F(rest[k] / s))
            code, saturated = work.coded(v, work.drawn(number, k), "e4m3")
            work.put(at, code, saturated, F(F(decode(code, "e4m3") * s) + mean))
    result.update(row_means=means, outlier_index=index, outlier_value=exact)
    return scales
