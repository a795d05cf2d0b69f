"""ZeRO-3 against whole parameters, bit for bit: a GPT whose head is tied to its embedding."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import extensor as et
from extensor import models, nn, optim
from extensor.distributed import (
    Communicator,
    GatheredBuckets,
    GradientBuckets,
    LocalCommunicator,
    ShardedOptimizer,
    run_ranks,
)

PARTS, BUCKET = 4, 1 << 15


def trained(
    ranks: Communicator, recipe: str, shards: bool, steps: int = 2, recomputed: bool = False
) -> tuple[list[bytes], Any]:
    """The weights after some steps of micro-batches, and the buckets."""
    config = models.config("gpt", layers=2, width=64, heads=2, context=16)
    model = models.build("gpt", config, np.random.default_rng(0))
    quant = nn.apply_recipe(model, recipe, 0)
    for block in model.blocks:
        block.recomputed = recomputed
    params = list(model.parameters())
    optimizer: Any = optim.AdamW(list(model.named_parameters()), lr=0.01)
    if shards:
        gathered = GatheredBuckets(model, ranks, "exact", BUCKET)
        optimizer, buckets = ShardedOptimizer(optimizer, gathered), gathered
    else:
        buckets: Any = GradientBuckets(params, ranks, "exact", BUCKET)
    mine = range(ranks.rank, PARTS, ranks.size)
    for step in range(steps):
        optimizer.zero_grad()
        for part in mine:
            quant.micro_batch = part
            tokens = np.random.default_rng((step, part)).integers(0, 65, (2, 17))
            with buckets.micro_batch(last=part == mine[-1], step=step):
                scores = model(et.ExTensor(tokens[:, :-1])).reshape(-1, 65)
                loss = et.cross_entropy(scores, et.ExTensor(tokens[:, 1:].reshape(-1)))
                (loss * 0.25).backward()
        quant.micro_batch = 0
        buckets.finish(step)
        optimizer.step_unless(None)
    if not shards:
        return [p.data.tobytes() for p in params], buckets
    assert all(np.isnan(p.data).all() and p.data.strides == (0,) * p.ndim for p in params)
    with buckets.hold():
        return [p.data.tobytes() for p in params], buckets


@pytest.mark.parametrize("recipe", ["fp32", "mxfp4", "nvfp4_nvidia"])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_gathered_parameters_make_the_bits_of_whole_ones(recipe: str, ranks: int) -> None:
    whole, _ = trained(LocalCommunicator(), recipe, shards=False)
    for mine, buckets in run_ranks(ranks, lambda comm: trained(comm, recipe, True)):
        assert mine == whole
        size = sum(bucket.size for bucket in buckets.buckets)
        assert len(buckets.buckets) > 8
        if ranks > 1:
            assert buckets.gathered_bytes > 2 * 4 * size  # once forward and once back, each time
        assert not buckets._whole


def test_recomputed_blocks_gather_once_more() -> None:
    whole, _ = trained(LocalCommunicator(), "mxfp4", shards=False, recomputed=True)
    for mine, _ in run_ranks(2, lambda comm: trained(comm, "mxfp4", True, recomputed=True)):
        assert mine == whole


def test_little_of_the_model_is_whole_at_once() -> None:
    def program(comm: LocalCommunicator) -> tuple[int, int, int]:
        model = nn.Sequential(*(nn.Linear(64, 64, bias=False, rng=i) for i in range(16)))
        buckets = GatheredBuckets(model, comm, "exact", bucket_bytes=64 * 64 * 4)
        with buckets.micro_batch(last=True):
            model(et.ones((1, 64))).sum().backward()
        buckets.finish(0)
        return buckets.peak_bytes, buckets.gathered_bytes, sum(p.nbytes for p in model.parameters())

    for peak, gathered, size in run_ranks(2, program):
        assert peak == size / 16
        assert gathered == 31 * size / 16 / 2  # the last layer's is there when backward begins


def test_what_was_written_counts_after_scatter() -> None:
    layer = nn.Linear(2, 2, bias=False, rng=0)
    buckets = GatheredBuckets(layer, LocalCommunicator())
    for scattered in (False, True):
        with buckets.hold(), et.no_grad():
            layer.weight.assign_(np.full((2, 2), 3.0, np.float32))
            if scattered:
                buckets.scatter()
        assert layer(et.ones((1, 2))).tolist() == [[6.0, 6.0]] or not scattered
