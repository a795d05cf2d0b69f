"""Caches of keys and values: what is stored, in which bytes, and what a window keeps."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest

import extensor as et
from extensor.nn import KVCache

STORAGES = ["float32", "bfloat16", "float16", "mxfp8_e4m3", "mxfp4", "nvfp4", "mxfp6_e2m3", "int8"]


def heads(count: int, size: int = 64, seed: int = 0, batch: int = 2) -> et.ExTensor:
    values = np.random.default_rng(seed).standard_normal((batch, 3, count, size))
    return et.ExTensor(values.astype(np.float32))


def filled(cache: KVCache, k: et.ExTensor, v: et.ExTensor, cuts: list[int]) -> Any:
    """Write tokens in passes that end at the cuts; what the last pass reads."""
    start = 0
    for end in cuts:
        for layer in range(cache.layers):
            read = cache.update(layer, k[:, :, start:end], v[:, :, start:end])
        cache.advance(end - start)
        start = end
    return read


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("size", [64, 24])
def test_what_is_stored_of_a_token_depends_on_nothing_else(storage: str, size: int) -> None:
    k, v = heads(23, size), heads(23, size, seed=1)
    whole = filled(KVCache(1, storage=storage), k, v, [23])
    parts = filled(KVCache(1, capacity=2, storage=storage), k, v, [5, 6, 7, 20, 23])
    alone = filled(KVCache(1, capacity=2, storage=storage), k[1:], v[1:], [9, 23])
    for one, two, three in zip(whole[:2], parts[:2], alone[:2], strict=True):
        assert np.array_equal(one.numpy(), two.numpy())
        assert np.array_equal(one.numpy()[1:], three.numpy())
    assert whole[2].tolist() == parts[2].tolist() == list(range(23))


@pytest.mark.parametrize("storage", STORAGES)
def test_values_are_those_of_the_format(storage: str) -> None:
    """Against the library's own quantizer, one token and head at a time."""
    k = heads(4)
    read = filled(KVCache(1, storage=storage), k, k, [4])[0].numpy()
    for place in np.ndindex(2, 3, 4):
        row = et.ExTensor(k.numpy()[place][None])
        if storage in ("float32", "bfloat16", "float16"):
            expected = row.to(storage).to("float32")
        elif storage == "nvfp4":  # under a constant tensor scale of 1/4
            top = et.full((1, 64), 672.0)
            expected = et.concatenate([row, top], axis=0).to_nvfp4().dequantize()[:1]
        elif storage == "int8":
            expected = row.quantize(et.QuantSpec("int8", tile="channel")).dequantize()
        else:
            expected = row.quantize(et.QuantSpec(storage, scale_rule="rceil")).dequantize()
        assert np.array_equal(read[place], expected.numpy()[0]), place


def test_memory_is_what_the_format_stores() -> None:
    k = heads(256)
    sizes = {}
    for storage in ("float32", "bfloat16", "mxfp8_e4m3", "nvfp4", "mxfp4"):
        cache = KVCache(2, capacity=256, storage=storage)
        filled(cache, k, k, [256])
        sizes[storage] = 8 * cache.nbytes / (2 * 2 * k.size)
    assert sizes == {
        "float32": 32, "bfloat16": 16, "mxfp8_e4m3": 8.25, "nvfp4": 4.5, "mxfp4": 4.25
    }  # fmt: skip


def test_a_window_keeps_what_it_sees_and_little_more() -> None:
    k, v = heads(300), heads(300, seed=1)
    cache = KVCache(2, capacity=8, windows=[16, None])
    bytes_seen = []
    for end in range(1, 300):
        new = k[:, :, end - 1 : end], v[:, :, end - 1 : end]
        keys, values, slots = cache.update(0, *new)
        first = max(0, end - 16)
        assert slots[0] <= first and slots[-1] == end - 1 and len(slots) <= 32
        assert np.array_equal(keys.numpy(), k.numpy()[:, :, slots])
        assert np.array_equal(values.numpy(), v.numpy()[:, :, slots])
        assert cache.update(1, *new)[2].tolist() == list(range(end))
        cache.advance(1)
        bytes_seen.append(sum(a.nbytes for parts in cache._kept[0].parts for a in parts))
    assert max(bytes_seen) == 2 * 32 * 2 * 3 * 64 * 4
    with pytest.raises(ValueError, match="a window of 16 tokens has forgotten"):
        cache.crop(100)
    cache.crop(299)
    assert cache.length == 299


def test_a_pass_longer_than_its_window_sees_all_it_needs() -> None:
    k = heads(100)
    cache = KVCache(1, capacity=4, windows=[8])
    filled(cache, k, k, [10, 11])
    keys, _, slots = cache.update(0, k[:, :, 11:60], k[:, :, 11:60])
    assert slots[0] <= 11 - 7 and slots[-1] == 59
    assert np.array_equal(keys.numpy(), k.numpy()[:, :, slots])


def test_a_cache_that_is_cropped_goes_on_from_there() -> None:
    k = heads(10)
    cache = KVCache(1)
    filled(cache, k, k, [10])
    cache.crop(4)
    keys, _, slots = cache.update(0, k[:, :, 8:], k[:, :, 8:])
    assert slots.tolist() == [0, 1, 2, 3, 4, 5]
    assert np.array_equal(keys.numpy(), k.numpy()[:, :, [0, 1, 2, 3, 8, 9]])
    with pytest.raises(ValueError, match="expected 0 to 4 tokens, got 5"):
        cache.crop(5)


@pytest.mark.parametrize("end", [3, 7, 8, 9, 20])
def test_a_window_is_cropped_to_where_it_still_knows_all_that_is_seen(end: int) -> None:
    k = heads(24)
    for length in range(end + 1):
        cache = KVCache(1, capacity=1, windows=[4])
        filled(cache, k, k, list(range(1, end + 1)))
        seen = max(0, length + 1 - 4)
        if cache._kept[0].start > seen:
            with pytest.raises(ValueError, match="has forgotten"):
                cache.crop(length)
        else:
            cache.crop(length)
            keys, _, slots = cache.update(0, k[:, :, 23:], k[:, :, 23:])
            assert slots[0] <= seen and slots[-1] == length
            expected = np.concatenate([k.numpy()[:, :, :length], k.numpy()[:, :, 23:]], axis=2)
            assert np.array_equal(keys.numpy(), expected[:, :, slots])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"layers": 0}, "layers"),
        ({"storage": "mxfp5"}, "no cache format named 'mxfp5'"),
        ({"storage": et.QuantSpec("mxfp4", rounding="stochastic")}, "each token by itself"),
        ({"storage": et.QuantSpec("fp8_e4m3", tile="tensor")}, "each token by itself"),
        ({"storage": et.QuantSpec("mxfp4", tile=(16, 16))}, "each token by itself"),
        ({"windows": [4, 4]}, "one for each of 1 layers, got 2"),
        ({"windows": [0]}, "windows"),
    ],
)
def test_caches_that_cannot_be(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        KVCache(**{"layers": 1, **arguments})


def test_updates_that_cannot_be() -> None:
    cache = KVCache(1)
    filled(cache, heads(3), heads(3), [3])
    with pytest.raises(ValueError, match="make a cache for each batch"):
        cache.update(0, heads(1, batch=1), heads(1, batch=1))
    assert cache.length == 3
    grad = et.ones((2, 3, 1, 64), requires_grad=True)
    with pytest.raises(RuntimeError, match="gradients do not flow"):
        cache.update(0, grad, grad)
    high = KVCache(1, storage="nvfp4")
    with pytest.raises(ValueError, match="holds finite magnitudes up to 672, got 700"):
        high.update(0, et.full((1, 1, 1, 64), 700.0), et.ones((1, 1, 1, 64)))


@pytest.mark.parametrize("storage", [None, "float32"])
def test_attending_from_one_token_is_an_update_and_attention(storage: str | None) -> None:
    """Through growth, cropping and copies; the two may take turns."""
    one, two = (KVCache(1, capacity=2, storage=storage) for _ in range(2))
    q = et.randn(2, 6, 12, 64, seed=2)
    k, v = heads(12), heads(12, seed=1)
    for place in range(12):
        if place == 7:
            one = copy.deepcopy(one)  # whose memory is elsewhere
        if place == 9:
            one.crop(6), two.crop(6)
        now = slice(place, place + 1)
        parts = q[:, :, now], k[:, :, now], v[:, :, now]
        keys, values, _ = two.update(0, *parts[1:])
        expected = et.scaled_dot_product_attention(parts[0], keys, values)
        if place % 5 == 4:
            got = et.scaled_dot_product_attention(parts[0], *one.update(0, *parts[1:])[:2])
        else:
            got = one.attend(0, *parts)
            assert one.length == two.length
        one.advance(1), two.advance(1)
        assert np.array_equal(got.numpy(), expected.numpy()), place


def test_what_is_not_attended_to_in_place_is_left_alone() -> None:
    x = et.ones((1, 2, 1, 8))
    gradient = et.ones((1, 2, 1, 8))
    gradient.requires_grad = True
    refused = [
        (KVCache(1), (et.ones((1, 2, 3, 8)),) * 3),
        (KVCache(1, windows=[4]), (x, x, x)),
        (KVCache(1, storage="mxfp8_e4m3"), (x, x, x)),
        (KVCache(1, storage="bfloat16"), (x, x, x)),
        (KVCache(1), (gradient, x, x)),
    ]
    for cache, given in refused:
        assert cache.attend(0, *given) is None
        assert cache.nbytes == 0
    with pytest.raises(RuntimeError, match="gradients do not flow"):
        KVCache(1).attend(0, x, gradient, x)
