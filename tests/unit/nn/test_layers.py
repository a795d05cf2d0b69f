"""Layers: values by hand, options, shapes, what they refuse. Torch: tests/test_every_layer.py."""

import numpy as np
import pytest

import extensor.nn as nn
from extensor.autograd.tensor import ExTensor
from extensor.inspect import slot_health
from extensor.nn.mixture import TopKRouter


def tensor(shape, seed=0, **options):
    values = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    return ExTensor(values, **options)


def test_values_without_torch():
    layer = nn.Linear(3, 2)
    x = tensor((4, 3))
    expected = x.numpy() @ layer.weight.numpy().T + layer.bias.numpy()
    np.testing.assert_allclose(layer(x).numpy(), expected, rtol=1e-6)
    x = tensor((2, 3, 4, 5))
    np.testing.assert_allclose(
        nn.GlobalAvgPool2d()(x).numpy(), x.numpy().mean((2, 3)), rtol=1e-5, atol=1e-7
    )
    assert nn.Flatten(2)(x).shape == (2, 3, 20)
    assert nn.Flatten(0)(x).shape == (120,)


def test_initial_weights_are_bounded_by_the_fan_in():
    for layer, fan in ((nn.Linear(64, 200, rng=0), 64), (nn.Conv2d(8, 90, 3, groups=2, rng=0), 36)):
        for p in layer.parameters():
            top = np.abs(p.numpy()).max()
            assert 0.9 / np.sqrt(fan) < top <= 1 / np.sqrt(fan)


def test_embedding():
    layer = nn.Embedding(10, 3, rng=0)
    index = ExTensor(np.array([[1, 9], [1, 0]]))
    y = layer(index)
    np.testing.assert_array_equal(y.numpy(), layer.weight.numpy()[index.numpy()])
    y.sum().backward()
    expected = np.zeros((10, 3))
    expected[[0, 9]], expected[1] = 1.0, 2.0
    np.testing.assert_array_equal(layer.weight.grad.numpy(), expected)
    assert layer.role == "embedding" and layer(ExTensor(np.zeros((0,), int))).shape == (0, 3)
    assert 0.01 < nn.Embedding(100, 50, rng=0).weight.numpy().std() < 0.03
    for bad in (-1, 10):
        with pytest.raises(ValueError, match=rf"expected numbers in 0..9, got .*{bad}"):
            layer(ExTensor(np.array([5, bad])))
    with pytest.raises(TypeError, match="Embedding: expected integers, got float32"):
        layer(ExTensor([1.0]))
    with pytest.raises(TypeError, match="an ExTensor, got int"):
        layer(3)


# Recipes.


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (lambda: nn.Linear(64, 8, rng=0), (4, 64)),
        (lambda: nn.Conv2d(4, 8, 3, padding=1, rng=0), (2, 4, 6, 6)),
    ],
)
def test_a_recipe_quantizes_the_layer(make, shape):
    layer = make()
    x = tensor(shape, 1, requires_grad=True)
    exact = layer(x).numpy()
    state = nn.apply_recipe(nn.Sequential(layer), "mxfp4_all")
    y = layer(x)
    error = np.abs(y.numpy() - exact).mean() / np.abs(exact).mean()
    assert 0.01 < error < 0.5
    y.sum().backward()
    assert {row.slot for row in slot_health(state)} == {
        "fprop.x", "fprop.w", "dgrad.g", "dgrad.w", "wgrad.g", "wgrad.x",
    }  # fmt: skip
    nn.apply_recipe(nn.Sequential(layer), "fp32")
    np.testing.assert_allclose(layer(x).numpy(), exact, rtol=1e-5, atol=1e-6)


# Dropout.


def test_dropout_keeps_the_mean_and_scales():
    layer, x = nn.Dropout(0.25, rng=0), ExTensor(np.ones((100, 100), np.float32))
    y = layer(x).numpy()
    assert set(np.unique(y)) == {np.float32(0), np.float32(1) / np.float32(0.75)}
    assert (y == 0).mean() == pytest.approx(0.25, abs=0.02)
    assert (layer(x).numpy() != y).any()


def test_dropout_keeps_a_value_where_its_word_is_large_enough():
    layer = nn.Dropout(0.3, rng=0)
    seed, calls = layer.draws.tolist()
    for turn in range(2):
        source = np.random.Philox(key=seed, counter=[0, calls + turn, 0, 0])
        expected = []
        for _ in range(8):
            pair = int(source.random_raw())
            expected += [pair % 2**32 >= 0.3 * 2**32, pair // 2**32 >= 0.3 * 2**32]
        got = layer(ExTensor(np.ones((3, 5), np.float32))).numpy() > 0
        np.testing.assert_array_equal(got.reshape(-1), expected[:15])


def test_dropout_layers_have_streams_of_their_own():
    """Two layers of one generator, and two calls of a layer; the seed stays."""
    rng, x = np.random.default_rng(0), ExTensor(np.ones((16, 16), np.float32))
    first, second = nn.Dropout(0.5, rng), nn.Dropout(0.5, rng)
    masks = [layer(x).numpy() for layer in (first, second, first, second)]
    assert len({mask.tobytes() for mask in masks}) == 4
    seeds = [layer.draws.tolist()[0] for layer in (first, second)]
    assert seeds[0] != seeds[1]
    first(x)
    assert first.draws.tolist() == [seeds[0], 3]


def test_dropout_passes_gradients_where_it_kept():
    layer = nn.Dropout(0.5, rng=0)
    x = ExTensor(np.ones((10, 10), np.float32), requires_grad=True)
    y = layer(x)
    y.sum().backward()
    np.testing.assert_array_equal(x.grad.numpy(), y.numpy())


def test_dropout_does_nothing_in_evaluation_or_for_zero():
    x = tensor((3, 3))
    layer = nn.Dropout(0.5, rng=0).eval()
    assert layer(x) is x and nn.Dropout(0.0)(x) is x
    assert layer.draws.tolist()[1] == 0


def test_dropout_resumes_where_it_was():
    x = ExTensor(np.ones((20, 20), np.float32))
    through = nn.Dropout(0.5, rng=0)
    expected = [through(x).numpy() for _ in range(4)]
    first = nn.Dropout(0.5, rng=0)
    got = [first(x).numpy() for _ in range(2)]
    second = nn.Dropout(0.5, rng=1)
    second.load_state_dict(first.state_dict())
    got += [second(x).numpy() for _ in range(2)]
    np.testing.assert_array_equal(got, expected)


def test_dropout2d_drops_whole_channels():
    y = nn.Dropout2d(0.5, rng=0)(ExTensor(np.ones((8, 16, 3, 3), np.float32))).numpy()
    per_channel = y.reshape(128, 9)
    assert (per_channel == per_channel[:, :1]).all()
    assert 0.3 < (per_channel[:, 0] == 0).mean() < 0.7


def test_dropout_keeps_the_dtype():
    for dtype in ("bfloat16", "float64"):
        y = nn.Dropout(0.5, rng=0)(ExTensor(np.ones((4, 4)), dtype))
        assert y.dtype.name == dtype


# Batch norm.


def test_batch_norm_in_evaluation_uses_the_running_statistics():
    layer = nn.BatchNorm2d(2, eps=1e-3).eval()
    layer.running_mean.copy_(ExTensor([1.0, -1.0]))
    layer.running_var.copy_(ExTensor([4.0, 0.25]))
    x = tensor((3, 2, 2, 2))
    mean, var = np.array([1.0, -1.0]), np.array([4.0, 0.25])
    expected = (x.numpy() - mean[:, None, None]) / np.sqrt(var + 1e-3)[:, None, None]
    np.testing.assert_allclose(layer(x).numpy(), expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(layer.running_mean.numpy(), mean)


# What they refuse.

IMAGE = (2, 3, 8, 8)
BAD_CALLS = [
    (nn.Linear(4, 2), (3, 5), r"Linear: expected an input of shape \(..., 4\), got \(3, 5\)"),
    (nn.Linear(4, 2), (), "Linear: expected an input"),
    (nn.Conv2d(3, 4, 3), (3, 8, 8), r"Conv2d: expected an input of shape \(N, 3, H, W\)"),
    (nn.Conv2d(4, 4, 3), IMAGE, r"\(N, 4, H, W\), got \(2, 3, 8, 8\)"),
    (nn.Conv2d(3, 4, 9), IMAGE, "conv2d"),
    (nn.MaxPool2d(2), (3, 8, 8), "max_pool2d: .* x .N, C, H, W"),
    (nn.MaxPool2d(9), IMAGE, "max_pool2d"),
    (nn.MaxPool2d(2, padding=2), IMAGE, "max_pool2d"),
    (nn.AvgPool2d(2), (3, 8, 8), "avg_pool2d: .* x .N, C, H, W"),
    (nn.GlobalAvgPool2d(), (3, 8, 8), r"GlobalAvgPool2d: expected .*\(N, C, H, W\)"),
    (nn.Flatten(2), (3, 8), "Flatten: expected an input of more than 2 axes"),
    (
        nn.LayerNorm((8, 8)),
        (8,),
        r"LayerNorm: expected an input of shape \(..., 8, 8\), got \(8,\)",
    ),
    (nn.RMSNorm(4), (3, 5), r"RMSNorm: expected an input of shape \(..., 4\), got \(3, 5\)"),
    (nn.GroupNorm(2, 4), IMAGE, r"GroupNorm: expected an input of shape \(N, 4, ...\)"),
    (
        nn.InstanceNorm(4),
        (4,),
        r"InstanceNorm: expected an input of shape \(N, 4, ...\), got \(4,\)",
    ),
    (nn.BatchNorm2d(4), IMAGE, r"BatchNorm2d: expected .*\(N, 4, H, W\)"),
    (nn.BatchNorm2d(3), (1, 3, 1, 1), "two values or more per channel"),
    (nn.Dropout2d(0.5), (3, 8), "Dropout2d: expected"),
]


@pytest.mark.parametrize(("layer", "shape", "message"), BAD_CALLS)
def test_bad_inputs(layer, shape, message):
    with pytest.raises(ValueError, match=message):
        layer(tensor(shape))


@pytest.mark.parametrize(("layer", "shape", "message"), BAD_CALLS)
def test_arrays_that_are_no_tensors(layer, shape, message):
    with pytest.raises(TypeError, match="an ExTensor, got ndarray; make one"):
        layer(np.zeros(shape, np.float32))


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: nn.Linear(0, 3), ValueError, "in_features: expected 1 or more, got 0"),
        (lambda: nn.Linear(3, 2.0), TypeError, "out_features: expected an int, got 2.0"),
        (lambda: nn.Linear(3, True), TypeError, "out_features"),
        (lambda: nn.Linear(3, 3, rng="x"), TypeError, "rng: expected"),
        (lambda: nn.Conv2d(0, 3, 3), ValueError, "in_channels"),
        (lambda: nn.Conv2d(3, 0, 3), ValueError, "out_channels"),
        (lambda: nn.Conv2d(3, 4, 3, groups=2), ValueError, "groups: expected a divisor"),
        (lambda: nn.Conv2d(4, 3, 3, groups=2), ValueError, "groups: expected a divisor"),
        (lambda: nn.Conv2d(3, 3, 3, groups=0), ValueError, "groups"),
        (lambda: nn.Conv2d(3, 3, 0), ValueError, "kernel_size: .*1 or more"),
        (lambda: nn.Conv2d(3, 3, (3, 3, 3)), TypeError, "kernel_size"),
        (lambda: nn.Conv2d(3, 3, 3, stride=0), ValueError, "stride"),
        (lambda: nn.Conv2d(3, 3, 3, padding=-1), ValueError, "padding: .*0 or more"),
        (lambda: nn.Conv2d(3, 3, 3, dilation=1.5), TypeError, "dilation"),
        (lambda: nn.depthwise_conv2d(0, 3), ValueError, "in_channels: expected 1 or more"),
        (lambda: nn.MaxPool2d(0), ValueError, "MaxPool2d: kernel_size"),
        (lambda: nn.AvgPool2d(2, 0), ValueError, "AvgPool2d: stride"),
        (lambda: nn.Flatten(-1), ValueError, "start: expected 0 or more"),
        (lambda: nn.Dropout(1.0), ValueError, r"p: expected a number in \[0, 1\), got 1.0"),
        (lambda: nn.Dropout(-0.1), ValueError, "p: expected"),
        (lambda: nn.Dropout(True), ValueError, "p: expected"),
        (lambda: nn.Dropout("half"), ValueError, "p: expected"),
        (lambda: nn.LayerNorm(()), ValueError, "at least one axis"),
        (lambda: nn.LayerNorm(3, eps=0.0), ValueError, "eps above 0"),
        (lambda: nn.LayerNorm(0), ValueError, "shape: expected 1 or more"),
        (lambda: nn.RMSNorm(0), ValueError, "size"),
        (lambda: nn.RMSNorm(3, eps=0.0), ValueError, "RMSNorm: expected eps above 0"),
        (lambda: nn.GroupNorm(2, 3), ValueError, "groups that divide channels"),
        (lambda: nn.GroupNorm(1, 3, eps=-1.0), ValueError, "eps above 0"),
        (lambda: nn.InstanceNorm(0), ValueError, "groups: expected 1 or more"),
        (lambda: nn.Embedding(0, 3), ValueError, "count"),
        (lambda: nn.Embedding(3, 0), ValueError, "size"),
        (lambda: nn.BatchNorm2d(0), ValueError, "channels"),
        (lambda: nn.BatchNorm2d(3, eps=-1.0), ValueError, "eps above 0"),
        (lambda: nn.BatchNorm2d(3, momentum=2.0), ValueError, r"momentum in \[0, 1\]"),
    ],
)
def test_bad_arguments(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_reprs_show_what_is_not_the_default():
    assert repr(nn.Linear(2, 3, bias=False)) == "Linear(2, 3, bias=False)"
    layer = nn.Conv2d(4, 4, 3, stride=2, padding=1, dilation=2, groups=4, bias=False)
    assert repr(layer) == (
        "Conv2d(4, 4, kernel_size=(3, 3), stride=(2, 2), padding=(1, 1), dilation=(2, 2), "
        "groups=4, bias=False)"
    )
    assert repr(nn.Conv2d(2, 3, 1)) == "Conv2d(2, 3, kernel_size=(1, 1))"
    assert repr(nn.LeakyReLU(0.2)) == "LeakyReLU(slope=0.2)"
    assert repr(nn.Dropout(0.1)) == "Dropout(p=0.1)"
    assert repr(nn.Flatten(2)) == "Flatten(start=2)" and repr(nn.Flatten()) == "Flatten()"


def test_an_embedding_in_blocks_decodes_the_rows_it_gives():
    layer = nn.Embedding(7, 64, rng=0)
    packed = layer.weight.detach().to_mxfp4()
    layer.weight = nn.Buffer(packed.data)
    index = np.array([[1, 6], [0, 3]])
    expected = packed.dequantize().numpy()[index]
    np.testing.assert_array_equal(layer(ExTensor(index)).numpy(), expected)


def test_a_pool_of_one_pixel_is_the_image():
    x = ExTensor(np.random.default_rng(0).standard_normal((2, 3, 4, 5)))
    for pool in (nn.MaxPool2d(1), nn.AvgPool2d(1)):
        np.testing.assert_array_equal(pool(x).numpy(), x.numpy())


def test_a_router_may_choose_all_of_its_experts():
    router = TopKRouter(8, 3, 3, rng=0)
    assert router.active == 3
    with pytest.raises(ValueError, match="active: expected at most the 3 experts, got 4"):
        TopKRouter(8, 3, 4, rng=0)
