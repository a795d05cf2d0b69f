"""The Hopper GEMM against torch's bf16 and FP8 products: TFLOP/s of square matrices.

    python ci/bench/cuda_gemm.py [--sizes 4096 8192] [--rounds N]

Normal data; the FP8 contestants multiply its MXFP4 rounding. Results are bfloat16. CUDA events
around four calls, the contestants taking turns in one process, medians over the rounds, three
inputs in turn. "mxfp4 storage" is `extensor_cuda.matmul.stored.matmul` whole, from packed codes and
scales; it reads a flag on the host. Needs a Hopper GPU, torch and the extra ``cuda13``.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import ml_dtypes
import torch

from ci.bench import gpu
from extensor.quant.spec import QuantSpec
from extensor_cuda.backend import CudaBackend
from extensor_cuda.kernels.gemm.config import Config
from extensor_cuda.kernels.gemm.gemm_sm90 import Epilogue, Scales, empty_rows, gemm
from extensor_cuda.matmul.partition import configure
from extensor_cuda.matmul.stored import matmul

INPUTS = 3
PROMOTED, UNPROMOTED, BF16 = "E5M2, promoted", "E5M2, not promoted", "bf16"


def contestants(raw: list[list[Any]], backend: CudaBackend) -> dict[str, gpu.Call]:
    """Calls that take their number and choose among pairs (M, K) and (N, K) by it."""
    xp, spec = backend.xp, QuantSpec("mxfp4", axis=1)
    (m, _), n = raw[0][0].shape, len(raw[0][1])
    stored, fp8 = [], []
    for pair in raw:
        stored.append([backend.quantize(gpu.as_cupy(x, xp), spec.resolve(2))[0] for x in pair])
        values = [torch.utils.dlpack.from_dlpack(backend.dequantize(q)) for q in stored[-1]]
        fp8.append([[v.to(t) for v in values] for t in (torch.float8_e4m3fn, torch.float8_e5m2)])
    ones = torch.ones(m, 1, device="cuda"), torch.ones(1, n, device="cuda")
    out = empty_rows(xp, m, n, ml_dtypes.bfloat16)
    exponent = xp.zeros(1, dtype=xp.int32)

    def torch_fp8(turn: int, fast: bool) -> Any:
        x, y = fp8[turn % len(raw)][0]
        return torch._scaled_mm(x, y.T, *ones, out_dtype=torch.bfloat16, use_fast_accum=fast)

    def ours(turn: int, config: Config) -> None:
        tensors = raw[turn % len(raw)] if config.a == "bf16" else fp8[turn % len(raw)][1]
        plain = torch.int16 if config.a == "bf16" else torch.uint8
        a, b = (xp.from_dlpack(t.view(plain)) for t in tensors)
        pair = (None, None) if config.a == "bf16" else (exponent, exponent)
        gemm(a, b, out, config, Epilogue(Scales(pair)))

    def storage(turn: int) -> Any:
        a, b = stored[turn % len(raw)]
        return matmul(a, b, xp, out_dtype="bfloat16")

    made: dict[str, gpu.Call] = {
        "torch bf16": lambda turn: raw[turn % len(raw)][0] @ raw[turn % len(raw)][1].T,
        "torch FP8, row scales": partial(torch_fp8, fast=True),
        "torch FP8, row scales, promoted": partial(torch_fp8, fast=False),
    }
    for name, kind, promote in ((PROMOTED, "e5m2", 4), (UNPROMOTED, "e5m2", 0), (BF16, "bf16", 0)):
        config = configure(kind, m, n, "bfloat16", promote)
        made[name] = partial(ours, config=config)
    return made | {"mxfp4 storage, promoted": storage}


def path_of(pair: list[Any], backend: CudaBackend) -> str:
    """Which path the product of a pair takes from packed MXFP4."""
    spec = QuantSpec("mxfp4", axis=1).resolve(2)
    stored = (backend.quantize(gpu.as_cupy(x, backend.xp), spec)[0] for x in pair)
    return backend.path("block_scaled_matmul", *stored)


def main() -> None:
    """Measure, print and write."""
    parser = gpu.options(__doc__, rounds=11)
    parser.add_argument("--sizes", type=int, nargs="+", default=[4096, 8192, 16384])
    chosen = parser.parse_args()
    backend = gpu.cuda()
    rows: list[dict[str, Any]] = []
    for size in chosen.sizes:
        pairs = [[gpu.normal(size, size, seed=2 * i + j) for j in range(2)] for i in range(INPUTS)]
        with gpu.on_torchs_stream(backend):
            times = gpu.milliseconds(contestants(pairs, backend), chosen.rounds)
            about = {"size": size, "mxfp4_path": path_of(pairs[0], backend)}
        rows += gpu.shown(gpu.rates(times, 2 * size**3, **about))
    gpu.write_gpu("cuda-gemm", rows, backend.xp)


if __name__ == "__main__":
    main()
