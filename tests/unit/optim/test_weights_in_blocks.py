"""Weights that are trained in blocks, with no other copy.

Oracles: the model whose weights are the blocks' values in bfloat16, for what a step computes; the
float32 update, rounded by the numpy reference with the bits that the stream names, for what it
writes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import extensor as et
from extensor import nn, optim
from extensor.io import load_checkpoint, save_checkpoint
from extensor.optim.states import state_stream
from extensor.quant import reference
from tests.test_every_optimizer import CASES
from tests.unit.optim.test_low_memory import Tied, memory_of, needs_core
from tests.unit.optim.test_states import KINDS, param, set_grad

FORMATS = ("mxint8", "mxfp8_e4m3")


def in_blocks(model: Any, format: str) -> Any:
    nn.cast_weights(model, format)
    return model


def matrix(values: np.ndarray, format: str) -> Any:
    layer = nn.Linear(values.shape[1], values.shape[0], bias=False, rng=0)
    layer.weight = nn.Parameter(values.astype(np.float32))
    return in_blocks(layer, format).weight


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("case", KINDS)
def test_blocks_are_the_float32_update_rounded(case: str, format: str) -> None:
    name, options = CASES[case]
    rng = np.random.default_rng(0)
    narrow = [matrix(rng.standard_normal((12, 40)), format) for _ in range(2)]
    wide = [param(w.dequantize().numpy()) for w in narrow]
    one = getattr(optim, name)(narrow, masters=False, **options)
    other = getattr(optim, name)(wide, **options)
    for step in range(1, 4):
        for p, w in zip(narrow, wide, strict=True):
            g = et.ExTensor(rng.standard_normal(p.shape).astype(np.float32)).to("bfloat16")
            p.grad = g
            set_grad(w, g.to("float32").numpy())
        one.step()
        other.step()
        for number, (p, w) in enumerate(zip(narrow, wide, strict=True)):
            spec = p.data.spec.replace(rounding="stochastic")
            stream = state_stream(step, number, 127)
            expected = reference.quantize(w.numpy(), spec, stream, None, np)[0]
            for part, values in expected.parts.items():
                assert p.data.parts[part].tobytes() == values.tobytes(), part
            with et.no_grad():
                w.copy_(p.dequantize())
    assert one.nbytes == other.nbytes  # no master copies


@pytest.mark.parametrize("recipe", ["fp32", "mxfp4_all"])
def test_a_frozen_weight_is_read_as_before_and_can_be_trained_again(recipe: str) -> None:
    model = in_blocks(nn.Sequential(nn.Linear(64, 32, rng=0), nn.Linear(32, 8, rng=1)), "mxint8")
    state = nn.apply_recipe(model, recipe)
    x, first = et.randn((4, 64), seed=0), model[0].weight
    found = []
    for trained in (True, False, True):
        first.requires_grad, state.step = trained, 0  # the same random bits
        model.zero_grad()
        y = model(x)
        y.square().sum().backward()
        assert (first.grad is not None) == trained
        found.append((y.numpy().tobytes(), model[1].weight.grad.numpy().tobytes()))
    assert found[0] == found[1] == found[2]


def test_a_dequantized_copy_has_float32_weights() -> None:
    model = in_blocks(nn.Sequential(nn.Linear(64, 32, rng=0)), "mxfp8_e4m3")
    made = nn.dequantize_model(model)
    assert made[0].weight.dtype is et.float32 and made[0].weight.requires_grad
    assert made[0].weight.tolist() == model[0].weight.dequantize().tolist()


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("recipe", ["fp32", "bf16", "mxfp4_all", "mxfp4_adaptive"])
def test_a_step_is_that_of_the_same_values_in_bfloat16(recipe: str, format: str) -> None:
    """Of an embedding that is also the head, a block run again in backward, and positions."""
    models = [in_blocks(Tied(), format), in_blocks(Tied(), format)]
    nn.cast_weights(models[1], "bfloat16")
    results = []
    for model in models:
        nn.apply_recipe(model, recipe, seed=1)
        for step in range(2):
            tokens = et.ExTensor(np.arange(20).reshape(2, 10) + step)
            positions = model.tokens.weight[:10]
            out = (model(tokens) + positions.sum()).square().mean()
            out.backward()
        named = dict(model.named_parameters())
        grads = {path: p.grad for path, p in named.items() if p.grad is not None}
        assert {g.dtype.name for g in grads.values() if g.ndim > 1} == {"bfloat16"}
        found = {path: g.data.tobytes() for path, g in grads.items()}
        results.append((out.item(), found))
    assert results[0] == results[1]


def test_small_updates_are_not_lost() -> None:
    """The mean of 4096 weights moves by 2^-7 in 64 steps of an eighth of a step of MXINT8."""
    w = matrix(np.linspace(0.5, 1.0, 4096, dtype=np.float32).reshape(64, 64), "mxint8")
    before = float(w.dequantize().numpy().mean())
    by = optim.SGD([w], lr=2.0**-13, masters=False)
    for _ in range(64):
        w.grad = et.ones(w.shape).to("bfloat16")
        by.step()
    # one rounding's deviation is at most half of 2^-6; 64 of them, averaged over 4096 weights
    assert abs(before - float(w.dequantize().numpy().mean()) - 2.0**-7) < 6 * 2.0**-7 * 8 / 64


@needs_core
def test_bytes_are_those_of_the_blocks_and_the_graph_keeps_no_other() -> None:
    model = nn.Sequential(*(nn.Linear(128, 128, bias=False, rng=i) for i in range(8)))
    in_blocks(model, "mxint8")
    nn.apply_recipe(model, "fp32")
    size = 128 * 128
    assert sum(p.nbytes for p in model.parameters()) == 8 * size * 33 // 32
    x = et.randn((4, 128), seed=0)
    with et.inspect.memory_ledger(model) as ledger:
        loss = model(x).square().mean()
        held = ledger.report().at(-1)
        loss.backward()
    kept = sum(one.nbytes for one in held if one.kind != "weights")
    assert kept < 2 * size  # less than one decoded weight of eight
    assert ledger.report().by_kind()["weights"] == 8 * size * 33 // 32


@needs_core
def test_a_lookup_decodes_its_rows_alone() -> None:
    table = in_blocks(nn.Embedding(4096, 64, rng=0), "mxint8")
    with memory_of(table) as line:
        table(et.ExTensor([[1, 2, 2, 4095]])).sum().item()
    assert max(line()) < 4096 * 64 // 8
    rows = table(et.ExTensor([3, 3]))
    rows.sum().backward()
    assert rows.data.tobytes() == table.weight.to("bfloat16").data[[3, 3]].tobytes()
    assert table.weight.grad.to("float32").sum().item() == 2 * 64


def test_a_run_goes_on_from_a_file_with_the_same_bits(tmp_path: Path) -> None:
    def made() -> tuple[Any, Any]:
        model = in_blocks(Tied(), "mxint8")
        nn.apply_recipe(model, "fp32")
        named = model.named_parameters()
        return model, optim.AdamW(named, lr=1e-2, states="mxfp8_e4m3", masters=False)

    def steps(model: Any, by: Any, first: int, last: int) -> None:
        for step in range(first, last):
            by.zero_grad()
            model(et.ExTensor(np.arange(20).reshape(2, 10) + step)).square().mean().backward()
            by.step()

    through, again = made(), made()
    steps(*through, 0, 5)
    steps(*again, 0, 2)
    state = again[1].state_dict()
    scalars = {k: v for k, v in state.items() if isinstance(v, (int, float, str))}
    arrays = {k: v for k, v in state.items() if k not in scalars}
    save_checkpoint(tmp_path / "a", {**again[0].state_dict(), **arrays}, scalars)
    saved, fresh = load_checkpoint(tmp_path / "a"), made()
    tensors = dict(saved.tensors)
    fresh[1].load_state_dict({**{k: tensors.pop(k) for k in arrays}, **saved.metadata})
    fresh[0].load_state_dict(tensors)
    steps(*fresh, 2, 5)
    for (path, a), b in zip(through[0].named_parameters(), fresh[0].parameters(), strict=True):
        parts = (a.data.parts, b.data.parts) if a.is_blocked else ({"": a.data}, {"": b.data})
        for part, values in parts[0].items():
            assert values.tobytes() == parts[1][part].tobytes(), (path, part)


def test_a_master_copy_takes_the_updates_where_it_is_asked_for() -> None:
    w = matrix(np.full((4, 32), 0.75, np.float32), "mxint8")
    by = optim.SGD([w], lr=2.0**-10)
    assert by.nbytes == 4 * 32 * 4
    w.grad = et.ones(w.shape).to("bfloat16")
    by.step()
    assert w.dequantize().tolist() == [[0.75] * 32] * 4  # rounded to nearest


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match=r"weight: blocks of mxint8 .* got shape \(4, 2, 3, 3\)"):
        in_blocks(nn.Conv2d(2, 4, 3), "mxint8")
    with pytest.raises(TypeError, match="dense float dtype or an MX format, got nvfp4"):
        in_blocks(nn.Linear(32, 4), "nvfp4")
    layer = in_blocks(nn.Linear(32, 4), "mxint8")
    with pytest.raises(ValueError, match="expected a QuantArray of"), et.no_grad():
        layer.weight.assign_(np.zeros((4, 32), np.float32))
    with pytest.raises(RuntimeError, match="requires a gradient"):
        layer.weight.assign_(layer.weight.data)


def test_blocks_become_floats_again() -> None:
    layer = in_blocks(nn.Linear(32, 4, rng=0), "mxint8")
    values = layer.weight.dequantize().numpy()
    nn.cast_weights(layer, "float32")
    assert layer.weight.numpy().tobytes() == values.tobytes() and layer.weight.requires_grad
