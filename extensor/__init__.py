"""extensor: tensors in block-scaled low precision, with gradients.

    import extensor as et

    x = et.randn(4, 64)
    q = x.to_mxfp4()            # packed codes and scales
    q.dequantize()              # float32 again

Only names live here. Operations are imported with the package; layers,
optimizers, recipes, reports and tests when they are first asked for.
"""

from __future__ import annotations

import importlib
import math
from typing import TYPE_CHECKING, Any

from extensor.autograd.capture import capture
from extensor.autograd.functional import grad, hvp, value_and_grad, vjp
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
from extensor.namespace import (
    __array_api_version__,
    __array_namespace_info__,
    asarray,
    can_cast,
    finfo,
    iinfo,
    isdtype,
    result_type,
)
from extensor.ops import public as _public
from extensor.ops.public import *

if TYPE_CHECKING:
    from extensor import fft, inspect, io, linalg, nn, optim, testing
    from extensor.inspect import compare_layers
    from extensor.nn.ptq import load_quantized, quantize_model, save_quantized
    from extensor.ops.quantized import layer_context, quantized_conv2d, quantized_matmul
    from extensor.ops.stored import stored_conv2d, stored_matmul
    from extensor.quant.recipe import Recipe
    from extensor.quant.recipes import RECIPES
    from extensor.quant.reference import RunningAmax
    from extensor.quant.schemes import SCHEMES, Scheme
    from extensor.quant.spec import Hadamard, QuantSpec

__all__ = [
    "BLOCKED",
    "DIALECTS",
    "ELEMENTS",
    "FORMATS",
    "RECIPES",
    "SCHEMES",
    "DType",
    "ExTensor",
    "Hadamard",
    "QuantSpec",
    "Recipe",
    "RunningAmax",
    "Scheme",
    "__array_api_version__",
    "__array_namespace_info__",
    "__version__",
    "asarray",
    "bfloat16",
    "bool",
    "bool_",
    "can_cast",
    "capture",
    "compare_layers",
    "complex64",
    "complex128",
    "e",
    "enable_grad",
    "fft",
    "finfo",
    "float16",
    "float32",
    "float64",
    "grad",
    "hvp",
    "iinfo",
    "inf",
    "inspect",
    "int8",
    "int16",
    "int32",
    "int64",
    "io",
    "is_grad_enabled",
    "isdtype",
    "layer_context",
    "linalg",
    "load_quantized",
    "nan",
    "newaxis",
    "nn",
    "no_grad",
    "optim",
    "pi",
    "promote",
    "quantize_model",
    "quantized_conv2d",
    "quantized_matmul",
    "result_type",
    "save_quantized",
    "stored_conv2d",
    "stored_matmul",
    "testing",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "value_and_grad",
    "vjp",
]  # fmt: skip
__all__ += _public.__all__

__version__ = "0.1.0"

bool = bool_
e, inf, nan, pi, newaxis = math.e, math.inf, math.nan, math.pi, None

_LAZY = {
    "fft": "extensor.fft",
    "linalg": "extensor.linalg",
    "inspect": "extensor.inspect",
    "io": "extensor.io",
    "nn": "extensor.nn",
    "optim": "extensor.optim",
    "testing": "extensor.testing",
    "compare_layers": "extensor.inspect:compare_layers",
    "Hadamard": "extensor.quant.spec:Hadamard",
    "QuantSpec": "extensor.quant.spec:QuantSpec",
    "Recipe": "extensor.quant.recipe:Recipe",
    "RECIPES": "extensor.quant.recipes:RECIPES",
    "SCHEMES": "extensor.quant.schemes:SCHEMES",
    "Scheme": "extensor.quant.schemes:Scheme",
    "load_quantized": "extensor.nn.ptq:load_quantized",
    "quantize_model": "extensor.nn.ptq:quantize_model",
    "save_quantized": "extensor.nn.ptq:save_quantized",
    "stored_conv2d": "extensor.ops.stored:stored_conv2d",
    "stored_matmul": "extensor.ops.stored:stored_matmul",
    "RunningAmax": "extensor.quant.reference:RunningAmax",
    "layer_context": "extensor.ops.quantized:layer_context",
    "quantized_conv2d": "extensor.ops.quantized:quantized_conv2d",
    "quantized_matmul": "extensor.ops.quantized:quantized_matmul",
}


def __getattr__(name: str) -> Any:
    """Blocked dtypes, from the table of formats, and what is imported when it is asked for."""
    if name in BLOCKED:
        return BLOCKED[name]
    if name not in _LAZY:
        raise AttributeError(f"module 'extensor' has no attribute {name!r}")
    module, _, attribute = _LAZY[name].partition(":")
    found: Any = importlib.import_module(module)
    globals()[name] = found = getattr(found, attribute) if attribute else found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *BLOCKED, *_LAZY})
