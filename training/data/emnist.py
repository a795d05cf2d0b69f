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

from training.data.archive import ArchiveSource
from training.data.dataset import Split
from training.data.fetch import DataError, RemoteFile
from training.data.idx import parse_idx

__all__ = ["EMNIST", "EmnistSource"]


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
        """See the base class."""
        with zipfile.ZipFile(path) as archive:
            return self._split(archive, path, "train"), self._split(archive, path, "test")

    def _split(self, archive: zipfile.ZipFile, path: Path, part: str) -> Split:
        count = self.train if part == "train" else self.test
        images = self._file(archive, path, f"{part}-images-idx3", (count, 28, 28))
        labels = self._file(archive, path, f"{part}-labels-idx1", (count,)).astype(np.int64)
        labels -= self.first
        if labels.size and not 0 <= labels.min() <= labels.max() < len(self.classes):
            raise DataError(
                f"{self.name} {part}: expected labels in {self.first}.."
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
            raise DataError(f"{label}: expected a complete gzip file, got: {error}") from error
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
        folder="emnist",
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
