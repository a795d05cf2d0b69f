"""Bad input through the public surface, by table: errors say what was expected, what was given, and
what to do instead.

Bad inputs of single operations stand in their declarations (tests/test_every_primitive.py), those
of layers, optimizers, files and commands beside their own tests; here is what cuts across, and what
once got a poor answer or none.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import extensor as et
from extensor import models, nn, optim
from extensor.training import metrics
from extensor.training.data import batches, load_dataset
from extensor.training.data.transforms import Compose
from extensor.training.text.tokenizers import Characters, TokenizerError, from_state
from tests.test_every_layer import PEERS


def zeros(*shape: int) -> et.ExTensor:
    return et.zeros(shape)


def labels(*values: int) -> et.ExTensor:
    return et.ExTensor(np.array(values, np.int64))


def built(model: str, **changes: Any) -> nn.Module:
    return models.build(model, models.config(model, None, **changes), np.random.default_rng(0))


def step_with(grad: et.ExTensor) -> None:
    p = nn.Parameter(np.ones(2, np.float32))
    p.grad = grad
    optim.SGD([("w", p)], lr=0.1).step()


class TwoOfOneName(nn.Module):
    """Both would be a.b.weight in a state."""

    def __init__(self) -> None:
        self.a = nn.Sequential(b=nn.Linear(2, 2))
        setattr(self, "a.b", nn.Linear(2, 2))


def _replaced() -> None:
    nn.Linear(2, 2).weight = np.zeros((2, 2))


MEANS = """mse l1 smooth_l1 huber binary_cross_entropy hinge focal kl_div
    binary_cross_entropy_with_logits"""
VALUE_ERRORS: dict[str, tuple[Callable[[], Any], str]] = {
    "shapes": (lambda: zeros(2, 3) + zeros(4), "add: expected shapes that broadcast (equal, or 1"),
    "where": (lambda: et.where(zeros(2) > 0, zeros(3), 1.0), "where: expected shapes that broa"),
    "write of another shape": (lambda: zeros(2, 3).__setitem__(0, zeros(4)), "got shape (4,)"),
    "-1 of nothing": (lambda: zeros(0, 3).reshape(0, -1), "sizes other than 0 beside -1"),
    "one axis of two": (
        lambda: zeros(2, 3).permute(0),
        "each axis once for a tensor of 2 axes, got (0,",
    ),
    "tensordot axes": (
        lambda: et.tensordot(zeros(2), zeros(2), 3),
        "axes: expected 0..1 for shapes (2,)",
    ),
    "no tokens": (lambda: nn.MultiheadAttention(8, 2)(zeros(2, 0, 8)), "T of 1 or more, got (2, 0"),
    "no steps": (lambda: nn.LSTM(4, 3)(zeros(0, 2, 4)), "one step or more, got (0, 2"),
    "batch statistics of nothing": (
        lambda: nn.BatchNorm2d(3)(zeros(0, 3, 8, 8)),
        "use a larger batch, or eval()",
    ),
    **{
        f"{name} of nothing": (
            lambda name=name: getattr(et, name)(zeros(0, 2), zeros(0, 2)),
            f"{name}: no values to average over in shape (0, 2); leave an empty batch out",
        )
        for name in MEANS.split()
    },
    "class beyond": (
        lambda: et.cross_entropy(zeros(2, 3), labels(0, 3)),
        "0..2 for 3 classes, got 0..3",
    ),
    "class below": (
        lambda: et.nll(zeros(2, 3), labels(0, -1)),
        "nll: labels: expected 0..2 for 3 clas",
    ),
    "no classes": (
        lambda: et.cross_entropy(zeros(2, 0), labels(0, 0)),
        "one class or more, got sh",
    ),
    "hinge of 0 and 1": (
        lambda: et.hinge(zeros(2), zeros(2)),
        "of labels 0 and 1 make 2 * labels - 1",
    ),
    "probability of 2": (
        lambda: et.binary_cross_entropy(zeros(2), zeros(2) + 2),
        "targets in 0..1, got 2",
    ),
    "predictions of no class": (
        lambda: metrics.confusion_matrix(np.array([0, 5]), np.array([0, 1]), 3),
        "predictions: expected 0..2 for 3 classes, got 0..5",
    ),
    "labels of no class": (
        lambda: metrics.label_ranks(zeros(2, 3), np.array([0, 7])),
        "labels: expected 0..2 for 3 classes, got 0..7",
    ),
    "another count of labels": (
        lambda: metrics.label_ranks(zeros(2, 3), np.array([0, 1, 1])),
        "got shapes (2, 3) and (3,)",
    ),
    "a name given twice": (
        lambda: nn.Sequential(nn.ReLU(), **{"0": nn.ReLU()}),
        "got two named '0'",
    ),
    "model": (lambda: built("lennet"), "no model named 'lennet'; did you mean 'lenet'"),
    "model to build": (
        lambda: models.build("lennet", None, np.random.default_rng(0)),
        "named 'lennet'",
    ),
    "setting": (lambda: built("gpt", widht=4), "'widht'; did you mean 'width'"),
    "recipe": (lambda: nn.apply_recipe(nn.ReLU(), "mxfp5"), "named 'mxfp5'; did you mean 'mxfp"),
    "sequence beyond the context": (
        lambda: built("gpt", vocab=5, context=4)(labels(*range(5))[None]),
        "at most the 4 tokens of the context, got 5; the way out",
    ),
    "unknown token": (
        lambda: built("gpt", vocab=5, context=4)(labels(1, 9)[None]),
        "expected numbers in 0..4, got 1..9; use numbers of the vocabulary",
    ),
    "gradient of another shape": (
        lambda: step_with(zeros(1)),
        "gradient of shape (2,) for w, got float32 of shape",
    ),
    "gradient of whole numbers": (lambda: step_with(labels(1, 2)), "got int64 of shape"),
    "images of no batch": (
        lambda: next(batches(load_dataset("digits"), load_dataset("digits").train, 0)),
        "batch_size: expected 1 or more, got 0",
    ),
    "order of no images": (
        lambda: next(
            batches(
                load_dataset("digits"), load_dataset("digits").train, 2, order=np.array([0, 9999])
            )
        ),
        "order: expected indices in 0..1436, got 0..9999",
    ),
    "nothing to compare": (
        lambda: et.compare_layers(nn.Linear(2, 2), nn.Linear(2, 2), zeros(0, 2)),
        "batch: expected values to compare, got shapes [(0, 2)]",
    ),
    "nothing to quantize": (
        lambda: nn.quantize_model(nn.Sequential(nn.ReLU()), "mxfp4"),
        "expected a Linear or Conv2d that no rule keeps, got layers []",
    ),
}

OTHERS: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "write beyond the end": (
        lambda: zeros(2, 3).__setitem__(5, 1.0),
        IndexError,
        "of a tensor of shape (2, 3): ",
    ),
    "two layers of one name": (TwoOfOneName, AttributeError, "so two could be of one name"),
    "an array in place of a weight": (
        _replaced,
        TypeError,
        "in place of one, got ndarray; make one",
    ),
    "another model's settings": (
        lambda: models.build("gpt", models.config("mlp"), np.random.default_rng(0)),
        TypeError,
        "expected a GPTConfig for gpt, got MLPConfig; models.config('gpt') makes one",
    ),
    "hook": (lambda: nn.ReLU().register_forward_hook(3), TypeError, "hook: expected a function"),
    "unknown letter": (
        lambda: Characters("ab").encode("abc"),
        TokenizerError,
        "got 'c' at positio",
    ),
    "tokenizer of no state": (lambda: from_state(None), TokenizerError, "known: bpe, char"),
    "tokenizer cut off": (
        lambda: from_state({"kind": "char"}),
        TokenizerError,
        "expected text under 'letters', got None",
    ),
    "gradient of NaN": (
        lambda: step_with(zeros(2) * np.nan),
        FloatingPointError,
        "in that of w; skip the step",
    ),
    "transforms": (lambda: Compose(3), TypeError, "expected a list of transforms, got 3"),
}
CASES = OTHERS | {name: (call, ValueError, said) for name, (call, said) in VALUE_ERRORS.items()}


@pytest.mark.parametrize("case", CASES)
def test_the_error_says_what_is_wrong(case: str) -> None:
    call, error, message = CASES[case]
    with pytest.raises(error, match=re.escape(message)):
        call()


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("case", PEERS)
def test_an_empty_batch_goes_through_every_layer(case: str, training: bool) -> None:
    """Nothing in, nothing out, gradients of zeros; or an error of the library's own words."""
    make, _, shape = PEERS[case]
    layer = make().train(training)
    kind = np.int64 if case == "embedding" else np.float32
    x = et.ExTensor(np.zeros((0, *shape[1:]), kind), requires_grad=kind is np.float32)
    if case == "softmax" or (case == "batch norm" and training):
        with pytest.raises(ValueError, match=r"no values along axis 0|use a larger batch"):
            layer(x)
        return
    y = layer(x)
    y = y[0] if isinstance(y, tuple) else y
    assert y.shape[0] == 0 and y.dtype is et.float32
    if y.requires_grad:
        y.sum().backward()
    for p in layer.parameters():
        assert p.grad is not None and p.grad.shape == p.shape and not p.grad.numpy().any()


@pytest.mark.parametrize("model", ["lenet", "mlp", "alexnet", "vgg", "resnet", "mobilenet"])
def test_an_empty_batch_goes_through_the_image_models(model: str) -> None:
    config = models.config(model)
    side = getattr(config, "image_size", 28)
    channels = getattr(config, "in_channels", 3)
    assert built(model).eval()(zeros(0, channels, side, side)).shape == (0, config.classes)


def test_an_empty_batch_goes_through_the_language_models() -> None:
    for model in ("gpt", "encoder"):
        out = built(model, vocab=5, context=4)(et.ExTensor(np.zeros((0, 3), np.int64)))
        assert out.shape == (0, 3, 5)


@pytest.mark.parametrize("scheme", ["int8", "int4_g32", "fp8_tensor", "mxfp4", "nvfp4"])
def test_an_empty_batch_goes_through_quantized_layers(scheme: str) -> None:
    for layer, shape in ((nn.Linear(32, 16), (4, 32)), (nn.Conv2d(4, 8, 3), (2, 4, 8, 8))):
        made = nn.quantize_model(nn.Sequential(layer), scheme, [(et.randn(*shape, seed=0),)])
        assert made(zeros(0, *shape[1:])).shape[0] == 0
        assert nn.apply_recipe(layer, "mxfp4_all")
        layer(zeros(0, *shape[1:])).sum().backward()
        assert not layer.weight.grad.numpy().any()
