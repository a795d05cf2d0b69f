"""A data set of files that lie on this machine or are fetched: where to look, and what to do."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path

from training.data.dataset import Dataset

__all__ = ["FileSource"]


@dataclass(frozen=True, kw_only=True)
class FileSource(ABC):
    """A data set of images in files.

    Attributes:
        name: the data set's name.
        classes: names of the labels.
        system: folders that hold the files besides the cache, such as those of packages.
        urls: addresses of folders that hold them.
        remedy: what to do where no download is possible.
    """

    name: str
    classes: tuple[str, ...]
    system: tuple[Path, ...]
    urls: tuple[str, ...]
    remedy: str

    def load(self, download: bool = True) -> Dataset:
        """Find, check and read the files. Images stay uint8.

        Args:
            download: False looks on this machine only.

        Raises:
            DataError: if a file is missing or damaged.
        """
        return self.read(self.urls if download else ())

    @abstractmethod
    def read(self, urls: tuple[str, ...]) -> Dataset:
        """The data set, its files from the cache, the system's folders or else ``urls``."""
