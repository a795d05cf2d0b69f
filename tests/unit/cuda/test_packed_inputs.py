"""What quantized layers keep on a GPU: the bits of inputs that are kept, in the bytes of a formula.

Values on a GPU made of numpy, and on a GPU where there is one; bytes on one that launches nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import extensor as et
from extensor import nn
from extensor.inspect import memory_ledger
from extensor.quant.kept import kept_nbytes
from extensor.quant.recipes import RECIPES, get_recipe
from extensor.quant.round_to_odd import odd_bits, odd_planes
from extensor.quant.spec import QuantSpec
from extensor_cuda import quantize
from extensor_cuda.matmul import prepare, tuned
from tests.recipes import DISTINCT
from tests.unit.cuda import dry
from tests.unit.cuda.fake import FakeCupy
from tests.unit.cuda.graphs import both, gpt, lenet, train

BF16 = np.dtype(ml_dtypes.bfloat16)
ON_A_GPU = ("fp8_tensor", "fp8_block", "int8")
"""Recipes that the GPU made of numpy has no kernels of."""


# --- planes of bits ----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.dtype(np.float32), BF16], ids=str)
@pytest.mark.parametrize("bits", [13, 15, 21, 28])
def test_planes_are_those_of_the_reference(trainer: Any, bits: int, dtype: Any) -> None:
    if bits > 8 * dtype.itemsize:
        pytest.skip("as many bits as the values have")
    xp, rng = trainer.xp, np.random.default_rng(bits)
    word = np.uint32 if dtype == np.float32 else np.uint16
    for shape in ((1,), (31,), (2, 3, 4, 5), (257,), (1024,)):
        x = rng.integers(0, 1 << 8 * dtype.itemsize, shape, dtype=np.uint64).astype(word)
        x.reshape(-1)[::3] >>= word(9)  # subnormal ones, too
        x = x.view(dtype)
        kept = quantize.round_to_odd(xp, xp.asarray(x), bits)()
        expected = odd_planes(x, bits, np)
        assert kept.words.get().tobytes() == expected.words.tobytes(), shape
        restored = quantize.odd_values(xp, kept)().get()
        assert restored.tobytes() == expected.values(np).tobytes(), shape


@pytest.mark.parametrize("bits", [13, 16, 21])
@pytest.mark.usefixtures("nvrtc")
def test_the_kernels_of_planes_compile_without_spills(bits: int) -> None:
    from extensor_cuda.kernels.quantize.odd_planes import source
    from extensor_cuda.runtime.compile import compile_cubin
    from tests.unit.cuda.test_compile import properties

    code, log = compile_cubin(source(32, bits), "sm_90a")
    assert "warning" not in log, log
    for numbers in properties(code).values():
        assert numbers["stack"] == 0, numbers


# --- gradients ---------------------------------------------------------------------------------


class Images(nn.Module):
    """Convolutions of all kinds behind rectifiers, two of one input, then a layer."""

    def __init__(self, groups: int) -> None:
        self.first = nn.Conv2d(4, 8, 3, padding=1, rng=0)
        self.second = nn.Conv2d(8, 16, 3, stride=2, padding=1, groups=groups, bias=False, rng=1)
        self.shortcut = nn.Conv2d(8, 16, 1, stride=2, bias=False, rng=2)
        self.head = nn.Linear(16, 32, rng=3)

    def forward(self, x: et.ExTensor) -> et.ExTensor:
        x = self.first(x + x).relu()  # a kernel of ours: cupy's take subnormal values for zero
        x = (self.second(x) + self.shortcut(x)).relu()
        return self.head(x.mean(axis=(2, 3)).relu())


class Rows(nn.Module):
    """Layers of one input, and one behind a rectifier."""

    def __init__(self, width: int) -> None:
        self.q, self.k = (nn.Linear(width, width, rng=n) for n in (0, 1))
        self.out = nn.Linear(width, width, rng=2)

    def forward(self, x: et.ExTensor) -> et.ExTensor:
        x = x * 2.0
        return self.out((self.q(x) * self.k(x)).relu())


def gradients(model: nn.Module, x: np.ndarray, recipe: Any, saved: str, dtype: str) -> list[Any]:
    """Of two steps, with the counts."""
    model = model.to("cuda")
    state = nn.apply_recipe(model, replace(recipe, saved_input=saved), seed=5)
    found: list[Any] = []
    for number in range(2):
        given = et.from_numpy(x * np.float32(number + 1)).to("cuda").to(dtype)
        given.requires_grad = True
        model(given).square().mean().backward()
        found += [given.grad.numpy(), *(p.grad.numpy() for p in model.parameters())]
        state.next_step()
    return [*found, dict(state.telemetry)]


def are_the_same(make: Callable[[], nn.Module], x: np.ndarray, recipe: Any, dtype: str) -> None:
    kept, packed = (gradients(make(), x, recipe, how, dtype) for how in ("input", "packed"))
    assert kept[-1] == packed[-1]
    for a, b in zip(kept[:-1], packed[:-1], strict=True):
        assert a.tobytes() == b.tobytes()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", DISTINCT)
def test_gradients_are_those_of_inputs_that_are_kept(gpu: Any, name: str, dtype: str) -> None:
    if name in ON_A_GPU and isinstance(gpu.xp, FakeCupy):
        pytest.skip("runs on a GPU only")
    recipe, rng = RECIPES[name], np.random.default_rng(1)
    groups = 1 if recipe.layers.uses_forward_operands else 2
    images = rng.standard_normal((2, 4, 6, 5)).astype(np.float32)
    images[:, 1] *= np.float32(2.0**-128)  # subnormal, which 12 bits would not hold
    rows = rng.standard_normal((6, 64)).astype(np.float32)
    are_the_same(partial(Images, groups), images, recipe, dtype)
    are_the_same(partial(Rows, 64), rows, recipe, dtype)


@pytest.mark.parametrize("name", DISTINCT)
def test_gradients_of_tensor_cores_are_those_of_inputs_that_are_kept(
    hopper_gpu: Any, name: str
) -> None:
    x = np.random.default_rng(1).standard_normal((384, 256)).astype(np.float32)
    with tuned.always():
        for dtype in ("float32", "bfloat16"):
            are_the_same(partial(Rows, 256), x, RECIPES[name], dtype)


@pytest.mark.parametrize("recipe", ["mxfp4_all", "mxfp8_rebased"])
@pytest.mark.parametrize("make", [lenet, gpt])
def test_captured_steps_keep_packed_inputs(gpu: Any, make: Any, recipe: str) -> None:
    packed = replace(get_recipe(recipe), saved_input="packed")
    kept = replace(packed, saved_input="input")
    eager = both(lambda wrap: train(wrap, make, packed, False))
    whole = train(et.capture, make, kept, False)
    assert [[a.tobytes() for a in one] for one in eager["losses"]] == [
        [a.tobytes() for a in one] for one in whole["losses"]
    ]


def test_an_image_of_one_bit_fewer_is_caught(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = type(gpu).round_to_odd
    monkeypatch.setattr(type(gpu), "round_to_odd", lambda self, x, bits: honest(self, x, bits - 1))
    with pytest.raises(AssertionError):
        test_gradients_are_those_of_inputs_that_are_kept(gpu, "mxfp4_all", "float32")


# --- bytes -------------------------------------------------------------------------------------


def saved_by(layer: nn.Module, x: et.ExTensor) -> int:
    """Bytes that a forward pass keeps: a pool's multiples of 512, without what takes one alone."""
    with memory_ledger(layer, device="cuda") as ledger:
        out = layer(x)
        del x
        found = [one.nbytes for one in ledger.report().at(-1) if one.kind == "saved"]
    assert out.shape
    return sum(n for n in found if n > 512)


REBASED = ("mxfp8_rebased",)
"""Kept in FP8 with the scales of tiles, where tensor cores multiply."""


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", [name for name in DISTINCT if name not in REBASED])
def test_a_layer_keeps_the_bytes_of_the_formula(
    monkeypatch: pytest.MonkeyPatch, name: str, dtype: str
) -> None:
    monkeypatch.setattr(prepare, "_BATCHED", 0)  # else small weights' operands are kept, too
    dry.install(monkeypatch)
    recipe = replace(RECIPES[name], rules=(), saved_input="packed")
    for rows, width in ((1024, 256), (2048, 1024)):  # below 2**30 multiplications, and above
        layer = nn.Linear(width, width, bias=False, rng=0).to("cuda")
        nn.apply_recipe(layer, recipe)
        sizes = (rows, width), (width, width)
        expected = kept_nbytes(recipe.layers, *sizes, dtype, "cuda")
        found = saved_by(layer, et.zeros((rows, width)).to("cuda").to(dtype) + 0.0)
        assert found == expected // 512 * 512, (rows, width)


def test_what_is_decoded_of_weights_in_blocks_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another layer's operands were made with it, of values from before, in memory given back."""
    dry.install(monkeypatch)
    model = nn.Sequential(*(nn.Linear(256, 256, bias=False, rng=n) for n in range(3)))
    nn.cast_weights(model, "mxint8")
    state = nn.apply_recipe(model.to("cuda"), "mxfp4_all")
    x = et.zeros((1024, 256)).to("cuda")
    for _ in range(2):
        model(x).square().mean().backward()
    assert not len(state.weight_cache)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", DISTINCT)
def test_a_convolution_keeps_the_bytes_of_the_formula(
    monkeypatch: pytest.MonkeyPatch, name: str, dtype: str
) -> None:
    dry.install(monkeypatch)
    recipe = replace(RECIPES[name], rules=(), saved_input="packed")
    layer = nn.Conv2d(16, 8, 3, padding=1, bias=False, rng=0).to("cuda")
    nn.apply_recipe(layer, recipe)
    x = et.zeros((8, 16, 16, 16)).to("cuda").to(dtype) + 0.0
    expected = kept_nbytes(recipe.layers, x.shape, layer.weight.shape, dtype, "cuda")
    assert saved_by(layer, x) == expected


BITS = [
    ("mxfp4_all", "float32", 13),
    ("mxfp4_all", "bfloat16", 13),
    ("mxfp8_nvidia", "float32", 21),
]


@pytest.mark.parametrize(("name", "dtype", "bits"), BITS)
def test_bits_of_an_image(name: str, dtype: str, bits: int) -> None:
    layer, values = RECIPES[name].layers, 4 * 8 * 16
    kept = kept_nbytes(layer, (4, 1, 8, 16), (8, 1, 3, 3), dtype, "cuda")
    assert 8 * kept / values == bits
    assert odd_bits(QuantSpec("mxfp8_e4m3"), BF16, True) is None
