"""Every kernel against the generic method it overrides.

Overrides are found by reflection; each must have a check in tests/kernels. Codes, scales, decoded
values, counts, copies and maxima are compared by their bytes; sums of products within the bound
that holds for any order of additions: |error| <= gamma_K * sum |a| |b|, gamma_K = K u / (1 - K u),
u = 2**-24; training steps within their stated bounds. All of it at every instruction set this
machine has, on one thread and on two.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator

import ml_dtypes
import numpy as np
import pytest

from extensor.backends import cpu
from extensor.backends.generic import GenericBackend
from extensor.backends.protocol import Window
from extensor.quant.spec import Hadamard, QuantSpec
from extensor.random import Stream
from tests.kernels import attention, clip_mask, conv_pool, matmul, nn, optim, quantize, reduction
from tests.kernels.inputs import (
    BACKEND,
    CORE,
    GENERIC,
    LEVELS,
    Check,
    arrays,
    assert_bytes,
    check_bounded,
    forced,
    plain,
    special,
)

SERVICES = {"memory_log", "noted"}
"""Overrides that compute no values."""
METHODS = [n for n in dir(GenericBackend) if not n.startswith("_") and n not in SERVICES]
OVERRIDES = [n for n in METHODS if getattr(cpu.CpuBackend, n) is not getattr(GenericBackend, n)]


@pytest.fixture(
    params=[(level, n) for level in LEVELS for n in (1, 2)], ids=lambda p: f"{p[0]}-{p[1]}"
)
def backend(request: pytest.FixtureRequest) -> Iterator[cpu.CpuBackend]:
    with forced(*request.param):
        yield BACKEND


CHECKS: dict[str, Check] = {
    "quantize": quantize.check_quantize,
    "dequantize": quantize.check_dequantize,
    "fake_quantize": quantize.check_fake_quantize,
    "quantize_rowwise_columnwise": quantize.check_quantize_rowwise_columnwise,
    "fake_quantize_rowwise_columnwise": quantize.check_fake_quantize_rowwise_columnwise,
    "quantize_clipped": clip_mask.check_quantize_clipped,
    "straight_through": clip_mask.check_straight_through,
    "quantize_rowwise_columnwise_clipped": clip_mask.check_quantize_rowwise_columnwise_clipped,
    "block_scaled_matmul": matmul.check_product("block_scaled_matmul"),
    "weight_only_matmul": matmul.check_product("weight_only_matmul"),
    "bound_weight_only": matmul.check_bound_weight_only,
    "product": matmul.check_product_of_operands,
    "quantized_conv2d": conv_pool.check_quantized_convolution("quantized_conv2d"),
    "quantized_conv2d_grad_w": conv_pool.check_quantized_convolution("quantized_conv2d_grad_w"),
    "clipped_conv2d_grad_x": conv_pool.check_clipped_gradient,
    "conv2d": conv_pool.check_convolution("conv2d"),
    "conv2d_grad_x": conv_pool.check_convolution("conv2d_grad_x"),
    "conv2d_grad_w": conv_pool.check_convolution("conv2d_grad_w"),
    "max_pool2d": conv_pool.check_max_pool2d,
    "max_pool2d_grad": conv_pool.check_max_pool2d_grad,
    "matmul": check_bounded("matmul", matmul.matmul_cases),
    "attention": check_bounded("attention", attention.attention_cases),
    "attention_grad": attention.check_attention_grad,
    "cached_attention": attention.check_cached_attention,
    "gelu": check_bounded("gelu", nn.gelu_cases),
    "gelu_grad": check_bounded("gelu_grad", nn.gelu_grad_cases),
    "gated_silu": check_bounded("gated_silu", nn.gated_silu_cases),
    "gated_silu_grad": check_bounded("gated_silu_grad", nn.gated_silu_grad_cases),
    "rotary": nn.check_rotary,
    "softmax": check_bounded("softmax", nn.softmax_cases),
    "softmax_grad": check_bounded("softmax_grad", nn.softmax_grad_cases),
    "log_softmax": check_bounded("log_softmax", nn.log_softmax_cases),
    "log_softmax_grad": check_bounded("log_softmax_grad", nn.log_softmax_grad_cases),
    "cross_entropy": check_bounded("cross_entropy", nn.cross_entropy_cases),
    "cross_entropy_grad": check_bounded("cross_entropy_grad", nn.cross_entropy_grad_cases),
    "layer_norm": check_bounded("layer_norm", lambda: nn.norm_cases(True)),
    "layer_norm_grad": check_bounded("layer_norm_grad", lambda: nn.norm_grad_cases(True)),
    "rms_norm": check_bounded("rms_norm", lambda: nn.norm_cases(False)),
    "rms_norm_grad": check_bounded("rms_norm_grad", lambda: nn.norm_grad_cases(False)),
    "adam": optim.check_adam,
    "relu": nn.elementwise("relu", 1),
    "relu_grad": nn.elementwise("relu_grad", 2),
    "add": nn.elementwise("add", 2),
    "bfloat16_values": nn.elementwise("bfloat16_values", 1),
    "round_to_odd": quantize.check_rounded_to_odd,
    "odd_values": quantize.check_rounded_to_odd,
    "all_finite": optim.check_all_finite,
    "stochastic_bfloat16": optim.check_stochastic_bfloat16,
    "channel_sum": check_bounded("channel_sum", nn.channel_sum_cases),
    "batch_norm": check_bounded("batch_norm", nn.batch_norm_cases),
    "batch_norm_grad": check_bounded("batch_norm_grad", nn.batch_norm_grad_cases),
    "lion": optim.check_lion,
    "sgd": optim.check_sgd,
    "block_max": reduction.check_block_max,
    "block_square_sums": reduction.check_block_square_sums,
    "fixed_point": reduction.check_fixed_point,
    "add_limbs": reduction.check_add_limbs,
    "limb_total": reduction.check_limb_total,
    "fixed_point_mean": reduction.check_fixed_point_mean,
    "mxint": reduction.check_mxint,
    "mxint_mean": reduction.check_mxint_mean,
}


def test_every_override_has_a_check() -> None:
    assert sorted(OVERRIDES) == sorted(CHECKS)


@pytest.mark.parametrize("name", OVERRIDES)
def test_kernel_equals_generic(backend: cpu.CpuBackend, name: str) -> None:
    CHECKS[name](backend)


# --- which path, and the promises beside values -------------------------------------------------


def test_most_cases_take_the_core() -> None:
    """A comparison of the generic method with itself would prove nothing."""
    if CORE is None:
        assert BACKEND.path("max_pool2d", plain((1, 1, 3, 3)), Window((2, 2))).startswith(
            "generic: "
        )
        return
    paths = [BACKEND.path("fake_quantize", *case) for case, *_ in quantize.quant_table()]
    taken = sum(path.startswith("core (") for path in paths)
    assert taken > 0.8 * len(paths)
    for name in ("conv2d", "conv2d_grad_x", "conv2d_grad_w"):
        for number in (0, 1, 3):
            assert BACKEND.path(name, *conv_pool.convolution(name, number)[0]).startswith("core (")


def test_path_names_the_reason() -> None:
    x = plain((2, 3, 8, 8))
    w = plain((4, 3, 3, 3))
    window = Window((3, 3))
    q, _ = GENERIC.quantize(x, QuantSpec("mxfp4", transform=Hadamard(16)))
    for reason, method, *args in (
        ("float64", "max_pool2d", x.astype(np.float64), window),
        ("empty", "conv2d", x[:0], w, window, 1),
        ("middle", "fake_quantize", x, QuantSpec("mxfp4", axis=1, tile=(4, 32))),
        ("only with statistic='running'", "quantize", x, QuantSpec("mxfp4"), None, x),
        ("Hadamard", "dequantize", q),
        (
            "not rows",
            "fake_quantize_rowwise_columnwise",
            x[0, 0],
            (QuantSpec("mxfp4"), QuantSpec("mxfp4")),
        ),
        ("int64", "max_pool2d_grad", x, np.zeros(x.shape, np.int64), x.shape),
    ):
        path = BACKEND.path(method, *args)
        assert path.startswith("generic: "), (reason, path)
        assert (reason if CORE else BACKEND.core_missing or reason) in path
    assert "BLAS" in BACKEND.path("matmul", plain((2, 60)), plain((60, 60))) or CORE is None
    with pytest.raises(ValueError, match="expected one of"):
        BACKEND.path("nonsense", x, x)


@pytest.mark.parametrize("name", ["conv2d", "conv2d_grad_x", "conv2d_grad_w"])
def test_sums_do_not_depend_on_threads(backend: cpu.CpuBackend, name: str) -> None:
    """Run to run, too: what a resumed training run needs. The fixture restores the threads."""
    for number in range(len(conv_pool.WINDOWS)):
        case = conv_pool.convolution(name, number)[0]
        results = []
        for threads in (1, 2, 3, 2):
            if CORE is not None:
                CORE.set_threads(threads)
            results.append(getattr(backend, name)(*case).tobytes())
        assert len(set(results)) == 1, conv_pool.WINDOWS[number]


def test_infinities_stay_where_they_are(backend: cpu.CpuBackend) -> None:
    """Lanes beyond the image may hold anything; nothing of it may reach a sum."""
    window = Window((5, 5), padding=(2, 2))
    x = plain((3, 2, 9, 11))
    w = plain((4, 2, 5, 5))
    g = plain((3, 4, 9, 11))
    x[0, 0, 4, 5], x[2, 1, 8, 10], g[1, 2, 8, 10], g[0, 0, 0, 0] = np.inf, np.nan, np.inf, np.nan
    with np.errstate(invalid="ignore"):
        for name, *case in (
            ("conv2d", x, w, window, 1),
            ("conv2d_grad_x", g, w, x.shape, window, 1),
            ("conv2d_grad_w", g, x, w.shape, window, 1),
        ):
            expected, got = getattr(GENERIC, name)(*case), getattr(backend, name)(*case)
            assert (np.isfinite(got) == np.isfinite(expected)).all(), name
            assert (np.isnan(got) == np.isnan(expected)).all(), name


def test_bad_arguments_are_errors(backend: cpu.CpuBackend) -> None:
    x, w = plain((2, 3, 8, 8)), plain((4, 3, 3, 3))
    with pytest.raises(ValueError, match="does not fit"):
        backend.conv2d(x, plain((4, 3, 9, 9)), Window((9, 9)), 1)
    with pytest.raises(ValueError, match="padding only"):
        backend.max_pool2d(x, Window((1, 1), padding=(1, 1)))
    with pytest.raises(ValueError, match="needs a stream"):
        backend.fake_quantize(x, QuantSpec("mxfp4", rounding="stochastic"))
    with pytest.raises(ValueError, match="takes no stream"):
        backend.fake_quantize(x, QuantSpec("mxfp4"), Stream(1))
    with pytest.raises(TypeError, match="float array"):
        backend.quantize(np.ones((4, 4), dtype=np.int32), QuantSpec("mxfp4"))
    with pytest.raises((ValueError, IndexError), match=r"outside the image|out of bounds"):
        backend.max_pool2d_grad(x, np.full(x.shape, 1000, np.int32), x.shape)
    assert w.shape == (4, 3, 3, 3)


def test_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EXTENSOR_CORE", "0")
    off = cpu.make_backend()
    assert off.path("max_pool2d", plain((1, 1, 3, 3)), Window((2, 2))) == "generic: EXTENSOR_CORE=0"

    def missing(name: str) -> None:
        raise ImportError(f"no {name}")

    monkeypatch.setenv("EXTENSOR_CORE", "1")
    monkeypatch.setattr(importlib, "import_module", missing)
    monkeypatch.setenv("EXTENSOR_REQUIRE_CORE", "0")
    assert "not built" in cpu.make_backend().core_missing
    monkeypatch.setenv("EXTENSOR_REQUIRE_CORE", "1")
    with pytest.raises(RuntimeError, match="EXTENSOR_REQUIRE_CORE=1"):
        cpu.make_backend()


def test_training_special_values(backend: cpu.CpuBackend) -> None:
    """NaN and infinity come out where the generic methods give them."""
    x = special((60, 37), 5)
    x[::2][np.isnan(x[::2]) | (x[::2] == np.inf)] = -np.inf  # half the rows can be summed
    x[4], x[6, 1:] = -np.inf, -np.inf
    labels, weight = np.arange(60) % 37, np.float32(2)

    def results(b: GenericBackend) -> Iterator[np.ndarray]:
        yield from b.gelu(x)
        yield b.gelu_grad(x, x, x)
        for one, grad in ((b.softmax, b.softmax_grad), (b.log_softmax, b.log_softmax_grad)):
            out = one(x, 1)
            yield from (out, grad(np.cos(x), out, 1))
        for smoothing in (0.0, 0.1):
            losses, kept = b.cross_entropy(x, labels, smoothing)
            yield from (losses, b.cross_entropy_grad(weight, x, labels, kept, smoothing))

    with np.errstate(all="ignore"):
        for number, (got, expected) in enumerate(
            zip(results(backend), results(GENERIC), strict=True)
        ):
            assert (np.isnan(got) == np.isnan(expected)).all(), number
            assert (np.isinf(got) == np.isinf(expected)).all(), number
            assert not np.isnan(expected).all(), number
    for empty in (np.zeros((0, 4), np.float32), np.zeros((4, 0), np.float32)):
        assert backend.gelu(empty)[0].shape == empty.shape
    none = np.zeros((0, 4), np.float32)
    losses, kept = backend.cross_entropy(none, labels[:0], 0.1)
    assert losses.shape == (0,)
    assert backend.cross_entropy_grad(weight, none, labels[:0], kept, 0.1).shape == none.shape
    assert backend.log_softmax_grad(none, backend.log_softmax(none, 1), 1).shape == none.shape


@pytest.mark.parametrize("label", [-1, 37, 2**40])
def test_training_labels_of_no_class_are_errors(backend: cpu.CpuBackend, label: int) -> None:
    """The operation says it better; here nothing outside the array may be read."""
    x, labels = arrays((5, 37), 1)[0], np.array([0, 1, 36, 2, 3])
    _, kept = backend.cross_entropy(x, labels, 0.0)
    if CORE is not None:
        labels[3] = label
        with pytest.raises(ValueError, match="number of no class"):
            backend.cross_entropy(x, labels, 0.0)
        with pytest.raises(ValueError, match="number of no class"):
            backend.cross_entropy_grad(np.float32(1), x, labels, kept, 0.0)


def test_training_rows_beyond_the_caches(backend: cpu.CpuBackend) -> None:
    """Large results are written past the caches, from any place in a line: the same bytes."""
    x, g = (np.resize(plain((n,)), (257, 65537)) for n in (10007, 20011))  # over 2**24 values
    p, logs = backend.softmax(x, 1), backend.log_softmax(x, 1)
    for name, *args in (
        ("softmax", x),
        ("softmax_grad", g, p),
        ("log_softmax", x),
        ("log_softmax_grad", g, logs),
    ):
        method = getattr(backend, name)
        parts = [method(*(a[rows] for a in args), 1) for rows in (slice(100), slice(100, None))]
        assert method(*args, 1).tobytes() == b"".join(a.tobytes() for a in parts), name


def test_training_kernels_do_not_depend_on_threads() -> None:
    x, labels = arrays((5000, 37), 1)[0], np.arange(5000) % 37
    weight = arrays((37,), 1)[0]
    results = []
    for count in (1, 2, 3):
        with forced(threads=count):
            y, mean, rstd = BACKEND.layer_norm(x, weight, weight, 1e-5)
            gradients = BACKEND.layer_norm_grad(y, x, weight, mean, rstd)
            losses, kept = BACKEND.cross_entropy(x, labels, 0.1)
            scores = BACKEND.cross_entropy_grad(weight[0], x, labels, kept, 0.1)
            made = (y, mean, rstd, *gradients, losses, kept, scores, BACKEND.log_softmax(x, 1))
            results.append([a.tobytes() for a in made])
    assert results[0] == results[1] == results[2]


def test_bfloat16_around_every_tie(backend: cpu.CpuBackend) -> None:
    """Both sides of the tie above every bfloat16, infinities and NaN among them."""
    upper = np.arange(1 << 16, dtype=np.uint32)[:, None] << np.uint32(16)
    x = (upper | np.array([0, 0x7FFF, 0x8000, 0x8001], np.uint32)).view(np.float32)
    with np.errstate(invalid="ignore"):
        expected = x.astype(ml_dtypes.bfloat16).astype(np.float32)
    assert_bytes(backend.bfloat16_values(x), expected, "bfloat16")
