"""Layers, initializers, applying recipes, and post-training quantization."""

import sys
from typing import NoReturn

from extensor.nn import init
from extensor.nn.activation import (
    ELU,
    GELU,
    SELU,
    HardSigmoid,
    HardSwish,
    HardTanh,
    LeakyReLU,
    LogSoftmax,
    Mish,
    PReLU,
    ReLU,
    ReLU6,
    Sigmoid,
    SiLU,
    Softmax,
    Softplus,
    Tanh,
)
from extensor.nn.attention import MultiheadAttention
from extensor.nn.container import Flatten, ModuleList, Sequential
from extensor.nn.conv_pool import (
    AvgPool2d,
    Conv2d,
    GlobalAvgPool2d,
    MaxPool2d,
    SeparableConv2d,
    depthwise_conv2d,
)
from extensor.nn.dropout import Dropout, Dropout2d
from extensor.nn.embedding import Embedding
from extensor.nn.kv_cache import KVCache, new_cache
from extensor.nn.linear import Linear
from extensor.nn.lora import DoRA, LoRA, MergedWeight, add_adapters, merge_adapters
from extensor.nn.mixed import LossChange, choose_formats, loss_changes, quantize_layers
from extensor.nn.mixture import MixtureOfExperts
from extensor.nn.module import Hook, Module, StateNames
from extensor.nn.norm import BatchNorm2d, GroupNorm, InstanceNorm, LayerNorm, RMSNorm
from extensor.nn.parameter import Buffer, Parameter
from extensor.nn.ptq import (
    dequantize_model,
    load_quantized,
    packed_layers,
    quantize_model,
    save_quantized,
)
from extensor.nn.recipe import apply_recipe, cast_weights, gemm_layers, switch_recipe
from extensor.nn.recompute import recompute
from extensor.nn.recurrent import GRU, LSTM
from extensor.nn.rope import Rope, RopeScaling, RotaryTable
from extensor.nn.transformer import FeedForward, TransformerBlock
from extensor.torch_names import attribute_error

__all__ = [
    "ELU",
    "GELU",
    "GRU",
    "LSTM",
    "SELU",
    "AvgPool2d",
    "BatchNorm2d",
    "Buffer",
    "Conv2d",
    "DoRA",
    "Dropout",
    "Dropout2d",
    "Embedding",
    "FeedForward",
    "Flatten",
    "GlobalAvgPool2d",
    "GroupNorm",
    "HardSigmoid",
    "HardSwish",
    "HardTanh",
    "Hook",
    "InstanceNorm",
    "KVCache",
    "LayerNorm",
    "LeakyReLU",
    "Linear",
    "LoRA",
    "LogSoftmax",
    "LossChange",
    "MaxPool2d",
    "MergedWeight",
    "Mish",
    "MixtureOfExperts",
    "Module",
    "ModuleList",
    "MultiheadAttention",
    "PReLU",
    "Parameter",
    "RMSNorm",
    "ReLU",
    "ReLU6",
    "Rope",
    "RopeScaling",
    "RotaryTable",
    "SeparableConv2d",
    "Sequential",
    "SiLU",
    "Sigmoid",
    "Softmax",
    "Softplus",
    "StateNames",
    "Tanh",
    "TransformerBlock",
    "add_adapters",
    "apply_recipe",
    "cast_weights",
    "choose_formats",
    "depthwise_conv2d",
    "dequantize_model",
    "gemm_layers",
    "init",
    "load_quantized",
    "loss_changes",
    "merge_adapters",
    "new_cache",
    "packed_layers",
    "quantize_layers",
    "quantize_model",
    "recompute",
    "save_quantized",
    "switch_recipe",
]


def __getattr__(name: str) -> NoReturn:
    raise attribute_error("extensor.nn", sys.modules[__name__], name)


def __dir__() -> list[str]:
    return sorted(__all__)
