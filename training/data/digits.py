"""The default: 1,797 real handwritten digits of 8x8 pixels, in a file beside this one.

They are the test set of "Optical Recognition of Handwritten Digits" (E. Alpaydin and C. Kaynak,
UCI Machine Learning Repository, 1998, doi:10.24432/C50P49, CC BY 4.0), in its order.

Enlarged to 28x28 so that LeNet-5 fits, by bilinear interpolation between pixel centres
(`resize_matrix`). Values 0..16 become 0..1.

The split is fixed and needs no random numbers: of each class, in file order, 36 evenly spaced
images are test (image floor((j + 1/2) * n / 36) for j in 0..35), the rest train: 1,437 + 360. The
same people write in both, so accuracy is higher than on digits from new hands.
"""

from __future__ import annotations

from importlib.resources import files

import numpy as np

from .dataset import Dataset, Split, evenly_spaced
from .transforms import resize_matrix

__all__ = ["enlarge", "load_digits", "read_digits", "stratified_split"]

SIDE = 28
TEST_PER_CLASS = 36


def enlarge(images: np.ndarray, side: int) -> np.ndarray:
    """Bilinear resize of (N, h, h) to (N, side, side), float32."""
    weights = resize_matrix(images.shape[1], side)
    return (weights @ images.astype(np.float64) @ weights.T).astype(np.float32)


def stratified_split(labels: np.ndarray, per_class: int) -> np.ndarray:
    """True where an image is test: ``per_class`` evenly spaced images of each class."""
    test = np.zeros(len(labels), dtype=bool)
    for label in np.unique(labels):
        test[evenly_spaced(np.flatnonzero(labels == label), per_class)] = True
    return test


def read_digits() -> tuple[np.ndarray, np.ndarray]:
    """The pixels, (1797, 8, 8) uint8 of 0..16, and the labels, (1797,) int64."""
    with files(__package__).joinpath("digits.npz").open("rb") as file, np.load(file) as arrays:
        return arrays["pixels"], arrays["labels"].astype(np.int64)


def load_digits(download: bool = True) -> Dataset:
    """The digits, 1,437 to train on and 360 to test; nothing is ever downloaded."""
    pixels, labels = read_digits()
    images = (enlarge(pixels, SIDE) / np.float32(16))[:, None]
    test = stratified_split(labels, TEST_PER_CLASS)
    train_images = images[~test]
    return Dataset(
        "digits",
        Split(train_images, labels[~test]),
        Split(images[test], labels[test]),
        tuple("0123456789"),
        float(train_images.mean(dtype=np.float64)),
        float(train_images.std(dtype=np.float64)),
    )
