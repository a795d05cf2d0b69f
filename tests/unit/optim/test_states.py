"""Narrow optimizer states: bytes, unbiased rounding, averages that move, training, resuming."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import extensor as et
from extensor import optim
from extensor.backends.generic import GenericBackend
from extensor.backends.generic import optim as generic
from extensor.backends.registry import get as get_backend
from extensor.io import load_checkpoint, save_checkpoint
from extensor.optim import Adam
from extensor.optim.states import STATES, state_stream
from extensor.quant.array import QuantArray
from extensor.random import Stream
from tests.test_every_optimizer import CASES

CPU = get_backend("cpu")
NARROW = ["bfloat16", "mxfp8_e4m3"]
SLOTS: dict[str, Any] = {
    "SGD": lambda options: "momentum" in options,
    "RMSprop": lambda options: 1 + ("momentum" in options),
    **dict.fromkeys(("Adam", "AdamW"), lambda options: 2),
    **dict.fromkeys(("Adagrad", "Lion", "LARS", "Muon"), lambda options: 1),
}
"""How many states of its own size an optimizer keeps of a parameter, under its options."""
KINDS = ("sgd", "momentum", "adam", "adamw", "adagrad", "rmsprop momentum", "lion", "lars", "muon")
"""Of the cases of test_every_optimizer.py, each number of states once."""


def param(values: Any, dtype: Any = np.float32) -> et.ExTensor:
    return et.ExTensor(np.asarray(values).astype(dtype), requires_grad=True)


def set_grad(p: et.ExTensor, values: Any) -> None:
    p.grad = et.ExTensor(np.asarray(values).astype(p.data.dtype).reshape(p.shape))


def packed(states: str, values: np.ndarray, step: int = 0, square: bool = False) -> np.ndarray:
    """What is read back of values that were stored."""
    kind = STATES[states]
    stored = kind.pack(CPU, values, state_stream(step, 0, 0), square)
    return kind.unpack(CPU, stored, square)


@pytest.mark.parametrize("case", KINDS)
def test_bytes_are_those_of_what_is_stored(case: str) -> None:
    name, options = CASES[case]
    kind, slots = getattr(optim, name), SLOTS[name](options)
    values = np.ones((10, 100))  # 1,000 values: 32 blocks, the last of 8
    sizes = {"float32": 4000, "bfloat16": 2000, "mxfp8_e4m3": 1024 + 32}
    for states, size in sizes.items():
        optimizer = kind([param(values)], states=states, **options)
        assert optimizer.nbytes == slots * size
        p = optimizer.params[0]
        set_grad(p, values)
        optimizer.step()
        assert optimizer.nbytes == slots * size
    half = kind([param(values, ml_dtypes.bfloat16)], states="bfloat16", **options)
    assert half.nbytes == slots * 2000 + 4000  # master weights stay float32


def test_bfloat16_states_have_the_same_bits_in_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.random.default_rng(0).standard_normal(5 * 2 * generic.PER_CALL - 77)
    values, backend = values.astype(np.float32), GenericBackend("cpu", np)
    stream = state_stream(3, 1, 0)
    whole = backend.stochastic_bfloat16(values, stream)
    monkeypatch.setattr(generic, "BLOCKS", 2)
    assert backend.stochastic_bfloat16(values, stream).tobytes() == whole.tobytes()
    assert backend.stochastic_bfloat16(values[:0], stream).size == 0


def test_bfloat16_rounds_to_a_neighbour_and_right_in_the_mean() -> None:
    rng = np.random.default_rng(0)
    values = (rng.standard_normal(1000) * np.exp2(rng.integers(-100, 100, 1000))).astype(np.float32)
    values[:3] = 0.0, -0.0, np.float32(1.5)
    cut = (values.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    after = ((values.view(np.uint32) | np.uint32(0xFFFF)) + np.uint32(1)).view(np.float32)
    draws = np.stack([packed("bfloat16", values, step) for step in range(400)])
    assert ((draws == cut) | (draws == after)).all()
    held = values == cut
    assert held.sum() >= 3 and (draws[:, held] == values[held]).all()
    step = np.abs(after - cut)
    # 400 draws of a variance of at most 1/4 step^2: six standard deviations of the mean
    assert (np.abs(draws.mean(axis=0, dtype=np.float64) - values) <= 6 * 0.5 / 20 * step).all()


def test_infinity_stays_infinity() -> None:
    values = np.array([np.inf, -np.inf], np.float32)
    for step in range(50):
        np.testing.assert_array_equal(packed("bfloat16", values, step), values)


def test_roots_above_zero_never_become_zero() -> None:
    values = np.zeros(96, np.float32)
    values[:32] = np.float32(1.0) * np.exp2(-2.0 * np.arange(32))  # 62 binades in a block
    values[40] = 1e-30
    back = packed("mxfp8_e4m3", values, square=True)
    assert ((back > 0) == (values > 0)).all()
    # e4m3's normal numbers reach 2^-14 of the largest: within a step of 1/8 in the root
    np.testing.assert_allclose(np.sqrt(back[:14]), np.sqrt(values[:14]), rtol=1 / 8)
    assert (back[20:32] == back[31]).all() and back[31] <= (2.0**-16) ** 2


@pytest.mark.parametrize("states", NARROW)
def test_slow_averages_move(states: str) -> None:
    """Thousands of small steps: under rounding to nearest the average would stand still."""
    p = param(np.ones(320))
    optimizer = Adam([p], lr=0.0, betas=(0.9, 0.999), states=states)
    exact = 0.0
    for number in range(3000):
        size = 1.0 if number < 500 else 0.05
        set_grad(p, np.full(320, size))
        optimizer.step()
        exact = 0.999 * exact + 0.001 * size * size
    member = optimizer.groups[0].members[0]
    got = STATES[states].unpack(p.backend, member.arrays["square"], True)
    # 2,500 steps of 1/1000 leave a twelfth of the peak, and the mean follows. A root's noise adds
    # its variance to the square: 1/1000 of the step to 1/8 each time, 5% for every 1,000 steps
    assert exact < 0.05
    assert float(got.mean()) == pytest.approx(exact, rel=0.05 if states == "bfloat16" else 0.2)
    nearest = np.float32(0.4)
    for _ in range(2500):
        nearest = ml_dtypes.bfloat16(np.float32(0.999) * np.float32(nearest))
    assert float(nearest) > 0.3  # what this module is for


def test_every_parameter_and_slot_has_bits_of_its_own() -> None:
    p, q = param(np.ones(64)), param(np.ones(64))
    optimizer = Adam([p, q], lr=0.01, states="bfloat16")
    for t in (p, q):
        set_grad(t, np.full(64, 0.3))
    optimizer.step()
    state = optimizer.state_dict()
    one, two = (state[f"state.{i}.mean"].tobytes() for i in (0, 1))
    assert one != two and len(set(state["state.0.mean"].tolist())) == 2


@pytest.mark.parametrize("states", NARROW)
@pytest.mark.parametrize("case", KINDS)
def test_training_converges_as_in_float32(case: str, states: str) -> None:
    """Least squares with 64 unknowns, noise-free: all kinds get below 5% of the first loss."""
    name, options = CASES[case]
    plain = {k: v for k, v in options.items() if k in ("lr", "momentum")}  # nothing pulls to zero
    rng = np.random.default_rng(0)
    x = et.ExTensor(rng.standard_normal((256, 64)).astype(np.float32))
    y = x @ et.ExTensor(rng.standard_normal((64, 8)).astype(np.float32))
    losses: dict[str, list[float]] = {}
    for state in ("float32", states):
        w = param(np.zeros((64, 8)) + (0.1 if case == "lars" else 0.0))
        rate = {"lars": 2.0, "adam": 0.05, "adamw": 0.05, "muon": 0.1}.get(case, options["lr"])
        optimizer = getattr(optim, name)([w], states=state, **{**plain, "lr": rate})
        losses[state] = []
        for _ in range(300):
            optimizer.zero_grad()
            loss = (x @ w - y).square().mean()
            loss.backward()
            optimizer.step()
            losses[state].append(loss.item())
    assert losses["float32"][-1] < 0.05 * losses["float32"][0]
    assert losses[states][-1] < 0.05 * losses[states][0]


@pytest.mark.parametrize("states", ["float32", *NARROW])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [np.float32, np.float64, ml_dtypes.bfloat16])
def test_resume_is_bit_identical(case: str, states: str, dtype: Any, tmp_path: Path) -> None:
    name, options = CASES[case]
    kind, slots = getattr(optim, name), SLOTS[name](options)
    rng = np.random.default_rng(2)
    start = [rng.standard_normal(shape) for shape in ((3, 50), (7, 1))]
    grads = [[rng.standard_normal(a.shape) for a in start] for _ in range(6)]

    def build(arrays: Any) -> tuple[list[et.ExTensor], Any]:
        params = [param(a, dtype) for a in arrays]
        return params, kind(zip("wb", params, strict=True), states=states, **options)

    def run(params: list[et.ExTensor], optimizer: Any, steps: range) -> None:
        for step in steps:
            for p, g in zip(params, grads[step], strict=True):
                set_grad(p, g)
            optimizer.step()

    through, optimizer = build(start)
    run(through, optimizer, range(6))
    params, first = build(start)
    run(params, first, range(3))
    state = first.state_dict()
    arrays = {k: v for k, v in state.items() if isinstance(v, (np.ndarray, QuantArray))}
    assert len(arrays) == 2 * slots + 2 * (dtype == ml_dtypes.bfloat16)
    weights = {f"weights.{i}": p.data for i, p in enumerate(params)}
    scalars = {k: v for k, v in state.items() if k not in arrays}
    save_checkpoint(tmp_path / "a", {**arrays, **weights}, scalars)
    run(params, first, range(3, 5))  # the state taken before is a copy
    loaded = load_checkpoint(tmp_path / "a")
    resumed, second = build([loaded.tensors.pop(f"weights.{i}") for i in range(2)])
    second.load_state_dict({**loaded.tensors, **loaded.metadata})
    run(resumed, second, range(3, 6))
    for p, q in zip(through, resumed, strict=True):
        assert p.data.tobytes() == q.data.tobytes()


def test_empty_and_scalar_parameters() -> None:
    for states in NARROW:
        for shape in ((), (2, 0), (1,)):
            p = param(np.ones(shape))
            optimizer = Adam([p], lr=0.1, states=states)
            set_grad(p, np.ones(shape))
            optimizer.step()
            assert p.shape == shape and np.isfinite(p.numpy()).all()


def test_bad_input() -> None:
    for bad in ("int8", "float16", None, 8):
        with pytest.raises(ValueError, match="no kind of optimizer state named .*bfloat16"):
            Adam([param([1.0])], states=bad)
    p = param(np.ones(40))
    wide, narrow = (Adam([("w", p)], states=s) for s in ("float32", "mxfp8_e4m3"))
    set_grad(p, np.ones(40))
    narrow.step()
    before = narrow.state_dict()
    with pytest.raises(ValueError, match=r"state.w.mean: expected QuantSpec.*got float32"):
        narrow.load_state_dict(wide.state_dict())
    with pytest.raises(ValueError, match="state.w.mean: expected float32"):
        wide.load_state_dict(narrow.state_dict())
    after = narrow.state_dict()
    assert after["step.w"] == 1
    assert (after["state.w.mean"].codes == before["state.w.mean"].codes).all()


def test_streams_are_numbered_so_that_none_meets_another() -> None:
    """Bits are those of other versions, too: a resumed run goes on."""
    assert state_stream(5, 3, 2) == Stream(0, 5, (1 << 23) + 3, 2)
