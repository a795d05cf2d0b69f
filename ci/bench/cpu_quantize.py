"""The C++ core's quantizers against memory, and against torchao eager where it is at hand.

    python ci/bench/cpu_quantize.py [--only WORD ...] [--torchao PYTHON] [--force]

One matrix of 16384 x 4096 normal values, float32 or bfloat16; medians of single calls, each after
two of the same kind that are not timed, the contestants in turns. Bytes are those read and written,
NVFP4's input counted twice (the tensor's maximum, then codes: nothing takes the maximum from the
caller); "both" is `quantize_rowwise_columnwise` of one array, its input counted once and its
two results; the bandwidth beside them is that of
a float32 copy of the same matrix in the same run, by numpy or torch, whichever is faster.
``--only`` picks rows by words in their names; rows of one day go into one file,
ci/bench/results/<date>-cpu-quantize.json. ``--torchao`` names an interpreter that has torchao; its
eager rates, on 2048 rows of the matrix and as many threads, are measured in a process of their own.
On a busy machine nothing is written unless forced.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any

import ml_dtypes
import numpy as np

from ci.bench.contest import arguments, command, cpu_with_core, options, take_turns, write
from extensor.backends.cpu import CpuBackend
from extensor.config import num_threads
from extensor.quant.spec import Hadamard, QuantSpec
from extensor.random import Stream

SHAPE = (16384, 4096)
FORMATS = ("mxfp4", "mxfp8_e4m3", "mxfp8_e5m2", "nvfp4")
GOALS = {
    "rows": 0.75,
    "columns": 0.5,
    "stochastic": 0.35,
    "hadamard16": 0.5,
    "hadamard32": 0.5,
    "dequantize": 0.75,
    "both": 0.5,
}
TORCHAO = """
import json, statistics, sys, time
import torch
from torchao.prototype.mx_formats.mx_tensor import MXTensor
from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale
torch.set_num_threads(int(sys.argv[1]))
rates = {}
for name, dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16)):
    x = torch.randn(2048, 4096, dtype=dtype)
    calls = {
        "mxfp4": lambda: MXTensor.to_mx(x, torch.float4_e2m1fn_x2, 32),
        "mxfp8_e4m3": lambda: MXTensor.to_mx(x, torch.float8_e4m3fn, 32),
        "nvfp4": lambda: NVFP4Tensor.to_nvfp4(
            x, per_tensor_scale=per_tensor_amax_to_scale(x.abs().max().float())
        ),
    }
    for kind, call in calls.items():
        times = []
        for turn in range(4):
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
        rates[f"{kind} {name}"] = x.numel() / statistics.median(times[1:]) / 1e6
print(json.dumps(rates))
"""

Call = tuple[float, Callable[[], Any]]
"""Bytes read and written by a value, and the call."""


def contestants(backend: CpuBackend, words: list[str]) -> dict[str, Call]:
    """Every row whose name holds all of ``words``."""
    x = np.random.default_rng(0).standard_normal(SHAPE, dtype=np.float32)
    inputs = {"float32": x, "bfloat16": x.astype(ml_dtypes.bfloat16)}
    specs: dict[str, dict[str, Any]] = {
        "rows": {},
        "columns": {"axis": 0},
        "stochastic": {"rounding": "stochastic"},
        "hadamard16": {"transform": Hadamard(16)},
        "hadamard32": {"transform": Hadamard(32)},
    }
    calls: dict[str, Call] = {}
    for work in GOALS:
        for name in FORMATS if not work.startswith("hadamard") else ("mxfp4",):
            spec = QuantSpec(name, **specs.get(work, {})).resolve(2)
            _, size = spec.tile if isinstance(spec.tile, tuple) else (1, 32)
            stored = spec.row.element.bits / 8 + 1 / size
            for dtype, array in inputs.items():
                label = f"{work} {name} {dtype}"
                if not all(word in label.split() for word in words):
                    continue
                if work == "dequantize":
                    q, _ = backend.quantize(x, spec)
                    calls[label] = (stored + array.itemsize, partial(backend.dequantize, q, dtype))
                    continue
                if work == "both":
                    pair = spec, QuantSpec(name, axis=0).resolve(2)
                    reason = backend.path("quantize_rowwise_columnwise", array, pair)
                    if not reason.startswith("core"):
                        raise SystemExit(f"{label}: expected the core, got {reason}")
                    calls[label] = (
                        2 * stored + array.itemsize * (2 if spec.row.tensor_scale else 1),
                        partial(backend.quantize_rowwise_columnwise, array, pair),
                    )
                    continue
                stream = Stream(1) if work == "stochastic" else None
                reads = array.itemsize * (2 if spec.row.tensor_scale else 1)
                calls[label] = stored + reads, partial(backend.quantize, array, spec, stream)
    target = np.empty_like(x)
    calls["copy numpy"] = 8.0, partial(np.copyto, target, x)
    if find_spec("torch"):
        import torch

        torch.set_num_threads(num_threads())
        calls["copy torch"] = 8.0, partial(torch.from_numpy(target).copy_, torch.from_numpy(x))
    return calls


def rows_of(calls: dict[str, Call], seconds: dict[str, float]) -> dict[str, dict[str, Any]]:
    """The table's rows by name, printed."""
    values = SHAPE[0] * SHAPE[1]
    copy = max(8 * values / s for name, s in seconds.items() if name.startswith("copy"))
    rows: dict[str, dict[str, Any]] = {}
    for name, taken in seconds.items():
        rate = calls[name][0] * values / taken
        rows[name] = {
            "M_values_per_s": round(values / taken / 1e6),
            "GB_per_s": round(rate / 1e9, 1),
            "of_copy": round(rate / copy, 2),
        }
        if name.split()[0] in GOALS:
            rows[name]["goal"] = GOALS[name.split()[0]]
        print(f"{name:34}", *(f"{key} {value}" for key, value in rows[name].items()))
    return rows


def torchao_rates(python: str) -> dict[str, float]:
    """Million values a second of torchao eager in that interpreter, by format and dtype."""
    call = [python, "-c", TORCHAO, str(num_threads())]
    done = subprocess.run(call, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"torchao: {python} failed: {done.stderr.strip().splitlines()[-1]}")
    rates: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return rates


def main() -> None:
    """Measure, print and write."""
    parser = options(__doc__, rounds=5)
    parser.add_argument("--only", nargs="+", default=[], help="words of the rows' names")
    parser.add_argument("--torchao", metavar="PYTHON", help="an interpreter with torchao")
    args = arguments(parser)
    backend, core = cpu_with_core()
    calls = contestants(backend, args.only)
    # Two calls before each timed one: results go to memory that is used again, as in a loop.
    timed = {name: call for name, (_, call) in calls.items()}
    rows = rows_of(calls, take_turns(timed, args.rounds, before=2))
    if args.torchao:
        for name, rate in torchao_rates(args.torchao).items():
            row: dict[str, Any] = {"M_values_per_s": round(rate, 1)}
            if ours := rows.get(f"rows {name}"):
                row["ours_times_as_fast"] = round(ours["M_values_per_s"] / rate, 1)
            rows[f"torchao {name}"] = row
            print(f"{'torchao ' + name:34}", row)
    copies = [row["GB_per_s"] for name, row in rows.items() if name.startswith("copy")]
    for row in rows.values():
        row["copy_GB_per_s"] = max(copies)
    listed = [{"name": name, **row} for name, row in rows.items()]
    ran = command().replace(args.torchao or "PYTHON", "PYTHON")  # where it is installed is no fact
    write("cpu-quantize", listed, core.level(), merge="name", args=args, ran=ran)


if __name__ == "__main__":
    main()
