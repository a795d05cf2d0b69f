"""Quantizing a trained model: what the copy computes and holds, and what is refused."""

from __future__ import annotations

import copy
import re

import numpy as np
import pytest

import extensor as et
from extensor import nn
from extensor.io import CheckpointError, load_checkpoint, save_checkpoint
from extensor.quant.recipe import LayerRecipe, Rule
from extensor.quant.schemes import FLOAT32, SCHEMES, Scheme
from extensor.quant.spec import QuantSpec

STATIC = [name for name, scheme in SCHEMES.items() if scheme.range is not None]


class Net(nn.Module):
    """Convolutions, one of them grouped, a norm and two linear layers, one without a bias."""

    def __init__(self, rng: int = 0) -> None:
        made = nn.init.as_rng(rng)
        self.conv = nn.Conv2d(2, 8, 3, padding=1, rng=made)
        self.norm = nn.BatchNorm2d(8)
        self.depth = nn.Conv2d(8, 8, 3, groups=4, rng=made)
        self.hidden = nn.Linear(8 * 16, 20, rng=made)
        self.head = nn.Linear(20, 5, bias=False, rng=made)
        self.head.role = "head"

    def forward(self, x: et.ExTensor) -> et.ExTensor:
        x = et.relu(self.norm(self.conv(x)))
        x = et.relu(self.depth(x))
        return self.head(et.relu(self.hidden(x.reshape(x.shape[0], -1))))


def images(n: int = 16, seed: int = 1) -> et.ExTensor:
    rng = np.random.default_rng(seed)
    return et.from_numpy(rng.standard_normal((n, 2, 6, 6)).astype(np.float32))


@pytest.mark.parametrize("name", SCHEMES)
def test_every_scheme_quantizes_saves_and_loads(name: str, tmp_path) -> None:
    model, x = Net(), images()
    before = {path: value.tobytes() for path, value in model.state_dict().items()}
    made = et.quantize_model(model, name, calibration=[images(8, 2), images(8, 3)])
    assert {path: value.tobytes() for path, value in model.state_dict().items()} == before
    assert all(layer.quant is None for _, layer in nn.gemm_layers(model))
    stored = nn.packed_layers(made)
    assert list(stored) == ["conv", "depth", "hidden"]  # the head is kept
    rows = {row.layer: row for row in et.compare_layers(made, model, x).rows}
    assert rows.keys() == {"conv", "norm", "depth", "hidden", "head", "(output)"}
    bits = SCHEMES[name].weights.row.element.bits
    floor = {4: 10.0, 6: 20.0, 8: 20.0}[bits]
    assert floor < rows["(output)"].sqnr_db < 60.0
    for path, layer in stored.items():
        weight, float_weight = layer.weight, dict(model.named_modules())[path].weight
        assert weight.shape == (float_weight.shape[0], float_weight.size // float_weight.shape[0])
        assert bits / 32 <= weight.nbytes / float_weight.nbytes < 2.5 * bits / 32
        assert (rows[path].flushed is None) == (SCHEMES[name].activations == "float32")

    path = tmp_path / "model.safetensors"
    et.save_quantized(path, made, {"note": 1})
    assert load_checkpoint(path).metadata["note"] == 1
    again = et.load_quantized(path, Net(rng=7))
    with et.no_grad():
        assert again.eval()(x).numpy().tobytes() == made.eval()(x).numpy().tobytes()
    second = tmp_path / "again.safetensors"
    et.save_quantized(second, again, {"note": 1})
    assert second.read_bytes() == path.read_bytes()
    twin = copy.deepcopy(made)
    with et.no_grad():
        assert twin(x).numpy().tobytes() == made(x).numpy().tobytes()


def test_what_is_stored_is_the_size_that_is_said() -> None:
    made = et.quantize_model(Net(), "int4_g32")
    # 20 rows of 128 values: 64 bytes of codes and 4 float16 scales a row
    assert nn.packed_layers(made)["hidden"].weight.nbytes == 20 * (64 + 8)
    # 8 rows of 18 values are one block each, stored without padding: 9 bytes and a scale
    assert nn.packed_layers(made)["conv"].weight.nbytes == 8 * (9 + 2)


def test_a_padded_block_and_a_whole_row_hold_the_same_values() -> None:
    model = Net()
    weight = et.from_numpy(model.conv.weight.numpy().reshape(8, 18))
    for name in ("int4_g32", "mxfp4", "nvfp4", "mxfp6"):
        made = nn.packed_layers(et.quantize_model(model, name))["conv"].weight
        padded = weight.quantize(SCHEMES[name].weights)
        assert made.dequantize().numpy().tobytes() == padded.dequantize().numpy().tobytes()
        assert made.nbytes <= padded.nbytes


def test_calibration_decides_what_saturates() -> None:
    model, x = Net().eval(), images(64)
    small = et.from_numpy(0.25 * x.numpy())
    wide, narrow = (et.quantize_model(model, "int8", [data]) for data in (x, small))
    rows = [{r.layer: r for r in et.compare_layers(m, model, x).rows} for m in (wide, narrow)]
    assert rows[0]["conv"].saturated == 0.0
    assert rows[1]["conv"].saturated is not None and rows[1]["conv"].saturated > 0.1
    assert rows[1]["(output)"].sqnr_db < rows[0]["(output)"].sqnr_db - 10


def test_an_outlier_in_calibration_is_what_percentile_and_mse_are_for() -> None:
    model, x = Net().eval(), images(1024)
    outlier = x.numpy().copy()
    outlier[0, 0, 0, 0] = 300.0
    errors = {}
    for name in ("int8", "int8_percentile", "int8_mse"):
        made = et.quantize_model(model, name, [et.from_numpy(outlier)])
        errors[name] = et.compare_layers(made, model, x).rows[0].sqnr_db
    assert errors["int8_percentile"] > errors["int8"] + 10
    # One value of n at a = 300 costs a^2 if clipped, n (2 a / 255)^2 / 12 if not: here n is small.
    assert errors["int8_mse"] >= errors["int8"]


def test_layers_are_kept_by_path_and_role() -> None:
    made = et.quantize_model(Net(), "mxfp8", keep=["@first", "dep*"])
    assert list(nn.packed_layers(made)) == ["hidden"]
    whole = Scheme("all", "the head too", QuantSpec("int8"), "float32", rules=())
    assert list(nn.packed_layers(et.quantize_model(Net(), whole)))[-1] == "head"


def test_tied_weights_part_ways() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            self.tokens = nn.Embedding(6, 32, 1.0, 0)
            self.head = nn.Linear(32, 6, bias=False)
            self.head.weight = self.tokens.weight

        def forward(self, x: et.ExTensor) -> et.ExTensor:
            return self.head(self.tokens(x))

    model, x = Tied(), et.from_numpy(np.arange(6))
    made = et.quantize_model(model, "int8", [x])
    assert made.head.weight.is_blocked and not made.tokens.weight.is_blocked
    row = et.compare_layers(made, model, x).rows[-1]
    assert 25 < row.sqnr_db < 60
    assert [r.layer for r in et.compare_layers(made, model, x).rows] == [
        "tokens",
        "head",
        "(output)",
    ]


def test_recipe_hooks_and_gradients_stay_behind() -> None:
    model, x = Net(), images()
    state = nn.apply_recipe(model, "mxfp4_all")
    seen: list[str] = []
    model.conv.register_forward_hook(lambda *_: seen.append("after"))
    model.conv.register_forward_pre_hook(lambda *_: seen.append("before"))
    model(x).sum().backward()
    assert seen == ["before", "after"]
    counts = dict(state.telemetry)
    made = et.quantize_model(model, "int8", [x])
    assert seen == ["before", "after"] and dict(state.telemetry) == counts
    assert model.conv.quant is state.layers["conv"] and model.conv.weight.grad is not None
    assert not any(m._hooks or m._pre_hooks for m in made.modules())
    assert all(p.grad is None for p in made.parameters())
    assert made.training and model.training


def test_it_runs_on_attention() -> None:
    model = nn.TransformerBlock(
        nn.MultiheadAttention(32, 4, causal=True, rng=0), nn.FeedForward(32, 128, rng=0)
    )
    x = et.from_numpy(np.random.default_rng(0).standard_normal((2, 7, 32)).astype(np.float32))
    for name in ("int8", "mxfp4", "nvfp4_weights"):
        made = et.quantize_model(model, name, [x])
        assert list(nn.packed_layers(made)) == [
            "attention.qkv",
            "attention.out",
            "feed_forward.up",
            "feed_forward.down",
        ]
        rows = {row.layer: row for row in et.compare_layers(made, model, x).rows}
        assert len(rows) == 7 and rows["(output)"].sqnr_db > 15


def broken(value: float) -> Net:
    model = Net()
    with et.no_grad():
        model.hidden.weight[0, 0] = value
    return model


class Half(Net):
    """Leaves a layer out."""

    def forward(self, x: et.ExTensor) -> et.ExTensor:
        return self.norm(self.conv(x))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: et.quantize_model(3, "int8"), TypeError, "expected a Module, got int"),
        (lambda: et.quantize_model(Net(), 3), TypeError, "expected a Scheme or the name of one"),
        (lambda: et.quantize_model(Net(), "int9"), ValueError, "did you mean 'int8'"),
        (lambda: et.quantize_model(Net(), "int8"), ValueError, "needs a calibration set"),
        (lambda: et.quantize_model(Net(), "int8", []), ValueError, "at least one batch"),
        (lambda: et.quantize_model(Net(), "int8", images()), TypeError, "got one tensor"),
        (lambda: et.quantize_model(Net(), "int8", [1]), TypeError, "batch 0: expected an ExTensor"),
        (
            lambda: et.quantize_model(Net(), "int8", [images(), images(0)]),
            ValueError,
            "batch 1: expected inputs, got shapes [(0, 2, 6, 6)]",
        ),
        (
            lambda: et.quantize_model(
                Net(), "mxfp8", [images(), et.from_numpy(np.full((1, 2, 6, 6), np.nan, np.float32))]
            ),
            ValueError,
            "calibration: batch 1 gives layer 'conv' inputs that are NaN or infinite",
        ),
        (
            lambda: et.quantize_model(Half(), "int8", [images()]),
            ValueError,
            "calibration never reached layer 'depth' and 1 more; use inputs",
        ),
        (
            lambda: et.quantize_model(Half(), "int8", [images()], keep=["depth"]),
            ValueError,
            "keep=('hidden',)",
        ),
        (
            lambda: et.quantize_model(Net(), "int8_weights", keep=["cnov"]),
            ValueError,
            "rule 'cnov' matches no layer; the model's layers: conv, depth, hidden, head",
        ),
        (
            lambda: et.quantize_model(Net(), "mxfp4", keep="conv"),
            TypeError,
            "keep: expected a list",
        ),
        (lambda: et.quantize_model(Net(), "mxfp4", keep=["*"]), ValueError, "no layer to quantize"),
        (lambda: et.quantize_model(nn.ReLU(), "mxfp4"), ValueError, "no layer to quantize"),
        (lambda: et.quantize_model(broken(np.inf), "mxfp4"), ValueError, "hidden: its weight has"),
        (
            lambda: et.quantize_model(et.quantize_model(Net(), "mxfp4"), "mxfp4"),
            ValueError,
            "conv: its weight is already mxfp4",
        ),
    ],
)
def test_what_it_refuses(call, error, message) -> None:
    with pytest.raises(error, match=re.escape(message)):
        call()


def test_a_model_of_one_layer(tmp_path) -> None:
    made = et.quantize_model(nn.Linear(32, 8, rng=0), "mxfp4_weights")
    et.save_quantized(tmp_path / "layer.safetensors", made)
    again = et.load_quantized(tmp_path / "layer.safetensors", nn.Linear(32, 8, rng=1))
    x = et.ones((2, 32))
    assert again(x).numpy().tobytes() == made(x).numpy().tobytes()


def test_the_wrong_file_or_model(tmp_path) -> None:
    path = tmp_path / "q.safetensors"
    with pytest.raises(ValueError, match="no layer is quantized; use save_checkpoint"):
        et.save_quantized(path, Net())
    made = et.quantize_model(Net(), "int8", [images()])
    with pytest.raises(ValueError, match="expected no key 'quantized'"):
        et.save_quantized(path, made, {"quantized": 1})
    assert not path.exists()
    with pytest.raises(FileNotFoundError):
        et.load_quantized(path, Net())
    save_checkpoint(path, Net().state_dict())
    with pytest.raises(CheckpointError, match="expected a file of save_quantized, got another"):
        et.load_quantized(path, Net())
    et.save_quantized(path, made)
    with pytest.raises(ValueError, match="the file has a layer 'conv', the model has 0; build"):
        et.load_quantized(path, nn.Sequential(nn.Linear(8, 8)))
    other = Net()
    other.hidden = nn.Linear(8 * 16, 21)
    with pytest.raises(ValueError, match=r"hidden: expected a weight of shape \(21, 128\), got"):
        et.load_quantized(path, other)
    other = Net()
    other.extra = nn.LayerNorm(3)
    with pytest.raises(ValueError, match=r"extra\.weight: expected float32 of shape \(3,\)"):
        et.load_quantized(path, other)
    content = load_checkpoint(path)
    content.metadata["quantized"]["layers"]["conv"].pop("static_scale")
    save_checkpoint(path, content.tensors, content.metadata)
    with pytest.raises(CheckpointError, match="a damaged description: KeyError"):
        et.load_quantized(path, Net())


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"range": "median"}, ValueError, "no range named 'median'"),
        ({"range": "minmax", "activations": "float32"}, ValueError, "needs activations to quant"),
        ({"range": "minmax", "activations": QuantSpec("mxfp4")}, ValueError, "static scale"),
        ({"activations": "float8"}, ValueError, "expected a QuantSpec, 'float32' or"),
        (
            {"weights": QuantSpec("mxfp4", rounding="stochastic")},
            ValueError,
            "expected rounding to",
        ),
        ({"percentile": 20.0}, ValueError, "percentile: expected a number in (50, 100], got 20.0"),
        (
            {"rules": (Rule("x", LayerRecipe.uniform("bfloat16")),)},
            ValueError,
            "a rule can only keep layers in float32",
        ),
    ],
)
def test_schemes_are_checked(change, error, message) -> None:
    fields = {
        "name": "mine",
        "doc": "a test",
        "weights": QuantSpec("int8"),
        "activations": QuantSpec("int8", tile="tensor", symmetric=False),
    }
    Scheme(**fields)
    with pytest.raises(error, match=re.escape(message)):
        Scheme(**{**fields, **change})


def test_the_table_of_schemes() -> None:
    assert STATIC and len(SCHEMES) > 20
    for name, scheme in SCHEMES.items():
        assert scheme.name == name and scheme.doc
        assert scheme.recipe().layers.dgrad == FLOAT32.dgrad


def test_recurrent_layers() -> None:
    model = nn.LSTM(8, 32, rng=0)
    x = et.from_numpy(np.random.default_rng(0).standard_normal((5, 3, 8)).astype(np.float32))
    made = et.quantize_model(model, "int8", [x])
    assert list(nn.packed_layers(made)) == ["cells.0.input", "cells.0.hidden"]
    rows = {row.layer: row for row in et.compare_layers(made, model, x, isolated=True).rows}
    assert rows["cells.0.hidden"].sqnr_db > 30 and rows["(output)"].sqnr_db > 25
