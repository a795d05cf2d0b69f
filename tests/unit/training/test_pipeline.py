"""Samplers, transforms, prefetching and prepared data: what they give, and what they refuse."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from extensor.random import Stream
from extensor.training.data import AUGMENTATIONS, SAMPLERS, Dataset, Split, held_out, prefetch
from extensor.training.data.draws import DATA_TENSOR, Draws, stream_words
from extensor.training.data.prepared import prepared
from extensor.training.data.samplers import weighted_order
from extensor.training.data.transforms import (
    CenterCrop,
    Compose,
    Normalize,
    RandomCrop,
    RandomErase,
    RandomFlip,
    RandomRotate,
    Resize,
    Transform,
)

LABELS = np.array([0] * 90 + [1] * 9 + [2])
RANDOM: list[Transform] = [RandomCrop(2), RandomFlip(), RandomRotate(30.0), RandomErase()]


def images(count: int = 12, dtype: Any = np.float32) -> np.ndarray:
    rng = np.random.default_rng(0)
    if dtype == np.uint8:
        return rng.integers(1, 256, (count, 3, 8, 10)).astype(np.uint8)
    return (rng.random((count, 3, 8, 10)) + 0.5).astype(dtype)


def draws(count: int = 12, epoch: int = 1) -> Draws:
    return Draws(3, epoch, np.arange(count))


# --- random numbers and samplers


def test_draws_are_the_streams_own_words() -> None:
    whole = stream_words(Stream(3, 1, DATA_TENSOR, 5), 1000)
    chosen = np.array([7, 0, 999, 7, 12])
    assert np.array_equal(Draws(3, 1, chosen).words(5), whole[chosen])
    assert 0 < Draws(3, 1, chosen).uniform(5).min() <= Draws(3, 1, chosen).uniform(5).max() < 1


@pytest.mark.parametrize("name", SAMPLERS)
def test_samplers_are_functions_of_seed_and_epoch(name: str) -> None:
    sampler = SAMPLERS[name]
    order = sampler(LABELS, 1, 2)
    assert len(order) == 100 and np.array_equal(order, sampler(LABELS, 1, 2))
    if name == "sequential":
        assert order.tolist() == list(range(100))
    else:
        assert not np.array_equal(order, sampler(LABELS, 1, 3))
        assert not np.array_equal(order, sampler(LABELS, 2, 2))
    if name == "random":
        assert sorted(order.tolist()) == list(range(100))


def test_the_weighted_sampler_draws_classes_equally_often() -> None:
    seen = np.concatenate([LABELS[SAMPLERS["weighted"](LABELS, 0, epoch)] for epoch in range(90)])
    # 3,000 of each expected, standard deviation 45
    assert np.abs(np.bincount(seen) - 3000).max() < 6 * 45


def test_weights_decide_and_zero_is_never_drawn() -> None:
    counts = np.bincount(weighted_order(np.array([1.0, 0.0, 3.0]), 8000, 0, 1), minlength=3)
    assert counts[1] == 0 and abs(counts[2] - 6000) < 6 * 39
    for bad in ([], [0.0, 0.0], [1.0, -1.0], [np.nan, 1.0], [[1.0]]):
        with pytest.raises(ValueError, match="weights: expected"):
            weighted_order(np.array(bad), 3, 0, 1)


def test_held_out_takes_a_share_of_each_class() -> None:
    held = held_out(np.array([0] * 90 + [1] * 10), 0.1)
    assert held[:90].sum() == 9 and held[90:].sum() == 1
    with pytest.raises(ValueError, match="at least one training image beside 1 held out"):
        held_out(LABELS, 0.1)
    for share in (0.0, 1.0, -1.0):
        with pytest.raises(ValueError, match="--val-share"):
            held_out(LABELS, share)


# --- transforms


@pytest.mark.parametrize("dtype", [np.float32, np.uint8])
@pytest.mark.parametrize("transform", RANDOM, ids=lambda t: type(t).__name__)
def test_a_random_transform_is_a_function_of_seed_epoch_and_image(
    transform: Transform, dtype: Any
) -> None:
    x = images(dtype=dtype)
    kept = x.copy()
    out = transform(x, draws())
    assert out.shape == x.shape and out.dtype == dtype and np.array_equal(x, kept)
    assert np.array_equal(out, transform(x, draws()))
    assert not np.array_equal(out, x) and not np.array_equal(out, transform(x, draws(epoch=2)))
    part = transform(x[4:7], Draws(3, 1, np.arange(4, 7)))  # whatever batch an image is in
    assert np.array_equal(part, out[4:7])
    assert transform(x[:0], draws(0)).shape == (0, 3, 8, 10)


def test_flip_mirrors_about_half() -> None:
    x = images(400)
    out = RandomFlip()(x, draws(400))
    flipped = np.array([np.array_equal(a, b[..., ::-1]) for a, b in zip(out, x, strict=True)])
    same = np.array([np.array_equal(a, b) for a, b in zip(out, x, strict=True)])
    assert (flipped ^ same).all() and abs(flipped.sum() - 200) < 60
    assert np.array_equal(RandomFlip(1.0)(x, draws(400)), x[..., ::-1])
    assert np.array_equal(RandomFlip(0.0)(x, draws(400)), x)


def test_erase_makes_one_rectangle_zero() -> None:
    x = images(200)
    out = RandomErase(p=1.0, area=(0.1, 0.2), aspect=1.5)(x, draws(200))
    for before, after in zip(x, out, strict=True):
        gone = (after == 0).all(axis=0)
        rows, columns = np.flatnonzero(gone.any(axis=1)), np.flatnonzero(gone.any(axis=0))
        assert gone.sum() == len(rows) * len(columns) > 0
        assert len(rows) == np.ptp(rows) + 1 and len(columns) == np.ptp(columns) + 1
        assert 0.05 * 80 <= gone.sum() <= 0.3 * 80  # sides are whole numbers
        assert np.array_equal(after[:, ~gone], before[:, ~gone])
    hits = (RandomErase(p=0.25)(x, draws(200)) == 0).any(axis=(1, 2, 3)).sum()
    assert 15 <= hits <= 85


def test_rotate_against_scipy() -> None:
    ndimage = pytest.importorskip("scipy.ndimage", reason="scipy is the oracle")
    x = images(6).astype(np.float64).astype(np.float32)
    angles = 30.0 * (2.0 * draws(6).uniform(RandomRotate.slot or 0) - 1.0)
    out = RandomRotate(30.0)(x, draws(6))
    for i, angle in enumerate(angles):
        expected = ndimage.rotate(
            x[i].astype(np.float64), angle, axes=(2, 1), reshape=False, order=1,
            mode="grid-constant",
        )  # fmt: skip
        np.testing.assert_allclose(out[i], expected, rtol=1e-5, atol=1e-6)


def test_crop_shifts_by_up_to_its_padding_and_all_ways() -> None:
    x = np.zeros((500, 1, 9, 9), np.float32)
    x[:, 0, 4, 4] = 1.0
    _, _, y, z = np.nonzero(RandomCrop(3)(x, draws(500)))
    assert set(y) == set(z) == set(range(1, 8))
    assert CenterCrop(5)(images(), draws()).shape == (12, 3, 5, 5)
    assert np.array_equal(CenterCrop(8)(images(), draws()), images()[..., 1:9])
    with pytest.raises(ValueError, match="expected images of 9 pixels a side or more, got 8 x 10"):
        CenterCrop(9)(images(), draws())


def test_resize_keeps_what_is_straight_and_agrees_with_torch() -> None:
    torch = pytest.importorskip("torch", reason="torch is the oracle: pip install -e .[peers]")
    for side in (1, 5, 8, 20):
        got = Resize(side)(images(), draws())
        expected = torch.nn.functional.interpolate(
            torch.tensor(images()), (side, side), mode="bilinear", align_corners=False
        ).numpy()
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)
    assert Resize(4)(images(dtype=np.uint8), draws()).dtype == np.uint8


def test_normalize_by_table_and_by_arithmetic() -> None:
    whole = images(dtype=np.uint8)
    normal = Normalize((0.4, 0.5, 0.6), (0.1, 0.2, 0.3))
    by_hand = (whole / 255 - np.array([0.4, 0.5, 0.6])[:, None, None]) / np.array([0.1, 0.2, 0.3])[
        :, None, None
    ]
    for given in (whole, (whole / 255).astype(np.float32)):
        np.testing.assert_allclose(normal(given, draws()), by_hand, rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="a std above 0"):
        Normalize(0.0, 0.0)


def test_compose_and_what_it_refuses() -> None:
    x = images()
    both = Compose([RandomFlip(), RandomCrop(1)])(x, draws())
    assert np.array_equal(both, RandomCrop(1)(RandomFlip()(x, draws()), draws()))
    with pytest.raises(ValueError, match="expected each kind of random transform once"):
        Compose([RandomFlip(), RandomFlip(0.1)])
    with pytest.raises(TypeError, match="expected transforms, got"):
        Compose([lambda x: x])
    for policy in AUGMENTATIONS.values():
        assert policy(x, draws()).shape == x.shape


@pytest.mark.parametrize(
    "make",
    [
        lambda: Resize(0), lambda: CenterCrop(-1), lambda: RandomCrop(0), lambda: RandomFlip(1.5),
        lambda: RandomRotate(0.0), lambda: RandomRotate(200.0), lambda: RandomErase(-0.1),
        lambda: RandomErase(area=(0.5, 0.1)), lambda: RandomErase(aspect=0.5),
    ],
)  # fmt: skip
def test_options_out_of_range(make: Any) -> None:
    with pytest.raises(ValueError, match="expected"):
        make()


def test_transforms_refuse_what_is_no_batch() -> None:
    with pytest.raises(ValueError, match=r"expected images \(N, C, H, W\), got shape \(3, 8, 10\)"):
        RandomFlip()(images()[0], draws(3))
    with pytest.raises(ValueError, match="expected draws for 12 images, got draws for 3"):
        RandomFlip()(images(), draws(3))


# --- prefetching


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_prefetch_gives_the_same_in_the_same_order(depth: int) -> None:
    assert list(prefetch(range(50), depth)) == list(range(50))
    assert list(prefetch([], depth)) == []


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_an_error_comes_where_its_item_would(depth: int) -> None:
    def broken() -> Iterator[int]:
        yield 1
        yield 2
        raise OSError("the disk is gone")

    items, seen = prefetch(broken(), depth), []
    with pytest.raises(OSError, match="the disk is gone"):
        for item in items:
            seen.append(item)
    assert seen == [1, 2]


def test_leaving_early_ends_the_thread_and_nothing_runs_far_ahead() -> None:
    made: list[int] = []

    def endless() -> Iterator[int]:
        number = 0
        while True:
            made.append(number)
            yield number
            number += 1

    before = threading.active_count()
    items = prefetch(endless(), 2)
    assert not made  # nothing before it is asked for
    assert [next(items), next(items)] == [0, 1]
    items.close()
    assert threading.active_count() == before
    assert len(made) <= 2 + 2 + 1  # taken, waiting, and one in hand
    with pytest.raises(ValueError, match="depth: expected a whole number, 0 or more"):
        prefetch([], -1)


# --- prepared data


def test_prepared_arrays_are_made_once_and_again_if_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    calls = []

    def make() -> dict[str, np.ndarray]:
        calls.append(1)
        return {"x": np.arange(1000, dtype=np.uint8), "y": np.ones((2, 3))}

    first = prepared("toy", "abc", 1, make)
    again = prepared("toy", "abc", 1, make)
    assert len(calls) == 1 and all(np.array_equal(first[k], again[k]) for k in ("x", "y"))
    prepared("toy", "abd", 1, make)
    prepared("toy", "abc", 2, make)
    assert len(calls) == 3  # another file, another version
    paths = sorted((tmp_path / "extensor" / "toy").iterdir())
    assert len(paths) == 3
    for damage in (lambda b: b[:-7], lambda b: b[:-500] + bytes([b[-500] ^ 1]) + b[-499:]):
        for path in paths:
            path.write_bytes(damage(path.read_bytes()))
        calls.clear()
        assert np.array_equal(prepared("toy", "abc", 1, make)["x"], first["x"])
        assert len(calls) == 1
        prepared("toy", "abd", 1, make)
        prepared("toy", "abc", 2, make)

    def fails() -> dict[str, np.ndarray]:
        raise OSError("archive gone")

    with pytest.raises(OSError, match="archive gone"):
        prepared("toy", "new", 1, fails)
    assert len(list((tmp_path / "extensor" / "toy").iterdir())) == 3


# --- broken data


def test_a_data_set_refuses_labels_out_of_range_and_empty_parts() -> None:
    good = Split(np.zeros((3, 1, 4, 4), np.float32), np.array([0, 1, 1]))
    empty = Split(np.zeros((0, 1, 4, 4), np.float32), np.zeros(0, np.int64))
    other = Split(np.zeros((3, 1, 5, 4), np.float32), np.array([0, 1, 1]))
    for train, test, message in (
        (good, Split(good.images, np.array([0, 1, 2])), "expected test labels in 0..1.*got 2"),
        (Split(good.images, np.array([0, -1, 1])), good, "expected train labels in 0..1.*got -1"),
        (empty, good, "expected train images, got none"),
        (good, empty, "expected test images, got none"),
        (good, other, "images of one shape"),
    ):
        with pytest.raises(ValueError, match=message):
            Dataset("toy", train, test, ("a", "b"), 0.0, 1.0)


def test_the_middle_is_cut_out_up_to_the_whole_image() -> None:
    x = np.arange(2 * 5 * 5, dtype=np.float32).reshape(2, 1, 5, 5)
    assert np.array_equal(CenterCrop(5)(x, draws(2)), x)
    assert np.array_equal(CenterCrop(3)(x, draws(2)), x[:, :, 1:4, 1:4])
    assert np.array_equal(CenterCrop(2)(x, draws(2)), x[:, :, 1:3, 1:3])
    with pytest.raises(ValueError, match="images of 6 pixels a side or more, got 5 x 5"):
        CenterCrop(6)(x, draws(2))


def test_an_erased_rectangle_lies_inside_the_image_and_reaches_each_edge() -> None:
    """Of one size: nothing is cut off at an edge."""
    x = np.ones((400, 1, 8, 10), np.float32)
    gone = RandomErase(p=1.0, area=(0.25, 0.25), aspect=1.0)(x, draws(400))[:, 0] == 0
    assert (gone.sum(axis=(1, 2)) == 16).all()  # the root of 20, rounded
    for edge in (gone[:, 0], gone[:, -1], gone[:, :, 0], gone[:, :, -1]):
        assert edge.any()
