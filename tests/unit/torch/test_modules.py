"""Quantized modules behave as torch's modules do: state, copies, devices, modes, errors."""

from __future__ import annotations

import contextlib
import copy
import io
import pickle
import weakref
from dataclasses import replace
from typing import Any

import pytest

import extensor as et
from extensor.quant.recipe import Gemm, LayerRecipe, SavedRule

torch = pytest.importorskip("torch")
ext = pytest.importorskip("extensor.torch")

from torch import nn  # noqa: E402
from torch.nn.utils import parametrizations  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

STOCHASTIC = et.QuantSpec("mxfp4", rounding="stochastic")
FORWARD_TOO = replace(
    et.RECIPES["mxfp4_all"],
    name="stochastic",
    layers=LayerRecipe(*[Gemm(STOCHASTIC, STOCHASTIC)] * 3),
)
"""Every operand is random, so that a pass with other bits has another result."""


def network(recipe: Any = "mxfp4_all", seed: int = 1) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))
    return ext.quantize_(model, recipe, seed=seed)


def gradients(model: nn.Module) -> list[torch.Tensor]:
    found = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    return found


def train(model: nn.Module, optimizer: Any, steps: int, start: int = 0) -> list[float]:
    losses = []
    for step in range(start, start + steps):
        torch.manual_seed(step)
        optimizer.zero_grad()
        loss = model(torch.randn(16, 32)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


# --- random bits


def test_each_forward_pass_draws_new_bits() -> None:
    model = network(FORWARD_TOO)
    x = torch.randn(16, 32)
    assert not torch.equal(model(x), model(x))


def test_passes_without_gradients_leave_the_clock_alone() -> None:
    model = network(FORWARD_TOO)
    x = torch.randn(16, 32)
    with torch.no_grad():
        first, second = model(x), model(x)
    assert torch.equal(first, second) and torch.equal(first, model(x))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_changes_no_bit(reentrant: bool) -> None:
    plain, saving = network(FORWARD_TOO), network(FORWARD_TOO)
    for _ in range(2):
        x = torch.randn(16, 32, requires_grad=True)
        plain(x).square().mean().backward()
        checkpoint(saving, x, use_reentrant=reentrant).square().mean().backward()
        assert torch.equal(plain[0].quant_clock, saving[0].quant_clock)
        assert same(gradients(plain), gradients(saving))


def test_checkpointing_a_shared_layer_changes_no_bit() -> None:
    """One layer twice in each of two regions, and both regions before the backward pass."""

    def run(model: nn.Module, region: Any) -> list[torch.Tensor]:
        torch.manual_seed(1)
        x = torch.randn(16, 32, requires_grad=True)
        y = region(lambda z: model(model(z)), x) + region(lambda z: model(model(z)), 2 * x)
        y.square().mean().backward()
        return gradients(model)

    plain = run(network(FORWARD_TOO), lambda f, x: f(x))
    saving = run(network(FORWARD_TOO), lambda f, x: checkpoint(f, x, use_reentrant=False))
    assert same(plain, saving)


def test_checkpoints_within_checkpoints_change_no_bit() -> None:
    """The outer region's second run has the inner one in it, whose own second run comes later."""

    def run(model: nn.Module, region: Any) -> list[torch.Tensor]:
        torch.manual_seed(1)
        x = torch.randn(16, 32, requires_grad=True)
        for _ in range(2):  # the second pass begins where the first left the clocks
            region(lambda z: model[2](region(model[1], model[0](z))).square(), x).mean().backward()
        return [*gradients(model), *(m.quant_clock for m in ext.quantized_modules(model).values())]

    def network() -> nn.Module:
        torch.manual_seed(0)
        return ext.quantize_(nn.Sequential(*[nn.Linear(32, 32) for _ in range(3)]), FORWARD_TOO)

    plain = run(network(), lambda f, x: f(x))
    assert same(plain, run(network(), lambda f, x: checkpoint(f, x, use_reentrant=False)))


def test_a_run_resumes_with_the_same_bits() -> None:
    whole, first = network(), network()
    expected = train(whole, torch.optim.SGD(whole.parameters(), 0.5), 6)
    train(first, torch.optim.SGD(first.parameters(), 0.5), 3)
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    second = network()
    second.load_state_dict(torch.load(file, weights_only=True))
    assert train(second, torch.optim.SGD(second.parameters(), 0.5), 3, start=3) == expected[3:]
    bare = {k: v for k, v in first.state_dict().items() if "quant_clock" not in k}
    third = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))
    third.load_state_dict(bare)
    ext.quantize_(third, "mxfp4_all", seed=1, step=3)
    assert train(third, torch.optim.SGD(third.parameters(), 0.5), 3, start=3) == expected[3:]


def test_weights_of_a_float_model_load() -> None:
    model = network()
    float_model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))
    assert not model.load_state_dict(float_model.state_dict()).missing_keys
    assert torch.equal(model[0].weight, float_model[0].weight)


def test_only_random_layers_have_a_clock() -> None:
    assert not any("quant_clock" in name for name in network("mxfp8").state_dict())


def test_a_step_is_that_of_the_weights_optimizer() -> None:
    """Where other parameters have optimizers of their own, as under Muon, or each has one."""
    model = network()
    weights = [p for p in model.parameters() if p.ndim == 2]
    biases = [p for p in model.parameters() if p.ndim == 1]
    both = [torch.optim.SGD(group, 0.1) for group in (weights, biases)]
    for _ in range(3):
        model(torch.randn(4, 32)).square().mean().backward()
        for optimizer in both:
            optimizer.step()
    assert int(model[0].quant_clock) == 3
    model.requires_grad_(False)
    model[0].bias.requires_grad_()
    torch.optim.SGD(biases, 0.1).step()
    assert int(model[0].quant_clock) == 4 and int(model[2].quant_clock) == 3


def test_an_optimizer_within_another_makes_no_second_step() -> None:
    """As ZeroRedundancyOptimizer has one of the parameters that are this process's."""

    class Outer(torch.optim.SGD):  # type: ignore[misc, name-defined]
        def step(self, closure: Any = None) -> None:
            self.inner.step(closure)

    model = network()
    outer = Outer(model.parameters(), 0.1)
    outer.inner = torch.optim.SGD(model[0].parameters(), 0.1)
    for _ in range(2):
        outer.step()
    assert [int(layer.quant_clock) for layer in (model[0], model[2])] == [2, 2]


def test_a_clock_of_another_dtype_says_so() -> None:
    """Its bits would be others, and its memory too short."""
    model = network().type(torch.float16)
    with pytest.raises(TypeError, match=r"expected torch.int64, got torch.float16; .*\.to\(dtype"):
        model(torch.randn(4, 32).half())


def test_a_clock_made_on_the_meta_device_begins_at_zero() -> None:
    with torch.device("meta"):
        layers = [ext.Linear(32, 32, recipe="mxfp4_all") for _ in range(50)]
    found = [int(layer.to_empty(device="cpu").quant_clock) for layer in layers]
    assert found == [0] * 50


# --- weights that change


def test_parameters_are_swapped_after_passes() -> None:
    """As torch swaps them on request in casts and when it loads a state."""
    layer, x = ext.Linear(32, 32, recipe="mxfp4_nearest"), torch.randn(4, 32)
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        for _ in range(3):
            with torch.no_grad():
                layer(x)
        layer.load_state_dict({name: 2 * t for name, t in layer.state_dict().items()})
        expected = copy.deepcopy(layer)(x)
        with torch.no_grad():
            assert torch.equal(layer(x), expected)
        assert layer.to(torch.bfloat16)(x.bfloat16()).dtype is torch.bfloat16
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def test_a_written_weight_is_quantized_again() -> None:
    layer = ext.Linear(32, 32, recipe="mxfp4_nearest")
    x = torch.randn(8, 32)
    with torch.no_grad():
        before = layer(x)
        assert torch.equal(layer(x), before)
        layer.weight.mul_(2)
        expected = 2 * (before - layer.bias) + layer.bias
        torch.testing.assert_close(layer(x), expected)
        layer.weight = nn.Parameter(layer.weight / 2)
        torch.testing.assert_close(layer(x), before)


def test_a_weight_is_quantized_once_for_many_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    from extensor.backends import registry

    backend, made = registry.get("cpu"), []
    real = type(backend).fake_quantize
    monkeypatch.setattr(
        type(backend), "fake_quantize", lambda *a, **k: made.append(a[1].shape) or real(*a, **k)
    )
    layer, x = ext.Linear(32, 48, recipe="mxfp4_nearest"), torch.randn(8, 32)
    for _ in range(2):
        layer(x)  # a weight's operand is kept from its second use on
    once = made.count((48, 32))
    for _ in range(3):
        layer(x)
    assert made.count((48, 32)) == once
    torch.optim.SGD(layer.parameters(), 0.1).step()
    layer(x)
    assert made.count((48, 32)) == once + 1


def test_a_layer_reads_and_gives_torchs_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """No copy on either side: operands are made of torch's arrays, results are the products."""
    from extensor.backends import registry

    backend, read, made = type(registry.get("cpu")), set(), set()
    prepare, product = backend.prepare, backend.product

    def reading(self: Any, x: Any, *rest: Any) -> Any:
        read.add(x.ctypes.data)
        return prepare(self, x, *rest)

    def making(self: Any, *operands: Any) -> Any:
        out = product(self, *operands)
        made.add(out.ctypes.data)
        return out

    monkeypatch.setattr(backend, "prepare", reading)
    monkeypatch.setattr(backend, "product", making)
    layer, g = ext.Linear(32, 48, recipe="mxfp4_all", bias=False), torch.randn(8, 48)
    x = torch.randn(8, 32, requires_grad=True)
    y = layer(x)
    y.backward(g)
    assert {t.data_ptr() for t in (x, layer.weight, g)} <= read
    assert {t.data_ptr() for t in (y, x.grad, layer.weight.grad)} <= made


def test_writing_between_forward_and_backward_is_an_error() -> None:
    layer, x = ext.Linear(32, 32), torch.randn(8, 32)
    y = layer(x)
    with torch.no_grad():
        layer.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_writing_an_input_between_forward_and_backward_is_an_error() -> None:
    layer, x = ext.Linear(32, 32), torch.randn(8, 32)
    y = layer(x)
    x.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_an_input_is_kept_no_longer_than_torch_keeps_it() -> None:
    """Not after the backward pass, and not where hooks have moved what is saved."""
    layer = ext.Linear(32, 32, recipe="mxfp4_nearest")
    moved = torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t)
    for hooks in (contextlib.nullcontext(), moved):
        x = torch.randn(4, 32)
        kept, expected = weakref.ref(x), layer(x)
        expected.sum().backward()
        gradient, layer.weight.grad = layer.weight.grad, None
        with hooks:
            y = layer(x)
        del x
        assert kept() is None or hooks is not moved
        y.sum().backward()
        assert kept() is None
        assert torch.equal(layer.weight.grad, gradient)
        layer.weight.grad = None


def test_inference_mode_has_the_bits_of_no_grad() -> None:
    model, x = network(FORWARD_TOO), torch.randn(16, 32)
    with torch.no_grad():
        expected = model(x)
    with torch.inference_mode():
        found = model(x)
    assert torch.equal(expected, found) and int(model[0].quant_clock) == 0


def test_the_gradient_has_no_second_derivative() -> None:
    layer, x = ext.Linear(32, 32), torch.randn(8, 32, requires_grad=True)
    (dx,) = torch.autograd.grad(layer(x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiated again.* a rule of None"):
        dx.sum().backward()


# --- as torch's modules


def test_copies_and_pickles_go_on_with_the_same_bits() -> None:
    model = network(FORWARD_TOO)
    x = torch.randn(16, 32)
    model(x)
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    y = model(x)
    for other in copies:
        assert other[0].quant_layer.number != model[0].quant_layer.number
        assert torch.equal(other(x), y)
        optimizer = torch.optim.SGD(other.parameters(), 0.1)
        optimizer.step()
        assert int(other[0].quant_clock) == 1


class Wide(nn.Linear):
    """A user's subclass with torch's own forward."""


def test_subclasses_keep_their_class_and_pickle() -> None:
    model = ext.quantize_(nn.Sequential(Wide(32, 32)), "mxfp4_nearest")
    assert isinstance(model[0], Wide) and "recipe='mxfp4_nearest'" in repr(model)
    x = torch.randn(4, 32)
    other = pickle.loads(pickle.dumps(model))
    assert torch.equal(other(x), model(x)) and isinstance(other[0], Wide)
    assert torch.equal(copy.deepcopy(model)(x), model(x))


@pytest.mark.parametrize("before", [False, True])
def test_parametrized_weights(before: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32))
    if before:
        parametrizations.weight_norm(model[0])
    ext.quantize_(model, "mxfp4_all")
    if not before:
        parametrizations.weight_norm(model[0])
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    losses = train(model, optimizer, 5)
    assert losses[-1] < losses[0] and int(model[0].quant_clock) == 5
    plain = ext.Linear(32, 32, recipe="mxfp4_all")
    plain.load_state_dict({"weight": model[0].weight, "bias": model[0].bias})
    x = torch.randn(4, 32)
    assert torch.equal(plain(x), model(x))


def test_shared_weights_sum_their_gradients() -> None:
    model = nn.Sequential(nn.Linear(32, 32, bias=False), nn.Linear(32, 32, bias=False))
    model[1].weight = model[0].weight
    ext.quantize_(model, "mxfp4_nearest")
    x = torch.randn(8, 32)
    model(x).sum().backward()
    both = model[0].weight.grad
    apart = copy.deepcopy(model)
    apart[1].weight = nn.Parameter(model[0].weight.detach().clone())
    apart.zero_grad()
    apart(x).sum().backward()
    assert torch.equal(both, apart[0].weight.grad + apart[1].weight.grad)


def test_gradients_accumulate() -> None:
    model, x = network("mxfp4_nearest"), torch.randn(8, 32)
    model(x).sum().backward()
    once = [p.grad.clone() for p in model.parameters()]
    model(x).sum().backward()
    assert same([2 * g for g in once], gradients(model))


def test_autocast_rounds_results_and_keeps_master_weights() -> None:
    layer = ext.Linear(32, 48, recipe="mxfp4_nearest")
    x = torch.randn(8, 32, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = layer(x)
    assert y.dtype is torch.bfloat16
    torch.testing.assert_close(y, layer(x.bfloat16()).bfloat16(), rtol=0, atol=0)
    y.float().sum().backward()
    assert layer.weight.grad.dtype is x.grad.dtype is torch.float32


def test_bfloat16_parameters() -> None:
    model = network().bfloat16()
    x = torch.randn(8, 32).bfloat16()
    y = model(x)
    y.sum().backward()
    assert y.dtype is torch.bfloat16 and model[0].quant_clock.dtype is torch.int64
    assert model[0].weight.grad.dtype is torch.bfloat16


def test_frozen_weights_get_no_gradient() -> None:
    layer, x = ext.Linear(32, 32), torch.randn(8, 32, requires_grad=True)
    layer.requires_grad_(False)
    layer(x).sum().backward()
    assert x.grad is not None and layer.weight.grad is None


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("recipe", ["mxfp4_nearest", "quartet"])
def test_a_frozen_layer_keeps_its_input_only_if_the_recipe_reads_it(
    recipe: str, traced: bool
) -> None:
    for layer, x in (
        (ext.Linear(32, 64, recipe=recipe), torch.randn(8, 32)),
        (ext.Conv2d(4, 8, 3, recipe=recipe), torch.randn(2, 4, 9, 9)),
    ):
        x, found, kept = x.requires_grad_(), [], []
        for frozen in (False, True):
            layer.requires_grad_(not frozen)
            if layer.quant_clock is not None:
                layer.quant_clock.zero_()
            call = torch.compile(layer, backend="aot_eager") if traced else layer
            saving = torch.autograd.graph.saved_tensors_hooks(
                lambda t, kept=kept: kept.append(t.data_ptr()) or t, lambda t: t
            )
            kept.clear()
            with saving:
                y = call(x)
            if not traced or torch.__version__ >= "2.13":  # older compilers keep it for its shape
                assert (x.data_ptr() in kept) == (not frozen or recipe == "quartet")
            y.square().sum().backward()
            found.append(x.grad)
            x.grad = None
        assert torch.equal(*found)


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@pytest.mark.parametrize("mode", ["zeros", "reflect", "circular"])
@pytest.mark.parametrize("padding", [0, (1, 2), "same", "valid"])
@pytest.mark.parametrize("kernel", [3, 4])
def test_conv2d_pads_as_torch_does(mode: str, padding: Any, kernel: int) -> None:
    conv = nn.Conv2d(4, 8, kernel, padding=padding, padding_mode=mode)
    x = torch.randn(2, 4, 9, 9)
    expected = conv(x)
    ext.quantize_(conv, "fp32")
    torch.testing.assert_close(conv(x), expected)
    torch.testing.assert_close(conv(x[0]), expected[0])


def test_conv2d_reads_channels_last() -> None:
    conv = ext.Conv2d(4, 8, 3, recipe="mxfp4_nearest")
    x = torch.randn(2, 4, 9, 9)
    assert torch.equal(conv(x.to(memory_format=torch.channels_last)), conv(x))


def test_an_encoder_layer_uses_its_quantized_layers_in_inference() -> None:
    layer = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True)
    ext.quantize_(layer, "mxfp4_all_floor")
    x = torch.randn(2, 8, 32)
    expected = layer(x).detach()
    assert "self_attn.out_proj" not in ext.quantized_modules(layer)
    layer.eval()
    with torch.no_grad():
        torch.testing.assert_close(layer(x), expected)


# --- rules and errors


def test_a_layer_that_its_recipe_leaves_alone_says_so() -> None:
    model = ext.quantize_(nn.Sequential(*(nn.Linear(32, 32) for _ in range(3))), "mxfp4")
    told = ["not quantized: bfloat16" in repr(layer) for layer in model]
    assert told == [True, False, True]
    assert all("recipe='mxfp4'" in repr(layer) for layer in model)


def test_rules_choose_by_path() -> None:
    model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(4)))
    ext.quantize_(model, "mxfp4_all", rules={"1": "bf16", "2": None})
    layers = ext.quantized_modules(model)
    assert list(layers) == ["0", "1", "3"] and type(model[2]) is nn.Linear
    assert layers["1"].quant_layer.context.layer == et.RECIPES["bf16"].layers
    assert layers["3"].quant_layer.context.index == 3


def test_a_rule_that_matches_nothing_changes_nothing() -> None:
    model = nn.Sequential(nn.Linear(32, 32))
    with pytest.raises(ValueError, match=r"rule 'encoder\.\*' matches no layer; .*layers: 0"):
        ext.quantize_(model, rules={"encoder.*": "bf16"})
    assert type(model[0]) is nn.Linear


def test_what_cannot_be_quantized_says_so() -> None:
    linear = nn.Linear(32, 32)
    stores = replace(FORWARD_TOO, saved=(SavedRule("*", "mxfp8"),))
    cases: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
        ("model", {}, TypeError, "expected a torch.nn.Module, got str"),
        (linear, {"recipe": "mxpf4"}, ValueError, "mxfp4"),
        (linear, {"recipe": stores}, ValueError, r"'stochastic' says how .* whose saved is \(\)"),
        (linear, {"recipe": 4}, TypeError, "expected a Recipe or the name of one"),
        (linear, {"seed": -1}, ValueError, "seed: expected"),
        (linear, {"step": -1}, ValueError, "step: expected"),
        (linear, {"rules": {"*": 4}}, TypeError, "expected the name of a recipe"),
        (linear, {"rules": ["*"]}, TypeError, r"rules: expected a dict.*, got list"),
        (nn.Sequential(nn.ReLU()), {}, ValueError, "has no Linear or Conv2d"),
        (nn.Linear(2, 2).double(), {}, TypeError, r"quantize_: weight: expected .*x\.float"),
        (nn.Linear(2, 2, dtype=torch.complex64), {}, TypeError, "real and imaginary"),
        (nn.Linear(2, 2, device="meta"), {}, TypeError, "meta tensor has no values.*to_empty"),
        (nn.LazyLinear(2), {}, TypeError, "has no shape yet"),
    ]
    for model, options, error, match in cases:
        with pytest.raises(error, match=match):
            ext.quantize_(model, **options)
    assert type(linear) is nn.Linear


def test_inputs_that_cannot_be_quantized_say_so() -> None:
    layer, conv = ext.Linear(32, 32), ext.Conv2d(3, 4, 3)
    x = torch.randn(8, 32)
    for value, error, match in (
        (x.double(), TypeError, r"input: expected float32.*float64; convert it with x\.float"),
        (x.to(torch.complex64), TypeError, "real and imaginary"),
        (x.to("meta"), TypeError, "meta tensor has no values"),
        (x.to_sparse(), TypeError, "expected a dense tensor, got torch.sparse_coo"),
        (x.numpy(), TypeError, "input: expected a torch.Tensor, got ndarray"),
        (x[:, :3], ValueError, r"expected an input of shape \(\.\.\., 32\), got \(8, 3\)"),
    ):
        with pytest.raises(error, match=match):
            layer(value)
    with pytest.raises(ValueError, match=r"expected an input of shape \(N, 3, H, W\)"):
        conv(torch.zeros(2, 4, 8, 8))
    with pytest.raises(ValueError, match=r"a kernel that spans \[3, 3\] does not fit"):
        conv(torch.zeros(2, 3, 2, 2))


@pytest.mark.parametrize("kind", ["linear", "conv2d"])
def test_weights_and_biases_that_cannot_be_read_say_so(kind: str) -> None:
    x = torch.randn(8, 32) if kind == "linear" else torch.randn(2, 3, 8, 8)
    layer = ext.Linear(32, 4) if kind == "linear" else ext.Conv2d(3, 4, 3)
    for part, value, error, match in (
        ("bias", layer.bias.double(), TypeError, r"bias: expected float32.*float64; convert it"),
        ("bias", layer.bias.to(torch.complex64), TypeError, "bias: .*real and imaginary"),
        ("bias", layer.bias.to("meta"), TypeError, "bias: a meta tensor has no values"),
        ("bias", layer.bias.to_sparse(), TypeError, "bias: expected a dense tensor"),
        ("bias", layer.bias[:3], ValueError, r"expected a bias of shape \(4,\), got \(3,\)"),
        ("weight", layer.weight.to_sparse(), TypeError, "weight: expected a dense tensor"),
    ):
        other = copy.deepcopy(layer)
        setattr(other, part, nn.Parameter(value.detach()))
        with pytest.raises(error, match=match):
            other(x)
    layer.quant_clock = layer.quant_clock.to("meta")
    with pytest.raises(ValueError, match="all on one device, .*quant_clock on meta"):
        layer(x)


def test_a_device_without_a_backend_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("extensor.torch.arrays.DEVICES", ("cuda",))
    monkeypatch.setattr("extensor.torch.modules.DEVICES", ("cuda",))
    match = r"expected a tensor on cuda, got cpu; move it with x\.to"
    layer = ext.Linear(32, 32)
    for call in (lambda: layer(torch.ones(8, 32)), lambda: ext.to_blocked(torch.ones(8), "mxfp4")):
        with pytest.raises(ValueError, match=match):
            call()


def test_a_module_without_a_linears_forward_is_no_layer() -> None:
    """A rule that names one says what layers there are; the module stays as it is."""
    model = nn.ModuleDict({"attention": nn.MultiheadAttention(32, 4), "out": nn.Linear(32, 32)})
    with pytest.raises(ValueError, match=r"rule 'attention.*matches no layer; .*layers: out"):
        ext.quantize_(model, rules={"attention*": "mxfp4"})
    assert list(ext.quantized_modules(ext.quantize_(model, "mxfp4_all"))) == ["out"]


def test_a_deleted_layer_says_so() -> None:
    """An operator knows a layer by its number; an eager pass keeps the layer."""
    layer, x = ext.Linear(32, 32), torch.randn(8, 32)
    loss = layer(x).sum()
    operands = x, layer.weight, None, layer.quant_clock, layer.quant_layer.number
    operator = torch.ops.extensor.linear(*operands, torch.float32, True, 0)[0].sum()
    weight = layer.weight
    del layer
    loss.backward()
    del loss
    assert weight.grad is not None
    with pytest.raises(RuntimeError, match="has been deleted; keep the model"):
        operator.backward()


@pytest.mark.parametrize("kind", ["linear", "conv2d"])
def test_weights_made_in_inference_mode_are_read_anew_in_each_pass(kind: str) -> None:
    with torch.inference_mode():
        model = ext.Linear(32, 32) if kind == "linear" else ext.Conv2d(3, 32, 3)
        x = torch.randn(4, 32) if kind == "linear" else torch.randn(2, 3, 8, 8)
        model.bias.zero_()
        first = model(x)
        model.weight.mul_(2)  # torch counts no version of it
        assert torch.equal(model(x), 2 * first)


def test_lazily_negated_tensors_are_read_with_their_sign() -> None:
    """As torch has imaginary parts of conjugates, also among gradients."""
    model = ext.Linear(32, 32, recipe="mxfp8")

    def passes(lazy: bool) -> list[Any]:
        torch.manual_seed(0)
        x, g = torch.randn(8, 32), torch.randn(8, 32)
        x, g = (torch._neg_view(t) if lazy else -t for t in (x, g))
        assert x.is_neg() is lazy and g.is_neg() is lazy
        out = model(x.requires_grad_())
        return [out, *torch.autograd.grad(out, (x, model.weight, model.bias), g)]

    for got, wanted in zip(passes(True), passes(False), strict=True):
        assert torch.equal(got, wanted)
    x, factors = torch.randn(8, 32), torch.randn(8, 32, dtype=torch.complex64)
    out = model(x)
    seen: list[bool] = []
    out.register_hook(lambda g: seen.append(g.is_neg()))
    real = (torch.complex(torch.zeros(8, 32), out).conj() * factors).real
    (found,) = torch.autograd.grad(real.sum(), model.weight)
    (expected,) = torch.autograd.grad((factors.imag * model(x)).sum(), model.weight)
    assert seen == [True] and torch.equal(found, expected)
