"""Generate text with a trained language model, one sampled token after the other.

Top-k sampling is Fan et al., arXiv 1805.04833, section 4.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import tyro

from extensor import ExTensor, models, no_grad
from extensor.io import load_checkpoint
from extensor.nn import Module, apply_recipe

from .config import ACTIVATIONS
from .rundir import LAST, UsageError
from .runs import RUNS
from .text.tokenizers import Tokenizer, TokenizerError, from_state

__all__ = [
    "GenerateArgs",
    "Sampling",
    "generate_text",
    "load_language_model",
    "sample_token",
    "sample_tokens",
]


@dataclass(frozen=True, kw_only=True)
class GenerateArgs:
    """Flags of `generate`: the text to write, and the model that writes it."""

    checkpoint: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="CHECKPOINT")]
    """A checkpoint of a language model's run, such as runs/gpt/checkpoint.safetensors, or the run's
    folder."""
    prompt: str = "\n"
    """The text to go on from; of a long one the model sees what its context holds."""
    tokens: int = 500
    """How many tokens to write."""
    temperature: float = 0.8
    """What scores are divided by before the draw; 0 always takes the likeliest token."""
    top_k: int = 200
    """Draw among the likeliest tokens only; 0 draws among all."""
    seed: int = 0
    """Seed of the draws."""

    def __post_init__(self) -> None:
        for name in ("tokens", "top_k", "seed"):
            if getattr(self, name) < 0:
                flag = name.replace("_", "-")
                got = getattr(self, name)
                raise UsageError(f"--{flag}: expected a whole number, 0 or more, got {got}")
        if not 0.0 <= self.temperature < math.inf:
            raise UsageError(
                f"--temperature: expected a number, 0 or more, got {self.temperature!r}"
            )
        if not self.prompt:
            raise UsageError("--prompt: expected at least one letter, got an empty text")


def load_language_model(path: Path) -> tuple[Module, Tokenizer, int]:
    """The model of a checkpoint under its recipe, its tokenizer, and its context.

    Raises:
        UsageError: if the file is missing, or a checkpoint of something else.
        CheckpointError: if it is damaged.
    """
    path = path / LAST if path.is_dir() else path
    if not path.is_file():
        raise UsageError(
            f"{path}: not there; the way out: the {LAST} or the folder of a run of "
            "`extensor train gpt`"
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


@dataclass(frozen=True)
class Sampling:
    """How many tokens to draw, and how.

    Attributes:
        count: how many.
        temperature: what scores are divided by; 0 takes the best, the first of equals.
        top_k: draw among so many best scores; 0 among all. Of scores equal to the last that
            counts, those with lower numbers count.
        seed: of the draws.
    """

    count: int
    temperature: float
    top_k: int
    seed: int


def sample_token(scores: np.ndarray, how: Sampling, rng: np.random.Generator) -> int:
    """Draw a token from softmax(scores / temperature), of the ``top_k`` best scores if not 0.

    Raises:
        UsageError: for scores (V,) that are not finite.
    """
    if not np.isfinite(scores).all():
        raise UsageError(
            "expected finite scores from the model, got NaN or infinity: its training diverged; "
            "the way out: checkpoint-best.safetensors, or a run with a lower --lr"
        )
    if how.temperature == 0.0:
        return int(scores.argmax())
    best = np.argsort(-scores, kind="stable")[: how.top_k or None]
    # Less the best one first, so that a small temperature cannot overflow.
    weights = np.exp((scores[best] - scores[best[0]]).astype(np.float64) / how.temperature)
    sums = np.cumsum(weights)
    return int(best[np.searchsorted(sums, rng.random() * sums[-1], side="right")])


def generate_text(args: GenerateArgs) -> str:
    """The text that follows the prompt.

    Raises:
        UsageError: for a checkpoint of no language model, or a prompt it has no tokens for.
        CheckpointError: if the checkpoint is damaged.
    """
    model, tokenizer, context = load_language_model(args.checkpoint)
    try:
        tokens: list[Any] = tokenizer.encode(args.prompt).tolist()
    except TokenizerError as error:
        raise UsageError(f"--prompt: {error}") from error
    how = Sampling(args.tokens, args.temperature, args.top_k, args.seed)
    return tokenizer.decode(sample_tokens(model, tokens, context, how))


def sample_tokens(
    model: Module, tokens: list[int], context: int, how: Sampling, device: str = "cpu"
) -> list[int]:
    """The tokens that a model draws after others.

    Raises:
        UsageError: if the model's scores are not finite.
    """
    tokens, start, rng = list(tokens), len(tokens), np.random.default_rng(how.seed)
    with no_grad():
        for _ in range(how.count):
            seen = ExTensor.from_numpy(np.array([tokens[-context:]], np.int64)).to(device)
            scores = model(seen).to("cpu").numpy()[0, -1]
            tokens.append(sample_token(scores, how, rng))
    return tokens[start:]
