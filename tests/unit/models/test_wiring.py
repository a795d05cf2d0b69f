"""How the layers of each model are joined: its scores against the papers' networks, in torch.

Shapes and sizes do not say what is added, joined or followed by what. Each network is written here
once more, in functions of torch alone, and reads the model's weights by name. What torch gave is
stored in wiring.json, which needs no torch: delete the file, and the test with torch writes it.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import extensor as et
from extensor import models
from extensor.models.googlenet.configs import STAGES
from extensor.models.mobilenet.configs import CONFIGS as MOBILENETS

STORED = Path(__file__).with_name("wiring.json")
CASES: dict[str, tuple[str, str | None, dict[str, Any]]] = {
    "lenet": ("lenet", None, {"in_channels": 3, "image_size": 32}),
    "mlp": ("mlp", "mlp", {"in_channels": 3, "image_size": 32}),
    "alexnet": ("alexnet", None, {"width": 1 / 16}),
    "vgg16": ("vgg", "vgg16", {"width": 1 / 16}),
    "vgg16_bn": ("vgg", "vgg16_bn", {"width": 1 / 16}),
    "resnet18": ("resnet", "resnet18", {"width": 1 / 16}),
    "mobilenet": ("mobilenet", None, {"width": 1 / 8}),
    "googlenet": ("googlenet", "googlenet", {"width": 1 / 16}),
    "googlenet_bn": ("googlenet", "googlenet_bn", {"width": 1 / 16}),
    "gpt": ("gpt", None, {"layers": 2, "width": 32, "heads": 4, "bias": True}),
    "encoder": ("encoder", None, {"layers": 2, "width": 32, "heads": 4}),
}
HEADS = 4


def drawn(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Weights that depend on a tensor's name and shape; signals keep their size."""
    noise = np.random.default_rng(zlib.crc32(name.encode())).standard_normal(shape)
    if name.endswith("running_var") or ("norm" in name and name.endswith("weight")):
        return (1.0 + 0.3 * np.tanh(noise)).astype(np.float32)
    if len(shape) > 1:
        return (noise * math.sqrt(2 / math.prod(shape[1:]))).astype(np.float32)
    return (0.2 * noise).astype(np.float32)


def case(name: str) -> tuple[Any, dict[str, np.ndarray], np.ndarray]:
    """A model in evaluation with drawn weights, the weights, and its input."""
    model, variant, changes = CASES[name]
    made = models.build(
        model, models.config(model, variant, **changes), np.random.default_rng(0)
    ).eval()
    weights = {key: drawn(key, value.shape) for key, value in made.state_dict().items()}
    weights |= {k: v for k, v in made.state_dict().items() if k.endswith("draws")}
    made.load_state_dict(weights)
    rng = np.random.default_rng(1)
    if name in ("gpt", "encoder"):
        return made, weights, rng.integers(0, 60, (2, 12))
    return made, weights, rng.standard_normal((2, 3, 32, 32)).astype(np.float32)


def scores(name: str) -> np.ndarray:
    """Ten scores of each input."""
    model, _, x = case(name)
    return model(et.from_numpy(x)).numpy().reshape(2, -1)[:, -10:]


@pytest.mark.parametrize("name", CASES)
def test_scores_are_those_of_the_papers_network(name: str) -> None:
    np.testing.assert_allclose(
        scores(name), json.loads(STORED.read_text(encoding="utf-8"))[name], rtol=1e-4, atol=1e-4
    )


# ---- the networks in torch


class Torch:
    """Weights by name, and the functions that networks are made of."""

    def __init__(self, weights: dict[str, np.ndarray]) -> None:
        self.torch = pytest.importorskip("torch")
        self.f = self.torch.nn.functional
        self.weights = {k: self.torch.tensor(v) for k, v in weights.items()}

    def layer(self, name: str) -> tuple[Any, Any]:
        return self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias")

    def linear(self, x: Any, name: str) -> Any:
        return self.f.linear(x, *self.layer(name))

    def unit(self, x: Any, name: str, stride: int = 1, groups: int = 1, relu: bool = True) -> Any:
        """A convolution, a batch norm where there is one, a ReLU."""
        weight, bias = self.layer(f"{name}.conv")
        x = self.f.conv2d(x, weight, bias, stride, weight.shape[-1] // 2, 1, groups)
        if f"{name}.norm.weight" in self.weights:
            mean, var = (self.weights[f"{name}.norm.running_{s}"] for s in ("mean", "var"))
            x = self.f.batch_norm(x, mean, var, *self.layer(f"{name}.norm"))
        return x.relu() if relu else x


def lenet(t: Torch, x: Any) -> Any:
    x = t.f.max_pool2d(t.f.conv2d(x, *t.layer("conv1"), padding=2).relu(), 2)
    x = t.f.max_pool2d(t.f.conv2d(x, *t.layer("conv2")).relu(), 2).flatten(1)
    return t.linear(t.linear(t.linear(x, "fc1").relu(), "fc2").relu(), "fc3")


def mlp(t: Torch, x: Any) -> Any:
    x = t.linear(t.linear(x.flatten(1), "layers.0").relu(), "layers.1").relu()
    return t.linear(x, "layers.2")


def alexnet(t: Torch, x: Any) -> Any:
    for number in (1, 2, 3, 4, 5):
        weight, bias = t.layer(f"features.conv{number}.conv")
        x = t.f.conv2d(x, weight, bias, padding=weight.shape[-1] // 2).relu()
        x = t.f.max_pool2d(x, 3, 2, 1) if number in (1, 2, 5) else x
    x = t.linear(x.flatten(1), "classifier.fc6").relu()
    return t.linear(t.linear(x, "classifier.fc7").relu(), "classifier.fc8")


def vgg16(t: Torch, x: Any) -> Any:
    place = 0
    for convolutions in (2, 2, 3, 3, 3):
        for _ in range(convolutions):
            x = t.unit(x, f"features.{place}")
            place += 1
        x, place = t.f.max_pool2d(x, 2), place + 1
    names = [k.removesuffix(".weight") for k in t.weights if k.startswith("classifier")]
    *hidden, last = [name for name in names if f"{name}.weight" in t.weights]
    x = x.flatten(1)
    for name in dict.fromkeys(n for n in hidden if n != last and not n.endswith("bias")):
        x = t.linear(x, name).relu()
    return t.linear(x, last)


def resnet18(t: Torch, x: Any) -> Any:
    x = t.unit(x, "stem")
    for stage in range(4):
        for block in range(2):
            name, stride = f"stages.{stage}.{block}", 2 if stage and not block else 1
            y = t.unit(t.unit(x, f"{name}.conv1", stride), f"{name}.conv2", relu=False)
            if stride == 2:
                x = t.unit(x, f"{name}.shortcut", stride, relu=False)
            x = (y + x).relu()
    return t.linear(x.mean((2, 3)), "fc")


def mobilenet(t: Torch, x: Any) -> Any:
    x = t.unit(x, "stem")
    for number, (_, stride) in enumerate(MOBILENETS["mobilenet"].layers):
        x = t.unit(x, f"layers.{number}.depthwise", stride, groups=x.shape[1])
        x = t.unit(x, f"layers.{number}.pointwise")
    return t.linear(x.mean((2, 3)), "fc")


def googlenet(t: Torch, x: Any) -> Any:
    for number in range(3):
        x = t.unit(x, f"stem.{number}")
    for stage in STAGES:
        x = t.f.max_pool2d(x, 3, 2, 1)
        for name in (f"layers.{key}" for key in stage):
            three = t.unit(t.unit(x, f"{name}.three.0"), f"{name}.three.1")
            five = t.unit(t.unit(x, f"{name}.five.0"), f"{name}.five.1")
            pool = t.unit(t.f.max_pool2d(x, 3, 1, 1), f"{name}.pool.1")
            x = t.torch.cat([t.unit(x, f"{name}.one"), three, five, pool], 1)
    return t.linear(x.mean((2, 3)), "fc")


def transformer(t: Torch, tokens: Any, causal: bool) -> Any:
    """Pre-norm blocks (GPT-2, section 2.3): tokens and places in, scores out."""
    embed, places = (t.weights[f"{name}.weight"] for name in ("tokens", "positions"))
    x = embed[tokens] + places[: tokens.shape[1]]
    width = x.shape[-1]

    def norm(x: Any, name: str) -> Any:
        return t.f.layer_norm(x, (width,), *t.layer(name))

    for block in ("blocks.0", "blocks.1"):
        parts = t.linear(norm(x, f"{block}.norm1"), f"{block}.attention.qkv").chunk(3, -1)
        q, k, v = (p.unflatten(-1, (HEADS, -1)).transpose(1, 2) for p in parts)
        mixed = t.f.scaled_dot_product_attention(q, k, v, is_causal=causal)
        x = x + t.linear(mixed.transpose(1, 2).flatten(2), f"{block}.attention.out")
        hidden = t.linear(norm(x, f"{block}.norm2"), f"{block}.feed_forward.up")
        x = x + t.linear(t.f.gelu(hidden), f"{block}.feed_forward.down")
    x = norm(x, "norm")
    return t.linear(x, "head") if not causal else x @ embed.T


NETWORKS: dict[str, Callable[[Torch, Any], Any]] = {
    "lenet": lenet,
    "mlp": mlp,
    "alexnet": alexnet,
    "vgg16": vgg16,
    "vgg16_bn": vgg16,
    "resnet18": resnet18,
    "mobilenet": mobilenet,
    "googlenet": googlenet,
    "googlenet_bn": googlenet,
    "gpt": lambda t, x: transformer(t, x, causal=True),
    "encoder": lambda t, x: transformer(t, x, causal=False),
}


def test_the_stored_scores_are_those_of_torch() -> None:
    found = {}
    for name, network in NETWORKS.items():
        _, weights, x = case(name)
        t = Torch(weights)
        with t.torch.no_grad():
            out = network(t, t.torch.tensor(x)).numpy().reshape(2, -1)[:, -10:]
        found[name] = np.round(out.astype(float), 5).tolist()
    if not STORED.exists():
        rows = ",\n".join(f'"{name}": {json.dumps(rows)}' for name, rows in found.items())
        STORED.write_text(f"{{{rows}}}\n", encoding="utf-8")
    stored = json.loads(STORED.read_text(encoding="utf-8"))
    assert found.keys() == stored.keys() == CASES.keys()
    for name, rows in found.items():
        np.testing.assert_allclose(rows, stored[name], rtol=1e-4, atol=1e-4)
