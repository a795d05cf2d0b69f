"""CIFAR-10 and EMNIST: archives made here, whole and damaged."""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import io
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from extensor.training.data import DATASETS, DataError, batches, load_dataset
from extensor.training.data.dataset import pixel_statistics
from extensor.training.data.fetch import RemoteFile
from extensor.training.data.sources import (
    CIFAR10,
    CIFAR_RECORD,
    EMNIST,
    FASHION_MNIST,
    MNIST,
    parse_cifar,
)
from tests.unit.training.conftest import idx_bytes

RNG = np.random.default_rng(0)
pytestmark = pytest.mark.usefixtures("cache")


def keep(cache: Path, source: Any, folder: str, content: bytes, **changes: Any) -> Any:
    """Put an archive into the cache; the source that expects it."""
    (cache / folder).mkdir(parents=True, exist_ok=True)
    (cache / folder / source.archive.name).write_bytes(content)
    digest = hashlib.sha256(content).hexdigest()
    file = RemoteFile(source.archive.name, digest, len(content), packed=False)
    return dataclasses.replace(source, archive=file, system=(), urls=(), **changes)


# --- CIFAR-10


def tar_of(files: dict[str, bytes]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as archive:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return out.getvalue()


def cifar_files() -> tuple[dict[str, bytes], list[np.ndarray]]:
    names = [f"data_batch_{n}.bin" for n in range(1, 6)] + ["test_batch.bin"]
    tables = [RNG.integers(0, 10, (4, CIFAR_RECORD)).astype(np.uint8) for _ in names]
    folder = CIFAR10.inside
    return {f"{folder}/{n}": t.tobytes() for n, t in zip(names, tables, strict=True)}, tables


def test_cifar10_loads_from_its_archive(cache: Path) -> None:
    files, tables = cifar_files()
    data = keep(cache, CIFAR10, "cifar10", tar_of(files), records=4).load(download=False)
    assert data.train.images.shape == (20, 3, 32, 32)
    assert data.test.labels.tolist() == tables[5][:, 0].tolist()
    # a record by hand: byte 1 + 1024 is the first green pixel, 32 further the next row
    green = data.train.images[4, 1]
    assert green[0, 0] == tables[1][0, 1 + 1024]
    assert green[1, 2] == tables[1][0, 1 + 1024 + 32 + 2]
    batch = next(batches(data, data.train, 20))
    np.testing.assert_allclose(batch.inputs.mean((0, 2, 3)), 0, atol=1e-5)
    np.testing.assert_allclose(batch.inputs.std((0, 2, 3)), 1, rtol=1e-5)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f, k: f.pop(k), "not there; is this another archive"),
        (lambda f, k: f.update({k: f[k][:-1]}), "expected 4 records of 3,073 bytes"),
        (lambda f, k: f.update({k: f[k] + b"x"}), "got 12,293 bytes"),
        (lambda f, k: f.update({k: b"\x0a" + f[k][1:]}), r"labels in 0\.\.9, got 10 in record 0"),
    ],
)
def test_cifar10_refuses_files_that_are_not_its_own(cache: Path, damage: Any, message: str) -> None:
    files, _ = cifar_files()
    damage(files, f"{CIFAR10.inside}/data_batch_3.bin")
    with pytest.raises(DataError, match=message):
        keep(cache, CIFAR10, "cifar10", tar_of(files), records=4).load()


def test_what_is_no_archive_is_refused(cache: Path) -> None:
    with pytest.raises(DataError, match=r"expected a complete \.tar\.gz"):
        keep(cache, CIFAR10, "cifar10", b"not a tar file", records=4).load()
    with pytest.raises(DataError, match="expected a complete zip file"):
        keep(cache, EMNIST[0], "emnist", b"not a zip file").load()
    long_name = tarfile.TarInfo("name")
    long_name.type, long_name.size = tarfile.GNUTYPE_LONGNAME, 2**70
    content = gzip.compress(long_name.tobuf(tarfile.GNU_FORMAT) + bytes(1024))
    with pytest.raises(DataError, match=r"expected a complete \.tar\.gz"):
        keep(cache, CIFAR10, "cifar10", content, records=4).load()


def test_a_damaged_archive_is_refused_before_it_is_opened(cache: Path) -> None:
    files, _ = cifar_files()
    source = keep(cache, CIFAR10, "cifar10", tar_of(files), records=4)
    path = cache / "cifar10" / CIFAR10.archive.name
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    with pytest.raises(DataError, match=f"expected {len(whole):,} bytes, got {len(whole) - 1:,}"):
        source.load()
    path.write_bytes(whole[:100] + bytes([whole[100] ^ 1]) + whole[101:])
    with pytest.raises(DataError, match="expected SHA-256") as caught:
        source.load()
    assert f"delete {path}" in str(caught.value)


def test_an_archive_is_downloaded_under_its_own_name(cache: Path, tmp_path: Path) -> None:
    files, _ = cifar_files()
    source = keep(cache, CIFAR10, "cifar10", tar_of(files), records=4)
    server = tmp_path / "server"
    (cache / "cifar10").rename(server)
    source = dataclasses.replace(source, urls=(server.as_uri(),))
    with pytest.raises(DataError, match="was found nowhere") as caught:
        source.load(download=False)
    assert server.as_uri() not in str(caught.value)
    assert len(source.load().train) == 20
    assert (cache / "cifar10" / "cifar-10-binary.tar.gz").is_file()


def test_parse_cifar_refuses_nothing_at_all() -> None:
    with pytest.raises(DataError, match="got 0 bytes"):
        parse_cifar(b"", 4, 10, "empty")


# --- EMNIST


def idx_gz(array: np.ndarray) -> bytes:
    return gzip.compress(idx_bytes(array))


def zip_of(files: dict[str, bytes]) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return out.getvalue()


def emnist_files(source: Any) -> tuple[dict[str, bytes], dict[str, np.ndarray]]:
    last = source.first + len(source.classes)
    arrays = {
        "train-images-idx3": RNG.integers(0, 256, (6, 28, 28)).astype(np.uint8),
        "train-labels-idx1": np.array([source.first, last - 1, 3, 4, 5, 6], np.uint8),
        "test-images-idx3": RNG.integers(0, 256, (3, 28, 28)).astype(np.uint8),
        "test-labels-idx1": np.array([1, 2, 3], np.uint8),
    }
    names = {k: f"gzip/emnist-{source.division}-{k}-ubyte.gz" for k in arrays}
    return {names[k]: idx_gz(a) for k, a in arrays.items()}, arrays


@pytest.mark.parametrize("source", EMNIST, ids=lambda s: s.name)
def test_emnist_is_upright_and_counts_from_zero(cache: Path, source: Any) -> None:
    files, arrays = emnist_files(source)
    data = keep(cache, source, "emnist", zip_of(files), train=6, test=3).load()
    assert np.array_equal(data.train.images[2, 0], arrays["train-images-idx3"][2].T)
    assert data.train.labels[:2].tolist() == [0, len(source.classes) - 1]
    assert data.test.labels.tolist() == [n - source.first for n in (1, 2, 3)]


def test_emnist_classes() -> None:
    assert {s.name: len(s.classes) for s in EMNIST} == {
        "emnist": 47,
        "emnist_letters": 26,
        "emnist_digits": 10,
    }
    assert all(len(set(s.classes)) == len(s.classes) for s in EMNIST)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f, k: f.pop(k), "not there; is this another archive"),
        (lambda f, k: f.update({k: f[k][:-9]}), "expected a complete gzip file"),
        (lambda f, k: f.update({k: idx_gz(np.zeros(5, np.uint8))}), r"expected shape \(6,\)"),
        (
            lambda f, k: f.update({k: idx_gz(np.full(6, 27, np.uint8))}),
            r"expected labels in 1\.\.26, got 27\.\.27",
        ),
        (
            lambda f, k: f.update({k: idx_gz(np.zeros(6, np.uint8))}),
            r"expected labels in 1\.\.26, got 0\.\.0",
        ),
    ],
)
def test_emnist_refuses_files_that_are_not_its_own(cache: Path, damage: Any, message: str) -> None:
    source = EMNIST[1]
    files, _ = emnist_files(source)
    damage(files, "gzip/emnist-letters-train-labels-idx1-ubyte.gz")
    with pytest.raises(DataError, match=message):
        keep(cache, source, "emnist", zip_of(files), train=6, test=3).load()


def test_emnist_under_another_compression_is_refused_where_that_is_damaged(cache: Path) -> None:
    source = EMNIST[0]
    name = f"gzip/emnist-{source.division}-train-images-idx3-ubyte.gz"
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_LZMA) as archive:
        archive.writestr(name, bytes(16))
    content = bytearray(out.getvalue())
    content[34 + len(name) : 39 + len(name)] = b"\xff" * 5  # LZMA's properties
    with pytest.raises(DataError, match="expected a complete zip file"):
        keep(cache, source, "emnist", bytes(content)).load()


# --- both


@pytest.mark.parametrize("name", ["cifar10", "emnist", "mnist", "fashion_mnist"])
def test_without_a_network_every_place_tried_is_named(
    name: str, cache: Path, offline: None
) -> None:
    with pytest.raises(DataError) as caught:
        load_dataset(name)
    text = str(caught.value)
    for part in (str(cache / name), "/usr/share/datasets", "https://", "no network"):
        assert part in text
    assert "curl -LO" in text or name == "fashion_mnist"
    for source in (MNIST, FASHION_MNIST):
        assert source.name != name or (source.remedy in text and "--dataset digits" in text)


def test_pixel_statistics_are_those_of_numpy() -> None:
    images = RNG.integers(0, 256, (1203, 2, 3, 4)).astype(np.uint8)
    mean, std = pixel_statistics(images)
    np.testing.assert_allclose(mean, (images / 255).mean((0, 2, 3)), rtol=1e-12)
    np.testing.assert_allclose(std, (images / 255).std((0, 2, 3)), rtol=1e-12)


def test_every_row_says_what_it_is() -> None:
    assert {"digits", "mnist", "fashion_mnist", "cifar10", "emnist"} <= set(DATASETS)
    assert all(row.doc for row in DATASETS.values())
