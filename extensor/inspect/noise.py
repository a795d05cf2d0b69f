"""Quantization noise of one tensor: the signal-to-quantization-noise ratio in decibels."""

from __future__ import annotations

import functools
import math

from extensor.autograd.mode import no_grad
from extensor.autograd.tensor import ExTensor
from extensor.quant.spec import QuantSpec

__all__ = ["decibels", "normal_sqnr", "sqnr"]

NORMAL_SHAPE = (512, 1024)
"""Half a million values: the ratio of other draws differs by about 0.02 dB."""


def decibels(signal: float, noise: float) -> float:
    """A ratio of two powers on the decibel scale: 10 log10(signal / noise).

    Args:
        signal: the sum of the squared values, 0 or more.
        noise: the sum of the squared errors, 0 or more.

    Returns:
        Infinite without noise, minus infinite for infinite noise or without signal, NaN for NaN.

    Source: Gray and Neuhoff, "Quantization", IEEE Trans. Inf. Theory 44(6), 1998, section II.

    >>> et.inspect.decibels(100.0, 1.0)
    20.0
    """
    if noise == 0.0:
        return math.inf
    if signal == 0.0 or noise == math.inf:
        return -math.inf
    return 10.0 * math.log10(signal / noise)


def sqnr(x: ExTensor, quantized: ExTensor | QuantSpec | str, *, seed: int | None = None) -> float:
    """Signal-to-quantization-noise ratio: how far a tensor's values are above their errors.

    10 log10(sum x^2 / sum (x - q)^2), summed in float64. 20 dB is a root-mean-square error of a
    tenth of the root-mean-square value; each bit of mantissa adds about 6 dB.

    Args:
        x: the source, dense floats of any shape.
        quantized: x quantized before, blocked or dense, of x's shape; or a spec or the name of a
            format, by which x is quantized here.
        seed: names the random bits, for a spec with stochastic rounding.

    Returns:
        Decibels; infinite where every value is exact.

    Raises:
        TypeError: if ``x`` is no dense float tensor, or ``quantized`` none of the above.
        ValueError: for another shape, an unknown format, NaN or Inf in ``x``, NaN in ``quantized``,
            a tensor of zeros (no signal) or without values; for a missing or superfluous seed.

    Source: Gray and Neuhoff, "Quantization", IEEE Trans. Inf. Theory 44(6), 1998, section II.

    >>> x = et.randn(64, 1024, seed=0)
    >>> round(et.inspect.sqnr(x, "nvfp4"), 1), round(et.inspect.sqnr(x, x.to_mxfp8()), 1)
    (20.4, 30.6)
    """
    check_source("sqnr", x)
    with no_grad():
        exact = x.detach().to("float64")
        coded = _coded(x, quantized, seed).to("float64")
        signal = float((exact * exact).sum().item())
        noise = float(((exact - coded) ** 2).sum().item())
    if not math.isfinite(signal):
        raise ValueError(
            "sqnr: expected finite values in x, got NaN or Inf; find them with et.isfinite(x)"
        )
    if signal == 0.0:
        raise ValueError(
            "sqnr: expected values other than zero in x, got zeros only: without a signal there is "
            "no ratio; compare the tensors with == instead"
        )
    if math.isnan(noise):
        raise ValueError(
            "sqnr: expected numbers in the quantized tensor, got NaN: it is of another source, or "
            "x has values beyond float32"
        )
    return decibels(signal, noise)


def check_source(name: str, x: object) -> None:
    """Refuse what is no tensor of dense floats with values."""
    if not isinstance(x, ExTensor):
        raise TypeError(
            f"{name}: expected x as an ExTensor, got {type(x).__name__}; et.from_numpy(x) makes one"
        )
    if x.is_blocked or x.dtype.kind != "float":
        hint = "pass the tensor that it was made from" if x.is_blocked else "convert it first"
        raise TypeError(f"{name}: expected x in dense floats, got {x.dtype.name}; {hint}")
    if not x.size:
        raise ValueError(f"{name}: expected values in x, got shape {x.shape}")


def as_spec(name: str, given: object) -> QuantSpec:
    """A spec, or a format's spec by the format's name."""
    if isinstance(given, QuantSpec):
        return given
    if isinstance(given, str):
        return QuantSpec(given)
    raise TypeError(f"{name}: expected a format's name or a QuantSpec, got {type(given).__name__}")


def _coded(x: ExTensor, quantized: object, seed: int | None) -> ExTensor:
    """The values that the quantized tensor stands for."""
    if not isinstance(quantized, ExTensor):
        return x.detach().quantize(as_spec("sqnr", quantized), seed).dequantize()
    if seed is not None:
        raise ValueError("sqnr: seed goes with a spec; the tensor given is quantized already")
    if quantized.shape != x.shape:
        raise ValueError(
            f"sqnr: expected a quantized tensor of x's shape {x.shape}, got {quantized.shape}"
        )
    return quantized.detach().dequantize()


@functools.cache
def normal_sqnr(spec: QuantSpec) -> float:
    """What a spec keeps of normally distributed values: the yardstick for a real tensor.

    Args:
        spec: of blocks along the last axis or the one before; rounding to nearest.

    Returns:
        `sqnr` in decibels of `NORMAL_SHAPE` values that are always the same.

    Raises:
        ValueError: for stochastic rounding or running statistics.

    >>> round(et.inspect.normal_sqnr(et.QuantSpec("mxfp4")), 1)
    18.8
    """
    return sqnr(ExTensor.randn(NORMAL_SHAPE, seed=0, device="cpu"), spec)
