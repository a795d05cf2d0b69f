"""The language model of a run, from its checkpoint."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, NotRequired, TypedDict

import numpy as np

from extensor import models
from extensor.distributed.checkpoint import INDEX
from extensor.errors import layout_error, unknown_name
from extensor.models.sizes import check_sizes
from extensor.nn import Module, apply_recipe, cast_weights
from extensor.nn.init import Skeleton
from extensor.schema import SchemaError, check, record

from .checkpoints import read_checkpoint
from .rundir import LAST, UsageError, find_checkpoint
from .runs import RUNS
from .settings import ACTIVATIONS, WEIGHTS
from .text.tokenizers import Tokenizer, TokenizerError, from_state

__all__ = ["load_language_model"]


class _Settings(TypedDict):
    model: str
    variant: str
    recipe: str
    seed: int
    context: int
    activations: NotRequired[str]
    weights: NotRequired[str]


class _Metadata(TypedDict):
    config: _Settings
    model: dict[str, Any]


def load_language_model(path: Path) -> tuple[Module, Tokenizer, int]:
    """The model of a checkpoint under its recipe, its tokenizer, and its context.

    Raises:
        UsageError: if the file is missing, or a checkpoint of something else.
        CheckpointError: if it is damaged.
    """
    source = path
    if path.is_dir() and not (path / INDEX).is_file():
        path = find_checkpoint(path) or path / LAST
    if not path.is_dir() and (not path.is_file() or path.suffix != ".safetensors"):
        raise UsageError(
            f"{source}: no language model; expected a folder with config.json, a .gguf file, or a "
            f"run of `extensor train gpt`, its folder or {LAST}"
        )
    checkpoint = read_checkpoint(path)
    run, task = checkpoint.metadata.get("config"), checkpoint.metadata.get("task")
    kind = run.get("model") if isinstance(run, dict) else None
    causal = isinstance(kind, str) and kind in RUNS and RUNS[kind].task == "causal"
    if run is None or not causal or not isinstance(task, dict):
        held = f"a run of {kind!r:.60}" if kind else "no run"
        raise UsageError(
            f"{path}: expected the checkpoint of a language model, got one that holds {held}; the "
            "way out: one that `extensor train gpt` wrote"
        )
    try:
        content: _Metadata = check(checkpoint.metadata, _Metadata)
        settings = content["config"]
        activations = settings.get("activations", "recipe")
        if activations not in ACTIVATIONS:
            raise SchemaError(unknown_name("activations", activations, ACTIVATIONS))
        row = models.config(settings["model"], settings["variant"])
        config = record(type(row), dataclasses.asdict(row) | content["model"], "model")
        tokenizer = from_state(task.get("tokenizer"))
        if tokenizer.size != config.vocab:
            raise TokenizerError(
                f"expected a tokenizer of the model's {config.vocab} tokens, got one of "
                f"{tokenizer.size}"
            )
        if not 1 <= settings["context"] <= config.context:
            raise SchemaError(f"context: expected 1..{config.context}, got {settings['context']}")
        parts = [(*name.partition("."), values) for name, values in checkpoint.tensors.items()]
        weights = {name: values for top, _, name, values in parts if top == "model"}
        check_sizes(dataclasses.asdict(config), weights.values())
        model = _checked_model(settings["model"], config, weights, settings.get("weights"))
        apply_recipe(model, settings["recipe"], settings["seed"], ACTIVATIONS[activations])
        return model.eval(), tokenizer, settings["context"]
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"{path}: {error}; the way out: the checkpoint as its run wrote it, and the version of "
            "extensor that wrote it"
        ) from error


def _checked_model(
    name: str, config: Any, weights: dict[str, Any], stored: str | None = None
) -> Module:
    """The model with these weights, built when their names and shapes are the expected ones.

    ``stored``: as `cast_weights` takes it; None: as the model is built.
    """
    if stored is not None and stored not in WEIGHTS:
        raise SchemaError(unknown_name("weights", stored, WEIGHTS))
    skeleton = models.build(name, config, Skeleton())
    tensors = (*skeleton.named_parameters(), *skeleton.named_buffers())
    expected = {path: _float32(tensor) for path, tensor in tensors}
    given = {path: _float32(values) for path, values in weights.items()}
    message = layout_error("the model's state", expected, given)
    if message is not None:
        raise SchemaError(message)
    model = models.build(name, config, np.random.default_rng(0))
    if stored is not None:
        cast_weights(model, stored)
    model.load_state_dict(weights)  # refuses other dtypes
    return model


def _float32(values: Any) -> Any:
    """Zeros of its shape, in no memory."""
    return np.broadcast_to(np.float32(0), values.shape)
