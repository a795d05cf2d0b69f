"""torchvision's ResNet-18 under a recipe: it trains, saves, loads and goes on bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
models = pytest.importorskip("torchvision.models", exc_type=ImportError)
ext = pytest.importorskip("extensor.torch")


def train(model: Any, optimizer: Any, steps: range) -> list[float]:
    losses = []
    for step in steps:
        generator = torch.Generator().manual_seed(step % 2)
        x = torch.randn(4, 3, 32, 32, generator=generator)
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x), torch.arange(4))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def fresh() -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = ext.quantize_(models.resnet18(num_classes=4), "mxfp4", seed=1)
    return model, torch.optim.AdamW(model.parameters(), 1e-3)


def test_resnet18_trains_saves_loads_and_goes_on(tmp_path: Path) -> None:
    model, optimizer = fresh()
    assert len(ext.quantized_modules(model)) == 21
    losses = train(model, optimizer, range(20))
    assert losses[-1] < 0.8 * losses[0]
    torch.save((model.state_dict(), optimizer.state_dict()), tmp_path / "state.pt")

    other, again = fresh()
    state, rest = torch.load(tmp_path / "state.pt")
    other.load_state_dict(state)
    again.load_state_dict(rest)
    assert train(other, again, range(20, 23)) == train(model, optimizer, range(20, 23))
