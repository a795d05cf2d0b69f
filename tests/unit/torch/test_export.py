"""Packed checkpoints of torch models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import extensor as et
from extensor.io.stored import TARGETS

torch = pytest.importorskip("torch")
ext = pytest.importorskip("extensor.torch")

LAYOUTS = [
    name
    for name, row in TARGETS.items()
    if row.container != "gguf" and not (row.layout and row.layout.packing == "blocks")
]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_come_back_as_extensor_packs_them(layout: str, dtype: str, tmp_path: Path) -> None:
    """What a layout holds of torch's weights is what it holds of the same weights of numpy."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(128, 128, bias=False, dtype=getattr(torch, dtype)))
    ext.quantize_(model, "mxfp4_all")
    ext.export(model, tmp_path / "m", layout)
    found = et.load(tmp_path / "m")
    assert not any("quant_clock" in name for name in found)
    own = et.ExTensor.from_dlpack(model[0].weight.detach()).data
    et.io.stored.write_checkpoint(tmp_path / "own", layout, [("0.weight", own)])
    expected = et.load(tmp_path / "own")
    for name, tensor in expected.items():
        np.testing.assert_array_equal(
            found[name].dequantize().numpy(), tensor.dequantize().numpy(), name
        )


def test_stacks_of_experts_come_back_as_extensor_packs_them(tmp_path: Path) -> None:
    """gpt-oss's layout packs nothing else."""
    torch.manual_seed(0)
    model, experts = torch.nn.Module(), torch.nn.Module()
    experts.gate_up_proj = torch.nn.Parameter(torch.randn(2, 64, 128))
    experts.down_proj = torch.nn.Parameter(torch.randn(2, 64, 64))
    model.experts = experts
    ext.export(model, tmp_path / "m", "gpt-oss-mxfp4")
    own = [(name, values.detach().numpy()) for name, values in model.named_parameters()]
    et.io.stored.write_checkpoint(tmp_path / "own", "gpt-oss-mxfp4", own)
    found, expected = et.load(tmp_path / "m"), et.load(tmp_path / "own")
    assert found.keys() == expected.keys() and len(found) == 2
    for name, tensor in expected.items():
        assert "mxfp4" in repr(tensor.dtype)
        for part, values in tensor.data.parts.items():
            np.testing.assert_array_equal(found[name].data.parts[part], values)


@pytest.mark.parametrize(
    ("layout", "model", "message"),
    [
        ("compressed-tensors-int4", torch.nn.Linear(128, 128), r"weight \(128, 128\).*Sequential"),
        ("gguf-q4_0", torch.nn.Sequential(torch.nn.Linear(24, 8)), r"rows are whole blocks"),
        ("gpt-oss-mxfp4", torch.nn.Sequential(torch.nn.Linear(64, 8)), "stacks of experts"),
    ],
)
def test_a_layout_that_would_pack_nothing_says_so(
    layout: str, model: Any, message: str, tmp_path: Path
) -> None:
    """And writes nothing."""
    with pytest.raises(ValueError, match=message):
        ext.export(model, tmp_path / "m.gguf" if "gguf" in layout else tmp_path / "m", layout)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("buffer", "message"),
    [
        (
            torch.ones(2, dtype=torch.bool),
            r"extra: expected one of float32, .*got torch.bool",
        ),
        (torch.ones(2, device="meta"), "extra: a meta tensor has no values"),
        (torch.ones(2).to_sparse(), "extra: expected a dense tensor"),
        (torch.ones(2).as_subclass(type("Shard", (torch.Tensor,), {})), "is a Shard; gather it"),
    ],
)
def test_a_tensor_without_values_for_a_file_says_so(
    buffer: Any, message: str, tmp_path: Path
) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(64, 8))
    model.register_buffer("extra", buffer)
    with pytest.raises(TypeError, match=f"export: .*{message}"):
        ext.export(model, tmp_path / "m", "compressed-tensors-nvfp4")
    assert not list(tmp_path.iterdir())


def test_an_unknown_layout_says_so(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="layout"):
        ext.export(torch.nn.Linear(32, 32), tmp_path / "m", "mxpf4")


def test_the_extra_state_of_a_module_stays_behind(tmp_path: Path) -> None:
    class Stateful(torch.nn.Linear):  # type: ignore[misc, name-defined]
        def get_extra_state(self) -> dict[str, int]:
            return {"calls": 3}

    layout = "compressed-tensors-nvfp4"
    ext.export(torch.nn.Sequential(Stateful(64, 8)), tmp_path / "m", layout)
    assert not [name for name in et.load(tmp_path / "m") if "extra" in name]
