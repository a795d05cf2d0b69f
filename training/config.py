"""What one run is: a frozen record, checked when it is made, that TOML can hold.

`Settings` are shared by a run and a comparison of runs; `RunConfig` adds which model, recipe and
seed. Default values are not here but in `training.runs.RUNS`, one row per model. Where a run
lies (`--out`) is not part of what it is, so a finished run may be moved.
"""

from __future__ import annotations

import dataclasses
import json
import math
import tomllib
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from extensor.backends.registry import BACKENDS
from extensor.errors import unknown_name
from extensor.optim.states import STATES
from extensor.quant.recipe import FLOAT_NAMES, FloatName
from extensor.quant.recipes import get_recipe
from training.data import DATASETS, SAMPLERS
from training.optimizers import OPTIMIZERS, SCHEDULES
from training.runs import RUNS
from training.tasks import TASKS

__all__ = [
    "ACTIVATIONS",
    "RunConfig",
    "Settings",
    "check_task",
    "field_types",
    "read_toml",
    "write_toml",
]

LOSS_SCALES = ("dynamic", "off")
ACTIVATIONS: Mapping[str, FloatName | None] = {
    "recipe": None,
    **{name: name for name in FLOAT_NAMES},
}
"""What --activations takes, as `apply_recipe` takes it."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How to train, whatever the recipe and the seed."""

    dataset: str
    """Data set: images for image models, a corpus for language models (listed below)."""
    variant: str
    """Which configuration of the model, a name in models/<model>/configs.py."""
    epochs: int
    """Passes over the training images; for texts, rounds of --epoch-steps."""
    batch_size: int
    """Images or windows of text per step."""
    optimizer: str
    """sgd (with momentum), adam, adamw or lion. Master weights are float32 in every recipe."""
    lr: float
    """Peak learning rate. Low precision tolerates less of it than float32: halve it first where a
    recipe diverges."""
    momentum: float
    """Momentum of sgd; the others ignore it."""
    beta1: float
    """How slowly adam, adamw and lion forget the gradient; sgd ignores it."""
    beta2: float
    """How slowly adam and adamw forget its square, and lion its average; sgd ignores it."""
    activations: str = "recipe"
    """What results of layers are rounded to and stored as: float32, bfloat16 (as under torch's
    autocast), or what the recipe says."""
    optimizer_states: str
    """How averages are stored between steps: float32, bfloat16 or mxfp8_e4m3 (blocks of 32)."""
    weight_decay: float
    """Weight decay; adamw and lion leave biases, norms and other vectors out."""
    schedule: str
    """cosine (warm-up, then half a cosine to --final-lr) or constant (warm-up, then constant)."""
    final_lr: float
    """Learning rate at the end of the cosine, as a share of --lr."""
    warmup_epochs: float
    """Epochs over which the learning rate rises linearly from 0; fractions are fine."""
    clip_norm: float
    """Clip the global gradient norm to this; 0 clips nothing."""
    label_smoothing: float
    """Label smoothing of the cross entropy, in [0, 1)."""
    augment: str
    """What is done to training items: none; for images shift (by up to 2 pixels), flip (shifts by
    up to 4 and mirrors) or strong (also rotates and erases); for texts noise (one letter in 50)."""
    sampler: str
    """Which images an epoch takes: random (each once), sequential, or weighted (every class
    equally often, with replacement). Texts take random windows."""
    val_share: float
    """Share of the training data held out for validation, which chooses the best checkpoint and
    decides about --patience; 0 holds nothing out, and nothing is chosen."""
    loss_scale: str
    """dynamic (start at 65536, halve on non-finite gradients, double after 2000 good steps) or off
    (stay at 1). A power of two leaves MX and NVFP4 codes bit-identical; it matters for the
    ends of the scale range and for unscaled casts, and it is what skips non-finite steps."""
    patience: int
    """Stop when the validation loss has not improved for so many epochs; 0 never stops early."""
    train_limit: int
    """Train on the first N images or letters only, for a quick try; 0 takes all."""
    test_limit: int
    """Test on N images (the first) or windows of text (evenly spaced) only; 0 takes all."""
    device: str
    """cpu or cuda."""
    epoch_steps: int
    """Texts: optimizer steps between evaluations, as windows have no end. 0 for images."""
    context: int
    """Texts: tokens in a window, which is as far back as the model can look. 0 for images."""
    tokenizer: str
    """Texts: char (one token per letter) or bpe (byte-pair encoding, trained on the corpus)."""
    vocab_size: int
    """Texts: tokens that bpe makes; 0 for char and for images."""

    def __post_init__(self) -> None:
        _check_types(self)
        for field, table in (
            ("dataset", DATASETS),
            ("optimizer", OPTIMIZERS),
            ("schedule", SCHEDULES),
            ("sampler", SAMPLERS),
            ("optimizer_states", STATES),
            ("activations", ACTIVATIONS),
            ("loss_scale", LOSS_SCALES),
            ("device", BACKENDS),
        ):
            name = getattr(self, field)
            if name not in table:
                raise ValueError(unknown_name(field.replace("_", " "), name, table))
        for field in ("epochs", "batch_size"):
            _check(self, field, getattr(self, field) >= 1, "a whole number, 1 or more")
        whole = ("patience", "train_limit", "test_limit", "epoch_steps", "context", "vocab_size")
        for field in whole:
            _check(self, field, getattr(self, field) >= 0, "a whole number, 0 or more")
        _check(self, "lr", self.lr > 0 and math.isfinite(self.lr), "a positive number")
        for field in ("weight_decay", "warmup_epochs", "clip_norm"):
            value = getattr(self, field)
            _check(self, field, value >= 0 and math.isfinite(value), "a number, 0 or more")
        _check(self, "final_lr", 0 <= self.final_lr <= 1, "a number in [0, 1]")
        for field in ("momentum", "beta1", "beta2", "label_smoothing", "val_share"):
            _check(self, field, 0 <= getattr(self, field) < 1, "a number in [0, 1)")
        if self.patience and not self.val_share:
            raise ValueError(
                f"--patience: {self.patience} epochs without a better validation loss, but nothing "
                "is held out; the way out: add --val-share 0.1, or leave --patience out"
            )
        _check(
            self,
            "warmup_epochs",
            self.warmup_epochs <= self.epochs,
            f"at most the {self.epochs} epochs",
        )


def check_task(model: str, settings: Settings) -> None:
    """Refuse settings that a model's task does not know or cannot use.

    Raises:
        ValueError: on those, and for an unknown model.
    """
    if model not in RUNS:
        raise ValueError(unknown_name("model", model, RUNS))
    task = TASKS[RUNS[model].task]
    kind = DATASETS[settings.dataset].kind
    if kind != task.kind:
        fit = [name for name, row in DATASETS.items() if row.kind == task.kind]
        raise ValueError(
            f"--dataset: wanted {task.kind} for {model}, got {settings.dataset!r}, which is "
            f"{kind}; the way out: one of {', '.join(fit)}"
        )
    if settings.augment not in task.augmentations:
        raise ValueError(
            unknown_name(f"augmentation of {task.kind}", settings.augment, task.augmentations)
        )
    foreign = {name for other in TASKS.values() for name in other.own} - set(task.own)
    for name in sorted(foreign):
        if getattr(settings, name):
            raise ValueError(
                f"--{name.replace('_', '-')}: {model} learns from {task.kind} and has no use for "
                "it; the way out: leave it out"
            )
    task.check(settings)


@dataclass(frozen=True, kw_only=True)
class RunConfig(Settings):
    """One training run.

    Attributes:
        model: a row of `RUNS`.
    """

    model: str
    recipe: str
    """Which precision each GEMM operand gets, a name in extensor.RECIPES (listed above)."""
    seed: int
    """Seed of the weights, the order of the images and the stochastic rounding."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_task(self.model, self)
        get_recipe(self.recipe)
        _check(self, "seed", 0 <= self.seed < 1 << 64, "a whole number in 0..2**64 - 1")

    @property
    def label(self) -> str:
        """Short name of the run."""
        return f"{self.model}-{self.dataset}-{self.recipe}-s{self.seed}"

    def as_dict(self) -> dict[str, Any]:
        """The fields by name."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(RunConfig)}


def _check(config: Settings, field: str, good: bool, wanted: str) -> None:
    if not good:
        flag = "--" + field.replace("_", "-")
        raise ValueError(f"{flag}: wanted {wanted}, got {getattr(config, field)!r}")


def field_types(cls: type) -> dict[str, Any]:
    """Each field's type, Optional unwrapped."""
    hints = typing.get_type_hints(cls)
    out = {}
    for field in dataclasses.fields(cls):
        hint = hints[field.name]
        if isinstance(hint, types.UnionType):
            hint = next(t for t in typing.get_args(hint) if t is not type(None))
        out[field.name] = hint
    return out


def _check_types(config: Settings) -> None:
    """TOML and scripts can hand over anything; whole numbers serve as floats."""
    for name, kind in field_types(type(config)).items():
        value = getattr(config, name)
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            object.__setattr__(config, name, float(value))
        elif kind in (int, float, str, bool) and type(value) is not kind:
            raise TypeError(f"{name}: wanted {kind.__name__}, got {value!r}")


def write_toml(values: Mapping[str, Any], header: str = "") -> str:
    """Flat TOML text of strings, numbers and booleans (None is left out)."""
    lines = [f"# {line}" for line in header.splitlines()]
    for name, value in values.items():
        if value is None:
            continue
        if isinstance(value, bool):
            text = str(value).lower()
        elif isinstance(value, str):
            text = json.dumps(value)  # a JSON string is a TOML basic string
        else:
            text = repr(value)
        lines.append(f"{name} = {text}")
    return "\n".join(lines) + "\n"


def read_toml(path: Path, known: typing.Iterable[str]) -> dict[str, Any]:
    """Read flat TOML; keys may be written with - or _.

    Raises:
        ValueError: if the file is missing, is not TOML, or has a key that is not ``known``; near
            ones are listed.
    """
    try:
        with path.open("rb") as file:
            content = tomllib.load(file)
    except OSError as error:
        raise ValueError(f"--config {path}: cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"--config {path}: wanted TOML, got: {error}") from error
    names = set(known)
    values = {}
    for key, value in content.items():
        name = key.replace("-", "_")
        if name not in names:
            raise ValueError(f"--config {path}: {unknown_name('setting', key, names)}")
        values[name] = value
    return values
