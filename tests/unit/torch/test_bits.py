"""Layers in torch give what extensor's own layers give, bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import extensor as et
from extensor.backends import registry

torch = pytest.importorskip("torch")
ext = pytest.importorskip("extensor.torch")

SEED, INDEX = 5, 3


@pytest.fixture(params=["cpu", "cuda"])
def device(request: pytest.FixtureRequest) -> Any:
    """Where torch makes its tensors."""
    if request.param == "cuda" and not (torch.cuda.is_available() and registry.available("cuda")):
        pytest.skip("needs an NVIDIA GPU, torch with CUDA, and the extra cuda13")
    with torch.device(request.param):
        yield request.param


def bits(a: Any) -> np.ndarray:
    """The bytes of a tensor of either library."""
    if isinstance(a, torch.Tensor):
        a = a.detach().cpu().contiguous().view(torch.uint8).numpy()
    else:
        a = a.numpy()
    return np.ascontiguousarray(a).view(np.uint8)


def ours(values: torch.Tensor) -> et.ExTensor:
    on_host = et.ExTensor.from_dlpack(values.detach().cpu().clone())
    return on_host.to(values.device.type)


def parameter(values: torch.Tensor) -> et.nn.Parameter:
    return et.nn.Parameter(ours(values).data, device=values.device.type)


def own_layer(layer: Any, recipe: str, own: et.nn.Module, steps: int = 0) -> et.nn.Module:
    """extensor's layer with a torch layer's weights, number and step."""
    own.weight = parameter(layer.weight)
    own.bias = None if layer.bias is None else parameter(layer.bias)
    state = et.nn.apply_recipe(own, recipe, seed=SEED)
    state.step = steps
    state.layers[""].index = INDEX
    state.layers[""].layer = et.RECIPES[recipe].layers
    return own


def check_pass(layer: Any, own: Any, x: torch.Tensor, g: torch.Tensor) -> None:
    """One forward and backward pass of both."""
    theirs = x.clone().requires_grad_()
    mine = ours(x).requires_grad_()
    y = layer(theirs)
    out = own(mine)
    assert y.dtype == g.dtype
    np.testing.assert_array_equal(bits(y), bits(out), "fprop")
    layer.zero_grad()
    own.zero_grad()
    y.backward(g)
    out.backward(ours(g))
    np.testing.assert_array_equal(bits(theirs.grad), bits(mine.grad), "dgrad")
    np.testing.assert_array_equal(bits(layer.weight.grad), bits(own.weight.grad), "wgrad")
    if layer.bias is not None:
        np.testing.assert_array_equal(bits(layer.bias.grad), bits(own.bias.grad), "bias")


@pytest.mark.parametrize("recipe", et.RECIPES)
def test_linear_has_the_bits_of_every_recipe(recipe: str, device: str) -> None:
    torch.manual_seed(0)
    layer = ext.Linear(72, 40, recipe=recipe, seed=SEED, index=INDEX)
    own = own_layer(layer, recipe, et.nn.Linear(72, 40))
    for shape in ((33, 72), (2, 5, 72)):  # the second pass is another use of the same step
        check_pass(layer, own, torch.randn(shape), torch.randn(*shape[:-1], 40))


@pytest.mark.parametrize("recipe", et.RECIPES)
def test_conv2d_has_the_bits_of_every_recipe(recipe: str, device: str) -> None:
    torch.manual_seed(0)
    groups = 1 if et.RECIPES[recipe].layers.uses_forward_operands else 2  # Quartet refuses groups
    shape = {"stride": 2, "padding": 1, "groups": groups}
    layer = ext.Conv2d(8, 12, 3, **shape, recipe=recipe, seed=SEED, index=INDEX)
    own = own_layer(layer, recipe, et.nn.Conv2d(8, 12, 3, **shape))
    for _ in range(2):
        check_pass(layer, own, torch.randn(3, 8, 9, 7), torch.randn(3, 12, 5, 4))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("recipe", ["mxfp4", "nvfp4_nvidia", "mxfp8_rebased", "fp32"])
def test_16_bit_layers_have_the_bits(dtype: str, recipe: str, device: str) -> None:
    torch.manual_seed(0)
    kind = getattr(torch, dtype)
    options = {"recipe": recipe, "seed": SEED, "index": INDEX, "dtype": kind}
    layer = ext.Linear(64, 48, **options)
    own = own_layer(layer, recipe, et.nn.Linear(64, 48))
    check_pass(layer, own, torch.randn(32, 64).to(kind), torch.randn(32, 48).to(kind))
    conv = ext.Conv2d(4, 6, 3, **options)
    own = own_layer(conv, recipe, et.nn.Conv2d(4, 6, 3))
    check_pass(conv, own, torch.randn(2, 4, 8, 8).to(kind), torch.randn(2, 6, 6, 6).to(kind))


@pytest.mark.parametrize("kind", ["bfloat16", "float16"])
def test_inputs_narrower_than_the_weights_promote(kind: str, device: str) -> None:
    torch.manual_seed(0)
    layer = ext.Linear(64, 48, recipe="mxfp4", seed=SEED, index=INDEX)
    own = own_layer(layer, "mxfp4", et.nn.Linear(64, 48))
    check_pass(layer, own, torch.randn(32, 64).to(getattr(torch, kind)), torch.randn(32, 48))


@pytest.mark.parametrize("recipe", ["mxfp4_all", "mxfp4_tseng", "int8"])
def test_random_bits_follow_step_and_use(recipe: str, device: str) -> None:
    """Two passes in a step, an update, then two in the next: the bits of extensor's optimizer."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64, bias=False))
    ext.quantize_(model, recipe, seed=SEED)
    own = et.nn.Sequential(et.nn.Linear(64, 64, bias=False))
    own[0].weight = parameter(model[0].weight)
    et.nn.apply_recipe(own, recipe, seed=SEED)
    step = torch.optim.SGD(model.parameters(), lr=2.0**-4)
    own_step = et.optim.SGD(own.parameters(), lr=2.0**-4)
    for _ in range(2):
        step.zero_grad()
        own_step.zero_grad()
        for _ in range(2):
            x, g = torch.randn(32, 64), torch.randn(32, 64)
            model(x).backward(g)
            own(ours(x)).backward(ours(g))
            np.testing.assert_array_equal(bits(model[0].weight.grad), bits(own[0].weight.grad))
        step.step()
        own_step.step()
        np.testing.assert_array_equal(bits(model[0].weight), bits(own[0].weight))


def test_layers_of_a_model_have_extensors_numbers_and_roles() -> None:
    sizes = ((32, 64), (64, 64), (64, 64), (64, 8))
    model = torch.nn.Sequential(*(torch.nn.Linear(*s) for s in sizes))
    ext.quantize_(model, "mxfp4", seed=SEED)
    own = et.nn.Sequential(*(et.nn.Linear(*s) for s in sizes))
    state = et.nn.apply_recipe(own, "mxfp4", seed=SEED)
    for path, module in ext.quantized_modules(model).items():
        found, expected = module.quant_layer.context, state.layers[path]
        assert (found.index, found.layer) == (expected.index, expected.layer)


def test_telemetry_counts_what_extensor_counts(device: str) -> None:
    torch.manual_seed(0)
    layer = ext.Linear(64, 48, recipe="mxfp4", seed=SEED, index=INDEX)
    own = own_layer(layer, "mxfp4", et.nn.Linear(64, 48))
    check_pass(layer, own, 100 * torch.randn(32, 64), torch.randn(32, 48))
    assert ext.telemetry(layer) == dict(own.quant.state.telemetry)
    assert ext.telemetry(layer)["", "dgrad.g"].flushed > 0


def test_an_empty_batch_gives_empty_results(device: str) -> None:
    layer = ext.Linear(64, 48, recipe="mxfp4")
    x = torch.zeros(0, 64, requires_grad=True)
    layer(x).sum().backward()
    assert x.grad.shape == (0, 64) and not layer.weight.grad.any()


def test_a_vector_is_one_row() -> None:
    layer = ext.Linear(64, 48, recipe="mxfp4_nearest")
    x = torch.randn(64)
    assert torch.equal(layer(x), layer(x[None])[0])
