"""``extensor doctor``: what this installation has, and what it lacks."""

from __future__ import annotations

import inspect
import os
import platform
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from shutil import which
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np

from extensor import config
from extensor.backends import registry
from extensor.backends.cpu import CpuBackend
from extensor.backends.protocol import AttentionForward, Backend, Window
from extensor.cli.printing import show
from extensor.cli.sheet import Sheet
from extensor.extras import EXTRAS, lacking
from extensor.formats import FORMATS
from extensor.quant import QuantArray, QuantSpec
from extensor.quant.recipes import get_recipe
from extensor.quant.round_to_odd import OddFloats
from extensor.quant.spec import Hadamard
from extensor.random import Stream

__all__ = ["doctor", "version"]


def version() -> str:
    """The version of extensor; also where it is not installed."""
    return str(import_module("extensor").__version__)


def doctor(all: bool = False) -> None:
    """Show what this installation has and lacks: the C++ core, devices, packages, flags.

    Args:
        all: Also show which code each format and each method takes, and every flag.
    """
    backend: CpuBackend | None = None
    try:
        found = registry.get("cpu")
        assert isinstance(found, CpuBackend)
        backend, core = found, _core_rows(found)
    except (RuntimeError, ValueError) as error:  # a core that must be there, a flag that is wrong
        core = [("C++ core", f"not usable: {error}")]
    flags = [f"{f.name}={f.read()}" for f in config.FLAGS.values() if f.name in os.environ]
    rows = [
        ("extensor", f"{version()}, in {Path(__file__).parents[1]}"),
        ("python", f"{platform.python_version()} ({platform.machine()}, {platform.system()})"),
        ("libraries", f"numpy {np.__version__}, ml_dtypes {ml_dtypes.__version__}"),
        *core,
        *_device_rows(),
        *_extra_rows(),
        ("flags", ", ".join(flags) or "none set"),
    ]
    show([Sheet("This installation", ("what", "state"), tuple(rows))])
    if not all:
        print("extensor doctor --all shows which code each format and each method takes")
        return
    sheets = [_flag_sheet()]
    if backend is not None:
        sheets += [
            *_quantize_sheets(backend),
            _conv_pool_sheet(backend),
            _nn_sheet(backend),
            _reduction_sheet(backend),
            _generic_sheet(backend),
        ]
    show(sheets)


def _core_rows(backend: CpuBackend) -> list[tuple[str, str]]:
    core = backend.core
    if core is None:
        rows = [("C++ core", f"not used: {backend.core_missing}")]
        return rows + ([("to have it", _how_to_build_core())] if config.use_core() else [])
    levels = " < ".join(core.levels())
    return [
        ("C++ core", f"in use, {core.threads()} threads"),
        ("instruction set", f"{core.level()} (this CPU and build: {levels})"),
    ]


def _device_rows() -> list[tuple[str, str]]:
    """What each device lacks; packages are looked for, not imported."""
    rows = []
    for name, row in registry.BACKENDS.items():
        lacking = registry.missing(name)
        state = "ready" if name == "cpu" else "packages installed"
        if lacking:
            state = f"missing: {', '.join(lacking)}; it takes {row.way_out}"
        rows.append((f"device {name}", state))
    return rows


def _extra_rows() -> list[tuple[str, str]]:
    """Which optional packages are not installed."""
    rows = []
    for name in EXTRAS:
        missing = lacking(name)
        state = f"missing: {', '.join(missing)}; pip install 'extensor[{name}]'"
        rows.append((f"extra {name}", state if missing else "installed"))
    return rows


def _how_to_build_core() -> str:
    """What this machine lacks for building the C++ core."""
    named = os.environ.get("CXX")
    found = [name for name in ([named] if named else ["c++", "g++", "clang++"]) if which(name)]
    if found:
        return f"{which(found[0])} is here: install again (pip install -e .), and read what it says"
    missing = f"CXX={named} is not there" if named else "no c++, g++ or clang++ is on the PATH"
    return f"{missing}: install a C++20 compiler, then install again"


Call = tuple[Any, ...]
"""A method's name and its arguments."""


def _format_sheet(
    title: str, backend: CpuBackend, methods: Sequence[str], calls: Callable[[str], Sequence[Call]]
) -> Sheet:
    """Which code each format takes under its default spec; ``calls`` gives a format's calls."""
    rows = tuple((name, *(backend.path(*call) for call in calls(name))) for name in FORMATS)
    return Sheet(f"{title} on the CPU", ("format", *methods), rows)


def _quantize_sheets(backend: CpuBackend) -> list[Sheet]:
    """Quantizers and products of blocked matrices, by format."""
    x, few = np.ones((64, 64), np.float32), np.ones((4, 64), np.float32)
    one = ("quantize", "dequantize", "fake_quantize", "quantize_clipped")
    both = (
        "quantize_rowwise_columnwise",
        "fake_quantize_rowwise_columnwise",
        "quantize_rowwise_columnwise_clipped",
    )
    products = ("block_scaled_matmul", "weight_only_matmul")

    def packed(name: str) -> QuantArray:
        return backend.quantize(x, QuantSpec(name).resolve(2))[0]

    def of_one(name: str) -> Sequence[Call]:
        spec = QuantSpec(name).resolve(2)
        return [(m, packed(name)) if m == "dequantize" else (m, x, spec) for m in one]

    def of_both(name: str) -> Sequence[Call]:
        specs = tuple(QuantSpec(name, axis=axis).resolve(2) for axis in (1, 0))
        return [(method, x, specs) for method in both]

    def of_products(name: str) -> Sequence[Call]:
        q = packed(name)
        return [(products[0], q, q), (products[1], few, q)]

    return [
        _format_sheet("Quantizing, with the default spec,", backend, one, of_one),
        _format_sheet("Quantizing a matrix along rows and columns at once", backend, both, of_both),
        _format_sheet("Products of blocked matrices", backend, products, of_products),
    ]


def _conv_pool_sheet(backend: CpuBackend) -> Sheet:
    """Which code convolutions and pooling take on float32 images, 3x3 kernel, padding 1."""
    x, w = np.ones((2, 4, 8, 8), np.float32), np.ones((4, 4, 3, 3), np.float32)
    rows, spec = [], QuantSpec(next(iter(FORMATS))).resolve(2)
    for stride in (1, 2):
        window = Window((3, 3), (stride, stride), (1, 1))
        g, index = backend.max_pool2d(x, window)
        taps = np.ones((4, 64), np.float32)  # 36, filled up to the transform's 32
        clipped = (g.reshape(4, -1), taps, x, get_recipe("quartet").layers.fprop.a, window)
        calls: tuple[Call, ...] = (
            ("quantized_conv2d", x, w, spec, None, w.shape, window),
            ("quantized_conv2d_grad_w", g.reshape(4, -1), x, spec, None, w.shape, window),
            ("clipped_conv2d_grad_x", *clipped),
            ("conv2d", x, w, window, 1),
            ("conv2d_grad_x", g, w, x.shape, window, 1),
            ("conv2d_grad_w", g, x, w.shape, window, 1),
            ("max_pool2d", x, window),
            ("max_pool2d_grad", g, index, x.shape),
        )
        rows += [(call[0], str(stride), backend.path(*call)) for call in calls]
    title = "Convolution and pooling on the CPU, float32"
    return Sheet(title, ("method", "stride", "path"), tuple(rows))


def _nn_sheet(backend: CpuBackend) -> Sheet:
    """Which code the methods of layers and optimizers take on a float32 matrix."""
    x, w = np.ones((64, 64), np.float32), np.ones(64, np.float32)
    flat, mean = w.copy(), np.ones((64, 1), np.float32)
    heads, stats = np.ones((2, 4, 16, 32), np.float32), np.ones((2, 4, 16, 2), np.float32)
    attention = AttentionForward(*(heads,) * 4, stats, causal=True, scale=0.1)
    labels, angles = np.zeros(64, np.int64), np.ones((16, 16), np.float32)
    memory = SimpleNamespace(keys=heads, values=heads)
    calls: tuple[Call, ...] = (
        ("product", x, x),
        ("matmul", x, x),
        ("attention", *(heads,) * 3, True, 0.1),
        ("attention_grad", heads, attention, (heads,) * 3),
        ("cached_attention", *(heads[:, :, :1],) * 3, memory, 0.1),
        ("gelu", x),
        ("gelu_grad", x, x, x),
        ("gated_silu", x, x, 1.0, None),
        ("gated_silu_grad", x, x, x, 1.0, None),
        ("rotary", heads, angles, angles, False),
        ("softmax", x, -1),
        ("softmax_grad", x, x, -1),
        ("log_softmax", x, -1),
        ("log_softmax_grad", x, x, -1),
        ("cross_entropy", x, labels, 0.0),
        ("cross_entropy_grad", w, x, labels, np.ones((64, 2), np.float32), 0.0),
        ("layer_norm", x, w, w, 1e-5),
        ("layer_norm_grad", x, x, w, mean, mean),
        ("rms_norm", x, w, 1e-6),
        ("rms_norm_grad", x, x, w, mean),
        ("batch_norm", x, w, w, 1e-5),
        ("batch_norm_grad", x, x, w, w, w, 1e-5),
        ("relu", x),
        ("relu_grad", x, x),
        ("add", x, x),
        ("bfloat16_values", x),
        ("round_to_odd", x, 12),
        ("odd_values", OddFloats(labels.astype(np.uint16), None, (64,), x.dtype)),
        ("channel_sum", x),
        ("all_finite", x),
        ("adam", flat, w, w, w, {}),
        ("lion", flat, w, w, {}),
        ("sgd", flat, w, None, 0.1, 0.0, 0.0, False),
        ("stochastic_bfloat16", x, Stream(0, 0, 1, 0)),
        ("straight_through", x, None, Hadamard(32), 64),
    )
    rows = tuple((call[0], backend.path(*call)) for call in calls)
    return Sheet("Layers and optimizers on the CPU, float32", ("method", "path"), rows)


def _reduction_sheet(backend: CpuBackend) -> Sheet:
    """Which code the sums of gradients over ranks take, two blocks of float32 on two ranks."""
    x, anchors = np.ones(64, np.float32), np.full(2, 7, np.uint8)
    limbs, codes = np.zeros((3, 64), np.int32), np.ones((2, 64), np.int8)
    calls: tuple[Call, ...] = (
        ("block_max", x),
        ("block_square_sums", x),
        ("fixed_point", x, anchors),
        ("add_limbs", limbs, x, anchors, anchors),
        ("limb_total", limbs, anchors, anchors),
        ("fixed_point_mean", np.ones(64, np.int64), anchors, 2.0),
        ("mxint", x, anchors, 8, None, 0, None),
        ("mxint_mean", codes, np.full((2, 2), 7, np.uint8), 2.0),
    )
    rows = tuple((call[0], backend.path(*call)) for call in calls)
    return Sheet("Sums of gradients over ranks on the CPU", ("method", "path"), rows)


def _generic_sheet(backend: CpuBackend) -> Sheet:
    """The methods of a backend for which the core has no kernel of its own."""
    methods = [name for name, thing in inspect.getmembers(Backend, inspect.isfunction)]
    generic = [n for n in methods if not n.startswith("_") and n not in backend.core_methods()]
    rows = tuple((name, "numpy, or by calling methods above") for name in generic)
    return Sheet("Other methods on the CPU", ("method", "path"), rows)


def _flag_sheet() -> Sheet:
    rows = tuple((f.name, f.read(), f.default, f.doc) for f in config.FLAGS.values())
    return Sheet("Flags", ("variable", "value", "default", ""), rows)
