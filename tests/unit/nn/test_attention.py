"""Attention and the transformer block: rotation, gradients, errors. Torch: test_every_layer.py."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

import extensor as et
from extensor import nn
from extensor.nn.attention import rotate
from extensor.nn.rope import RopeScaling
from extensor.testing import gradcheck
from tests.oracle.compare import same_bytes


def doubled(module: nn.Module, seed: int = 0) -> nn.Module:
    """The module with all parameters in float64 and moved off their round initial values."""
    rng = np.random.default_rng(seed)
    for part in module.modules():
        for name, p in list(vars(part).items()):
            if isinstance(p, nn.Parameter):
                values = p.numpy() + 0.3 * rng.standard_normal(p.shape)
                setattr(part, name, nn.Parameter(values))
    return module


@pytest.mark.parametrize("half", [et.bfloat16, et.float16], ids=lambda d: d.name)
def test_rotation_of_16_bit_floats_is_rounded_once(half: Any) -> None:
    """Sines of 16 bits would turn by another angle."""
    x = et.ExTensor(np.random.default_rng(0).standard_normal((2, 40, 6)), half)
    rotated = rotate(x, 10.0)
    assert rotated.dtype is half
    same_bytes("rotated", rotated.numpy(), rotate(x.astype("float32"), 10.0).astype(half).numpy())


def test_rotation_keeps_lengths_and_knows_distances_only() -> None:
    rng = np.random.default_rng(0)
    q, k = (np.broadcast_to(rng.standard_normal(6), (9, 6)) for _ in range(2))
    rotated_q, rotated_k = (rotate(et.ExTensor(x.copy()), 10.0).numpy() for x in (q, k))
    np.testing.assert_array_equal(rotated_q[0], q[0])
    np.testing.assert_allclose((rotated_q**2).sum(-1), (q**2).sum(-1), rtol=1e-14)
    products = rotated_q @ rotated_k.T
    for distance in range(-8, 9):
        diagonal = np.diagonal(products, distance)
        np.testing.assert_allclose(diagonal, diagonal[0], rtol=1e-12, atol=1e-12)
    assert np.ptp(products[0]) > 0.1
    with pytest.raises(ValueError, match="expected vectors of even length, got 3"):
        rotate(et.ExTensor(np.zeros((2, 3))), 10.0)


@pytest.mark.parametrize(
    "block",
    [
        nn.TransformerBlock(
            nn.MultiheadAttention(8, 4, 2, rotary=10.0, bias=False, rng=0),
            nn.FeedForward(8, 6, "swiglu", bias=False, rng=0),
            norm="rms",
        ),
        nn.TransformerBlock(
            nn.MultiheadAttention(8, 4, causal=True, rng=0), nn.FeedForward(8, 6, rng=0)
        ),
    ],
    ids=["grouped rotary swiglu", "causal gelu"],
)
def test_gradients_by_differences(block: nn.TransformerBlock) -> None:
    doubled(block)
    x = et.ExTensor(np.random.default_rng(3).standard_normal((2, 3, 8)))
    assert gradcheck(block, x)


def test_a_causal_block_does_not_see_what_follows() -> None:
    attention = nn.MultiheadAttention(8, 2, causal=True, rotary=10.0, rng=0)
    block = nn.TransformerBlock(attention, nn.FeedForward(8, 32, rng=0))
    x = np.random.default_rng(0).standard_normal((1, 6, 8)).astype(np.float32)
    other = x.copy()
    other[:, 4:] += 1
    a, b = (block(et.ExTensor(v)).numpy() for v in (x, other))
    np.testing.assert_array_equal(a[:, :4], b[:, :4])
    assert (a[:, 4:] != b[:, 4:]).any()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: nn.MultiheadAttention(10, 4), "got width 10 and 4 heads"),
        (lambda: nn.MultiheadAttention(12, 4, 3), "a multiple of kv_heads, got 4 and 3"),
        (lambda: nn.MultiheadAttention(12, 4, 0), "kv_heads: expected 1 or more, got 0"),
        (lambda: nn.MultiheadAttention(12, 4, rotary=1e4), "heads of even length, got 10000.0"),
        (lambda: nn.MultiheadAttention(8, 2, rotary=-1.0), "expected a base above 0"),
        (
            lambda: nn.TransformerBlock(
                nn.MultiheadAttention(8, 2), nn.FeedForward(8, 32), norm="rsm"
            ),
            "no norm named 'rsm'; did you mean 'rms'",
        ),
        (
            lambda: nn.TransformerBlock(nn.MultiheadAttention(8, 2), nn.FeedForward(6, 24)),
            "attention and feed_forward of one width, got 8 and 6",
        ),
        (lambda: nn.FeedForward(8, 32, activation="glu"), "no activation named 'glu'"),
        (lambda: nn.FeedForward(8, 0), "hidden: expected 1 or more, got 0"),
        (
            lambda: nn.MultiheadAttention(8, 2)(et.zeros((3, 7))),
            "expected an input of shape (..., T, 8) with T of 1 or more, got (3, 7)",
        ),
    ],
)
def test_what_does_not_fit(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        make()


@pytest.mark.parametrize("kind", ["dynamic", "llama3", "yarn"])
def test_a_scaling_of_angles_needs_the_context_trained_on(kind: Any) -> None:
    assert RopeScaling(kind, 2.0, 1).context == 1 and RopeScaling("linear", 2.0).context == 0
    for factor, context in ((2.0, 0), (0.0, 8)):
        with pytest.raises(ValueError, match="a factor above 0 and the context"):
            RopeScaling(kind, factor, context)


@pytest.mark.parametrize("rotary", [None, 10.0])
def test_attention_takes_any_axes_before_its_tokens(rotary: float | None) -> None:
    attention = nn.MultiheadAttention(8, 4, 2, rotary=rotary, causal=True, rng=0)
    x = et.randn((2, 3, 5, 8), seed=1)
    whole = attention(x).numpy()
    assert whole.shape == x.shape
    for i, j in np.ndindex(2, 3):
        np.testing.assert_allclose(attention(x[i, j]).numpy(), whole[i, j], rtol=1e-5, atol=1e-6)
    for shape in ((8,), (5, 7), (0, 8)):
        with pytest.raises(ValueError, match=r"expected an input of shape \(\.\.\., T, 8\)"):
            attention(et.ones(shape))
