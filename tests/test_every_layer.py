"""Every layer against torch: outputs, gradients, and twenty steps of training.

A layer that `extensor.nn` offers and no case here makes fails `test_every_layer_has_a_peer`, which
needs no torch. Weights and the input are both trained, so that layers without weights take part.
"""

from __future__ import annotations

import inspect
import itertools
import json
import math
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import extensor as et
from extensor import nn
from extensor.nn.mixture import TopKRouter
from extensor.optim import SGD

Made = tuple[Callable[..., Any], list[Any]]
"""A function of torch's tensors, and its parameters in the order of ours."""
Peer = tuple[Callable[[], nn.Module], Callable[[Any], Made], tuple[int, ...]]

STORED = Path(__file__).with_name("every_layer.json")
TOKENS, IMAGE, FLAT = (2, 5, 12), (2, 4, 6, 7), (3, 4)


def same(name: str, *args: Any, **options: Any) -> Callable[[Any], Made]:
    """Torch's layer of a name, with its parameters in torch's order."""

    def make(torch: Any) -> Made:
        layer = getattr(torch.nn, name)(*args, **options)
        return layer, list(layer.parameters())

    return make


def chain(*parts: Callable[[Any], Made]) -> Callable[[Any], Made]:
    def make(torch: Any) -> Made:
        made = [part(torch) for part in parts]
        layer = torch.nn.Sequential(*(layer for layer, _ in made))
        return layer, [p for _, parameters in made for p in parameters]

    return make


def attention(causal: bool, bias: bool = True) -> Callable[[Any], Made]:
    def make(torch: Any) -> Made:
        layer = torch.nn.MultiheadAttention(12, 4, bias=bias, batch_first=True)
        order = [layer.in_proj_weight, layer.in_proj_bias]
        order += [layer.out_proj.weight, layer.out_proj.bias]
        hidden = torch.triu(torch.full((5, 5), -math.inf), 1) if causal else None
        return (
            lambda z: layer(z, z, z, attn_mask=None if hidden is None else hidden.to(z.dtype))[0],
            [p for p in order if p is not None],
        )

    return make


def llama_attention(torch: Any) -> Made:
    """Grouped queries and rotation, from torch's functions and complex numbers."""
    f = torch.nn.functional
    qkv, out = torch.nn.Parameter(torch.zeros(20, 12)), torch.nn.Parameter(torch.zeros(12, 12))

    def rotated(x: Any) -> Any:
        angle = torch.arange(5)[:, None].double() * 100.0 ** -torch.arange(1).double()
        z = torch.complex(*x.double().chunk(2, -1)) * torch.exp(1j * angle)
        return torch.cat([z.real, z.imag], -1).to(x.dtype)

    def run(x: Any) -> Any:
        parts = (x @ qkv.T).split([12, 4, 4], -1)
        q, k, v = (part.unflatten(-1, (-1, 2)).transpose(1, 2) for part in parts)
        k, v = rotated(k).repeat_interleave(3, 1), v.repeat_interleave(3, 1)
        mixed = f.scaled_dot_product_attention(rotated(q), k, v, is_causal=True)
        return mixed.transpose(1, 2).flatten(2) @ out.T

    return run, [qkv, out]


def block(causal: bool) -> Callable[[Any], Made]:
    def make(torch: Any) -> Made:
        layer = torch.nn.TransformerEncoderLayer(
            12, 4, 48, 0.0, "gelu", batch_first=True, norm_first=True
        ).double()
        attended = layer.self_attn
        rest = (attended.out_proj, layer.norm2, layer.linear1, layer.linear2)
        order = [layer.norm1.weight, layer.norm1.bias, attended.in_proj_weight]
        order += [attended.in_proj_bias, *(p for part in rest for p in (part.weight, part.bias))]
        hidden = torch.triu(torch.full((5, 5), -math.inf), 1) if causal else None
        return (lambda z: layer(z, src_mask=None if hidden is None else hidden.to(z.dtype)), order)

    return make


def llama_block(torch: Any) -> Made:
    attend, (qkv, out) = llama_attention(torch)
    forward, (up, down) = swiglu_feed_forward(torch, 8)
    one, two = (torch.nn.Parameter(torch.zeros(12)) for _ in range(2))

    def run(x: Any) -> Any:
        x = x + attend(torch.nn.functional.rms_norm(x, (12,), one, 1e-6))
        return x + forward(torch.nn.functional.rms_norm(x, (12,), two, 1e-6))

    return run, [one, qkv, out, two, up, down]


def swiglu_feed_forward(torch: Any, hidden: int = 10) -> Made:
    up, down = (torch.nn.Parameter(torch.zeros(s)) for s in ((2 * hidden, 12), (12, hidden)))

    def run(x: Any) -> Any:
        gate, value = (x @ up.T).chunk(2, -1)
        return (torch.nn.functional.silu(gate) * value) @ down.T

    return run, [up, down]


def mixture(torch: Any) -> Made:
    """Two of four experts for each token, every expert on every token."""
    gate = torch.nn.Parameter(torch.zeros(4, 12))
    experts = [chain(same("Linear", 12, 6), same("GELU"), same("Linear", 6, 12))(torch)
               for _ in range(4)]  # fmt: skip

    def run(x: Any) -> Any:
        best, chosen = (x @ gate.T).softmax(-1).topk(2)
        every = torch.stack([layer(x) for layer, _ in experts], -2)
        own = torch.take_along_dim(every, chosen[..., None], -2)
        return (own * (best / best.sum(-1, keepdim=True))[..., None]).sum(-2)

    return run, [gate, *(p for _, parameters in experts for p in parameters)]


def recurrent(name: str) -> Callable[[Any], Made]:
    """Two layers, both ways; our cells hold weight, bias, weight, bias, torch's ww bb."""

    def make(torch: Any) -> Made:
        layer = getattr(torch.nn, name)(12, 4, num_layers=2, bidirectional=True, batch_first=True)
        cells = [list(layer.parameters())[i : i + 4] for i in range(0, 16, 4)]
        return lambda z: layer(z)[0], [cell[i] for cell in cells for i in (0, 2, 1, 3)]

    return make


PEERS: dict[str, Peer] = {
    "linear": (lambda: nn.Linear(12, 3, rng=0), same("Linear", 12, 3), TOKENS),
    "linear no bias": (
        lambda: nn.Linear(4, 3, False, rng=0), same("Linear", 4, 3, bias=False), FLAT,
    ),
    "conv": (lambda: nn.Conv2d(4, 5, 3, rng=0), same("Conv2d", 4, 5, 3), IMAGE),
    "conv options": (
        lambda: nn.Conv2d(4, 6, (3, 2), (2, 1), (2, 1), (1, 2), 2, False, rng=0),
        same("Conv2d", 4, 6, (3, 2), (2, 1), (2, 1), (1, 2), 2, False),
        (2, 4, 9, 8),
    ),
    "depthwise": (
        lambda: nn.depthwise_conv2d(4, 3, multiplier=2, rng=0),
        same("Conv2d", 4, 8, 3, groups=4),
        IMAGE,
    ),
    "separable": (
        lambda: nn.SeparableConv2d(4, 6, 3, stride=2, padding=1, rng=0),
        chain(
            same("Conv2d", 4, 4, 3, stride=2, padding=1, groups=4), same("Conv2d", 4, 6, 1)
        ),
        IMAGE,
    ),
    "max pool": (lambda: nn.MaxPool2d(3, 2, 1), same("MaxPool2d", 3, 2, 1), IMAGE),
    "avg pool": (lambda: nn.AvgPool2d((2, 3)), same("AvgPool2d", (2, 3)), IMAGE),
    "avg pool padded": (lambda: nn.AvgPool2d(3, 2, 1), same("AvgPool2d", 3, 2, 1), IMAGE),
    "global avg pool": (
        lambda: nn.GlobalAvgPool2d(), chain(same("AdaptiveAvgPool2d", 1), same("Flatten")), IMAGE,
    ),
    "flatten": (lambda: nn.Flatten(), same("Flatten"), IMAGE),
    "flatten later": (lambda: nn.Flatten(2), same("Flatten", 2), IMAGE),
    "layer norm": (lambda: nn.LayerNorm((5, 12)), same("LayerNorm", (5, 12)), TOKENS),
    "layer norm no bias": (
        lambda: nn.LayerNorm(12, bias=False), same("LayerNorm", 12, bias=False), TOKENS,
    ),
    "rms norm": (lambda: nn.RMSNorm(12, 1e-3), same("RMSNorm", 12, 1e-3), TOKENS),
    "group norm": (lambda: nn.GroupNorm(2, 4), same("GroupNorm", 2, 4), IMAGE),
    "group norm flat": (lambda: nn.GroupNorm(2, 4), same("GroupNorm", 2, 4), FLAT),
    "instance norm": (
        lambda: nn.InstanceNorm(4), same("InstanceNorm2d", 4, affine=True), IMAGE,
    ),
    "batch norm": (lambda: nn.BatchNorm2d(4), same("BatchNorm2d", 4), IMAGE),
    "dropout of nothing": (lambda: nn.Dropout(0.0), same("Dropout", 0.0), TOKENS),
    "dropout2d of nothing": (lambda: nn.Dropout2d(0.0), same("Dropout2d", 0.0), IMAGE),
    "embedding": (lambda: nn.Embedding(7, 3, rng=0), same("Embedding", 7, 3), (4, 5)),
    **{
        f"attention{' causal' * causal}{' no bias' * (not bias)}": (
            lambda causal=causal, bias=bias: nn.MultiheadAttention(
                12, 4, causal=causal, bias=bias, rng=0
            ),
            attention(causal, bias),
            TOKENS,
        )
        for causal, bias in itertools.product((False, True), repeat=2)
    },
    "attention grouped rotary": (
        lambda: nn.MultiheadAttention(12, 6, 2, causal=True, rotary=100.0, bias=False, rng=0),
        llama_attention,
        TOKENS,
    ),
    "feed forward": (
        lambda: nn.FeedForward(12, 20, rng=0),
        chain(same("Linear", 12, 20), same("GELU"), same("Linear", 20, 12)),
        TOKENS,
    ),
    "feed forward swiglu": (
        lambda: nn.FeedForward(12, 10, "swiglu", False, rng=0), swiglu_feed_forward, TOKENS,
    ),
    "transformer block": (
        lambda: nn.TransformerBlock(
            nn.MultiheadAttention(12, 4, rng=0), nn.FeedForward(12, 48, rng=0)
        ),
        block(False),
        TOKENS,
    ),
    "transformer block causal": (
        lambda: nn.TransformerBlock(
            nn.MultiheadAttention(12, 4, causal=True, rng=0), nn.FeedForward(12, 48, rng=0)
        ),
        block(True),
        TOKENS,
    ),
    "llama block": (
        lambda: nn.TransformerBlock(
            nn.MultiheadAttention(12, 6, 2, causal=True, rotary=100.0, bias=False, rng=0),
            nn.FeedForward(12, 8, "swiglu", bias=False, rng=0),
            norm="rms",
        ),
        llama_block,
        TOKENS,
    ),
    "mixture of experts": (
        lambda: nn.MixtureOfExperts(
            TopKRouter(12, 4, active=2, rng=0),
            nn.ModuleList([nn.FeedForward(12, 6, rng=i) for i in range(4)]),
        ),
        mixture,
        TOKENS,
    ),
    "lstm": (
        lambda: nn.LSTM(12, 4, num_layers=2, bidirectional=True, batch_first=True, rng=0),
        recurrent("LSTM"),
        TOKENS,
    ),
    "gru": (
        lambda: nn.GRU(12, 4, num_layers=2, bidirectional=True, batch_first=True, rng=0),
        recurrent("GRU"),
        TOKENS,
    ),
    "sequential": (
        lambda: nn.Sequential(nn.Linear(4, 5, rng=0), nn.Tanh(), nn.Linear(5, 2, rng=1)),
        chain(same("Linear", 4, 5), same("Tanh"), same("Linear", 5, 2)),
        FLAT,
    ),
    "relu": (lambda: nn.ReLU(), same("ReLU"), FLAT),
    "relu6": (lambda: nn.ReLU6(), same("ReLU6"), FLAT),
    "sigmoid": (lambda: nn.Sigmoid(), same("Sigmoid"), FLAT),
    "tanh": (lambda: nn.Tanh(), same("Tanh"), FLAT),
    "silu": (lambda: nn.SiLU(), same("SiLU"), FLAT),
    "mish": (lambda: nn.Mish(), same("Mish"), FLAT),
    "selu": (lambda: nn.SELU(), same("SELU"), FLAT),
    "hard sigmoid": (lambda: nn.HardSigmoid(), same("Hardsigmoid"), FLAT),
    "hard swish": (lambda: nn.HardSwish(), same("Hardswish"), FLAT),
    "hard tanh": (lambda: nn.HardTanh(), same("Hardtanh"), FLAT),
    "softplus": (lambda: nn.Softplus(), same("Softplus"), FLAT),
    "elu": (lambda: nn.ELU(0.5), same("ELU", 0.5), FLAT),
    "gelu": (lambda: nn.GELU(), same("GELU"), FLAT),
    "gelu tanh": (lambda: nn.GELU("tanh"), same("GELU", "tanh"), FLAT),
    "leaky relu": (lambda: nn.LeakyReLU(0.2), same("LeakyReLU", 0.2), FLAT),
    "prelu": (lambda: nn.PReLU(0.1), same("PReLU", 1, 0.1), FLAT),
    "softmax": (lambda: nn.Softmax(0), same("Softmax", 0), FLAT),
    "log softmax": (lambda: nn.LogSoftmax(), same("LogSoftmax", -1), FLAT),
}  # fmt: skip

BASES = {nn.Module, nn.ModuleList}
"""What computes nothing: the base class, and a list that cannot be called."""

FROZEN = {nn.LoRA, nn.DoRA}
"""Layers whose base gets no gradient: tests/unit/nn/test_lora.py has their formulas."""


def test_every_layer_has_a_peer() -> None:
    made = {type(part) for make, _, _ in PEERS.values() for part in make().modules()}
    offered = {
        thing
        for name in nn.__all__
        if inspect.isclass(thing := getattr(nn, name)) and issubclass(thing, nn.Module)
    }
    assert len(offered) > 35
    missing = {layer.__name__ for layer in offered - BASES - FROZEN - made}
    assert not missing, f"layers that nothing compares with torch: {sorted(missing)}"


def test_a_repr_makes_its_layer_again() -> None:
    leaves = {
        repr(part): part
        for make, _, _ in PEERS.values()
        for part in make().modules()
        if "\n" not in repr(part)
    }
    assert len(leaves) > 50
    for text, layer in leaves.items():
        again = eval(text, vars(sys.modules[type(layer).__module__]))
        assert repr(again) == text and type(again) is type(layer)
        for name, value in vars(layer).items():
            if isinstance(value, bool | int | float | str | tuple) and name != "seed":
                assert getattr(again, name) == value, (text, name)
        assert {n: p.shape for n, p in again.named_parameters()} == {
            n: p.shape for n, p in layer.named_parameters()
        }, text


def as_dtype(p: Any, values: np.ndarray) -> None:
    p.data, p.dtype = p.backend.xp.asarray(values), et.ExTensor(values).dtype


class Ours:
    """Our layer, its weights off their round initial values."""

    def __init__(self, case: str, dtype: Any, training: bool = True) -> None:
        make, _, self.shape = PEERS[case]
        self.integers = case == "embedding"
        self.mine = make().train(training)
        rng = np.random.default_rng(0)
        for p in self.mine.parameters():
            as_dtype(p, (p.numpy() + 0.5 * rng.random(p.shape)).astype(dtype))

    def drawn(self, rng: np.random.Generator, dtype: Any) -> np.ndarray:
        """An input."""
        if self.integers:
            return rng.integers(0, 7, self.shape)
        return rng.standard_normal(self.shape).astype(dtype)


class Pair(Ours):
    """Our layer and torch's with the same weights."""

    def __init__(self, torch: Any, case: str, dtype: Any, training: bool = True) -> None:
        super().__init__(case, dtype, training)
        self.torch = torch
        self.theirs, parameters = PEERS[case][1](torch)
        if isinstance(self.theirs, torch.nn.Module):
            self.theirs.train(training)
            self.theirs.to(torch.float64 if dtype == np.float64 else torch.float32)
        self.pairs = list(zip(self.mine.parameters(), parameters, strict=True))
        for p, q in self.pairs:
            q.data = torch.tensor(p.numpy().reshape(tuple(q.shape)))

    def inputs(self, rng: np.random.Generator, dtype: Any) -> tuple[Any, Any]:
        values, trained = self.drawn(rng, dtype), not self.integers
        return (
            et.ExTensor(values, requires_grad=trained),
            self.torch.tensor(values, requires_grad=trained),
        )

    def backward(self, rng: np.random.Generator, x: Any, z: Any) -> tuple[Any, Any]:
        y, expected = self.mine(x), self.theirs(z)
        y = y[0] if isinstance(y, tuple) else y
        g = rng.standard_normal(y.shape).astype(y.numpy().dtype)
        for _, q in self.pairs:
            q.grad = None
        self.mine.zero_grad()
        y.backward(et.ExTensor(g))
        expected.backward(self.torch.tensor(g))
        return y, expected


def torch_or_skip() -> Any:
    return pytest.importorskip("torch", reason="torch is the oracle: pip install -e .[peers]")


@pytest.mark.parametrize("case", PEERS)
@pytest.mark.parametrize("training", [True, False])
def test_outputs_and_gradients_as_torch(case: str, training: bool) -> None:
    """In float32: sums of up to 100 terms near 1, each side 2**-24 a term."""
    pair = Pair(torch_or_skip(), case, np.float32, training)
    rng = np.random.default_rng(1)
    x, z = pair.inputs(rng, np.float32)
    y, want = pair.backward(rng, x, z)
    np.testing.assert_allclose(y.numpy(), want.detach().numpy(), rtol=2e-5, atol=5e-6)
    both = pair.pairs if pair.integers else [(x, z), *pair.pairs]
    for p, q in both:
        got = p.grad.numpy().reshape(tuple(q.shape))
        np.testing.assert_allclose(got, q.grad.numpy(), rtol=1e-4, atol=5e-5)
    if case == "batch norm":
        for name in ("running_mean", "running_var"):
            got, expected = (getattr(side, name) for side in (pair.mine, pair.theirs))
            np.testing.assert_allclose(got.numpy(), expected.numpy(), rtol=1e-5, atol=1e-7)


# ---- torch's values, stored


def sums(arrays: Iterable[Any]) -> list[list[float]]:
    """Two weighted sums of each array, and the sum of its magnitudes."""
    found = []
    for array in arrays:
        flat = np.asarray(array, np.float64).reshape(-1)
        place = np.arange(flat.size)
        found.append([float(np.cos(k * place + k) @ flat) for k in (1, 2)] + [abs(flat).sum()])
    return found


def buffers(layer: Any) -> list[Any]:
    """What a layer has learned of its inputs."""
    found = [getattr(layer, name, None) for name in ("running_mean", "running_var")]
    return [buffer for buffer in found if buffer is not None]


def ours(case: str, training: bool) -> list[list[float]]:
    """Of the output, the gradients and the buffers of a step in float64."""
    made, rng = Ours(case, np.float64, training), np.random.default_rng(1)
    x = et.ExTensor(made.drawn(rng, np.float64), requires_grad=not made.integers)
    y = made.mine(x)
    y = y[0] if isinstance(y, tuple) else y
    y.backward(et.ExTensor(rng.standard_normal(y.shape)))
    grads = [t.grad for t in ([] if made.integers else [x]) + list(made.mine.parameters())]
    assert all(g is not None for g in grads)
    return sums(t.numpy() for t in [y, *grads, *buffers(made.mine)] if t is not None)


def torchs(torch: Any, case: str, training: bool) -> list[list[float]]:
    pair, rng = Pair(torch, case, np.float64, training), np.random.default_rng(1)
    x, z = pair.inputs(rng, np.float64)
    _, y = pair.backward(rng, x, z)
    grads = [t.grad for t in ([] if pair.integers else [z]) + [q for _, q in pair.pairs]]
    return sums(t.detach().numpy() for t in [y, *grads, *buffers(pair.theirs)])


def near(got: list[list[float]], stored: list[list[float]], share: float) -> None:
    """Each sum within a share of the sum of magnitudes."""
    assert len(got) == len(stored)
    for row, expected in zip(got, stored, strict=True):
        np.testing.assert_allclose(row, expected, rtol=0, atol=share * expected[2] + 1e-12)


SHARES = {"hard sigmoid": 1e-6, "batch norm": 1e-6}
"""Torch's sixth and our averages are float32. Others: a few hundred operations, exact to 2^-53."""


@pytest.mark.parametrize("case", PEERS)
def test_outputs_and_gradients_as_stored_of_torch(case: str) -> None:
    """Without torch: `python -m tests.test_every_layer` writes its sums."""
    stored = json.loads(STORED.read_text(encoding="utf-8"))[case]
    for training, of_torch in zip((True, False), stored, strict=True):
        near(ours(case, training), of_torch, SHARES.get(case, 1e-10))


@pytest.mark.parametrize("case", PEERS)
def test_what_is_stored_is_torchs(case: str) -> None:
    stored = json.loads(STORED.read_text(encoding="utf-8"))[case]
    for training, expected in zip((True, False), stored, strict=True):
        near(torchs(torch_or_skip(), case, training), expected, SHARES.get(case, 1e-10))


@pytest.mark.parametrize("case", PEERS)
def test_twenty_steps_as_torch(case: str) -> None:
    """Forward, backward and SGD in float64: 1e-11 apart in the first step, then 1e-8.

    (Adam would scale up rounding where a gradient is zero in exact arithmetic: the keys' bias.)
    """
    torch = torch_or_skip()
    pair = Pair(torch, case, np.float64)
    rng = np.random.default_rng(2)
    x, z = pair.inputs(rng, np.float64)
    trained = pair.pairs if pair.integers else [*pair.pairs, (x, z)]
    rate = 1e-4 if case == "llama block" else 0.002  # it grows without a bound under more
    ours = SGD([p for p, _ in trained], lr=rate)
    reference = torch.optim.SGD([q for _, q in trained], lr=rate)
    for step in range(20):
        if pair.integers:
            x, z = pair.inputs(rng, np.float64)
        x.grad = z.grad = None
        y, expected = pair.backward(rng, x, z)
        # A few hundred operations of values near 1, each exact to 2^-53; steps make it grow.
        near = {"rtol": 1e-8, "atol": 1e-9} if step else {"rtol": 1e-11, "atol": 1e-11}
        np.testing.assert_allclose(y.numpy(), expected.detach().numpy(), **near)
        for p, q in trained if case != "hard sigmoid" else ():  # torch's sixth is a float32
            np.testing.assert_allclose(p.grad.numpy().reshape(tuple(q.shape)), q.grad, **near)
        ours.step()
        reference.step()
        for p, q in trained:
            got = p.numpy().reshape(tuple(q.shape))
            np.testing.assert_allclose(got, q.detach().numpy(), **near)


@pytest.mark.parametrize("case", ["Dropout", "Dropout2d"])
def test_dropout_as_torch_with_the_same_draws(case: str) -> None:
    """What was kept decides everything else: values and gradients are then torch's product."""
    torch = torch_or_skip()
    layer = getattr(nn, case)(0.25, rng=0)
    values = np.random.default_rng(0).standard_normal((8, 16, 3, 3)) + 10.0
    x, z = et.ExTensor(values, requires_grad=True), torch.tensor(values, requires_grad=True)
    for _ in range(20):
        y = layer(x)
        expected = z * torch.tensor(y.numpy() != 0) / (1.0 - 0.25)
        # the factor is float32(1) / float32(0.75), within 2**-24 of 4 / 3
        np.testing.assert_allclose(y.numpy(), expected.detach().numpy(), rtol=2.0**-23)
        x.grad = z.grad = None
        y.square().sum().backward()
        expected.square().sum().backward()
        assert x.grad is not None
        np.testing.assert_allclose(x.grad.numpy(), z.grad.numpy(), rtol=2.0**-21)


def write() -> None:
    """Store torch's values."""
    import torch

    rows = {c: [torchs(torch, c, training) for training in (True, False)] for c in PEERS}
    short = {c: [[[float(f"{v:.13g}") for v in t] for t in row] for row in both]
             for c, both in rows.items()}  # fmt: skip
    lines = (f"{json.dumps(case)}: {json.dumps(both)}" for case, both in short.items())
    STORED.write_text("{" + ",\n".join(lines) + "}\n", encoding="utf-8")


if __name__ == "__main__":
    write()
