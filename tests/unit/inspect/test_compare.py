"""compare_layers: figures by hand, and models left as they were."""

import copy
import math

import numpy as np
import pytest

import extensor.nn as nn
from extensor.autograd.tensor import ExTensor
from extensor.inspect import compare_layers


class Scale(nn.Module):
    """x times a parameter, called ``times`` times."""

    def __init__(self, value, times=1, twice=False):
        self.weight = nn.Parameter(np.asarray(value, np.float32))
        self.twice = twice
        self.times = times

    def forward(self, x):
        y = x * self.weight
        return (y, [y]) if self.twice else y


class Repeat(nn.Module):
    def __init__(self, value, times):
        self.inner, self.times = Scale(value), times

    def forward(self, x):
        for _ in range(self.times):
            x = self.inner(x)
        return x


def tensor(values):
    return ExTensor(np.asarray(values, np.float32))


def net(rng=0):
    rng = nn.init.as_rng(rng)
    return nn.Sequential(
        conv=nn.Conv2d(1, 8, 3, padding=1, rng=rng),
        relu=nn.ReLU(),
        flat=nn.Flatten(),
        hidden=nn.Linear(8 * 64, 64, rng=rng),
        drop=nn.Dropout(0.5, rng=rng),
        head=nn.Linear(64, 10, rng=rng),
    )


def image():
    return tensor(np.random.default_rng(1).standard_normal((4, 1, 8, 8)))


def test_figures_by_hand():
    x = tensor([1.0, 2.0, -2.0])
    rows = compare_layers(Scale([1.0, 1.0, 0.0]), Scale([1.0, 1.0, 1.0]), x).rows
    (row,) = [r for r in rows if r.layer == "(output)"]
    assert row.kind == "Scale"
    assert row.mse == pytest.approx(4 / 3)
    assert row.cosine == pytest.approx(5 / (math.sqrt(5) * 3))
    assert row.sqnr_db == pytest.approx(10 * math.log10(9 / 4))
    assert row.saturated is None and row.flushed is None


@pytest.mark.parametrize(
    ("mine", "theirs", "cosine", "sqnr"),
    [
        (1.0, 1.0, 1.0, math.inf),
        (0.0, 0.0, 1.0, math.inf),
        (0.0, 1.0, 0.0, 0.0),
        (1.0, 0.0, 0.0, -math.inf),
        (-1.0, 1.0, -1.0, 10 * math.log10(1 / 4)),
    ],
)
def test_zeros_and_equals(mine, theirs, cosine, sqnr):
    row = compare_layers(Scale(mine), Scale(theirs), tensor([1.0, -2.0])).rows[-1]
    assert row.cosine == pytest.approx(cosine) and row.sqnr_db == pytest.approx(sqnr)


def test_nan_shows():
    row = compare_layers(Scale(math.nan), Scale(1.0), tensor([1.0, 2.0])).rows[-1]
    assert math.isnan(row.mse) and math.isnan(row.cosine) and math.isnan(row.sqnr_db)


def test_infinity_shows():
    row = compare_layers(Scale(math.inf), Scale(1.0), tensor([1.0, 2.0])).rows[-1]
    assert row.mse == math.inf and row.sqnr_db == -math.inf and math.isnan(row.cosine)
    row = compare_layers(Scale(math.inf), Scale(math.inf), tensor([1.0, 2.0])).rows[-1]
    assert math.isnan(row.mse) and math.isnan(row.sqnr_db)


def test_a_quantized_model_beside_its_reference():
    reference = net()
    model = copy.deepcopy(reference)
    nn.apply_recipe(model, "mxfp4_all")
    comparison = compare_layers(model, reference, image())
    rows = {row.layer: row for row in comparison.rows}
    assert list(rows) == ["conv", "hidden", "head", "(output)"]
    for name in ("conv", "hidden", "head"):
        row = rows[name]
        assert 0.9 < row.cosine < 1.0 and 5 < row.sqnr_db < 30
        assert 0.0 <= row.saturated < 0.05 and 0.0 < row.flushed < 0.3
    assert rows["(output)"].sqnr_db == rows["head"].sqnr_db
    better = copy.deepcopy(reference)
    nn.apply_recipe(better, "mxfp8_nvidia")
    for row in compare_layers(better, reference, image()).rows:
        assert row.sqnr_db > rows[row.layer].sqnr_db + 5


def test_an_exact_copy_is_exact():
    reference = net()
    for row in compare_layers(copy.deepcopy(reference), reference, image()).rows:
        assert row.sqnr_db == math.inf and row.mse == 0.0 and row.cosine == pytest.approx(1.0)


def test_both_models_are_left_as_they_were():
    reference, model = net(), net()
    state = nn.apply_recipe(model, "mxfp4_all")
    model(image())
    model.head.eval()
    before = dict(state.telemetry)
    contexts = [layer.quant for _, layer in nn.gemm_layers(model)]
    compare_layers(model, reference, image())
    assert dict(state.telemetry) == before
    assert all(a.quant is b for (_, a), b in zip(nn.gemm_layers(model), contexts, strict=True))
    assert model.training and model.drop.training and not model.head.training
    assert all(m.training for m in reference.modules())
    assert all(not m._hooks for net_ in (model, reference) for m in net_.modules())
    assert model.drop.draws.tolist()[1] == 1  # the one call in training above
    assert all(p.grad is None for p in model.parameters())


def test_models_are_left_as_they_were_after_an_error():
    reference, model = net(), net()
    with pytest.raises(ValueError, match="Conv2d: expected"):
        compare_layers(model, reference, tensor([[1.0]]))
    assert model.training and not any(m._hooks for m in reference.modules())


def test_calls_add_up():
    x = tensor([1.0, 1.0])
    (inner, output) = compare_layers(Repeat(2.0, 2), Repeat(1.0, 2), x).rows
    assert inner.layer == "inner" and inner.mse == (1 + 1 + 9 + 9) / 4
    assert output.mse == 9.0


def test_outputs_inside_tuples_and_lists_count():
    row = compare_layers(Scale(2.0, twice=True), Scale(1.0, twice=True), tensor([1.0])).rows[-1]
    assert row.mse == 1.0 and row.layer == "(output)"


def test_several_inputs():
    class Add(nn.Module):
        def forward(self, a, b):
            return a + b

    rows = compare_layers(Add(), Add(), (tensor([1.0]), tensor([2.0]))).rows
    assert [row.layer for row in rows] == ["(output)"]


def test_the_table_as_text():
    text = str(compare_layers(Repeat(2.0, 1), Repeat(1.0, 1), tensor([1.0])))
    assert text.splitlines() == [
        "layer       kind    cosine        MSE  SQNR dB  saturated  flushed",
        "inner      Scale  1.000000  1.000e+00     0.00          -        -",
        "(output)  Repeat  1.000000  1.000e+00     0.00          -        -",
    ]


def test_what_it_refuses():
    x = tensor([1.0, 2.0])
    with pytest.raises(TypeError, match="batch: expected an ExTensor or a tuple"):
        compare_layers(Scale(1.0), Scale(1.0), [x])
    with pytest.raises(TypeError, match="batch"):
        compare_layers(Scale(1.0), Scale(1.0), ())
    with pytest.raises(ValueError, match=r"same layers, got \['inner'\] in one only"):
        compare_layers(Repeat(1.0, 1), Scale(1.0), x)
    with pytest.raises(ValueError, match=r"expected an output of shape \(2,\) .* got \(2, 2\)"):
        compare_layers(Scale([[1.0], [1.0]]), Scale(1.0), x)
    with pytest.raises(
        ValueError, match="inner: expected 1 outputs as the reference has, got more"
    ):
        compare_layers(Repeat(1.0, 2), Repeat(1.0, 1), x)
    with pytest.raises(ValueError, match="inner: expected 2 outputs as the reference has, got 1"):
        compare_layers(Repeat(1.0, 1), Repeat(1.0, 2), x)


def test_isolated_layers_show_their_own_error():
    class Chain(nn.Module):
        def __init__(self, *values):
            self.parts = nn.ModuleList([Scale(v) for v in values])

        def forward(self, x):
            for part in self.parts:
                x = part(x)
            return x

    x, exact, model = tensor([1.0, -2.0]), Chain(2.0, 3.0, 4.0), Chain(2.0, 3.3, 4.0)
    rows = {r.layer: r for r in compare_layers(model, exact, x, isolated=True).rows}
    assert list(rows) == ["parts.0", "parts.1", "parts.2", "(output)"]
    assert rows["parts.0"].sqnr_db == rows["parts.2"].sqnr_db == math.inf
    assert rows["parts.1"].sqnr_db == pytest.approx(20.0, abs=1e-3)
    assert rows["(output)"].sqnr_db == pytest.approx(20.0, abs=1e-3)
    rows = {r.layer: r for r in compare_layers(model, exact, x).rows}
    assert rows["parts.2"].sqnr_db == pytest.approx(20.0, abs=1e-3)
    assert not any(m._hooks or m._pre_hooks for c in (exact, model) for m in c.modules())


def test_isolated_counts_are_one_call_s():
    reference = net()
    model = copy.deepcopy(reference)
    nn.apply_recipe(model, "mxfp4_all")
    own, whole = (compare_layers(model, reference, image(), isolated=i).rows for i in (True, False))
    assert own[0] == whole[0]  # the first layer has no errors before it
    assert own[1].sqnr_db > whole[1].sqnr_db and own[-1] == whole[-1]
    assert all(0 <= row.flushed < 0.5 for row in own[:3])
