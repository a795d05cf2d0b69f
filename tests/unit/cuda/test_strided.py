"""Every training kernel on arrays whose values do not lie side by side.

Sums may be taken in another order, by cuBLAS or cupy.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from extensor.backends.protocol import AttentionForward, Window
from extensor_cuda import multi_tensor, reduction
from tests.unit.cuda.emulator import EMULATED

RNG = np.random.default_rng(0)
WINDOW = Window((2, 2))
EPS = 1e-5


def some(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def norms(centred: bool) -> tuple[Any, ...]:
    x, weight = some(6, 40), some(40)
    mean = (x.mean(axis=1, keepdims=True),) if centred else ()
    return some(6, 40), x, weight, *mean, np.ones((6, 1), np.float32)


X, LABELS = some(6, 40), RNG.integers(0, 40, 6)
Q, K = some(1, 4, 5, 8), some(1, 2, 5, 8)
CASES: dict[str, tuple[Any, ...]] = {
    "cross_entropy": (X, LABELS, 0.1),
    "cross_entropy_grad": (some(6, 1), X, LABELS, some(6, 2), 0.1),
    "label_ranks": (X, LABELS),
    "layer_norm": (X, some(40), some(40), EPS),
    "layer_norm_grad": norms(True),
    "rms_norm": (X, some(40), EPS),
    "add_rms_norm": (X, some(6, 40), some(40), EPS),
    "topk": (X, 3),
    "rms_norm_grad": norms(False),
    "add_rows": (some(9, 40), RNG.integers(0, 9, 6), X),
    "sum_rows": (RNG.integers(0, 9, 6), X, 9),
    "leading_sum": (X, 1),
    "attention": (Q, K, some(1, 2, 5, 8), True, 0.3),
    "attention_grad": (
        *(some(1, 4, 5, 8), Q, K, some(1, 2, 5, 8), some(1, 4, 5, 8), some(1, 4, 5, 2), True, 0.3),
        (some(1, 4, 5, 8), some(1, 2, 5, 8), some(1, 2, 5, 8)),
    ),
    "conv2d_grad_x": (some(2, 3, 4, 4), some(3, 2, 2, 2), (2, 2, 5, 5), WINDOW, 1),
    "dropout_mask": (np.array([5, 7]), (6, 40), 0.5),
    "gated_silu": (X, some(6, 40), 1.0, None),
    "gated_silu_grad": (some(6, 40), X, some(6, 40), 1.7, 0.5),
    "rotary": (some(2, 3, 5, 16), some(5, 8), some(5, 8), False),
    "gelu": (X,),
    "gelu_grad": (some(6, 40), X, None),
    "add": (X, some(6, 40)),
    "cast": (X, np.dtype(ml_dtypes.bfloat16)),
    "relu": (X,),
    "positive_bits": (X,),
    "relu_grad": (some(6, 40), X),
    "relu_grad_of_bits": (some(6, 40), RNG.integers(0, 256, 30).astype(np.uint8)),
    "max_pool2d": (some(2, 3, 6, 6), WINDOW),
    "max_pool2d_grad": (
        *(some(2, 3, 5, 5), RNG.integers(0, 4, (2, 3, 5, 5)).astype(np.int32)),
        *((2, 3, 6, 6), WINDOW),
    ),
    "bfloat16_values": (X,),
    "softmax": (X, 1),
    "softmax_grad": (some(6, 40), X, 1),
}


def every_other(xp: Any, a: np.ndarray) -> Any:
    wide = np.full((*a.shape[:-1], 2 * a.shape[-1]), 77, a.dtype)
    wide[..., ::2] = a
    return xp.asarray(wide)[..., ::2]


def backwards(xp: Any, a: np.ndarray) -> Any:
    return xp.asarray(np.ascontiguousarray(a[..., ::-1]))[..., ::-1]


def down(xp: Any, a: np.ndarray) -> Any:
    return xp.asarray(np.ascontiguousarray(a.T)).T


def results(backend: Any, name: str, changed: int = -1, layout: Any = None) -> list[np.ndarray]:
    """What a method gives, or writes, with one array that lies in another layout."""

    def there(a: Any, number: int) -> Any:
        if isinstance(a, tuple) and not isinstance(a[0], int):
            return tuple(there(part, number) for part in a)
        if not isinstance(a, np.ndarray):
            return a
        return layout(backend.xp, a) if number == changed else backend.xp.asarray(a)

    args = [there(a, number) for number, a in enumerate(CASES[name])]
    if name == "attention_grad":
        g, *kept, into = args
        args = [g, AttentionForward(*kept), into]
    out = getattr(backend, name)(*args)
    written = {"attention_grad": args[-1], "add_rows": args[0]}.get(name, out)
    parts = written if isinstance(written, tuple) else (written,)
    return [np.ascontiguousarray(part.get()) for part in parts if part is not None]


def test_every_method_is_here() -> None:
    flat = [*vars(multi_tensor).values(), *vars(reduction).values()]  # of contiguous arrays
    assert CASES.keys() == {name for name, row in EMULATED.items() if row.choose not in flat}


@pytest.mark.parametrize("layout", [every_other, backwards, down], ids=lambda f: f.__name__)
@pytest.mark.parametrize("name", CASES)
def test_strides_do_not_change_a_result(trainer: Any, name: str, layout: Any) -> None:
    expected = results(trainer, name)
    for number, a in enumerate(CASES[name]):
        if isinstance(a, np.ndarray) or (isinstance(a, tuple) and isinstance(a[0], np.ndarray)):
            got = results(trainer, name, number, layout)
            for part, (ours, theirs) in enumerate(zip(got, expected, strict=True)):
                ours, theirs = (a.astype(np.float64) for a in (ours, theirs))
                np.testing.assert_allclose(
                    ours, theirs, 1e-5, 1e-5, err_msg=f"argument {number}, result {part}"
                )
