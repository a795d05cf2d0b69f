"""The fused CUDA quantizers against torchao, eager and compiled, and against ours unfused.

    python ci/bench/cuda_quantize_peers.py [--rounds N]

Normal bfloat16 data of 16384 x 16384: milliseconds of one call, medians in turns by CUDA events,
and how many times as fast ours is. NVFP4's tensor maximum is given to both. "unfused" is the
definition of `extensor.quant.reference` on cupy's arrays, operation by operation, on 4096 x 4096,
beside the fused kernel at that size. Needs a GPU, torch and the extra ``cuda13``; without torchao
its rows are left out. Minutes, most of them torch.compile's.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch

from ci.bench.gpu import Call, as_cupy, cuda, fixed, milliseconds, normal, options, write_gpu
from extensor.quant import reference
from extensor.quant.spec import QuantSpec
from extensor_cuda.kernels.quantize import quantize as kernels
from extensor_cuda.kernels.quantize import rowwise_columnwise

FORMATS = ("mxfp8_e4m3", "mxfp4", "nvfp4")
SIZE, SMALL = 16384, 4096


def torchao_calls(x: torch.Tensor) -> dict[str, Call]:
    """Rows in each format; for MXFP8 rows and columns, too."""
    from torchao.prototype.mx_formats.mx_tensor import MXTensor
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale

    scale = per_tensor_amax_to_scale(x.abs().max().float())

    def mxfp8(v: torch.Tensor) -> Any:
        return MXTensor.to_mx(v, torch.float8_e4m3fn, 32)

    def both(v: torch.Tensor) -> Any:
        return mxfp8(v), mxfp8(v.t().contiguous())

    made: dict[str, Callable[[torch.Tensor], Any]] = {
        "mxfp8_e4m3 rows": mxfp8,
        "mxfp4 rows": lambda v: MXTensor.to_mx(v, torch.float4_e2m1fn_x2, 32),
        "nvfp4 rows": lambda v: NVFP4Tensor.to_nvfp4(v, per_tensor_scale=scale),
        "mxfp8_e4m3 rows + columns": both,
    }
    calls: dict[str, Call] = {}
    for name, call in made.items():
        for how, run in (("eager", call), ("compiled", torch.compile(call, fullgraph=True))):
            calls[f"{name}, torchao {how}"] = fixed(run, x)
    return calls


def our_calls(x: Any, amax: Any, xp: Any) -> dict[str, Call]:
    """The same, without counts."""
    calls: dict[str, Call] = {}
    for name in FORMATS:
        spec = QuantSpec(name, axis=1)
        plan = kernels.plan_of(spec, x.shape)
        both = rowwise_columnwise.row_column_plan((spec, spec.replace(axis=0)), x.shape)
        assert plan and both, (plan, both)
        given = amax if plan.needs_tensor else None
        calls[f"{name} rows"] = fixed(kernels.quantize_raw, x, plan, None, xp, given, False)
        calls[f"{name} rows + columns"] = fixed(
            rowwise_columnwise.quantize_raw, x, both, (None, None), xp, given, False
        )
    return calls


def main() -> None:
    """Measure, print and write."""
    rounds = options(__doc__, rounds=9).parse_args().rounds
    xp = cuda().xp
    x = normal(SIZE, SIZE)
    view = as_cupy(x, xp)
    amax = xp.asarray(float(x.abs().max()), dtype=xp.float32)
    rows: list[dict[str, Any]] = []

    def add(name: str, taken: float, ours: float) -> None:
        times = taken / ours
        rows.append({"name": name, "milliseconds": round(taken, 4), "ours": round(times, 2)})
        print(f"{name:45} {taken:9.4f} ms, ours {times:.2f} times as fast", flush=True)

    fused = milliseconds(our_calls(view, amax, xp), rounds, burst=1)
    for name, each in fused.items():
        add(name, each, each)
    if find_spec("torchao") is None:
        print("torchao is not installed: its rows are left out; pip install torchao")
    else:
        for name, call in torchao_calls(x).items():
            try:
                each = milliseconds({name: call}, rounds, burst=1)[name]
            except Exception as error:  # what torchao cannot do here is a fact, no reason to end
                print(f"{name}: {type(error).__name__}: {str(error).splitlines()[0]}")
                continue
            add(name, each, fused[name.partition(",")[0]])
    del x
    small = view[:SMALL, :SMALL].copy()
    again = milliseconds(our_calls(small, amax, xp), rounds, burst=1)
    for name in FORMATS:
        spec = QuantSpec(name, axis=1)
        call = fixed(reference.quantize, small, spec, None, None, xp)
        title = f"{name} rows"
        add(f"{title}, {SMALL} x {SMALL}, fused", again[title], again[title])
        each = milliseconds({title: call}, 3, burst=1)[title]
        add(f"{title}, {SMALL} x {SMALL}, unfused", each, again[title])
    write_gpu("cuda-quantize-peers", rows, xp, by_kind=False, more=["torchao"])


if __name__ == "__main__":
    main()
