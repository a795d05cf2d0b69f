"""EMNIST (Cohen et al., arXiv 1702.05373): handwritten letters and digits, IDX files in one zip.

Its images lie transposed in the files, and the letters count from 1; both are put right here.
"""

from __future__ import annotations

import gzip
import string
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from training.data.dataset import Dataset, Split, pixel_statistics
from training.data.fetch import DataError, RemoteFile, find_archive
from training.data.idx import parse_idx
from training.data.prepared import prepared

__all__ = ["EMNIST", "EmnistSource"]


@dataclass(frozen=True)
class EmnistSource:
    """One of EMNIST's divisions.

    Attributes:
        name: the data set's name.
        what: what it shows, for the command line.
        division: its name in the archive's file names.
        train, test: numbers of images.
        classes: names of the labels.
        first: the label of the first class in the files.
        archive: the zip, shared by all divisions.
        system: folders that hold it besides the cache.
        urls: addresses of folders that hold it.
        remedy: what to do where no download is possible.
    """

    name: str
    what: str
    division: str
    train: int
    test: int
    classes: tuple[str, ...]
    first: int
    archive: RemoteFile
    system: tuple[Path, ...]
    urls: tuple[str, ...]
    remedy: str

    def load(self, download: bool = True) -> Dataset:
        """Find and check the archive, unpack the division's four files, once; then it is cached.

        Args:
            download: False looks on this machine only.

        Raises:
            DataError: if the archive is missing or damaged.
        """
        arrays = prepared(
            self.name,
            f"{self.archive.sha256} {self.division}",
            1,
            lambda: self._parsed(self.urls if download else ()),
        )
        train, test = (
            Split(arrays[f"{part}.images"], arrays[f"{part}.labels"]) for part in ("train", "test")
        )
        mean, std = (tuple(float(v) for v in arrays[name]) for name in ("mean", "std"))
        return Dataset(self.name, train, test, self.classes, mean, std)

    def _parsed(self, urls: tuple[str, ...]) -> dict[str, np.ndarray]:
        """The division's arrays, and mean and standard deviation of the training pixels."""
        path = find_archive("emnist", self.archive, self.system, urls, self.remedy)
        arrays = {}
        try:
            with zipfile.ZipFile(path) as archive:
                for part in ("train", "test"):
                    split = self._split(archive, path, part)
                    arrays[f"{part}.images"], arrays[f"{part}.labels"] = split.images, split.labels
        except zipfile.BadZipFile as error:
            raise DataError(f"{path}: wanted a complete zip file, got: {error}") from error
        mean, std = pixel_statistics(arrays["train.images"])
        return {**arrays, "mean": np.array(mean), "std": np.array(std)}

    def _split(self, archive: zipfile.ZipFile, path: Path, part: str) -> Split:
        count = self.train if part == "train" else self.test
        images = self._file(archive, path, f"{part}-images-idx3", (count, 28, 28))
        labels = self._file(archive, path, f"{part}-labels-idx1", (count,)).astype(np.int64)
        labels -= self.first
        if labels.size and not 0 <= labels.min() <= labels.max() < len(self.classes):
            raise DataError(
                f"{self.name} {part}: wanted labels in {self.first}.."
                f"{self.first + len(self.classes) - 1}, got {labels.min() + self.first}.."
                f"{labels.max() + self.first}"
            )
        return Split(np.ascontiguousarray(images.swapaxes(1, 2))[:, None], labels)

    def _file(
        self, archive: zipfile.ZipFile, path: Path, stem: str, shape: tuple[int, ...]
    ) -> np.ndarray:
        name = f"gzip/emnist-{self.division}-{stem}-ubyte.gz"
        label = f"{name} in {path}"
        try:
            content = gzip.decompress(archive.read(name))
        except KeyError as error:
            raise DataError(f"{label}: not there; is this another archive?") from error
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise DataError(f"{label}: wanted a complete gzip file, got: {error}") from error
        return parse_idx(content, shape, label)


ARCHIVE = RemoteFile(
    "gzip.zip",
    "fb9bb67e33772a9cc0b895e4ecf36d2cf35be8b709693c3564cea2a019fcda8e",
    561_753_746,
    packed=False,
)
URL = "https://biometrics.nist.gov/cs_links/EMNIST"
BALANCED = string.digits + string.ascii_uppercase + "abdefghnqrt"
"""Small letters that look like their capitals count as capitals."""


def _division(
    name: str, what: str, division: str, sizes: tuple[int, int], classes: str, first: int = 0
) -> EmnistSource:
    return EmnistSource(
        name=name,
        what=what,
        division=division,
        train=sizes[0],
        test=sizes[1],
        classes=tuple(classes),
        first=first,
        archive=ARCHIVE,
        system=(Path("/usr/share/datasets/emnist"),),
        urls=(URL,),
        remedy=f"on a machine with a network, curl -LO {URL}/{ARCHIVE.name}",
    )


EMNIST = (
    _division("emnist", "digits and letters", "balanced", (112_800, 18_800), BALANCED),
    _division("emnist_letters", "letters", "letters", (124_800, 20_800), string.ascii_uppercase, 1),
    _division("emnist_digits", "digits", "digits", (240_000, 40_000), string.digits),
)
"""The balanced division first; the archive is the same for all."""
