"""The language model of a run, from its checkpoint."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from extensor import models
from extensor.io import load_checkpoint
from extensor.nn import Module, apply_recipe

from .config import ACTIVATIONS
from .rundir import LAST, UsageError
from .runs import RUNS
from .text.tokenizers import Tokenizer, TokenizerError, from_state

__all__ = ["load_language_model"]


def load_language_model(path: Path) -> tuple[Module, Tokenizer, int]:
    """The model of a checkpoint under its recipe, its tokenizer, and its context.

    Raises:
        UsageError: if the file is missing, or a checkpoint of something else.
        CheckpointError: if it is damaged.
    """
    source, path = path, path / LAST if path.is_dir() else path
    if not path.is_file() or path.suffix != ".safetensors":
        raise UsageError(
            f"{source}: no language model; expected a folder with config.json, a .gguf file, or a "
            f"run of `extensor train gpt`, its folder or {LAST}"
        )
    checkpoint = load_checkpoint(path)
    run, task = checkpoint.metadata.get("config"), checkpoint.metadata.get("task")
    kind = run.get("model") if isinstance(run, dict) else None
    causal = kind in RUNS and RUNS[kind].task == "causal"
    if run is None or not causal or not isinstance(task, dict):
        held = f"a run of {kind!r}" if kind else "no run"
        raise UsageError(
            f"{path}: expected the checkpoint of a language model, got one that holds {held}; the "
            "way out: one that `extensor train gpt` wrote"
        )
    try:
        config = models.config(run["model"], run["variant"], **checkpoint.metadata["model"])
        tokenizer = from_state(task.get("tokenizer"))
        if tokenizer.size != config.vocab:
            raise TokenizerError(
                f"expected a tokenizer of the model's {config.vocab} tokens, got one of "
                f"{tokenizer.size}"
            )
        model = models.build(run["model"], config, np.random.default_rng(run["seed"]))
        parts = [(*name.partition("."), values) for name, values in checkpoint.tensors.items()]
        model.load_state_dict({name: values for top, _, name, values in parts if top == "model"})
        stored_as = ACTIVATIONS[run.get("activations", "recipe")]
        apply_recipe(model, run["recipe"], run["seed"], stored_as)
        return model.eval(), tokenizer, run["context"]
    except (KeyError, TypeError, ValueError) as error:
        what = f"no {error}" if isinstance(error, KeyError) else error
        raise UsageError(
            f"{path}: {what}; the way out: the checkpoint as its run wrote it, and the version of "
            "extensor that wrote it"
        ) from error
