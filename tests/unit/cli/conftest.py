"""A file of weights for the commands."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    path = tmp_path / "weights.npz"
    np.savez(
        path,
        w=rng.standard_normal((8, 100), dtype=np.float32),
        double=rng.standard_normal((4, 32)),
        steps=np.arange(3),
        scale=np.float32(3.0),
    )
    return path
