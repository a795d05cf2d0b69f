"""CIFAR-10 in its binary form: https://www.cs.toronto.edu/~kriz/cifar.html.

The archive holds five files of 10,000 training records and one of test records; a record is a byte
of label and 3,072 bytes of pixels: red, green and blue planes of 32x32.
"""

from __future__ import annotations

import tarfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from training.data.dataset import Dataset, Split, pixel_statistics
from training.data.fetch import DataError, RemoteFile, find_archive
from training.data.prepared import prepared

__all__ = ["CIFAR10", "CifarSource", "parse_records"]

SHAPE = (3, 32, 32)
RECORD = 1 + 3 * 32 * 32


@dataclass(frozen=True)
class CifarSource:
    """A data set of CIFAR-10's records in one archive.

    Attributes:
        name: the data set's name.
        archive: the ``.tar.gz``.
        folder: the folder in it.
        records: in each file.
        classes: names of the labels.
        system: folders that hold the archive besides the cache.
        urls: addresses of folders that hold it.
        remedy: what to do where no download is possible.
    """

    name: str
    archive: RemoteFile
    folder: str
    records: int
    classes: tuple[str, ...]
    system: tuple[Path, ...]
    urls: tuple[str, ...]
    remedy: str

    def load(self, download: bool = True) -> Dataset:
        """Find, check and unpack the archive, once; later it comes from the cache.

        Images stay uint8: 184 MB in all.

        Args:
            download: False looks on this machine only.

        Raises:
            DataError: if the archive is missing or damaged.
        """
        arrays = prepared(
            self.name, self.archive.sha256, 1, lambda: self._parsed(self.urls if download else ())
        )
        train, test = (
            Split(arrays[f"{part}.images"], arrays[f"{part}.labels"]) for part in ("train", "test")
        )
        mean, std = (tuple(float(v) for v in arrays[name]) for name in ("mean", "std"))
        return Dataset(self.name, train, test, self.classes, mean, std)

    def _parsed(self, urls: tuple[str, ...]) -> dict[str, np.ndarray]:
        """The arrays of the archive, and mean and standard deviation of the training pixels."""
        path = find_archive(self.name, self.archive, self.system, urls, self.remedy)
        names = [f"data_batch_{n}.bin" for n in range(1, 6)]
        try:
            with tarfile.open(path) as archive:
                train = [self._file(archive, path, name) for name in names]
                test = self._file(archive, path, "test_batch.bin")
        except (tarfile.TarError, EOFError, OSError) as error:
            raise DataError(f"{path}: wanted a complete .tar.gz, got: {error}") from error
        images = np.concatenate([x for x, _ in train])
        mean, std = pixel_statistics(images)
        return {
            "train.images": images,
            "train.labels": np.concatenate([y for _, y in train]),
            "test.images": test[0],
            "test.labels": test[1],
            "mean": np.array(mean),
            "std": np.array(std),
        }

    def _file(
        self, archive: tarfile.TarFile, path: Path, name: str
    ) -> tuple[np.ndarray, np.ndarray]:
        label = f"{self.folder}/{name} in {path}"
        try:
            member = archive.extractfile(f"{self.folder}/{name}")
        except KeyError:
            member = None
        if member is None:
            raise DataError(f"{label}: not there; is this another archive?")
        return parse_records(member.read(), self.records, len(self.classes), label)


def parse_records(
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
    if len(content) != records * RECORD:
        raise DataError(
            f"{label}: wanted {records:,} records of {RECORD:,} bytes, {records * RECORD:,} in "
            f"all, got {len(content):,} bytes"
        )
    table = np.frombuffer(content, np.uint8).reshape(records, RECORD)
    labels = table[:, 0].astype(np.int64)
    if labels.size and labels.max() >= classes:
        bad = int(labels.argmax())
        raise DataError(
            f"{label}: wanted labels in 0..{classes - 1}, got {labels[bad]} in record {bad}"
        )
    return table[:, 1:].reshape(records, *SHAPE), labels


CIFAR10 = CifarSource(
    name="cifar10",
    archive=RemoteFile(
        "cifar-10-binary.tar.gz",
        "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
        170_052_171,
        packed=False,
    ),
    folder="cifar-10-batches-bin",
    records=10_000,
    classes=(
        "airplane",
        "automobile",
        "bird",
        "cat",
        "deer",
        "dog",
        "frog",
        "horse",
        "ship",
        "truck",
    ),
    system=(Path("/usr/share/datasets/cifar-10"),),
    urls=("https://www.cs.toronto.edu/~kriz",),
    remedy=(
        "on a machine with a network, curl -LO "
        "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
    ),
)
