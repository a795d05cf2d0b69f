"""The schemes of post-training quantization: what a name says is what is stored."""

from __future__ import annotations

import re

import pytest

from extensor.quant.schemes import SCHEMES
from extensor.quant.spec import QuantSpec

SIZES = {"int4_g": {32, 64, 128}, "fp8_block": {8, 16, 32, 64, 128}}


@pytest.mark.parametrize("family", SIZES)
def test_sizes_of_blocks_are_those_of_the_names(family: str) -> None:
    found = {}
    for name, scheme in SCHEMES.items():
        if match := re.fullmatch(rf"{family}(\d+)", name):
            assert isinstance(scheme.weights, QuantSpec)
            found[int(match[1])] = scheme.weights.tile
            assert match[1] in scheme.doc
            assert scheme.activations in ("float32", scheme.weights)
    assert found == {size: (1, size) for size in SIZES[family]}


def test_formats_are_those_of_the_names() -> None:
    for name, scheme in SCHEMES.items():
        weights = scheme.weights
        assert isinstance(weights, QuantSpec)
        assert weights.format.startswith(re.split(r"[_\d]", name)[0]), name
        if re.search(r"mx\w+", name):
            assert weights.rule == "rceil", name
    assert {n for n, s in SCHEMES.items() if n.endswith("_weights") or "_g" in n} <= {
        n for n, s in SCHEMES.items() if s.activations == "float32"
    }


def test_groups_of_int4_are_of_32_where_no_name_says_otherwise() -> None:
    for name in ("int4_g32_asym", "int4_a8"):
        weights = SCHEMES[name].weights
        assert isinstance(weights, QuantSpec)
        assert weights.tile == (1, 32) and weights.scale_dtype == "float16"
        assert weights.symmetric == (name == "int4_a8")
