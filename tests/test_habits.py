"""Habits from PyTorch and numpy: a familiar name works, or its error says what to write."""

from __future__ import annotations

import ast
import copy
import pickle
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import extensor as et
from extensor import nn
from extensor.torch_names import TORCH_NAMES

ROOT = Path(__file__).resolve().parent.parent
OWNERS: dict[str, Any] = {
    "extensor": et,
    "ExTensor": et.ones(2, 2),
    "Module": nn.Linear(2, 2),
    "extensor.nn": et.nn,
    "extensor.autograd": et.autograd,
    "extensor.optim": et.optim,
}
ROWS = [(owner, name) for owner, names in TORCH_NAMES.items() for name in names]
CODE = re.compile(r"\b(et|nn|x|p|module|model)\.([A-Za-z_][\w.]*)")
STARTS = {"et": et, "nn": nn, "x": et.ones(2), "p": et.ones(2)}


@pytest.mark.parametrize(("owner", "name"), ROWS)
def test_a_name_that_is_not_here_says_what_to_write(owner: str, name: str) -> None:
    assert not hasattr(OWNERS[owner], name)
    with pytest.raises(AttributeError, match=f"no attribute '{name}'; write ") as caught:
        getattr(OWNERS[owner], name)
    assert caught.value.name == name and caught.value.obj is OWNERS[owner]


@pytest.mark.parametrize(("owner", "name"), ROWS)
def test_what_to_write_is_there(owner: str, name: str) -> None:
    for start, path in CODE.findall(TORCH_NAMES[owner][name]):
        found: Any = STARTS.get(start, OWNERS["Module"])
        for part in path.rstrip(".").split("."):
            found = getattr(found, part)


def test_the_page_has_the_table() -> None:
    rows = [
        f"| {'<br>'.join(f'`{prefix}{name}`' for name in names)} | {shown(instead)} |"
        for owner, prefix in (
            ("extensor", "torch."),
            ("ExTensor", "x."),
            ("Module", "module."),
            ("extensor.nn", "nn."),
            ("extensor.autograd", "autograd."),
            ("extensor.optim", "optim."),
        )
        for instead, names in by_answer(TORCH_NAMES[owner]).items()
    ]
    page = (ROOT / "docs" / "from-pytorch.md").read_text(encoding="utf-8")
    expected = "\n".join(["| PyTorch | write |", "| --- | --- |", *rows])
    assert expected in page, f"docs/from-pytorch.md: the table is\n{expected}"


def by_answer(names: dict[str, str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name, instead in names.items():
        found.setdefault(instead, []).append(name)
    return found


def shown(instead: str) -> str:
    """Code in backticks where all of it is code."""
    try:
        ast.parse(instead)
    except SyntaxError:
        return instead
    return instead if re.search(" (and|or) ", instead) else f"`{instead}`"


def test_names_of_nobody_are_plain_errors() -> None:
    for thing in OWNERS.values():
        with pytest.raises(AttributeError, match="no attribute 'no_such_name'$"):
            _ = thing.no_such_name
        assert not hasattr(thing, "__array_interface__")
        copied = copy.deepcopy(thing) if isinstance(thing, (et.ExTensor, nn.Module)) else None
        assert type(copied) in (type(thing), type(None))
    assert pickle.loads(pickle.dumps(OWNERS["ExTensor"])).tolist() == [[1.0, 1.0]] * 2


def test_completion_shows_public_names_only() -> None:
    shown = {name for name in dir(et) if not name.startswith("__")}
    assert not shown & {"Any", "TYPE_CHECKING", "annotations", "importlib", "math", "os", "sys"}
    assert {"ExTensor", "zeros", "mxfp4", "nn", "optim", "quant", "load"} <= shown
    assert all(hasattr(et, name) for name in shown)
    for module in (et.nn, et.optim, et.io, et.inspect, et.testing, et.quant):
        assert not any(name.startswith("_") for name in dir(module))
        assert set(module.__all__) <= set(dir(module))
    names = dir(et.ones(2))
    assert "view" in names and "__add__" in names
    assert not any(n.startswith("_") and not n.startswith("__") for n in names)


def test_short_forms_are_the_long_ones() -> None:
    x = et.randn(2, 6, seed=0)
    for name, dtype in (
        ("float", "float32"),
        ("double", "float64"),
        ("half", "float16"),
        ("bfloat16", "bfloat16"),
    ):
        assert getattr(x, name)().dtype is x.to(dtype).dtype
        assert (getattr(x, name)() == x.to(dtype)).all()
    assert x.float() is x and x.cpu() is x
    assert x.to_mxfp4(block_size=2).float().dtype is et.float32
    assert (x.view(3, -1) == x.reshape(3, -1)).all() and x.view((4, 3)).shape == (4, 3)
    assert et.cat is et.concatenate and et.cat([x, x], 1).shape == (2, 12)
    assert x.requires_grad_() is x and x.requires_grad
    assert not x.requires_grad_(False).requires_grad
    layer = nn.Linear(6, 2)
    assert layer.cpu() is layer and layer.requires_grad_(False) is layer
    assert not any(p.requires_grad for p in layer.parameters())
    q = x.quantize("mxfp4")
    assert q.dtype is et.mxfp4 and np.array_equal(q.codes, x.to_mxfp4().codes)


def test_without_a_gpu_cuda_says_so() -> None:
    if "cuda" in getattr(et.ones(2), "device", ""):
        pytest.skip("the default device is a GPU")
    for move in (lambda: et.ones(2).cuda(), lambda: nn.Linear(2, 2).cuda()):
        try:
            assert "cuda" in str(getattr(move(), "device", "cuda"))
        except RuntimeError as error:
            assert "cuda" in str(error)


@pytest.mark.parametrize("make", [et.zeros, et.ones, et.empty])
def test_shapes_as_torch_and_as_numpy_write_them(make: Any) -> None:
    assert make(2, 3).shape == make((2, 3)).shape == make([2, 3]).shape == (2, 3)
    assert make(shape=(2, 3)).shape == (2, 3) and make(()).shape == () and make(4).shape == (4,)
    assert make((2, 3), np.float64).dtype is make(2, 3, et.float64).dtype is et.float64
    assert make(2, 32, dtype="mxfp4").dtype is et.mxfp4
    with pytest.raises(TypeError, match="expected an int or a tuple of ints"):
        make((2, 3), 4)
    with pytest.raises(TypeError, match="beside dtype="):
        make(2, "int8", dtype="int8")
    with pytest.raises(TypeError, match="shape"):
        make()


def test_a_spec_takes_a_block_size_and_names_the_field_that_is_missing() -> None:
    spec = et.QuantSpec("mxfp4", block_size=16)  # type: ignore[call-arg]
    assert spec == et.QuantSpec("mxfp4", tile=(1, 16))
    assert et.QuantSpec("mxfp4", block_size=None) == et.QuantSpec("mxfp4")  # type: ignore[call-arg]
    for both in ({"tile": (1, 16)}, {"tile": "channel"}):
        with pytest.raises(TypeError, match="block_size or tile, not both"):
            et.QuantSpec("mxfp4", block_size=16, **both)
    with pytest.raises(TypeError, match="block_size or tile, not both"):
        et.QuantSpec("mxfp4", -1, (1, 16), block_size=16)  # type: ignore[call-arg]
    with pytest.raises((TypeError, ValueError), match="tile"):
        et.QuantSpec("mxfp4", block_size="16")  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="did you mean 'scale_rule'"):
        et.QuantSpec("mxfp4", scale_rul="floor")  # type: ignore[call-arg]


def test_saved_tensors_come_back_as_tensors(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    x = et.randn(4, 64, seed=0)
    given = {"q": x.to_nvfp4(), "half": x.bfloat16(), "count": et.arange(3), "array": x.numpy()}
    et.save(given, path)
    found = et.load(path)
    assert found.keys() == given.keys()
    assert all(isinstance(value, et.ExTensor) for value in found.values())
    assert found["q"].spec == given["q"].spec and found["q"].device == "cpu"
    for part in ("codes", "scales", "tensor_scale"):
        np.testing.assert_array_equal(getattr(found["q"], part), getattr(given["q"], part))
    for name in ("half", "count", "array"):
        assert (found[name] == found[name].from_numpy(np.asarray(given[name]))).all()
    with pytest.raises(TypeError, match="expected tensors by name, then a path"):
        et.save(path, given)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="expected a path after the tensors"):
        et.save(given, given)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="by name"):
        et.save(x, path)  # type: ignore[arg-type]


def test_loading_a_part_of_a_state() -> None:
    model = nn.Sequential(nn.Linear(4, 3, rng=0), nn.Linear(3, 2, rng=1))
    state = {path: et.ExTensor(value) for path, value in model.state_dict().items()}
    other = nn.Sequential(nn.Linear(4, 3, rng=2), nn.Linear(3, 2, rng=3))
    kept = other.state_dict()["1.bias"]
    part = {path: value for path, value in state.items() if path != "1.bias"}
    with pytest.raises(ValueError, match=r"1\.bias: expected float32 .* got nothing"):
        other.load_state_dict(part)
    names = other.load_state_dict(part | {"more": state["1.bias"]}, strict=False)
    assert names == (["1.bias"], ["more"])
    assert np.array_equal(other.state_dict()["1.bias"], kept)
    assert np.array_equal(other.state_dict()["0.weight"], model.state_dict()["0.weight"])
    before = other.state_dict()
    for wrong in ({"0.weight": et.zeros(2, 2)}, {"nothing": et.zeros(2)}, {}):
        with pytest.raises(ValueError, match="does not fit"):
            other.load_state_dict(part | wrong if "0.weight" in wrong else wrong, strict=False)
    after = other.state_dict()
    assert all(np.array_equal(before[path], after[path]) for path in before)


X4 = np.ones((2, 4, 3, 3))
LAYERS = [
    (nn.Linear(3, 2), X4),
    (nn.Conv2d(4, 2, 3), X4),
    (nn.BatchNorm2d(4), X4),
    (nn.BatchNorm2d(4).eval(), X4),
    (nn.LayerNorm(3), X4),
    (nn.RMSNorm(3), X4),
    (nn.GroupNorm(2, 4), X4),
    (nn.InstanceNorm(4), X4),
    (nn.LSTM(3, 2), X4[0]),
]


@pytest.mark.parametrize(("layer", "x"), LAYERS)
def test_float64_data_do_not_widen_a_float32_model(layer: nn.Module, x: Any) -> None:
    with pytest.raises(TypeError, match=r"got float64.*x\.float\(\)"):
        layer(et.from_numpy(x))
    y = layer(et.from_numpy(x).float())
    assert (y[0] if isinstance(y, tuple) else y).dtype is et.float32


@pytest.mark.parametrize(("layer", "x"), LAYERS)
def test_a_float64_model_goes_on(layer: nn.Module, x: Any) -> None:
    layer = copy.deepcopy(layer)
    for module in layer.modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, (nn.Parameter, nn.Buffer)):
                setattr(module, name, type(value)(value.numpy().astype(np.float64)))
    y = layer(et.from_numpy(x))
    assert (y[0] if isinstance(y, tuple) else y).dtype is et.float64


def test_scalars_are_weak() -> None:
    x = et.ones(2)
    for y in (x * 2.0, x * np.float64(2.0), np.float64(2.0) * x, x + 1, x / np.float32(3.0)):
        assert y.dtype is et.float32
    assert (x * np.ones(2)).dtype is et.float64
