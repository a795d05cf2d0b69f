"""Blocks split among ranks: against the blocks that were not, within the bound of float32 sums."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import extensor as et
from extensor import models, nn
from extensor.distributed import LocalCommunicator, TensorParallel, run_ranks
from extensor.distributed.sequence import (
    cut_sequence,
    gather_sequence,
    reduce_scatter_sequence,
)

WIDTH, HEADS, HIDDEN, TOKENS = 128, 4, 256, 32
EPSILON = 2.0**-24


def block(kind: str) -> nn.TransformerBlock:
    if kind == "gpt":
        attention = nn.MultiheadAttention(WIDTH, HEADS, causal=True, rng=0)
        return nn.TransformerBlock(attention, nn.FeedForward(WIDTH, HIDDEN, rng=1))
    attention = nn.MultiheadAttention(WIDTH, 8, 4, causal=True, rotary=10000.0, bias=False, rng=0)
    return nn.TransformerBlock(
        attention, nn.FeedForward(WIDTH, HIDDEN, "swiglu", bias=False, rng=1), norm="rms"
    )


class Blocks(nn.Module):
    def __init__(self, kind: str, count: int = 2) -> None:
        self.blocks = nn.ModuleList([block(kind) for _ in range(count)])

    def forward(self, x: et.ExTensor) -> et.ExTensor:
        for each in self.blocks:
            x = each(x)
        return x


def given(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((2, TOKENS, WIDTH)).astype(np.float32)


def passed(model: Any, recipe: str | None, ranks: Any) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Output and whole gradients, of x and of the weights."""
    if recipe is not None:
        nn.apply_recipe(model, recipe)
    parallel = TensorParallel(model, ranks) if ranks is not None else None
    x = et.ExTensor(given(), requires_grad=True)
    y = model(x)
    (y * et.ExTensor(given(1))).sum().backward()
    grads = {name: param.grad.data for name, param in model.named_parameters()}
    if parallel is not None:
        parallel.finish()
        grads = parallel.whole({n: p.grad.data for n, p in model.named_parameters()})
    return y.numpy(), {**grads, "x": x.grad.numpy()}


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("kind", ["gpt", "llama"])
def test_a_split_model_computes_the_same(kind: str, size: int) -> None:
    """Within the rounding of float32 sums, relative to the largest value; exactly on one rank."""
    whole = passed(Blocks(kind), None, None)
    everyone = run_ranks(size, lambda ranks: passed(Blocks(kind), None, ranks))
    for output, grads in everyone:
        np.testing.assert_array_equal(output, everyone[0][0])
        assert grads.keys() == whole[1].keys()
        for name, mine in {**grads, "": output}.items():
            theirs = whole[1].get(name, whole[0])
            np.testing.assert_array_equal(mine, everyone[0][1].get(name, everyone[0][0]))
            atol = 2 * (HIDDEN + size) * EPSILON * np.abs(theirs).max() * (size > 1)
            np.testing.assert_allclose(mine, theirs, rtol=0, atol=atol, err_msg=name)


@pytest.mark.parametrize("recipe", ["mxfp8", "mxfp4_all", "mxfp8_nvidia"])
def test_products_of_a_split_layer_keep_their_bits(recipe: str) -> None:
    """A first layer's outputs are columns of the whole one's; a second one's sum is near.

    Operands are the same codes and scales, so that products differ by the order of sums alone:
    by at most (K + R) eps sum |x| |w|.
    """
    whole = Blocks("gpt", 1)
    nn.apply_recipe(whole, recipe)
    attention = whole.blocks[0].attention
    x = et.ExTensor(given())
    with et.no_grad():
        qkv = attention.qkv(x).numpy()
        mixed = et.ExTensor(given(3))
        out = attention.out(mixed).numpy()
        bound = np.abs(given(3)) @ np.abs(attention.out.weight.numpy()).T

    def program(ranks: Any) -> tuple[np.ndarray, np.ndarray]:
        model = Blocks("gpt", 1)
        nn.apply_recipe(model, recipe)
        TensorParallel(model, ranks)
        part = model.blocks[0].attention
        share = WIDTH // ranks.size
        mine = mixed[..., ranks.rank * share : (ranks.rank + 1) * share]
        with et.no_grad():
            summed = reduce_scatter_sequence(part.out(mine), ranks)
            return part.qkv(x).numpy(), gather_sequence(summed, ranks).numpy()

    for size in (2, 4):
        share = WIDTH // size
        for rank, (columns, summed) in enumerate(run_ranks(size, program)):
            for third in range(3):
                start = third * WIDTH + rank * share
                np.testing.assert_array_equal(
                    columns[..., third * share : (third + 1) * share],
                    qkv[..., start : start + share],
                )
            # rounding to a block's grid enlarges a value by less than half of it
            assert np.all(np.abs(summed - out) <= 4 * (WIDTH + size) * EPSILON * bound)
            assert np.abs(summed - out).max() > 0 or size == 1


def test_gpt_learns_the_same(tmp_path: Any) -> None:
    """Ten steps of Adam on two ranks and on one; the weights that ranks share stay the same."""

    def trained(ranks: Any, recipe: str) -> tuple[list[float], dict[str, np.ndarray]]:
        config = models.config("gpt", layers=2, context=TOKENS)
        model = models.build("gpt", config, np.random.default_rng(0))
        nn.apply_recipe(model, recipe)
        parallel = TensorParallel(model, ranks)
        optimizer = et.optim.Adam(model.parameters(), lr=1e-3)
        rng, losses = np.random.default_rng(1), []
        for _ in range(10):
            tokens = rng.integers(0, 65, (4, TOKENS + 1))
            optimizer.zero_grad()
            scores = model(et.ExTensor(tokens[:, :-1])).reshape(-1, 65)
            loss = et.cross_entropy(scores, et.ExTensor(tokens[:, 1:].reshape(-1)))
            loss.backward()
            parallel.finish()
            optimizer.step()
            losses.append(float(loss.item()))
        return losses, parallel.state_dict()

    # NVFP4's parts have scales of their own, and other random bits.
    for recipe, tolerance in (("fp32", 1e-5), ("mxfp8", 2e-3), ("nvfp4", 0.05)):
        alone, _ = trained(LocalCommunicator(), recipe)
        both = run_ranks(2, lambda ranks, recipe=recipe: trained(ranks, recipe))
        assert both[0][0] == both[1][0]
        for name, values in both[0][1].items():
            np.testing.assert_array_equal(values, both[1][1][name])
        np.testing.assert_allclose(both[0][0], alone, atol=tolerance)


def test_collectives_have_each_other_as_gradients() -> None:
    """<y, f(x)> summed over ranks is <f'(y), x> summed over ranks, for all of them."""
    values = [given(seed)[..., :4] for seed in range(4)]

    def program(ranks: Any) -> list[tuple[float, float]]:
        found = []
        for function, times in (
            (lambda x: gather_sequence(x, ranks), 1),
            (lambda x: reduce_scatter_sequence(x, ranks), 1),
        ):
            x = et.ExTensor(values[ranks.rank], requires_grad=True)
            y = function(x)
            seed = np.random.default_rng(9 + ranks.rank).standard_normal(y.shape)
            weight = et.ExTensor(seed.astype(np.float32))
            (y * weight).sum().backward()
            sides = ((y.numpy() * seed).sum(), (x.numpy() * x.grad.numpy()).sum())
            found.append(tuple(times * float(side) for side in sides))
        return found

    for pairs in zip(*run_ranks(2, program), strict=True):
        left, right = (sum(side) for side in zip(*pairs, strict=True))
        assert left == pytest.approx(right, rel=1e-4)


def test_a_cut_sequence_is_gathered_again() -> None:
    def program(ranks: Any) -> tuple[bytes, bytes]:
        x = et.ExTensor(given().astype(np.float32), requires_grad=True).astype(et.bfloat16)
        y = gather_sequence(cut_sequence(x, ranks), ranks, partial=False)
        return x.numpy().tobytes(), y.numpy().tobytes()

    for before, after in run_ranks(2, program):
        assert before == after


@pytest.mark.parametrize(
    ("size", "recipe", "message"),
    [
        (3, "fp32", "expected heads that 3 ranks divide, got 4 heads"),
        (2, "fp8_tensor", "fprop.x: expected scales of blocks, got QuantSpec.*whose scale spans"),
        (2, "fp8_block", "attention.qkv: expected each rank's part of axis 0 in whole blocks of"),
    ],
)
def test_what_cannot_be_split_is_refused(size: int, recipe: str, message: str) -> None:
    model = Blocks("gpt")
    nn.apply_recipe(model, recipe)
    before = {name: param.shape for name, param in model.named_parameters()}
    with pytest.raises(ValueError, match=message):
        TensorParallel(model, LocalCommunicator(0, size, None))
    assert {name: param.shape for name, param in model.named_parameters()} == before


def test_a_model_without_blocks_and_an_odd_length_are_refused() -> None:
    with pytest.raises(ValueError, match="expected TransformerBlocks in a ModuleList, got none"):
        TensorParallel(nn.Linear(2, 2), LocalCommunicator())
    with pytest.raises(ValueError, match="T a multiple of the 2 ranks, got"):
        cut_sequence(et.zeros((3, 4)), LocalCommunicator(0, 2, None))
