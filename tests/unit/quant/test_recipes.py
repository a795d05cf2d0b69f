"""Blocks of published recipes, as their papers have them."""

from __future__ import annotations

import math

import pytest

from extensor.quant.recipes import RECIPES, get_recipe
from extensor.quant.spec import QuantSpec


@pytest.mark.parametrize(
    ("name", "rows", "weights"),
    [
        ("fp8_block", (1, 128), (128, 128)),  # DeepSeek-V3, arXiv 2412.19437, section 3.3.2
        ("mxfp8_ocp", (1, 32), (1, 32)),  # OCP MX specification 1.0, section 5.2
        ("nvfp4_nvidia", (1, 16), (16, 16)),  # arXiv 2509.25149, section 4.3
    ],
)
def test_blocks_are_the_papers(name: str, rows: tuple[int, int], weights: tuple[int, int]) -> None:
    layers = get_recipe(name).layers
    gemms = (layers.fprop, layers.dgrad, layers.wgrad)
    blocks = [spec.tile or spec.row.tile for gemm in gemms for spec in (gemm.a, gemm.b)]
    assert blocks == [rows, weights, rows, weights, rows, rows]


@pytest.mark.parametrize("name", RECIPES)
def test_a_product_has_the_scale_of_its_values(name: str) -> None:
    """What scales its operands is undone behind it; tiles are of powers of two."""
    recipe = get_recipe(name)
    for layers in (recipe.layers, *(rule.use for rule in recipe.rules)):
        for gemm in (layers.fprop, layers.dgrad, layers.wgrad):
            specs = [spec for spec in (gemm.a, gemm.b) if isinstance(spec, QuantSpec)]
            scales = math.prod(spec.element_scale for spec in specs)
            assert gemm.output_scale * scales == pytest.approx(1.0, rel=1e-12)
            tiles = [tile for spec in specs if isinstance(tile := spec.resolve(2).tile, tuple)]
            assert all(side & (side - 1) == 0 for tile in tiles for side in tile)
