"""How to train: what a run and a comparison of runs share.

A field's metadata holds its help text and its check. A field without a default gets its value from
the model's row in `training.runs`.
"""

from __future__ import annotations

import dataclasses
import math
import typing
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from extensor.backends.registry import BACKENDS
from extensor.distributed import GRAD_COMM, SHARDS
from extensor.errors import unknown_name
from extensor.nn.recompute import parse_recompute
from extensor.optim.states import STATES
from extensor.quant.recipe import FLOAT_NAMES, FloatName
from extensor.quant.saved import parse_saved

from .choices import OPTIMIZERS, SCHEDULES, parse_options
from .data import AUGMENTATIONS, DATASETS, SAMPLERS
from .runs import RUNS
from .text.augment import TEXT_AUGMENTATIONS
from .text.tokenizers import TOKENIZERS

__all__ = ["ACTIVATIONS", "SEED", "WEIGHTS", "Settings", "setting"]

ACTIVATIONS: Mapping[str, FloatName | None] = {
    "recipe": None,
    **{name: name for name in FLOAT_NAMES},
}
"""What ``--activations`` takes, as `apply_recipe` takes it."""

AUGMENTATIONS_OF: Mapping[str, Collection[str]] = {
    "images": AUGMENTATIONS,
    "text": TEXT_AUGMENTATIONS,
}
TEXT_ONLY = ("context", "epoch_steps", "tokenizer", "vocab_size")
"""Settings that images have no use for: 0 or "" for them."""

WEIGHTS = (*FLOAT_NAMES, "mxint8", "mxfp8_e4m3")
"""What ``--weights`` takes."""
UPDATES = ("after_backward", "in_backward")
"""What ``--update`` takes."""
GRAD_ROUNDING = ("stochastic", "error_feedback")
"""What ``--grad-rounding`` takes."""

Check = tuple[Callable[[Any], bool], str]
"""Whether a value will do, and what is expected."""

AT_LEAST_1: Check = (lambda v: v >= 1, "a whole number, 1 or more")
AT_LEAST_0: Check = (lambda v: v >= 0, "a whole number, 0 or more")
POSITIVE: Check = (lambda v: 0 < v < math.inf, "a positive number")
NOT_NEGATIVE: Check = (lambda v: 0 <= v < math.inf, "a number, 0 or more")
SHARE: Check = (lambda v: 0 <= v < 1, "a number in [0, 1)")
SHARE_OR_ALL: Check = (lambda v: 0 <= v <= 1, "a number in [0, 1]")
SEED: Check = (lambda v: 0 <= v < 1 << 64, "a whole number in 0..2**64 - 1")


def setting(
    doc: str,
    default: Any = dataclasses.MISSING,
    *,
    check: Check | None = None,
    among: Collection[str] = (),
) -> Any:
    """A dataclass field with a help text and a check: a `Check`, or the names that are allowed."""
    return dataclasses.field(default=default, metadata={"doc": doc, "check": check, "among": among})


def _flag(name: str) -> str:
    """Name of the command-line flag that sets a field."""
    return "--" + name.replace("_", "-")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How to train, whatever the recipe and the seed."""

    dataset: str = setting(
        "Data set (listed above): images for image models, a corpus for language models.",
        among=DATASETS,
    )
    variant: str = setting("Configuration of the model: a name in models/<model>/configs.py.")
    epochs: int = setting(
        "Passes over the training images; for texts, rounds of --epoch-steps.", check=AT_LEAST_1
    )
    batch_size: int = setting("Images or windows of text in a step.", check=AT_LEAST_1)
    micro_batches: int = setting(
        "Parts that a batch is computed in, one after the other or on several ranks; as many ranks "
        "can share it. Batch norms see a part. 0 is one for each rank.",
        0,
        check=AT_LEAST_0,
    )
    grad_comm: str = setting(
        "How the gradients of micro-batches and ranks are summed: float32; bfloat16, mxint8 or "
        "mxint16 (fewer bytes between ranks); exact (integers: a run of N micro-batches has the "
        "same weights, bit for bit, on any number of ranks).",
        "float32",
        among=GRAD_COMM,
    )
    grad_rounding: str = setting(
        "How mxint8 and mxint16 round: stochastic; or error_feedback, to nearest, and what is left "
        "over is added to the next step's gradients. Then each rank keeps 4 bytes a value more, "
        "and checkpoints do.",
        "stochastic",
        among=GRAD_ROUNDING,
    )
    shard: str = setting(
        "What each rank keeps its part of alone: none; states (of the optimizer: ZeRO-1); "
        "gradients (and states: ZeRO-2); parameters (and both: ZeRO-3, gathered layer by layer). "
        "The weights are the same in all four.",
        "none",
        among=SHARDS,
    )
    tensor_parallel: int = setting(
        "How many neighbouring ranks share each transformer block; each has some of its heads and "
        "hidden values. Such groups of ranks share the micro-batches, one or more for each group.",
        1,
        check=AT_LEAST_1,
    )
    optimizer: str = setting(
        "Optimizer (listed above). Its master weights are float32 in every recipe (see --weights).",
        "sgd",
        among=OPTIMIZERS,
    )
    optimizer_options: str = setting(
        "Further options of the optimizer (listed above), such as nesterov=true,eps=1e-6.", ""
    )
    lr: float = setting(
        "Peak learning rate. Low precision tolerates less of it than float32: halve it first where "
        "a recipe diverges.",
        check=POSITIVE,
    )
    momentum: float = setting("Momentum of sgd, rmsprop, lars and muon.", 0.9, check=SHARE)
    beta1: float = setting(
        "Decay of the average of gradients in adam, adamw and lion.", 0.9, check=SHARE
    )
    beta2: float = setting(
        "Decay of the average of squares in adam and adamw; of the momentum in lion.",
        0.999,
        check=SHARE,
    )
    activations: str = setting(
        "Format that layers' results are rounded to and stored in: float32, bfloat16 (as under "
        "torch's autocast), or what the recipe says.",
        "recipe",
        among=ACTIVATIONS,
    )
    optimizer_states: str = setting(
        "Format of the optimizer's averages between steps: float32, bfloat16 or mxfp8_e4m3 "
        "(blocks of 32).",
        "float32",
        among=STATES,
    )
    weights: str = setting(
        "Format of matrices between steps: float32; or bfloat16, mxint8 or mxfp8_e4m3 (blocks of "
        "32), where each update is rounded into them stochastically, no other copy is kept, and "
        "their gradients are bfloat16. Blocks go with models without convolutions, and not with "
        "--graph.",
        "float32",
        among=WEIGHTS,
    )
    update: str = setting(
        "When weights are updated: after_backward; or in_backward, each as soon as its gradient is "
        "complete, so that no full set of gradients is held. That goes with --clip-norm 0, "
        "--loss-scale off, one micro-batch on one rank, and any optimizer but muon.",
        "after_backward",
        among=UPDATES,
    )
    saved: str = setting(
        "How what norms, activations, attention and convolutions keep for backward is stored: "
        "float32 (as it is), bfloat16 or blocks such as mxfp8_e4m3, with ~ rounded stochastically; "
        "or rules [PATH:]SLOT=FORMAT of slots such as norm, activation, gate, up, qkv and o: "
        "norm=bfloat16,blocks.*:gate=mxfp4~.",
        "float32",
    )
    recompute: str = setting(
        "Parts of the model that keep their input alone and run again in the backward pass, by "
        "globs on their paths: blocks.*. With =cheap, as in blocks.*=cheap, only operations that "
        "are no products run again. The gradients are the same.",
        "",
    )
    weight_decay: float = setting(
        "Weight decay. adamw, lion, lars and muon leave out biases, norms and other vectors.",
        0.0,
        check=NOT_NEGATIVE,
    )
    schedule: str = setting(
        "Learning-rate schedule (listed above), after --warmup-epochs of linear warm-up.",
        "cosine",
        among=SCHEDULES,
    )
    schedule_options: str = setting(
        "Options of the schedule (listed above), such as every=3ep,gamma=0.5. Counts are "
        "optimizer steps; 3ep means three epochs; + joins several: milestones=3ep+6ep.",
        "",
    )
    final_lr: float = setting(
        "Learning rate at the end of the schedule, as a share of --lr.", 0.0, check=SHARE_OR_ALL
    )
    warmup_epochs: float = setting(
        "Epochs over which the learning rate rises linearly from 0; fractions are fine.",
        0.5,
        check=NOT_NEGATIVE,
    )
    clip_norm: float = setting(
        "Clip the global gradient norm to this; 0 clips nothing.", 0.0, check=NOT_NEGATIVE
    )
    label_smoothing: float = setting(
        "Label smoothing of the cross entropy, in [0, 1).", 0.0, check=SHARE
    )
    augment: str = setting(
        "Augmentation of the training data: none; for images shift (by up to 2 pixels), flip "
        "(shifts by up to 4 and mirrors) or strong (also rotates and erases); for texts noise (one "
        "letter in 50).",
        "none",
    )
    sampler: str = setting(
        "Images of an epoch: random (each once), sequential, or weighted (every class equally "
        "often, with replacement). Texts take random windows.",
        "random",
        among=SAMPLERS,
    )
    val_share: float = setting(
        "Share of the training data held out for validation. It chooses the best checkpoint and "
        "decides about --patience. 0 holds nothing out, and nothing is chosen.",
        0.0,
        check=SHARE,
    )
    loss_scale: str = setting(
        "dynamic (starts at 65536, is halved on non-finite gradients, doubled after 2000 good "
        "steps) or off (stays at 1). A power of two leaves MX and NVFP4 codes bit-identical. It "
        "matters at the ends of the scale range and for unscaled casts; steps with non-finite "
        "gradients are skipped.",
        "dynamic",
        among=("dynamic", "off"),
    )
    patience: int = setting(
        "Stop when the validation loss has not improved for so many epochs; 0 never stops early.",
        0,
        check=AT_LEAST_0,
    )
    train_limit: int = setting(
        "Train on the first N images or letters only, for a quick try; 0 takes all.",
        0,
        check=AT_LEAST_0,
    )
    test_limit: int = setting(
        "Test on N images (the first) or windows of text (evenly spaced) only; 0 takes all.",
        0,
        check=AT_LEAST_0,
    )
    device: str = setting("cpu or cuda.", "cpu", among=BACKENDS)
    epoch_steps: int = setting(
        "Texts: optimizer steps between evaluations. 0 for images.", 0, check=AT_LEAST_0
    )
    context: int = setting(
        "Texts: tokens in a window, which is as far back as the model can look. 0 for images.",
        0,
        check=AT_LEAST_0,
    )
    tokenizer: str = setting(
        "Texts: char (one token per letter) or bpe (byte-pair encoding, trained on the corpus).", ""
    )
    vocab_size: int = setting(
        "Texts: tokens that bpe makes; 0 for char and for images.", 0, check=AT_LEAST_0
    )

    def __post_init__(self) -> None:
        _check_types(self)
        for field in dataclasses.fields(self):
            value, rules = getattr(self, field.name), field.metadata
            if rules.get("among") and value not in rules["among"]:
                raise ValueError(unknown_name(field.name.replace("_", " "), value, rules["among"]))
            if rules.get("check"):
                good, expected = rules["check"]
                self._require(field.name, good(value), expected)
        for name, parse in (("saved", parse_saved), ("recompute", parse_recompute)):
            try:
                parse(getattr(self, name))
            except ValueError as error:
                raise ValueError(f"--{name}: {error}") from error
        for kind in ("optimizer", "schedule"):
            parse_options(kind, getattr(self, kind), getattr(self, f"{kind}_options"))
        if self.patience and not self.val_share:
            raise ValueError(
                f"--patience: {self.patience} epochs without a better validation loss, but nothing "
                "is held out; the way out: add --val-share 0.1, or leave --patience out"
            )
        self._check_update()
        self._check_parallel()
        if self.error_feedback and "mxint" not in self.grad_comm:
            raise ValueError(
                "--grad-rounding: error_feedback: expected --grad-comm mxint8 or mxint16, got "
                f"{self.grad_comm}, which leaves nothing over; the way out: leave --grad-rounding "
                "out"
            )
        most = f"at most the {self.epochs} epochs"
        self._require("warmup_epochs", self.warmup_epochs <= self.epochs, most)

    @property
    def error_feedback(self) -> bool:
        """Whether what rounding gradients leaves over is added to the next step's."""
        return self.grad_rounding == "error_feedback"

    def _require(self, name: str, good: bool, expected: str) -> None:
        if not good:
            raise ValueError(f"{_flag(name)}: expected {expected}, got {getattr(self, name)!r}")

    def _check_parallel(self) -> None:
        """Refuse what looks at whole weights beside blocks that ranks share."""
        for good, what, way_out in (
            (self.shard == "none", f"--shard {self.shard} divides whole weights", "--shard none"),
            (
                not self.error_feedback,
                "what rounding left over is kept of whole weights",
                "--grad-rounding stochastic",
            ),
            (
                self.update == "after_backward",
                "ranks add up gradients of norms after the backward pass",
                "--update after_backward",
            ),
            (self.weights == "float32", "weights are split in float32", "--weights float32"),
            (
                self.optimizer_states == "float32",
                f"blocks of {self.optimizer_states} run along whole weights",
                "--optimizer-states float32",
            ),
        ):
            if self.tensor_parallel > 1 and not good:
                raise ValueError(
                    f"--tensor-parallel {self.tensor_parallel}: {what}; the way out: {way_out}, or "
                    "leave --tensor-parallel out"
                )

    def _check_update(self) -> None:
        """Refuse what needs all gradients at once beside updates in the backward pass."""
        if self.weights != "float32" and self.shard != "none":
            raise ValueError(
                f"--weights {self.weights}: --shard {self.shard} divides float32 weights; the way "
                "out: leave one of the two out"
            )
        if self.update == "after_backward":
            return
        for good, what, way_out in (
            (not self.clip_norm, "clipping reads all gradients first", "--clip-norm 0"),
            (
                self.loss_scale == "off",
                "a step whose gradients are not finite is skipped as a whole, and here weights "
                "have moved before it is known",
                "--loss-scale off",
            ),
            (self.micro_batches < 2, "micro-batches add up gradients", "--micro-batches 1"),
            (
                self.grad_comm == "float32" and self.shard == "none",
                "gradients are summed between ranks first",
                "leave --grad-comm and --shard out",
            ),
            (self.optimizer != "muon", "muon is two optimizers in one", "--optimizer adamw"),
        ):
            if not good:
                raise ValueError(f"--update in_backward: {what}; the way out: {way_out}")

    def check_model(self, model: str) -> None:
        """Refuse settings that a model's kind of data does not know or cannot use.

        Raises:
            ValueError: on those, and for an unknown model.
        """
        if model not in RUNS:
            raise ValueError(unknown_name("model", model, RUNS))
        kind, theirs = RUNS[model].kind, DATASETS[self.dataset].kind
        if kind != theirs:
            fit = [name for name, row in DATASETS.items() if row.kind == kind]
            raise ValueError(
                f"--dataset: expected {kind} for {model}, got {self.dataset!r}, which is {theirs}; "
                f"the way out: one of {', '.join(fit)}"
            )
        known = AUGMENTATIONS_OF[kind]
        if self.augment not in known:
            raise ValueError(unknown_name(f"augmentation of {kind}", self.augment, known))
        if kind == "text":
            self._check_text()
            return
        for name in TEXT_ONLY:
            if getattr(self, name):
                raise ValueError(
                    f"{_flag(name)}: {model} learns from images and has no use for it; the way "
                    "out: leave it out"
                )

    def _check_text(self) -> None:
        """Refuse settings that windows of text cannot be cut with."""
        for name in ("epoch_steps", "context"):
            self._require(name, getattr(self, name) >= 1, "a whole number, 1 or more")
        self._require("tokenizer", self.tokenizer in TOKENIZERS, f"one of {', '.join(TOKENIZERS)}")
        if (self.tokenizer == "bpe") != (self.vocab_size > 0):
            raise ValueError(
                "--vocab-size: expected with --tokenizer bpe and not without, got "
                f"{self.vocab_size} with {self.tokenizer}"
            )


def _check_types(config: Settings) -> None:
    """Refuse values of another type; whole numbers become floats where a float is expected."""
    for name, kind in typing.get_type_hints(type(config)).items():
        value = getattr(config, name, None)
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            object.__setattr__(config, name, float(value))
        elif kind in (int, float, str, bool) and type(value) is not kind:
            raise TypeError(f"{name}: expected {kind.__name__}, got {value!r}")
