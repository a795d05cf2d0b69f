"""MNIST and Fashion-MNIST: IDX files, checked byte by byte.

IDX format: two zero bytes, a type code (8: unsigned byte), the number of axes, one big-endian
32-bit length per axis, then the data in C order. Source: http://yann.lecun.com/exdb/mnist/.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from training.data.dataset import Dataset, Split
from training.data.fetch import DataError, RemoteFile, find
from training.data.source import FileSource

__all__ = ["FASHION_MNIST", "MNIST", "IdxSource", "parse_idx"]

UNSIGNED_BYTE = 8


@dataclass(frozen=True, kw_only=True)
class IdxSource(FileSource):
    """A data set of four IDX files, 55 MB in all.

    Attributes:
        mean, std: of the training pixels in 0..1.
        checksums: SHA-256 of the decompressed files, whose canonical ones are ``.gz``: train
            images, train labels, test images, test labels.
    """

    mean: float
    std: float
    checksums: tuple[str, str, str, str]

    def read(self, urls: tuple[str, ...]) -> Dataset:
        """See the base class."""
        train_x, train_y, test_x, test_y = (self._file(i, urls) for i in range(4))
        return Dataset(
            self.name,
            Split(train_x[:, None], train_y.astype(np.int64)),
            Split(test_x[:, None], test_y.astype(np.int64)),
            self.classes,
            self.mean,
            self.std,
        )

    def _file(self, index: int, urls: tuple[str, ...]) -> np.ndarray:
        stem, shape = FILES[index]
        size = 4 + 4 * len(shape) + int(np.prod(shape))
        file = RemoteFile(stem, self.checksums[index], size)
        return parse_idx(
            find(self.name, file, self.system, urls, self.remedy), shape, f"{self.name} {stem}"
        )


FILES: tuple[tuple[str, tuple[int, ...]], ...] = (
    ("train-images-idx3-ubyte", (60000, 28, 28)),
    ("train-labels-idx1-ubyte", (60000,)),
    ("t10k-images-idx3-ubyte", (10000, 28, 28)),
    ("t10k-labels-idx1-ubyte", (10000,)),
)


def parse_idx(content: bytes, shape: tuple[int, ...] | None, label: str) -> np.ndarray:
    """Parse an IDX file of unsigned bytes.

    Args:
        content: the whole decompressed file.
        shape: the shape it must have, or None for any.
        label: what to call it in errors.

    Returns:
        A read-only uint8 array.

    Raises:
        DataError: on a wrong magic number, a wrong shape, or missing or extra bytes.
    """
    if len(content) < 4:
        raise DataError(f"{label}: expected an IDX file, got {len(content)} bytes")
    zero, kind, ndim = struct.unpack(">HBB", content[:4])
    if zero != 0 or kind != UNSIGNED_BYTE or ndim == 0:
        raise DataError(
            f"{label}: expected an IDX magic number of unsigned bytes (00 00 08 and the number of "
            f"axes), got {content[:4].hex(' ')}; is it another file, or still compressed?"
        )
    header = 4 + 4 * ndim
    if len(content) < header:
        raise DataError(
            f"{label}: expected {header} bytes of header, got {len(content)}: truncated"
        )
    got = struct.unpack(f">{ndim}I", content[4:header])
    if shape is not None and got != shape:
        raise DataError(f"{label}: expected shape {shape}, got {got}")
    expected = int(np.prod(got, dtype=np.int64))
    if len(content) - header != expected:
        raise DataError(
            f"{label}: expected {expected:,} bytes after the header for shape {got}, "
            f"got {len(content) - header:,}"
        )
    return np.frombuffer(content, np.uint8, offset=header).reshape(got)


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
        "T-shirt/top",
        "Trouser",
        "Pullover",
        "Dress",
        "Coat",
        "Sandal",
        "Shirt",
        "Sneaker",
        "Bag",
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
)
