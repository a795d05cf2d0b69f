"""Packed checkpoints of torch models."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import extensor as et
from extensor.io.stored import TARGETS

torch = pytest.importorskip("torch")
ext = pytest.importorskip("extensor.torch")

LAYOUTS = [name for name, row in TARGETS.items() if row.container != "gguf"]


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


def test_an_unknown_layout_says_so(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="layout"):
        ext.export(torch.nn.Linear(32, 32), tmp_path / "m", "mxpf4")
