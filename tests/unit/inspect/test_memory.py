"""The ledger's bytes, counted by hand; on a GPU the pool's, multiples of 512."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import pytest

import extensor as et
from extensor import nn
from extensor.autograd.node import Node
from extensor.inspect import memory_ledger
from extensor.optim import AdamW

needs_core = pytest.mark.skipif(
    et.ones(1).backend.core is None, reason="the C++ core keeps the ledger's log"
)
SIZE = 64 * 64 * 4


def chain(device: str) -> Any:
    """A report of three products of 64 x 64, and of their backward pass."""
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False, rng=i) for i in range(3))).to(device)
    optimizer = AdamW(model.named_parameters(), lr=0.1)
    x = et.randn((64, 64), seed=0).to(device)
    with memory_ledger(model, optimizer, device) as ledger:
        y = model(x)
        forward = ledger.report()
        del x
        y.sum().backward()
        del y
        optimizer.step()
    return forward, ledger.report()


def counted(device: str) -> None:
    forward, whole = chain(device)
    saved = {(one.layer, one.what): one.nbytes for one in forward.at(-1) if one.kind == "saved"}
    assert saved == {(layer, "linear layer"): SIZE for layer in ("0", "1", "2")}
    kinds = dict.fromkeys(("weights", "gradients", "states", "saved"), 0)
    for one in whole.at(-1):
        if one.kind in kinds:
            kinds[one.kind] += one.nbytes
    assert kinds == {"weights": 3 * SIZE, "gradients": 3 * SIZE, "states": 6 * SIZE, "saved": 0}
    assert max(whole.timeline) == whole.peak >= 10 * SIZE


@needs_core
def test_every_byte_of_a_step_on_the_cpu() -> None:
    counted("cpu")


@needs_core
def test_a_node_that_is_not_let_go_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[Any] = []
    honest = Node.release

    def planted(self: Node) -> None:
        kept.append(self.arrays)
        honest(self)

    monkeypatch.setattr(Node, "release", planted)
    with pytest.raises(AssertionError):
        counted("cpu")


@needs_core
def test_what_was_there_before_counts_until_it_ends() -> None:
    x = et.ones((64, 64))
    gone = weakref.ref(x.data)
    with memory_ledger() as ledger:
        ledger.hold(x.data, "saved", "", "x")
        del x
        assert gone() is None
        np.zeros((64, 64), np.float32)
    assert list(ledger.report().timeline) == [SIZE, 0, SIZE, 0]
