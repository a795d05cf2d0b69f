"""Put random shapes, layouts and options through the CUDA kernels and judge what comes out.

    python ci/cuda_fuzz.py --seconds 40
    python ci/cuda_fuzz.py --part quantizers --case 1000123

Tests choose their shapes; this draws them: odd and round sizes, arrays that are reversed, have gaps
or lie down columns, rows of zeros, NaN and infinities. Quantizers are compared with the reference
byte for byte, products with float64 within the bounds that their modules state. Each part is a
process of its own. A case is its number: what is off is printed with it, and --case runs it again
alone. Cases that no kernel takes are counted apart; a part all of whose cases are such has not
passed. Needs a GPU with wgmma (H100, H200).
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import ml_dtypes
import numpy as np

from extensor.backends.registry import get
from extensor.quant import reference
from extensor.quant.spec import Hadamard, QuantSpec
from extensor.random import Stream

Array = Any
Rng = np.random.Generator
HALF = np.dtype(ml_dtypes.bfloat16)
KINDS = (np.dtype(np.float32), HALF, np.dtype(np.float16))
SHOWN = 5  # cases of a part that are printed
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
    way = rng.integers(5)
    if way == 0:
        made = xp.asarray(bits[::-1].copy())[::-1]
    elif way == 1:
        made = xp.asarray(bits.repeat(2, axis=0))[::2]
    elif way == 2:
        made = xp.asarray(bits.repeat(2, axis=-1))[..., ::2]
    elif way == 3:
        made = xp.asarray(bits.T.copy()).T
    else:
        made = xp.asarray(bits)
    return made.view(x.dtype)


def same(got: Any, want: Any) -> str:
    """Which parts of two stored arrays differ."""
    wrong = []
    for name, part in want.parts.items():
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
        want, counted = reference.quantize(x, spec, stream)
        meant = reference.dequantize(want)
    got, counts = backend.quantize(device, spec, stream)
    decoded = np.asarray(backend.dequantize(got).get())
    wrong = same(got, want) or ("" if counts == counted else f"{counts}, wanted {counted}")
    wrong = wrong or ("" if np.array_equal(decoded, meant, equal_nan=True) else "decoded values")
    return wrong and f"{spec} of {x.dtype} {x.shape}: {wrong}"


def pairs(rng: Rng, backend: Any) -> str | None:
    """The same of rows and columns in one reading."""
    x, device, spec, stream = chosen(rng, backend)
    specs = tuple(spec.replace(axis=axis).resolve(2) for axis in (1, 0))
    streams = stream, stream
    if backend.path("quantize_pair", device, specs, streams) != "fused kernel":
        return None
    found = backend.quantize_pair(device, specs, streams)
    for (got, counts), one in zip(found, specs, strict=True):
        with np.errstate(all="ignore"):
            want, counted = reference.quantize(x, one, stream)
        wrong = same(got, want) or ("" if counts == counted else f"{counts}, wanted {counted}")
        if wrong:
            return f"{one} of {x.dtype} {x.shape}: {wrong}"
    return ""


def stored(rng: Rng, rows: int, k: int, spec: QuantSpec, backend: Any) -> Any:
    return backend.quantize(backend.xp.asarray(values(rng, rows, k)), spec.resolve(2))[0]


def judged(got: Array, want: Array, sums: Array, share: float, what: object) -> str:
    """Whether a product is within ``share`` of sum |a| |b|, and a rounding to bfloat16."""
    bound = share * sums + (2.0**-8 * abs(want) if got.dtype == HALF else 0.0) + 1e-30
    off = float((abs(got.astype(np.float64) - want) / bound).max())
    return "" if off <= 1 else f"{what}: {off} times the bound"


def fp8_share(k: int) -> float:
    """The bound of `extensor_cuda.gemm`, FP8's and bfloat16's together."""
    return min(k, 512) * 34 / 32 * 2.0**-13 + 2.0**-20 + k * 2.0**-22


def products(rng: Rng, backend: Any) -> str:
    """Packed matrices, whose product leaves as floats or packed."""
    from extensor_cuda import gemm

    left, right, way = PRODUCTS[rng.integers(len(PRODUCTS))]
    m, n, k = size(rng), size(rng), size(rng, 1500)
    tile: dict[str, Any] = {"tile": (1, 128)} if left == "fp8_e4m3" and rng.integers(2) else {}
    zeros: dict[str, Any] = {"symmetric": False} if left == "int8" and rng.integers(2) else {}
    a, b = (
        stored(rng, rows, k, QuantSpec(name, **tile, **zeros), backend)
        for rows, name in ((m, left), (n, right))
    )
    what = (left, right, way, (m, n, k), tile, zeros)
    spec = QuantSpec(("mxfp4", "mxfp8_e4m3")[rng.integers(2)])
    made: list[Any] = [
        gemm.matmul(a, b, backend.xp, accumulate=way, out_dtype=out)
        for out in ("bfloat16", "float32", spec)
    ]
    x, y = (backend.dequantize(q).astype(np.float64) for q in (a, b))
    want, sums = x @ y.T, abs(x) @ abs(y).T
    for done in made[:2]:
        if wrong := judged(done.out, want, sums, fp8_share(k), (*what, done.path)):
            return wrong
    y16 = np.asarray(made[0].out.view(np.uint16).get()).view(HALF)
    wrong = same(made[2].out, reference.quantize(y16, spec.resolve(2))[0])
    return wrong and f"{what} to {spec.format}: {wrong}"


def weights(rng: Rng, backend: Any) -> str | None:
    """Floats times packed weights, few rows and many."""
    from extensor_cuda import weights as ways

    name, xp = WEIGHTS[rng.integers(len(WEIGHTS))], backend.xp
    m, n, k = int(rng.choice([1, size(rng, 30), size(rng)])), size(rng), size(rng, 1500)
    if rng.integers(2):  # programs for few tokens take such, whose warps have several tiles then
        m, k = min(m, 64), 128 * (k // 128 + 1)
        n = int(rng.integers(16, 20_000)) if rng.integers(2) else n
    options: dict[str, Any] = {}
    if name in WEIGHTS[3:]:
        options = {"tile": GROUPS[rng.integers(len(GROUPS))]}
        options |= {"symmetric": False} if name != "fp8_e4m3" and rng.integers(2) else {}
        options |= {"scale_dtype": "float16"} if rng.integers(2) else {}
    w = stored(rng, n, k, QuantSpec(name, **options), backend)
    x = there(rng, values(rng, m, k).astype(KINDS[rng.integers(2)]), xp)
    if ways.reason(x, w, "90"):
        return None
    done = ways.product(x, w, ("float32", "bfloat16")[rng.integers(2)], xp)
    what = (name, options, str(x.dtype), (m, n, k))
    if isinstance(done, str):
        return f"{what}: {done}"
    decoded = backend.dequantize(w).astype(np.float64)
    # Codes are multiplied before zero points are taken off, of up to twice the largest value.
    span = 2 * float(abs(decoded).max()) if "symmetric" in options else 0.0
    share = k * 2.0**-22 + k / 32 * 2.0**-24 + 2.0**-19
    wide = x.astype(np.float64)
    want, sums = wide @ decoded.T, abs(wide) @ (abs(decoded) + span).T
    return judged(done[0], want, sums, share, (*what, done[1]))


def groups(rng: Rng, backend: Any) -> str:
    """Groups of rows, each times a matrix of its own."""
    from extensor_cuda import grouped

    sizes, n, k = rng.integers(0, 200, rng.integers(1, 6)), size(rng, 300), size(rng)
    sizes[0] += 1
    name = ("mxfp4", "mxfp8_e4m3", "fp8_e4m3")[rng.integers(3)]
    a, b = (
        stored(rng, rows, k, QuantSpec(name), backend)
        for rows in (int(sizes.sum()), n * len(sizes))
    )
    done: Any = grouped.matmul(
        a, b, grouped.offsets_of(backend.xp.asarray(sizes), backend.xp), backend.xp
    )
    x, y = (backend.dequantize(q).astype(np.float64) for q in (a, b))
    end = 0
    for group, rows in enumerate(sizes.tolist()):
        start, end = end, end + rows
        if not rows:
            continue
        a64, b64 = x[start:end], y[group * n : (group + 1) * n]
        want, sums = a64 @ b64.T, abs(a64) @ abs(b64).T
        what = (name, sizes.tolist(), n, k, group, done.path)
        if wrong := judged(done.out[start:end], want, sums, fp8_share(k), what):
            return wrong
    return ""


def attention(rng: Rng, backend: Any) -> str | None:
    """Attention in bfloat16, of heads that lie in any way; results alone."""
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


Part = Callable[[Rng, Any], str | None]
"""What is off in a case, nothing, or None: no kernel takes it."""
PARTS: dict[str, Part] = {
    part.__name__: part for part in (quantizers, pairs, products, weights, groups, attention)
}


def run(part: str, first: int, seconds: float) -> tuple[str, int, int, list[str]]:
    """A part, how many of its cases were judged and how many not, and what was off.

    Cases are numbered from ``first`` on, until the time is over.
    """
    backend, end, case, missed = get("cuda"), time.monotonic() + seconds, first, 0
    found: list[str] = []
    while case == first or time.monotonic() < end:
        try:
            wrong = PARTS[part](np.random.default_rng(case), backend)
        except Exception as error:
            wrong = f"{type(error).__name__}: {error}"
        if wrong:
            found.append(f"--part {part} --case {case}: {wrong}")
        missed += wrong is None
        case += 1
    return part, case - first - missed, missed, found


def main(argv: Sequence[str] | None = None) -> int:
    """Run the parts asked for; 0 if each judged something and nothing was off."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--part", action="append", choices=PARTS, help="may be repeated")
    parser.add_argument("--seconds", type=float, default=40, help="of each part")
    parser.add_argument("--seed", type=int, default=1, help="millions of the first case's number")
    parser.add_argument("--case", type=int, help="this case alone")
    chosen = parser.parse_args(argv)
    first, seconds = chosen.seed * 1_000_000, chosen.seconds
    if chosen.case is not None:
        first, seconds = chosen.case, 0.0
    parts, bad = chosen.part or list(PARTS), 0
    with ProcessPoolExecutor(len(parts), mp_context=get_context("spawn")) as pool:
        for waiting in [pool.submit(run, part, first, seconds) for part in parts]:
            part, cases, missed, found = waiting.result()
            bad += len(found) + (not cases)
            told = f"{part}: {len(found)} of {cases} cases are off; {missed} have no kernel"
            print("\n".join([told, *found[:SHOWN]]))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
