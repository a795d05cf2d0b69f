"""Data sets: structure, errors, order."""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
from pathlib import Path

import numpy as np
import pytest
from sklearn import datasets as sklearn_datasets

from extensor.training.data import DataError, Dataset, Split, batches, epoch_order, load_dataset
from extensor.training.data.digits import enlarge, read_digits, stratified_split
from extensor.training.data.draws import Draws
from extensor.training.data.fetch import RemoteFile, cache_directory, find
from extensor.training.data.sources import (
    FASHION_MNIST,
    FASHION_MNIST_RGB,
    MNIST,
    IdxSource,
    framed,
    parse_idx,
)
from extensor.training.data.transforms import AUGMENTATIONS, RandomCrop
from tests.unit.training.conftest import idx_bytes

pytestmark = pytest.mark.usefixtures("cache")
PIXELS = np.arange(24, dtype=np.uint8).reshape(2, 3, 4)
CONTENT = idx_bytes(PIXELS)
FILE = RemoteFile("pixels", hashlib.sha256(CONTENT).hexdigest(), len(CONTENT))


def put(folder: Path, content: bytes, name: str = "pixels.gz") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(content)
    return folder / name


# --- digits


def test_the_digits_are_those_of_scikit_learn() -> None:
    pixels, labels = read_digits()
    theirs = sklearn_datasets.load_digits()
    np.testing.assert_array_equal(pixels, theirs.images)
    np.testing.assert_array_equal(labels, theirs.target)
    assert pixels.dtype == np.uint8 and labels.dtype == np.int64


def test_digits_are_1437_and_360_stratified_in_their_own_units() -> None:
    digits = load_dataset("digits")
    assert digits.train.images.shape == (1437, 1, 28, 28)
    assert digits.test.images.shape == (360, 1, 28, 28)
    assert np.bincount(digits.test.labels).tolist() == [36] * 10
    assert digits.train.images.min() == 0.0
    assert digits.train.images.max() == 1.0
    whole = np.concatenate([b.inputs for b in batches(digits, digits.train, 100)])
    assert whole.dtype == np.float32
    assert abs(whole.mean()) < 1e-4
    assert abs(whole.std() - 1) < 1e-4


def test_enlarge_keeps_constants_and_ramps() -> None:
    ramp = np.arange(8.0)[None, None, :].repeat(8, axis=1)
    wide = enlarge(ramp, 28)[0]
    assert wide.shape == (28, 28)
    # between the outermost pixel centres a bilinear ramp is a straight line of slope 8 / 28
    np.testing.assert_allclose(np.diff(wide[5, 2:26]), 8 / 28, rtol=1e-5)
    assert np.array_equal(enlarge(np.full((1, 8, 8), 7), 28), np.full((1, 28, 28), 7, np.float32))


def test_stratified_split_takes_the_number_asked_of_every_class() -> None:
    labels = np.array([0] * 10 + [1] * 7 + [2] * 3)
    test = stratified_split(labels, 3)
    assert [int(test[labels == c].sum()) for c in range(3)] == [3, 3, 3]


# --- IDX


@pytest.mark.parametrize("sizes", [(2**32 - 1,) * 3, (2**31, 2**31, 4), (1,) * 40], ids=len)
def test_parse_idx_of_any_shape_refuses_impossible_ones(sizes: tuple[int, ...]) -> None:
    """Sizes whose product is 0 in 64 bits, and more axes than an array has."""
    header = bytes([0, 0, 8, len(sizes)]) + b"".join(n.to_bytes(4, "big") for n in sizes)
    with pytest.raises(DataError):
        parse_idx(header + bytes(sizes[0] == 1), None, "pixels")


def test_parse_idx_round_trips() -> None:
    assert np.array_equal(parse_idx(CONTENT, (2, 3, 4), "pixels"), PIXELS)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "got 0 bytes"),
        (b"\x1f\x8b\x08\x00rest", "expected an IDX magic number"),
        (b"\x00\x00\x0d\x03" + CONTENT[4:], "expected an IDX magic number"),
        (CONTENT[:9], "truncated"),
        (CONTENT[:-1], "expected 24 bytes after the header"),
        (CONTENT + b"x", "got 25"),
        (idx_bytes(PIXELS[:1]), r"expected shape \(2, 3, 4\), got \(1, 3, 4\)"),
    ],
)
def test_parse_idx_refuses(content: bytes, message: str) -> None:
    with pytest.raises(DataError, match=message):
        parse_idx(content, (2, 3, 4), "pixels")


# --- finding files


@pytest.mark.parametrize("place", ["cache", "system"])
@pytest.mark.parametrize("packed", [True, False])
def test_find_looks_in_cache_and_system(
    tmp_path: Path, cache: Path, place: str, packed: bool
) -> None:
    folder = cache / "toy" if place == "cache" else tmp_path / "system"
    if packed:
        put(folder, gzip.compress(CONTENT))
    else:
        put(folder, CONTENT, "pixels")
    assert find("toy", FILE, [tmp_path / "system"], [], "none") == CONTENT


def test_find_prefers_the_cache_and_refuses_it_if_damaged(tmp_path: Path, cache: Path) -> None:
    put(tmp_path / "system", gzip.compress(CONTENT))
    damaged = put(cache / "toy", gzip.compress(CONTENT)[:-5])
    with pytest.raises(DataError, match="expected a complete gzip file") as caught:
        find("toy", FILE, [tmp_path / "system"], [], "none")
    assert f"delete {damaged}" in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (gzip.compress(CONTENT[:-1], mtime=0), "expected 40 bytes once decompressed, got 39"),
        (gzip.compress(CONTENT[:-1] + b"x", mtime=0), "expected SHA-256"),
        (b"not gzip at all", "expected a complete gzip file"),
        (gzip.compress(CONTENT, mtime=0)[:20], "expected a complete gzip file"),
        (b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\x03\xff\xff\xff\xff", "expected a complete gzip"),
    ],
)
def test_find_refuses_damaged_files(cache: Path, content: bytes, message: str) -> None:
    put(cache / "toy", content)
    with pytest.raises(DataError, match=message):
        find("toy", FILE, [], [], "none")


def test_find_downloads_checks_and_keeps(tmp_path: Path, cache: Path) -> None:
    server = tmp_path / "server"
    put(server, gzip.compress(CONTENT))
    urls = [(tmp_path / "nowhere").as_uri(), server.as_uri()]
    assert find("toy", FILE, [], urls, "none") == CONTENT
    assert (cache / "toy" / "pixels.gz").is_file()
    assert find("toy", FILE, [], [], "none") == CONTENT


def test_a_bad_download_leaves_nothing_and_the_error_names_every_place(
    tmp_path: Path, cache: Path
) -> None:
    server = tmp_path / "server"
    put(server, gzip.compress(CONTENT[:-1] + b"x"))
    nowhere = (tmp_path / "nowhere").as_uri()
    with pytest.raises(DataError) as caught:
        find("toy", FILE, [tmp_path / "system"], [nowhere, server.as_uri()], "apt-get install toy")
    text = str(caught.value)
    for part in (cache / "toy", tmp_path / "system", nowhere, server.as_uri(), "expected SHA-256"):
        assert str(part) in text
    assert "apt-get install toy" in text
    assert list((cache / "toy").iterdir()) == []


def test_cache_directory_defaults_to_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_directory() == Path.home() / ".cache" / "extensor"


@pytest.mark.parametrize("source", [MNIST, FASHION_MNIST])
def test_idx_rows_are_whole(source: IdxSource) -> None:
    assert len(source.classes) == 10
    assert len(set(source.checksums)) == 4
    assert all(len(bytes.fromhex(c)) == 32 for c in source.checksums)


@pytest.mark.parametrize("row", [MNIST, FASHION_MNIST])
def test_an_idx_set_loads_from_four_files(
    row: IdxSource, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(0)
    shapes = ((6, 28, 28), (6,), (4, 28, 28), (4,))
    arrays = [rng.integers(0, 10, shape).astype(np.uint8) for shape in shapes]
    stems = ("a", "b", "c", "d")
    monkeypatch.setattr(
        "extensor.training.data.sources.FILES", tuple(zip(stems, shapes, strict=True))
    )
    for stem, array in zip(stems, arrays, strict=True):
        put(cache / row.name, gzip.compress(idx_bytes(array)), f"{stem}.gz")
    sums = tuple(hashlib.sha256(idx_bytes(a)).hexdigest() for a in arrays)
    data = dataclasses.replace(row, checksums=sums, system=(), urls=()).load()
    assert data.train.images.dtype == np.uint8
    batch = next(batches(data, data.train, 6))
    np.testing.assert_allclose(
        batch.inputs[:, 0], (arrays[0] / 255 - row.mean) / row.std, rtol=1e-6, atol=1e-6
    )
    assert batch.labels.tolist() == arrays[1].tolist()


def test_fashion_mnist_in_cifars_shape_has_the_framed_images(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rng = np.random.default_rng(0)
    train, test = (
        Split(rng.integers(0, 256, (n, 1, 28, 28)).astype(np.uint8), np.arange(n)) for n in (6, 4)
    )
    grey = Dataset("fashion_mnist", train, test, FASHION_MNIST.classes, 0.25, 0.5)
    monkeypatch.setattr(IdxSource, "read", lambda source, urls: grey)
    data = FASHION_MNIST_RGB.read(())
    assert (data.name, data.classes) == ("fashion_mnist_rgb", FASHION_MNIST.classes)
    for made, given in ((data.train, train), (data.test, test)):
        np.testing.assert_array_equal(made.images, framed(given.images))
        assert made.labels.tolist() == given.labels.tolist()
    pixels = framed(train.images) / 255  # of the training images, with their frames
    np.testing.assert_allclose((data.mean, data.std), (pixels.mean(), pixels.std()), rtol=1e-12)


def test_framed_images_have_cifars_shape() -> None:
    images = np.random.default_rng(0).integers(1, 256, (3, 1, 28, 28)).astype(np.uint8)
    whole = framed(images)
    assert whole.shape == (3, 3, 32, 32)
    np.testing.assert_array_equal(whole[:, :, 2:30, 2:30], np.repeat(images, 3, axis=1))
    assert np.count_nonzero(whole) == 3 * images.size
    colour = whole.copy()
    np.testing.assert_array_equal(framed(colour), colour)


def test_unknown_data_set_lists_near_names() -> None:
    with pytest.raises(ValueError, match="did you mean 'fashion_mnist'"):
        load_dataset("fashion-mnist")


# --- order and batches


def toy(count: int = 10) -> Dataset:
    images = np.arange(count * 16, dtype=np.float32).reshape(count, 1, 4, 4)
    split = Split(images, np.arange(count) % 3)
    return Dataset("toy", split, split, ("a", "b", "c"), 0.0, 1.0)


def test_epoch_order_is_a_pure_function_of_seed_and_epoch() -> None:
    order = epoch_order(1000, 7, 3)
    assert sorted(order.tolist()) == list(range(1000))
    assert np.array_equal(order, epoch_order(1000, 7, 3))
    assert not np.array_equal(order, epoch_order(1000, 7, 4))
    assert not np.array_equal(order, epoch_order(1000, 8, 3))
    # fixed for good: a change would break the resuming of runs made before it
    assert epoch_order(10, 0, 0).tolist() == [2, 0, 8, 1, 3, 4, 5, 7, 6, 9]


def test_epoch_orders_are_uniform() -> None:
    firsts = np.bincount([epoch_order(8, 1, epoch)[0] for epoch in range(4000)], minlength=8)
    # 500 expected, standard deviation 21
    assert np.abs(firsts - 500).max() < 105


def test_batches_cover_the_split_once_and_can_start_inside() -> None:
    data = toy()
    order = epoch_order(10, 0, 1)
    drawn = list(batches(data, data.train, 4, order=order))
    assert [len(b.labels) for b in drawn] == [4, 4, 2]
    seen = np.concatenate([b.inputs[:, 0, 0, 0] for b in drawn]) / 16
    assert np.array_equal(seen, order)
    later = list(batches(data, data.train, 4, order=order, start=2))
    assert later[0].index == 2
    assert np.array_equal(later[0].inputs, drawn[2].inputs)


def test_batches_do_not_depend_on_how_many_are_made_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    data = load_dataset("digits")

    def drawn(values: int) -> list[tuple[bytes, bytes, object]]:
        monkeypatch.setattr("extensor.training.data.dataset.TOGETHER", values)
        augment = AUGMENTATIONS["shift"], 3, 1
        mine = batches(data, data.train, 50, start=3, augment=augment, mine=lambda n: slice(n // 2))
        return [(b.inputs.tobytes(), b.labels.tobytes(), b.whole) for b in mine]

    alone = drawn(1)
    assert len(alone) == 26 and len(alone[-1][1]) == 8 * 18
    assert drawn(5 * 50 * 784) == drawn(1 << 30) == alone


def test_shifts_depend_on_the_image_not_the_batch() -> None:
    data = toy()
    indices = np.arange(10)
    whole = RandomCrop(2)(data.train.images, Draws(0, 1, indices))
    part = RandomCrop(2)(data.train.images[3:5], Draws(0, 1, indices[3:5]))
    assert np.array_equal(whole[3:5], part)
    assert not np.array_equal(whole, data.train.images)
    # whatever is left of an image is pixels of it, or zero
    for before, after in zip(data.train.images, whole, strict=True):
        assert set(after.ravel()) <= set(before.ravel()) | {0.0}


def test_split_refuses_what_does_not_fit() -> None:
    with pytest.raises(ValueError, match=r"expected \(N, C, H, W\)"):
        Split(np.zeros((3, 4), np.float32), np.zeros(3, np.int64))
    with pytest.raises(ValueError, match=r"labels: expected \(3,\) of int64"):
        Split(np.zeros((3, 1, 4, 4), np.float32), np.zeros(2, np.int64))
