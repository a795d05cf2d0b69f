"""One training step on the CPU, ours under a recipe or torch's, as contestants of a benchmark."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import extensor as et
from extensor.config import num_threads
from extensor.nn.recipe import apply_recipe
from extensor.optim import clip_grad_norm

__all__ = ["our_step", "torch_step"]


def our_step(
    model: Any,
    recipe: str,
    optimizer: Any,
    inputs: np.ndarray,
    labels: np.ndarray,
    clip: float = 0.0,
) -> Callable[[], None]:
    """Forward, loss, backward, clipping if asked for, and update.

    Args:
        model: whose scores' last axis is the classes.
        recipe: how it computes.
        optimizer: makes one of the model's parameters.
        inputs: of the batch.
        labels: likewise.
        clip: largest norm of the gradient; 0: not clipped.
    """
    state = apply_recipe(model, recipe)
    update = optimizer(model.parameters())
    x, y = et.from_numpy(inputs), et.from_numpy(labels.reshape(-1))

    def step() -> None:
        state.step += 1
        update.zero_grad()
        scores = model(x)
        if scores.ndim > 2:
            scores = scores.reshape(-1, scores.shape[-1])
        et.cross_entropy(scores, y).backward()
        if clip:
            clip_grad_norm(update.params, clip)
        update.step()

    return step


def torch_step(
    model: Any, optimizer: Any, inputs: np.ndarray, labels: np.ndarray, clip: float = 0.0
) -> Callable[[], None]:
    """The same of torch's, on as many threads."""
    import torch

    torch.set_num_threads(num_threads())
    update = optimizer(model.parameters())
    x, y = torch.from_numpy(inputs), torch.from_numpy(labels.reshape(-1))

    def step() -> None:
        update.zero_grad()
        scores = model(x)
        if scores.ndim > 2:
            scores = scores.flatten(0, -2)
        torch.nn.functional.cross_entropy(scores, y).backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        update.step()

    return step
