"""Activations in bfloat16: where they are rounded, which dtypes stay, and what may be asked for."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

import extensor as et
from extensor import nn
from extensor.models.gpt.configs import GPTConfig
from extensor.models.gpt.model import build as build_gpt
from extensor.models.lenet.configs import LeNetConfig
from extensor.models.lenet.model import build as build_lenet
from extensor.nn.recipe import apply_recipe
from extensor.ops.attention import packed_attention
from extensor.ops.quantized import layer_context, quantized_matmul
from extensor.quant.recipe import Gemm, LayerRecipe, Recipe
from extensor.quant.recipes import get_recipe
from tests.oracle.compare import same_bytes

CONFIG = GPTConfig(vocab=40, context=16, layers=1, width=64, heads=2, bias=True)
TOKENS = np.random.default_rng(0).integers(0, CONFIG.vocab, (2, CONFIG.context + 1))


def rounded(x: et.ExTensor) -> et.ExTensor:
    """The nearest bfloat16 values, as float32; their gradient is rounded likewise."""
    return x.astype("bfloat16").astype("float32")


def rounded_by_hand(model: Any, tokens: et.ExTensor) -> et.ExTensor:
    """The GPT's scores in float32, rounded wherever a bfloat16 tensor would be made."""
    x = model.tokens(tokens) + model.positions.weight[: tokens.shape[1]]
    for block in model.blocks:
        attention, forward = block.attention, block.feed_forward
        qkv = rounded(attention.qkv(rounded(block.norm1(x))))
        x = x + rounded(attention.out(rounded(packed_attention(qkv, attention.heads, causal=True))))
        x = x + rounded(
            forward.down(rounded(et.gelu(rounded(forward.up(rounded(block.norm2(x)))))))
        )
    return rounded(model.head(rounded(model.norm(x))))


def gpt(recipe: str, activations: Any) -> Any:
    model = build_gpt(CONFIG, np.random.default_rng(1))
    rng = np.random.default_rng(2)
    for name, p in model.named_parameters():
        if p.ndim == 1:  # biases and norms that do something
            p.data[...] += rng.standard_normal(p.shape).astype(np.float32) / 4
        assert p.dtype is et.float32, name
    apply_recipe(model, recipe, 5, activations)
    return model


def loss_of(model: Any, forward: Any) -> tuple[et.ExTensor, et.ExTensor]:
    scores = forward(et.from_numpy(np.ascontiguousarray(TOKENS[:, :-1])))
    labels = et.from_numpy(TOKENS[:, 1:].reshape(-1).copy())
    loss = et.cross_entropy(scores.reshape(-1, CONFIG.vocab), labels)
    loss.backward()
    return scores, loss


@pytest.mark.parametrize("recipe", ["fp32", "bf16", "mxfp4", "mxfp8_nvidia"])
def test_a_gpt_is_rounded_where_its_layers_end(recipe: str) -> None:
    ours, theirs = gpt(recipe, "bfloat16"), gpt(recipe, None)
    scores, loss = loss_of(ours, ours)
    expected, exact = loss_of(theirs, lambda tokens: rounded_by_hand(theirs, tokens))
    assert scores.dtype is et.bfloat16
    assert loss.dtype is et.float32
    same_bytes("scores", scores.astype("float32").numpy(), expected.numpy())
    same_bytes("loss", loss.numpy(), exact.numpy())
    gradients = dict(theirs.named_parameters())
    for name, p in ours.named_parameters():
        assert p.grad is not None
        assert p.grad.dtype is et.float32, name
        got, want = p.grad.numpy(), gradients[name].grad.numpy()
        if any(part in name for part in ("attention.qkv", "norm1", "tokens", "positions")):
            # Attention's gradient reads its output, which is bfloat16 here: one rounding of 2**-9
            # in a sum; a code of a quantized gradient may differ after it.
            assert np.linalg.norm(got - want) < 0.05 * np.linalg.norm(want), name
        else:
            same_bytes(name, got, want)


def test_dtypes_are_those_of_autocast() -> None:
    layer = nn.Linear(64, 48, rng=0)
    apply_recipe(layer, "bf16", activations="bfloat16")
    x = et.randn((6, 64), seed=1, requires_grad=True)
    y = layer(x)
    assert y.dtype is et.bfloat16
    for f in (et.gelu, et.relu, et.silu, lambda t: t.reshape(3, 96), lambda t: t * 2.0):
        assert f(y).dtype is et.bfloat16
    assert (y + et.ones(48)).dtype is et.float32
    norm = nn.LayerNorm(48)
    assert norm(y).dtype is et.float32
    block = nn.TransformerBlock(
        nn.MultiheadAttention(48, 2, rng=2), nn.FeedForward(48, 192, rng=2), norm="rms"
    )
    for activations, dtype in (("bfloat16", et.bfloat16), ("float32", et.float32)):
        apply_recipe(block, "fp32", activations=activations)
        assert block.norm1(x[:, :48]).dtype is block.norm2(x[:, :48]).dtype is dtype
        assert block(x[:, :48]).dtype is et.float32
    assert et.cross_entropy(y, et.zeros(6, dtype="int64")).dtype is et.float32
    narrow = y.detach()
    narrow.requires_grad = True
    again = nn.Linear(48, 8, rng=1)
    apply_recipe(again, "fp32", activations="bfloat16")
    again(narrow).sum().backward()
    y.sum().backward()
    assert narrow.grad.dtype is et.bfloat16
    assert x.grad.dtype is et.float32
    assert {p.grad.dtype for p in (layer.weight, layer.bias, again.weight)} == {et.float32}


def _rounded(y: et.ExTensor, exact: np.ndarray, doubt: np.ndarray) -> list[np.ndarray]:
    """What was given and what rounding once gives, where sums in float32 cannot change that."""
    ends = [et.ExTensor(exact + s * doubt).astype("bfloat16") for s in (-1, 1)]
    low, high = (end.astype("float32").numpy() for end in ends)
    sure = low == high
    assert sure.mean() > 0.9
    return [y.astype("float32").numpy()[sure], low[sure]]


def test_a_product_is_rounded_once() -> None:
    """With a bias and an output scale: in float32, then rounded; gradients of biases are sums."""
    gemm = Gemm("bfloat16", "bfloat16", 1.7)
    recipe = Recipe("r", "a test", LayerRecipe(gemm, gemm, gemm), activations="bfloat16")
    context = layer_context(recipe.layers)
    context.state.recipe = recipe
    rng = np.random.default_rng(3)
    x, w, b = (rng.standard_normal(s).astype(np.float32) for s in ((40, 64), (48, 64), (48,)))
    held = [et.ExTensor(a, requires_grad=True) for a in (x, w, b)]
    y = quantized_matmul(held[0], held[1], context, held[2])
    half = [et.ExTensor(a).astype("bfloat16").astype("float32").numpy() for a in (x, w)]
    # Products of bfloat16 are exact in float32, sums of 64 are not: scaled and added in float32.
    exact = half[0].astype(np.float64) @ half[1].T.astype(np.float64) * np.float32(1.7) + b
    near_tie = 80 * 2.0**-24 * (np.abs(half[0]) @ np.abs(half[1]).T * 1.7 + np.abs(b))
    off = np.abs(y.astype("float32").numpy() - exact)
    assert (off <= np.abs(exact) * 2.0**-8 + near_tie).all()
    same_bytes("rounded", *_rounded(y, exact, near_tie))
    g = rng.standard_normal(y.shape).astype(np.float32)
    y.backward(et.ExTensor(g, "bfloat16"))
    sums = et.ExTensor(g, "bfloat16").astype("float32").numpy().sum(axis=0, dtype=np.float64)
    bound = 40 * 2.0**-24 * np.abs(g).sum(axis=0) * (1 + 2.0**-8)
    assert (np.abs(held[2].grad.numpy() - sums) <= bound).all()


def test_convolutions_are_rounded_too() -> None:
    images = et.randn((2, 1, 28, 28), seed=3)
    exact, rough = (nn.Conv2d(1, 6, 5, rng=0) for _ in range(2))
    model = build_lenet(LeNetConfig(), np.random.default_rng(1))
    apply_recipe(exact, "mxfp4")
    apply_recipe(rough, "mxfp4", activations="bfloat16")
    apply_recipe(model, "fp32", activations="bfloat16")
    same_bytes("conv", rough(images).astype("float32").numpy(), rounded(exact(images)).numpy())
    assert model(images).dtype is et.bfloat16
    model(images).sum().backward()
    assert {p.grad.dtype for p in model.parameters()} == {et.float32}


def test_activations_are_data() -> None:
    recipe = get_recipe("mxfp4")
    assert recipe.activations == "float32"
    with pytest.raises(ValueError, match="no activations named 'bf16'; did you mean"):
        apply_recipe(nn.Linear(2, 2), "mxfp4", activations="bf16")  # type: ignore[arg-type]
    state = apply_recipe(nn.Linear(64, 64), "mxfp4", activations="bfloat16")
    assert state.recipe.activations == "bfloat16"
    assert state.recipe.name == "mxfp4"


@pytest.mark.parametrize("needs", list(itertools.product([False, True], repeat=3))[1:], ids=str)
@pytest.mark.parametrize("recipe", ["fp32", "bf16", "mxfp4"])
def test_any_of_input_weight_and_bias_may_need_a_gradient(
    recipe: str, needs: tuple[bool, bool, bool]
) -> None:
    layer = et.nn.Linear(8, 4, rng=0)
    apply_recipe(layer, recipe)
    x = et.randn((6, 8), seed=1, requires_grad=needs[0])
    layer.weight.requires_grad, layer.bias.requires_grad = needs[1:]
    layer(x).sum().backward()
    grads = [t.grad for t in (x, layer.weight, layer.bias)]
    assert [g is not None for g in grads] == list(needs)
    if needs[2]:
        np.testing.assert_array_equal(layer.bias.grad.numpy(), np.full(4, 6.0, np.float32))


def test_a_block_without_a_norm_takes_a_recipe() -> None:
    block = et.nn.TransformerBlock(
        et.nn.MultiheadAttention(16, 2, rng=0), et.nn.FeedForward(16, 64, rng=0)
    )
    block.norm1 = None
    assert apply_recipe(block, "bf16", activations="bfloat16").layers


def test_a_rounded_norm_sums_its_bias_gradient_in_float32() -> None:
    """257 is no bfloat16: a sum that is rounded, and again converted, would be 256."""
    for create_graph in (False, True):
        x, weight, bias = et.randn((257, 8), seed=0), et.ones(8), et.zeros(8, requires_grad=True)
        y = et.layer_norm(x, weight, bias, narrow=True)
        assert y.dtype is et.bfloat16
        y.backward(et.ones_like(y), create_graph=create_graph)
        assert bias.grad is not None
        np.testing.assert_array_equal(bias.grad.numpy(), np.full(8, 257, np.float32))
