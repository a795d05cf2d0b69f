"""Attention of one token to a cache on a GPU, emulated and real, and the steps that repeat it."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import extensor as et
from extensor import models
from extensor.nn import Rope
from extensor_cuda.kernels.attention import cached
from tests.unit.cuda.fake import FakeCupy
from tests.unit.cuda.places import PLACES, place
from tests.unit.cuda.test_compile import check_compiles

HALF = ml_dtypes.bfloat16


@pytest.fixture(params=PLACES)
def xp(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    return place(request, monkeypatch, [cached], hopper=False)


@pytest.mark.usefixtures("nvrtc")
@pytest.mark.parametrize("size", cached.HEADS)
def test_no_kernel_for_a_cache_spills(size: int) -> None:
    for kind in (0, 1):
        for queries in (1, 8, 16):
            check_compiles(cached.source(kind, size, queries, 64), "sm_80", "sm_90a")


@pytest.mark.parametrize("dtype", [np.float32, HALF])
@pytest.mark.parametrize(
    ("batch", "heads", "groups", "size", "length", "capacity"),
    [
        (2, 8, 2, 128, 0, 8),
        (1, 3, 3, 64, 63, 64),
        (2, 4, 1, 16, 130, 256),
        (1, 2, 1, 32, 900, 6000),
    ],
)
def test_a_token_is_appended_and_attends(
    xp: Any, dtype: Any, batch: int, heads: int, groups: int, size: int, length: int, capacity: int
) -> None:
    """All keys' weights, whichever block is last; counters are zero again, other keys untouched."""
    rng = np.random.default_rng(length)
    packed = rng.standard_normal((batch, 1, heads + 2 * groups, size)).astype(dtype)
    memory = [rng.standard_normal((batch, groups, capacity, size)).astype(dtype) for _ in "kv"]
    for each in memory:
        each[:, :, length:] = np.nan
    there = xp.asarray(packed).swapaxes(1, 2)
    q, k, v = there[:, :heads], there[:, heads : heads + groups], there[:, heads + groups :]
    held, counts = [xp.asarray(each) for each in memory], xp.zeros(batch * groups, dtype=np.uint32)
    assert cached.gap(q, k, v) is None
    angles = rng.uniform(0, 7, (1, size // 2))
    cos, sin = (f(angles).astype(np.float32) for f in (np.cos, np.sin))
    turn = (xp.asarray(cos), xp.asarray(sin)) if length != 130 else None
    got = None
    for where in (length, xp.asarray(np.full(1, length, np.int64)).reshape(())):
        out = cached.attend(q, (k, v), tuple(held), where, 0.3, lambda count: counts, xp, turn)
        assert got is None or np.asarray(out.get()).tobytes() == got.tobytes()
        got = np.asarray(out.get())
    assert not np.asarray(counts.get()).any()
    values = packed.swapaxes(1, 2).copy()
    if turn is not None:
        low, high = np.split(values[:, : heads + groups].astype(np.float32), 2, -1)
        turned = (low * cos - high * sin, high * cos + low * sin)
        values[:, : heads + groups] = np.concatenate(turned, -1).astype(dtype)
    for number, each in enumerate(memory):
        each[:, :, length] = values[:, heads + number * groups :][:, :groups, 0]
        found = np.asarray(held[number].get())
        np.testing.assert_array_equal(found.astype(np.float32), each.astype(np.float32))
    keys, rows = (each[:, :, : length + 1].astype(np.float64) for each in memory)
    keys, rows = (each.repeat(heads // groups, axis=1) for each in (keys, rows))
    scores = 0.3 * (keys @ values[:, :heads].astype(np.float64).swapaxes(2, 3))[..., 0]
    p = np.exp(scores - scores.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    expected = (p[..., None] * rows).sum(2, keepdims=True)
    weight = (p[..., None] * np.abs(rows)).sum(2, keepdims=True)
    largest = 0.3 * np.linalg.norm(keys, axis=-1).max() * np.linalg.norm(values, axis=-1).max()
    split = 32 if dtype == HALF else 0  # weights as two bfloat16
    bound = ((size + 8) * (1 + largest) + length + 33 + split) * 2.0**-23 * weight
    bound = bound + (np.abs(expected) * 2.0**-8 if dtype == HALF else 0)
    assert (np.abs(got.astype(np.float64) - expected) <= bound).all()


@pytest.mark.parametrize(("length", "queries"), [(200, 4), (63, 1), (320, 16)])
def test_blocks_that_make_several_parts_leave_the_same_bits(
    xp: Any, length: int, queries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the last blocks of a head have none."""
    rng, groups = np.random.default_rng(length), 2
    packed = rng.standard_normal((2, 1, (queries + 2) * groups, 64)).astype(HALF)
    there = xp.asarray(packed).swapaxes(1, 2)
    heads = queries * groups
    q, k, v = there[:, :heads], there[:, heads : heads + groups], there[:, heads + groups :]
    memory = [rng.standard_normal((2, groups, 512, 64)).astype(HALF) for _ in "kv"]
    where, made = xp.asarray(np.full(1, length, np.int64)).reshape(()), set()
    for blocks in (8, 5, 3, 2, 1):
        monkeypatch.setattr(cached, "_BLOCKS", blocks * 2 * groups)
        held, counts = [xp.asarray(a) for a in memory], xp.zeros(2 * groups, dtype=np.uint32)
        out = cached.attend(q, (k, v), tuple(held), where, 0.3, lambda _, counts=counts: counts, xp)
        assert not np.asarray(counts.get()).any()
        made.add((np.asarray(out.get()).tobytes(), *(np.asarray(a.get()).tobytes() for a in held)))
    assert len(made) == 1


def test_what_the_kernel_has_not_says_why(xp: Any) -> None:
    x = xp.zeros((1, 2, 1, 64), dtype=np.float32)
    odd = xp.zeros((1, 2, 1, 24), dtype=np.float32)
    many = xp.zeros((1, 34, 1, 64), dtype=np.float32)
    assert "heads of 24" in cached.gap(odd, odd, odd).reason
    assert "17 queries" in cached.gap(many, x, x).reason
    assert "float16" in cached.gap(x.astype(np.float16), x, x).reason
    apart = xp.zeros((1, 2, 1, 128), dtype=np.float32)[..., ::2]
    assert "strided" in cached.gap(apart, x, x).reason
    table = xp.zeros((2, 32), dtype=np.float32)
    assert "one position" in cached.gap(x, x, x, (table, table)).reason


def decoder(dtype: str, packed: bool = False) -> Any:
    """A small Llama; with MXFP4 weights it is as wide as their kernels want it."""
    config = models.config("llama", "nano")
    if packed:
        sizes = {"width": 256, "head_size": 64, "hidden": 512, "rope": Rope(64)}
        config = replace(config, **sizes)
    llama = models.build("llama", config, np.random.default_rng(0))
    for owner in llama.modules():
        for name, held in list(vars(owner).items()):
            if isinstance(held, et.nn.Parameter):
                setattr(owner, name, et.nn.Parameter(held.to(dtype).data))
    if packed:
        llama = et.quantize_model(llama, "mxfp4_weights")
    return llama.eval().to("cuda")


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_captured_token_is_the_model_s(gpu: Any, dtype: str, packed: bool) -> None:
    """Replays see the tokens before them, also those of a cache that was cropped, and that grew."""
    if packed and isinstance(gpu.xp, FakeCupy):
        pytest.skip("multiplies with packed weights on a GPU only")
    model, rng = decoder(dtype, packed), np.random.default_rng(1)
    config = model.config
    caches = [et.nn.KVCache(config.layers, capacity=16) for _ in range(2)]
    step = et.capture(lambda tokens: model(tokens, cache=caches[0])[:, -1])
    with et.no_grad():
        for turn in range(12):
            tokens = et.from_numpy(rng.integers(0, config.vocab, (2, 1))).to("cuda")
            if turn == 8:
                for cache in caches:
                    cache.crop(4)
            expected = model(tokens, cache=caches[1])[:, -1].to("float32").numpy()
            got = step(tokens).to("float32").numpy()
            assert [cache.length for cache in caches] == [turn + 1 if turn < 8 else turn - 3] * 2
            np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("capacity", [4, 256])
def test_a_gpu_generates_what_it_does_without_capture(
    gpu: Any, capacity: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a cache whose memory moves, too."""
    model, prompt = decoder("float32"), [[3, 1, 4], [1, 5, 9]]
    made = []
    for captured in (True, False):
        monkeypatch.setattr(type(model), "recordable", captured)
        cache = et.nn.KVCache(model.config.layers, capacity=capacity)
        made.append(et.generate(model, prompt, 12, cache=cache).numpy().tolist())
    assert made[0] == made[1]


def test_a_replay_is_refused_where_it_would_see_old_tokens(gpu: Any) -> None:
    model = decoder("float32")
    tokens = et.ones((1, 1), dtype="int64").to("cuda")
    full = et.nn.KVCache(model.config.layers, capacity=4)
    step = et.capture(lambda tokens: model(tokens, cache=full))
    stored = et.nn.KVCache(model.config.layers, storage="mxfp8_e4m3")
    other = et.capture(lambda tokens: model(tokens, cache=stored))
    with et.no_grad():
        for _ in range(4):
            step(tokens)
        with pytest.raises(RuntimeError, match="False.*True"):
            step(tokens)
        other(tokens)
        with pytest.raises(RuntimeError, match="same place of the cache"):
            other(tokens)


def test_what_cannot_be_replayed_is_generated_token_by_token(
    gpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A float32 cache of a bfloat16 model: the capture is refused, and the text is the same."""
    model, prompt = decoder("bfloat16"), [[3, 1, 4]]
    made = []
    for captured in (True, False):
        monkeypatch.setattr(type(model), "recordable", captured)
        cache = et.nn.KVCache(model.config.layers, storage="float32")
        refused = pytest.warns(UserWarning, match="Python computes each token, since capture:")
        with refused if captured else nullcontext():
            made.append(et.generate(model, prompt, 6, cache=cache).numpy().tolist())
    assert made[0] == made[1]


def test_a_step_appends_one_token_below_the_table_s_end(gpu: Any) -> None:
    model = decoder("float32")
    tokens = et.ones((1, 1), dtype="int64").to("cuda")
    cache = et.nn.KVCache(model.config.layers, capacity=512)

    def twice(tokens: Any) -> Any:
        return model(tokens, cache=cache) + model(tokens, cache=cache)

    with et.no_grad():
        step = et.capture(twice)
        step(tokens)  # eager
        with pytest.raises(RuntimeError, match="one token to it, got two"):
            step(tokens)
        context = model.config.context
        cache = et.nn.KVCache(model.config.layers, capacity=2 * context)
        model(et.ones((1, context - 1), dtype="int64").to("cuda"), cache=cache)
        beyond = et.capture(lambda tokens: model(tokens, cache=cache))
        beyond(tokens)
        with pytest.raises(RuntimeError, match=f"position {context} is beyond the {context}"):
            beyond(tokens)


def test_a_cache_of_another_dtype_has_no_kernel(gpu: Any) -> None:
    cache, rng = et.nn.KVCache(1), np.random.default_rng(0)
    q, k, v = (et.from_numpy(rng.normal(size=(1, 2, 1, 64)).astype(np.float32)) for _ in "qkv")
    with et.no_grad():
        for dtype in ("float32", "bfloat16"):
            got = cache.attend(0, *(x.to(dtype).to("cuda") for x in (q, k, v)))
            cache.advance(1)
    assert got is not None
    np.testing.assert_allclose(got.to("float32").numpy(), v.numpy(), rtol=0.02, atol=0.02)
