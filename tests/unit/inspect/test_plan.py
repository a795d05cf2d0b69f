"""A plan of memory: the least time that fits, the peak that it says, the same run.

Oracle of the choice: every combination.
"""

from __future__ import annotations

import itertools
from hashlib import sha256
from typing import Any

import numpy as np
import pytest

import extensor as et
from extensor import nn
from extensor.inspect import memory_ledger, plan, plan_memory
from extensor.optim import SGD

needs_core = pytest.mark.skipif(
    et.ones(1).backend.core is None, reason="the C++ core keeps the ledger's log"
)


def test_no_choice_that_fits_takes_less_time() -> None:
    rng = np.random.default_rng(0)
    solved = 0
    for _ in range(40):
        costs = {}
        for number in range(2):
            sizes = sorted(rng.integers(1, 50, 4).tolist(), reverse=True)
            nbytes = dict(zip(plan._CHOICES, sizes, strict=True))
            times = [0.0, *rng.uniform(-0.1, 1.0, 3)]
            seconds = dict(zip(plan._CHOICES, times, strict=True))
            for i in range(int(rng.integers(1, 3))):
                costs[f"{number}.{i}"] = plan._Costs(nbytes, seconds)
        budget = int(rng.integers(10, 120))
        fitting = []
        for chosen in itertools.product(plan._CHOICES, repeat=len(costs)):
            parts = list(zip(costs.values(), chosen, strict=True))
            held = [part.nbytes[choice] for part, choice in parts]
            again = [
                sum(held[:i]) + part.nbytes["packed"]
                for i, (part, choice) in enumerate(parts)
                if choice == "recomputed"
            ]
            if max(sum(held), *again, 0) <= budget:
                fitting.append(sum(part.seconds[choice] for part, choice in parts))
        found = plan._solve(costs, budget)
        assert (found is None) == (not fitting)
        if found is not None:
            solved += 1
            assert plan._nbytes(costs, found) <= budget
            assert plan._seconds(costs, found) == pytest.approx(min(fitting))
    assert 10 < solved < 40


def build(recomputed: bool = False) -> tuple[nn.Module, Any, et.ExTensor]:
    blocks = [
        nn.TransformerBlock(
            nn.MultiheadAttention(64, 4, causal=True, rng=i), nn.FeedForward(64, 256, rng=9 + i)
        )
        for i in range(3)
    ]
    for block in blocks:
        block.recomputed = recomputed
    model = nn.Sequential(nn.Sequential(*blocks), nn.BatchNorm2d(64), nn.Dropout(0.2, rng=0))
    return model, nn.apply_recipe(model, "mxfp4_all", seed=3), et.randn((2 * 128, 64), seed=0)


def run(model: nn.Module, x: et.ExTensor) -> None:
    out = model[0](x.reshape(2, 128, 64)).reshape(256, 64, 1, 1)
    model[2](model[1](out)).square().mean().backward()


def peak(model: nn.Module, x: et.ExTensor) -> int:
    with memory_ledger(model) as ledger:
        run(model, x)
    for param in model.parameters():
        param.grad = None
    return ledger.report().peak


def trained(model: nn.Module, state: Any, x: et.ExTensor) -> list[str]:
    """All bytes after two steps, and the counts."""
    by = SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        run(model, x)
        by.step()
        by.zero_grad()
    arrays = [t.numpy() for t in (*model.parameters(), *model.buffers())]
    counts = str(sorted(state.telemetry.items()))
    return [sha256(a.tobytes()).hexdigest()[:16] for a in arrays] + [counts]


@needs_core
def test_a_plan_fits_its_limit_and_changes_no_bit() -> None:
    want = trained(*build())
    model, state, x = build()
    least = peak(*build(recomputed=True)[::2])
    limit = (peak(*build()[::2]) + least) // 2
    found = plan_memory(model, lambda: run(model, x), limit, "0.*", rounds=1)
    assert list(found.choices) == ["0.0", "0.1", "0.2"]
    assert set(found.choices.values()) & {"cheap", "recomputed"} and found.peak <= found.limit
    assert trained(model, state, x) == want
    again, _, x = build()
    found.apply(again)
    assert peak(again, x) <= found.limit


@needs_core
def test_no_more_parts_run_again_than_need_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """A part that runs again keeps its input alone, and the first of them runs when others end."""
    times = {"kept": 0.0, "packed": 0.0, "recomputed": 1.0}  # "cheap" ran out of memory
    monkeypatch.setattr(plan, "_times", lambda groups, *rest: [times] * len(groups))
    solve, costs = plan._solve, {}

    def noted(found: Any, budget: int) -> Any:
        costs.update(found)
        return solve(found, budget)

    monkeypatch.setattr(plan, "_solve", noted)
    model, _, x = build()
    limit = peak(*build()[::2]) - x.nbytes
    found = plan_memory(model, lambda: run(model, x), limit, "0.*", rounds=1)
    assert all(part.nbytes["recomputed"] == x.nbytes < part.nbytes["packed"] // 8
               for part in costs.values())  # fmt: skip
    assert [choice == "recomputed" for choice in found.choices.values()] == [True, False, False]


@needs_core
def test_parts_run_again_in_the_order_in_which_they_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not in the order of their names: this model begins with its last block."""
    times = {"kept": 0.0, "packed": 0.0, "recomputed": 1.0}
    monkeypatch.setattr(plan, "_times", lambda groups, *rest: [times] * len(groups))

    def step(model: Any, x: et.ExTensor) -> None:
        out = x.reshape(2, 128, 64)
        for block in reversed(list(model[0])):
            out = block(out)
        out.square().mean().backward()

    model, _, x = build()
    with memory_ledger(model) as ledger:
        step(model, x)
    limit = ledger.report().peak - x.nbytes
    model, _, x = build()
    found = plan_memory(model, lambda: step(model, x), limit, "0.*", rounds=1)
    assert [choice == "recomputed" for choice in found.choices.values()] == [False, False, True]


@needs_core
def test_what_does_not_fit_is_said_and_nothing_is_changed() -> None:
    model, _, x = build()
    with pytest.raises(MemoryError, match=r"at most 0.01 MB, the least found is .* MB(.|\n)*saved"):
        plan_memory(model, lambda: run(model, x), 10_000, "0.*", rounds=1)
    assert not any(module.recomputed for module in model.modules())
    assert all(layer.quant.saved_input is None for _, layer in nn.gemm_layers(model))
    with pytest.raises(ValueError, match=r"'head\.\*' matches no module; the model's modules: \*"):
        plan_memory(model, lambda: run(model, x), 10_000, "head.*")


@needs_core
@pytest.mark.parametrize(
    ("full", "at_first"),
    [(("kept", "packed"), True), (("cheap",), False), (plan._CHOICES, True)],
    ids=["least_remain", "while_timed", "all"],
)
def test_choices_that_run_out_of_memory_are_left_out(
    full: tuple[str, ...], at_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a full GPU: at their first step, or at later ones, where others took what was free."""
    model = nn.Sequential(*(nn.FeedForward(32, 128, rng=i) for i in range(3)))
    nn.apply_recipe(model, "mxfp4_all", seed=3)
    x, setting, calls, now = et.randn((64, 32), seed=0), plan._set, 0, ""

    def noted(module: nn.Module, choice: Any) -> None:
        nonlocal now
        now = choice
        setting(module, choice)

    def step() -> None:
        nonlocal calls
        calls += now in full
        loss = model(x).square().mean()
        if now in full and (at_first or calls > 1):
            raise MemoryError("requested 8 bytes")
        loss.backward()

    monkeypatch.setattr(plan, "_set", noted)
    if full == plan._CHOICES:
        with pytest.raises(MemoryError, match=r"ran out of memory, at .* MB(.|\n)*saved"):
            plan_memory(model, step, 1 << 40, "*", rounds=1)
        assert not any(module.recomputed for module in model.modules())
        return
    found = plan_memory(model, step, 1 << 40, "*", rounds=1)
    assert not set(full) & set(found.choices.values()) and np.isfinite(found.seconds)
