"""``extensor advise MODEL --text FILE``: a format for each layer, by what it does to the loss."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import track

from extensor.autograd.tensor import ExTensor
from extensor.cli import language
from extensor.cli.sheet import CommandError, Sheet, read_text, shape_text
from extensor.nn.linear import GemmLayer
from extensor.nn.mixed import LossChange, choose_formats, loss_changes
from extensor.nn.module import Module
from extensor.nn.ptq import dequantize_model
from extensor.nn.recipe import gemm_layers
from extensor.ops.class_loss import cross_entropy
from extensor.quant.spec import QuantSpec

__all__ = ["ModelAdvice", "advise_model", "text_loss"]

WINDOWS, LENGTH = 8, 128
"""Windows of the text whose gradients are taken, and their tokens."""


@dataclasses.dataclass(frozen=True)
class ModelAdvice:
    """A format for each layer of a model.

    Attributes:
        path: of the model.
        names: what each spec is called.
        layers: by path.
        changes: the predicted change of the loss of each layer in each format.
        chosen: the spec of each layer.
    """

    path: Path
    names: dict[QuantSpec, str]
    layers: dict[str, GemmLayer]
    changes: Sequence[LossChange]
    chosen: dict[str, QuantSpec]

    def total(self, specs: dict[str, QuantSpec]) -> tuple[float, float]:
        """Bits of each weight, and the predicted change of the loss."""
        rows = [row for row in self.changes if specs[row.path] is row.spec]
        values = sum(self.layers[row.path].weight.size for row in rows)
        return 8 * sum(row.nbytes for row in rows) / values, sum(row.change for row in rows)

    def as_json(self) -> dict[str, Any]:
        """Everything, as JSON has it."""
        bits, change = self.total(self.chosen)
        return {
            "model": str(self.path),
            "bits_per_weight": bits,
            "predicted_loss_change": change,
            "layers": {
                path: {
                    "format": self.names[spec],
                    "predicted": {
                        self.names[row.spec]: {"nbytes": row.nbytes, "loss_change": row.change}
                        for row in self.changes
                        if row.path == path
                    },
                }
                for path, spec in self.chosen.items()
            },
        }

    def sheets(self) -> list[Sheet]:
        """A table of the layers, and one that compares the mix with each format alone."""
        rows = []
        for path, spec in self.chosen.items():
            own = [row for row in self.changes if row.path == path]
            predicted = (f"{row.change:.5f}" for row in own)
            shape = shape_text(self.layers[path].weight.shape)
            rows.append((path, shape, *predicted, self.names[spec]))
        wholes: list[tuple[str, dict[str, QuantSpec]]] = [
            (name, dict.fromkeys(self.chosen, spec)) for spec, name in self.names.items()
        ]
        compared = []
        for name, specs in [*wholes, ("the mix", self.chosen)]:
            bits, change = self.total(specs)
            compared.append((name, f"{bits:.3f}", f"{change:.4f}"))
        columns = ("layer", "shape", *self.names.values(), "advice")
        return [
            Sheet(
                f"{self.path}: predicted change of the loss, nats per token", columns, tuple(rows)
            ),
            Sheet("All layers", ("formats", "bits per weight", "predicted"), tuple(compared)),
        ]


def text_loss(model: Module, window: ExTensor) -> ExTensor:
    """The mean loss of a window's tokens but the first, each predicted from those before it."""
    scores = model(window[:, :-1])
    return cross_entropy(scores.reshape((-1, scores.shape[-1])), window[:, 1:].reshape((-1,)))


def advise_model(path: Path, text: Path, specs: dict[QuantSpec, str], bits: float) -> ModelAdvice:
    """Measure each layer in each format, and choose the best mix for a size.

    Raises:
        CommandError: for a model or text that cannot be used, or a size below the smallest format.
    """
    content = read_text(text)
    loaded = language.load_language_model(path)
    try:
        tokens = loaded.tokenizer.encode(content)
    except ValueError as error:
        raise CommandError(f"{text}: {error}") from error
    length = min(LENGTH, (loaded.context or LENGTH + 1) - 1)
    if len(tokens) < WINDOWS * (length + 1):
        raise CommandError(
            f"{text}: expected {WINDOWS * (length + 1):,} tokens or more, got {len(tokens):,}"
        )
    starts = np.linspace(0, len(tokens) - length - 1, WINDOWS).astype(int)
    windows = [ExTensor.from_numpy(tokens[None, s : s + length + 1].copy()) for s in starts]
    model = dequantize_model(loaded.model)
    console = Console(stderr=True)
    hidden = not console.is_terminal
    watched = track(windows, "gradients", console=console, transient=True, disable=hidden)
    changes = loss_changes(model, watched, text_loss, list(specs), length)
    layers = dict(gemm_layers(model))
    size = sum(layers[path].weight.size for path in {row.path for row in changes})
    try:
        chosen = choose_formats(changes, int(bits * size / 8))
    except ValueError as error:
        raise CommandError(f"--bits {bits}: {error}") from error
    return ModelAdvice(path, specs, {path: layers[path] for path in chosen}, changes, chosen)
