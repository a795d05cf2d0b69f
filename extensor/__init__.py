"""extensor: tensors in block-scaled low precision, with gradients.

    import extensor as et

    x = et.randn(4, 64)
    q = x.to_mxfp4()            # packed codes and scales
    q.dequantize()              # float32 again

Only names live here. Operations are imported with the package: a family's `__all__` names them.
Layers, optimizers, recipes, reports and tests are imported when they are first asked for.
"""

from __future__ import annotations

import importlib
import math
import os
import sys
from typing import TYPE_CHECKING, Any

from extensor import _public
from extensor._public import *
from extensor.array_api.namespace import __array_api_version__, __array_namespace_info__
from extensor.autograd.capture import capture
from extensor.autograd.mode import enable_grad, is_grad_enabled, no_grad
from extensor.autograd.tensor import ExTensor
from extensor.dtypes import (
    BLOCKED,
    DType,
    bfloat16,
    bool_,
    complex64,
    complex128,
    float16,
    float32,
    float64,
    int8,
    int16,
    int32,
    int64,
    promote,
    uint8,
    uint16,
    uint32,
    uint64,
)
from extensor.formats import DIALECTS, ELEMENTS, FORMATS
from extensor.torch_names import attribute_error

if TYPE_CHECKING:
    from extensor import inspect, io, nn, optim, testing
    from extensor import models as models  # type: ignore[attr-defined]
    from extensor.array_api import fft, linalg
    from extensor.autograd.checkpoint import checkpoint
    from extensor.generation import generate
    from extensor.inspect import compare_layers
    from extensor.io import load, save
    from extensor.nn.ptq import load_quantized, quantize_model, save_quantized
    from extensor.ops.prequantized import prequantized_conv2d, prequantized_matmul
    from extensor.ops.quantized import layer_context, quantized_conv2d, quantized_matmul
    from extensor.quant.recipe import Recipe
    from extensor.quant.recipes import RECIPES
    from extensor.quant.reference import RunningAmax
    from extensor.quant.schemes import SCHEMES, Scheme
    from extensor.quant.spec import Hadamard, QuantSpec

__all__ = [
    "BLOCKED", "DIALECTS", "ELEMENTS", "FORMATS", "RECIPES", "SCHEMES", "DType", "ExTensor",
    "Hadamard", "QuantSpec", "Recipe", "RunningAmax", "Scheme", "__array_api_version__",
    "__array_namespace_info__", "__version__", "bfloat16", "bool", "bool_", "capture", "checkpoint",
    "compare_layers", "complex64", "complex128", "e", "enable_grad", "fft", "float16", "float32",
    "float64", "generate", "inf", "inspect", "int8", "int16", "int32", "int64", "io",
    "is_grad_enabled", "layer_context", "linalg", "load", "load_quantized", "models", "nan",
    "newaxis", "nn",
    "no_grad", "optim", "pi", "prequantized_conv2d", "prequantized_matmul", "promote",
    "quantize_model", "quantized_conv2d", "quantized_matmul", "save", "save_quantized", "testing",
    "uint8", "uint16", "uint32", "uint64",
]  # fmt: skip
__all__ += [name for name in vars(_public) if not name.startswith("_")]

__version__ = "0.1.0"

# An installed package holds `models` and `training`; a checkout has them beside it (docs/adr/0017).
_folder = os.path.dirname(__file__)
if not os.path.isdir(os.path.join(_folder, "models")):
    __path__.append(os.path.dirname(_folder))

bool = bool_
e, inf, nan, pi, newaxis = math.e, math.inf, math.nan, math.pi, None

_MODULES = {
    name: f"extensor.{'array_api.' if name in ('fft', 'linalg') else ''}{name}"
    for name in ("fft", "inspect", "io", "linalg", "models", "nn", "optim", "testing")
}
_NAMES = {
    "extensor.autograd.checkpoint": "checkpoint",
    "extensor.generation": "generate",
    "extensor.inspect": "compare_layers",
    "extensor.io": "load save",
    "extensor.nn.ptq": "load_quantized quantize_model save_quantized",
    "extensor.ops.prequantized": "prequantized_conv2d prequantized_matmul",
    "extensor.ops.quantized": "layer_context quantized_conv2d quantized_matmul",
    "extensor.quant.recipe": "Recipe",
    "extensor.quant.recipes": "RECIPES",
    "extensor.quant.reference": "RunningAmax",
    "extensor.quant.schemes": "SCHEMES Scheme",
    "extensor.quant.spec": "Hadamard QuantSpec",
}
_LAZY = {name: module for module, names in _NAMES.items() for name in names.split()}
"""Which module has a name that is imported when it is first asked for, as `_MODULES` are."""


def __getattr__(name: str) -> Any:
    """Blocked dtypes, from the table of formats, and what is imported when it is asked for."""
    if name in BLOCKED:
        return BLOCKED[name]
    found: Any
    if name in _MODULES:
        found = importlib.import_module(_MODULES[name])
    elif name in _LAZY:
        found = getattr(importlib.import_module(_LAZY[name]), name)
    else:
        raise attribute_error("extensor", sys.modules[__name__], name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    """What is public, so that completion shows nothing else; `__all__` and the open modules."""
    return sorted({*__all__, *BLOCKED, "config", "dtypes", "errors", "formats", "quant", "random"})
