"""ZeRO-3 against whole parameters, bit for bit: a GPT whose head is tied to its embedding."""

from __future__ import annotations

import contextlib
import itertools
from typing import Any

import numpy as np
import pytest

import extensor as et
from extensor import models, nn, optim
from extensor.backends import registry
from extensor.distributed import (
    Communicator,
    GatheredBuckets,
    GradientBuckets,
    LocalCommunicator,
    ShardedOptimizer,
    run_ranks,
)
from extensor.distributed import packed as packed_module
from extensor.quant.spec import QuantSpec

PARTS, BUCKET = 4, 1 << 15
BACKEND = registry.get("cpu")


def trained(
    ranks: Communicator, recipe: str, shards: bool, steps: int = 2, recomputed: bool = False
) -> tuple[list[bytes], Any]:
    """The weights after some steps of micro-batches, and the buckets."""
    config = models.config("gpt", layers=2, width=64, heads=2, context=16)
    model = models.build("gpt", config, np.random.default_rng(0))
    quant = nn.apply_recipe(model, recipe, 0)
    for block in model.blocks:
        block.recomputed = recomputed
    params = list(model.parameters())
    optimizer: Any = optim.AdamW(list(model.named_parameters()), lr=0.01)
    if shards:
        gathered = GatheredBuckets(model, ranks, "exact", BUCKET)
        optimizer, buckets = ShardedOptimizer(optimizer, gathered), gathered
    else:
        buckets: Any = GradientBuckets(params, ranks, "exact", BUCKET)
    mine = range(ranks.rank, PARTS, ranks.size)
    for step in range(steps):
        optimizer.zero_grad()
        for part in mine:
            quant.micro_batch = part
            tokens = np.random.default_rng((step, part)).integers(0, 65, (2, 17))
            with buckets.micro_batch(last=part == mine[-1], step=step):
                scores = model(et.ExTensor(tokens[:, :-1])).reshape(-1, 65)
                loss = et.cross_entropy(scores, et.ExTensor(tokens[:, 1:].reshape(-1)))
                (loss * 0.25).backward()
        quant.micro_batch = 0
        buckets.finish(step)
        optimizer.step_unless(None)
    if not shards:
        return [p.data.tobytes() for p in params], buckets
    assert all(np.isnan(p.data).all() and p.data.strides == (0,) * p.ndim for p in params)
    with buckets.hold():
        return [p.data.tobytes() for p in params], buckets


@pytest.mark.parametrize("recipe", ["fp32", "mxfp4", "nvfp4_nvidia"])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_gathered_parameters_make_the_bits_of_whole_ones(recipe: str, ranks: int) -> None:
    whole, _ = trained(LocalCommunicator(), recipe, shards=False)
    for mine, buckets in run_ranks(ranks, lambda comm: trained(comm, recipe, True)):
        assert mine == whole
        size = sum(bucket.size for bucket in buckets.buckets)
        assert len(buckets.buckets) > 8
        if ranks > 1:
            assert buckets.gathered_bytes > 2 * 4 * size  # once forward and once back, each time
        assert not buckets._whole


def test_recomputed_blocks_gather_once_more() -> None:
    whole, _ = trained(LocalCommunicator(), "mxfp4", shards=False, recomputed=True)
    for mine, _ in run_ranks(2, lambda comm: trained(comm, "mxfp4", True, recomputed=True)):
        assert mine == whole


def test_little_of_the_model_is_whole_at_once() -> None:
    def program(comm: LocalCommunicator) -> tuple[int, int, int]:
        model = nn.Sequential(*(nn.Linear(64, 64, bias=False, rng=i) for i in range(16)))
        buckets = GatheredBuckets(model, comm, "exact", bucket_bytes=64 * 64 * 4)
        with buckets.micro_batch(last=True):
            model(et.ones((1, 64))).sum().backward()
        buckets.finish(0)
        return buckets.peak_bytes, buckets.gathered_bytes, sum(p.nbytes for p in model.parameters())

    for peak, gathered, size in run_ranks(2, program):
        assert peak == size / 16
        assert gathered == 31 * size / 16 / 2  # the last layer's is there when backward begins


def test_what_was_written_counts_after_scatter() -> None:
    layer = nn.Linear(2, 2, bias=False, rng=0)
    buckets = GatheredBuckets(layer, LocalCommunicator())
    for scattered in (False, True):
        with buckets.hold(), et.no_grad():
            layer.weight.assign_(np.full((2, 2), 3.0, np.float32))
            if scattered:
                buckets.scatter()
        assert layer(et.ones((1, 2))).tolist() == [[6.0, 6.0]] or not scattered


def of_linears(
    ranks: Communicator, recipe: str, shards: bool, odd: bool = False
) -> tuple[list[bytes], Any]:
    """The weights after two steps of a model whose weights each fill a bucket."""
    widths = (64, 256, 128, 224 if odd else 256, 8)
    pairs = itertools.pairwise(widths)
    model = nn.Sequential(*(nn.Linear(k, n, bias=False, rng=i) for i, (k, n) in enumerate(pairs)))
    state = nn.apply_recipe(model, recipe, 0)
    optimizer: Any = optim.AdamW(list(model.named_parameters()), lr=0.01)
    buckets: Any = (
        GatheredBuckets(model, ranks, "exact", 1)
        if shards
        else GradientBuckets(list(model.parameters()), ranks, "exact", 1)
    )
    if shards:
        optimizer = ShardedOptimizer(optimizer, buckets)
    mine = range(ranks.rank, PARTS, ranks.size)
    for step in range(2):
        optimizer.zero_grad()
        for part in mine:
            state.micro_batch = part
            x = np.random.default_rng((step, part)).standard_normal((8, 64)).astype(np.float32)
            with buckets.micro_batch(last=part == mine[-1], step=step):
                (model(et.ExTensor(x)).square().mean() * 0.25).backward()
        state.micro_batch = 0
        buckets.finish(step)
        optimizer.step_unless(None)
    with buckets.hold() if shards else contextlib.nullcontext():
        return [p.data.tobytes() for p in model.parameters()], buckets


@pytest.mark.parametrize(
    ("recipe", "most"),  # bytes a value; "mxfp4" leaves the first layer in float32
    [("mxfp4", 1.3), ("mxfp4_all", 0.7), ("mxfp8_nvidia", 2.0), ("nvfp4_nvidia", 1.3)],
)
@pytest.mark.parametrize("ranks", [2, 4])
def test_packed_weights_make_the_bits_of_float32(recipe: str, most: float, ranks: int) -> None:
    whole, _ = of_linears(LocalCommunicator(), recipe, shards=False)
    for mine, buckets in run_ranks(ranks, lambda comm: of_linears(comm, recipe, True)):
        assert mine == whole
        assert len(buckets._packed.weights) == 3  # not the last layer, of 8 rows
        size = sum(bucket.size for bucket in buckets.buckets) * (ranks - 1) / ranks
        passes, held = 2 * PARTS // ranks, 4  # and once in float32, at the end
        assert buckets.unpackable == 0
        a_value = (buckets.gathered_bytes / size - held) / (2 * passes)
        assert a_value <= most, a_value


@pytest.mark.parametrize("recipe", ["nvfp4_nvidia", "nvfp4_4over6", "nvfp4_forward"])
@pytest.mark.parametrize("largest", [2.0, 2.26, 3.85, 1e-30, np.inf, 0.0])
def test_nvfp4_weights_have_the_layers_tensor_scale(recipe: str, largest: float) -> None:
    """The whole weight's operand, to the byte, though one rank alone has the largest value.

    2.26 needs a neighbour of the weight's tensor scale. Rounding leads back to
    that of 3.85 from nowhere, so that it travels in float32, as infinity does.
    """
    weight = np.random.default_rng(0).standard_normal((128, 64)).astype(np.float32)
    weight *= np.float32(min(largest, 4.0) / np.abs(weight).max() / 2)
    weight[100, 5] = largest
    slots = ("fprop.w",) if recipe == "nvfp4_forward" else ("fprop.w", "dgrad.w")

    def program(comm: Communicator) -> list[tuple[bool, int]]:
        widths = (8, 64, 64, 128, 8, 8)
        pairs = itertools.pairwise(widths)
        layers = [nn.Linear(k, n, bias=False, rng=i) for i, (k, n) in enumerate(pairs)]
        model, layer = nn.Sequential(*layers), layers[2]
        nn.apply_recipe(model, recipe, 0)
        with et.no_grad():
            layer.weight.assign_(weight)
        buckets = GatheredBuckets(model, comm, "float32", 1)
        bucket = buckets._of[id(layer.weight)]
        specs = buckets._packed.weights[id(bucket)].specs()
        assert sorted(specs) == sorted(slots)
        found = []
        for slot, spec in specs.items():
            expected = BACKEND.quantize(weight, spec)[0]
            got = buckets._unpacked(bucket, slot)
            if got is not None:
                again = BACKEND.quantize(got.reshape(weight.shape), spec)[0]
                for name, part in expected.parts.items():
                    assert part.tobytes() == again.parts[name].tobytes(), (slot, name)
            found.append((got is not None, buckets.unpackable))
        return found

    packed = np.isfinite(largest) and (largest, recipe == "nvfp4_4over6") != (
        3.85,
        False,
    )
    refused = [0 if packed else turn for turn in range(1, len(slots) + 1)]
    assert run_ranks(4, program) == [[(packed, count) for count in refused]] * 4


def blocks_of_all_sizes(block: int) -> np.ndarray:
    """Rows of a block each: largest values of all exponents and of mantissas that scales round."""
    rng = np.random.default_rng(0)
    leading = np.arange(1 << 10, dtype=np.int64) << 13
    mantissas = np.concatenate([leading, (leading - 1) % (1 << 23), leading + 1])
    fields = rng.permutation(np.resize(np.arange(255), 4 * len(mantissas)))
    bits = fields << 23 | np.resize(mantissas, len(fields))
    largest = bits.astype(np.uint32).view(np.float32)
    rows = rng.uniform(-1, 1, (len(fields), block)) * largest[:, None]
    rows[np.arange(len(rows)), rng.integers(0, block, len(rows))] = largest
    return rows.astype(np.float32)


RULES = ("floor", "rceil", "ceil", "even", "one")
ELEMENTS = ("mxfp4", "mxfp6_e2m3", "mxfp6_e3m2", "mxfp8_e4m3", "mxfp8_e5m2", "mxint8")
SPECS = [
    QuantSpec("nvfp4"),
    *(QuantSpec(name, scale_rule=rule) for name in ELEMENTS for rule in RULES),
]


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_steady_scales_are_of_blocks_that_are_quantized_to_themselves(spec: QuantSpec) -> None:
    spec = spec.resolve(2)
    assert isinstance(spec.tile, tuple)
    rows = blocks_of_all_sizes(spec.tile[1])
    tensors = [rows]
    if spec.row.tensor_scale:  # blocks far below each tensor's largest have scales of their own
        tensors = [rows[(most / 2**20 < (m := np.abs(rows).max(1))) & (m <= most)]
                   for most in 2.0 ** np.arange(-60, 60, 7)]  # fmt: skip
    kept = 0
    for x in tensors:
        scales = BACKEND.pack(x, spec).scales[:, 0].astype(int)
        least, most = packed_module._STEADY[spec.row.scale.name]
        x = x[(least <= scales) & (scales <= most)]
        q, sent = BACKEND.pack(x, spec), None
        if spec.row.tensor_scale:
            sent = packed_module._sent_scale(np.abs(x).max(), spec)
            if sent is None:
                continue
        packed = packed_module._Packed(q, sent, BACKEND)
        assert packed.is_steady
        assert packed.is_same_again()
        kept += len(x)
    assert kept > len(rows) // 2


def test_what_changes_values_again_has_no_steady_scales() -> None:
    x = np.random.default_rng(0).standard_normal((32, 32)).astype(np.float32)
    for spec, steady in (
        (QuantSpec("mxfp4"), True),
        (QuantSpec("nvfp4", scale_rule="four_over_six"), False),
        (QuantSpec("mxfp4", scale_rule="mse"), False),
        (QuantSpec("mxfp4", element_scale=0.75), False),
        (QuantSpec("mxfp4", dialect="model_optimizer"), False),
    ):
        packed = packed_module._Packed(BACKEND.pack(x, spec.resolve(2)), None, BACKEND)
        assert packed.is_steady == steady


def test_the_largest_magnitudes_of_all_weights_are_found_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[int] = []
    find = type(BACKEND).largest_multi_tensor

    def counted(backend: Any, arrays: Any) -> Any:
        calls.append(len(arrays))
        return find(backend, arrays)

    monkeypatch.setattr(type(BACKEND), "largest_multi_tensor", counted)
    steps = 2
    for mine, buckets in run_ranks(2, lambda comm: of_linears(comm, "nvfp4_nvidia", True)):
        assert len(buckets._packed.weights) == 3 and mine
    assert calls == [2] * 2 * steps  # on each rank; the first layer stays in float32


@pytest.mark.parametrize(
    ("recipe", "bits"),
    [("mxfp4_all", 4.25), ("nvfp4_forward", 4.5), ("nvfp4_nvidia", 4 + 8 / 256), ("mxfp8", 8.25)],
)
def test_a_gather_takes_the_bits_of_the_format(recipe: str, bits: float) -> None:
    def program(comm: LocalCommunicator) -> float:
        layers = [nn.Linear(64, 64 * comm.size, bias=False, rng=1)]
        ends = [nn.Linear(8, 8, bias=False, rng=i) for i in range(4)]
        nn.apply_recipe(nn.Sequential(*ends[:2], *layers, *ends[2:]), recipe, 0)
        buckets = GatheredBuckets(layers[0], comm, "float32", 1)
        assert buckets._unpacked(buckets.buckets[0], "fprop.w") is not None
        others = comm.size - 1
        return 8 * buckets.gathered_bytes / (others * 64 * 64)

    assert run_ranks(4, program) == [bits] * 4


def test_rows_that_do_not_divide_travel_in_float32() -> None:
    whole, _ = of_linears(LocalCommunicator(), "mxfp4", shards=False, odd=True)
    for mine, buckets in run_ranks(2, lambda comm: of_linears(comm, "mxfp4", True, odd=True)):
        assert mine == whole and len(buckets._packed.weights) == 2


def test_blocks_that_change_when_quantized_again_travel_in_float32(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What one rank cannot pack no rank takes packed."""
    monkeypatch.setattr(packed_module._Packed, "is_same_again", lambda packed: False)

    def program(comm: LocalCommunicator) -> tuple[bytes, int]:
        layer = nn.Linear(64, 64, bias=False, rng=0)
        nn.apply_recipe(layer, "mxfp4_all", 0)
        with et.no_grad():
            layer.weight[40, :32] = 0.0  # of rank 1 alone: a block whose scale is not steady
        buckets = GatheredBuckets(layer, comm, "float32", 1)
        with np.errstate(all="ignore"):
            layer(et.ones((1, 64)))
        return layer.weight.data.tobytes(), buckets.unpackable

    expected = nn.Linear(64, 64, bias=False, rng=0).weight.data.copy()
    expected[40, :32] = 0.0
    assert run_ranks(2, program) == [(expected.tobytes(), 1)] * 2
    monkeypatch.undo()  # zeros are quantized to zeros
    assert [unpackable for _, unpackable in run_ranks(2, program)] == [0, 0]
