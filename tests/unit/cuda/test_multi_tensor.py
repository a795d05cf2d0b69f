"""A step's kernels for all parameters at once: the CPU's bits, and nothing after a bad gradient."""

from __future__ import annotations

import copy
import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import extensor as et
from extensor.autograd.row_gradient import RowGradient
from extensor.autograd.tensor import wrap
from extensor.backends.generic import GenericBackend
from extensor.backends.generic.optim import rescale
from extensor.dtypes import bfloat16
from extensor.io import load_checkpoint, save_checkpoint
from extensor.optim import SGD, Adam, AdamW, Lion
from extensor.optim.in_backward import single_updates
from extensor.quant.array import QuantArray
from extensor_cuda.runtime import capture
from tests.oracle.compare import same_bytes
from tests.unit.cuda import emulator as emulation
from tests.unit.cuda.graphs import same

CPU = GenericBackend("cpu", np)
LENGTHS = (0, 1, 17, 16384, 40_001)
SGD_FACTORS = {"lr": 0.1, "momentum": 0.9, "decay": 0.0, "nesterov": False}


def vectors(count: int, special: bool) -> list[list[np.ndarray]]:
    """``count`` arrays of every length; among them subnormals, or nothing but normal values."""
    rng = np.random.default_rng(count)
    made = []
    for n in LENGTHS:
        arrays = [rng.standard_normal(n).astype(np.float32) for _ in range(count)]
        if special:
            arrays = [a * np.float32(2.0) ** rng.integers(-149, 3, n) for a in arrays]
        made.append([a.astype(np.float32) for a in arrays])
    return made


def adam_factors(number: int, decay: float) -> Any:
    """As an optimizer makes them, with a learning rate and a step for each number."""
    p = et.ones(1, requires_grad=True)
    options = {"lr": 0.0137 * (number + 1), "weight_decay": decay or 0.1}
    optimizer = (Adam if decay else AdamW)([p], **options)
    return optimizer.factors(optimizer.groups[0].options, 3 + number)


@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("special", [False, True])
def test_adam_of_many_has_the_cpus_bits(trainer: Any, special: bool, offset: int) -> None:
    for decay in (0.0, 0.3):
        parts = vectors(4, special)
        for part in parts:
            part[3] = np.abs(part[3])
        factors = [adam_factors(i, decay) for i in range(len(parts))]
        mine = [tuple(shifted(trainer.xp, a, offset) for a in part) for part in parts]
        for _ in range(3):
            CPU.adam_multi_tensor([tuple(part) for part in parts], factors)
            trainer.adam_multi_tensor(mine, factors)
        for ours, theirs in zip(mine, parts, strict=True):
            for got, expected in zip(ours, theirs, strict=True):
                same_bytes("adam", got.get(), expected, str(expected.shape))


@pytest.mark.parametrize("offset", [0, 1])
def test_lion_of_many_has_the_cpus_bits(trainer: Any, offset: int) -> None:
    parts = vectors(3, True)
    for part in parts:
        part[1][::5] = part[2][::5] = 0  # no sign
    optimizer = Lion([et.ones(1, requires_grad=True)], lr=0.0137, weight_decay=0.3)
    factors = [optimizer.factors(optimizer.groups[0].options, 1)] * len(parts)
    mine = [tuple(shifted(trainer.xp, a, offset) for a in part) for part in parts]
    for _ in range(3):
        CPU.lion_multi_tensor([tuple(part) for part in parts], factors)
        trainer.lion_multi_tensor(mine, factors)
    for ours, theirs in zip(mine, parts, strict=True):
        for got, expected in zip(ours, theirs, strict=True):
            same_bytes("lion", got.get(), expected, str(expected.shape))


@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("changes", [{}, {"decay": 0.3}, {"nesterov": True, "decay": 0.1}])
def test_sgd_of_many_has_the_cpus_bits(trainer: Any, changes: dict[str, Any], offset: int) -> None:
    for keeps in (True, False):
        parts = vectors(3 if keeps else 2, True)
        factors = [SGD_FACTORS | (changes if keeps else {})] * len(parts)
        mine = [tuple(shifted(trainer.xp, a, offset) for a in part) for part in parts]
        for _ in range(3):
            CPU.sgd_multi_tensor([(*p[:2], p[2] if keeps else None) for p in parts], factors)
            trainer.sgd_multi_tensor([(*p[:2], p[2] if keeps else None) for p in mine], factors)
        for ours, theirs in zip(mine, parts, strict=True):
            for got, expected in zip(ours, theirs, strict=True):
                same_bytes("sgd", got.get(), expected, str(expected.shape))


NARROW = ["bfloat16", "mxfp8_e4m3"]
RULES: dict[str, tuple[Any, dict[str, Any]]] = {
    "adam": (Adam, {"lr": 0.01, "weight_decay": 0.1}),
    "adamw": (AdamW, {"lr": 0.01}),
    "lion": (Lion, {"lr": 0.01, "weight_decay": 0.1}),
    "momentum": (SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}),
    "nesterov": (SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "plain": (SGD, {"lr": 0.1}),
}


def stored_bytes(stored: Any) -> list[np.ndarray]:
    """What is stored of a slot, on the host."""
    parts = stored.parts.values() if isinstance(stored, QuantArray) else [stored]
    return [np.asarray(part.get() if hasattr(part, "get") else part) for part in parts]


def gradients(rng: np.random.Generator, size: int, number: int) -> np.ndarray:
    """What averages are made of that takes every path: wide, zero, tiny, huge, alike."""
    g = rng.standard_normal(size)
    if number % 3 == 0:  # all binades in a block, and blocks of zeros
        g *= np.exp2(rng.integers(-149, 20, size)) * (np.arange(size) // 32 % 3 > 0)
    elif number % 3 == 1:  # squares beyond float32 in some blocks, then below it
        scale = np.exp2(rng.choice([-140, -128, -100, -70, 0, 62, 66, 127], -(-size // 32)))
        g = np.clip(g, -1, 1) * np.repeat(scale, 32)[:size]
    return g.astype(np.float32)


def on_both(
    trainer: Any,
    rule: str,
    states: str,
    sizes: Any,
    offset: int = 0,
    narrow: int = 0,
    form: str = "",
) -> tuple[Any, Any, Any]:
    """The backend's optimizer and the CPU's, of parameters alike; and their random numbers.

    The first ``narrow`` parameters are bfloat16, or matrices in blocks of a format.
    """
    kind, options = RULES[rule]
    rng = np.random.default_rng(0)
    values = [rng.standard_normal(n).astype(np.float32) for n in sizes]
    values[:narrow] = [a.astype(bfloat16.numpy) for a in values[:narrow]]
    mine, theirs = ([et.nn.Parameter(a.copy()) for a in values] for _ in range(2))
    for p, a in zip(mine, values, strict=True):
        p.data, p.backend = shifted(trainer.xp, a, offset), trainer
    for p in (*mine[:narrow], *theirs[:narrow]) if form else ():
        in_blocks(p, form)
    how = {"states": states, "masters": not narrow, **options}
    ours, cpu = (kind(params, **how) for params in (mine, theirs))
    return ours, cpu, rng


def in_blocks(p: Any, form: str) -> None:
    """A matrix as `nn.cast_weights` stores it."""
    values = np.asarray(p.data.get() if hasattr(p.data, "get") else p.data).astype(np.float32)
    q = et.ExTensor(values).quantize(et.QuantSpec(form, scale_rule="rceil"))
    there = {name: p.backend.xp.asarray(part.copy()) for name, part in q.data.parts.items()}
    p.data, p.dtype = replace(q.data, **there), q.dtype


def give(p: Any, q: Any, g: np.ndarray, trainer: Any, offset: int = 0) -> None:
    p.grad, q.grad = wrap(shifted(trainer.xp, g, offset), trainer), et.ExTensor(g)


def step_alike(ours: Any, cpu: Any) -> None:
    """A step of both, and what it leaves behind."""
    with np.errstate(all="ignore"):
        ours.step()
        cpu.step()
    alike(ours, cpu)


def alike(ours: Any, cpu: Any) -> None:
    """Weights and states."""
    for m, n in zip(ours.groups[0].members, cpu.groups[0].members, strict=True):
        where = f"{n.param.size} values, step {n.step}"
        assert m.step == n.step and m.arrays.keys() == n.arrays.keys()
        for slot in n.arrays:
            parts = stored_bytes(m.arrays[slot]), stored_bytes(n.arrays[slot])
            for got, expected in zip(*parts, strict=True):
                same_numbers(f"{slot}: {where}", got, expected)
        parts = stored_bytes(m.param.data), stored_bytes(n.param.data)
        for got, expected in zip(*parts, strict=True):
            same_numbers(f"weight: {where}", got, expected)


@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("states", NARROW)
@pytest.mark.parametrize("rule", RULES)
def test_narrow_states_have_the_cpus_bits(
    trainer: Any, rule: str, states: str, offset: int
) -> None:
    """Weights, codes and scales; in one launch parameters that have had different updates."""
    sizes = (0, 1, 17, 96, 16384, 20_001)
    ours, cpu, rng = on_both(trainer, rule, states, sizes, offset)
    members = ours.groups[0].members
    places = [dict(m.arrays) for m in members]
    for number in range(6):
        for i, (p, q) in enumerate(zip(ours.params, cpu.params, strict=True)):
            p.grad = q.grad = None
            if number != i:
                give(p, q, gradients(rng, q.size, number + i), trainer, offset)
        step_alike(ours, cpu)
    for m, before in zip(members, places, strict=True):
        assert all(m.arrays[slot] is stored for slot, stored in before.items())  # written there


@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("states", ["float32", *NARROW])
@pytest.mark.parametrize("rule", ["adam", "lion", "momentum", "plain"])
def test_bfloat16_weights_have_the_cpus_bits(
    trainer: Any, rule: str, states: str, offset: int
) -> None:
    """Rounded in the launch, beside float32 ones, where they lie."""
    ours, cpu, rng = on_both(trainer, rule, states, (1, 8200, 96, 20_001, 40, 96), offset, narrow=4)
    places = [m.param.data for m in ours.groups[0].members]
    for number in range(6):
        for i, (p, q) in enumerate(zip(ours.params, cpu.params, strict=True)):
            p.grad = q.grad = None
            if number != i:
                g = gradients(rng, q.size, number + i).astype(q.dtype.numpy)
                give(p, q, g, trainer, offset)
        step_alike(ours, cpu)
    assert all(m.param.data is a for m, a in zip(ours.groups[0].members, places, strict=True))


BLOCKS = ["mxint8", "mxfp8_e4m3", "mxfp8_e5m2", "mxfp6_e3m2", "mxfp4"]


@pytest.mark.parametrize(
    ("rule", "states", "form"),
    [  # two formats with all rules, the others with one
        *itertools.product(
            ["adamw", "lion", "momentum", "plain"], ["float32", *NARROW], BLOCKS[:2]
        ),
        *(("adamw", NARROW[1], form) for form in BLOCKS[2:]),
    ],
)
def test_weights_in_blocks_have_the_cpus_bits(
    trainer: Any, rule: str, states: str, form: str
) -> None:
    """Rounded in the launch where they lie, beside bfloat16 and float32 ones."""
    shapes = (513, 32), (5, 96), (1, 128), (40, 31), (200,)
    ours, cpu, rng = on_both(trainer, rule, states, shapes, narrow=4, form=form)
    places = [m.param.data for m in ours.groups[0].members]
    for number in range(6):
        for i, (p, q) in enumerate(zip(ours.params, cpu.params, strict=True)):
            p.grad = q.grad = None
            if number != i:
                kind = 2 if i == 3 else number + i  # cupy's kernels take subnormals for zero
                g = gradients(rng, q.size, kind).reshape(q.shape)
                if number == 5 and i == 0:  # a block that becomes infinite
                    g[3, 5] = np.float32(3e38)
                give(p, q, g.astype(bfloat16.numpy if i < 4 else np.float32), trainer)
        step_alike(ours, cpu)
    members = ours.groups[0].members
    whole = [m.takes_multi_tensor(m.param.grad) for m in members]
    assert whole == [True, True, True, False, True]  # rows of 31 values end within a block
    assert [m.param.data is a for m, a in zip(members, places, strict=True)] == whole


def test_weights_in_blocks_of_two_formats_move_alike(trainer: Any) -> None:
    ours, cpu, rng = on_both(trainer, "adamw", "float32", ((8, 64), (8, 64)), narrow=2, form="")
    for optimizer in (ours, cpu):
        for param, form in zip(optimizer.params, BLOCKS[:2], strict=True):
            in_blocks(param, form)
    for number in range(3):
        for p, q in zip(ours.params, cpu.params, strict=True):
            g = gradients(rng, q.size, 2).reshape(q.shape).astype(bfloat16.numpy)
            give(p, q, g * number, trainer)
        step_alike(ours, cpu)


@pytest.mark.parametrize("form", BLOCKS)
def test_all_codes_of_weights_in_blocks_are_read_as_on_the_cpu(trainer: Any, form: str) -> None:
    """All bytes under all scales: NaN, infinity and the least subnormal values, too."""
    ours, cpu, _ = on_both(trainer, "plain", "float32", ((256, 512),), narrow=1, form=form)
    p, q = ours.params[0], cpu.params[0]
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 256, q.data.codes.shape).astype(np.uint8)
    scales = np.resize(np.arange(256), q.data.scales.shape).astype(np.uint8)
    for part, values in (("codes", codes), ("scales", scales)):
        getattr(q.data, part)[...] = values
        getattr(p.data, part)[...] = trainer.xp.asarray(values)
    for size in (0.0, 1e-38, 1.0):
        give(p, q, np.full(q.shape, size, bfloat16.numpy), trainer)
        step_alike(ours, cpu)


@pytest.mark.parametrize("narrow", ["", "bfloat16", "mxint8"])
@pytest.mark.parametrize("states", ["float32", *NARROW])
@pytest.mark.parametrize("rule", ["adamw", "plain"])
def test_rows_move_a_table_as_the_whole_gradient_does(
    trainer: Any, rule: str, states: str, narrow: str
) -> None:
    """Rows that end within a vector block, that repeat, that no step names."""
    form = narrow.removeprefix("bfloat16")
    width = 64 if form else 36
    shape = (700, width)
    ours, cpu, rng = on_both(trainer, rule, states, (shape,), narrow=bool(narrow), form=form)
    dtype = bfloat16.numpy if narrow else np.float32
    (member,), (q,) = ours.groups[0].members, cpu.params
    for _ in range(3):
        index = rng.integers(-70, 70, (5, 20)) * rng.integers(0, 2, (5, 20))
        terms = rng.standard_normal((5, 20, width)).astype(dtype)
        terms[2] = -0.0
        rows = RowGradient(*(trainer.xp.asarray(a) for a in (index, terms)), shape)
        updates = single_updates(ours, None)
        updates.add(0, member, rows.summed(trainer))
        assert updates.end() == 1
        whole = np.zeros(shape, np.float32)
        for at, term in zip(index.reshape(-1), terms.reshape(-1, width), strict=True):
            whole[at] += term
        q.grad = wrap(whole.astype(dtype), q.backend)
        cpu.step()
        alike(ours, cpu)
    terms[4, 19, 35] = np.inf
    rows = RowGradient(*(trainer.xp.asarray(a) for a in (index, terms)), shape)
    updates = single_updates(ours, None)
    updates.add(0, member, rows.summed(trainer))
    with pytest.raises(FloatingPointError, match="0 of 1 parameters have moved"):
        updates.end()
    alike(ours, cpu)


@pytest.mark.parametrize("states", NARROW)
@pytest.mark.parametrize("rule", ["adamw", "momentum"])
def test_whatever_is_stored_is_read_as_on_the_cpu(trainer: Any, rule: str, states: str) -> None:
    """All codes under all scales, all bfloat16 numbers: NaN, infinity and negative roots too."""
    ours, cpu, rng = on_both(trainer, rule, states, (1 << 16,))
    for slot, stored in cpu.groups[0].members[0].arrays.items():
        there = ours.groups[0].members[0].arrays[slot]
        if isinstance(stored, QuantArray):
            codes = np.arange(1 << 16).astype(np.uint8)
            scales = rng.permutation(np.arange(1 << 11).astype(np.uint8))
            for part, values in (("codes", codes), ("scales", scales)):
                getattr(stored, part)[...] = values
                getattr(there, part)[...] = trainer.xp.asarray(values)
        else:
            stored[...] = np.arange(1 << 16).astype(np.uint16).view(stored.dtype)
            there[...] = trainer.xp.asarray(stored)
    for number in (0, 2):
        give(ours.params[0], cpu.params[0], gradients(rng, 1 << 16, number), trainer)
        step_alike(ours, cpu)


def test_without_momentum_the_buffer_stays(trainer: Any) -> None:
    ours, cpu, rng = on_both(trainer, "momentum", "float32", (40,))
    for momentum in (0.9, 0.0, 0.9):
        for optimizer in (ours, cpu):
            optimizer.groups[0].options["momentum"] = momentum
        give(ours.params[0], cpu.params[0], gradients(rng, 40, 2), trainer)
        step_alike(ours, cpu)


@pytest.mark.parametrize("states", ["float32", *NARROW])
@pytest.mark.parametrize("rule", ["adamw", "momentum"])
def test_a_run_goes_on_where_its_checkpoint_is_loaded(
    gpu: Any, rule: str, states: str, tmp_path: Path
) -> None:
    """From the GPU to the CPU and back: the bits of one run."""
    (kind, options), sizes, rng = RULES[rule], (40, 1000), np.random.default_rng(0)
    grads = [[rng.standard_normal(n).astype(np.float32) for n in sizes] for _ in range(6)]

    def train(devices: list[str]) -> dict[str, Any]:
        values, state, path = [np.ones(n, np.float32) for n in sizes], None, tmp_path / "state"
        for number, device in enumerate(devices):
            params = [et.from_numpy(v, device=device) for v in values]
            for p in params:
                p.requires_grad = True
            optimizer = kind(params, states=states, **options)
            if state is not None:
                loaded = load_checkpoint(path)
                optimizer.load_state_dict({**loaded.tensors, **loaded.metadata})
            for given in grads[2 * number : 2 * number + 2]:
                for p, g in zip(params, given, strict=True):
                    p.grad = et.from_numpy(g, device=device)
                optimizer.step()
            values, state = [np.array(p.numpy()) for p in params], optimizer.state_dict()
            stored = {k: v for k, v in state.items() if isinstance(v, (np.ndarray, QuantArray))}
            save_checkpoint(path, stored, {k: v for k, v in state.items() if k not in stored})
        loaded = load_checkpoint(path)
        return {"weights": values, **loaded.tensors, **loaded.metadata}

    same(train(["cuda", "cpu", "cuda"]), train(["cpu", "cpu", "cpu"]))


def same_numbers(name: str, got: np.ndarray, expected: np.ndarray) -> None:
    """The same bytes; NaN where NaN is, as a GPU's has other bits."""
    if expected.dtype != np.uint8:
        nan = np.isnan(expected.astype(np.float32))
        np.testing.assert_array_equal(np.isnan(got.astype(np.float32)), nan, name)
        got, expected = (np.where(nan, expected.dtype.type(0), a) for a in (got, expected))
    same_bytes(name, got, expected)


def shifted(xp: Any, a: np.ndarray, offset: int) -> Any:
    """On the GPU, ``offset`` elements past what vectors need."""
    held = xp.empty(a.size + offset, dtype=a.dtype)
    held[offset:] = xp.asarray(a).reshape(-1)
    return held[offset:].reshape(a.shape)


def test_gradients_that_are_not_finite_are_found(trainer: Any) -> None:
    rng = np.random.default_rng(0)
    arrays = [trainer.xp.asarray(rng.standard_normal(n).astype(np.float32)) for n in LENGTHS]
    assert trainer.all_finite_multi_tensor(arrays) == [True] * len(arrays)
    narrow = [a.astype(bfloat16.numpy) for a in arrays]
    assert trainer.all_finite_multi_tensor(arrays + narrow) == [True] * 2 * len(arrays)
    for each in (arrays, narrow):
        each[1][0], each[4][40_000] = np.inf, np.nan
    found = [True, False, True, True, False]
    assert trainer.all_finite_multi_tensor(arrays + narrow) == found * 2


@pytest.mark.parametrize("offset", [0, 1])
def test_the_largest_magnitude_of_each_array_is_found(trainer: Any, offset: int) -> None:
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal(n).astype(np.float32) for n in (32, 64, 16384, 40_000, 96)]
    arrays[1][63], arrays[2][5], arrays[3][39_999], arrays[4][:] = -7.0, np.inf, np.nan, 0.0
    mine = [shifted(trainer.xp, a, offset) for a in arrays]
    same_bytes(
        "largest", trainer.largest_multi_tensor(mine).get(), CPU.largest_multi_tensor(arrays)
    )
    assert CPU.largest_multi_tensor(arrays).view(np.float32)[[1, 4]].tolist() == [7, 0]
    assert (
        CPU.largest_multi_tensor([np.array([np.inf, *31 * [2.0]], np.float32)]).view(np.float32)
        == 2
    )


@pytest.mark.parametrize("offset", [0, 1])
def test_gradients_are_scaled_and_summed_up(trainer: Any, offset: int) -> None:
    parts = [part[0] for part in vectors(1, True)]
    mine = [shifted(trainer.xp, a, offset) for a in parts]
    exact = sum(float((a.astype(np.float64) ** 2).sum()) for a in parts)
    total = float(np.asarray(trainer.square_sum_multi_tensor(mine).get()))
    assert total == pytest.approx(exact, rel=sum(LENGTHS) * 2.0**-52)
    again = trainer.square_sum_multi_tensor([a.copy() for a in mine])
    assert total == float(np.asarray(again.get()))  # one order, wherever the arrays lie
    trainer.scale_multi_tensor(mine, 0.3)
    trainer.scale_multi_tensor(mine, trainer.xp.asarray(np.float32(-1.7)).reshape(()))
    for ours, theirs in zip(mine, parts, strict=True):
        same_bytes("scale", ours.get(), theirs * np.float32(0.3) * np.float32(-1.7))


@pytest.mark.parametrize("offset", [0, 1])
def test_bfloat16_gradients_are_scaled_and_summed_up_beside_float32_ones(
    trainer: Any, offset: int
) -> None:
    parts = [part[0] for part in vectors(1, True)]
    parts += [a.astype(bfloat16.numpy) for a in parts]
    mine = [shifted(trainer.xp, a, offset) for a in parts]
    exact = sum(float((a.astype(np.float64) ** 2).sum()) for a in parts)
    total = float(np.asarray(trainer.square_sum_multi_tensor(mine).get()))
    assert total == pytest.approx(exact, rel=2 * sum(LENGTHS) * 2.0**-52)
    for factor in (0.3, -1.7):
        trainer.scale_multi_tensor(mine, factor)
        CPU.scale_multi_tensor(parts, factor)
    for ours, theirs in zip(mine, parts, strict=True):
        same_numbers("scale", ours.get(), theirs)


def test_the_loss_scale_moves_as_on_the_host(emulator: emulation.Emulator) -> None:
    rng = np.random.default_rng(0)
    rule = (2.0, 0.5, 3.0, 1.0)
    host = np.array([4.0, 0, 0, 0])
    device, stop = host.copy(), np.zeros((), np.uint32)
    for bad in rng.random(200) < 0.4:
        rescale(host, bool(bad), rule)
        emulator(
            capture.source(), "rescale", 1, 1, device, np.array(bad, np.uint32), stop,
            *map(np.float64, rule),
        )  # fmt: skip
        same_bytes("state", device, host)
    emulator(
        capture.source(), "rescale", 1, 1, device, np.array(1, np.uint32),
        np.array(1, np.uint32), *map(np.float64, rule),
    )  # fmt: skip
    same_bytes("stopped", device, host)


def test_the_first_gradient_that_is_not_finite_is_named(cuda: Any) -> None:
    p, q = (et.ones(3, device="cuda") for _ in range(2))
    for t in (p, q):
        t.requires_grad = True
        t.grad = et.ones(3, device="cuda")
    q.grad = et.ExTensor([1.0, np.inf, 0.0], device="cuda")
    with pytest.raises(FloatingPointError, match="in that of q"):
        AdamW([("p", p), ("q", q)]).step()
    assert p.tolist() == [1.0] * 3


@pytest.mark.parametrize("kind", [Adam, SGD])
def test_a_bad_gradient_stops_the_update_that_was_launched_behind_it(
    trainer: Any, monkeypatch: pytest.MonkeyPatch, kind: Any
) -> None:
    """The host hears of it late, so the kernel must have seen it. Good steps: the CPU's bits."""
    rng = np.random.default_rng(0)
    shapes = ((40_001,), (3, 5), (17,))

    def there(values: Any) -> Any:
        return wrap(trainer.xp.asarray(values), trainer)

    def grouped(params: Any) -> Any:
        for p in params:
            p.requires_grad = True
        return kind([{"params": params[:1], "lr": 0.3}, {"params": params[1:]}], lr=0.1)

    initial = [rng.standard_normal(shape).astype(np.float32) for shape in shapes]
    mine, theirs = [there(a) for a in initial], [et.ExTensor(a.copy()) for a in initial]
    ours, cpu = grouped(mine), grouped(theirs)
    launched: list[str] = []
    name = "adam_multi_tensor" if kind is Adam else "sgd_multi_tensor"
    each = getattr(type(trainer), name)

    def seen(backend: Any, *args: Any, **more: Any) -> Any:
        launched.append(name)
        return each(backend, *args, **more)

    monkeypatch.setattr(type(trainer), name, seen)
    for bad in (None, np.nan, None, np.inf, None, None):
        values = [rng.standard_normal(shape).astype(np.float32) for shape in shapes]
        versions = [p._version[0] for p in mine]
        launched.clear()
        if bad is None:
            for p, q, g in zip(mine, theirs, values, strict=True):
                p.grad, q.grad = there(g), et.ExTensor(g)
            ours.step()
            cpu.step()
        else:
            values[1][2, 4] = bad
            for p, g in zip(mine, values, strict=True):
                p.grad = there(g)
            with pytest.raises(FloatingPointError, match="infinity in that of 1;"):
                ours.step()
            mine[0].data = mine[0].data.copy()  # other memory from now on
        assert launched == [name]
        assert [p._version[0] - v for p, v in zip(mine, versions, strict=True)] == [bad is None] * 3
        for p, q in zip(mine, theirs, strict=True):
            same_bytes(name, p.data.get(), q.numpy())
    states = ours.groups[1].members[0], cpu.groups[1].members[0]
    assert states[0].step == states[1].step == 4
    assert ours._cache["arrays"][0] is mine[0].data and states[0].whole is mine[1].data
    twin = copy.copy(ours)
    assert not twin._cache and copy.copy(states[0]).whole is None  # a copy's memory is its own


def test_a_bad_gradient_stops_the_updates_of_a_backward_pass_behind_it(trainer: Any) -> None:
    """The host hears of it at the end; steps are counted as they were made."""
    params = [wrap(trainer.xp.asarray(np.ones(40, np.float32)), trainer) for _ in range(4)]
    for p in params:
        p.requires_grad = True
    by = SGD([(f"p{i}", p) for i, p in enumerate(params)], lr=0.5)
    factors = [trainer.xp.asarray(np.float32(f)) for f in (1.0, np.inf, 2.0, 3.0)]
    loss = sum((p * wrap(f, trainer)).sum() for p, f in zip(params, factors, strict=True))
    message = "in that of p1;.*. 2 of 4 parameters have moved"  # those of later operations first
    with pytest.raises(FloatingPointError, match=message), by.step_in_backward():
        loss.backward()
    assert [float(p.data.get()[0]) for p in params] == [1.0, 1.0, 0.0, -0.5]
    assert [m.step for m in by.groups[0].members] == [0, 0, 1, 1]
