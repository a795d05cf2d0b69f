"""Layers, initializers, and putting a recipe to work on a model."""

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
from extensor.nn.avg_pool2d import AvgPool2d
from extensor.nn.batch_norm2d import BatchNorm2d
from extensor.nn.conv2d import Conv2d
from extensor.nn.dropout import Dropout, Dropout2d
from extensor.nn.embedding import Embedding
from extensor.nn.flatten import Flatten
from extensor.nn.global_avg_pool2d import GlobalAvgPool2d
from extensor.nn.group_norm import GroupNorm, InstanceNorm
from extensor.nn.layer_norm import LayerNorm
from extensor.nn.linear import Linear
from extensor.nn.max_pool2d import MaxPool2d
from extensor.nn.module import Hook, Module
from extensor.nn.module_list import ModuleList
from extensor.nn.parameter import Buffer, Parameter
from extensor.nn.quantize import apply_recipe, gemm_layers
from extensor.nn.recurrent import GRU, LSTM
from extensor.nn.rms_norm import RMSNorm
from extensor.nn.separable import SeparableConv2d, depthwise_conv2d
from extensor.nn.sequential import Sequential
from extensor.nn.stored import load_quantized, quantize_model, save_quantized, stored_layers
from extensor.nn.transformer import FeedForward, TransformerBlock

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
    "LayerNorm",
    "LeakyReLU",
    "Linear",
    "LogSoftmax",
    "MaxPool2d",
    "Mish",
    "Module",
    "ModuleList",
    "MultiheadAttention",
    "PReLU",
    "Parameter",
    "RMSNorm",
    "ReLU",
    "ReLU6",
    "SeparableConv2d",
    "Sequential",
    "SiLU",
    "Sigmoid",
    "Softmax",
    "Softplus",
    "Tanh",
    "TransformerBlock",
    "apply_recipe",
    "depthwise_conv2d",
    "gemm_layers",
    "init",
    "load_quantized",
    "quantize_model",
    "save_quantized",
    "stored_layers",
]
