"""MXGradScaler: growth, back-off, exactness, adaptive scale rules, state."""

import json

import numpy as np
import pytest

from extensor.autograd.tensor import ExTensor
from extensor.optim import SGD, MXGradScaler
from extensor.quant.array import QuantStats
from extensor.quant.recipe import LayerRecipe, Recipe
from extensor.quant.recipe_state import LayerContext, RecipeState
from extensor.quant.reference import quantize
from extensor.quant.spec import QuantSpec


def make(grad=(1.0,), **options):
    p = ExTensor(np.zeros(len(grad), np.float32), requires_grad=True)
    return p, SGD([p], lr=1.0), MXGradScaler(**options)


def set_grad(p, values):
    p.grad = ExTensor(np.asarray(values, np.float32))


def cycle(p, optimizer, scaler, values):
    set_grad(p, values)
    stepped = scaler.step(optimizer)
    scaler.update()
    return stepped


def test_the_defaults():
    scaler = MXGradScaler()
    assert scaler.current_scale == 65536.0
    assert (scaler.growth_factor, scaler.backoff_factor) == (2.0, 0.5)
    assert (scaler.growth_interval, scaler.min_scale) == (2000, 1.0)


def test_growth_backoff_and_floor():
    p, optimizer, scaler = make(init_scale=4.0, growth_interval=3)
    scales = []
    for values in [1.0] * 3 + [np.inf, 1.0, 1.0, np.nan] + [-np.inf] * 4 + [1.0] * 3:
        stepped = cycle(p, optimizer, scaler, [values])
        assert stepped == np.isfinite(values)
        scales.append(scaler.current_scale)
    assert scales == [4, 4, 8, 4, 4, 4, 2, 1, 1, 1, 1, 1, 1, 2]
    report = scaler.report()
    assert (report.scale, report.good_steps) == (2.0, 0)
    assert (report.stepped, report.skipped) == (8, 6)
    assert report.slots == ()


def test_a_skipped_step_changes_no_weight():
    p, optimizer, scaler = make((1.0, 1.0))
    assert not cycle(p, optimizer, scaler, [1.0, np.nan])
    np.testing.assert_array_equal(p.numpy(), [0.0, 0.0])
    assert optimizer.state_dict()["step.0"] == 0


@pytest.mark.parametrize("scale", [2.0**-3, 1.0, 2.0**16, 2.0**100])
def test_unscaling_is_exact(scale):
    """Multiplying by a power of two and back leaves every bit above the subnormals."""
    rng = np.random.default_rng(0)
    values = (rng.standard_normal(1000) * 2.0 ** rng.integers(-20, 20, 1000)).astype(np.float32)
    p, optimizer, scaler = make(np.zeros(1000), init_scale=scale, min_scale=2.0**-3)
    set_grad(p, values * np.float32(scale))
    scaler.unscale_(optimizer)
    assert p.grad.numpy().tobytes() == values.tobytes()
    assert scaler.step(optimizer)
    np.testing.assert_array_equal(p.numpy(), -values)


def test_the_loss_is_scaled_and_backward_follows():
    import extensor.ops  # noqa: F401 - fills the registry that `*` looks into

    p, optimizer, scaler = make(init_scale=8.0)
    loss = (p * 3.0).sum()
    scaled = scaler.scale(loss)
    scaled.backward()
    np.testing.assert_array_equal(p.grad.numpy(), [24.0])
    scaler.step(optimizer)
    np.testing.assert_array_equal(p.numpy(), [-3.0])


def test_two_optimizers_share_a_step():
    p, first, scaler = make(init_scale=2.0)
    q, second, _ = make()
    set_grad(p, [2.0])
    set_grad(q, [np.inf])
    assert scaler.step(first) and not scaler.step(second)
    scaler.update()
    assert scaler.current_scale == 1.0


@pytest.mark.parametrize(
    "spec",
    [
        QuantSpec("mxfp4"),
        QuantSpec("mxfp4", scale_rule="rceil"),
        QuantSpec("mxfp4", scale_rule="even"),
        QuantSpec("mxfp8_e4m3"),
        QuantSpec("mxfp6_e2m3"),
        QuantSpec("mxint8"),
        QuantSpec("nvfp4"),
        QuantSpec("nvfp4", scale_rule="four_over_six"),
    ],
    ids=lambda s: f"{s.format}-{s.rule}",
)
def test_a_power_of_two_loss_scale_leaves_codes_bit_identical(spec):
    """Codes stay; E8M0 bytes shift by the exponent; NVFP4's block scales stay, its tensor's moves.

    So for dynamically scaled formats a loss scale is neither help nor harm.
    """
    g = np.random.default_rng(1).standard_normal((8, 128)).astype(np.float32) * 1e-3
    spec = spec.resolve(2)
    plain, stats = quantize(g, spec)
    for exponent in (-10, 1, 16):
        scaled, scaled_stats = quantize(g * np.float32(2.0**exponent), spec)
        np.testing.assert_array_equal(scaled.codes, plain.codes)
        assert scaled_stats == stats
        if spec.is_mx:
            np.testing.assert_array_equal(scaled.scales, plain.scales.astype(int) + exponent)
        else:
            np.testing.assert_array_equal(scaled.scales, plain.scales)
            assert scaled.tensor_scale == plain.tensor_scale * np.float32(2.0**exponent)


def test_a_loss_scale_that_is_no_power_of_two_changes_codes():
    """The test above can fail."""
    g = np.random.default_rng(1).standard_normal((8, 128)).astype(np.float32)
    spec = QuantSpec("mxfp4").resolve(2)
    assert (quantize(g, spec)[0].codes != quantize(g * np.float32(3.0), spec)[0].codes).any()


# Adaptive scale rules.


def recipe_state(adaptive=True, spec=None, **slots):
    layer = LayerRecipe.uniform(spec or QuantSpec("mxfp4"))
    for slot, operand in slots.items():
        layer = layer.with_slot(slot.replace("_", "."), operand)
    state = RecipeState(Recipe("test", "a test", layer, (), adaptive))
    for index, path in enumerate(("a", "b")):
        state.layers[path] = LayerContext(path, index, layer, state)
    return state


def adaptive(state, **options):
    options = {"saturation_threshold": 0.01, "saturation_interval": 2, **options}
    return make(recipe_state=state, **options)


def rules(state, path):
    specs = [state.layers[path].operand(s) for s in ("fprop.x", "dgrad.g", "wgrad.g")]
    return [spec.rule for spec in specs]


def test_a_saturating_slot_switches_to_rceil():
    state = recipe_state()
    p, optimizer, scaler = adaptive(state)
    for step in range(2):
        assert rules(state, "a") == rules(state, "b") == ["floor"] * 3, step
        state.layers["a"].record("dgrad.g", QuantStats(100, 2, 0))  # 2 % saturate
        state.layers["b"].record("dgrad.g", QuantStats(100, 1, 50))  # at the threshold, not above
        cycle(p, optimizer, scaler, [1.0])
    assert rules(state, "a") == ["floor", "rceil", "floor"]
    assert rules(state, "b") == ["floor"] * 3
    slots = {(row.layer, row.slot): row for row in scaler.report().slots}
    row = slots["a", "dgrad.g"]
    assert (row.scale_rule, row.switched, row.count, row.saturated) == ("rceil", True, 200, 0.02)
    row = slots["b", "dgrad.g"]
    assert (row.scale_rule, row.switched, row.flushed) == ("floor", False, 0.5)


def test_an_interval_counts_only_its_own_steps():
    state = recipe_state()
    state.layers["a"].record("fprop.x", QuantStats(1000, 1000, 0))  # before the scaler was made
    p, optimizer, scaler = adaptive(state)
    for _ in range(2):
        state.layers["a"].record("fprop.x", QuantStats(100, 0, 0))
        cycle(p, optimizer, scaler, [1.0])
    assert rules(state, "a") == ["floor"] * 3


@pytest.mark.parametrize("reset_after", [0, 1])
def test_resets_of_the_telemetry_lose_nothing(reset_after):
    """Reports may reset the telemetry between steps; the counts of the interval go on."""
    state = recipe_state()
    p, optimizer, scaler = adaptive(state, saturation_interval=3)
    for step in range(3):
        share = 4 if step == 0 else 0
        state.layers["a"].record("fprop.x", QuantStats(100, share, 0))
        cycle(p, optimizer, scaler, [1.0])
        if step >= reset_after:
            state.reset_telemetry()
    assert rules(state, "a") == ["rceil", "floor", "floor"]  # 4 of 300


@pytest.mark.parametrize(
    "state",
    [
        recipe_state(adaptive=False),
        recipe_state(spec=QuantSpec("mxfp4", scale_rule="even")),
        recipe_state(spec=QuantSpec("mxfp4", dialect="torchao")),
        recipe_state(spec=QuantSpec("nvfp4")),
        recipe_state(fprop_x="bfloat16"),
    ],
    ids=["not allowed", "even", "a dialect's floor", "nvfp4", "dense"],
)
def test_slots_that_may_not_switch(state):
    before = state.layers["a"].layer
    p, optimizer, scaler = adaptive(state, saturation_interval=1)
    state.layers["a"].record("fprop.x", QuantStats(100, 100, 0))
    cycle(p, optimizer, scaler, [1.0])
    assert state.layers["a"].layer == before


def test_resume_is_identical():
    """Scale, counters, switched rules and the running interval continue where they were."""

    def run(state, parts, steps):
        p, optimizer, scaler = parts
        trace = []
        for step in steps:
            context = state.layers["a"]
            saturated = 3 if step == 4 else 0
            context.record("wgrad.g", QuantStats(100, saturated, 0))
            context.record("fprop.x", QuantStats(100, 100, 0))
            cycle(p, optimizer, scaler, [np.inf if step == 1 else 1.0])
            trace.append((scaler.current_scale, tuple(rules(state, "a"))))
        return trace

    options = {"saturation_interval": 3, "growth_interval": 2, "saturation_threshold": 0.005}
    whole = recipe_state()
    expected = run(whole, adaptive(whole, **options), range(8))
    assert len({scale for scale, _ in expected}) > 2 and len({r for _, r in expected}) == 3
    for stop in range(1, 8):
        first = recipe_state()
        parts = adaptive(first, **options)
        got = run(first, parts, range(stop))
        saved = json.loads(json.dumps(parts[2].state_dict()))
        second = recipe_state()
        parts = adaptive(second, **options)
        parts[2].load_state_dict(saved)
        got += run(second, parts, range(stop, 8))
        assert got == expected, stop
        assert parts[2].report().skipped == 1


# What it refuses.


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"init_scale": 1000.0}, "init_scale: expected a power of two, got 1000.0"),
        ({"init_scale": 0.0}, "init_scale"),
        ({"init_scale": float("inf")}, "init_scale"),
        ({"init_scale": True}, "init_scale"),
        ({"growth_factor": 3.0}, "growth_factor"),
        ({"growth_factor": 0.5}, "growth_factor >= 1"),
        ({"backoff_factor": 0.75}, "backoff_factor"),
        ({"backoff_factor": 2.0}, "backoff_factor <= 1"),
        ({"min_scale": -1.0}, "min_scale"),
        ({"init_scale": 1.0, "min_scale": 2.0}, "init_scale >= min_scale"),
        ({"growth_interval": 0}, "growth_interval: expected an int, 1 or more"),
        ({"growth_interval": 1.0}, "growth_interval"),
        ({"saturation_interval": 0}, "saturation_interval"),
        ({"saturation_threshold": 0.0}, "saturation_threshold: expected a share"),
        ({"saturation_threshold": float("nan")}, "saturation_threshold"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        MXGradScaler(**options)


def test_calls_out_of_order():
    p, optimizer, scaler = make()
    with pytest.raises(TypeError, match="loss: expected an ExTensor, got float"):
        scaler.scale(1.0)
    with pytest.raises(RuntimeError, match="update: expected a step first"):
        scaler.update()
    for call in (scaler.unscale_, scaler.step):
        with pytest.raises(RuntimeError, match=r"call scaler.scale\(loss\).backward\(\) first"):
            call(optimizer)
    set_grad(p, [1.0])
    scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match="unscale_: already called"):
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    with pytest.raises(RuntimeError, match="step: already called"):
        scaler.step(optimizer)
    with pytest.raises(RuntimeError, match="in the middle of a step"):
        scaler.state_dict()
    scaler.update()
    scaler.state_dict()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scale": 3.0}, "scale: expected a power of two"),
        ({"scale": 0.5}, "scale: expected a power of two, 1.0 or more"),
        ({"scale": 2}, "scale: expected float"),
        ({"good": None}, "good: expected int"),
        ({"more": 1}, "state: expected"),
        ({"switched": [["c", "fprop.x"]]}, "expected layers of this model, got 'c'"),
        ({"switched": [["a", "wgrad.x"]]}, "a wgrad.x is not quantized"),
        ({"counts": [["c", "fprop.x", 1, 0, 0]]}, "expected a layer of this model"),
    ],
)
def test_a_state_that_does_not_fit_changes_nothing(change, message):
    state = recipe_state(wgrad_x="bfloat16")
    _, _, scaler = adaptive(state)
    before, layer = scaler.state_dict(), state.layers["a"].layer
    with pytest.raises(ValueError, match=message):
        scaler.load_state_dict({**before, "scale": 4.0, "good": 7, **change})
    assert scaler.state_dict() == before and state.layers["a"].layer == layer


def test_options_at_their_bounds():
    options = {"init_scale": 2.0, "min_scale": 2.0, "growth_factor": 1.0, "backoff_factor": 1.0}
    _, _, scaler = make(**options, growth_interval=1, saturation_interval=1)
    assert scaler.current_scale == 2.0


def test_a_state_at_its_bounds_fits():
    """The least scale, and counts up to what float64 holds."""
    _, _, scaler = make(min_scale=2.0)
    counts = {"good": 0, "stepped": (1 << 53) - 1, "skipped": 0, "updates": 0}
    state = {**scaler.state_dict(), "scale": 2.0, **counts}
    scaler.load_state_dict(state)
    assert scaler.state_dict() == state
