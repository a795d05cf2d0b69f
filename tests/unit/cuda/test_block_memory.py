"""What a transformer block holds on a GPU, by arithmetic: a GPU's code, where nothing is launched.

With M tokens of width D, bytes of the large arrays; float32 tokens, bfloat16 activations, MXFP4.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest

import extensor as et
from extensor import nn
from extensor.inspect import memory_ledger
from extensor.quant.kept import kept_nbytes
from extensor.quant.recipes import get_recipe
from extensor.quant.saved import parse_saved
from extensor_cuda.matmul import prepare
from extensor_cuda.matmul.operand import GemmOperand
from extensor_cuda.runtime.memory import ALLOCATORS
from tests.unit.cuda import dry

D, M = 512, 2048
MD, MX4, MX8 = M * D, 4.25 / 8, 8.25 / 8


@pytest.fixture
def counting(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Device "cuda", whose launches do nothing; matrices of this test count as large."""
    monkeypatch.setattr(prepare, "_BATCHED", 0)
    monkeypatch.setattr(ALLOCATORS, "fallback", 1 << 16)
    return dry.install(monkeypatch)


def large(holders: Any, kind: str | None = None) -> list[float]:
    """Multiples of M D of what holds more than a 30th of it; flags behind codes are rounded off."""
    found = (one.nbytes / MD for one in holders if kind in (None, one.kind))
    return listed(n for n in found if n > 1 / 30)


def listed(numbers: Iterable[float]) -> list[float]:
    return sorted(round(n, 3) for n in numbers)


def report_of(saved_input: str, saved: str) -> tuple[Any, Any]:
    """After forward and in all of a step of one block with bfloat16 weights."""
    attention = nn.MultiheadAttention(D, D // 128, causal=True, bias=False, rng=1)
    feed_forward = nn.FeedForward(D, 4 * D, bias=False, rng=1)
    model = nn.TransformerBlock(attention, feed_forward, bias=False)
    nn.cast_weights(model, "bfloat16")
    recipe = replace(get_recipe("mxfp4_all"), saved_input=saved_input, saved=parse_saved(saved))
    nn.apply_recipe(model.to("cuda"), recipe, activations="bfloat16")
    x = et.zeros((2, M // 2, D)).to("cuda")
    with memory_ledger(model, device="cuda") as ledger:
        ledger.hold(x.data, "workspaces", "", "tokens")
        y = model(x)
        loss = y.square().mean()
        del y
        forward = ledger.report()
        loss.backward()
    return forward, ledger.report()


def test_a_layer_keeps_its_packed_operand_alone(counting: Any) -> None:
    layer = nn.Linear(D, 2 * D, bias=False, rng=0).to("cuda")
    recipe = get_recipe("mxfp4_all")
    nn.apply_recipe(layer, recipe, activations="bfloat16")
    with memory_ledger(layer, device="cuda") as ledger:
        out = layer(et.zeros((M, D)).to("cuda").astype("bfloat16"))
    saved = [one.nbytes for one in ledger.report().at(-1) if one.kind == "saved"]
    flags = 512  # the pool's least, of two flags
    assert sum(saved) - flags == kept_nbytes(recipe.layers, (M, D), (2 * D, D), "bfloat16")
    assert out.shape == (M, 2 * D)


def test_what_a_block_keeps_for_backward(counting: Any) -> None:
    forward, _ = report_of("packed", "float32")
    # The tokens, norm2's input and the block's result; q, k, v; o; GELU's input; codes and scales
    # of the packed inputs of qkv, up and down.
    packed = [0.5, 0.5, 2, 4 / 32]
    assert large(forward.at(-1), "saved") == listed([4, 4, 4, 6, 2, 8, *packed])
    forward, _ = report_of("packed", "mxfp8")
    packed.append(0.5)  # of the layer out, too, since o is not kept as it is
    assert large(forward.at(-1), "saved") == listed([4, 4, *STORED, *packed])


STORED = [1, 3, 3 / 32, 1, 4, 4 / 32]
"""norm2's input, q, k, v, o and GELU's input in MXFP8: codes, and scales where they are large."""


def test_the_peak_of_a_block(counting: Any) -> None:
    forward, whole = report_of("packed", "mxfp8")
    weights = [0.5, 1.5, 2, 2]  # out, qkv, up, down: D D 2 bytes are 0.5 M D where M is 4 D
    # Forward, in down's product: the tokens, their sum with attention, norm2's result, GELU's, its
    # rows in FP8, down's weight in FP8, the product's result.
    products = [4, 4, 2, 8, 4, 1, 2]
    packed = [0.5, 0.5, 0.5, 2, 4 / 32]
    assert large(forward.holders) == listed([*weights, *products, *STORED, *packed])
    total = MD * (sum(weights) + sum(products) + MX8 * (1 + 3 + 1 + 4) + MX4 * (1 + 1 + 1 + 4))
    assert 0 <= forward.peak - total < 0.005 * total
    assert whole.peak < 1.005 * total


def test_an_operand_reads_again_what_it_was_made_of(
    counting: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The contiguous copy of a slice: a kernel that falls back takes rows one after the other."""
    sources: list[Any] = []
    honest = GemmOperand.of

    def noted(self: GemmOperand, source: Any) -> GemmOperand:
        sources.append(source)
        return honest(self, source)

    monkeypatch.setattr(GemmOperand, "of", noted)
    layer = nn.Linear(D, 2 * D, bias=False, rng=0).to("cuda")
    nn.apply_recipe(layer, "mxfp4_nearest", activations="bfloat16")
    wide = et.zeros((M, 2 * D)).to("cuda").astype("bfloat16")
    with et.no_grad():
        layer(wide[:, :D])
    held = [source for source in sources if source is not None]
    assert held and all(source.flags.c_contiguous for source in held)


def test_a_second_holder_is_caught(counting: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[Any] = []
    honest = prepare.GemmPreparation.run

    def planted(self: Any) -> Any:
        held.append(self.x)
        return honest(self)

    monkeypatch.setattr(prepare.GemmPreparation, "run", planted)
    with pytest.raises(AssertionError):
        test_the_peak_of_a_block(counting)
