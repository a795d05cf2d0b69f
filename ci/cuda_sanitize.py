"""Run the CUDA kernels under NVIDIA's compute-sanitizer.

    python ci/cuda_sanitize.py                     memcheck, racecheck, initcheck, synccheck
    python ci/cuda_sanitize.py --tool racecheck --part attention --jobs 1

One small case of every kernel variant, whole and ragged, on arrays that fill their allocations
exactly, so that an access beyond the end is one beyond the allocation. The cases are in parts;
each under each tool is a process of its own, some at a time, and kernels are compiled before the
tools start. What a tool says is kept in a file for each, and shown where it found something. Needs
a GPU and the CUDA toolkit.
"""

from __future__ import annotations

import argparse
import itertools
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from extensor import ExTensor
from extensor.autograd.tensor import wrap
from extensor.backends.protocol import AttentionForward, CastSpec, Window
from extensor.backends.registry import get
from extensor.optim import SGD, AdamW, Lion
from extensor.quant.spec import Hadamard, QuantSpec
from extensor.random import Stream
from extensor_cuda.kernels.gemm import gemm_sm90
from extensor_cuda.kernels.quantize import quantize, rowwise_columnwise
from extensor_cuda.kernels.quantize.norm_quantize import Norm, norm_quantize
from extensor_cuda.matmul.grouped import grouped_matmul, offsets_of
from extensor_cuda.matmul.prepare import BF16, EXPANDED, FLOAT_SCALES, FUSED
from extensor_cuda.matmul.stored import matmul
from extensor_cuda.matmul.weight_only import weight_only_matmul

ROOT = Path(__file__).resolve().parent.parent
TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
SHAPES = ((256, 64), (70, 19))
FOUND, LEFT_OUT = 9, 8  # exit codes of a run with findings, and of one that this GPU cannot do
SHOWN = 60  # lines of what a tool said that are printed
STREAM = Stream(1, 2, 3, 4)
Cases = Iterator[None]
"""Yields after each case that ran."""


class Gpu:
    """The backend, and random arrays on its GPU."""

    def __init__(self, backend: Any) -> None:
        self.backend, self.xp, self.rng = backend, backend.xp, np.random.default_rng(0)

    def normal(self, *shape: int, dtype: str = "float32") -> Any:
        """Normal data, rounded from float32."""
        return self.xp.asarray(self.rng.standard_normal(shape).astype("float32")).astype(dtype)

    def quantized(self, x: Any, spec: QuantSpec) -> Any:
        """X, packed."""
        return self.backend.quantize(x, spec.resolve(2))[0]


def stream_of(spec: QuantSpec) -> Stream | None:
    return STREAM if spec.rounding == "stochastic" else None


def both_axes(spec: QuantSpec) -> tuple[QuantSpec, QuantSpec]:
    """Rowwise and columnwise."""
    return spec.replace(axis=1).resolve(2), spec.replace(axis=0).resolve(2)


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
        yield QuantSpec("fp8_e4m3", axis=axis, tile=(1, 128), **stochastic)
        yield QuantSpec("int8", axis=axis, symmetric=False, scale_dtype="float16")
        yield QuantSpec("int4", axis=axis)


def quantizers(gpu: Gpu) -> Cases:
    """Packing a matrix in each format, one direction at a time, and unpacking it."""
    for spec in specs():
        for shape in SHAPES:
            x = gpu.normal(*shape, dtype="bfloat16")
            q, _ = gpu.backend.quantize(x, spec, stream_of(spec))
            gpu.backend.fake_quantize(x, spec, stream_of(spec))
            gpu.backend.dequantize(q)
            yield


def rowwise_columnwise_pairs(gpu: Gpu) -> Cases:
    """Rows and columns in one reading, packed and decoded."""
    stochastic = QuantSpec("mxfp4", rbits=8, rounding="stochastic")
    for spec in (QuantSpec("mxfp4"), stochastic, QuantSpec("nvfp4")):
        both, streams = both_axes(spec), (stream_of(spec),) * 2
        for shape in ((256, 512), (70, 19)):
            for dtype in ("float32", "bfloat16"):
                x = gpu.normal(*shape, dtype=dtype)
                gpu.backend.quantize_rowwise_columnwise(x, both, streams)
                gpu.backend.fake_quantize_rowwise_columnwise(x, both, streams)
                yield


def activations(gpu: Gpu) -> Cases:
    """Activations that are quantized as they are read."""
    for name, shape in (("mxfp4", (64, 2048)), ("mxfp8_e4m3", (37, 1032))):
        both, x = both_axes(QuantSpec(name)), gpu.normal(*shape, dtype="bfloat16")
        plan = rowwise_columnwise.row_column_plan(both, shape, "gelu")
        assert plan, plan
        rowwise_columnwise.quantize_raw(x, plan, (None, None), gpu.xp)
        yield
        for spec in both:
            side = quantize.plan_of(spec, shape, False, "relu")
            assert side, side
            quantize.quantize_raw(x, side, None, gpu.xp)
            yield


def norms(gpu: Gpu) -> Cases:
    """Norms that are quantized as they are made."""
    for name, shape in (("mxfp4", (64, 2048)), ("mxfp8_e4m3", (37, 1032))):
        x, weight = gpu.normal(*shape), gpu.xp.ones(shape[1], dtype="float32")
        plan = rowwise_columnwise.row_column_plan(both_axes(QuantSpec(name)), shape)
        assert plan, plan
        for centred, only_rows in ((False, True), (True, False)):
            given = Norm(weight, weight if centred else None, centred=centred)
            for a in (x, x.astype("bfloat16")):
                norm_quantize(a, given, plan, gpu.xp, only_rows=only_rows)
                yield


def multiplied(gpu: Gpu, made: Any, dtype: str = "float32") -> None:
    """Products of prepared operands with themselves, and their counts."""
    for operand, counts in made:
        gpu.backend.product(operand, operand, dtype)
        if counts is not None:
            counts()


def products(gpu: Gpu) -> Cases:
    """Operands of training's products, and these, in and out of FP8's window."""
    xp = gpu.xp
    formats = [QuantSpec("mxfp4"), QuantSpec("mxfp4", rounding="stochastic")]
    formats += [QuantSpec("mxfp8_e4m3"), QuantSpec("mxfp8_e4m3", scale_rule="rceil", rebased=True)]
    for spec, shape, dtype, power in itertools.product(
        formats, ((256, 256), (72, 200)), ("float32", "bfloat16"), (0, -40)
    ):
        x = gpu.normal(*shape)
        x[3] *= 2.0**power
        streams = [stream_of(spec)] * 2
        multiplied(gpu, FUSED.run(x.astype(dtype), both_axes(spec), streams, xp, None), dtype)
        yield
    casts = [CastSpec("bfloat16", i) for i in (0, 1)]
    for shape in ((72, 203), (203, 72), (4096, 72)):
        # A product and its transpose; 4096 terms are added in parts.
        for side, _ in BF16.run(gpu.normal(*shape), casts, [None] * 2, xp, None):
            for dtype in ("float32", "bfloat16"):
                gpu.backend.product(side, side, dtype, xp.ones(side.shape[0], dtype="float32"))
                yield
    for rows, columns, depth in ((128, 256, 512), (192, 200, 288)):
        a, b = (gpu.quantized(gpu.normal(n, depth), QuantSpec("mxfp4")) for n in (rows, columns))
        gpu.backend.block_scaled_matmul(a, b)
        yield


FLOATS = (
    QuantSpec("fp8_e4m3"),
    QuantSpec("fp8_e4m3", tile=(1, 128)),
    QuantSpec("int8", rounding="stochastic"),
    QuantSpec("fp8_e4m3", tile=(128, 128)),
)
WEIGHTS = (
    QuantSpec("mxfp4", axis=1),
    QuantSpec("nvfp4", axis=1),
    QuantSpec("int4", axis=1, symmetric=False),
    QuantSpec("int4", axis=1, symmetric=False, tile=(1, 64)),
    QuantSpec("int4", axis=1, symmetric=False, tile="channel"),
    QuantSpec("int8", axis=1, symmetric=False, tile="channel"),
)


def stored_products(gpu: Gpu) -> Cases:
    """Products under float scales, of expanded operands, of packed weights, and of groups."""
    backend, xp = gpu.backend, gpu.xp
    for shape in ((256, 256), (70, 203)):
        x = gpu.normal(*shape)
        for axis in (0, 1):
            for spec in FLOATS:
                resolved = spec.replace(axis=axis).resolve(2)
                multiplied(gpu, FLOAT_SCALES.run(x, [resolved], [stream_of(spec)], xp, None))
                yield
            for name in ("mxfp6_e2m3", "nvfp4", "nvfp4_fp8exact", "mxint8"):
                plan = EXPANDED.supports(x, QuantSpec(name, axis=axis).resolve(2))
                multiplied(gpu, EXPANDED.run(x, [plan], [None], xp, None), "bfloat16")
                yield
        mxfp8 = gpu.quantized(x, QuantSpec("mxfp8_e4m3", axis=1))
        matmul(mxfp8, mxfp8, xp, accumulate="rebased")
        yield
        for spec in WEIGHTS:
            w = gpu.quantized(x, spec)
            for tokens, dtype in (
                (1, "float32"), (20, "float32"), (60, "bfloat16"), (80, "float32"),
            ):  # fmt: skip
                ones = xp.ones((tokens, shape[1]), dtype="float32").astype(dtype)
                weight_only_matmul(ones, w, dtype, xp)
                yield
        zeros = gpu.quantized(x, QuantSpec("int8", axis=1, symmetric=False))
        backend.block_scaled_matmul(zeros, zeros)
        yield
        half_scales = QuantSpec("fp8_e4m3", axis=1, tile=(1, 128), scale_dtype="float16")
        fp8 = gpu.quantized(x, half_scales)
        matmul(fp8, fp8, xp)
        yield
        mxfp4, half = gpu.quantized(x, QuantSpec("mxfp4", axis=1)), shape[0] // 2
        offsets = offsets_of(xp.asarray([half - 5, shape[0] - half + 5]), xp)
        grouped_matmul(mxfp4, mxfp4, offsets, xp)
        yield
        for name in ("mxfp8_e4m3", "mxfp4"):
            matmul(mxfp4, mxfp4, xp, out_dtype=QuantSpec(name, axis=1))
            yield
    x = gpu.normal(4300, 640)  # several tiles a block
    for spec in WEIGHTS[:2]:
        w = gpu.quantized(x, spec)
        for tokens, dtype in ((1, "bfloat16"), (3, "bfloat16"), (5, "float32"), (40, "bfloat16")):
            weight_only_matmul(x[:tokens].astype(dtype), w, dtype, xp)
            yield


def training(gpu: Gpu) -> Cases:
    """Losses, norms, and optimizers' steps on arrays that vectors fit and do not fit."""
    backend, xp = gpu.backend, gpu.xp
    for rows, length in ((33, 70), (5, 4096)):
        x, g = gpu.normal(rows, length), gpu.normal(rows, length)
        labels = xp.arange(rows)
        _, kept = backend.cross_entropy(x, labels, 0.1)
        backend.cross_entropy_grad(x[:, :1], x, labels, kept, 0.1)
        backend.label_ranks(x, labels)
        backend.gated_silu_grad(g, x, backend.gated_silu(x, g, 1.7, 0.5), 1.0, None)
        y, mean, rstd = backend.layer_norm(x, x[0], x[1], 1e-5)
        backend.layer_norm_grad(g, x, x[0], mean, rstd)
        y, rstd = backend.rms_norm(y, x[0], 1e-5)
        backend.rms_norm_grad(g, x, x[0], rstd)
        yield
    parts = [tuple(xp.ones(n, dtype="float32") for _ in range(4)) for n in (0, 3, 40_001)]
    grads = [part[1] for part in parts]
    names = ("take1", "keep2", "take2", "widen", "eps", "lr", "correct", "shrink", "decay")
    backend.all_finite_multi_tensor(grads)
    backend.adam_multi_tensor(parts, [dict.fromkeys(names, 0.5)] * 3, check_finite=True)
    narrow_states(backend)
    yield
    images, window = gpu.normal(2, 3, 9, 11), Window((3, 2))
    best, index = backend.max_pool2d(images, window)
    backend.max_pool2d_grad(best, index, images.shape, window)
    backend.bfloat16_values(backend.relu_grad(best, best))
    kernel = xp.ones((4, 3, 3, 2), dtype="float32")
    y = backend.conv2d(images, kernel, window, 1)
    backend.conv2d_grad_x(y, kernel, images.shape, window, 1)
    yield
    for n in (70, 1100):
        q, k = gpu.normal(1, 2, 5, n), gpu.normal(1, 2, 5, n)
        p, phi = backend.softmax(q, 3), backend.gelu(q)[1]
        backend.softmax_grad(k, p, 3)
        backend.gelu_grad(k, q, phi)
        out, stats = backend.attention(q, k, k, True, 0.1)
        forward = AttentionForward(q, k, k, out, stats, True, 0.1)
        backend.attention_grad(q, forward, (q.copy(), k.copy(), k.copy()))
        yield
    backend.scale_multi_tensor(grads, 0.5)
    backend.square_sum_multi_tensor(grads)
    table, rows = (xp.ones((n, 70), dtype="float32") for n in (9, 300))
    backend.add_rows(table, xp.arange(300) % 7, rows)
    factors = {"lr": 0.1, "momentum": 0.9, "decay": 0.0, "nesterov": 1.0}
    backend.sgd_multi_tensor([part[:3] for part in parts], [factors] * 3)
    yield


def narrow_states(backend: Any) -> None:
    """Optimizers' steps whose weights and states are decoded and rounded by the same launch."""
    rules: Any = ((AdamW, {}), (Lion, {}), (SGD, {"momentum": 0.9}), (SGD, {}))
    for states, dtype in product(backend.multi_tensor_states, ("float32", "bfloat16")):
        for kind, options in rules:
            ones = [backend.xp.ones(n, dtype="float32") for n in (3, 768, 40_001, 70)]
            held = [ExTensor(a, device="cuda").astype(dtype).data for a in ones]
            held[-1] = held[-1][1:]  # vectors do not fit
            params = [wrap(a, backend) for a in held]
            for p in params:
                p.requires_grad = True
                p.grad = p.detach() * 0.5
            step = kind(params, lr=0.1, states=states, masters=False, **options)
            step.step()
            step.step()


def bfloat16_layers(gpu: Gpu) -> Cases:
    """What reads or writes bfloat16 between layers, vectors that fit and that do not."""
    backend, xp = gpu.backend, gpu.xp
    for shape in ((33, 70), (5, 4096), (130, 7)):
        x, g = gpu.normal(*shape), gpu.normal(*shape)
        xh, gh = x.astype("bfloat16"), g.astype("bfloat16")
        labels = xp.arange(shape[0]) % shape[1]
        _, kept = backend.cross_entropy(xh, labels, 0.1)
        backend.cross_entropy_grad(x[:, :1], xh, labels, kept, 0.1)
        backend.label_ranks(xh, labels)
        backend.gated_silu_grad(gh, xh, backend.gated_silu(xh, gh, 1.7, 0.5), 1.0, None)
        mean, rstd = backend.layer_norm(x, x[0], g[0], 1e-5, narrow=True)[1:]
        backend.layer_norm_grad(gh, x, x[0], mean, rstd)
        rstd = backend.rms_norm(x, x[0], 1e-5, narrow=True)[1]
        backend.rms_norm_grad(gh, x, x[0], rstd)
        for a, b in ((x, gh), (xh, gh), (x, g)):
            backend.add(a, b)
            backend.leading_sum(a, 1)
            backend.relu_grad(b, backend.relu(a))
            backend.gelu_grad(b, a, backend.gelu(a)[1])
            backend.softmax_grad(b, backend.softmax(a, 1), 1)
        backend.cast(x, xh.dtype)
        backend.cast(xh, x.dtype)
        yield


def attention(gpu: Gpu) -> Cases:
    """Attention on tensor cores, of views that lie side by side."""
    backend, xp = gpu.backend, gpu.xp
    for d, (heads, shared), (queries, keys), causal in (
        (64, (2, 1), (130, 130), True),
        (64, (1, 1), (40, 200), False),
        (128, (4, 2), (70, 70), True),
        (128, (1, 1), (5, 131), False),
    ):
        lengths = (queries, keys, keys)
        held = [
            gpu.normal(2, n, h * d, dtype="bfloat16")
            for n, h in zip(lengths, (heads, shared, shared), strict=True)
        ]
        q, k, v = (a.reshape(2, a.shape[1], -1, d).swapaxes(1, 2) for a in held)
        out, stats = backend.attention(q, k, v, causal, d**-0.5)
        into = tuple(xp.empty_like(a.swapaxes(1, 2)).swapaxes(1, 2) for a in (q, k, v))
        forward = AttentionForward(q, k, v, out, stats, causal, d**-0.5)
        backend.attention_grad(out, forward, into)
        yield


_CASES = [quantizers, rowwise_columnwise_pairs, activations, norms, products, stored_products]
_CASES += [training, bfloat16_layers, attention]
PARTS = {part.__name__: part for part in _CASES}
HOPPER = ("norms", "products", "stored_products", "attention")


def zero_results() -> None:
    """Clear products' results first: initcheck does not see what bulk copies write.

    That every result is written is tested elsewhere, on memory full of NaN.
    """
    empty = gemm_sm90.empty_rows

    def cleared(xp: Any, rows: int, columns: int, dtype: Any) -> Any:
        made = empty(xp, rows, columns, dtype)
        if made.dtype.name in ("float32", "bfloat16"):
            (made if made.base is None else made.base).fill(0)
        return made

    for module in list(sys.modules.values()):
        if getattr(module, "empty_rows", None) is empty:
            vars(module)["empty_rows"] = cleared


def inner(part: str, tool: str | None) -> int:
    """The run that the sanitizer watches, and its exit code."""
    backend = get("cuda")
    if part in HOPPER and backend.xp.cuda.Device().compute_capability != "90":
        return LEFT_OUT
    if tool == "initcheck":
        zero_results()
    backend.xp.cuda.set_allocator(None)  # every array an allocation of its own
    count = sum(1 for _ in PARTS[part](Gpu(backend)))
    backend.xp.cuda.runtime.deviceSynchronize()
    print(f"{count} cases run")
    return 0


def run(part: str, tool: str | None, folder: Path) -> tuple[str, bool, Path]:
    """One part, alone or under a tool: what came of it, whether it was clean, and what was said."""
    command = [sys.executable, str(Path(__file__)), "--inner", part]
    if tool:
        # Libraries ask the driver for functions that it may not have; that is no error.
        options = ["--report-api-errors", "no"] if tool == "memcheck" else []
        watched = ["compute-sanitizer", "--tool", tool, "--error-exitcode", str(FOUND)]
        command = [*watched, *options, *command, "--tool", tool]
    start, log = time.perf_counter(), folder / f"{tool or 'compile'}-{part}.txt"
    with log.open("w") as out:
        done = subprocess.run(command, cwd=ROOT, check=False, stdout=out, stderr=out)
    words = {0: "clean", LEFT_OUT: "left out: needs compute capability 90"}
    said = words.get(done.returncode, f"exit {done.returncode}")
    text = f"{tool or 'compiled'} {part}: {said}, {time.perf_counter() - start:.0f} s"
    return text, done.returncode in words, log


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tools asked for; 0 if none found anything."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--tool", action="append", choices=TOOLS, help="may be repeated")
    parser.add_argument("--part", action="append", choices=PARTS, help="may be repeated")
    parser.add_argument("--jobs", type=int, default=4, help="processes at a time")
    parser.add_argument("--logs", type=Path, help="folder for what the tools say")
    parser.add_argument("--inner", choices=PARTS, help=argparse.SUPPRESS)
    chosen = parser.parse_args(argv)
    if chosen.inner:
        return inner(chosen.inner, next(iter(chosen.tool or ()), None))
    if shutil.which("compute-sanitizer") is None:
        parser.error("compute-sanitizer is not on the PATH; it comes with the CUDA toolkit")
    folder = chosen.logs or Path(tempfile.mkdtemp(prefix="sanitize-"))
    folder.mkdir(parents=True, exist_ok=True)
    parts, clean = chosen.part or list(PARTS), True
    works: list[list[tuple[str, str | None]]]
    works = [[(part, None) for part in parts]]  # fills the caches of compiled kernels
    works.append([(part, tool) for tool in chosen.tool or TOOLS for part in parts])
    with ThreadPoolExecutor(chosen.jobs) as pool:
        for work in works:
            waiting = [pool.submit(run, part, tool, folder) for part, tool in work]
            for one in as_completed(waiting):
                text, good, log = one.result()
                print(text, flush=True)
                if not good:
                    print("\n".join(log.read_text().splitlines()[:SHOWN]), flush=True)
                    clean = False
            if not clean:
                break
    print(f"what was said lies in {folder}")
    return 0 if clean else 1


if __name__ == "__main__":
    sys.exit(main())
