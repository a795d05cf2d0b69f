"""GGUF tensor types against the gguf package: every type's values, and the bytes back."""

from __future__ import annotations

import numpy as np
import pytest

from extensor.backends import registry
from extensor.io.gguf import GGUF_TYPES, UNREADABLE_GGUF_TYPES
from extensor.quant.array import QuantArray
from extensor.quant.reference import dequantize

gguf = pytest.importorskip("gguf", reason="the gguf package is not installed")

BLOCKED = [name for name, row in GGUF_TYPES.items() if row.spec is not None]


def records(name: str, rows: int, count: int) -> np.ndarray:
    """Random bytes whose floats are finite and whose scales are what the type allows."""
    rng, row = np.random.default_rng(len(name)), GGUF_TYPES[name]
    made = rng.integers(0, 256, (rows, count, row.size), dtype=np.uint8)
    halves = {"Q4_0": (0,), "Q4_1": (0, 2), "Q8_0": (0,), "Q6_K": (208,)}.get(name, (0, 2))
    if row.spec is not None and row.spec.has_float_scales:
        for at in halves:
            half = rng.standard_normal((rows, count)).astype(np.float16)
            made[..., at : at + 2] = half[..., None].view(np.uint8)
    if name == "MXFP4":
        made[..., 0] %= 255
    if name == "NVFP4":
        made[..., :4] %= 0x7F
    return made


@pytest.mark.parametrize("name", BLOCKED)
def test_every_value_is_that_of_gguf(name: str) -> None:
    row = GGUF_TYPES[name]
    made = records(name, 5, 7)
    theirs = gguf.quants.dequantize(made.reshape(5, -1), gguf.GGMLQuantizationType[name])
    q = row.read(made.reshape(-1), (5, 7 * row.values))
    assert isinstance(q, QuantArray)
    values = dequantize(q)
    if q.spec.row.element.is_float:  # gguf has no -0
        values, theirs = values + np.float32(0), theirs + np.float32(0)
    assert values.tobytes() == theirs.tobytes()
    assert row.write(q).tobytes() == made.tobytes()
    assert abs(q.nbytes - made.size) <= made.size * 0.03 + 4


@pytest.mark.parametrize("name", BLOCKED)
def test_numbers_are_those_of_gguf(name: str) -> None:
    row, theirs = GGUF_TYPES[name], gguf.GGMLQuantizationType[name]
    assert (row.number, (row.values, row.size)) == (theirs.value, gguf.GGML_QUANT_SIZES[theirs])


@pytest.mark.parametrize("name", BLOCKED)
def test_products_with_stored_weights(name: str) -> None:
    row, rng = GGUF_TYPES[name], np.random.default_rng(0)
    w = row.read(records(name, 6, 3).reshape(-1), (6, 3 * row.values))
    x = rng.standard_normal((4, 3 * row.values)).astype(np.float32)
    backend = registry.get("cpu")
    exact = x.astype(np.float64) @ dequantize(w).astype(np.float64).T
    size = np.abs(x).astype(np.float64) @ np.abs(dequantize(w)).astype(np.float64).T
    got = backend.weight_only_matmul(x, w)
    assert (np.abs(got - exact) <= size * (3 * row.values + 8) * 2.0**-24).all()


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q8_0"])
def test_read_what_gguf_quantizes(name: str) -> None:
    x = np.random.default_rng(1).standard_normal((8, 576)).astype(np.float32)
    kind = gguf.GGMLQuantizationType[name]
    made = gguf.quants.quantize(x, kind)
    q = GGUF_TYPES[name].read(made.reshape(-1), x.shape)
    assert dequantize(q).tobytes() == gguf.quants.dequantize(made, kind).tobytes()


def test_every_type_of_gguf_has_a_row_or_a_name() -> None:
    named = {row.number: name for name, row in GGUF_TYPES.items()} | dict(UNREADABLE_GGUF_TYPES)
    theirs = {kind.value: kind.name for kind in gguf.GGMLQuantizationType}
    assert {number: named.get(number) for number in theirs} == theirs
