"""Recipes whose backward pass reads what the forward pass stored, and others, in captured steps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from extensor.models.llama.configs import LlamaConfig
from extensor.models.llama.model import build
from extensor.nn import Rope
from extensor.optim import AdamW
from extensor.quant.recipes import get_recipe
from extensor.quant.saved import parse_saved
from tests.unit.cuda.fake import FakeCupy
from tests.unit.cuda.graphs import both, gpt, train

RECIPES = ("quartet", "quartet2")
ON_A_GPU = (
    "mxfp4", "mxfp4_hadamard_random", "mxfp4_hadamard_per_step", "nvfp4_nvidia", "fp8_block",
    "fp8_tensor", "mxint8",
)  # fmt: skip
"""Recipes whose emulated steps would say no more, or that the GPU of numpy has no kernels of."""


def llama(recipe: str, states: str = "float32") -> tuple[Any, Any, Any]:
    config = LlamaConfig(
        vocab=64, context=32, layers=2, width=64, heads=1, kv_heads=1, head_size=64, hidden=96,
        eps=1e-5, rope=Rope(64), tied=True,
    )  # fmt: skip
    model = build(config, np.random.default_rng(1)).to("cuda")
    tokens = [np.random.default_rng(2 + i).integers(0, 64, (2, 33)) for i in range(5)]
    batches = [(np.ascontiguousarray(t[:, :-1]), t[:, 1:].reshape(-1)) for t in tokens]
    return model, AdamW(list(model.named_parameters()), lr=0.01), batches


def test_what_is_stored_in_blocks_is_captured_bit_for_bit(gpu: Any) -> None:
    """GELU's inputs, q, k and v in MXFP8, stochastically: each replay's random bits are its own."""
    recipe = replace(get_recipe("fp32"), saved=parse_saved("qkv=mxfp8,mxfp8~"))
    eager = both(lambda wrap: train(wrap, gpt, recipe, False))
    assert all(np.isfinite(loss).all() for loss, _ in eager["losses"])


@pytest.mark.parametrize("recipe", RECIPES + ON_A_GPU)
def test_recipes_of_a_llama_are_captured_bit_for_bit(gpu: Any, recipe: str) -> None:
    if recipe in ON_A_GPU and isinstance(gpu.xp, FakeCupy):
        pytest.skip("replays this recipe on a GPU only")
    both(lambda wrap: train(wrap, llama, recipe, True, activations="bfloat16"))
