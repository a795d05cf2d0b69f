"""Captured steps of a rank that keeps parts of the model leave the bits of eager ones."""

from __future__ import annotations

import itertools
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest

import extensor as et
from extensor import nn
from extensor.backends.unsupported import Unsupported
from extensor.distributed import (
    GatheredBuckets,
    LocalCommunicator,
    ShardedBuckets,
    ShardedOptimizer,
    clip_grad_norm,
)
from extensor.distributed.communicator import Works
from extensor.nn.recipe import apply_recipe
from extensor.optim import AdamW, MXGradScaler
from tests.unit.cuda.graphs import Wrap, both


class Twins(LocalCommunicator):
    """The first of two ranks, of which the other has the same arrays always."""

    def __init__(self) -> None:
        super().__init__()
        self.size = 2

    def all_reduce(self, buffer: Any, op: str = "sum", out: Any = None) -> Any:
        recv = buffer if out is None else out
        recv[...] = buffer + buffer if op == "sum" else buffer
        return Works([])

    def reduce_scatter(self, send: Any, recv: Any, op: str = "sum") -> Any:
        recv[...] = send[: recv.size] + send[: recv.size]
        return Works([])

    def all_gather_coalesced(self, sends: Any, recvs: Any) -> Any:
        for send, recv in zip(sends, recvs, strict=True):
            recv[: send.size], recv[send.size :] = send, send
        return Works([])

    def all_gather_object(self, obj: Any) -> list[Any]:
        return [obj, obj]

    def beside(self, lane: int = 0) -> Any:
        return nullcontext(False)

    def shared_rows(self, nbytes: int) -> Any:
        return Unsupported("one process")


def run(wrap: Wrap, recipe: str, gathers: bool, bad: int) -> dict[str, Any]:
    """Five steps of layers whose weights each fill a bucket."""
    widths = (32, 64, 64, 64, 64, 8)
    pairs = itertools.pairwise(widths)
    model = nn.Sequential(*(nn.Linear(k, n, rng=i) for i, (k, n) in enumerate(pairs))).to("cuda")
    state = apply_recipe(model, recipe, 5)
    whole = AdamW(list(model.named_parameters()), lr=0.01)
    ranks: Any = Twins()
    buckets: Any = (
        GatheredBuckets(model, ranks, "float32", 1)
        if gathers
        else ShardedBuckets(list(model.parameters()), ranks, "float32", 1)
    )
    for piece in buckets.pieces.values():
        if type(piece.data) is np.ndarray:  # numpy's GPU takes a device's array for the host's
            piece.data = piece.backend.xp.asarray(piece.data)
    optimizer: Any = ShardedOptimizer(whole, buckets)
    scaler = MXGradScaler(state, init_scale=4.0, growth_interval=2)
    assert not gathers or len(buckets._packed.weights) == 4

    def step(x: et.ExTensor) -> et.ExTensor:
        optimizer.zero_grad()
        with buckets.micro_batch(last=True, step=state.step):
            loss = model(x).square().mean()
            scaler.scale(loss).backward()
        buckets.finish(state.step)
        scaler.unscale_(optimizer)
        clip_grad_norm(optimizer.params, 0.5, ranks)
        scaler.step(optimizer)
        scaler.update()
        return loss

    call, losses = wrap(step), []
    for number in range(5):
        x = np.random.default_rng(number).standard_normal((8, 32)).astype(np.float32)
        x = np.full_like(x, np.inf) if number == bad else x
        losses.append(call(et.from_numpy(x, device="cuda")).numpy().copy())
        with buckets.hold() if gathers else nullcontext():  # after replays, too
            losses.append(model(et.from_numpy(x, device="cuda")).numpy().copy())
    pieces = [np.asarray(piece.to("cpu").numpy()) for piece in buckets.pieces.values()]
    counts = {key: (s.count, s.saturated, s.flushed) for key, s in state.telemetry.items()}
    return {"losses": losses, "pieces": pieces, "scale": scaler.state_dict(), "counts": counts}


@pytest.mark.parametrize("gathers", [True, False], ids=["parameters", "gradients"])
@pytest.mark.parametrize(("recipe", "bad"), [("mxfp4_all", -1), ("mxfp8_nvidia", 3)])
def test_parts_are_captured(gpu: Any, recipe: str, bad: int, gathers: bool) -> None:
    with np.errstate(all="ignore"):
        found = both(lambda wrap: run(wrap, recipe, gathers, bad))
    assert len({loss.tobytes() for loss in found["losses"][::2]}) == 5
