"""The Hopper GEMM against torch's bf16 and FP8 products: TFLOP/s of square matrices.

    python ci/bench/cuda_gemm.py [--sizes 4096 8192] [--rounds N] [--data FILE.npz]
    python ci/bench/cuda_gemm.py --shapes gpt30m

Normal data, or with --data the forward products X W^T that `record_tensors.py` kept of a training
step (the path that MXFP4 took there, and how far the scales of each tensor range); the FP8
contestants multiply its MXFP4 rounding. Results are bfloat16. CUDA events around four calls, the
contestants taking turns in one process, medians over the rounds, up to three inputs in turn.
"mxfp4 storage" is `extensor_cuda.matmul.stored.matmul` whole, from packed codes and scales; it
reads a flag on the host. Needs a Hopper GPU, torch and the extra ``cuda13``.

--shapes gpt30m: x w^T, g w and g^T x of the layers of a GPT of 30 million parameters on 16,384
tokens, in bfloat16, against torch's. Beside them what a training step does around its products:
rounding float32 to bfloat16 and summing a gradient's rows, against torch's; products of MXFP4
operands that were prepared before; and preparing such operands. The bound is that of the H100's
data sheet: 989 TFLOP/s, 3.35 TB/s.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import torch

from ci.bench.gpu import (
    Call,
    as_cupy,
    cuda,
    milliseconds,
    normal,
    on_torchs_stream,
    options,
    write_gpu,
)
from ci.bench.record_tensors import all_spans, load
from extensor.backends.protocol import CastSpec
from extensor.quant.spec import QuantSpec
from extensor_cuda.backend import CudaBackend
from extensor_cuda.kernels.gemm.config import Config
from extensor_cuda.kernels.gemm.gemm_sm90 import Epilogue, Scales, empty_rows, gemm
from extensor_cuda.kernels.nn import sums
from extensor_cuda.matmul.operand import GemmOperand
from extensor_cuda.matmul.partition import configure
from extensor_cuda.matmul.prepare import BF16 as CASTS
from extensor_cuda.matmul.prepare import FUSED
from extensor_cuda.matmul.product import product
from extensor_cuda.matmul.stored import matmul

INPUTS = 3
PROMOTED, UNPROMOTED, BF16 = "E5M2, promoted", "E5M2, not promoted", "bf16"

TOKENS = 16384
GPT30M = {"qkv": (1536, 512), "out": (512, 512), "up": (2048, 512), "down": (512, 2048)}
GPT30M["logits"] = (8192, 512)
"""Rows and columns of the layers' weights."""
FLOPS, BANDWIDTH = 989e12, 3.35e12


def squares(size: int) -> list[list[Any]]:
    """Pairs of square matrices."""
    return [[normal(size, size, seed=2 * i + j) for j in range(2)] for i in range(INPUTS)]


def recorded(path: Path) -> dict[str, list[Any]]:
    """X (M, K), w (N, K) and g (M, N) of each layer in a file of `record_tensors.py`."""
    layers, _ = load(path)
    return {
        name: [torch.from_numpy(kinds[k].view(np.int16)).cuda().view(torch.bfloat16) for k in "xwg"]
        for name, kinds in layers.items()
    }


def contestants(raw: list[list[Any]], backend: CudaBackend) -> dict[str, Call]:
    """Calls that take their number and choose among pairs (M, K) and (N, K) by it."""
    xp, spec = backend.xp, QuantSpec("mxfp4", axis=1)
    (m, _), n = raw[0][0].shape, len(raw[0][1])
    stored, fp8 = [], []
    for pair in raw:
        stored.append([backend.quantize(as_cupy(x, xp), spec.resolve(2))[0] for x in pair])
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

    made: dict[str, Call] = {
        "torch bf16": lambda turn: raw[turn % len(raw)][0] @ raw[turn % len(raw)][1].T,
        "torch FP8, row scales": partial(torch_fp8, fast=True),
        "torch FP8, row scales, promoted": partial(torch_fp8, fast=False),
    }
    for name, kind, promote in ((PROMOTED, "e5m2", 4), (UNPROMOTED, "e5m2", 0), (BF16, "bf16", 0)):
        config = configure(kind, m, n, "bfloat16", promote)
        made[name] = partial(ours, config=config)
    return made | {"mxfp4 storage, promoted": storage}


def of_layer(n: int, k: int, backend: CudaBackend) -> dict[str, tuple[float, dict[str, Call]]]:
    """What a layer of (n, k) weights does in a step: a bound in milliseconds, and contestants."""
    xp = backend.xp
    shapes = {"x": (TOKENS, k), "w": (n, k), "g": (TOKENS, n)}
    theirs = {name: normal(*shape) for name, shape in shapes.items()}
    wide = normal(*shapes["g"], dtype=torch.float32)
    ours = {name: as_cupy(x, xp) for name, x in theirs.items()}
    mine, mine_wide = ours["g"], as_cupy(wide, xp)
    specs = [QuantSpec("mxfp4", axis=axis).resolve(2) for axis in (1, 0)]
    quantized = {
        name: [operand for operand, _ in FUSED.run(x, specs, [None, None], xp, None)]
        for name, x in ours.items()
    }

    def multiplied(turn: int, sides: list[GemmOperand], out: str = "bfloat16") -> Any:
        return product(sides[0], sides[1], out, xp)

    def fp4_operands(turn: int, x: Any, state: dict[str, Any]) -> Any:
        return FUSED.run(x, specs, [None, None], xp, state)

    def torch_sum(turn: int, x: Any) -> Any:
        return x.sum(0)

    def our_sum(turn: int, x: Any) -> Any:
        return sums.column_sums(x, xp)

    products: dict[str, tuple[str, str, tuple[bool, bool], Call]] = {
        "x w^T": ("x", "w", (False, False), lambda turn: theirs["x"] @ theirs["w"].T),
        "g w": ("g", "w", (False, True), lambda turn: theirs["g"] @ theirs["w"]),
        "g^T x": ("g", "x", (True, True), lambda turn: theirs["g"].T @ theirs["x"]),
    }
    made: dict[str, tuple[float, dict[str, Call]]] = {}
    for name, (a, b, lie, call) in products.items():
        sides = [
            GemmOperand(ours[s].view(np.uint16), "bf16", transposed=columnwise)
            for s, columnwise in zip((a, b), lie, strict=True)
        ]
        (rows, terms), columns = sides[0].shape, sides[1].shape[0]
        moved = 2 * (rows * terms + columns * terms + rows * columns)
        bound = 1e3 * max(2 * rows * columns * terms / FLOPS, moved / BANDWIDTH)
        calls = {"torch": call}
        for out in ("bfloat16", "float32"):
            calls[f"ours, {out}"] = partial(multiplied, sides=sides, out=out)
        fp4 = [quantized[s][int(columnwise)] for s, columnwise in zip((a, b), lie, strict=True)]
        calls["ours, mxfp4 made before"] = partial(multiplied, sides=fp4)
        made[name] = bound, calls
    for kind, array, size in (("float32", mine_wide, 4), ("bfloat16", mine, 2)):
        made[f"{kind} g as MXFP4, rows and columns"] = (
            1e3 * (size + 2) * TOKENS * n / BANDWIDTH,
            {"ours": partial(fp4_operands, x=array, state={})},
        )
    count, rowwise = TOKENS * n, [CastSpec("bfloat16", 1)]
    made["g rounded"] = (
        1e3 * 6 * count / BANDWIDTH,
        {
            "torch": lambda turn: wide.to(torch.bfloat16),
            "ours": lambda turn: CASTS.run(mine_wide, rowwise, [None], xp, None),
        },
    )
    for kind, their_g, our_g, size in (
        ("float32", wide, mine_wide, 4),
        ("bfloat16", theirs["g"], mine, 2),
    ):
        calls = {"torch": partial(torch_sum, x=their_g), "ours": partial(our_sum, x=our_g)}
        made[f"rows of {kind} g summed"] = 1e3 * size * count / BANDWIDTH, calls
    return made


def of_shapes(backend: CudaBackend, rounds: int) -> None:
    """Measure, print and write what the layers of the GPT do."""
    rows = []
    for layer, (n, k) in GPT30M.items():
        for what, (bound, calls) in of_layer(n, k, backend).items():
            with on_torchs_stream(backend):
                times = milliseconds(calls, rounds, ahead=6_000_000)  # many small launches
            for name, taken in times.items():
                row = {
                    "layer": layer,
                    "what": what,
                    "name": name,
                    "microseconds": round(1e3 * taken, 2),
                    "of_bound": round(bound / taken, 3),
                    "of_torch": round(times["torch"] / taken, 3) if "torch" in times else None,
                }
                rows.append(row)
                print(*row.values(), sep="  ", flush=True)
    write_gpu("cuda-gemm-gpt30m", rows, backend.xp)


def path_of(pair: list[Any], backend: CudaBackend) -> str:
    """Which path the product of a pair takes from packed MXFP4."""
    spec = QuantSpec("mxfp4", axis=1).resolve(2)
    stored = (backend.quantize(as_cupy(x, backend.xp), spec)[0] for x in pair)
    return backend.path("block_scaled_matmul", *stored)


def main() -> None:
    """Measure, print and write."""
    parser = options(__doc__, rounds=11)
    parser.add_argument("--sizes", type=int, nargs="+", default=[4096, 8192, 16384])
    parser.add_argument("--data", type=Path, help="a file of record_tensors.py")
    parser.add_argument("--shapes", choices=["gpt30m"], help="a model's products instead")
    chosen = parser.parse_args()
    backend = cuda()
    if chosen.shapes is not None:
        of_shapes(backend, chosen.rounds)
        return
    sets: dict[str, Callable[[], list[list[Any]]]] = {
        str(size): partial(squares, size) for size in chosen.sizes
    }
    if chosen.data is not None:
        layers = recorded(chosen.data)
        sets = {name: partial(list, [tensors[:2]]) for name, tensors in layers.items()}
    rows: list[dict[str, Any]] = []
    if chosen.data is not None:
        for row in all_spans(load(chosen.data)[0]):
            rows.append(row)
            print(*row.values(), flush=True)
    for size, make in sets.items():
        pairs = make()
        work = 2 * len(pairs[0][0]) * pairs[0][0].shape[1] * len(pairs[0][1])
        with on_torchs_stream(backend):
            times = milliseconds(contestants(pairs, backend), chosen.rounds)
            path = path_of(pairs[0], backend)
        for name, taken in times.items():
            row = {
                "size": int(size) if size.isdigit() else size,
                "name": name,
                "milliseconds": round(taken, 4),
                "teraflops": round(work / taken / 1e9, 1),
                "of_torch_bf16": round(times["torch bf16"] / taken, 3),
                "mxfp4_path": path,
            }
            rows.append(row)
            print(*row.values(), flush=True)
    write_gpu("cuda-gemm" if chosen.data is None else "cuda-gemm-recorded", rows, backend.xp)


if __name__ == "__main__":
    main()
