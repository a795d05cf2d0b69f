"""``extensor doctor``: what this installation has, and which code each format takes."""

from __future__ import annotations

import inspect
import os
import platform
from importlib import metadata
from shutil import which
from typing import Any

import ml_dtypes
import numpy as np

from extensor import config
from extensor.backends import registry
from extensor.backends.cpu import CpuBackend
from extensor.backends.protocol import Backend, Window
from extensor.cli.sheet import Sheet, show
from extensor.formats import FORMATS
from extensor.quant import QuantSpec

__all__ = ["doctor"]


def doctor() -> None:
    """Say what this installation has: versions, C++ core, what runs on it, devices, flags."""
    sheets = [_version_sheet()]
    try:
        backend = registry.get("cpu")
    except (RuntimeError, ValueError) as error:  # a core that must be there, a flag that is wrong
        sheets.append(Sheet("C++ core", ("what", "state"), (("CPU backend", str(error)),)))
    else:
        assert isinstance(backend, CpuBackend)
        sheets += [
            _core_sheet(backend),
            _format_path_sheet(backend),
            _pair_path_sheet(backend),
            _product_path_sheet(backend),
            _window_path_sheet(backend),
            _training_path_sheet(backend),
            _other_sheet(backend),
        ]
    show([*sheets, _device_sheet(), _flag_sheet()])


def _version_sheet() -> Sheet:
    rows = (
        ("extensor", metadata.version("extensor")),
        ("python", f"{platform.python_version()} ({platform.machine()}, {platform.system()})"),
        ("numpy", np.__version__),
        ("ml_dtypes", ml_dtypes.__version__),
    )
    return Sheet("Versions", ("what", "version"), rows)


def _core_sheet(backend: CpuBackend) -> Sheet:
    core = backend.core
    if core is None:
        rows = [("C++ core", f"not used: {backend.core_missing}")]
        if config.use_core():
            rows.append(("to have it", _way_to_a_core()))
    else:
        levels = " < ".join(core.levels())
        rows = [
            ("C++ core", "in use"),
            ("instruction set", f"{core.level()} (this CPU and build: {levels})"),
            ("threads", str(core.threads())),
        ]
    return Sheet("C++ core", ("what", "state"), tuple(rows))


def _way_to_a_core() -> str:
    """What a build needs that this machine lacks; installing again is the rest."""
    asked = os.environ.get("CXX")
    found = [name for name in ([asked] if asked else ["c++", "g++", "clang++"]) if which(name)]
    if found:
        return f"{which(found[0])} is here: install again (pip install -e .), and read what it says"
    wanted = f"CXX={asked} is not there" if asked else "no c++, g++ or clang++ is on the PATH"
    return f"{wanted}: install a C++20 compiler, then install again"


def _format_path_sheet(backend: CpuBackend) -> Sheet:
    """Which code each format's default spec takes on a float32 matrix."""
    x = np.ones((64, 64), np.float32)
    rows = []
    for name in FORMATS:
        spec = QuantSpec(name).resolve(x.ndim)
        q, _ = backend.quantize(x, spec)
        calls = (("quantize", x, spec), ("dequantize", q), ("fake_quantize", x, spec))
        rows.append((name, *(backend.path(method, *args) for method, *args in calls)))
    columns = ("format", "quantize", "dequantize", "operand (in a GEMM)")
    return Sheet("Formats on the CPU, with their default spec", columns, tuple(rows))


def _pair_path_sheet(backend: CpuBackend) -> Sheet:
    """Which code a matrix takes that is wanted along its rows and down its columns."""
    x = np.ones((64, 64), np.float32)
    rows = []
    for name in FORMATS:
        specs = tuple(QuantSpec(name, axis=axis).resolve(x.ndim) for axis in (1, 0))
        paths = (
            backend.path(method, x, specs)
            for method in ("quantize_rowwise_columnwise", "fake_quantize_rowwise_columnwise")
        )
        rows.append((name, *paths))
    columns = ("format", "quantize_rowwise_columnwise", "fake_quantize_rowwise_columnwise")
    return Sheet("Rows and columns of one matrix on the CPU", columns, tuple(rows))


def _product_path_sheet(backend: CpuBackend) -> Sheet:
    """Which code products of blocked matrices take: with themselves, and with 4 float rows."""
    x, few = np.ones((64, 64), np.float32), np.ones((4, 64), np.float32)
    rows = []
    for name in FORMATS:
        q, _ = backend.quantize(x, QuantSpec(name).resolve(x.ndim))
        paths = (
            backend.path("block_scaled_matmul", q, q),
            backend.path("weight_only_matmul", few, q),
        )
        rows.append((name, *paths))
    return Sheet(
        "Products on the CPU", ("format", "block_scaled_matmul", "weight_only_matmul"), tuple(rows)
    )


def _window_path_sheet(backend: CpuBackend) -> Sheet:
    """Which code convolutions and pooling take on float32 images, 3x3 kernel, padding 1."""
    x, w = np.ones((2, 4, 8, 8), np.float32), np.ones((4, 4, 3, 3), np.float32)
    rows, spec = [], QuantSpec(next(iter(FORMATS))).resolve(2)
    for stride in (1, 2):
        window = Window((3, 3), (stride, stride), (1, 1))
        g, index = backend.max_pool2d(x, window)
        calls: tuple[tuple[Any, ...], ...] = (
            ("quantized_conv2d", x, w, spec, None, w.shape, window),
            ("quantized_conv2d_grad_w", g.reshape(4, -1), x, spec, None, w.shape, window),
            ("conv2d", x, w, window, 1),
            ("conv2d_grad_x", g, w, x.shape, window, 1),
            ("conv2d_grad_w", g, x, w.shape, window, 1),
            ("max_pool2d", x, window),
            ("max_pool2d_grad", g, index, x.shape),
        )
        rows += [(method, str(stride), backend.path(method, *args)) for method, *args in calls]
    return Sheet("Windows on the CPU, float32", ("method", "stride", "path"), tuple(rows))


def _training_path_sheet(backend: CpuBackend) -> Sheet:
    """Which code a training step's methods take on a float32 matrix."""
    x, w = np.ones((64, 64), np.float32), np.ones(64, np.float32)
    line, mean = w.copy(), np.ones((64, 1), np.float32)
    heads, stats = np.ones((2, 4, 16, 32), np.float32), np.ones((2, 4, 16, 2), np.float32)
    whole = (True, 0.1)
    calls: tuple[tuple[Any, ...], ...] = (
        ("product", x, x),
        ("matmul", x, x),
        ("attention", *(heads,) * 3, *whole),
        ("attention_grad", *(heads,) * 5, stats, *whole, (heads,) * 3),
        ("gelu", x),
        ("gelu_grad", x, x, x),
        ("softmax", x, -1),
        ("softmax_grad", x, x, -1),
        ("log_softmax", x, -1),
        ("log_softmax_grad", x, x, -1),
        ("cross_entropy", x, np.zeros(64, np.int64), 0.0),
        ("cross_entropy_grad", w, x, np.zeros(64, np.int64), np.ones((64, 2), np.float32), 0.0),
        ("layer_norm", x, w, w, 1e-5),
        ("layer_norm_grad", x, x, w, mean, mean),
        ("rms_norm", x, w, 1e-6),
        ("rms_norm_grad", x, x, w, mean),
        ("adam", line, w, w, w, {}),
        ("relu", x),
        ("relu_grad", x, x),
        ("add", x, x),
        ("bfloat16_values", x),
        ("all_finite", x),
        ("channel_sum", x),
        ("batch_norm", x, w, w, 1e-5),
        ("batch_norm_grad", x, x, w, w, w, 1e-5),
        ("sgd", line, w, None, 0.1, 0.0, 0.0, False),
    )
    rows = tuple((method, backend.path(method, *args)) for method, *args in calls)
    return Sheet("Training on the CPU, float32", ("method", "path"), rows)


def _other_sheet(backend: CpuBackend) -> Sheet:
    """What a backend must do and the core has no kernel of its own for."""
    wanted = [name for name, thing in vars(Backend).items() if inspect.isfunction(thing)]
    others = [n for n in wanted if not n.startswith("_") and n not in backend.core_methods()]
    rows = tuple((name, "numpy, or made of the above") for name in others)
    return Sheet("The rest on the CPU", ("method", "path"), rows)


def _device_sheet() -> Sheet:
    rows = []
    for name, row in registry.BACKENDS.items():
        lacking = registry.missing(name)
        state = "found" if not lacking else f"not found: {', '.join(lacking)}"
        rows.append((name, state, row.way_out))
    return Sheet("Devices (looked for, not imported)", ("device", "packages", "needs"), tuple(rows))


def _flag_sheet() -> Sheet:
    rows = tuple((f.name, f.read(), f.default, f.doc) for f in config.FLAGS.values())
    return Sheet("Flags", ("variable", "value", "default", ""), rows)
