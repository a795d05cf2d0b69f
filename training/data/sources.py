"""Data sets of images in files, checked byte by byte: MNIST, Fashion-MNIST, EMNIST, CIFAR-10.

- IDX (http://yann.lecun.com/exdb/mnist/): two zero bytes, a type code (8: unsigned byte), the
  number of axes, one big-endian 32-bit length per axis, then the data in C order.
- CIFAR-10 (https://www.cs.toronto.edu/~kriz/cifar.html): five files of 10,000 training records, one
  of test records; a record is a byte of label, then red, green and blue planes of 32x32.
- EMNIST (Cohen et al., arXiv 1702.05373): IDX files in one zip. Its images lie transposed in the
  files, and the letters count from 1; both are put right here.
"""

from __future__ import annotations

import math
import string
import struct
import tarfile
import zipfile
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from extensor.io.npy import ZIP_ERRORS

from .dataset import Dataset, Split, pixel_statistics
from .fetch import DataError, RemoteFile, find, find_archive, unpack_gzip
from .prepared import prepared

__all__ = [
    "CIFAR10",
    "EMNIST",
    "FASHION_MNIST",
    "FASHION_MNIST_RGB",
    "MNIST",
    "ImageSource",
    "framed",
    "parse_cifar",
    "parse_idx",
]

UNSIGNED_BYTE = 8
MAX_IDX_AXES = 32
CIFAR_SHAPE = (3, 32, 32)
CIFAR_RECORD = 1 + 3 * 32 * 32
ARCHIVE_ERRORS: tuple[type[Exception], ...] = (
    *ZIP_ERRORS, tarfile.TarError, OSError, MemoryError, OverflowError,
)  # fmt: skip
"""Of damage; tarfile and zipfile read a header of any size that the archive states."""
ARRAYS_VERSION = 1
"""Version of what `ArchiveSource` makes of an archive."""


@dataclass(frozen=True, kw_only=True)
class ImageSource(ABC):
    """A data set of images in files.

    Attributes:
        name: the data set's name.
        classes: names of the labels.
        system: folders that may hold the files besides the cache, such as those of packages.
        urls: addresses of folders that hold them.
        remedy: what to do where no download is possible.
    """

    name: str
    classes: tuple[str, ...]
    system: tuple[Path, ...]
    urls: tuple[str, ...]
    remedy: str

    def load(self, download: bool = True) -> Dataset:
        """Find, check and read the files; ``download=False`` looks on this machine only.

        Raises:
            DataError: if a file is missing or damaged.
        """
        return self.read(self.urls if download else ())

    @abstractmethod
    def read(self, urls: tuple[str, ...]) -> Dataset:
        """The data set, its files from the cache, the system's folders or else ``urls``."""


# --- IDX files --------------------------------------------------------------------------------

FILES: tuple[tuple[str, tuple[int, ...]], ...] = (
    ("train-images-idx3-ubyte", (60000, 28, 28)),
    ("train-labels-idx1-ubyte", (60000,)),
    ("t10k-images-idx3-ubyte", (10000, 28, 28)),
    ("t10k-labels-idx1-ubyte", (10000,)),
)


@dataclass(frozen=True, kw_only=True)
class IdxSource(ImageSource):
    """A data set of four IDX files, 55 MB in all.

    Attributes:
        mean, std: of the training pixels in 0..1.
        checksums: SHA-256 of the decompressed files, in the order of `FILES`.
    """

    mean: float
    std: float
    checksums: tuple[str, str, str, str]

    def read(self, urls: tuple[str, ...]) -> Dataset:
        arrays = []
        for (stem, shape), checksum in zip(FILES, self.checksums, strict=True):
            file = RemoteFile(stem, checksum, 4 + 4 * len(shape) + int(np.prod(shape)))
            content = find(self.name, file, self.system, urls, self.remedy)
            arrays.append(parse_idx(content, shape, f"{self.name} {stem}"))
        train, test = (
            Split(images[:, None], labels.astype(np.int64))
            for images, labels in (arrays[:2], arrays[2:])
        )
        return Dataset(self.name, train, test, self.classes, self.mean, self.std)


@dataclass(frozen=True, kw_only=True)
class FramedSource(ImageSource):
    """Grey 28x28 images in CIFAR-10's shape: a frame of zeros, the same in three channels.

    Attributes:
        grey: the images.
    """

    grey: IdxSource

    def read(self, urls: tuple[str, ...]) -> Dataset:
        grey = self.grey.read(urls)
        train, test = (
            Split(framed(split.images), split.labels) for split in (grey.train, grey.test)
        )
        (mean,), (std,) = pixel_statistics(train.images[:, :1])
        return Dataset(self.name, train, test, self.classes, mean, std)


def framed(images: np.ndarray) -> np.ndarray:
    """Square (N, 1 or 3, S, S) as a read-only (N, 3, 32, 32), zeros around."""
    frame = (CIFAR_SHAPE[-1] - images.shape[-1]) // 2
    whole = np.pad(images, ((0, 0), (0, 0), (frame, frame), (frame, frame)))
    return np.broadcast_to(whole, (len(images), *CIFAR_SHAPE))


def parse_idx(content: bytes, shape: tuple[int, ...] | None, label: str) -> np.ndarray:
    """Parse a decompressed IDX file of unsigned bytes into a read-only array.

    Args:
        content: the whole file.
        shape: the shape it must have, or None for any.
        label: what to call it in errors.

    Raises:
        DataError: on a wrong magic number, a wrong shape, or missing or extra bytes.
    """
    if len(content) < 4:
        raise DataError(f"{label}: expected an IDX file, got {len(content)} bytes")
    zero, kind, ndim = struct.unpack(">HBB", content[:4])
    if zero != 0 or kind != UNSIGNED_BYTE or not 0 < ndim <= MAX_IDX_AXES:
        raise DataError(
            f"{label}: expected an IDX magic number of unsigned bytes (00 00 08 and the number of "
            f"axes, {MAX_IDX_AXES} at most), got {content[:4].hex(' ')}; is it another file, or "
            "still compressed?"
        )
    header = 4 + 4 * ndim
    if len(content) < header:
        raise DataError(
            f"{label}: expected {header} bytes of header, got {len(content)}: truncated"
        )
    found = struct.unpack(f">{ndim}I", content[4:header])
    if shape is not None and found != shape:
        raise DataError(f"{label}: expected shape {shape}, got {found}")
    size = math.prod(found)
    if len(content) - header != size:
        raise DataError(
            f"{label}: expected {size:,} bytes after the header for shape {found}, "
            f"got {len(content) - header:,}"
        )
    return np.frombuffer(content, np.uint8, offset=header).reshape(found)


# --- archives ---------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ArchiveSource(ImageSource):
    """A data set of images in one archive, which other data sets may share.

    It is unpacked once; then its arrays are cached.

    Attributes:
        kind: what the archive is, for errors.
        archive: the file.
        folder: its folder in the cache.
    """

    kind: ClassVar[str]
    archive: RemoteFile
    folder: str

    def read(self, urls: tuple[str, ...]) -> Dataset:
        made_of = f"{self.archive.sha256} {self.name}"
        arrays = prepared(self.name, made_of, ARRAYS_VERSION, lambda: self._arrays(urls))
        train, test = (
            Split(arrays[f"{part}.images"], arrays[f"{part}.labels"]) for part in ("train", "test")
        )
        mean, std = (tuple(float(v) for v in arrays[name]) for name in ("mean", "std"))
        return Dataset(self.name, train, test, self.classes, mean, std)

    def _arrays(self, urls: tuple[str, ...]) -> dict[str, np.ndarray]:
        """The archive's arrays, and mean and standard deviation of the training pixels."""
        path = find_archive(self.folder, self.archive, self.system, urls, self.remedy)
        try:
            train, test = self.splits(path)
        except ARCHIVE_ERRORS as error:
            if isinstance(error, DataError):
                raise
            raise DataError(f"{path}: expected a complete {self.kind}, got: {error}") from error
        mean, std = pixel_statistics(train.images)
        return {
            "train.images": train.images,
            "train.labels": train.labels,
            "test.images": test.images,
            "test.labels": test.labels,
            "mean": np.array(mean),
            "std": np.array(std),
        }

    @abstractmethod
    def splits(self, path: Path) -> tuple[Split, Split]:
        """Read the training and the test images out of the archive.

        Raises:
            DataError: for a file that is missing in it, or is not what it should be.
        """


@dataclass(frozen=True, kw_only=True)
class CifarSource(ArchiveSource):
    """A data set of CIFAR-10's records, ``records`` in each file of the folder ``inside``."""

    kind = ".tar.gz"
    inside: str
    records: int

    def splits(self, path: Path) -> tuple[Split, Split]:
        with tarfile.open(path) as archive:

            def read(name: str) -> tuple[np.ndarray, np.ndarray]:
                label = f"{self.inside}/{name} in {path}"
                try:
                    member = archive.extractfile(f"{self.inside}/{name}")
                except KeyError:
                    member = None
                if member is None:
                    raise DataError(f"{label}: not there; is this another archive?")
                content = member.read(self.records * CIFAR_RECORD + 1)
                return parse_cifar(content, self.records, len(self.classes), label)

            parts = [read(f"data_batch_{number}.bin") for number in range(1, 6)]
            test = read("test_batch.bin")
        images, labels = (np.concatenate(part) for part in zip(*parts, strict=True))
        return Split(images, labels), Split(*test)


def parse_cifar(
    content: bytes, records: int, classes: int, label: str
) -> tuple[np.ndarray, np.ndarray]:
    """Parse a file of CIFAR-10's records.

    Args:
        content: the whole file.
        records: how many it must have.
        classes: labels are below this.
        label: what to call it in errors.

    Returns:
        Images (records, 3, 32, 32), uint8, read-only; labels (records,), int64.

    Raises:
        DataError: on missing or extra bytes, or a label out of range.
    """
    if len(content) != records * CIFAR_RECORD:
        raise DataError(
            f"{label}: expected {records:,} records of {CIFAR_RECORD:,} bytes, "
            f"{records * CIFAR_RECORD:,} in all, got {len(content):,} bytes"
        )
    table = np.frombuffer(content, np.uint8).reshape(records, CIFAR_RECORD)
    labels = table[:, 0].astype(np.int64)
    if labels.size and labels.max() >= classes:
        bad = int(labels.argmax())
        raise DataError(
            f"{label}: expected labels in 0..{classes - 1}, got {labels[bad]} in record {bad}"
        )
    return table[:, 1:].reshape(records, *CIFAR_SHAPE), labels


@dataclass(frozen=True, kw_only=True)
class EmnistSource(ArchiveSource):
    """One of EMNIST's divisions, which share a zip.

    Attributes:
        what: what it shows, for the command line.
        division: its name in the archive's file names.
        train, test: numbers of images.
        first: the label of the first class in the files.
    """

    kind = "zip file"
    what: str
    division: str
    train: int
    test: int
    first: int

    def splits(self, path: Path) -> tuple[Split, Split]:
        with zipfile.ZipFile(path) as archive:
            return self._split(archive, path, "train"), self._split(archive, path, "test")

    def _split(self, archive: zipfile.ZipFile, path: Path, part: str) -> Split:
        def read(stem: str, shape: tuple[int, ...]) -> np.ndarray:
            name = f"gzip/emnist-{self.division}-{part}-{stem}-ubyte.gz"
            label = f"{name} in {path}"
            try:
                packed = archive.open(name)
            except KeyError as error:
                raise DataError(f"{label}: not there; is this another archive?") from error
            with packed:
                content = unpack_gzip(packed, 4 + 4 * len(shape) + math.prod(shape), label)
            return parse_idx(content, shape, label)

        count, first = self.train if part == "train" else self.test, self.first
        images = read("images-idx3", (count, 28, 28))
        labels = read("labels-idx1", (count,)).astype(np.int64)
        last = first + len(self.classes) - 1
        if labels.size and not first <= labels.min() <= labels.max() <= last:
            raise DataError(
                f"{self.name} {part}: expected labels in {first}..{last}, got "
                f"{labels.min()}..{labels.max()}"
            )
        return Split(np.ascontiguousarray(images.swapaxes(1, 2))[:, None], labels - first)


# --- the data sets ----------------------------------------------------------------------------

MNIST = IdxSource(
    name="mnist",
    classes=tuple("0123456789"),
    mean=0.1307,
    std=0.3081,
    checksums=(
        "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
        "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
        "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
        "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
    ),
    system=(Path("/usr/share/datasets/mnist"),),
    urls=(
        "https://storage.googleapis.com/cvdf-datasets/mnist",
        "https://ossci-datasets.s3.amazonaws.com/mnist",
    ),
    remedy=(
        "on a machine with a network, curl -LO "
        "https://storage.googleapis.com/cvdf-datasets/mnist/{train-images-idx3,train-labels-idx1,"
        "t10k-images-idx3,t10k-labels-idx1}-ubyte.gz"
    ),
)

FASHION_MNIST = IdxSource(
    name="fashion_mnist",
    classes=(
        "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag",
        "Ankle boot",
    ),
    mean=0.2860,
    std=0.3530,
    checksums=(
        "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
        "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
        "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
        "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
    ),
    system=(Path("/usr/share/datasets/fashion-mnist"),),
    urls=(
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com",
        "https://github.com/zalandoresearch/fashion-mnist/raw/master/data/fashion",
    ),
    remedy="sudo apt-get install dataset-fashion-mnist (Debian, Ubuntu; 31 MB)",
)  # fmt: skip

FASHION_MNIST_RGB = FramedSource(
    name="fashion_mnist_rgb",
    classes=FASHION_MNIST.classes,
    system=FASHION_MNIST.system,
    urls=FASHION_MNIST.urls,
    remedy=FASHION_MNIST.remedy,
    grey=FASHION_MNIST,
)

CIFAR10 = CifarSource(
    name="cifar10",
    archive=RemoteFile(
        "cifar-10-binary.tar.gz",
        "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
        170_052_171,
        packed=False,
    ),
    folder="cifar10",
    inside="cifar-10-batches-bin",
    records=10_000,
    classes=(
        "airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck",
    ),
    system=(Path("/usr/share/datasets/cifar-10"),),
    urls=("https://www.cs.toronto.edu/~kriz",),
    remedy=(
        "on a machine with a network, curl -LO "
        "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
    ),
)  # fmt: skip

EMNIST_URL = "https://biometrics.nist.gov/cs_links/EMNIST"
EMNIST_ZIP = RemoteFile(
    "gzip.zip",
    "fb9bb67e33772a9cc0b895e4ecf36d2cf35be8b709693c3564cea2a019fcda8e",
    561_753_746,
    packed=False,
)
BALANCED = string.digits + string.ascii_uppercase + "abdefghnqrt"
"""Small letters that look like their capitals count as capitals."""

EMNIST = tuple(
    EmnistSource(
        name=name,
        what=what,
        division=division,
        train=train,
        test=test,
        classes=tuple(classes),
        first=first,
        archive=EMNIST_ZIP,
        folder="emnist",
        system=(Path("/usr/share/datasets/emnist"),),
        urls=(EMNIST_URL,),
        remedy=f"on a machine with a network, curl -LO {EMNIST_URL}/{EMNIST_ZIP.name}",
    )
    for name, what, division, train, test, classes, first in (
        ("emnist", "digits and letters", "balanced", 112_800, 18_800, BALANCED, 0),
        ("emnist_letters", "letters", "letters", 124_800, 20_800, string.ascii_uppercase, 1),
        ("emnist_digits", "digits", "digits", 240_000, 40_000, string.digits, 0),
    )
)
"""The balanced division first; the archive is the same for all."""
