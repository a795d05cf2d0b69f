"""Every recipe: a GPT trained with `exact` sums has the same weights on one rank and on two."""

from __future__ import annotations

import numpy as np
import pytest

import extensor as et
from extensor import models
from extensor.distributed import GradientBuckets, LocalCommunicator, run_ranks
from tests.recipes import DISTINCT

PARTS, STEPS, CONTEXT = 2, 2, 16
"""Micro-batches of a step, steps, tokens of a sequence."""


def trained(ranks: LocalCommunicator, recipe: str) -> dict[str, bytes]:
    """The weights after steps whose micro-batches the ranks share."""
    config = models.config("gpt", layers=1, width=128, heads=2, context=CONTEXT)
    model = models.build("gpt", config, np.random.default_rng(0))
    quant = et.nn.apply_recipe(model, recipe, 0)
    optimizer = et.optim.SGD(model.parameters(), lr=0.1)
    buckets = GradientBuckets(list(model.parameters()), ranks, "exact")
    mine = range(PARTS)[ranks.rank :: ranks.size]
    for step in range(STEPS):
        quant.step = step
        for part in mine:
            quant.micro_batch = part
            tokens = np.random.default_rng((step, part)).integers(0, 65, (1, CONTEXT + 1))
            with buckets.micro_batch(last=part == mine[-1], step=step):
                scores = model(et.ExTensor(tokens[:, :-1])).reshape(-1, 65)
                loss = et.cross_entropy(scores, et.ExTensor(tokens[:, 1:].reshape(-1)))
                (loss * (1 / PARTS)).backward()
        quant.micro_batch = 0
        buckets.finish(step)
        optimizer.step()
    return {name: param.data.tobytes() for name, param in model.named_parameters()}


@pytest.mark.parametrize("recipe", DISTINCT)
def test_two_ranks_train_the_weights_of_one(recipe: str) -> None:
    alone = trained(LocalCommunicator(), recipe)
    assert run_ranks(2, lambda ranks: trained(ranks, recipe)) == [alone] * 2
