"""Small runs for the training tests."""

from __future__ import annotations

import io
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

import extensor.training.text.encoded as encoded
from extensor.quant.array import QuantArray
from extensor.training.callbacks import Callback
from extensor.training.config import RunConfig
from extensor.training.data import fetch
from extensor.training.data.corpora import Corpus
from extensor.training.loop import Trainer
from extensor.training.runs import defaults

Make = Callable[..., RunConfig]
QUIET = Console(file=io.StringIO(), width=100)
SMALL = {
    "epochs": 2,
    "batch_size": 16,
    "train_limit": 96,
    "test_limit": 60,
    "lr": 0.02,
    "variant": "mlp",
}


@pytest.fixture
def small() -> Make:
    """Makes configurations of a perceptron on 96 digits: 2 epochs of 6 steps."""

    def make(**changes: Any) -> RunConfig:
        return RunConfig(**{**defaults("mlp"), **SMALL, **changes})

    return make


@pytest.fixture
def one_text(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Makes one text the corpus that every run of a language model loads."""
    return lambda text: monkeypatch.setattr(
        encoded, "load_dataset", lambda name: Corpus.of(name, [text])
    )


def fitted(config: RunConfig, out: Path, *callbacks: Callback) -> Trainer:
    """A run that has trained to its end."""
    out.mkdir(exist_ok=True)
    trainer = Trainer(config, out, callbacks=callbacks)
    trainer.fit()
    return trainer


def weights(trainer: Trainer) -> dict[str, bytes]:
    """Every parameter and buffer, bit for bit."""
    with trainer.whole():
        return {name: _bits(value) for name, value in trainer.model.state_dict().items()}


def _bits(stored: Any) -> bytes:
    parts = stored.parts.values() if isinstance(stored, QuantArray) else [stored]
    return b"".join(part.tobytes() for part in parts)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of data sets; a blank stands in its path."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "a cache"))
    return tmp_path / "a cache" / "extensor"


@pytest.fixture
def offline(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No network, no cache and no file of the system."""

    def refuse(*args: object, **kwargs: object) -> object:
        raise OSError("no network here")

    monkeypatch.setattr(fetch.urllib.request, "urlopen", refuse)
    monkeypatch.setattr(Path, "is_file", lambda self: False)


def idx_bytes(array: np.ndarray) -> bytes:
    """An array of bytes as an IDX file."""
    return struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.tobytes()
