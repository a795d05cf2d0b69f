"""Cases of real sizes for `ci.cuda_fuzz`: layers of language models, and arrays beyond 31 bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ci.cuda_cases import (
    HALF,
    KINDS,
    STORED,
    Rng,
    fp8_share,
    groups,
    many,
    multiplied,
    products,
    weights,
)
from extensor.quant.array import QuantStats
from extensor.quant.recipe_state import stats_of
from extensor.quant.spec import Hadamard, QuantSpec

TRAINED: tuple[dict[str, Any], ...] = (
    {"format": "mxfp4"},
    {"format": "mxfp4", "transform": Hadamard(32)},
    {"format": "mxfp8_e4m3", "scale_rule": "rceil", "rebased": True},
    {"format": "mxfp8_e4m3"},
    {"format": "nvfp4"},
    {"format": "nvfp4_fp8exact"},
    {"format": "fp8_e4m3", "tile": (1, 128)},
    {"format": "int8"},
)
LAYERS = (  # (N, K) of language models, of 0.1 to 670 billion parameters
    (2304, 768), (768, 3072), (3072, 768), (50257, 768), (1536, 576), (192, 576), (960, 2560),
    (2048, 2048), (256, 2048), (5632, 2048), (2048, 5632), (9216, 3072), (3072, 8192), (512, 3584),
    (18944, 3584), (3584, 18944), (4096, 4096), (1024, 4096), (14336, 4096), (4096, 14336),
    (32000, 4096), (128256, 4096), (5120, 5120), (13824, 5120), (5120, 13824), (1536, 7168),
    (576, 7168), (24576, 1536), (32768, 512), (7168, 16384), (18432, 7168), (7168, 18432),
    (2048, 7168), (7168, 2048), (8192, 8192), (1024, 8192), (28672, 8192), (8192, 28672),
)  # fmt: skip
TOKENS = (1, 2, 3, 4, 5, 8, 11, 16, 17, 24, 32, 33, 48, 64, 65, 100, 128, 300, 1000, 2048, 4096)
LARGEST = 1 << 40  # multiply-adds of a product


def training(rng: Rng, backend: Any, shape: tuple[int, int, int]) -> str:
    """Operands as training makes them, rowwise and columnwise, and their product."""
    (m, n, k), spec = shape, QuantSpec(**TRAINED[rng.integers(len(TRAINED))])
    kind, out, sides, decoded = KINDS[rng.integers(2)], KINDS[rng.integers(2)].name, [], []
    for rows in (m, n):
        axis = int(rng.integers(2))
        x = many(rng, *((rows, k) if axis else (k, rows)), backend.xp).astype(kind)
        specs = [spec.replace(axis=a).resolve(2) for a in (axis, 1 - axis)[: rng.integers(1, 3)]]
        made = backend.prepare(x, specs, [None] * len(specs), m * n * k).run()
        sides.append(made[0][0])
        values = backend.fake_quantize(x, specs[0])[0]
        decoded.append(values if axis else values.T)
    got = backend.product(*sides, out)
    return multiplied(got, decoded[0], decoded[1], fp8_share(k), (spec, kind, out, shape))


def layers(rng: Rng, backend: Any) -> str | None:
    """Products of language models' layers, forward or backward, one of four kinds."""
    backend.xp.get_default_memory_pool().free_all_blocks()  # other parts want memory, too
    n, k = LAYERS[rng.integers(len(LAYERS))]
    if rng.integers(4) == 0:
        n, k = k, n
    m = int(rng.choice([tokens for tokens in TOKENS if tokens * n * k <= LARGEST]))
    kinds: tuple[Callable[..., str | None], ...] = weights, weights, products, groups, training
    return kinds[rng.integers(len(kinds))](rng, backend, (m, n, k))


def large(rng: Rng, backend: Any) -> str | None:
    """Arrays of more than 2**31 elements: logits, experts' weights, or a matrix to quantize."""
    backend.xp.get_default_memory_pool().free_all_blocks()
    kind, more = rng.integers(5), int(rng.integers(1, 300))
    if kind == 0:
        return weights(rng, backend, (16384 + more, 131_072 + more, 128 * int(rng.integers(1, 4))))
    if kind == 1:
        return products(rng, backend, (16384 + more, 131_072 + more, 8 * int(rng.integers(4, 40))))
    if kind == 2:
        return groups(rng, backend, (2000, 2048, 7168), 150)
    return parts_of_large(rng, backend)


def parts_of_large(rng: Rng, backend: Any) -> str | None:
    """A matrix whose parts are as those parts by themselves, and whose counts are theirs."""
    spec = QuantSpec(**STORED[rng.integers(len(STORED))], axis=int(rng.integers(2)))
    spec = spec.replace(rounding="nearest_even", transform=None).resolve(2)
    if isinstance(spec.tile, str):
        spec = spec.replace(axis=1)  # a row's scale
    columns, xp = 1024 * int(rng.integers(1, 33)) + 8 * int(rng.integers(3)), backend.xp
    rows = ((1 << 31) // columns // 128 + int(rng.integers(1, 40))) * 128
    x = xp.empty((rows, columns), dtype=HALF if rng.integers(2) else np.float32)
    some = max((1 << 26) // columns // 128, 1) * 128
    parts = [slice(start, min(start + some, rows)) for start in range(0, rows, some)]
    for at in parts:
        x[at] = many(rng, at.stop - at.start, columns, xp)
        x[at.start, 0] = 2.0**8  # a tensor's scale is that of any part
    if backend.path("quantize", x, spec, None) != "fused kernel":
        return None
    whole, counts = backend.quantize(x, spec, None)
    decoded, of_parts = backend.dequantize(whole), QuantStats()
    for at in parts:
        part, of_part = backend.quantize(x[at], spec, None)
        of_parts += stats_of(of_part)
        a, b = (y.view(np.uint32) for y in (decoded[at], backend.dequantize(part)))
        if not bool((a == b).all()):
            return f"{spec} of {x.dtype} {x.shape}: rows from {at.start} on"
    counts = stats_of(counts)
    return "" if counts == of_parts else f"{spec} of {x.dtype} {x.shape}: {counts}, not {of_parts}"
