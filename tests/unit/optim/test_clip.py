"""Clipping: in place, joint, and never silent about NaN and infinity."""

import numpy as np
import pytest

from extensor.autograd.tensor import ExTensor
from extensor.optim import clip_grad_norm, clip_grad_value


def params(*grads):
    made = [ExTensor(np.zeros(np.shape(g), np.float32), requires_grad=True) for g in grads]
    for p, g in zip(made, grads, strict=True):
        p.grad = ExTensor(np.asarray(g, np.float32))
    return made


def grads(made):
    return [p.grad.numpy().tolist() for p in made]


def test_the_joint_norm_is_clipped():
    made = params([3.0, 0.0], [[4.0]])
    made.append(ExTensor([1.0], requires_grad=True))  # no gradient: passed over
    assert clip_grad_norm(made, 1.0) == 5.0
    np.testing.assert_allclose(made[0].grad.numpy(), [0.6, 0.0], rtol=1e-6)
    np.testing.assert_allclose(made[1].grad.numpy(), [[0.8]], rtol=1e-6)


def test_a_small_norm_is_left_alone_and_infinity_only_measures():
    for bound in (5.0, float("inf")):
        made = params([3.0, 4.0])
        assert clip_grad_norm(made, bound) == 5.0
        assert grads(made) == [[3.0, 4.0]]


def test_the_norm_does_not_overflow():
    made = params(np.full(4, 1e30))
    assert clip_grad_norm(made, 1.0) == pytest.approx(2e30)
    np.testing.assert_allclose(made[0].grad.numpy(), 0.5, rtol=1e-6)


def test_norm_of_many_values_against_numpy():
    g = np.random.default_rng(0).standard_normal(200_000).astype(np.float32)
    assert clip_grad_norm(params(g), 1e9) == pytest.approx(np.linalg.norm(g.astype(float)))


def test_norm_against_torch():
    torch = pytest.importorskip("torch", reason="torch is the oracle: pip install -e .[peers]")
    rng = np.random.default_rng(1)
    values = [rng.standard_normal(s).astype(np.float32) for s in [(3, 4), (7,)]]
    theirs = [torch.zeros(v.shape, requires_grad=True) for v in values]
    for t, v in zip(theirs, values, strict=True):
        t.grad = torch.tensor(v)
    made = params(*values)
    expected = float(torch.nn.utils.clip_grad_norm_(theirs, 0.5))
    assert clip_grad_norm(made, 0.5) == pytest.approx(expected, rel=1e-6)
    for p, t in zip(made, theirs, strict=True):
        np.testing.assert_allclose(p.grad.numpy(), t.grad.numpy(), rtol=1e-5)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_gradients_that_are_not_finite(bad):
    made = params([3.0, bad], [1.0])
    for clip in (lambda: clip_grad_norm(made, 1.0), lambda: clip_grad_value(made, 1.0)):
        with pytest.raises(FloatingPointError, match="expected finite gradients"):
            clip()
    norm = clip_grad_norm(made, 1.0, nonfinite="return")
    assert not np.isfinite(norm)
    np.testing.assert_array_equal(made[0].grad.numpy(), [3.0, bad])
    assert grads(made)[1] == [1.0]


@pytest.mark.parametrize("norm", ["1", None, True])
def test_a_norm_is_a_number(norm):
    with pytest.raises(TypeError, match="max_norm: expected a number, got"):
        clip_grad_norm(params([1.0]), norm)


def test_values_are_clipped():
    made = params([-3.0, 0.5, 3.0], [1.0])
    clip_grad_value(made, 1.0)
    assert grads(made) == [[-1.0, 0.5, 1.0], [1.0]]


def test_one_tensor_will_do():
    (p,) = params([2.0])
    clip_grad_value(p, 1.0)
    assert grads([p]) == [[1.0]]


@pytest.mark.parametrize("bound", [0.0, -1.0, float("nan")])
def test_bad_bounds(bound):
    with pytest.raises(ValueError, match="max_norm: expected a number above 0"):
        clip_grad_norm(params([1.0]), bound)
    with pytest.raises(ValueError, match="max_value"):
        clip_grad_value(params([1.0]), bound)


def test_other_bad_arguments():
    with pytest.raises(ValueError, match="nonfinite: expected 'raise' or 'return'"):
        clip_grad_norm(params([1.0]), 1.0, nonfinite="ignore")
    bare = [ExTensor([1.0], requires_grad=True)]
    for clip in (clip_grad_norm, clip_grad_value):
        with pytest.raises(ValueError, match=r"call loss.backward\(\) first"):
            clip(bare, 1.0)
    with pytest.raises(ValueError, match="max_value"):
        clip_grad_value(params([1.0]), float("inf"))
