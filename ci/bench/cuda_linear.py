"""A linear layer's forward and backward under recipes on a GPU, against torch in bfloat16.

    python ci/bench/cuda_linear.py [--sizes 8192x8192x8192 ...] [--rounds N]
        [--recipes mxfp4 mxfp6 nvfp4_nvidia fp8_block fp8_tensor int8 ...]

x (M, K), w (N, K) and the gradient (M, N) are normal bfloat16 data. torch: F.linear and its
backward, three products. Ours: `et.quantized_matmul` and its backward: six operands quantized from
bfloat16 (under the largest magnitude of the call before, gradients rounded stochastically, values
counted), three products, three bfloat16 results; "captured" replays the same from a CUDA graph.
"products" are ours without quantizing, "quantizers" the rest. CUDA events around four calls, the
contestants taking turns in one process, medians over the rounds, three inputs in turn. Needs a
Hopper GPU, torch and the extra ``cuda13``.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from ci.bench import gpu
from extensor.autograd.tensor import wrap
from extensor.ops.quantized import layer_context, quantized_matmul
from extensor.quant.recipes import get_recipe
from extensor.quant.spec import QuantSpec
from extensor.random import Stream
from extensor_cuda.backend import CudaBackend
from extensor_cuda.matmul import tuned
from extensor_cuda.matmul.prepare import FUSED
from extensor_cuda.matmul.product import product

INPUTS = 3
RECIPES = ["mxfp4", "mxfp8_nvidia", "bf16"]
SIZES = ["8192x8192x8192", "16384x4096x4096", "4096x4096x4096"]


def inputs(m: int, n: int, k: int) -> list[list[Any]]:
    """x, w and g, for each turn."""
    shapes = (m, k), (n, k), (m, n)
    return [[gpu.normal(*s, seed=3 * i + j) for j, s in enumerate(shapes)] for i in range(INPUTS)]


def contestants(
    theirs: list[list[Any]], backend: CudaBackend, recipes: list[str]
) -> dict[str, gpu.Call]:
    """Calls that take their number and choose their input by it."""
    xp = backend.xp
    ours = [[gpu.as_cupy(x, xp) for x in tensors] for tensors in theirs]
    contexts = {name: layer_context(get_recipe(name).layers, seed=1) for name in recipes}
    rows, columns = (
        QuantSpec("mxfp4", axis=axis, scale_rule="rceil").resolve(2) for axis in (1, 0)
    )
    noisy = [spec.replace(rounding="stochastic") for spec in (rows, columns)]
    streams = [Stream(1, 0, 0, 2, False), Stream(1, 0, 0, 4, True)]

    def torch_step(turn: int) -> Any:
        x, w, g = theirs[turn % INPUTS]
        x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
        torch.nn.functional.linear(x, w).backward(g)
        return x.grad, w.grad

    def our_step(turn: int, recipe: str) -> Any:
        x, w, g = (wrap(array, backend) for array in ours[turn % INPUTS])
        x.requires_grad, w.requires_grad = True, True
        quantized_matmul(x, w, contexts[recipe]).backward(g)
        return x.grad, w.grad

    states: list[dict[str, Any]] = [{}, {}, {}]
    nothing = [None, None]

    def quantizers(turn: int) -> Any:
        x, w, g = ours[turn % INPUTS]
        both = [FUSED.run(a, [rows, columns], nothing, xp, states[i]) for i, a in enumerate((x, w))]
        return both, FUSED.run(g, noisy, streams, xp, states[2])

    x, w, g = ours[0]
    made: list[Any] = [
        FUSED.run(a, [s], [None], xp, None)[0][0] for a in (x, w) for s in (rows, columns)
    ]
    pair: list[Any] = [operand for operand, _ in FUSED.run(g, noisy, streams, xp, None)]

    def products(turn: int) -> Any:
        sides = ((made[0], made[2]), (pair[0], made[3]), (pair[1], made[1]))
        return [product(a, b, "bfloat16", xp) for a, b in sides]

    steps: dict[str, gpu.Call] = {"torch bf16": torch_step}
    for name in contexts:
        steps[f"{name} recipe"] = partial(our_step, recipe=name)
        steps[f"{name} recipe, captured"] = captured(steps[f"{name} recipe"], xp)
    return steps | {
        "mxfp4 recipe, products": products,
        "mxfp4 recipe, quantizers": quantizers,
        "rows of x": lambda i: FUSED.run(ours[i % INPUTS][0], [rows], [None], xp, states[0]),
        "columns of x": lambda i: FUSED.run(ours[i % INPUTS][0], [columns], [None], xp, states[0]),
        "rows and columns of x": lambda i: FUSED.run(
            ours[i % INPUTS][0], [rows, columns], nothing, xp, states[0]
        ),
        "the same, nothing known of it": lambda i: FUSED.run(
            ours[i % INPUTS][0], [rows, columns], nothing, xp, None
        ),
        "rows and columns of g": lambda i: FUSED.run(
            ours[i % INPUTS][2], noisy, streams, xp, states[2]
        ),
    }


def captured(call: gpu.Call, xp: Any) -> gpu.Call:
    """The same from CUDA graphs, one for each input, with memory of their own."""
    pool, stream, graphs = xp.cuda.MemoryPool(), xp.cuda.Stream(non_blocking=True), []
    xp.cuda.Device().synchronize()
    with xp.cuda.using_allocator(pool.malloc), stream:
        for turn in range(INPUTS):
            call(turn)
            stream.synchronize()
            stream.begin_capture()
            kept = call(turn)
            graphs.append((stream.end_capture(), kept))
    return lambda turn: graphs[turn % INPUTS][0].launch()


def main() -> None:
    """Measure, print and write."""
    parser = gpu.options(__doc__, rounds=11)
    parser.add_argument("--sizes", nargs="+", default=SIZES)
    parser.add_argument("--recipes", nargs="+", default=RECIPES)
    chosen = parser.parse_args()
    backend = gpu.cuda()
    rows: list[dict[str, Any]] = []
    for size in chosen.sizes:
        before, tensors = backend.fallback_count, inputs(*map(int, size.split("x")))
        with gpu.on_torchs_stream(backend), tuned.always():
            times = gpu.milliseconds(contestants(tensors, backend, chosen.recipes), chosen.rounds)
        about = {"size": size, "products_out_of_window": backend.fallback_count - before}
        rows += gpu.shown(gpu.rates(times, **about))
    gpu.write_gpu("cuda-linear", rows, backend.xp)


if __name__ == "__main__":
    main()
