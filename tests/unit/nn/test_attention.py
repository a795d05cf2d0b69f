"""Attention and the transformer block: against torch in float64, by hand, and what they refuse."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
import pytest

import extensor as et
from extensor import nn
from extensor.nn.attention import rotate
from extensor.testing import gradcheck
from tests.oracle.compare import same_bytes

WIDTH, HEADS, LENGTH = 12, 4, 5


def doubled(module: nn.Module, seed: int = 0) -> nn.Module:
    """The module with all parameters in float64 and moved off their round initial values."""
    rng = np.random.default_rng(seed)
    for part in module.modules():
        for name, p in list(vars(part).items()):
            if isinstance(p, nn.Parameter):
                values = p.numpy() + 0.3 * rng.standard_normal(p.shape)
                setattr(part, name, nn.Parameter(values))
    return module


def inputs() -> np.ndarray:
    return np.random.default_rng(1).standard_normal((2, LENGTH, WIDTH))


def close(got: Any, want: Any) -> None:
    # A few thousand operations of values near 1, each exact to 2^-53.
    np.testing.assert_allclose(got.numpy(), want.detach().numpy(), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_attention_as_torch(causal: bool, bias: bool) -> None:
    torch = pytest.importorskip("torch", reason="torch is the oracle: pip install -e .[peers]")
    mine = doubled(nn.MultiheadAttention(WIDTH, HEADS, causal=causal, bias=bias, rng=0))
    theirs = torch.nn.MultiheadAttention(WIDTH, HEADS, bias=bias, batch_first=True).double()
    pairs = [(mine.qkv.weight, theirs.in_proj_weight), (mine.out.weight, theirs.out_proj.weight)]
    if bias:
        pairs += [(mine.qkv.bias, theirs.in_proj_bias), (mine.out.bias, theirs.out_proj.bias)]
    compare(torch, mine, lambda z: theirs(z, z, z, attn_mask=mask(torch, causal))[0], pairs)


def mask(torch: Any, causal: bool) -> Any:
    full = torch.full((LENGTH, LENGTH), -math.inf, dtype=torch.float64)
    return torch.triu(full, 1) if causal else None


def compare(torch: Any, mine: nn.Module, theirs: Any, pairs: list[tuple[Any, Any]]) -> None:
    """Outputs and all gradients; torch's parameters become mine."""
    with torch.no_grad():
        for p, q in pairs:
            q.copy_(torch.tensor(p.numpy()))
    assert len(pairs) == len(list(mine.parameters()))
    x = et.ExTensor(inputs(), requires_grad=True)
    z = torch.tensor(inputs(), requires_grad=True)
    y, want = mine(x), theirs(z)
    close(y, want)
    g = np.random.default_rng(2).standard_normal(y.shape)
    y.backward(et.ExTensor(g))
    want.backward(torch.tensor(g))
    close(x.grad, z.grad)
    for p, q in pairs:
        close(p.grad, q.grad)


def test_block_as_torch() -> None:
    torch = pytest.importorskip("torch", reason="torch is the oracle: pip install -e .[peers]")
    mine = doubled(nn.TransformerBlock(WIDTH, HEADS, causal=True, rng=0))
    theirs = torch.nn.TransformerEncoderLayer(
        WIDTH, HEADS, 4 * WIDTH, 0.0, "gelu", batch_first=True, norm_first=True
    ).double()
    pairs = [
        (mine.norm1.weight, theirs.norm1.weight),
        (mine.norm1.bias, theirs.norm1.bias),
        (mine.attention.qkv.weight, theirs.self_attn.in_proj_weight),
        (mine.attention.qkv.bias, theirs.self_attn.in_proj_bias),
        (mine.attention.out.weight, theirs.self_attn.out_proj.weight),
        (mine.attention.out.bias, theirs.self_attn.out_proj.bias),
        (mine.norm2.weight, theirs.norm2.weight),
        (mine.norm2.bias, theirs.norm2.bias),
        (mine.feed_forward.up.weight, theirs.linear1.weight),
        (mine.feed_forward.up.bias, theirs.linear1.bias),
        (mine.feed_forward.down.weight, theirs.linear2.weight),
        (mine.feed_forward.down.bias, theirs.linear2.bias),
    ]
    compare(torch, mine, lambda z: theirs(z, src_mask=mask(torch, True)), pairs)


def test_grouped_rotary_rms_swiglu_block_as_torch() -> None:
    """Llama's block, written with torch's functions and complex numbers for the rotation."""
    torch = pytest.importorskip("torch", reason="torch is the oracle: pip install -e .[peers]")
    f = torch.nn.functional
    block = nn.TransformerBlock(
        WIDTH, 6, 2, hidden=8, norm="rms", activation="swiglu", causal=True, rotary=100.0,
        bias=False, rng=0,
    )  # fmt: skip
    doubled(block)
    pairs = [(p, torch.zeros(p.shape, dtype=torch.float64)) for p in block.parameters()]
    for _, q in pairs:
        q.requires_grad_()
    one, qkv, out, two, up, down = (q for _, q in pairs)

    def turned(x: Any) -> Any:
        half = x.shape[-1] // 2
        angle = torch.arange(LENGTH)[:, None] * 100.0 ** -(torch.arange(half).double() / half)
        z = torch.complex(x[..., :half], x[..., half:]) * torch.exp(1j * angle)
        return torch.cat([z.real, z.imag], -1)

    def theirs(x: Any) -> Any:
        h = f.rms_norm(x, (WIDTH,), one, 1e-6) @ qkv.T
        q, k, v = (
            part.unflatten(-1, (-1, 2)).transpose(1, 2) for part in h.split([WIDTH, 4, 4], -1)
        )
        q, k = turned(q), turned(k)
        k, v = k.repeat_interleave(3, 1), v.repeat_interleave(3, 1)
        mixed = f.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + mixed.transpose(1, 2).flatten(2) @ out.T
        gate, value = (f.rms_norm(x, (WIDTH,), two, 1e-6) @ up.T).chunk(2, -1)
        return x + (f.silu(gate) * value) @ down.T

    compare(torch, block, theirs, pairs)


@pytest.mark.parametrize("half", [et.bfloat16, et.float16], ids=lambda d: d.name)
def test_rotation_of_16_bit_floats_is_rounded_once(half: Any) -> None:
    """Sines of 16 bits would turn by another angle."""
    x = et.ExTensor(np.random.default_rng(0).standard_normal((2, 40, 6)), half)
    turned = rotate(x, 10.0)
    assert turned.dtype is half
    same_bytes("turned", turned.numpy(), rotate(x.astype("float32"), 10.0).astype(half).numpy())


def test_rotation_keeps_lengths_and_knows_distances_only() -> None:
    rng = np.random.default_rng(0)
    q, k = (np.broadcast_to(rng.standard_normal(6), (9, 6)) for _ in range(2))
    turned_q, turned_k = (rotate(et.ExTensor(x.copy()), 10.0).numpy() for x in (q, k))
    np.testing.assert_array_equal(turned_q[0], q[0])
    np.testing.assert_allclose((turned_q**2).sum(-1), (q**2).sum(-1), rtol=1e-14)
    products = turned_q @ turned_k.T
    for distance in range(-8, 9):
        diagonal = np.diagonal(products, distance)
        np.testing.assert_allclose(diagonal, diagonal[0], rtol=1e-12, atol=1e-12)
    assert np.ptp(products[0]) > 0.1
    with pytest.raises(ValueError, match="expected vectors of even length, got 3"):
        rotate(et.ExTensor(np.zeros((2, 3))), 10.0)


@pytest.mark.parametrize(
    "options",
    [
        {"kv_heads": 2, "rotary": 10.0, "norm": "rms", "activation": "swiglu", "bias": False},
        {"causal": True},
    ],
)
def test_gradients_by_differences(options: dict[str, Any]) -> None:
    block = doubled(nn.TransformerBlock(8, 4, hidden=6, rng=0, **options))
    x = et.ExTensor(np.random.default_rng(3).standard_normal((2, 3, 8)))
    assert gradcheck(block, x)


def test_a_causal_block_does_not_see_what_follows() -> None:
    block = nn.TransformerBlock(8, 2, causal=True, rotary=10.0, rng=0)
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
        (lambda: nn.TransformerBlock(8, 2, norm="rsm"), "no norm named 'rsm'; did you mean 'rms'"),
        (lambda: nn.TransformerBlock(8, 2, activation="glu"), "no activation named 'glu'"),
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
