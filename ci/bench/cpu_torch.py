"""Layers of `extensor.torch` on the CPU, against torch in float32 and torchao's MX tensors.

    python ci/bench/cpu_torch.py [--only quantize linear inference models overhead] [--rounds N]

"quantize" packs 2048 x 2048 values of either dtype: `to_blocked` beside torchao's tensors, eager.
"linear" is a linear layer's forward and backward, 512 rows of 1024 to 1024: MXFP8 beside torchao's
`MXFP8Linear` in its emulated mode, which is the one for CPUs. "inference" is the forward pass alone
of a bfloat16 layer of that size whose weight stays quantized, beside torchao's inference tensors,
emulated, too; its NVFP4 on a CPU quantizes the weight alone. "models" are training steps of
ResNet-18 (32 images of 32 x 32) and of a small GPT (4 x 128 tokens, width 384, 6 layers) with
AdamW, their layers torch's in float32 or under a recipe. "overhead" is a call of a layer of 32 x 32
on 32 rows, forward and backward, beside a custom operator that only makes its result; without its
primitives a layer computes nothing, so that the bridge between torch and extensor is left.

Every contestant is a process of its own; they take turns; medians. Needs the extras ``bench`` and,
for torchao's rows, ``peers``.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from itertools import product
from typing import Any

from ci.bench import contest
from extensor.config import num_threads

PARTS = ("quantize", "linear", "inference", "models", "overhead")
FORMATS = ("mxfp8_e4m3", "mxfp4", "nvfp4")
DTYPES = ("float32", "bfloat16")
RECIPES = ("mxfp4", "mxfp8_nvidia")
INFERENCE = {"mxfp8_e4m3": "mxfp8_nvidia", "mxfp4": "mxfp4_nearest", "nvfp4": "nvfp4_forward"}
"""The recipe whose forward pass has a format."""
PEER = "torchao eager"
Work = Callable[[], None]


def _torch() -> Any:
    import torch

    torch.set_num_threads(num_threads())
    torch.manual_seed(0)
    return torch


# --- quantize -------------------------------------------------------------------------------------


def pack(name: str, dtype: str) -> Work:
    torch = _torch()
    import extensor.torch as ext

    x = torch.randn(2048, 2048).to(getattr(torch, dtype))

    def work() -> None:
        ext.to_blocked(x, name)

    return work


def pack_torchao(name: str, dtype: str) -> Work:
    torch = _torch()
    from torchao.prototype.mx_formats.mx_tensor import MXTensor
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale

    x = torch.randn(2048, 2048).to(getattr(torch, dtype))
    if name == "nvfp4":

        def work() -> None:
            NVFP4Tensor.to_nvfp4(x, per_tensor_scale=per_tensor_amax_to_scale(x.abs().amax()))
    else:
        element = _element(name)

        def work() -> None:
            MXTensor.to_mx(x, element, 32)

    return work


def _element(name: str) -> Any:
    import torch

    return torch.float8_e4m3fn if "8" in name else torch.float4_e2m1fn_x2


# --- linear ---------------------------------------------------------------------------------------


def linear(kind: str) -> Work:
    torch = _torch()
    layer = torch.nn.Linear(1024, 1024, bias=False)
    if kind == PEER:
        from torchao.prototype.moe_training.mxfp8_linear import KernelPreference, MXFP8Linear

        plain, layer = (
            layer,
            MXFP8Linear(1024, 1024, bias=False, kernel_preference=KernelPreference.EMULATED),
        )
        layer.load_state_dict(plain.state_dict())
    elif kind != "float32":
        import extensor.torch as ext

        ext.quantize_(layer, kind, rules={"*": kind})
    dtype = torch.bfloat16 if kind == PEER else torch.float32
    layer = layer.to(dtype)
    x, g = torch.randn(512, 1024).to(dtype).requires_grad_(), torch.randn(512, 1024).to(dtype)

    def work() -> None:
        layer.weight.grad = x.grad = None
        layer(x).backward(g)

    return work


def forward(name: str, recipe: str) -> Work:
    """A layer of bfloat16 whose forward pass has a format; no recipe: torchao's."""
    torch = _torch()
    layer = torch.nn.Sequential(torch.nn.Linear(1024, 1024, bias=False)).to(torch.bfloat16)
    if recipe:
        import extensor.torch as ext

        ext.quantize_(layer, recipe, rules={"*": recipe})
    else:
        from torchao.prototype.mx_formats import inference_workflow as torchao
        from torchao.quantization import quantize_
        from torchao.quantization.quantize_.common import KernelPreference

        formats = {"activation_dtype": _element(name), "weight_dtype": _element(name)}
        config: Any = torchao.NVFP4WeightOnlyConfig()
        if name != "nvfp4":
            emulated = KernelPreference.EMULATED
            config = torchao.MXDynamicActivationMXWeightConfig(
                **formats, kernel_preference=emulated
            )
        quantize_(layer, config)
    x = torch.randn(512, 1024).to(torch.bfloat16)

    def work() -> None:
        with torch.no_grad():
            layer(x)

    return work


# --- models ---------------------------------------------------------------------------------------


def model_step(name: str, kind: str) -> Work:
    torch = _torch()
    from ci.bench.torch_models import torch_gpt, torch_resnet

    if name == "resnet18":
        model: Any = torch_resnet()
        x, labels = torch.randn(32, 3, 32, 32), torch.randint(0, 10, (32,))
    else:
        import numpy as np

        from extensor import models
        from extensor.models.gpt.configs import GPTConfig

        shape = GPTConfig(vocab=96, context=128, layers=6, width=384, heads=6)
        ours = models.build("gpt", shape, np.random.default_rng(0))
        model = torch_gpt(shape, ours.state_dict())
        x = torch.randint(0, 96, (4, 128))
        labels = x.reshape(-1)
    if kind != "float32":
        import extensor.torch as ext

        ext.quantize_(model, kind, seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)

    def work() -> None:
        optimizer.zero_grad()
        scores = model(x)
        torch.nn.functional.cross_entropy(scores.reshape(-1, scores.shape[-1]), labels).backward()
        optimizer.step()

    return work


# --- overhead -------------------------------------------------------------------------------------


def call(kind: str) -> Work:
    torch = _torch()
    x = torch.randn(32, 32, requires_grad=True)
    g, weight = torch.randn(32, 32), torch.randn(32, 32, requires_grad=True)
    if kind == "a custom operator":
        library, ops = torch.library, torch.ops.extensor_bench
        library.define("extensor_bench::linear", "(Tensor x, Tensor w) -> Tensor")
        library.define("extensor_bench::backward", "(Tensor g, Tensor x, Tensor w) -> Tensor[]")
        library.impl("extensor_bench::linear", "cpu")(lambda x, w: torch.empty_like(x))
        library.impl("extensor_bench::backward", "cpu")(
            lambda g, x, w: [torch.empty_like(x), torch.empty_like(w)]
        )
        library.register_autograd(
            "extensor_bench::linear",
            lambda ctx, g: tuple(ops.backward(g, *ctx.saved_tensors)),
            setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
        )
        plain = ops.linear
        return lambda: plain(x, weight).backward(g)
    if kind.startswith("extensor.torch"):
        import extensor.torch as ext

        if "primitives" in kind:  # what is left is the bridge
            _without_primitives(torch)
        layer = ext.quantize_(torch.nn.Linear(32, 32, bias=False), "mxfp4_all")
        return lambda: layer(x).backward(g)
    from extensor import ExTensor, nn

    own = nn.Linear(32, 32, bias=False)
    nn.apply_recipe(own, "mxfp4_all")
    mine = ExTensor(x.detach().numpy(), requires_grad=True)
    gradient = ExTensor(g.numpy())
    return lambda: own(mine).backward(gradient)


def _without_primitives(torch: Any) -> None:
    """Let the kernels of `extensor.torch` compute nothing."""
    import types

    import numpy as np

    from extensor.torch import products

    nothing: Any = types.SimpleNamespace(
        forward=lambda backend, x, *a, **k: (np.empty_like(x), None)
    )
    products._LINEAR = nothing

    def gradients(backend: Any, g: Any, out: None, given: Any, needs: Any, *rest: Any) -> Any:
        return [*(np.empty_like(a) for a in given), None]

    products._linear_vjp = gradients


# --- parts ----------------------------------------------------------------------------------------


def rows_of(part: str, rounds: int) -> list[dict[str, Any]]:
    """The rows of a part, each with its time and how many times as fast as its peer it is."""
    peers = find_spec("torchao") is not None
    found = []
    if part == "quantize":
        for name, dtype in product(FORMATS, DTYPES):
            ours: dict[str, Any] = {"extensor.torch": (pack, (name, dtype))}
            both = ours | ({PEER: (pack_torchao, (name, dtype))} if peers else {})
            times = contest.measure(both, rounds, 3)
            found += _rows(times, PEER, part=part, what=f"{name} of {dtype}")
    elif part == "linear":
        kinds = ["float32", *RECIPES, *([PEER] if peers else [])]
        times = contest.measure({kind: (linear, (kind,)) for kind in kinds}, rounds, 5)
        found += _rows(times, PEER, part=part, what="512 x 1024 x 1024")
    elif part == "inference":
        for name, recipe in INFERENCE.items():
            ours = {"extensor.torch": (forward, (name, recipe))}
            both = ours | ({PEER: (forward, (name, ""))} if peers else {})
            found += _rows(contest.measure(both, rounds, 5), PEER, part=part, what=name)
    elif part == "models":
        for name in ("resnet18", "gpt"):
            works: dict[str, Any] = {
                kind: (model_step, (name, kind)) for kind in ("float32", "mxfp4")
            }
            found += _rows(contest.measure(works, rounds, 3), "float32", part=part, what=name)
    else:
        kinds = ["a custom operator", "extensor.torch without its primitives"]
        works = {kind: (call, (kind,)) for kind in (*kinds, "extensor.torch", "extensor")}
        times = contest.measure(works, rounds, 500)
        found += _rows(times, "a custom operator", part=part, what="32 x 32")
    return found


def _rows(times: dict[str, float], peer: str, **about: Any) -> list[dict[str, Any]]:
    return [
        {
            **about,
            "name": name,
            "milliseconds": round(1e3 * taken, 4),
            **({f"of {peer}": round(times[peer] / taken, 3)} if peer in times else {}),
        }
        for name, taken in times.items()
    ]


def main() -> None:
    """Measure, print and write."""
    parser = contest.options(__doc__, rounds=7)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    args = contest.arguments(parser)
    _, core = contest.cpu_with_core()
    rows = [row for part in args.only for row in contest.shown(rows_of(part, args.rounds))]
    packages = ("numpy", "torch", "torchao")
    contest.write("cpu-torch", rows, core.level(), merge="part", args=args, packages=packages)


if __name__ == "__main__":
    main()
