"""ZeRO-1 and 2 against the optimizer on one rank, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import extensor as et
from extensor import models, nn, optim
from extensor.distributed import (
    Communicator,
    GradientBuckets,
    LocalCommunicator,
    ShardedBuckets,
    ShardedOptimizer,
    clip_grad_norm,
    run_ranks,
    square_sum,
)

STEPS, PARTS = 3, 4
OPTIMIZERS: dict[str, Callable[[Any], optim.Optimizer]] = {
    "adamw": lambda named: optim.AdamW(
        [
            {"params": [(n, p) for n, p in named if p.ndim > 1], "weight_decay": 0.1},
            {"params": [(n, p) for n, p in named if p.ndim <= 1], "weight_decay": 0.0},
        ],
        lr=0.01,
    ),
    "sgd": lambda named: optim.SGD(named, lr=0.1, momentum=0.9, nesterov=True),
    "lion": lambda named: optim.Lion(named, lr=0.001),
}


def model_of(seed: int = 0) -> Any:
    return models.build("lenet", models.config("lenet"), np.random.default_rng(seed))


def batch(step: int, part: int) -> tuple[et.ExTensor, et.ExTensor]:
    rng = np.random.default_rng((step, part))
    images = rng.standard_normal((2, 1, 28, 28)).astype(np.float32)
    return et.ExTensor(images), et.ExTensor(rng.integers(0, 10, 2))


def trained(
    ranks: Communicator, shards: bool, make: str = "adamw", clip: float = 0.0, **how: Any
) -> tuple[list[bytes], dict[str, Any]]:
    """The weights and the optimizer's state after some steps of micro-batches."""
    model = model_of()
    params = list(model.parameters())
    optimizer: Any = OPTIMIZERS[make](list(model.named_parameters()))
    if shards:
        sharded = ShardedBuckets(params, ranks, "exact", 1 << 15, **how)
        optimizer = ShardedOptimizer(optimizer, sharded)
        buckets: GradientBuckets = sharded
    else:
        buckets = GradientBuckets(params, ranks, "exact", 1 << 15)
    mine = range(ranks.rank, PARTS, ranks.size)
    for step in range(STEPS):
        optimizer.zero_grad()
        for part in mine:
            with buckets.micro_batch(last=part == mine[-1], step=step):
                images, labels = batch(step, part)
                (et.cross_entropy(model(images), labels) * 0.25).backward()
        buckets.finish(step)
        if clip:
            clip_grad_norm(optimizer.params, clip, ranks if shards else None)
        optimizer.step_unless(None)
        if shards and not how.get("keep_gradients", True):
            assert all(not bucket._flats for bucket in buckets.buckets)
            assert all(param.grad is None for param in params)
    return [p.data.tobytes() for p in params], optimizer.state_dict()


@pytest.mark.parametrize("make", OPTIMIZERS)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_shards_make_the_bits_of_one_rank(make: str, ranks: int) -> None:
    clip = 0.5 if make == "sgd" else 0.0
    weights, state = trained(LocalCommunicator(), shards=False, make=make, clip=clip)
    how = {"keep_gradients": ranks != 2}
    for mine, gathered in run_ranks(ranks, lambda comm: trained(comm, True, make, clip, **how)):
        assert mine == weights
        assert gathered.keys() == state.keys()
        for name, value in state.items():
            if isinstance(value, np.ndarray):
                assert gathered[name].shape == value.shape, name
                assert gathered[name].tobytes() == value.tobytes(), name
            else:
                assert gathered[name] == value, name


def test_states_are_divided() -> None:
    def program(comm: LocalCommunicator) -> int:
        model = model_of()
        buckets = ShardedBuckets(list(model.parameters()), comm, "exact")
        return ShardedOptimizer(optim.Adam(list(model.named_parameters())), buckets).nbytes

    whole = optim.Adam(list(model_of().named_parameters())).nbytes
    parts = run_ranks(4, program)
    assert sum(parts) == whole
    assert max(parts) < 0.27 * whole


def test_gradients_that_give_back_their_memory_hold_none_in_shared_memory() -> None:
    def program(comm: LocalCommunicator) -> list[str]:
        params = list(model_of().parameters())
        made = [ShardedBuckets(params, comm, keep_gradients=keep) for keep in (True, False)]
        return [each.buckets[0].reduction.path for each in made]

    lasting, released = run_ranks(2, program)[0]
    assert lasting == "shared memory"
    assert released == "collectives: whole gradients give back their memory"


def test_a_state_goes_on_with_another_number_of_ranks() -> None:
    """Saved on 2 ranks, loaded on 4 and on one without shards."""
    _, state = run_ranks(2, lambda comm: trained(comm, True))[0]

    def load(comm: LocalCommunicator) -> dict[str, Any]:
        model = model_of(1)
        buckets = ShardedBuckets(list(model.parameters()), comm, "exact")
        optimizer = ShardedOptimizer(OPTIMIZERS["adamw"](list(model.named_parameters())), buckets)
        optimizer.load_state_dict(state)
        return optimizer.state_dict()

    for again in run_ranks(4, load):
        for name, value in state.items():
            assert np.array_equal(again[name], value), name
    OPTIMIZERS["adamw"](list(model_of(1).named_parameters())).load_state_dict(state)


def test_a_gradient_that_is_not_finite_is_so_on_all_ranks() -> None:
    def program(comm: LocalCommunicator) -> bool | None:
        model = model_of()
        buckets = ShardedBuckets(list(model.parameters()), comm, "exact")
        optimizer: Any = ShardedOptimizer(
            optim.SGD(list(model.named_parameters()), lr=0.1), buckets
        )
        with buckets.micro_batch(last=True):
            images, labels = batch(0, comm.rank)
            scale = float("inf") if comm.rank == 1 else 1.0
            (et.cross_entropy(model(images), labels) * scale).backward()
        with np.errstate(all="ignore"):
            buckets.finish(0)
        scaler = optim.MXGradScaler(init_scale=1.0)
        return scaler.step(optimizer)

    assert run_ranks(3, program) == [False, False, False]


class WithoutNamespace(np.ndarray):
    """As cupy's arrays, which do not name their module."""

    __array_namespace__ = None


def test_square_sums_take_arrays_that_name_no_module() -> None:
    array = np.array([3.0, 4.0], np.float32).view(WithoutNamespace)
    assert square_sum([array]) == 25.0


def test_square_sums_have_no_order() -> None:
    rng = np.random.default_rng(0)
    arrays = [
        (rng.standard_normal(n) * 10.0 ** rng.integers(-12, 12)).astype(np.float32)
        for n in (5, 320, 64, 3200, 1)
    ]
    whole = square_sum(arrays)
    exact = sum(float(v) ** 2 for a in arrays for v in a.astype(np.float64))
    assert abs(whole - exact) <= 1e-12 * exact
    assert square_sum(arrays[::-1]) == whole
    split = [arrays[1][:32], arrays[3][:1600], arrays[0]], [
        arrays[4], arrays[3][1600:], arrays[2], arrays[1][32:],
    ]  # fmt: skip
    assert run_ranks(2, lambda comm: square_sum(split[comm.rank], comm)) == [whole, whole]
    assert square_sum([np.zeros(3, np.float32)]) == 0.0
    bad = [np.array([np.inf], np.float32)], [np.ones(1, np.float32)]
    assert np.isnan(run_ranks(2, lambda comm: square_sum(bad[comm.rank], comm))).all()


def test_refusals() -> None:
    one = LocalCommunicator()
    linear = nn.Linear(8, 8)
    named = list(linear.named_parameters())
    buckets = ShardedBuckets(list(linear.parameters()), one)
    with pytest.raises(ValueError, match="updates each value by itself, got Muon"):
        ShardedOptimizer(optim.Muon([named[0]]), buckets)
    with pytest.raises(ValueError, match="states in float32, got bfloat16"):
        ShardedOptimizer(optim.Adam(named, states="bfloat16"), buckets)
    with pytest.raises(ValueError, match="got none for rank 3"):
        run_ranks(4, lambda comm: ShardedBuckets(list(linear.parameters()), comm))
