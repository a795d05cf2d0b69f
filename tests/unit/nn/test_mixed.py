"""Mixed precision: predictions against measured losses, the choice, packing by layer."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

import extensor as et
from extensor import nn
from extensor.nn.mixed import _error

SPECS = [et.QuantSpec(name) for name in ("mxfp4", "mxfp6_e2m3", "mxfp8_e4m3")]


def trained() -> tuple[nn.Module, list[et.ExTensor]]:
    """A classifier near its optimum: labels are drawn from its own probabilities."""
    rng = np.random.default_rng(0)
    model = nn.Sequential(
        nn.Linear(64, 64, rng=rng), nn.ReLU(), nn.Linear(64, 64, rng=rng), nn.Tanh(),
        nn.Linear(64, 8, rng=rng),
    )  # fmt: skip
    for layer, scale in zip((model[0], model[2], model[4]), (4.0, 1.0, 6.0), strict=True):
        layer.weight = nn.Parameter(scale * layer.weight.numpy())
    return model, [et.ExTensor(rng.standard_normal((64, 65)).astype(np.float32)) for _ in range(40)]


def loss(model: nn.Module, batch: et.ExTensor) -> et.ExTensor:
    """Cross-entropy with labels that the exact model's probabilities give; column 64 draws them."""
    exact, _ = trained()
    scores = model(batch[:, :64])
    with et.no_grad():
        sums = np.cumsum(et.softmax(exact(batch[:, :64])).numpy(), axis=1)
    normal = batch.numpy()[:, 64]
    labels = (sums < ((np.argsort(np.argsort(normal)) + 0.5) / len(normal))[:, None]).sum(1)
    return et.cross_entropy(scores, et.ExTensor(labels.astype(np.int64)))


def test_blocks_lie_in_rows_as_in_the_layer_that_is_stored() -> None:
    """Each row has a power of two of its own: exact in blocks of rows, not of columns."""
    layer = nn.Linear(64, 8, bias=False, rng=0)
    values = np.ldexp(np.ones((8, 64), np.float32), np.arange(8)[:, None])
    layer.load_state_dict({"weight": values})
    batches = [et.randn(4, 64, seed=seed) for seed in range(3)]
    for axis in (0, 1):
        (row,) = nn.loss_changes(
            layer, batches, lambda m, x: m(x).square().mean(), [et.QuantSpec("mxfp4", axis=axis)]
        )
        assert row.change == 0


def test_predicted_changes_are_the_measured_ones() -> None:
    model, batches = trained()
    rows = nn.loss_changes(model, batches, loss, SPECS[:2], count=64)
    assert [row.path for row in rows] == ["0", "0", "2", "2", "4", "4"]
    rng = np.random.default_rng(9)
    x = et.ExTensor(rng.standard_normal((20000, 64)).astype(np.float32))
    with et.no_grad():
        p = et.softmax(model(x))
        measured = [
            et.kl_div(et.log_softmax(nn.quantize_layers(model, {row.path: row.spec})(x)), p,
                      "batchmean").item()
            for row in rows
        ]  # fmt: skip
    for row, true in zip(rows, measured, strict=True):
        assert 0.4 * true < row.change < 2.5 * true, (row, true)
    predicted = [row.change for row in rows]
    assert np.argmax(predicted[::2]) == np.argmax(measured[::2])
    assert all(p.grad is None and p.requires_grad for p in model.parameters())


def test_the_rounding_errors_are_those_of_the_packed_layers() -> None:
    layer = nn.Sequential(nn.Conv2d(32, 64, 3, rng=0))
    for spec in SPECS:
        error, nbytes = _error(layer[0], spec)
        packed = nn.quantize_layers(layer, {"0": spec})[0].weight
        exact = layer[0].weight.numpy().reshape(64, -1)
        assert nbytes == packed.nbytes
        np.testing.assert_array_equal(error.numpy(), packed.dequantize().numpy() - exact)


def test_only_weights_of_layers_get_gradients_meanwhile() -> None:
    model, batches = trained()
    flags: set[tuple[bool, ...]] = set()

    def seen(model: nn.Module, batch: et.ExTensor) -> et.ExTensor:
        flags.add(tuple(p.requires_grad for p in model.parameters()))
        return loss(model, batch)

    model[0].bias.requires_grad = False
    nn.loss_changes(model, batches[:2], seen, SPECS[:1])
    assert flags == {(True, False) * 3}
    assert [p.requires_grad for p in model.parameters()] == [True, False, True, True, True, True]


def test_the_choice_is_the_best_of_all_mixes() -> None:
    rng = np.random.default_rng(1)
    rows = []
    for path in "abcde":
        scale = float(rng.uniform(0.1, 10.0))
        sizes = int(rng.integers(1, 5)) * np.array([4, 6, 8])
        rows += [
            nn.LossChange(path, spec, int(size), scale * c)
            for spec, size, c in zip(SPECS, sizes, (1.0, 0.06, 0.004), strict=True)
        ]
    by_path = [[row for row in rows if row.path == path] for path in "abcde"]
    for budget in range(
        sum(of[0].nbytes for of in by_path), sum(of[2].nbytes for of in by_path) + 1
    ):
        mixes = [m for m in itertools.product(*by_path) if sum(r.nbytes for r in m) <= budget]
        best = min(sum(row.change for row in mix) for mix in mixes)
        chosen = nn.choose_formats(rows, budget)
        taken = [row for row in rows if chosen[row.path] is row.spec]
        assert sum(row.nbytes for row in taken) <= budget
        # Within one layer's step of the best mix, which may split no layer.
        assert sum(row.change for row in taken) <= best + max(of[0].change for of in by_path)
    assert {s.format for s in nn.choose_formats(rows, 10**6).values()} == {"mxfp8_e4m3"}
    with pytest.raises(ValueError, match="the smallest formats take"):
        nn.choose_formats(rows, 3)


def test_layers_are_packed_each_by_its_own_spec() -> None:
    model, _ = trained()
    mixed = nn.quantize_layers(model, {"0": SPECS[0], "4": SPECS[2]})
    kinds = {path: layer.weight.dtype.name for path, layer in nn.gemm_layers(mixed)}
    assert kinds == {"0": "mxfp4", "2": "float32", "4": "mxfp8_e4m3"}
    x = et.randn(4, 64, seed=0)
    with et.no_grad():
        w = model[0].weight.quantize(et.QuantSpec("mxfp4")).dequantize()
        expected = et.linear(x, w, model[0].bias).numpy()
        np.testing.assert_allclose(mixed[0](x).numpy(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m, b: nn.loss_changes(m, b[:1], loss, SPECS), "expected 2 batches or more"),
        (lambda m, b: nn.loss_changes(m, b, loss, []), "expected float layers and specs"),
        (lambda m, b: nn.quantize_layers(m, {"9": SPECS[0]}), r"no layers \['9'\]"),
        (
            lambda m, b: nn.quantize_layers(
                nn.quantize_layers(m, {"0": SPECS[0]}), {"0": SPECS[0]}
            ),
            "already mxfp4",
        ),
    ],
)
def test_what_cannot_be(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(*trained())
