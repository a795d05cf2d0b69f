"""Losses of 16-bit floats: in float32, gradients in their tensor's dtype."""

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

    helpers = {"Reduction", "reduced", "wide"}
    assert LOSSES.keys() == {*class_loss.__all__, *loss.__all__} - helpers
