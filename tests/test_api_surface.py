"""The public surface: every name that scripts rely on is there, where they look, and works once.

The tables are written out, so that a name which disappears or moves fails here; whether a result is
right is the business of the tests beside each part.
"""

from __future__ import annotations

import importlib
import inspect
import operator
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import extensor as et
import models
from extensor import nn, optim
from extensor.autograd.primitive import OPS
from extensor.cli import main as cli
from training.cli import main as train

# --- operations: reached as et.NAME, and run on the first sample of their declaration ------------

OPERATIONS = {
    "creation": "clone tril triu",
    "arithmetic": "add subtract multiply divide floor_divide remainder power negative",
    "comparison and logic": """equal not_equal less less_equal greater greater_equal logical_and
        logical_or logical_not logical_xor where clip""",
    "elementwise": """abs sign exp expm1 log log1p log2 log10 sqrt rsqrt square sin cos tan tanh
        sigmoid erf ceil floor round trunc isnan isinf isfinite""",
    "matrix": "matmul dot outer inner tensordot einsum transpose",
    "reduction": """sum mean prod max min var std median percentile argmax argmin argsort sort topk
        cumsum logsumexp any all""",
    "shape": """reshape squeeze expand_dims flatten ravel concatenate stack split tile repeat
        broadcast_to permute flip roll pad take gather scatter_add""",
    "activations": """relu relu6 leaky_relu prelu sigmoid tanh softmax log_softmax softplus gelu
        silu mish elu selu hard_sigmoid hard_swish hard_tanh swiglu""",
    "losses": """mse l1 smooth_l1 huber binary_cross_entropy binary_cross_entropy_with_logits
        cross_entropy nll hinge focal kl_div""",
}


def _operation_cases() -> list[Any]:
    return [
        pytest.param(name, id=f"{section}-{name}")
        for section, names in OPERATIONS.items()
        for name in names.split()
    ]


def _as_tensors(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return et.ExTensor(value)
    if isinstance(value, list) and any(isinstance(item, np.ndarray) for item in value):
        return [_as_tensors(item) for item in value]
    return value


@pytest.mark.parametrize("name", _operation_cases())
def test_operation(name: str) -> None:
    op = OPS[name]
    function = getattr(et, name)
    assert function is op.function
    sample = next(iter(op.samples(np.random.default_rng(zlib.crc32(name.encode())))))
    result = function(*map(_as_tensors, sample.args), **sample.kwargs)
    outputs = [result] if isinstance(result, et.ExTensor) else list(result)
    assert outputs and all(isinstance(out, et.ExTensor) for out in outputs)


# --- what is no operation of the registry --------------------------------------------------------

X = [[1.0, 2.0], [3.0, 4.0]]


def ones(*shape: int) -> et.ExTensor:
    return et.ones(shape)


def _dlpack_back() -> et.ExTensor:
    return et.from_dlpack(ones(2, 3))


CREATION: dict[str, Callable[[], Any]] = {
    "zeros": lambda: et.zeros((2, 3)),
    "ones": lambda: et.ones((2, 3)),
    "full": lambda: et.full((2, 3), 7.0),
    "empty": lambda: et.empty((2, 3)),
    "arange": lambda: et.arange(6).reshape(2, 3),
    "eye": lambda: et.eye(2, 3),
    "linspace": lambda: et.linspace(0.0, 1.0, 6).reshape(2, 3),
    "randn": lambda: et.randn(2, 3, seed=0),
    "rand": lambda: et.rand(2, 3, seed=0),
    "from_numpy": lambda: et.from_numpy(np.zeros((2, 3), np.float32)),
    "from_dlpack": _dlpack_back,
    "meshgrid": lambda: et.meshgrid(et.arange(3), et.arange(2))[0],
    "unsqueeze": lambda: et.unsqueeze(et.zeros(2), 1) + et.zeros(3),
    **{
        f"{name}_like": (lambda name=name: getattr(et, f"{name}_like")(et.zeros((2, 3))))
        for name in ("zeros", "ones", "empty", "randn", "rand")
    },
    "full_like": lambda: et.full_like(et.zeros((2, 3)), 1.0),
}
STATIC = ("zeros", "ones", "full", "empty", "eye", "arange", "linspace", "randn", "rand",
          "from_numpy", "from_dlpack", "zeros_like", "ones_like", "full_like", "empty_like",
          "randn_like", "rand_like")  # fmt: skip


@pytest.mark.parametrize("name", CREATION)
def test_creation(name: str) -> None:
    assert hasattr(et, name)
    assert CREATION[name]().shape == (2, 3)


@pytest.mark.parametrize("name", STATIC)
def test_creation_is_a_method_too(name: str) -> None:
    assert callable(getattr(et.ExTensor, name))


BINARY = [
    "add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "eq", "ne", "lt", "le",
    "gt", "ge", "and_", "or_", "xor", "lshift", "rshift", "iadd", "isub", "imul", "itruediv",
]  # fmt: skip


@pytest.mark.parametrize("name", BINARY)
def test_binary_operator(name: str) -> None:
    whole = name in ("and_", "or_", "xor", "lshift", "rshift")
    x = et.ExTensor([[1, 2], [3, 4]]) if whole else et.ExTensor(X)
    assert getattr(operator, name)(x, x).shape == (2, 2)


@pytest.mark.parametrize("name", ["neg", "abs", "invert", "pos"])
def test_unary_operator(name: str) -> None:
    x = et.ExTensor([[1, 2], [3, 4]])
    assert getattr(operator, name)(x).shape == (2, 2)


def test_indexing_and_slicing() -> None:
    x = et.ExTensor(X)
    assert x[0, 1].item() == 2.0 and x[:, 1:].shape == (2, 1) and x[..., None].shape == (2, 2, 1)
    assert x[et.ExTensor([1, 0])].tolist() == [[3.0, 4.0], [1.0, 2.0]]
    assert x[x > 2.0].tolist() == [3.0, 4.0]
    x[0] = 9.0
    assert x.tolist() == [[9.0, 9.0], [3.0, 4.0]]


# --- tensors and their blocked forms -------------------------------------------------------------

CONVERSIONS: dict[str, dict[str, Any]] = {
    "to_mxfp4": {"block_size": 32, "axis": -1, "scale_rule": "floor", "rounding": "nearest_even"},
    "to_nvfp4": {},
    "to_mxfp8": {"element": "e4m3"},
    "to_mxfp6": {"element": "e2m3"},
    "to_mxint8": {},
    "to_fp8": {},
    "to_int8": {},
    "to_int4": {"group_size": 32},
}


@pytest.mark.parametrize("method", CONVERSIONS)
def test_conversion(method: str) -> None:
    x = et.randn(4, 64, seed=0)
    q = getattr(x, method)(**CONVERSIONS[method])
    assert q.shape == (4, 64) and q.dtype.is_blocked and q.nbytes < x.nbytes
    assert q.codes.dtype.name in ("uint8", "int8") and q.axis == 1 and q.block_size >= 1
    assert q.scales.shape[0] in (1, 4) and q.spec is not None
    assert q.dequantize().dtype == et.float32 and q.to(et.bfloat16).dtype == et.bfloat16
    assert "64" in repr(q) and "<" in q._repr_html_()


def test_tensor_basics() -> None:
    x = et.ExTensor.zeros((4, 64))
    assert x.quantize(et.QuantSpec("mxfp4")).dtype.is_blocked
    assert x.to("cpu").numpy().shape == (4, 64) and x.sum().item() == 0.0
    assert "float32" in repr(x) and "float32" in x._repr_html_()
    with pytest.raises(TypeError, match="to_mxfp4"):
        x.astype("e2m1")


def test_gradients() -> None:
    x = et.ExTensor([3.0], requires_grad=True)
    (x * x).sum().backward()
    assert x.grad is not None and x.grad.tolist() == [6.0] and not x.detach().requires_grad
    with et.no_grad():
        assert not (x * x).requires_grad

    def cube(t: et.ExTensor) -> et.ExTensor:
        return (t**3.0).sum()

    y = et.ExTensor([2.0], et.float64)
    assert et.grad(cube)(y).tolist() == [12.0]
    value, slope = et.value_and_grad(cube)(y)
    assert (value.item(), slope.tolist()) == (8.0, [12.0])
    assert et.vjp(lambda t: t * t, y)[0].tolist() == [4.0]
    assert et.hvp(cube, (y,), (et.ExTensor([1.0], et.float64),))[0].tolist() == [12.0]
    z = et.ExTensor([2.0], et.float64, requires_grad=True)
    cube(z).backward(create_graph=True)
    assert z.grad is not None and z.grad.requires_grad
    et.testing.gradcheck(cube, (y,))
    et.testing.gradgradcheck(cube, (y,))


# --- layers, initializers ------------------------------------------------------------------------

IMAGE, TOKENS = (2, 4, 8, 8), (2, 5, 8)
LAYERS: dict[str, tuple[Callable[[], Any], Any]] = {
    "Linear": (lambda: nn.Linear(8, 3), TOKENS),
    "Conv2d": (lambda: nn.Conv2d(4, 6, 3, stride=2, padding=1, dilation=2, groups=2), IMAGE),
    "depthwise_conv2d": (lambda: nn.depthwise_conv2d(4, 3), IMAGE),
    "SeparableConv2d": (lambda: nn.SeparableConv2d(4, 6, 3), IMAGE),
    "MaxPool2d": (lambda: nn.MaxPool2d(2), IMAGE),
    "AvgPool2d": (lambda: nn.AvgPool2d(2), IMAGE),
    "GlobalAvgPool2d": (lambda: nn.GlobalAvgPool2d(), IMAGE),
    "BatchNorm2d": (lambda: nn.BatchNorm2d(4), IMAGE),
    "LayerNorm": (lambda: nn.LayerNorm(8), TOKENS),
    "GroupNorm": (lambda: nn.GroupNorm(2, 4), IMAGE),
    "InstanceNorm": (lambda: nn.InstanceNorm(4), IMAGE),
    "RMSNorm": (lambda: nn.RMSNorm(8), TOKENS),
    "Dropout": (lambda: nn.Dropout(0.5, rng=0), TOKENS),
    "Dropout2d": (lambda: nn.Dropout2d(0.5, rng=0), IMAGE),
    "MultiheadAttention": (
        lambda: nn.MultiheadAttention(8, 4, 2, causal=True, rotary=10000.0), TOKENS,
    ),
    "TransformerBlock": (lambda: nn.TransformerBlock(8, 2), TOKENS),
    "LSTM": (lambda: nn.LSTM(8, 3), TOKENS),
    "GRU": (lambda: nn.GRU(8, 3), TOKENS),
    "Sequential": (lambda: nn.Sequential(nn.Linear(8, 3), nn.ReLU()), TOKENS),
    "Flatten": (lambda: nn.Flatten(), TOKENS),
}  # fmt: skip


@pytest.mark.parametrize("name", LAYERS)
def test_layer_runs_and_its_weights_get_gradients(name: str) -> None:
    make, shape = LAYERS[name]
    assert hasattr(nn, name)
    layer = make()
    out = layer(et.randn(*shape, seed=0))
    out = out[0] if isinstance(out, tuple) else out
    assert out.shape[0] == 2
    if list(layer.parameters()):
        out.square().sum().backward()
    assert all(p.grad is not None for p in layer.parameters())


def test_embedding_and_module_list() -> None:
    assert nn.Embedding(10, 3)(et.ExTensor([1, 2])).shape == (2, 3)
    assert len(list(nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)]).parameters())) == 4


@pytest.mark.parametrize(
    "name",
    [
        "xavier_uniform", "xavier_normal", "kaiming_uniform", "kaiming_normal", "trunc_normal",
        "orthogonal",
    ],
)  # fmt: skip
def test_initializer(name: str) -> None:
    values = getattr(nn.init, name)((6, 4), np.random.default_rng(0))
    assert values.shape == (6, 4) and values.dtype == np.float32 and values.std() > 0


# --- optimizers, schedules, scaling --------------------------------------------------------------

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    "Adam": {},
    "AdamW": {},
    "Adagrad": {},
    "RMSprop": {},
    "Lion": {},
    "LARS": {"lr": 0.1},
    "Muon": {},
}


@pytest.mark.parametrize("states", ["float32", "bfloat16", "mxfp8_e4m3"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer(name: str, states: str) -> None:
    p = nn.Parameter(np.ones((4, 4), np.float32))
    optimizer = getattr(optim, name)([p], states=states, **OPTIMIZERS[name])
    for _ in range(2):
        p.grad = et.ExTensor(np.eye(4, dtype=np.float32))
        optimizer.step()
    assert p.numpy()[0, 0] < 1.0


SCHEDULES: dict[str, Callable[[], optim.Schedule]] = {
    "Step": lambda: optim.Step(3),
    "MultiStep": lambda: optim.MultiStep((2, 5)),
    "Exponential": lambda: optim.Exponential(0.9),
    "Cosine": lambda: optim.Cosine(8),
    "Linear": lambda: optim.Linear(8),
    "Warmup": lambda: optim.Warmup(4),
    "WarmupCosine": lambda: optim.WarmupCosine(3, 10),
    "OneCycle": lambda: optim.OneCycle(12),
    "ReduceLROnPlateau": lambda: optim.ReduceLROnPlateau(),
    "WSD": lambda: optim.WSD(2, 10, 4),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedule(name: str) -> None:
    schedule = SCHEDULES[name]()
    assert isinstance(schedule, getattr(optim, name))
    assert all(0.0 <= schedule.factor(step) <= 1.0 for step in range(20))


def test_clipping_and_scaling() -> None:
    p = nn.Parameter(np.ones(4, np.float32))
    optimizer = optim.SGD([p], lr=0.1)
    scaler = optim.MXGradScaler()
    assert scaler.current_scale == 65536.0
    scaler.scale((p * 3.0).sum()).backward()
    scaler.unscale_(optimizer)
    assert optim.clip_grad_norm([p], 1.0) == 6.0
    optim.clip_grad_value([p], 0.25)
    assert scaler.step(optimizer)
    scaler.update()
    assert p.tolist() == pytest.approx([0.975] * 4)


# --- quantization --------------------------------------------------------------------------------


def test_quantization_tables() -> None:
    fields = inspect.signature(et.QuantSpec).parameters
    assert {
        "format",
        "axis",
        "tile",
        "scale_rule",
        "rounding",
        "transform",
        "rbits",
        "dialect",
    } <= (fields.keys())
    assert "mxfp4" in et.FORMATS and "mxfp4" in et.RECIPES
    layer = et.RECIPES["mxfp4"].layers
    slots = ("fprop.x", "fprop.w", "dgrad.g", "dgrad.w", "wgrad.g", "wgrad.x")
    assert all(layer.slot(slot) is not None for slot in slots)


def test_compare_layers() -> None:
    model, reference = (
        nn.Sequential(nn.Linear(32, 4, rng=0)),
        nn.Sequential(nn.Linear(32, 4, rng=0)),
    )
    nn.apply_recipe(model, "mxfp4_all")
    report = et.compare_layers(model, reference, et.randn(8, 32, seed=0))
    assert "0" in str(report)


# --- data, training and models -------------------------------------------------------------------

DATA = {
    "training.data.DATASETS": """digits mnist fashion_mnist emnist cifar10 shakespeare
        python_source""",
    "training.data.SAMPLERS": "sequential random weighted",
    "training.data.transforms": """Normalize Resize CenterCrop RandomCrop RandomFlip RandomRotate
        RandomErase Compose""",
    "training.text.augment": "replace_tokens",
    "training.data": "batches prefetch load_dataset",
    "training.data.prepared": "prepared",
    "training.callbacks": "EarlyStopping SaveCheckpoint ShowProgress JsonLines TensorBoard",
    "training.metrics": "top_k_hits confusion_matrix perplexity ClassScores TokenScores",
    "training.runs.RUNS": "lenet mlp alexnet vgg resnet mobilenet googlenet gpt encoder",
    "extensor.quant.recipes.ALIASES": "mxfp8 nvfp4",
}


@pytest.mark.parametrize("place", DATA)
def test_data_and_training(place: str) -> None:
    try:
        found: Any = importlib.import_module(place)
    except ModuleNotFoundError:
        module, _, table = place.rpartition(".")
        found = getattr(importlib.import_module(module), table)
    for name in DATA[place].split():
        assert name in found if hasattr(found, "keys") else callable(getattr(found, name))


def test_every_model_builds_and_every_run_is_one() -> None:
    assert set(DATA["training.runs.RUNS"].split()) == set(models.names())
    for name in ("lenet", "mlp", "gpt", "encoder"):  # the large ones: tests/unit/models
        assert list(models.build(name, models.config(name), np.random.default_rng(0)).parameters())


@pytest.mark.parametrize("command", ["doctor", "formats", "quantize", "inspect"])
def test_command_line(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli([command, "--help"])
    assert ended.value.code == 0 and command in capsys.readouterr().out


def test_training_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert train([]) == 0
    text = capsys.readouterr().out
    assert all(name in text for name in (*models.names(), "compare", "generate", "mxfp4"))
