"""EXPERIMENTS: what is trained, how long, and with which recipes.

The learning rate is found for the baseline alone; all arms then take it. Tokens a weight count the
weights of the blocks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..config import RunConfig
from ..runs import defaults

__all__ = ["EXPERIMENTS", "Experiment"]


@dataclass(frozen=True)
class Experiment:
    """A comparison of recipes on one model and data set.

    Attributes:
        doc: one line for the command line.
        model: a row of `RUNS`.
        settings: what differs from that row.
        arms: recipes or schedules of recipes.
        rates: learning rates that the baseline tries first, shorter; one rate needs no trial.
        tuning_epochs: how long a trial is.
        seeds: of every arm.
        telemetry: steps between records of each layer's health; 0 for none.
        branch: epochs that the baseline trains once for each seed; all arms go on from there.
        pairs: arms that are compared with each other, beside each with the baseline.
    """

    doc: str
    model: str
    settings: Mapping[str, Any]
    arms: tuple[str, ...]
    rates: tuple[float, ...]
    tuning_epochs: int
    seeds: int = 3
    telemetry: int = 0
    branch: int = 0
    pairs: tuple[tuple[str, str], ...] = ()

    @property
    def baseline(self) -> str:
        """The first arm, to which gaps are measured."""
        return self.arms[0]

    @property
    def flags(self) -> tuple[str, ...]:
        """Of `train`: a GPU replays steps."""
        return ("--graph",) if self.settings.get("device") == "cuda" else ()

    def trials(self) -> list[RunConfig]:
        """The baseline's runs that find the learning rate; none where one rate is given."""
        if len(self.rates) == 1:
            return []
        short = {"epochs": self.tuning_epochs, "warmup_epochs": self._warmup(self.tuning_epochs)}
        return [self._run(self.baseline, 0, rate, **short) for rate in self.rates]

    def runs(self, rate: float) -> list[RunConfig]:
        """Every arm with every seed; all arms of a seed come before the next seed."""
        return [self._run(arm, seed, rate) for seed in range(self.seeds) for arm in self.arms]

    def trunks(self, rate: float) -> list[RunConfig]:
        """The baseline with every seed, of which the first epochs are trained."""
        seeds = range(self.seeds if self.branch else 0)
        return [self._run(self.baseline, seed, rate) for seed in seeds]

    def _warmup(self, epochs: int) -> float:
        return float(min(self.settings.get("warmup_epochs", 0.5), epochs / 4))

    def _run(self, recipe: str, seed: int, rate: float, **changes: Any) -> RunConfig:
        base = defaults(self.model, self.settings.get("dataset"))
        values = {**base, **self.settings, "lr": rate, **changes}
        return RunConfig(**values, recipe=recipe, seed=seed)


_ARMS = (
    "bf16", "mxfp4", "mxfp8_rebased", "quartet", "quartet2", "nvfp4_nvidia", "mxfp4_tseng",
    "mxfp4_nearest", "mxfp4_hadamard_random", "mxfp4_hadamard", "mxfp8_nvidia", "fp8_block",
    "mxfp4_hadamard_per_step", "mxfp4,bf16@90%", "nvfp4_forward", "nvfp4_backward",
    "nvfp4_4over6", "quartet2_4over6",
    "mxfp8_e5m2g", "mxfp8_ocp", "fp8_tensor", "mxfp6", "mxint8", "nvfp4_fp8exact",
    "mxfp4,bf16@95%",
)  # fmt: skip

_BRANCHES = (
    "bf16",
    *(
        f"bf16,{name}" if "@" in name else f"bf16,{name}@50%"
        for name in (
            "nvfp4_nvidia", "nvfp4_4over6", "quartet2", "nvfp4_forward", "nvfp4_backward", "mxfp4",
            "mxfp4_nearest", "mxfp4_hadamard", "mxfp4_hadamard_random", "mxfp4_hadamard_per_step",
            "mxfp8_nvidia", "mxfp8_e5m2g", "fp8_block", "mxfp8_rebased", "quartet", "mxfp4_tseng",
            "mxfp6", "mxint8", "mxfp8_ocp", "fp8_tensor", "mxfp4@50%,bf16@90%",
        )
    ),
)  # fmt: skip
"""Each recipe from the middle of one bf16 run on. When a small model learns to copy is chance, and
decides its loss for long; here all arms of a seed share it."""

_PAIRS = (
    ("bf16,mxfp4@50%,bf16@90%", "bf16,mxfp4@50%"),
    *((f"bf16,{one}@50%", f"bf16,{other}@50%") for one, other in (
        ("nvfp4_4over6", "nvfp4_nvidia"), ("quartet2", "nvfp4_nvidia"),
        ("nvfp4_forward", "quartet2"), ("nvfp4_backward", "nvfp4_forward"),
        ("fp8_block", "mxfp8_nvidia"), ("mxfp8_e5m2g", "mxfp8_nvidia"),
        ("mxfp8_rebased", "mxfp8_nvidia"), ("mxfp4_nearest", "mxfp4"),
        ("mxfp4_hadamard", "mxfp4"), ("mxfp4_hadamard", "mxfp4_nearest"),
        ("mxfp4_hadamard_random", "mxfp4"), ("mxfp4_hadamard_per_step", "mxfp4"),
        ("mxfp4_hadamard_per_step", "mxfp4_hadamard"),
        ("mxfp4_hadamard_per_step", "mxfp4_hadamard_random"),
        ("quartet", "mxfp4"), ("nvfp4_nvidia", "mxfp4"),
    )),
)  # fmt: skip
"""The field's questions, each one arm against another."""

_LARGE = (1e-3, 2e-3, 4e-3)
"""Rates that models of 30 million weights and more try."""


def _llama(
    variant: str,
    weights: float,
    batch: int,
    arms: tuple[str, ...],
    seeds: int,
    tokens: float = 25,
    rounds: int = 10,
    rates: tuple[float, ...] = (2e-3, 4e-3, 8e-3),
    branch: int = 0,
) -> Experiment:
    """A size of the series: so many tokens a weight of the blocks; a fifth of them for a trial."""
    steps = round(tokens * weights / (batch * 512) / rounds)
    return Experiment(
        f"Llama of {variant} weights on Linux's C, {tokens:g} tokens a weight, on a GPU",
        "llama",
        {
            "variant": variant, "batch_size": batch, "epochs": rounds, "epoch_steps": steps,
            "warmup_epochs": 0.5, "test_limit": 512, "device": "cuda", "activations": "bfloat16",
        },
        arms,
        rates,
        rounds // 5,
        seeds,
        branch=branch,
        pairs=_PAIRS if branch else (),
    )  # fmt: skip


EXPERIMENTS: dict[str, Experiment] = {
    "small": Experiment(
        "Llama of 0.4 million weights on the C of Linux's kernel, mm and lib; a CPU in minutes",
        "llama",
        {
            "dataset": "linux_kernel", "variant": "0.4m", "vocab_size": 1024, "context": 64,
            "batch_size": 16, "epochs": 8, "epoch_steps": 50, "warmup_epochs": 1.0,
            "test_limit": 256, "train_limit": 6_000_000,
        },
        (
            "bf16", "mxfp8_nvidia", "mxfp4", "mxfp4_hadamard", "quartet", "nvfp4_nvidia",
            "quartet2", "mxfp4,bf16@75%",
        ),
        (2e-3, 4e-3, 8e-3),
        3,
        seeds=3,
        telemetry=100,
    ),
    # The rates of a size whose trials are done: one for all lengths.
    "3m_short": _llama("3m", 3.1e6, 64, _ARMS, 3, tokens=5, rounds=5, rates=(4e-3,)),
    "3m": _llama("3m", 3.1e6, 64, _ARMS, 3),
    "3m_branch": _llama(
        "3m", 3.1e6, 64, _BRANCHES, 6, tokens=16, rounds=4, rates=(4e-3,), branch=2,
    ),
    "10m_branch": _llama(
        "10m", 10.6e6, 64, _BRANCHES, 6, tokens=16, rounds=4, rates=(2e-3,), branch=2,
    ),
    "30m_branch": _llama(
        "30m", 29.5e6, 128, _BRANCHES, 6, tokens=6, rounds=4, rates=(2e-3,), branch=2,
    ),
    # Once through every fourth million letters of the text, for many seeds.
    "30m_branch_seeds": _llama(
        "30m", 29.5e6, 128, _BRANCHES, 12, tokens=3.4, rounds=4, rates=(2e-3,), branch=2,
    ),
    # Sizes beside each other at as many tokens a weight: 6 up to 30m_branch, 1.5 for the largest.
    "3m_branch_short": _llama(
        "3m", 3.1e6, 64, _BRANCHES, 6, tokens=6, rounds=4, rates=(4e-3,), branch=2,
    ),
    "10m_branch_short": _llama(
        "10m", 10.6e6, 64, _BRANCHES, 6, tokens=6, rounds=4, rates=(2e-3,), branch=2,
    ),
    "30m_branch_short": _llama(
        "30m", 29.5e6, 128, _BRANCHES, 3, tokens=1.5, rounds=4, rates=(2e-3,), branch=2,
    ),
    "98m_branch_short": _llama(
        "98m", 100.6e6, 128, _BRANCHES, 3, tokens=1.5, rounds=4, rates=(1e-3,), branch=2,
    ),
    "3m_branch_long": _llama(
        "3m", 3.1e6, 64, _BRANCHES, 6, tokens=32, rounds=4, rates=(4e-3,), branch=2,
    ),
    "3m_long": _llama("3m", 3.1e6, 64, _ARMS, 3, tokens=100, rates=(4e-3,)),
    "10m_short": _llama("10m", 10.6e6, 64, _ARMS, 3, tokens=5, rounds=5, rates=(2e-3,)),
    "10m": _llama("10m", 10.6e6, 128, _ARMS, 3),
    "30m_short": _llama("30m", 29.5e6, 128, _ARMS, 3, tokens=5, rounds=5, rates=_LARGE),
    "30m": _llama("30m", 29.5e6, 128, _ARMS, 3, rates=_LARGE),
    "98m": _llama(
        "98m", 100.6e6, 128, ("bf16", "mxfp8_nvidia", "mxfp4", "quartet", "quartet2"), 1,
        rates=_LARGE,
    ),
    "lenet": Experiment(
        "LeNet-5 on digits, a CPU in minutes",
        "lenet",
        {},
        ("fp32", "bf16", "mxfp8_nvidia", "mxfp4", "mxfp4_all", "quartet", "quartet2"),
        (0.03,),
        1,
    ),
    "lenet_fashion": Experiment(
        "LeNet-5 on 15,000 images of Fashion-MNIST in CIFAR-10's shape, a CPU in minutes",
        "lenet",
        {
            "dataset": "fashion_mnist_rgb", "train_limit": 15_000, "epochs": 3,
            "warmup_epochs": 0.25,
        },
        (*_ARMS, "fp32", "mxfp4_all"),
        (0.03,),  # found for fp32 on all images
        1,
        telemetry=235,
    ),
    "resnet18_fashion": Experiment(
        "ResNet-18 on 15,000 images of Fashion-MNIST in CIFAR-10's shape, on a GPU",
        "resnet",
        {
            "dataset": "fashion_mnist_rgb", "train_limit": 15_000, "batch_size": 128, "epochs": 3,
            "warmup_epochs": 0.5, "device": "cuda",
        },
        (*_ARMS, "fp32"),
        (0.02, 0.05),
        1,
    ),
    "resnet18": Experiment(
        "ResNet-18 on CIFAR-10, on a GPU",
        "resnet",
        {"device": "cuda"},
        ("fp32", "bf16", "mxfp8_nvidia", "mxfp4", "quartet", "nvfp4_nvidia", "quartet2"),
        (0.1,),
        1,
    ),
}  # fmt: skip
"""By the name that the command takes."""
