"""CIFAR-10 in its binary form: https://www.cs.toronto.edu/~kriz/cifar.html.

The archive holds five files of 10,000 training records and one of test records; a record is a byte
of label and 3,072 bytes of pixels: red, green and blue planes of 32x32.
"""

from __future__ import annotations

import tarfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from training.data.archive import ArchiveSource
from training.data.dataset import Split
from training.data.fetch import DataError, RemoteFile

__all__ = ["CIFAR10", "CifarSource", "parse_records"]

SHAPE = (3, 32, 32)
RECORD = 1 + 3 * 32 * 32


@dataclass(frozen=True, kw_only=True)
class CifarSource(ArchiveSource):
    """A data set of CIFAR-10's records in one archive, 184 MB in all.

    Attributes:
        inside: the folder in the archive.
        records: in each file.
    """

    kind = ".tar.gz"
    inside: str
    records: int

    def splits(self, path: Path) -> tuple[Split, Split]:
        """See the base class."""
        names = [f"data_batch_{n}.bin" for n in range(1, 6)]
        with tarfile.open(path) as archive:
            parts = [self._file(archive, path, name) for name in names]
            test = self._file(archive, path, "test_batch.bin")
        images, labels = (np.concatenate(part) for part in zip(*parts, strict=True))
        return Split(images, labels), Split(*test)

    def _file(
        self, archive: tarfile.TarFile, path: Path, name: str
    ) -> tuple[np.ndarray, np.ndarray]:
        label = f"{self.inside}/{name} in {path}"
        try:
            member = archive.extractfile(f"{self.inside}/{name}")
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
            f"{label}: expected {records:,} records of {RECORD:,} bytes, {records * RECORD:,} in "
            f"all, got {len(content):,} bytes"
        )
    table = np.frombuffer(content, np.uint8).reshape(records, RECORD)
    labels = table[:, 0].astype(np.int64)
    if labels.size and labels.max() >= classes:
        bad = int(labels.argmax())
        raise DataError(
            f"{label}: expected labels in 0..{classes - 1}, got {labels[bad]} in record {bad}"
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
    folder="cifar10",
    inside="cifar-10-batches-bin",
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
