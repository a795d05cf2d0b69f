"""Cases of small and odd sizes for `ci.cuda_fuzz`, and how results are judged."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from extensor.quant import reference
from extensor.quant.recipe_state import stats_of
from extensor.quant.spec import Hadamard, QuantSpec
from extensor.random import Stream

Array = Any
Rng = np.random.Generator
HALF = np.dtype(ml_dtypes.bfloat16)
KINDS = (np.dtype(np.float32), HALF, np.dtype(np.float16))
STORED: tuple[dict[str, Any], ...] = (
    {"format": "mxfp4"},
    {"format": "mxfp4", "rounding": "stochastic", "rbits": 8},
    {"format": "mxfp4", "transform": Hadamard(32)},
    {"format": "mxfp8_e4m3"},
    {"format": "mxfp8_e5m2", "tile": (32, 32)},
    {"format": "mxfp6_e2m3", "scale_rule": "rceil"},
    {"format": "mxint8"},
    {"format": "nvfp4"},
    {"format": "nvfp4", "tile": (16, 16)},
    {"format": "nvfp4_fp8exact"},
    {"format": "fp8_e4m3", "tile": (128, 128)},
    {"format": "int8", "symmetric": False},
    {"format": "int4", "tile": (1, 32), "scale_dtype": "float16"},
)
PRODUCTS = (
    ("mxfp4", "mxfp4", "promote"),
    ("mxfp4", "mxfp4", "exact"),
    ("mxfp6_e2m3", "nvfp4_fp8exact", "promote"),
    ("mxfp8_e4m3", "nvfp4", "bf16"),
    ("fp8_e4m3", "fp8_e5m2", "promote"),
    ("int8", "int8", "promote"),
)
WEIGHTS = ("mxfp4", "nvfp4", "mxfp8_e4m3", "int4", "int8", "fp8_e4m3")
GROUPS = (None, "tensor", (1, 32), (1, 64), (1, 128))


def size(rng: Rng, most: int = 700) -> int:
    """Small, any, or a multiple of 16 and its neighbours."""
    found = (rng.integers(1, 40), rng.integers(1, most), 16 * rng.integers(1, 20) + rng.integers(3))
    return max(int(rng.choice(found)) - 1, 1)


def values(rng: Rng, *shape: int, odd: bool = False) -> np.ndarray:
    """Normal float32, under rows of different sizes; ``odd``: something special among them."""
    x = rng.standard_normal(shape).astype(np.float32)
    if rng.integers(2):
        x *= np.exp2(rng.integers(-6, 6, (shape[0], *(1 for _ in shape[1:])))).astype(np.float32)
    if rng.integers(4) == 0:
        x[rng.integers(shape[0])] = 0
    if odd and rng.integers(4) == 0:
        x.reshape(-1)[rng.integers(x.size)] = rng.choice([np.nan, np.inf, -np.inf, 3e38, 1e-42])
    return x


def there(rng: Rng, x: np.ndarray, xp: Any) -> Array:
    """On the device, in one of five layouts."""
    bits = x.view(f"u{x.itemsize}")
    layout = rng.integers(5)
    if layout == 0:
        made = xp.asarray(bits[::-1].copy())[::-1]
    elif layout == 1:
        made = xp.asarray(bits.repeat(2, axis=0))[::2]
    elif layout == 2:
        made = xp.asarray(bits.repeat(2, axis=-1))[..., ::2]
    elif layout == 3:
        made = xp.asarray(bits.T.copy()).T
    else:
        made = xp.asarray(bits)
    return made.view(x.dtype)


def same(got: Any, expected: Any) -> str:
    """Which parts of two stored arrays differ."""
    wrong = []
    for name, part in expected.parts.items():
        mine = np.asarray(got.parts[name].get())
        both_nan = part.ndim == 0 and np.isnan(part) and np.isnan(mine)
        if not both_nan and mine.tobytes() != part.tobytes():
            wrong.append(name)
    return ", ".join(wrong)


def chosen(rng: Rng, backend: Any) -> tuple[np.ndarray, Array, QuantSpec, Stream | None]:
    """A matrix on both sides, how it is quantized, and its random bits."""
    spec = QuantSpec(**STORED[rng.integers(len(STORED))], axis=int(rng.integers(2)))
    with np.errstate(over="ignore"):
        x = values(rng, size(rng), size(rng), odd=True).astype(KINDS[rng.integers(3)])
    random = spec.rounding == "stochastic"
    stream = Stream(int(rng.integers(1 << 40)), int(rng.integers(1 << 20)), 3, 4)
    return x, there(rng, x, backend.xp), spec, stream if random else None


def quantizers(rng: Rng, backend: Any) -> str | None:
    """Bytes, counts and decoded values of one direction."""
    x, device, spec, stream = chosen(rng, backend)
    if backend.path("quantize", device, spec, stream) != "fused kernel":
        return None  # the reference against itself
    with np.errstate(all="ignore"):
        expected, counted = reference.quantize(x, spec, stream)
        meant = reference.dequantize(expected)
    got, lazy = backend.quantize(device, spec, stream)
    counts = stats_of(lazy)
    decoded = np.asarray(backend.dequantize(got).get())
    wrong = same(got, expected) or ("" if counts == counted else f"{counts}, expected {counted}")
    wrong = wrong or ("" if np.array_equal(decoded, meant, equal_nan=True) else "decoded values")
    return wrong and f"{spec} of {x.dtype} {x.shape}: {wrong}"


def rowwise_columnwise(rng: Rng, backend: Any) -> str | None:
    """The same of rows and columns in one reading."""
    x, device, spec, stream = chosen(rng, backend)
    specs = tuple(spec.replace(axis=axis).resolve(2) for axis in (1, 0))
    streams = stream, stream
    if backend.path("quantize_rowwise_columnwise", device, specs, streams) != "fused kernel":
        return None
    found = backend.quantize_rowwise_columnwise(device, specs, streams)
    for (got, lazy), one in zip(found, specs, strict=True):
        counts = stats_of(lazy)
        with np.errstate(all="ignore"):
            expected, counted = reference.quantize(x, one, stream)
        wrong = same(got, expected) or (
            "" if counts == counted else f"{counts}, expected {counted}"
        )
        if wrong:
            return f"{one} of {x.dtype} {x.shape}: {wrong}"
    return ""


def many(rng: Rng, rows: int, k: int, xp: Any) -> Array:
    """Normal float32 on the device, a million of them again and again, under rows' sizes."""
    some = xp.asarray(rng.standard_normal(1_000_003).astype(np.float32))
    sizes = np.exp2(rng.integers(-4, 4, (rows, 1))).astype(np.float32)
    return xp.resize(some, (rows, k)) * xp.asarray(sizes)


def stored(rng: Rng, rows: int, k: int, spec: QuantSpec, backend: Any) -> Any:
    few = rows * k < 1 << 20
    x = backend.xp.asarray(values(rng, rows, k)) if few else many(rng, rows, k, backend.xp)
    return backend.quantize(x, spec.resolve(2))[0]


def judged(got: Array, expected: Array, sums: Array, share: float, what: object) -> str:
    """Whether a product is within ``share`` of sum |a| |b|, and a rounding to bfloat16."""
    bound = share * sums + (2.0**-8 * abs(expected) if got.dtype == HALF else 0.0) + 1e-30
    off = float((abs(got.astype(np.float64) - expected) / bound).max())
    return "" if off <= 1 else f"{what}: {off} times the bound"


def multiplied(
    got: Array,
    x: Array,
    w: Array,
    share: float,
    what: object,
    span: float = 0,
    least: tuple[float, float] = (0.0, 0.0),
    most: int = 1 << 26,
) -> str:
    """`judged` of x w^T, by rows of w of up to ``most`` values at a time.

    In the bound each |w| is ``span`` more, and what is not 0 has a magnitude of ``least`` or more.
    """
    wide, some = x.astype(np.float64), max(most // max(len(x), w.shape[1]), 1)
    large = abs(wide).clip(least[0], None) * (wide != 0)
    for at in (slice(start, start + some) for start in range(0, len(w), some)):
        b = w[at].astype(np.float64)
        sums = large @ (abs(b).clip(least[1], None) * (b != 0) + span).T
        if wrong := judged(got[:, at], wide @ b.T, sums, share, what):
            return f"{wrong}, in columns from {at.start} on"
    return ""


def normal(q: Any) -> float:
    """Of plain FP8 the smallest normal magnitude, as which the tensor cores align smaller ones."""
    if not q.spec.format.startswith("fp8"):
        return 0.0
    return float(q.scales.max()) * 2.0**q.spec.row.element.min_exponent


def fp8_share(k: int) -> float:
    """The bound of `extensor_cuda.matmul.product`, FP8's and bfloat16's together."""
    return min(k, 512) * 34 / 32 * 2.0**-13 + 2.0**-20 + k * 2.0**-22


def products(rng: Rng, backend: Any, shape: tuple[int, int, int] | None = None) -> str:
    """Packed matrices, whose product leaves as floats or packed."""
    from extensor_cuda.matmul.stored import matmul

    left, right, accumulate = PRODUCTS[rng.integers(len(PRODUCTS))]
    m, n, k = shape or (size(rng), size(rng), size(rng, 1500))
    tile: dict[str, Any] = {"tile": (1, 128)} if left == "fp8_e4m3" and rng.integers(2) else {}
    zeros: dict[str, Any] = {"symmetric": False} if left == "int8" and rng.integers(2) else {}
    a, b = (
        stored(rng, rows, k, QuantSpec(name, **tile, **zeros), backend)
        for rows, name in ((m, left), (n, right))
    )
    what = (left, right, accumulate, (m, n, k), tile, zeros)
    spec = QuantSpec(("mxfp4", "mxfp8_e4m3")[rng.integers(2)])
    outs = "bfloat16", "float32", *(() if shape else (spec,))  # the reference would take minutes
    how = {"accumulate": accumulate}
    made: list[Any] = [matmul(a, b, backend.xp, out_dtype=out, **how) for out in outs]
    x, y = (backend.dequantize(q) for q in (a, b))
    least = normal(a), normal(b)
    for done in made[:2]:
        told = *what, done.path
        if wrong := multiplied(done.out, x, y, fp8_share(k), told, least=least):
            return wrong
    if shape:
        return ""
    y16 = np.asarray(made[0].out.view(np.uint16).get()).view(HALF)
    wrong = same(made[2].out, reference.quantize(y16, spec.resolve(2))[0])
    return wrong and f"{what} to {spec.format}: {wrong}"


def weights(rng: Rng, backend: Any, shape: tuple[int, int, int] | None = None) -> str | None:
    """Floats times packed weights, few rows and many."""
    from extensor.backends.unsupported import Unsupported
    from extensor_cuda.matmul.weight_only import weight_only_gap, weight_only_matmul

    name, xp = WEIGHTS[rng.integers(len(WEIGHTS))], backend.xp
    m, n, k = int(rng.choice([1, size(rng, 30), size(rng)])), size(rng), size(rng, 1500)
    # Programs that decode take such; those for few tokens have several tiles a warp then.
    if rng.integers(2):
        m, k = min(m, 64) if rng.integers(2) else m, 128 * (k // 128 + 1)
        n = int(rng.integers(16, 20_000)) if rng.integers(2) else n
    m, n, k = shape or (m, n, k)
    options: dict[str, Any] = {}
    if name in WEIGHTS[3:]:
        options = {"tile": GROUPS[rng.integers(len(GROUPS))]}
        options |= {"symmetric": False} if name != "fp8_e4m3" and rng.integers(2) else {}
        options |= {"scale_dtype": "float16"} if rng.integers(2) else {}
    w = stored(rng, n, k, QuantSpec(name, **options), backend)
    kind = KINDS[rng.integers(2)]
    few = m * k < 1 << 20
    x = there(rng, values(rng, m, k).astype(kind), xp) if few else many(rng, m, k, xp).astype(kind)
    if weight_only_gap(x, w, "90") is not None:
        return None
    done = weight_only_matmul(x, w, ("float32", "bfloat16")[rng.integers(2)], xp)
    what = (name, options, str(x.dtype), (m, n, k))
    if isinstance(done, Unsupported):
        return f"{what}: {done.reason}"
    decoded = backend.dequantize(w)
    # Codes are multiplied before zero points are taken off, of up to twice the largest value.
    span = 2 * float(abs(decoded).max()) if "symmetric" in options else 0.0
    share = k * 2.0**-22 + k / 32 * 2.0**-24 + 2.0**-19
    return multiplied(done.out, x, decoded, share, (*what, done.path), span)


def groups(
    rng: Rng, backend: Any, shape: tuple[int, int, int] | None = None, fewest: int = 1
) -> str:
    """Groups of rows, each times a matrix of its own."""
    from extensor_cuda.matmul.grouped import grouped_matmul, offsets_of

    sizes, n, k = rng.integers(0, 200, rng.integers(1, 6)), size(rng, 300), size(rng)
    if shape:
        m, n, k = shape
        experts = max((1 << 28) // (n * k), fewest)
        sizes = rng.multinomial(m, rng.dirichlet(np.full(experts, 0.5)))
    sizes[0] += 1
    name = ("mxfp4", "mxfp8_e4m3", "fp8_e4m3")[rng.integers(3)]
    a, b = (
        stored(rng, rows, k, QuantSpec(name), backend)
        for rows in (int(sizes.sum()), n * len(sizes))
    )
    done: Any = grouped_matmul(a, b, offsets_of(backend.xp.asarray(sizes), backend.xp), backend.xp)
    x, y = (backend.dequantize(q) for q in (a, b))
    least, end = (normal(a), normal(b)), 0
    for group, rows in enumerate(sizes.tolist()):
        start, end = end, end + rows
        if not rows:
            continue
        what = (name, sizes.tolist(), n, k, group, done.path)
        mine = x[start:end], y[group * n : (group + 1) * n]
        if wrong := multiplied(done.out[start:end], *mine, fp8_share(k), what, least=least):
            return wrong
    return ""


def attention(rng: Rng, backend: Any) -> str | None:
    """Attention in bfloat16, of heads in any layout; results alone."""
    xp, d, shared = backend.xp, (64, 128)[rng.integers(2)], int(rng.integers(1, 4))
    heads, batch, causal = shared * int(rng.integers(1, 4)), size(rng, 3), bool(rng.integers(2))
    queries = size(rng, 400)
    keys = queries + int(rng.integers(200)) if causal else size(rng, 400)
    q, k, v = (
        there(rng, values(rng, batch, length, h, d).astype(HALF), xp).swapaxes(1, 2)
        for h, length in ((heads, queries), (shared, keys), (shared, keys))
    )
    if backend.path("attention", q, k, v, causal, d**-0.5) != "fused kernel":
        return None
    out, _ = backend.attention(q, k, v, causal, d**-0.5)
    wide = [xp.repeat(a.astype(np.float64), heads // a.shape[1], axis=1) for a in (q, k, v)]
    scores = wide[0] @ wide[1].swapaxes(-1, -2) * d**-0.5
    if causal:
        scores = xp.where(xp.tri(queries, keys, keys - queries, dtype=bool), scores, -np.inf)
    p = xp.exp(scores - scores.max(axis=-1, keepdims=True))
    p /= p.sum(axis=-1, keepdims=True)
    most = float(abs(scores[xp.isfinite(scores)]).max())
    share = 2.0**-7 + 2.0**-22 * (d + 4) * (1 + most) + keys * 2.0**-23
    what = f"{(batch, heads, shared, queries, keys, d)}, causal {causal}"
    # The share holds the rounding of the result.
    return judged(out.astype(np.float64), p @ wide[2], p @ abs(wide[2]), share, what)
