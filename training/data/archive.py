"""What data sets in one archive have in common: find it, check it, unpack it in memory."""

from __future__ import annotations

import tarfile
import zipfile
from abc import abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from training.data.dataset import Dataset, Split, pixel_statistics
from training.data.fetch import DataError, RemoteFile, find_archive
from training.data.prepared import prepared
from training.data.source import FileSource

__all__ = ["ArchiveSource"]

VERSION = 1  # of what `ArchiveSource` makes of an archive
DAMAGED = (tarfile.TarError, zipfile.BadZipFile, EOFError, OSError)


@dataclass(frozen=True, kw_only=True)
class ArchiveSource(FileSource):
    """A data set of images in one archive, which other data sets may share.

    It is unpacked once; then its arrays are cached.

    Attributes:
        archive: the file.
        folder: its folder in the cache.
    """

    kind: ClassVar[str]
    """What the archive is, for errors."""

    archive: RemoteFile
    folder: str

    def read(self, urls: tuple[str, ...]) -> Dataset:
        """See the base class."""
        made_of = f"{self.archive.sha256} {self.name}"
        arrays = prepared(self.name, made_of, VERSION, lambda: self._arrays(urls))
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
        except DAMAGED as error:
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
