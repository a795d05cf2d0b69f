"""ZeRO-3 against whole parameters, bit for bit: a GPT whose head is tied to its embedding."""

from __future__ import annotations

import contextlib
import itertools
import sys
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


@pytest.mark.parametrize("recipe", ["fp32", "mxfp4_all"])
def test_each_parameter_may_be_alone(monkeypatch: pytest.MonkeyPatch, recipe: str) -> None:
    """Positions, which the model reads without a call of their layer, and weights that travel
    packed beside biases."""
    whole, _ = trained(LocalCommunicator(), recipe, shards=False)
    monkeypatch.setattr(sys.modules[__name__], "BUCKET", 1)
    for mine, buckets in run_ranks(2, lambda comm: trained(comm, recipe, True)):
        assert mine == whole
        assert all(len(bucket.params) == 1 for bucket in buckets.buckets)


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
    model = nn.Sequential(*(nn.Linear(k, n, rng=i) for i, (k, n) in enumerate(pairs)))
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
        a_value = (buckets.gathered_bytes / size - held) / (2 * passes)
        assert a_value <= most, a_value


@pytest.mark.parametrize("largest", [2.0, 2.26, 3.85, 1e-30, np.inf, np.nan, 0.0])
@pytest.mark.parametrize(
    "recipe",
    ["nvfp4_nvidia", "nvfp4_4over6", "nvfp4_forward", "mxfp4_all", "mxfp8_nvidia", "mxint8"],
)
def test_gathered_codes_are_those_of_the_whole_weight(recipe: str, largest: float) -> None:
    """To the byte, though one rank alone has the largest value; and so are the operands."""
    weight = np.random.default_rng(0).standard_normal((128, 64)).astype(np.float32)
    weight *= np.float32((largest if largest < 4.0 else 4.0) / np.abs(weight).max() / 2)
    weight[100, 5], weight[40, :32] = largest, 0.0
    slots = {"fprop.w": -1, "dgrad.w": -2}
    if recipe == "nvfp4_forward":
        del slots["dgrad.w"]

    def program(comm: Communicator) -> int:
        pairs = itertools.pairwise((8, 64, 64, 128, 8, 8))
        layers = [nn.Linear(k, n, bias=False, rng=i) for i, (k, n) in enumerate(pairs)]
        model, layer = nn.Sequential(*layers), layers[2]
        nn.apply_recipe(model, recipe, 0)
        with et.no_grad():
            layer.weight.assign_(weight)
        buckets = GatheredBuckets(model, comm, "float32", 1)
        bucket = buckets._of[id(layer.weight)]
        specs = buckets._packed.weights[id(bucket)].specs()
        assert sorted(specs) == sorted(slots)
        for slot, spec in specs.items():
            expected = BACKEND.quantize(weight, spec)[0]
            buckets._let_go()
            buckets._need(bucket, slot)
            assert np.isnan(layer.weight.data).all() and layer.quant is not None
            q, _ = layer.quant.state.weight_cache.packed[layer.quant.path, slot]
            for name, part in expected.parts.items():
                assert part.tobytes() == q.parts[name].tobytes(), (slot, name)
            ((operand, _),) = BACKEND.prepare(weight, [spec], [None], 0).run()
            assert operand.tobytes() == BACKEND.packed_operand(q, 0).tobytes()
        return len(specs)

    with np.errstate(all="ignore"):
        assert run_ranks(4, program) == [len(slots)] * 4


@pytest.mark.parametrize("recipe", ["mxfp4_all", "nvfp4_nvidia"])
def test_what_quantizing_lost_is_counted_once_for_all_ranks(recipe: str) -> None:
    """Each rank counts its own rows, so that all count what one rank counts of the whole."""

    def program(comm: Communicator) -> list[Any]:
        model = nn.Sequential(*(nn.Linear(64, 64, bias=False, rng=i) for i in range(5)))
        layer = model[2]
        with et.no_grad():
            layer.weight.assign_(layer.weight.data * np.exp2(np.arange(64) % 7, dtype=np.float32))
        state = nn.apply_recipe(model, recipe, 0)
        buckets = GatheredBuckets(model, comm, "float32", 1)
        with buckets.micro_batch(last=True):
            model(et.ones((1, 64))).sum().backward()
        buckets.finish(0)
        return [state.telemetry["2", slot] for slot in ("fprop.w", "dgrad.w")]

    (alone,), both = run_ranks(1, program), run_ranks(2, program)
    assert all(stats.flushed > 0 for stats in alone)
    assert [a + b for a, b in zip(*both, strict=True)] == alone


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
        buckets._need(buckets.buckets[0], "fprop.w")
        others = comm.size - 1
        return 8 * buckets.gathered_bytes / (others * 64 * 64)

    assert run_ranks(4, program) == [bits] * 4


def test_rows_that_do_not_divide_travel_in_float32() -> None:
    whole, _ = of_linears(LocalCommunicator(), "mxfp4", shards=False, odd=True)
    for mine, buckets in run_ranks(2, lambda comm: of_linears(comm, "mxfp4", True, odd=True)):
        assert mine == whole and len(buckets._packed.weights) == 2


@pytest.mark.parametrize("recipe", ["mxfp4_all", "fp32"])
def test_a_piece_that_was_written_needs_a_gather(recipe: str) -> None:
    """Values from before the write are refused, whether rows are packed or travel in float32."""

    def program(comm: LocalCommunicator) -> list[float]:
        layer = nn.Linear(64, 64, bias=False, rng=0)
        nn.apply_recipe(layer, recipe, 0)
        buckets = GatheredBuckets(layer, comm, "float32", 1)
        x, (piece,) = et.ones((1, 64)), buckets.pieces.values()
        layer(x)
        with et.no_grad():
            piece[...] = 0.5
        with pytest.raises(RuntimeError, match=r"expected gather\(\) after a write"):
            layer(x)
        buckets.gather()
        return [layer(x).sum().item()]

    assert run_ranks(2, program) == [[32.0 * 64]] * 2


def test_neighbours_are_gathered_together(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    gather = GatheredBuckets.gathered

    def counted(buckets: GatheredBuckets, parts: Any) -> Any:
        if buckets.ranks.rank == 0:
            calls.append(len(parts))
        return gather(buckets, parts)

    monkeypatch.setattr(GatheredBuckets, "gathered", counted)

    def program(comm: LocalCommunicator) -> None:
        model = nn.Sequential(*(nn.Linear(64, 64, bias=False, rng=i) for i in range(4)))
        nn.apply_recipe(model, "mxfp4_all", 0)
        buckets = GatheredBuckets(model, comm, "float32", 1)
        with buckets.micro_batch(last=True):
            model(et.ones((1, 64))).sum().backward()
        buckets.finish(0)

    run_ranks(2, program)
    assert calls == [8, 8]  # codes and scales of four weights, forward and backward
    calls.clear()
    monkeypatch.setattr(packed_module, "GROUP_BYTES", 2 * 64 * 64 * 17 // 32)
    run_ranks(2, program)
    assert calls == [4] * 4


def test_what_ranks_quantize_in_rows_is_nothing_while_parameters_are_held() -> None:
    def program(comm: Communicator) -> bool:
        model = nn.Sequential(nn.Linear(64, 64, rng=0), nn.Linear(64, 64, rng=1))
        nn.apply_recipe(model, "mxfp4_all", 0)
        buckets = GatheredBuckets(model, comm, "float32", 1)
        model(et.ones((2, 64)))
        slots = {(path, slot) for path in "01" for slot in ("fprop.w", "dgrad.w")}
        assert buckets.packed_slots == slots
        buckets.gather()
        assert buckets.packed_slots == slots  # captured steps gather where nobody asks
        with buckets.hold():
            return buckets.packed_slots == set()

    assert run_ranks(2, program) == [True] * 2


def test_gathered_codes_are_multiplied_though_others_have_the_weights_memory() -> None:
    x = et.randn((4, 64), seed=0)

    def program(comm: Communicator) -> bool:
        layer = nn.Linear(64, 64, bias=False, rng=0)
        nn.apply_recipe(layer, "mxfp4_all", 0)
        expected = layer(x).numpy()
        buckets = GatheredBuckets(layer, comm, "float32", 1)
        with buckets.hold():
            np.from_dlpack(layer.weight.detach())
        return bool((layer(x).numpy() == expected).all())

    assert run_ranks(2, program) == [True] * 2


def test_weights_that_others_read_travel_in_float32() -> None:
    class Doubled(nn.Linear):
        def forward(self, x: et.ExTensor) -> et.ExTensor:
            return x @ (self.weight * 2.0).mT

    def program(comm: Communicator) -> list[bool]:
        layers = [nn.DoRA(nn.Linear(64, 64, rng=0), rank=2, rng=1), Doubled(64, 64, rng=2)]
        model = nn.Sequential(*layers)
        nn.apply_recipe(model, "mxfp4_all", 0)
        buckets = GatheredBuckets(model, comm, "float32", 1)
        packed = [weight.layer for weight in buckets._packed.weights.values()]
        return [layer in packed for layer in (layers[0].base, layers[1])] + [
            bool(model(et.ones((2, 64))).isfinite().all())
        ]

    assert run_ranks(2, program) == [[False, False, True]] * 2
