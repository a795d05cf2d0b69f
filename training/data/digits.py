"""The offline default: scikit-learn's 1,797 real handwritten digits of 8x8 pixels.

Enlarged to 28x28 so that LeNet-5 fits, by bilinear interpolation between pixel centres
(`resize_matrix`). Values 0..16 become 0..1.

The split is fixed and needs no random numbers: of each class, in file order, 36 evenly spaced
images are test (image floor((j + 1/2) * n / 36) for j in 0..35), the rest train: 1,437 + 360. The
same people write in both, so accuracy is higher than on digits from new hands.
"""

from __future__ import annotations

import hashlib

import numpy as np

from ..extras import missing
from .dataset import Dataset, Split, evenly_spaced
from .fetch import DataError
from .transforms import resize_matrix

__all__ = ["enlarge", "load_digits", "stratified_split"]

SIDE = 28
TEST_PER_CLASS = 36
SHA256 = "8f26b2bd9d135c256808f68f14fdabddde6d9c7f869ae419704b051f0f14b3b3"
"""Of the 1797 * 64 pixels as bytes."""


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


def load_digits(download: bool = True) -> Dataset:
    """The digits, 1,437 to train on and 360 to test; nothing is ever downloaded.

    Raises:
        DataError: if scikit-learn is missing, or its digits are not the ones known here.
    """
    if (message := missing("data set 'digits'", "sklearn")) is not None:
        raise DataError(message)
    from sklearn.datasets import load_digits as sklearn_digits

    raw = sklearn_digits()
    pixels = raw.images.astype(np.uint8)
    digest = hashlib.sha256(pixels.tobytes()).hexdigest()
    if digest != SHA256:
        raise DataError(
            f"scikit-learn's digits: expected SHA-256 {SHA256} of the pixels, got {digest}; "
            "is this another version of the data? reinstall scikit-learn"
        )
    images = (enlarge(pixels, SIDE) / np.float32(16))[:, None]
    labels = raw.target.astype(np.int64)
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
