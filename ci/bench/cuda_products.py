"""Products of stored matrices on a GPU: FP8 and INT8 under float scales, packed weights, groups.

    python ci/bench/cuda_products.py [--rounds N] [--only scaled rebased requantized ...]

scaled       square bfloat16 results of normal data from codes, against torch's bf16, FP8
             (`_scaled_mm`, row scales, and those of 128 elements on the same codes) and INT8
             (`_int_mm`, int32 results) products
rebased      MXFP8 from storage on FP8 tensor cores, with the shares of values that this changes and
             sets to zero; its two kernels alone, under other tiles too; and the exact product
operands     products as training makes them, of operands prepared before and with both prepared
fallbacks    MXFP4 operands prepared before, and the same where one row of a spans more binades than
             FP8 has, so that bfloat16 multiplies: tokens x inputs x outputs of Llamas of 3 and 30
             million weights, and of width 4096; time in kernels, by torch's profiler
requantized  MXFP4 operands prepared before, whose product leaves quantized, against one in bfloat16
             that the row quantizer then reads
decode       x (M, K) in bfloat16 and packed weights (N, K), against torch's bf16 `linear`;
             "of_copy" is to what the stored bytes would take at the speed of torch's clone
weights      the same for many rows
grouped      eight groups of unequal size, against a bf16 product of torch for each

CUDA events around four calls, the contestants taking turns in one process, medians over the rounds;
weights rotate past the second-level cache. Needs a Hopper GPU, torch and the extra ``cuda13``.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import torch

from ci.bench import gpu
from extensor.quant.spec import QuantSpec
from extensor_cuda.backend import CudaBackend
from extensor_cuda.kernels.gemm.config import Config
from extensor_cuda.kernels.gemm.gemm_sm90 import Epilogue, Scales, empty_rows, gemm
from extensor_cuda.kernels.gemm.requantize import requantized
from extensor_cuda.kernels.quantize import quantize
from extensor_cuda.matmul.expand import as_bf16, rebase_mxfp8
from extensor_cuda.matmul.grouped import grouped_matmul, offsets_of
from extensor_cuda.matmul.operand import GemmOperand
from extensor_cuda.matmul.partition import configure
from extensor_cuda.matmul.prepare import FLOAT_SCALES, FUSED
from extensor_cuda.matmul.product import multiply, product
from extensor_cuda.matmul.stored import matmul
from extensor_cuda.matmul.weight_only import decodes_in_gemm, weight_only_gap, weight_only_matmul

CACHE = 64 << 20  # bytes that no cache holds
TOKENS = (1, 4, 16, 32, 64)
LAYERS = ((8192, 8192), (28672, 8192))  # N, K
SQUARES = (4096, 8192)
MANY = (128, 512, 2048, 8192)
FORMATS = ("mxfp4", "nvfp4", "int4", "int8")

Rows = Iterator[dict[str, Any]]
BF16: dict[str, Any] = {"out_dtype": "bfloat16"}


def torch_product(a: Any, b: Any) -> Any:
    return a @ b.T


def packed(x: Any, name: str, backend: CudaBackend, **options: Any) -> Any:
    """X quantized along its rows."""
    spec = QuantSpec(name, axis=1, **options).resolve(2)
    return backend.quantize(gpu.as_cupy(x, backend.xp), spec)[0]


def scaled(backend: CudaBackend, rounds: int) -> Rows:
    """FP8 and INT8 under float scales."""
    xp = backend.xp
    for size in SQUARES:
        a, b = gpu.normal(size, size), gpu.normal(size, size, seed=1)
        wide, eight = QuantSpec("fp8_e4m3"), QuantSpec("int8")
        small = wide.replace(tile=(1, 128))
        specs = {
            "E4M3, scale a tensor": (wide, wide),
            "E4M3, scales of rows": (wide.replace(tile="channel"),) * 2,
            "E4M3, 1x128 x 128x128": (small, wide.replace(tile=(128, 128))),
            "E4M3, 1x128 x 1x128": (small, small),
            "INT8, scales of rows": (eight, eight),
        }
        sides = {
            name: [_side(x, spec, xp) for x, spec in zip((a, b), pair, strict=True)]
            for name, pair in specs.items()
        }
        zeros = [packed(x, "int8", backend, symmetric=False) for x in (a, b)]
        fp4 = [packed(x, "mxfp4", backend, scale_rule="one") for x in (a, b)]
        integers = [
            torch.randint(-96, 97, (size, size), device="cuda", dtype=torch.int8) for _ in "ab"
        ]
        calls: dict[str, gpu.Call] = {
            "torch bf16": gpu.fixed(torch_product, a, b),
            "torch FP8, row scales, promoted": _torch_fp8(a, b),
            "torch INT8": gpu.fixed(torch._int_mm, integers[0], integers[1].T),
        }
        for name in ("1x128 x 128x128", "1x128 x 1x128"):
            calls[f"torch FP8, {name}"] = _torch_blocks(sides[f"E4M3, {name}"])
        for name, pair in sides.items():
            calls[name] = gpu.fixed(product, *pair, "bfloat16", xp)
            calls[f"{name}: quantizing a"] = gpu.fixed(_side, a, specs[name][0], xp)
        calls["INT8, zero points, from storage"] = gpu.fixed(matmul, *zeros, xp, **BF16)
        calls["MXFP4 as INT8, from storage"] = gpu.fixed(
            matmul, *fp4, xp, accumulate="exact", **BF16
        )
        times = gpu.milliseconds(calls, rounds)
        yield from gpu.rates(times, 2 * size**3, what="scaled", size=f"{size}^3")


def _torch_fp8(a: Any, b: Any) -> gpu.Call:
    """Torch's product of codes under scales of rows, promoted to float32 on the way."""
    x, y = (v.to(torch.float8_e4m3fn) for v in (a, b))
    scales = torch.ones(len(a), 1, device="cuda"), torch.ones(1, len(b), device="cuda")

    def call(turn: int) -> Any:
        return torch._scaled_mm(x, y.T, *scales, out_dtype=torch.bfloat16, use_fast_accum=False)

    return call


def _torch_blocks(sides: list[Any]) -> gpu.Call:
    """Torch's product of a pair of operands under scales of 128 elements, laid out as it asks."""
    x, y = (torch.utils.dlpack.from_dlpack(side.codes).view(torch.float8_e4m3fn) for side in sides)
    rows, columns = (torch.utils.dlpack.from_dlpack(side.scale.grid.copy()) for side in sides)
    if sides[1].scale.rows > 1:
        columns = columns.T.contiguous().T

    def call(turn: int) -> Any:
        return torch._scaled_mm(x, y.T, rows.T, columns, out_dtype=torch.bfloat16)

    return call


def _side(x: Any, spec: QuantSpec, xp: Any) -> Any:
    return FLOAT_SCALES.run(
        gpu.as_cupy(x, xp), [spec.replace(axis=1).resolve(2)], [None], xp, None
    )[0][0]


REBASED_TILES = ((128, 2), (176, 2), (176, 3), (192, 2), (192, 3))
"""Columns and patches of programs, the one that is chosen among them."""


def rebased(backend: CudaBackend, rounds: int) -> Rows:
    """MXFP8, the values that do not fit FP8 rounded."""
    xp = backend.xp
    for size in SQUARES:
        a, b = gpu.normal(size, size), gpu.normal(size, size, seed=1)
        pair = [packed(x, "mxfp8_e4m3", backend) for x in (a, b)]
        made = [rebase_mxfp8(q, xp) for q in pair]
        (x, lost), (y, _) = made
        out = empty_rows(xp, size, size, ml_dtypes.bfloat16)
        calls: dict[str, gpu.Call] = {
            "torch bf16": gpu.fixed(torch_product, a, b),
            "torch FP8, row scales, promoted": _torch_fp8(a, b),
            "rebased, from storage": gpu.fixed(matmul, *pair, xp, accumulate="rebased", **BF16),
            "exact, from storage": gpu.fixed(matmul, *pair, xp, accumulate="bf16", **BF16),
            "rebasing a": gpu.fixed(rebase_mxfp8, pair[0], xp),
            "product of operands": gpu.fixed(_joined, x, y, out, 1),
            "product of operands, every 512": gpu.fixed(_joined, x, y, out, 4),
        }
        for columns, patches in REBASED_TILES:
            config = Config.of(
                "e4m3", tile_n=columns, promote=1, epilogue_tiles=patches, out="bfloat16"
            )
            name = f"product of operands, tile {columns}, patches {patches}"
            calls[name] = gpu.fixed(_launched, x, y, out, config)
        times = gpu.milliseconds(calls, rounds)
        changed, flushed = lost.shares()
        shares = {"changed": float(f"{changed:.2e}"), "flushed": float(f"{flushed:.2e}")}
        about = {"what": "rebased", "size": f"{size}^3"} | shares
        yield from gpu.rates(times, 2 * size**3, **about)


def _joined(a: Any, b: Any, out: Any, promote: int) -> None:
    config = configure(a.kind, *out.shape, out.dtype.name, promote, b=b.kind)
    multiply(a, b, out, config)


def _launched(a: Any, b: Any, out: Any, config: Config) -> None:
    gemm(a.codes, b.codes, out, config, Epilogue(Scales((a.scale.exponent, b.scale.exponent))))


def operands(backend: CudaBackend, rounds: int) -> Rows:
    """Operands as training makes them, and their products."""
    square: dict[str, Any] = {"scale_rule": "rceil", "rebased": True}
    specs = {
        "MXFP4": QuantSpec("mxfp4"),
        "NVFP4 FP8-exact": QuantSpec("nvfp4_fp8exact"),
        "MXFP6 E2M3": QuantSpec("mxfp6_e2m3"),
        "MXFP8 rebased": QuantSpec("mxfp8_e4m3", **square),
        "MXFP8 exact": QuantSpec("mxfp8_e4m3"),
        "NVFP4": QuantSpec("nvfp4"),
        "FP8 1x128": QuantSpec("fp8_e4m3", tile=(1, 128)),
        "INT8": QuantSpec("int8"),
    }
    for size in SQUARES:
        a, b = gpu.normal(size, size), gpu.normal(size, size, seed=1)
        pair = gpu.as_cupy(a, backend.xp), gpu.as_cupy(b, backend.xp)
        calls: dict[str, gpu.Call] = {
            "torch bf16": gpu.fixed(torch_product, a, b),
            "torch FP8, row scales, promoted": _torch_fp8(a, b),
        }
        for name, spec in specs.items():
            made = [_operand(x, spec, backend) for x in pair]
            calls[name] = gpu.fixed(backend.product, *made, "bfloat16")
            calls[f"{name}, making both"] = gpu.fixed(_making, pair, spec, backend)
        times = gpu.milliseconds(calls, rounds)
        yield from gpu.rates(times, 2 * size**3, what="operands", size=f"{size}^3")


def _operand(x: Any, spec: QuantSpec, backend: CudaBackend) -> Any:
    resolved = spec.replace(axis=1).resolve(2)
    return backend.prepare(x, [resolved], [None], len(x) ** 3).run()[0][0]


def _making(pair: Any, spec: QuantSpec, backend: CudaBackend) -> Any:
    a, b = (_operand(x, spec, backend) for x in pair)
    return backend.product(a, b, "bfloat16")


def fallbacks(backend: CudaBackend, rounds: int) -> Rows:
    """What a product costs that falls back from FP8."""
    spec = QuantSpec("mxfp4", axis=1, scale_rule="rceil").resolve(2)
    for m, k, n in ((32768, 256, 256), (32768, 704, 256), (65536, 640, 640), (8192, 4096, 4096)):
        a, b = gpu.normal(m, k), gpu.normal(n, k, seed=1)
        calls: dict[str, gpu.Call] = {"torch bf16": gpu.fixed(torch_product, a, b)}
        for name, factor in (("MXFP4", 1.0), ("MXFP4, falls back", 2.0**-60)):
            x = a.clone()
            x[0, :32] *= factor
            pair = (gpu.as_cupy(v, backend.xp) for v in (x, b))
            made = [backend.prepare(v, [spec], [None], m * n * k).run()[0][0] for v in pair]
            if bool(made[0].flag.get().any()) != (factor < 1):
                raise RuntimeError(f"{name}: expected the other path")
            calls[name] = gpu.fixed(backend.product, *made, "bfloat16")
        times = {name: _in_kernels(call, rounds) for name, call in calls.items()}
        yield from gpu.rates(times, 2.0 * m * k * n, what="fallbacks", size=f"{m}x{k}x{n}")


def _in_kernels(call: gpu.Call, rounds: int) -> float:
    """Milliseconds that a call's kernels take; Python between them may take longer."""
    call(0)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for turn in range(rounds):
            call(turn)
        torch.cuda.synchronize()
    total = sum(event.device_time_total for event in profile.key_averages())
    return float(total / rounds / 1e3)


def requantized_results(backend: CudaBackend, rounds: int) -> Rows:
    """MXFP4 products whose results are quantized."""
    xp, rows = backend.xp, QuantSpec("mxfp4", axis=1).resolve(2)
    for size in SQUARES:
        a, b = gpu.normal(size, size), gpu.normal(size, size, seed=1)
        x, y = (FUSED.run(gpu.as_cupy(v, xp), [rows], [None], xp, None)[0][0] for v in (a, b))
        out = empty_rows(xp, size, size, ml_dtypes.bfloat16)
        wide = configure("e5m2", size, size, "bfloat16")

        calls: dict[str, gpu.Call] = {
            "torch bf16": gpu.fixed(torch_product, a, b),
            "bfloat16": gpu.fixed(_launched, x, y, out, wide),
        }
        for name in ("mxfp8_e4m3", "mxfp4", "nvfp4"):
            spec = rows.replace(format=name, tile=None, scale_rule=None).resolve(2)
            amax = xp.full((), 512, dtype=xp.float32) if spec.row.tensor_scale else None
            to = requantized(spec, size, size, xp, amax)
            config = configure("e5m2", size, size, spec)
            calls[f"bfloat16, then {name}"] = gpu.fixed(_then, x, y, out, wide, spec, amax, xp)
            calls[f"{name}, as it leaves"] = gpu.fixed(_launched, x, y, to, config)
        times = gpu.milliseconds(calls, rounds)
        yield from gpu.rates(times, 2 * size**3, what="requantized", size=f"{size}^3")


def _then(a: Any, b: Any, out: Any, config: Config, spec: QuantSpec, amax: Any, xp: Any) -> Any:
    _launched(a, b, out, config)
    plan = quantize.plan_of(spec, out.shape)
    assert isinstance(plan, quantize.Plan)
    return quantize.quantize_raw(out, plan, None, xp, amax, stats=False)


def _rows(what: str, size: str, times: dict[str, float], nbytes: dict[str, int]) -> Rows:
    copied = nbytes["copy"] / times["copy"]  # bytes read and written a millisecond
    for row in gpu.rates(times, what=what, size=size):
        if (name := row["name"]) in nbytes:
            row["of_copy"] = round(nbytes[name] / times[name] / copied, 3)
        yield row


def _contests(
    backend: CudaBackend, layer: tuple[int, int], tokens: tuple[int, ...], what: str, rounds: int
) -> Rows:
    """Products of packed weights (N, K) with so many rows."""
    xp, (n, k) = backend.xp, layer
    turns = -(-CACHE // (n * k // 2)) + 1
    w = [gpu.normal(n, k, seed=i) for i in range(turns)]
    big = gpu.normal(CACHE)
    int4: dict[str, Any] = {"tile": (1, 128), "scale_dtype": "float16"}
    held = {
        name: [packed(v, name, backend, **(int4 if name == "int4" else {})) for v in w]
        for name in FORMATS
    }
    for m in tokens:
        x = gpu.normal(m, k)
        view = gpu.as_cupy(x, xp)
        calls: dict[str, gpu.Call] = {
            "torch bf16": partial(_linear, x, w),
            "copy": gpu.fixed(big.clone),
        }
        nbytes = {"copy": 4 * CACHE, "torch bf16": 2 * n * k}
        for name, stored in held.items():
            if weight_only_gap(view, stored[0], "90") is None:
                nbytes[name] = stored[0].nbytes
                calls[name] = partial(_packed, view, stored, xp)
                if m > TOKENS[-1] and not decodes_in_gemm(stored[0], m):
                    calls[f"{name}, expanded alone"] = partial(_expanding, stored, xp)
        if m > TOKENS[-1]:
            sides = [GemmOperand(v.view(np.uint16), "bf16") for v in (view, gpu.as_cupy(w[0], xp))]
            calls["bf16, ours"] = gpu.fixed(product, *sides, "bfloat16", xp)
        yield from _rows(what, f"{m} x {n} x {k}", gpu.milliseconds(calls, rounds), nbytes)


def _linear(x: Any, held: list[Any], turn: int) -> Any:
    return torch.nn.functional.linear(x, held[turn % len(held)])


def _packed(x: Any, held: list[Any], xp: Any, turn: int) -> Any:
    return weight_only_matmul(x, held[turn % len(held)], "bfloat16", xp)


def _expanding(held: list[Any], xp: Any, turn: int) -> Any:
    return as_bf16(held[turn % len(held)], xp)


def few_rows(backend: CudaBackend, rounds: int) -> Rows:
    """Few tokens."""
    for layer in LAYERS:
        yield from _contests(backend, layer, TOKENS, "decode", rounds)


def many_rows(backend: CudaBackend, rounds: int) -> Rows:
    """Packed weights and many rows."""
    yield from _contests(backend, LAYERS[0], MANY, "weights", rounds)


def grouped(backend: CudaBackend, rounds: int) -> Rows:
    """Eight groups of unequal size: a mixture of experts' first product."""
    xp, n, k = backend.xp, 4096, 4096
    sizes = [4096, 100, 3000, 1, 2048, 0, 900, 6239]
    x, w = gpu.normal(sum(sizes), k), gpu.normal(len(sizes) * n, k, seed=1)
    offsets = offsets_of(xp.asarray(np.array(sizes)), xp)
    ends = np.cumsum([0, *sizes])
    parts = [(x[ends[g] : ends[g + 1]], w[g * n : (g + 1) * n]) for g in range(len(sizes))]
    fp8 = [packed(v, "fp8_e4m3", backend, tile="channel") for v in (x, w)]
    fp4 = [packed(v, "mxfp4", backend) for v in (x, w)]
    plain = [gpu.as_cupy(v, xp) for v in (x, w)]
    times = gpu.milliseconds(
        {
            "torch bf16": gpu.fixed(lambda: [torch_product(a, b) for a, b in parts]),
            "bf16": gpu.fixed(grouped_matmul, *plain, offsets, xp, **BF16),
            "E4M3, scales of rows": gpu.fixed(grouped_matmul, *fp8, offsets, xp, **BF16),
            "MXFP4, from storage": gpu.fixed(grouped_matmul, *fp4, offsets, xp, **BF16),
        },
        rounds,
    )
    size = f"{len(sizes)} groups, {sum(sizes)} x {n} x {k}"
    yield from gpu.rates(times, 2 * sum(sizes) * n * k, what="grouped", size=size)


PARTS = {
    "scaled": scaled,
    "rebased": rebased,
    "operands": operands,
    "fallbacks": fallbacks,
    "requantized": requantized_results,
    "decode": few_rows,
    "weights": many_rows,
    "grouped": grouped,
}


def main() -> None:
    """Measure, print and write."""
    chosen = gpu.options(__doc__, rounds=11, only=list(PARTS)).parse_args()
    backend = gpu.cuda()
    rows: list[dict[str, Any]] = []
    for name in chosen.only:
        with gpu.on_torchs_stream(backend):
            rows += gpu.shown(PARTS[name](backend, chosen.rounds))
    for row in rows:
        row["key"] = f"{row['what']}, {row['size']}, {row['name']}"
    gpu.write_gpu("cuda-products", rows, backend.xp, merge="key")


if __name__ == "__main__":
    main()
