"""Blocks of published recipes, as their papers have them."""

from __future__ import annotations

import pytest

from extensor.quant.recipes import get_recipe


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
