"""Values on their grid, by hand; the figure that shows them."""

import math
import sys

import numpy as np
import pytest

import extensor as et
from extensor.formats import FORMATS
from extensor.inspect import plot
from extensor.inspect.grid import grid_values

pytestmark = pytest.mark.host


def values(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def test_values_in_units_of_their_scale_by_hand():
    x = np.float32([[1.0, -2.2, 6.0, 0.0], [0.5, 1.5, 3.0, 0.1]])
    seen = grid_values(x, et.QuantSpec("mxfp4", tile=(1, 4)))
    # floor scales: 1 for 6, 2^-1 for 3
    np.testing.assert_allclose(seen.scaled, [1, -2.2, 6, 1, 3, 6, 0.2], rtol=1e-6)
    assert seen.zeros == 1 / 8
    used = {value: share for value, share in seen.shares() if share}
    assert used == pytest.approx({-2: 1 / 7, 0: 1 / 7, 1: 2 / 7, 3: 1 / 7, 6: 2 / 7})


PLAIN = [name for name, row in FORMATS.items() if not row.outliers]


@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize(
    ("shape", "axis"), [((6, 70), 1), ((70, 6), 0), ((3, 40, 5), 1), ((50,), 0)]
)
def test_codes_stand_for_the_decoded_values(name, shape, axis):
    """The code's value times the scale, value / scaled, is what dequantizing gives."""
    x, spec = values(*shape), et.QuantSpec(name, axis=axis)
    seen = grid_values(x, spec)
    decoded = et.from_numpy(x).quantize(spec).dequantize().numpy()
    order = ((axis - 1) % x.ndim, axis)
    if x.ndim > 1:
        x, decoded = np.moveaxis(x, order, (-2, -1)), np.moveaxis(decoded, order, (-2, -1))
    scale = x.reshape(-1) / seen.scaled
    found = np.asarray(seen.element.values)[seen.codes] * scale
    np.testing.assert_allclose(found, decoded.reshape(-1), rtol=2e-6, atol=1e-30)
    assert sum(share for _, share in seen.shares()) == pytest.approx(1.0)


@pytest.mark.parametrize("spec", [et.QuantSpec("outlier"), et.QuantSpec("int8", symmetric=False)])
def test_formats_with_more_than_codes_and_scales_are_refused(spec):
    with pytest.raises(ValueError, match=r"sqnr\(\) measures it"):
        grid_values(values(4, 64), spec)


def heavy(*shape):
    x = np.random.default_rng(0).standard_t(3, shape).astype(np.float32)
    return et.from_numpy(x)


def test_a_panel_for_each_format_and_the_bars():
    x = heavy(64, 256)
    names = [name for name in FORMATS if name != "outlier"]
    figure = plot(x, *names)
    *panels, bars = figure.axes
    assert [axes.get_title("left").split()[0] for axes in panels] == names
    for name, axes, text in zip(names, panels, bars.texts, strict=True):
        q, stats = x.backend.quantize(x.data, et.QuantSpec(name).resolve(2))
        shown = axes.get_title("right")
        assert f"saturated {stats.saturated / stats.count:.2%}" in shown
        assert f"become zero {stats.flushed / stats.count:.2%}" in shown
        bits = f"{8 * q.nbytes / x.size:.3g} bits"
        assert text.get_text() == f"{name}: {et.inspect.sqnr(x, name):.1f} dB, {bits}"
    widths = [patch.get_width() for patch in bars.patches]
    assert widths == pytest.approx([et.inspect.sqnr(x, name) for name in names])
    (ticks,) = bars.lines
    normal = [et.inspect.normal_sqnr(et.QuantSpec(name)) for name in names]
    assert list(ticks.get_xdata()) == pytest.approx(normal)


def coloured(axes, name):
    """Sum of the heights of the histogram drawn under a name."""
    (stairs,) = [p for p in axes.patches if p.get_label() == name]
    return float(np.sum(stairs.get_data().values))


def test_colours_mark_what_saturates_and_what_becomes_zero():
    flushed = np.full((1, 32), 0.1, np.float32)
    flushed[0, 0] = 6.0
    axes = plot(et.from_numpy(flushed), "mxfp4").axes[0]
    assert coloured(axes, "become zero") > 0 and coloured(axes, "saturated") == 0
    axes = plot(et.full((1, 32), 7.5), "mxfp4").axes[0]
    assert coloured(axes, "saturated") > 0 and coloured(axes, "become zero") == 0


def test_the_figure_is_a_picture_and_pyplot_does_not_know_it(tmp_path):
    figure = plot(heavy(4, 64).to("bfloat16"), et.QuantSpec("mxfp4", transform=et.Hadamard(32)))
    figure.savefig(tmp_path / "x.png")
    assert figure._repr_png_()[:4] == b"\x89PNG" == (tmp_path / "x.png").read_bytes()[:4]
    assert (
        "matplotlib.pyplot" not in sys.modules or not sys.modules["matplotlib.pyplot"].get_fignums()
    )


@pytest.mark.parametrize(
    ("x", "formats", "error", "message"),
    [
        (et.zeros((2, 32)), ["mxfp4"], ValueError, "zeros only"),
        (et.full((2, 32), math.nan), ["mxfp4"], ValueError, "NaN or Inf"),
        (et.ones((2, 32)), [], ValueError, "expected formats, got none"),
        (et.ones((2, 32)), ["mxfp5"], ValueError, "mxfp4"),
        (et.ones((2, 32)).to_mxfp4(), ["mxfp4"], TypeError, "made from"),
        (et.ones((2, 32)), ["outlier"], ValueError, "exact outliers"),
        (
            et.ones((2, 32)),
            [et.QuantSpec("mxfp4", rounding="stochastic")],
            ValueError,
            "rounding to nearest",
        ),
    ],
)
def test_what_it_refuses(x, formats, error, message):
    with pytest.raises(error, match=message):
        plot(x, *formats)


def test_without_matplotlib_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'extensor\[train\]'"):
        plot(et.ones((2, 32)), "mxfp4")
