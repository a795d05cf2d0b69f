"""Captured steps: the bits of eager ones, and what is said of what cannot be captured.

Without a GPU on one made of numpy (`tests.unit.cuda.fake`), whose quantizers are the reference.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import extensor as et
from extensor.backends import registry
from extensor.nn.quantize import apply_recipe
from extensor.optim import SGD, AdamW, MXGradScaler, WarmupCosine, clip_grad_norm
from extensor.quant import reference
from extensor_cuda import blas, recording
from extensor_cuda.backend import CudaBackend
from extensor_cuda.counts import Counters, Counts
from extensor_cuda.kernels import cross_entropy, norm, optimizer, pair, scatter
from extensor_cuda.kernels import quantize as kernels
from models.gpt.configs import GPTConfig
from models.gpt.model import build as build_gpt
from models.lenet.configs import LeNetConfig
from models.lenet.model import build as build_lenet
from tests.oracle.compare import same_bytes
from tests.unit.cuda import emulator as emulation
from tests.unit.cuda import fake

SLOTS = 2 * kernels.SLOTS


class FakeBlas:
    """cublasSgemmStridedBatched on numpy: column-major matrices by pitch and stride."""

    def gemm(
        self, turned: Any, sizes: Any, arrays: Any, pitches: Any, strides: Any, batch: int
    ) -> None:
        (m, n, k), held = sizes, [fake.plain(a) for a in arrays]
        shapes = [(k, m) if turned[0] else (m, k), (n, k) if turned[1] else (k, n), (m, n)]

        def matrix(i: int, number: int) -> np.ndarray:
            rows, columns = shapes[i]
            assert pitches[i] >= rows
            flat = np.lib.stride_tricks.as_strided(
                held[i], (batch * max(strides[i], 1) + pitches[i] * columns,), (4,)
            )
            start = number * strides[i]
            return np.lib.stride_tricks.as_strided(
                flat[start:], (rows, columns), (4, 4 * pitches[i])
            )

        def again() -> None:
            for number in range(batch):
                a, b = matrix(0, number), matrix(1, number)
                a, b = (a.T if turned[0] else a), (b.T if turned[1] else b)
                matrix(2, number)[...] = (a @ b).astype(np.float32)

        fake.TAPE.launch(again)


def counted(x: Any, spec: Any, stream: Any, counters: Counters, part: tuple[int, int]) -> Any:
    """A quantizer's launch: the reference, with the step that the device has."""
    clock = recording.clock_of([stream])
    values = fake.plain(x)
    decoded, stats = reference.operand(values, spec, stream)
    out, adds = fake.made(decoded), fake.plain(counters.array)
    memory = fake.plain(out)

    def again() -> None:
        now = stream
        if isinstance(clock, np.ndarray):
            now = replace(stream, step=int(fake.plain(clock)))
        made, found = reference.operand(values, spec, now)
        memory[...] = made
        adds[part[0] : part[0] + 2] += np.array([found.saturated, found.flushed], np.uint64)

    fake.TAPE.launch(again)
    return out, Counts(counters, part, stats.count)


def fake_operand(x: Any, plan: Any, stream: Any, xp: Any) -> Any:
    return counted(x, plan.spec, stream, Counters(SLOTS, xp), (0, SLOTS))


def fake_pair(x: Any, plan: Any, streams: Any, xp: Any) -> Any:
    counters, streams = Counters(2 * SLOTS, xp), plan.ordered(streams)
    sides = (plan.along.spec, 0), (plan.down.spec, 1)
    made = [
        counted(x, spec, streams[i], counters, (i * SLOTS, (i + 1) * SLOTS)) for spec, i in sides
    ]
    return plan.ordered((made[0], made[1]))


@pytest.fixture(params=["fake", "on a GPU"])
def gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The CUDA backend, on a GPU or on numpy, as device "cuda"."""
    if request.param == "on a GPU":
        return request.getfixturevalue("cuda")
    if emulation.COMPILER is None:
        pytest.skip("no C++ compiler")
    launch = request.getfixturevalue("fake_launch")
    for module in (cross_entropy, norm, optimizer, scatter, recording):
        monkeypatch.setattr(module, "launch", launch)
    monkeypatch.setattr(kernels, "operand", fake_operand)
    monkeypatch.setattr(pair, "operand", fake_pair)
    monkeypatch.setattr("extensor_cuda.backend._capability", lambda device: "80")
    xp: Any = fake.FakeCupy()

    def matmul(a: Any, b: Any) -> Any:
        if a.dtype == b.dtype == np.float32 and min(a.ndim, b.ndim) > 1:
            return blas.matmul(a, b, xp, FakeBlas())
        return np.matmul(a, b)

    xp.matmul = matmul
    backend, usual = CudaBackend(xp), registry._made
    monkeypatch.setattr(registry, "_made", lambda d: backend if d == "cuda" else usual(d))
    return backend


@pytest.fixture(scope="session")
def fake_launch(tmp_path_factory: pytest.TempPathFactory) -> fake.FakeLaunch:
    return fake.FakeLaunch(tmp_path_factory.mktemp("kernels"))


def lenet(recipe: str) -> tuple[Any, Any, Any]:
    model = build_lenet(LeNetConfig(), np.random.default_rng(1)).to("cuda")
    rng = np.random.default_rng(2)
    batches = [
        (rng.standard_normal((4, 1, 28, 28)).astype(np.float32), rng.integers(0, 10, 4))
        for _ in range(7)
    ]
    return model, SGD(model.named_parameters(), lr=0.05, momentum=0.9), batches


def gpt(recipe: str) -> tuple[Any, Any, Any]:
    config = GPTConfig(vocab=40, context=8, layers=2, width=32, heads=2)
    model = build_gpt(config, np.random.default_rng(1)).to("cuda")
    matrices = [(n, p) for n, p in model.named_parameters() if p.ndim > 1]
    vectors = [(n, p) for n, p in model.named_parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    rng = np.random.default_rng(2)
    tokens = [rng.integers(0, 40, (2, 9)) for _ in range(7)]
    batches = [(np.ascontiguousarray(t[:, :-1]), t[:, 1:].reshape(-1)) for t in tokens]
    return model, AdamW(groups, lr=0.01), batches


def train(make: Any, recipe: str, captured: bool, scaled: bool, bad: int = -1) -> dict[str, Any]:
    """Seven steps; what they leave behind."""
    model, step_of, batches = make(recipe)
    state = apply_recipe(model, recipe, 5)
    scaler = MXGradScaler(state, init_scale=4.0, growth_interval=2) if scaled else None
    schedule = WarmupCosine(2, 9)

    def step(inputs: et.ExTensor, labels: et.ExTensor) -> tuple[et.ExTensor, et.ExTensor]:
        step_of.zero_grad()
        scores = model(inputs)
        scores = scores.reshape(-1, scores.shape[-1])
        loss = et.cross_entropy(scores, labels)
        if scaler is None:
            loss.backward()
            clip_grad_norm(step_of.params, 0.5)
            step_of.step()
        else:
            scaler.scale(loss).backward()
            scaler.unscale_(step_of)
            clip_grad_norm(step_of.params, 0.5, nonfinite="return")
            scaler.step(step_of)
            scaler.update()
        return loss, scores

    call: Callable[..., Any] = et.capture(step) if captured else step
    losses = []
    for number, (inputs, labels) in enumerate(batches):
        state.step = number
        schedule.apply(step_of, number)
        if number == bad:
            inputs = np.full_like(inputs, np.inf)
        there = [et.from_numpy(a, device="cuda") for a in (inputs, labels)]
        losses.append([t.numpy().copy() for t in call(*there)])
    counts = dict(state.telemetry)
    report = None if scaler is None else scaler.state_dict()
    return {
        "losses": losses,
        "model": model.state_dict(),
        "optimizer": step_of.state_dict(),
        "telemetry": counts,
        "scaler": report,
    }


def same(ours: Any, theirs: Any, where: str = "") -> None:
    assert type(ours) is type(theirs), where
    if isinstance(ours, dict):
        assert ours.keys() == theirs.keys(), where
        for key in ours:
            same(ours[key], theirs[key], f"{where}.{key}")
    elif isinstance(ours, (list, tuple)):
        for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            same(a, b, f"{where}[{i}]")
    elif isinstance(ours, np.ndarray):
        same_bytes(where, ours, theirs)
    else:
        assert ours == theirs, (where, ours, theirs)


@pytest.mark.parametrize("scaled", [False, True], ids=["plain", "scaled"])
@pytest.mark.parametrize("recipe", ["fp32", "mxfp4"])
@pytest.mark.parametrize("make", [lenet, gpt])
def test_captured_steps_are_the_eager_ones_bit_for_bit(
    gpu: Any, make: Any, recipe: str, scaled: bool
) -> None:
    eager, captured = (train(make, recipe, c, scaled) for c in (False, True))
    assert eager["losses"][0][0] != eager["losses"][6][0]
    same(captured, eager)


@pytest.mark.parametrize("bad", [0, 1, 2, 4])
def test_steps_without_finite_gradients_are_skipped_as_in_eager_ones(gpu: Any, bad: int) -> None:
    eager, captured = (train(lenet, "fp32", c, True, bad) for c in (False, True))
    assert eager["scaler"]["skipped"] == 1
    same(captured, eager)
