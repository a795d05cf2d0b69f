"""The public surface: every name that scripts rely on is there, where they look.

The tables are written out, so that a name which disappears or moves fails here. What each name does
is the business of the tests beside its part, which run all of them.
"""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import numpy as np
import pytest

import extensor as et
from extensor import models, nn
from extensor.autograd.primitive import OPS
from extensor.cli import main as cli
from extensor.training.cli import main as train
from extensor.training.runs import RUNS

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


@pytest.mark.parametrize("section", OPERATIONS)
def test_operations(section: str) -> None:
    """Each is reached as et.NAME: test_every_primitive.py runs what the registry holds."""
    for name in OPERATIONS[section].split():
        assert getattr(et, name) is OPS[name].function, name


CREATION = """zeros ones full empty eye arange linspace randn rand from_numpy from_dlpack zeros_like
    ones_like full_like empty_like randn_like rand_like"""

NAMES = {
    "extensor": f"""{CREATION} meshgrid unsqueeze grad value_and_grad vjp hvp no_grad enable_grad
        testing QuantSpec FORMATS RECIPES compare_layers quantize_model save_quantized
        load_quantized float32 bfloat16 float64""",
    "extensor.ExTensor": f"""{CREATION} to_mxfp4 to_nvfp4 to_mxfp8 to_mxfp6 to_mxint8 to_fp8 to_int8
        to_int4 quantize dequantize codes scales spec axis block_size nbytes to astype numpy item
        tolist detach backward grad requires_grad zero_grad _repr_html_""",
    "extensor.testing": "gradcheck gradgradcheck assert_bitwise_equal",
    "extensor.nn": """Linear Conv2d depthwise_conv2d SeparableConv2d MaxPool2d AvgPool2d
        GlobalAvgPool2d BatchNorm2d LayerNorm GroupNorm InstanceNorm RMSNorm Dropout Dropout2d
        MultiheadAttention TransformerBlock LSTM GRU Sequential ModuleList Flatten Embedding
        Parameter Buffer apply_recipe""",
    "extensor.nn.init": """xavier_uniform xavier_normal kaiming_uniform kaiming_normal trunc_normal
        orthogonal""",
    "extensor.optim": """SGD Adam AdamW Adagrad RMSprop Lion LARS Muon Step MultiStep Exponential
        Cosine Linear Warmup WarmupCosine OneCycle ReduceLROnPlateau WSD MXGradScaler
        clip_grad_norm clip_grad_value""",
    "extensor.quant.recipes.ALIASES": "mxfp8 nvfp4",
    "extensor.training.data.DATASETS": """digits mnist fashion_mnist emnist cifar10 shakespeare
        python_source""",
    "extensor.training.data.SAMPLERS": "sequential random weighted",
    "extensor.training.data.transforms": """Normalize Resize CenterCrop RandomCrop RandomFlip
        RandomRotate RandomErase Compose""",
    "extensor.training.text.augment": "replace_tokens",
    "extensor.training.data": "batches prefetch load_dataset",
    "extensor.training.data.prepared": "prepared",
    "extensor.training.callbacks": """EarlyStopping SaveCheckpoint ShowProgress JsonLines
        TensorBoard""",
    "extensor.training.metrics": "label_ranks confusion_matrix perplexity ClassScores TokenScores",
    "extensor.training.runs.RUNS": "lenet mlp alexnet vgg resnet mobilenet googlenet gpt encoder",
}


@pytest.mark.parametrize("place", NAMES)
def test_names(place: str) -> None:
    try:
        found: Any = importlib.import_module(place)
    except ModuleNotFoundError:
        module, _, table = place.rpartition(".")
        found = getattr(importlib.import_module(module), table)
    for name in NAMES[place].split():
        assert name in found if hasattr(found, "keys") else hasattr(found, name), name


def test_options() -> None:
    """Those that scripts pass by name."""
    for function, options in (
        (et.QuantSpec, "format axis tile scale_rule rounding transform rbits dialect"),
        (nn.Conv2d, "stride padding dilation groups bias rng"),
        (nn.MultiheadAttention, "kv_heads causal rotary bias rng"),
    ):
        assert set(options.split()) <= inspect.signature(function).parameters.keys(), function
    x = et.zeros((4, 64))
    q = x.to_mxfp4(block_size=32, axis=-1, scale_rule="floor", rounding="nearest_even")
    assert all(t.is_blocked for t in (q, x.to_mxfp8(element="e4m3"), x.to_int4(group_size=32)))


def test_a_recipe_has_six_slots() -> None:
    layer = et.RECIPES["mxfp4"].layers
    slots = ("fprop.x", "fprop.w", "dgrad.g", "dgrad.w", "wgrad.g", "wgrad.x")
    assert "mxfp4" in et.FORMATS and all(layer.slot(slot) is not None for slot in slots)


def test_every_model_builds_and_every_run_is_one() -> None:
    assert set(NAMES["extensor.training.runs.RUNS"].split()) <= set(models.names())
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
    assert all(name in text for name in (*RUNS, "compare", "generate", "mxfp4"))
