"""Weights without float32 copies, and updates inside the backward pass.

Oracles: the float32 update of the same values, rounded by the random bits that the stream names;
the step after backward, byte for byte.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import extensor as et
from extensor import nn, optim
from extensor.optim.states import state_stream
from extensor.random import random_words
from tests.test_every_optimizer import CASES
from tests.unit.optim.test_states import KINDS, param, set_grad

WEIGHTS = ("float32", "bfloat16", "mxint8")


def bits(param: Any) -> bytes:
    """All that is stored of a parameter."""
    parts = param.data.parts.values() if param.is_blocked else [param.data]
    return b"".join(part.tobytes() for part in parts)


@contextlib.contextmanager
def memory_of(*what: Any) -> Iterator[Callable[[], list[int]]]:
    """Bytes taken since the start, after each array."""
    with et.inspect.memory_ledger(*what) as ledger:
        yield lambda: [int(n) for n in ledger.report().timeline - ledger.report().timeline[0]]


needs_core = pytest.mark.skipif(
    et.ones(1).backend.core is None, reason="the C++ core keeps the ledger's log"
)


def rounded(values: np.ndarray, step: int, number: int) -> np.ndarray:
    """Float32 -> bfloat16 by 16 random bits a value: the formula, in whole numbers."""
    words = random_words(state_stream(step, number, 127), np.arange(1), 4096, 32).reshape(-1)
    noise = np.stack([words & 0xFFFF, words >> 16], -1).reshape(-1)[: values.size]
    bits = values.view(np.uint32).reshape(-1).astype(np.uint64) + noise
    return (bits >> 16).astype(np.uint16).reshape(values.shape).view(ml_dtypes.bfloat16)


@pytest.mark.parametrize("states", ["float32", "mxfp8_e4m3"])
@pytest.mark.parametrize("case", KINDS)
def test_a_bfloat16_weight_is_the_float32_update_rounded(case: str, states: str) -> None:
    name, options = CASES[case]
    rng = np.random.default_rng(0)
    start = rng.standard_normal((2, 12, 40)).astype(ml_dtypes.bfloat16)
    narrow = [param(a, ml_dtypes.bfloat16) for a in start]
    wide = [param(a) for a in start]
    kind = getattr(optim, name)
    one = kind(narrow, states=states, masters=False, **options)
    other = kind(wide, states=states, **options)
    for step in range(1, 4):
        for p, w in zip(narrow, wide, strict=True):
            g = rng.standard_normal(p.shape).astype(ml_dtypes.bfloat16)
            set_grad(p, g)
            set_grad(w, g)
        one.step()
        other.step()
        for number, (p, w) in enumerate(zip(narrow, wide, strict=True)):
            expected = rounded(w.numpy(), step, number)
            assert p.data.tobytes() == expected.tobytes()
            with et.no_grad():
                w.copy_(et.ExTensor(expected.astype(np.float32)))
    assert one.nbytes == other.nbytes  # no master copies


def test_small_updates_are_not_lost() -> None:
    """Rounded to nearest, a weight of 1 would never move by 1/1000 of a step of bfloat16."""
    w = param(np.ones(4096), ml_dtypes.bfloat16)
    by = optim.SGD([w], lr=2.0**-13, masters=False)
    for _ in range(256):
        set_grad(w, np.ones(4096))
        by.step()
    # 256 steps of 2^-13 move by 2^-5; the mean of 4096 weights is known to 6 deviations of 2^-8 / 4
    moved = 1.0 - float(w.data.astype(np.float64).mean())
    assert abs(moved - 2.0**-5) < 6 * 2.0**-10


def test_masters_are_for_bfloat16_alone() -> None:
    with pytest.raises(
        ValueError, match="masters=False: expected parameters in float32, bfloat16 or blocks"
    ):
        optim.SGD([param(np.ones(3), np.float16)], lr=0.1, masters=False)


class Tied(nn.Module):
    """An embedding that is also the head, a block run again in backward, an unused layer."""

    def __init__(self) -> None:
        self.tokens = nn.Embedding(50, 32, rng=0)
        self.block = nn.TransformerBlock(
            nn.MultiheadAttention(32, 2, causal=True, rng=1), nn.FeedForward(32, 64, rng=2)
        )
        self.block.recomputed = True
        self.unused = nn.Linear(4, 4, rng=3)
        self.head = nn.Linear(32, 50, bias=False, rng=4)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Any) -> Any:
        return self.head(self.block(self.tokens(tokens)))


def trained(in_backward: bool, case: str, weights: str) -> tuple[Tied, Any]:
    model = Tied()
    nn.cast_weights(model, weights)
    nn.apply_recipe(model, "mxfp4_all", seed=1)
    name, options = CASES[case]
    named = list(model.named_parameters())
    if name == "Muon":
        named = [(path, p) for path, p in named if p.ndim == 2]
    by = getattr(optim, name)(named, states="bfloat16", masters=False, **options)
    for step in range(3):
        model.zero_grad()
        loss = model(et.ExTensor(np.arange(20).reshape(2, 10) + step)).square().mean()
        if in_backward:
            with by.step_in_backward():
                loss.backward()
            assert all(p.grad is None for _, p in named)
        else:
            loss.backward()
            by.step()
    return model, by


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("case", KINDS)
def test_a_step_in_backward_has_the_bits_of_one_after_it(case: str, weights: str) -> None:
    (one, by), (other, after) = (trained(way, case, weights) for way in (True, False))
    for (path, a), (_, b) in zip(one.named_parameters(), other.named_parameters(), strict=True):
        assert bits(a) == bits(b), path
    mine, theirs = by.state_dict(), after.state_dict()
    assert mine.keys() == theirs.keys()
    for name, value in mine.items():
        assert np.asarray(value).tobytes() == np.asarray(theirs[name]).tobytes(), name


@needs_core
def test_no_full_set_of_gradients_is_held() -> None:
    model = nn.Sequential(*(nn.Linear(128, 128, bias=False, rng=i) for i in range(8)))
    by = optim.SGD(model.parameters(), lr=0.1)
    x = et.randn((4, 128), seed=0)
    peaks = {}
    for in_backward in (False, True):
        loss = model(x).square().mean()
        with et.inspect.memory_ledger(model, by) as ledger:
            if in_backward:
                with by.step_in_backward():
                    loss.backward()
            else:
                loss.backward()
                by.step()
                by.zero_grad()
        line = ledger.report().timeline
        peaks[in_backward] = int(line.max() - line[0])
    size = 128 * 128 * 4
    assert peaks[False] >= 8 * size
    # one gradient, the one before it, and the update's two scratch arrays
    assert peaks[True] <= 5 * size


class Untied(nn.Module):
    """An embedding whose gradient is rows alone, some looked up twice, beside a head of its own."""

    def __init__(self, count: int = 70, width: int = 12) -> None:
        self.tokens = nn.Embedding(count, width, rng=0)
        self.head = nn.Linear(width, 8, bias=False, rng=4)

    def forward(self, tokens: Any) -> Any:
        return self.head(self.tokens(tokens))


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("case", KINDS)
def test_rows_of_an_embedding_move_all_rows_by_the_bits_of_the_whole_gradient(
    case: str, weights: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("extensor.optim.one_tensor.SEGMENT", 100)  # ends within rows
    monkeypatch.setattr("extensor.optim.one_tensor.KERNEL_SEGMENT", 100)
    name, options = CASES[case]
    made = []
    for in_backward in (True, False):
        model = Untied()
        nn.cast_weights(model, weights)
        named = list(model.named_parameters())
        by = getattr(optim, name)(named, states="bfloat16", masters=False, **options)
        for step in range(3):
            tokens = et.ExTensor([[1, 3, 3, 69], [3, -70 + step, 7, 1]])
            loss = et.take(model.tokens.weight, tokens).square().mean() + model(tokens % 70).mean()
            if step < 2:  # one lookup: rows; two: rows added to rows
                loss = model(tokens % 70).square().mean()
            if in_backward:
                with by.step_in_backward():
                    loss.backward()
            else:
                loss.backward()
                by.step()
                by.zero_grad()
        made.append([bits(p) for _, p in named] + [repr(by.state_dict())])
    assert made[0] == made[1]


@needs_core
@pytest.mark.parametrize("weights", WEIGHTS)
def test_no_array_of_an_embeddings_size_is_made_for_its_gradient(
    weights: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("extensor.optim.one_tensor.KERNEL_SEGMENT", 1 << 14)
    model = Untied(4096, 64)
    nn.cast_weights(model, weights)
    by = optim.SGD(model.parameters(), lr=0.1, masters=False)
    loss = model(et.ExTensor([[1, 2, 2, 4095]])).square().mean()
    with memory_of(model, by) as line, by.step_in_backward():
        loss.backward()
    table = 4096 * 64 * 4
    # the whole update in float32, rounded
    kept = {"float32": 0, "bfloat16": table * 3 // 2, "mxint8": table * 5 // 4 + 1}[weights]
    assert max(line()) < kept + table // 3
    loss = model(et.ExTensor([[1, 2, 2, 4095]])).square().mean()
    with memory_of(model, by) as line:
        loss.backward()
    assert max(line()) > model.tokens.weight.nbytes


@needs_core
def test_rows_are_added_to_a_tied_heads_gradient_without_their_zeros() -> None:
    model = Untied(4096, 64)
    model.head = nn.Linear(64, 4096, bias=False, rng=4)
    model.head.weight = model.tokens.weight
    loss = model(et.ExTensor([[1, 2, 2, 4095]])).square().mean()
    with memory_of(model) as line:
        loss.backward()
    table = 4096 * 64 * 4
    assert max(line()) < 2.3 * table  # the head's and the sum; the zeros would be a third


def test_a_gradient_that_is_not_finite_says_how_far_the_step_is() -> None:
    first, last = et.nn.Parameter([1.0]), et.nn.Parameter([1.0])
    by = optim.SGD([("first", first), ("last", last)], lr=0.5)
    inf = et.ExTensor([float("inf")])
    loss = (first * inf + last * 2.0).sum()  # the gradient of last comes first
    message = r"that of first.*1 of 2 parameters have moved"
    with pytest.raises(FloatingPointError, match=message), by.step_in_backward():
        loss.backward()
    assert (first.tolist(), last.tolist()) == ([1.0], [0.0])


def test_a_pass_that_reaches_no_parameter_is_an_error() -> None:
    by = optim.SGD([et.nn.Parameter([1.0])], lr=0.5)
    message = "expected a backward pass to these parameters"
    with pytest.raises(RuntimeError, match=message), by.step_in_backward():
        et.nn.Parameter([1.0]).sum().backward()
