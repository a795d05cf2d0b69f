"""Optimizers by hand, their options, state, and how they write. Torch: test_every_optimizer.py."""

import json

import ml_dtypes
import numpy as np
import pytest

from extensor import optim
from extensor.autograd.tensor import ExTensor
from extensor.nn import Linear
from extensor.optim import (
    LARS,
    SGD,
    Adagrad,
    Adam,
    AdamW,
    Lion,
    Muon,
    Optimizer,
    RMSprop,
    one_tensor,
)
from extensor.optim.muon import orthogonalize
from extensor.optim.one_tensor import SEGMENT
from tests.test_every_optimizer import CASES


def param(values, dtype=np.float32) -> ExTensor:
    return ExTensor(np.asarray(values).astype(dtype), requires_grad=True)


def set_grad(p: ExTensor, values) -> None:
    p.grad = ExTensor(np.asarray(values).astype(p.data.dtype).reshape(p.shape))


def bits(array) -> bytes:
    return (array if isinstance(array, np.ndarray) else array.get()).tobytes()


def test_lion_by_hand():
    p = param([1.0, 1.0, 1.0], np.float64)
    optimizer = Lion([p], lr=0.1, betas=(0.5, 0.75), weight_decay=1.0)
    set_grad(p, [4.0, -4.0, 0.0])
    optimizer.step()  # m = [1, -1, 0]
    np.testing.assert_allclose(p.numpy(), [0.8, 1.0, 0.9])
    set_grad(p, [-0.5, -0.5, 1.0])
    optimizer.step()  # 0.5 m + 0.5 g = [0.25, -0.75, 0.5]
    np.testing.assert_allclose(p.numpy(), [0.62, 1.0, 0.71])


def test_lars_by_hand():
    p = param([3.0, 4.0], np.float64)
    optimizer = LARS([p], lr=0.5, momentum=0.5, weight_decay=0.1, trust=0.2)
    set_grad(p, [0.0, 2.0])
    optimizer.step()  # ratio 0.2 * 5 / (2 + 0.5) = 0.4; g' = [0.3, 2.4]
    np.testing.assert_allclose(p.numpy(), [3.0 - 0.06, 4.0 - 0.48])
    set_grad(p, [0.0, 0.0])
    w = p.numpy().copy()
    optimizer.step()  # no gradient: ratio 1, momentum goes on
    np.testing.assert_allclose(p.numpy(), w - 0.5 * (0.1 * w + 0.5 * np.array([0.12, 0.96])))
    zero = param([0.0], np.float64)
    set_grad(zero, [2.0])
    LARS([zero], lr=0.5).step()
    np.testing.assert_allclose(zero.numpy(), [-1.0])


@pytest.mark.parametrize("shape", [(6, 6), (4, 16), (16, 4)])
def test_orthogonalize_brings_singular_values_near_one(shape):
    matrix = np.random.default_rng(0).standard_normal(shape)
    values = np.linalg.svd(orthogonalize(matrix, np), compute_uv=False)
    assert values.min() > 0.6 and values.max() < 1.25
    np.testing.assert_array_equal(orthogonalize(np.zeros(shape), np), 0.0)


def test_orthogonalize_is_five_steps_of_the_polynomial_on_each_singular_value():
    matrix = np.random.default_rng(0).standard_normal((3, 5))
    values = np.linalg.svd(matrix, compute_uv=False)
    values /= np.linalg.norm(values)
    for _ in range(5):
        values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
    got = np.linalg.svd(orthogonalize(matrix, np), compute_uv=False)
    np.testing.assert_allclose(got, np.sort(values)[::-1], rtol=1e-5)


def test_parameters_are_numbered_from_zero_over_all_groups():
    groups = [{"params": [param([1.0]), param([1.0])]}, {"params": [param([1.0])]}]
    members = [m for group in SGD(groups, lr=0.1).groups for m in group.members]
    assert [m.index for m in members] == [0, 1, 2]


def test_muon_by_hand():
    w, g = np.ones((8, 2, 2)), np.random.default_rng(0).standard_normal((8, 2, 2))
    p = param(w, np.float64)
    optimizer = Muon([p], lr=0.1, momentum=0.5, weight_decay=0.5)
    set_grad(p, g)
    optimizer.step()
    u = orthogonalize(1.5 * g.reshape(8, 4), np).reshape(w.shape) * np.sqrt(2)
    np.testing.assert_allclose(p.numpy(), 0.95 * w - 0.1 * u)
    np.testing.assert_array_equal(optimizer.state_dict()["state.0.momentum"], g)
    with pytest.raises(ValueError, match=r"two axes or more, got shape \(1,\); give it to AdamW"):
        Muon([param([1.0])])


def test_sgd_by_hand():
    p = param([1.0, 2.0])
    optimizer = SGD([p], lr=0.5, momentum=0.5, weight_decay=0.25)
    set_grad(p, [1.0, -1.0])
    optimizer.step()  # g' = [1.25, -0.5]
    np.testing.assert_array_equal(p.numpy(), [0.375, 2.25])
    optimizer.step()  # g' = [1.09375, -0.4375], b = [1.71875, -0.6875]
    np.testing.assert_array_equal(p.numpy(), [-0.484375, 2.59375])


def test_adamw_decays_the_weight_and_adam_the_gradient():
    for kind, expected in ((AdamW, 2.0 * (1 - 0.1 * 0.25)), (Adam, 2.0 - 0.1)):
        p = param([2.0], np.float64)
        optimizer = kind([p], lr=0.1, weight_decay=0.25)
        set_grad(p, [0.0])
        optimizer.step()
        assert p.item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("case", ["nesterov", "adam options", "adamw"])
@pytest.mark.parametrize("size", [SEGMENT - 1, SEGMENT, 2 * SEGMENT + 3])
def test_segments_do_not_show(case, size, monkeypatch):
    name, options = CASES[case]
    rng = np.random.default_rng(1)
    start = rng.standard_normal(size).astype(np.float32)
    grads = [rng.standard_normal(size).astype(np.float32) for _ in range(2)]
    results = []
    for segment in (SEGMENT, size + 1):
        monkeypatch.setattr("extensor.optim.one_tensor.SEGMENT", segment)
        p = param(start)
        optimizer = getattr(optim, name)([p], **options)
        for g in grads:
            set_grad(p, g)
            optimizer.step()
        results.append(bits(p.numpy()))
    assert results[0] == results[1]


@pytest.mark.parametrize("case", CASES)
def test_gradients_are_not_written(case):
    name, options = CASES[case]
    p = param(np.ones((3, 4)))
    g = np.arange(12.0).reshape(3, 4).astype(np.float32)
    set_grad(p, g)
    getattr(optim, name)([p], **options).step()
    np.testing.assert_array_equal(p.grad.numpy(), g)


@pytest.mark.host
def test_memory_of_any_order_and_gradients_of_any_order():
    values, g = np.arange(6.0).reshape(2, 3), np.arange(6.0).reshape(3, 2).T
    p, q = param(values), param(values)
    p.data = np.asfortranarray(p.data)
    q.data.flags.writeable = False
    for t in (p, q):
        set_grad(t, g)
        SGD([t], lr=1.0).step()
        np.testing.assert_array_equal(t.numpy(), values - g)


def test_the_version_counter_rises():
    p = param([1.0])
    set_grad(p, [1.0])
    before = p._version[0]
    SGD([p], lr=0.1).step()
    assert p._version[0] > before


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
def test_half_precision_parameters_have_float32_masters(dtype):
    """Updates far below one bfloat16 step add up in the master copy."""
    p = param([1.0], dtype)
    optimizer = SGD([p], lr=1e-4)
    for _ in range(100):
        set_grad(p, [1.0])
        optimizer.step()
    assert p.data.dtype == dtype
    master = optimizer.state_dict()["state.0.master"]
    assert master.dtype == np.float32
    np.testing.assert_allclose(master, [0.99], rtol=1e-5)
    assert p.numpy() == master.astype(dtype)
    assert p.numpy() != np.asarray(1.0, dtype)


def test_state_is_flat_arrays_and_json_scalars():
    p = param(np.ones((2, 3)))
    optimizer = Adam([("w", p)], lr=0.1)
    state = optimizer.state_dict()
    arrays = {k for k, v in state.items() if isinstance(v, np.ndarray)}
    assert arrays == {"state.w.mean", "state.w.square"}
    assert state["state.w.mean"].shape == (2, 3)
    scalars = {k: v for k, v in state.items() if k not in arrays}
    assert json.loads(json.dumps(scalars)) == scalars
    assert scalars == {
        "optimizer": "Adam",
        "step.w": 0,
        "group.0.base_lr": 0.1,
        "group.0.lr": 0.1,
        "group.0.beta1": 0.9,
        "group.0.beta2": 0.999,
        "group.0.eps": 1e-8,
        "group.0.weight_decay": 0.0,
    }


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"optimizer": "SGD"}, "optimizer: expected Adam, got 'SGD'"),
        ({"state.w.mean": np.zeros((3, 2), np.float32)}, r"expected float32 of shape \(2, 3\)"),
        ({"state.w.mean": np.zeros((2, 3), np.float64)}, "got float64"),
        ({"state.w.mean": None}, "state.w.mean: expected .*got nothing"),
        ({"state.v.mean": np.zeros(1)}, "state.v.mean: expected nothing"),
        ({"step.w": None}, "step.w: expected int, got None"),
        ({"step.w": 1.5}, "step.w: expected int, got 1.5"),
        ({"step.v": 1}, "step.v: expected NoneType, got 1"),
        ({"group.1.lr": 0.1}, r"group.1.lr: expected NoneType"),
        ({"group.0.lr": -1.0}, "lr: expected a finite number"),
    ],
)
def test_a_state_that_does_not_fit_changes_nothing(change, message):
    optimizer = Adam([("w", param(np.ones((2, 3))))], lr=0.1)
    state = {**optimizer.state_dict(), "step.w": 5, "group.0.lr": 0.5, "group.0.base_lr": 0.5}
    state["state.w.mean"] = np.full((2, 3), 7, np.float32)
    bad = {k: v for k, v in {**state, **change}.items() if v is not None}
    before = optimizer.state_dict()
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(bad)
    after = optimizer.state_dict()
    assert before.keys() == after.keys()
    for name, value in before.items():
        np.testing.assert_array_equal(value, after[name])
    optimizer.load_state_dict(state)
    assert optimizer.state_dict()["step.w"] == 5
    assert optimizer.groups[0].options["lr"] == optimizer.groups[0].base_lr == 0.5


def test_groups_have_their_own_options():
    w, b = param([1.0]), param([1.0])
    optimizer = SGD(
        [{"params": [w]}, {"params": b, "lr": 1.0, "weight_decay": 0.0}], lr=0.1, weight_decay=1.0
    )
    set_grad(w, [0.0])
    set_grad(b, [0.5])
    optimizer.step()
    np.testing.assert_allclose(w.numpy(), [0.9], rtol=1e-6)
    np.testing.assert_array_equal(b.numpy(), [0.5])
    assert [g.base_lr for g in optimizer.groups] == [0.1, 1.0]
    assert optimizer.params == [w, b] or optimizer.params[0] is w


def test_zero_grad():
    p = param([1.0])
    set_grad(p, [1.0])
    SGD([p], lr=0.1).zero_grad()
    assert p.grad is None


P = param([1.0])
BAD_OPTIONS = [
    (SGD, {"lr": -0.1}, ValueError, r"lr: expected a finite number in \[0.0, inf\), got -0.1"),
    (SGD, {"lr": float("nan")}, ValueError, "lr"),
    (SGD, {"lr": float("inf")}, ValueError, "lr"),
    (SGD, {"lr": "0.1"}, TypeError, "lr: expected a number"),
    (SGD, {"lr": True}, TypeError, "lr: expected a number"),
    (SGD, {"lr": 0.1, "momentum": 1.0}, ValueError, r"momentum: .* in \[0.0, 1.0\)"),
    (SGD, {"lr": 0.1, "nesterov": True}, ValueError, "nesterov: expected momentum"),
    (SGD, {"lr": 0.1, "weight_decay": -1.0}, ValueError, "weight_decay"),
    (Adam, {"betas": (1.0, 0.9)}, ValueError, "beta1"),
    (Adam, {"betas": (0.9, -0.1)}, ValueError, "beta2"),
    (Adam, {"eps": 0.0}, ValueError, "eps"),
    (Adam, {"betas": 0.9}, TypeError, "betas: expected two numbers, got 0.9"),
    (Lion, {"betas": (0.9,)}, TypeError, "betas: expected two numbers"),
    (AdamW, {"weight_decay": float("inf")}, ValueError, "weight_decay"),
    (Adagrad, {"eps": 0.0}, ValueError, "eps"),
    (RMSprop, {"eps": -1.0}, ValueError, "eps"),
    (RMSprop, {"decay": 1.0}, ValueError, "decay"),
    (RMSprop, {"momentum": 1.5}, ValueError, "momentum"),
    (Lion, {"betas": (1.0, 0.9)}, ValueError, "beta1"),
    (Lion, {"betas": (0.9, 1.0)}, ValueError, "beta2"),
    (LARS, {"lr": 0.1, "trust": 0.0}, ValueError, "trust"),
    (LARS, {"lr": 0.1, "momentum": 1.0}, ValueError, "momentum"),
    (Muon, {"momentum": -0.5}, ValueError, "momentum"),
]


@pytest.mark.parametrize(("kind", "options", "error", "message"), BAD_OPTIONS)
def test_bad_options(kind, options, error, message):
    with pytest.raises(error, match=message):
        kind([P], **options)


def integer():
    return ExTensor(np.arange(3))


BAD_PARAMS = [
    (lambda: P, TypeError, r"got one tensor; pass \[tensor\]"),
    (lambda: Linear(2, 2), TypeError, r"got a module; pass model.parameters\(\)"),
    (lambda: [], ValueError, "got none; was a generator used up"),
    (lambda: [P, P], ValueError, "1 is given twice"),
    (lambda: [("a", P), ("a", param([2.0]))], ValueError, "a is given twice"),
    (lambda: [{"params": [P]}, {"params": [P]}], ValueError, "given twice"),
    (lambda: [{"params": []}], ValueError, "in each group"),
    (lambda: [{"params": [P], "lrr": 0.1}], ValueError, "did you mean 'lr'"),
    (lambda: [{"params": [P], "lr": -1.0}], ValueError, "lr: expected"),
    (lambda: [{"params": [P]}, P], TypeError, "or mappings with 'params' only"),
    (lambda: [{"lr": 0.1}], TypeError, "mappings with 'params'"),
    (lambda: [np.ones(3)], TypeError, "expected an ExTensor, got ndarray"),
    (lambda: [(1, P)], TypeError, "expected a name and a tensor, got 1"),
    (lambda: [integer()], TypeError, "expected a dense float tensor, got extensor.int64"),
    (lambda: [ExTensor([1.0])], ValueError, "0 requires no gradient"),
]


@pytest.mark.parametrize(("params", "error", "message"), BAD_PARAMS)
def test_bad_params(params, error, message):
    with pytest.raises(error, match=message):
        SGD(params(), lr=0.1)


@pytest.mark.parametrize("kind", [SGD, AdamW, Muon])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_step_on_gradients_that_are_not_finite_changes_nothing(kind, bad):
    good, broken = param(np.ones((2, 2))), param(np.ones((2, 2)))
    optimizer = kind([("good", good), ("broken", broken)], lr=0.1)
    before = optimizer.state_dict()
    set_grad(good, np.ones((2, 2)))
    set_grad(broken, [[1.0, 1.0], [1.0, bad]])
    with pytest.raises(FloatingPointError, match="in that of broken; .*MXGradScaler"):
        optimizer.step()
    assert (good.numpy() == 1).all() and (broken.numpy() == 1).all()
    for name, value in optimizer.state_dict().items():
        np.testing.assert_array_equal(value, before[name])


def test_a_step_without_gradients_is_an_error():
    with pytest.raises(RuntimeError, match=r"call loss.backward\(\) first"):
        SGD([param([1.0])], lr=0.1).step()


def test_options_are_checked_again_when_used():
    p = param([1.0])
    set_grad(p, [1.0])
    optimizer = SGD([p], lr=0.1)
    optimizer.groups[0].options["lr"] = float("nan")
    with pytest.raises(ValueError, match="lr: expected"):
        optimizer.step()
    np.testing.assert_array_equal(p.numpy(), [1.0])


def test_momentum_cannot_be_switched_on_later():
    p = param([1.0])
    set_grad(p, [1.0])
    optimizer = SGD([p], lr=0.1)
    optimizer.groups[0].options["momentum"] = 0.9
    with pytest.raises(ValueError, match=r"need \['momentum'\], which was not kept"):
        optimizer.step()
    np.testing.assert_array_equal(p.numpy(), [1.0])


def test_the_base_class_is_abstract():
    with pytest.raises(TypeError, match="abstract"):
        Optimizer([P], lr=0.1)


class MultiTensor(type(ExTensor([0.0], device="cpu").backend)):
    """The CPU's backend, saying that it takes many parameters in one call."""

    multi_tensor_states = ("float32",)


@pytest.mark.host
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (Adam, {"weight_decay": 0.1}),
        (AdamW, {}),
        (SGD, {"lr": 0.1, "weight_decay": 0.1}),
        (SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    ],
)
def test_multi_tensor_steps_are_those_of_each_parameter(kind, options):
    rng = np.random.default_rng(0)
    shapes = ((3, 4), (5,), (), (0, 2))
    values = [rng.standard_normal(shape).astype(np.float32) for shape in shapes]
    multi_tensor, alone = ([param(v) for v in values] for _ in range(2))
    own = multi_tensor[0].backend
    for t in multi_tensor:
        t.backend = MultiTensor(own.core, own.core_missing)
    for t in multi_tensor[1:]:
        t.backend = multi_tensor[0].backend
    optimizers = kind(multi_tensor, **options), kind(alone, **options)
    for _ in range(3):
        for p, q in zip(multi_tensor, alone, strict=True):
            p.grad = q.grad = ExTensor(rng.standard_normal(p.shape).astype(np.float32))
        for optimizer in optimizers:
            optimizer.step()
    for p, q in zip(multi_tensor, alone, strict=True):
        assert bits(p.data) == bits(q.data)
        assert p._version == q._version


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (SGD, {"lr": 0.1, "momentum": 0.5}),
        (Adagrad, {"lr": 0.1}),
        (RMSprop, {"lr": 0.1}),
        (Adam, {"lr": 0.1}),
    ],
)
def test_l2_decay_is_a_gradient_of_the_weight(kind, options):
    """Several updates with it are those of gradients to which it was added."""
    rng = np.random.default_rng(0)
    start, grads = rng.standard_normal(40), rng.standard_normal((3, 40))
    decayed, plain = (ExTensor(start, "float64", requires_grad=True) for _ in range(2))
    one, two = kind([decayed], weight_decay=0.25, **options), kind([plain], **options)
    for g in grads:
        decayed.grad, plain.grad = ExTensor(g), ExTensor(g + 0.25 * plain.numpy())
        one.step()
        two.step()
        np.testing.assert_allclose(decayed.numpy(), plain.numpy(), rtol=1e-9)


@pytest.mark.host
@pytest.mark.parametrize(("kind", "options"), [(SGD, {"lr": 0.1}), (Adam, {"weight_decay": 0.1})])
@pytest.mark.parametrize("like", ["plain", "read-only", "strided", "gradient strided"])
def test_a_small_parameter_moves_where_it_lies_if_it_may(kind, options, like, monkeypatch):
    """The bits are those of an update in segments, and views see a move in place."""
    rng = np.random.default_rng(0)
    start, grads = rng.standard_normal((4, 6)).astype(np.float32), rng.standard_normal((2, 4, 6))
    moved = []
    for most in (one_tensor.KERNEL_SEGMENT, 7):
        monkeypatch.setattr(one_tensor, "KERNEL_SEGMENT", most)
        w = param(np.zeros((4, 6)))
        w.data = start.T.copy().T if like == "strided" else start.copy()
        w.data.flags.writeable = like != "read-only"
        before, optimizer = w.data, kind([w], **options)
        for number, g in enumerate(grads.astype(np.float32), 1):
            w.grad = ExTensor(g)
            if like == "gradient strided":
                w.grad.data = g.T.copy().T
            optimizer.step()
            assert w._version == [number]
        in_place = np.shares_memory(w.data, before)
        assert in_place == (like in ("plain", "gradient strided"))
        moved.append(bits(w.data))
    assert moved[0] == moved[1] != bits(start)


@pytest.mark.host
def test_what_a_subclass_prepares_is_what_a_kernel_gets():
    class Doubled(SGD):
        def prepare(self, xp, whole, options):
            return 2 * whole.grad, options

        def update(self, backend, part, options, step):
            assert [a.shape for a in part.scratch] == [part.weight.shape] * 2
            super().update(backend, part, options, step)

    class Plain(Doubled):
        prepare = Optimizer.prepare

    for kind, moved in ((Doubled, -2.0), (Plain, -1.0)):
        for several in (False, True):
            p = param([0.0, 0.0])
            p.backend = (
                MultiTensor(p.backend.core, p.backend.core_missing) if several else p.backend
            )
            set_grad(p, [1.0, 1.0])
            kind([p], lr=1.0).step()
            assert p.tolist() == [moved, moved]


def test_muon_scales_by_the_shape_of_the_matrix():
    """sqrt(rows / columns) where there are more rows, one column included; else 1."""
    for rows, columns in ((16, 1), (16, 2), (4, 16)):
        w = ExTensor(np.zeros((rows, columns)), "float64", requires_grad=True)
        w.grad = ExTensor(np.random.default_rng(0).standard_normal((rows, columns)))
        Muon([w], lr=1.0, momentum=0.0).step()
        size = np.linalg.norm(w.numpy(), 2) / np.sqrt(max(1.0, rows / columns))
        assert 0.6 < size < 1.3  # singular values near one


def test_a_repr_says_the_options_of_one_group_and_the_number_of_several():
    w, b = (ExTensor([1.0, 2.0], requires_grad=True) for _ in range(2))
    assert "lr=0.1" in repr(SGD([w, b], lr=0.1)) and "group" not in repr(SGD([w, b], lr=0.1))
    assert "2 groups" in repr(SGD([{"params": [w]}, {"params": [b]}], lr=0.1))
