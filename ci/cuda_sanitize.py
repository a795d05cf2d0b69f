"""Run the CUDA kernels under NVIDIA's compute-sanitizer.

    python ci/cuda_sanitize.py                     memcheck, racecheck, initcheck, synccheck
    python ci/cuda_sanitize.py --tool racecheck

One small case of every kernel variant, whole and ragged, on arrays that fill their allocations
exactly, so that an access beyond the end is one beyond the allocation. Kernels are compiled before
the tool starts. Needs a GPU and the CUDA toolkit.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from extensor.quant.spec import Hadamard, QuantSpec

ROOT = Path(__file__).resolve().parent.parent
TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
SHAPES = ((256, 64), (70, 19))
FOUND = 9  # exit code of a run with findings


def specs() -> Iterator[QuantSpec]:
    """What takes each kernel's different paths."""
    stochastic: dict[str, Any] = {"rounding": "stochastic", "rbits": 8}
    for axis in (-1, 0):
        for name in ("mxfp4", "mxfp6_e2m3", "mxfp8_e4m3", "nvfp4"):
            yield QuantSpec(name, axis=axis)
        yield QuantSpec("mxfp4", axis=axis, **stochastic)
        yield QuantSpec("nvfp4", axis=axis, transform=Hadamard(64), **stochastic)
        yield QuantSpec("mxfp4", axis=axis, tile=(32, 32))
        yield QuantSpec("nvfp4", axis=axis, tile=(16, 16), scale_rule="four_over_six")
        yield QuantSpec("nvfp4_fp8exact", axis=axis)


def inner() -> None:
    """The run that the sanitizer watches."""
    import ml_dtypes
    import numpy as np

    from extensor.backends.registry import get
    from extensor.random import Stream

    backend = get("cuda")
    backend.xp.cuda.set_allocator(None)  # every array an allocation of its own
    rng = np.random.default_rng(0)
    count = 0
    for spec in specs():
        stream = Stream(1, 2, 3, 4) if spec.rounding == "stochastic" else None
        for shape in SHAPES:
            x = backend.xp.asarray(rng.standard_normal(shape).astype(ml_dtypes.bfloat16))
            q, _ = backend.quantize(x, spec, stream)
            backend.operand(x, spec, stream)
            backend.dequantize(q)
            count += 1
    count += pairs(backend, rng) + training(backend, rng) + products(backend, rng)
    count += stored_products(backend, rng)
    for rows, columns, depth in ((128, 256, 512), (192, 200, 288)):
        a, b = (
            backend.xp.asarray(rng.standard_normal((n, depth)).astype("float32"))
            for n in (rows, columns)
        )
        qa, _ = backend.quantize(a, QuantSpec("mxfp4"), None)
        qb, _ = backend.quantize(b, QuantSpec("mxfp4"), None)
        backend.block_matmul(qa, qb)
        count += 1
    backend.xp.cuda.runtime.deviceSynchronize()
    print(f"{count} cases run")


def pairs(backend: Any, rng: Any) -> int:
    """Rows and columns in one reading, packed and decoded."""
    from extensor.random import Stream

    count = 0
    for name, rounding in (("mxfp4", "nearest_even"), ("mxfp4", "stochastic"), ("nvfp4", "")):
        along = QuantSpec(name, axis=1, rbits=8)
        along = along.replace(rounding=rounding or "nearest_even")
        specs, stream = (along, along.replace(axis=0)), Stream(1, 2, 3, 4)
        streams = (stream, stream) if rounding == "stochastic" else (None, None)
        for shape in ((256, 512), (70, 19)):
            for dtype in ("float32", "bfloat16"):
                x = backend.xp.asarray(rng.standard_normal(shape).astype("float32")).astype(dtype)
                backend.quantize_pair(x, specs, streams)
                backend.operand_pair(x, specs, streams)
                count += 1
    return count


def products(backend: Any, rng: Any) -> int:
    """Operands of training's products, and these, in and out of FP8's window; Hopper only."""
    from extensor.random import Stream
    from extensor_cuda import dense, operands

    xp, count = backend.xp, 0
    if xp.cuda.Device().compute_capability != "90":
        return 0
    for name, rounding in (("mxfp4", "nearest_even"), ("mxfp4", "stochastic"), ("mxfp8_e4m3", "")):
        spec = QuantSpec(name, axis=1).replace(rounding=rounding or "nearest_even").resolve(2)
        specs, stream = [spec, spec.replace(axis=0)], Stream(1, 2, 3, 4)
        streams = [stream if rounding == "stochastic" else None] * 2
        for shape in ((256, 256), (72, 200)):
            for dtype in ("float32", "bfloat16"):
                for power in (0, -40):
                    x = rng.standard_normal(shape).astype("float32")
                    x[3] *= 2.0**power
                    made = operands.make(xp.asarray(x).astype(dtype), specs, streams, xp)
                    for operand, counts in made:
                        backend.operand_product(operand, operand, dtype)
                        counts()
                    count += 1
    for shape in ((72, 203), (203, 72), (4096, 72)):
        sides = dense.make(xp.asarray(rng.standard_normal(shape).astype("float32")), (0, 1), xp)
        for side in sides:  # a product and its mirror; 4096 terms are added in parts
            dense.multiply(side, side, "float32", xp)
            count += 1
    return count


def stored_products(backend: Any, rng: Any) -> int:
    """Every other way of a product: scales of floats, expanded operands, packed weights, groups."""
    from extensor.random import Stream
    from extensor_cuda import expanded, grouped, scaled, scaling, weights

    xp, count = backend.xp, 0
    if xp.cuda.Device().compute_capability != "90":
        return 0
    stochastic = QuantSpec("int8", rounding="stochastic")
    floats = [QuantSpec("fp8_e4m3"), QuantSpec("fp8_e4m3", tile=(1, 128)), stochastic]
    for shape in ((256, 256), (70, 203)):
        x = xp.asarray(rng.standard_normal(shape).astype("float32"))
        for axis in (0, 1):
            for spec in (*floats, QuantSpec("fp8_e4m3", tile=(128, 128))):
                stream = Stream(1, 2, 3, 4) if spec.rounding == "stochastic" else None
                ((side, counts),) = scaling.make(
                    x, [spec.replace(axis=axis).resolve(2)], [stream], xp
                )
                scaled.multiply(side, side, "float32", xp)
                counts()
                count += 1
            for name in ("mxfp6_e2m3", "nvfp4", "nvfp4_fp8exact", "mxint8"):
                spec = QuantSpec(name, axis=axis).resolve(2)
                ((operand, counts),) = expanded.make(x, [spec], [None], xp)
                expanded.multiply(operand, operand, "bfloat16", xp)
                counts()
                count += 1
        for spec in (QuantSpec("mxfp4"), QuantSpec("nvfp4"), QuantSpec("int4", symmetric=False)):
            w, _ = backend.quantize(x, spec.replace(axis=1).resolve(2))
            for rows, dtype in ((1, "float32"), (20, "float32"), (60, "bfloat16")):
                weights.product(
                    xp.ones((rows, shape[1]), dtype="float32").astype(dtype), w, dtype, xp
                )
                count += 1
        zeros, _ = backend.quantize(x, QuantSpec("int8", axis=1, symmetric=False).resolve(2))
        backend.block_matmul(zeros, zeros)
        rows, _ = backend.quantize(x, QuantSpec("mxfp4", axis=1).resolve(2))
        half = shape[0] // 2
        offsets = grouped.offsets_of(xp.asarray([half - 5, shape[0] - half + 5]), xp)
        grouped.matmul(rows, rows, offsets, xp)
        count += 2
    return count


def training(backend: Any, rng: Any) -> int:
    """Losses, norms, and optimizers' steps on arrays that vectors fit and do not fit."""
    from extensor.backends.protocol import Window

    xp = backend.xp
    for rows, length in ((33, 70), (5, 4096)):
        x, g = (xp.asarray(rng.standard_normal((rows, length)).astype("float32")) for _ in "xg")
        labels = xp.arange(rows)
        _, kept = backend.cross_entropy(x, labels, 0.1)
        backend.cross_entropy_grad(x[:, :1], x, labels, kept, 0.1)
        y, mean, rstd = backend.layer_norm(x, x[0], x[1], 1e-5)
        backend.layer_norm_grad(g, x, x[0], mean, rstd)
        y, rstd = backend.rms_norm(y, x[0], 1e-5)
        backend.rms_norm_grad(g, x, x[0], rstd)
    parts = [tuple(xp.ones(n, dtype="float32") for _ in range(4)) for n in (0, 3, 40_001)]
    names = ("take1", "keep2", "take2", "widen", "eps", "lr", "correct", "shrink", "decay")
    found = backend.finite_each([part[1] for part in parts])
    backend.adam_each(parts, [dict.fromkeys(names, 0.5)] * 3, found.bad)
    images, window = (
        xp.asarray(rng.standard_normal((2, 3, 9, 11)).astype("float32")),
        Window((3, 2)),
    )
    best, index = backend.max_pool2d(images, window)
    backend.max_pool2d_grad(best, index, images.shape, window)
    backend.bfloat16_values(backend.relu_grad(best, best))
    kernel = xp.ones((4, 3, 3, 2), dtype="float32")
    backend.conv2d_grad_x(
        backend.conv2d(images, kernel, window, 1), kernel, images.shape, window, 1
    )
    for n in (70, 1100):
        q, k = (xp.asarray(rng.standard_normal((1, 2, 5, n)).astype("float32")) for _ in "qk")
        p, phi = backend.softmax(q, 3), backend.gelu(q)[1]
        backend.softmax_grad(k, p, 3)
        backend.gelu_grad(k, q, phi)
        out, stats = backend.attention(q, k, k, True, 0.1)
        backend.attention_grad(q, q, k, k, out, stats, True, 0.1, (q.copy(), k.copy(), k.copy()))
    backend.scale_each([part[1] for part in parts], 0.5)
    backend.square_sum_each([part[1] for part in parts])
    table, rows = (xp.ones((n, 70), dtype="float32") for n in (9, 300))
    backend.add_rows(table, xp.arange(300) % 7, rows)
    factors = {"lr": 0.1, "momentum": 0.9, "decay": 0.0, "nesterov": 1.0}
    backend.sgd_each([part[:3] for part in parts], [factors] * 3)
    return 5


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tools asked for; 0 if none found anything."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--tool", action="append", choices=TOOLS, help="may be repeated")
    parser.add_argument("--inner", action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args(argv)
    if chosen.inner:
        inner()
        return 0
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        parser.error("compute-sanitizer is not on the PATH; it comes with the CUDA toolkit")
    inside = [sys.executable, str(Path(__file__)), "--inner"]
    subprocess.run(inside, cwd=ROOT, check=True)  # fills the caches of compiled kernels
    failed = []
    for tool in chosen.tool or TOOLS:
        command = [sanitizer, "--tool", tool, "--error-exitcode", str(FOUND)]
        # Libraries ask the driver for functions that it may not have; that is no error.
        command += ["--report-api-errors", "no"] if tool == "memcheck" else []
        start = time.perf_counter()
        done = subprocess.run([*command, *inside], cwd=ROOT, check=False)
        found = "clean" if done.returncode == 0 else f"exit {done.returncode}"
        print(f"{tool}: {found}, {time.perf_counter() - start:.0f} s", flush=True)
        if done.returncode:
            failed.append(tool)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
