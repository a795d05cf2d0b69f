"""Losses by their definitions; of 16-bit floats in float32, their gradients in their own dtype."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import extensor as et
from tests.oracle.compare import same_bytes

_RNG = np.random.default_rng(0)
_A, _B = _RNG.standard_normal((2, 40, 7))
_SHARE = _RNG.uniform(0.1, 0.9, (40, 7))
_CLASSES = _RNG.integers(0, 7, 40)
LOSSES: dict[str, tuple[np.ndarray, np.ndarray]] = {
    "binary_cross_entropy": (_SHARE, 1 - _SHARE),
    "binary_cross_entropy_with_logits": (_A, _SHARE),
    "cross_entropy": (_A, _CLASSES),
    "focal": (_A, _SHARE),
    "hinge": (_A, np.sign(_B)),
    "huber": (_A, _B),
    "kl_div": (_A, _SHARE),
    "l1": (_A, _B),
    "mse": (_A, _B),
    "nll": (_A, _CLASSES),
    "smooth_l1": (_A, _B),
}


@pytest.mark.parametrize("half", [et.bfloat16, et.float16], ids=lambda d: d.name)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("name", LOSSES)
def test_losses_of_16_bit_floats_are_those_of_float32(name: str, reduction: str, half: Any) -> None:
    given = [et.ExTensor(a if a is _CLASSES else a.astype(half.numpy)) for a in LOSSES[name]]
    made = []
    for dtype in (half, et.float32):
        x = given[0].detach().astype(dtype)
        x.requires_grad = True
        target = given[1] if given[1].dtype.is_integer else given[1].astype(dtype)
        loss = getattr(et, name)(x, target, reduction=reduction)
        assert loss.dtype is et.float32
        loss.backward(et.ones_like(loss))
        assert x.grad is not None
        assert x.grad.dtype is dtype
        made.append((loss.numpy(), x.grad))
    same_bytes("loss", made[0][0], made[1][0])
    same_bytes("gradient", made[0][1].numpy(), made[1][1].astype(half).numpy())


def test_every_loss_is_here() -> None:
    from extensor.ops import class_loss, loss

    helpers = {"Reduction", "distillation", "reduced", "wide"}  # it has no other reduction
    assert LOSSES.keys() == {*class_loss.__all__, *loss.__all__} - helpers


def test_cross_entropy_follows_the_definition() -> None:
    rng = np.random.default_rng(0)
    x, labels = rng.normal(size=(5, 4)), np.array([0, 3, -100, 1, 1])
    logp = x - np.log(np.exp(x).sum(1, keepdims=True))
    s = 0.1
    each = -((1 - s) * logp[np.arange(5), labels % 4] + s * logp.mean(1)) * (labels != -100)
    kwargs = {"label_smoothing": s, "ignore_index": -100}
    for how, expected in (("none", each), ("sum", each.sum()), ("mean", each.sum() / 4)):
        loss = et.cross_entropy(et.ExTensor(x), et.ExTensor(labels), reduction=how, **kwargs)
        np.testing.assert_allclose(loss.numpy(), expected, rtol=1e-13)
    ignored = et.ExTensor(np.full(5, -100))
    with pytest.raises(ValueError, match="no labels to average over"):
        et.cross_entropy(et.ExTensor(x), ignored, ignore_index=-100)
    with pytest.raises(ValueError, match="no labels to average over; leave"):
        et.cross_entropy(et.zeros((0, 3)), et.zeros(0, "int64"))
    nothing = et.cross_entropy(et.ExTensor(x), ignored, ignore_index=-100, reduction="sum")
    assert nothing.item() == 0.0


@pytest.mark.parametrize("labels", ["int64", "int32", "uint8"])
@pytest.mark.parametrize("how", ["none", "sum", "mean"])
@pytest.mark.parametrize("shape", [(7, 5), (2, 1, 3), (4, 6, 3, 2)])
def test_float32_cross_entropy_is_that_of_float64(
    shape: tuple[int, ...], how: Any, labels: str
) -> None:
    """Kernels take float32 alone; of scores below 16 each loss is within 100 units of 2**-24."""
    rng = np.random.default_rng(0)
    x = 2 * rng.standard_normal(shape, dtype=np.float32)
    y = et.ExTensor(rng.integers(0, shape[1], (shape[0], *shape[2:])).astype(labels))
    g = rng.standard_normal(y.shape if how == "none" else ())
    for smoothing, ignore in ((0.0, None), (0.2, None), (0.1, int(y.data.flat[0]) ^ 1)):
        made = []
        for dtype in ("float32", "float64"):
            leaf = et.ExTensor(x.astype(dtype), requires_grad=True)
            loss = et.cross_entropy(leaf, y, smoothing, ignore, how)
            loss.backward(et.ExTensor(g.astype(dtype)))
            assert leaf.grad is not None
            made.append((loss.numpy(), leaf.grad.numpy()))
        (loss32, grad32), (loss64, grad64) = made
        rows = 1 if how == "none" else y.size
        np.testing.assert_allclose(loss32, loss64, rtol=0, atol=100 * 2**-24 * rows)
        np.testing.assert_allclose(grad32, grad64, rtol=0, atol=100 * 2**-24 * np.abs(g).max())


def test_losses_by_definition() -> None:
    a, b = et.ExTensor([0.0, 3.0]), et.ExTensor([0.5, 1.0])
    assert et.mse(a, b).item() == pytest.approx(2.125)
    assert et.l1(a, b, "sum").item() == pytest.approx(2.5)
    assert et.huber(a, b, 1.0, "none").tolist() == pytest.approx([0.125, 1.5])
    assert et.smooth_l1(a, b, 0.5, "none").tolist() == pytest.approx([0.25, 1.75])
    assert et.hinge(a, et.ExTensor([1.0, 1.0]), "none").tolist() == [1, 0]
    p, y = et.ExTensor([0.0, 1.0]), et.ExTensor([1.0, 1.0])
    assert et.binary_cross_entropy(p, y, "none").tolist() == [100, 0]
    logits = et.ExTensor([800.0, -800.0])
    loss = et.binary_cross_entropy_with_logits(logits, y, "none")
    assert loss.tolist() == [0, 800]
    assert et.kl_div(et.ExTensor([[0.0, -1.0]]), et.ExTensor([[0.0, 1.0]]), "batchmean").item() == 1


def test_distillation_of_one_row_is_that_of_a_batch_of_one() -> None:
    student, teacher = et.randn(5, seed=0), et.randn(5, seed=1)
    alone = et.distillation(student, teacher, 2.0).item()
    batch = et.distillation(student.reshape(1, 5), teacher.reshape(1, 5), 2.0).item()
    assert alone == pytest.approx(batch, rel=1e-6) and alone > 0
