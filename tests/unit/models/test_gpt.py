"""GPT: shapes, size, first loss, tied weights, roles, and what it refuses."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
import pytest

import extensor as et
from extensor import models, nn


def small(**changes: Any) -> nn.Module:
    settings = {"vocab": 11, "context": 8, "layers": 2, "heads": 2, "width": 64, **changes}
    return models.build("gpt", models.config("gpt", **settings), np.random.default_rng(0))


def tokens(shape: tuple[int, ...] = (3, 8)) -> et.ExTensor:
    return et.from_numpy(np.random.default_rng(1).integers(0, 11, shape))


def test_nano_has_nanogpts_number_of_weights() -> None:
    nano = models.build("gpt", models.config("gpt", "nano"), np.random.default_rng(0))
    # a block: 12 width^2 and two norms; besides, the embeddings and the last norm
    count = 4 * (12 * 128**2 + 2 * 128) + (65 + 64) * 128 + 128
    assert sum(p.size for p in nano.parameters()) == count == 804_096


@pytest.mark.parametrize("bias", [True, False])
def test_tokens_become_scores_and_every_weight_gets_a_gradient(bias: bool) -> None:
    model = small(bias=bias)
    x = tokens()
    scores = model(x)
    assert scores.shape == (3, 8, 11)
    labels = et.from_numpy((x.numpy().reshape(-1) + 1) % 11)
    loss = et.cross_entropy(scores.reshape(-1, 11), labels)
    # small weights give nearly equal scores: the loss begins near that of guessing (a little above
    # for another token than the one seen, since head and embedding are one)
    assert abs(float(loss.item()) - math.log(11)) < 0.2
    loss.backward()
    assert all(p.grad is not None and np.any(p.grad.numpy()) for p in model.parameters())
    assert any(path.endswith("bias") for path, _ in model.named_parameters()) is bias


def test_head_and_embedding_are_one() -> None:
    model = small()
    assert model.head.weight is model.tokens.weight
    assert "head.weight" not in model.state_dict()
    other = small(layers=2)
    other.load_state_dict(model.state_dict())
    assert np.array_equal(other(tokens()).numpy(), model(tokens()).numpy())


def test_a_token_does_not_see_what_follows() -> None:
    model, x = small(), tokens((1, 8)).numpy()
    y = x.copy()
    y[0, 5:] = (y[0, 5:] + 1) % 11
    a, b = (model(et.from_numpy(v)).numpy() for v in (x, y))
    assert np.array_equal(a[:, :5], b[:, :5])
    assert (a[:, 5:] != b[:, 5:]).any()


@pytest.mark.parametrize("recipe", ["mxfp4", "nvfp4", "mxfp4_last_bf16", "mxfp8", "mxfp4_all"])
def test_roles(recipe: str) -> None:
    """Head in bf16 except under `all`; first and last are counted without it."""
    model = small()
    state = nn.apply_recipe(model, recipe)
    dense = {path for path, layer in state.layers.items() if layer.layer.fprop.unquantized}
    first, last = "blocks.0.attention.qkv", "blocks.1.feed_forward.down"
    assert (
        dense
        == {
            "mxfp4": {first, last, "head"},
            "nvfp4": {first, last, "head"},
            "mxfp4_last_bf16": {last, "head"},
            "mxfp8": {"head"},
            "mxfp4_all": set(),
        }[recipe]
    )
    scores = model(tokens())
    scores.sum().backward()
    assert np.isfinite(scores.numpy()).all()


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (np.zeros((1, 9), np.int64), "expected at most the 8 tokens of the context, got 9"),
        (np.zeros(4, np.int64), "expected tokens (B, T) with T of 1 or more, got (4,)"),
        (np.zeros((1, 0), np.int64), "expected tokens (B, T) with T of 1 or more, got (1, 0)"),
        (np.array([[3, 11]]), "numbers in 0..10, got 3..11"),
        (np.array([[-1, 3]]), "numbers in 0..10, got -1..3"),
    ],
)
def test_bad_tokens(x: np.ndarray, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        small()(et.from_numpy(x))


def test_bad_configurations() -> None:
    with pytest.raises(ValueError, match="expected a multiple of the heads as width"):
        models.config("gpt", heads=3)
    with pytest.raises(ValueError, match="expected sizes of 1 or more"):
        models.config("gpt", layers=0)


@pytest.mark.parametrize("name", ["gpt", "encoder"])
def test_first_weights_are_normal_and_narrower_where_they_end_in_the_residual(name: str) -> None:
    """0.02; in GPT, 1 / sqrt(2 layers) of it for what is added to the residual (GPT-2, 2.3)."""
    model = models.build(
        name, models.config(name, vocab=50, context=8, layers=3, heads=4, width=128),
        np.random.default_rng(0),
    )  # fmt: skip
    for path, layer in nn.gemm_layers(model):
        narrow = name == "gpt" and path.endswith((".out", ".down"))
        expected = 0.02 / math.sqrt(6) if narrow else 0.02
        values = layer.weight.numpy()
        assert abs(values.std() / expected - 1) < 6 / math.sqrt(2 * values.size), path
