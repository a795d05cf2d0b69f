"""Optimizers, learning-rate schedules, gradient clipping and loss scaling."""

import sys
from typing import NoReturn

from extensor.optim.adam import Adam, AdamW
from extensor.optim.clip import clip_grad_norm, clip_grad_value
from extensor.optim.grad_scale import GradScaleReport, MXGradScaler
from extensor.optim.lion import Lion
from extensor.optim.muon import Muon
from extensor.optim.optimizer import Optimizer
from extensor.optim.params import ParamGroup
from extensor.optim.rmsprop import Adagrad, RMSprop
from extensor.optim.schedule import (
    WSD,
    Cosine,
    Exponential,
    Linear,
    MultiStep,
    OneCycle,
    ReduceLROnPlateau,
    Schedule,
    Step,
    Warmup,
    WarmupCosine,
)
from extensor.optim.sgd import LARS, SGD
from extensor.torch_names import attribute_error

__all__ = [
    "LARS",
    "SGD",
    "WSD",
    "Adagrad",
    "Adam",
    "AdamW",
    "Cosine",
    "Exponential",
    "GradScaleReport",
    "Linear",
    "Lion",
    "MXGradScaler",
    "MultiStep",
    "Muon",
    "OneCycle",
    "Optimizer",
    "ParamGroup",
    "RMSprop",
    "ReduceLROnPlateau",
    "Schedule",
    "Step",
    "Warmup",
    "WarmupCosine",
    "clip_grad_norm",
    "clip_grad_value",
]


def __getattr__(name: str) -> NoReturn:
    raise attribute_error("extensor.optim", sys.modules[__name__], name)


def __dir__() -> list[str]:
    return sorted(__all__)
