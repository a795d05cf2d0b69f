"""Optimizers, learning-rate schedules, gradient clipping and loss scaling."""

from extensor.optim.adagrad import Adagrad
from extensor.optim.adam import Adam
from extensor.optim.adamw import AdamW
from extensor.optim.clip import clip_grad_norm, clip_grad_value
from extensor.optim.grad_scale import GradScaleReport, MXGradScaler
from extensor.optim.lars import LARS
from extensor.optim.lion import Lion
from extensor.optim.muon import Muon
from extensor.optim.optimizer import Optimizer, ParamGroup
from extensor.optim.rmsprop import RMSprop
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
from extensor.optim.sgd import SGD

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
