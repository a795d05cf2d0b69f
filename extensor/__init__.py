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
from typing import TYPE_CHECKING, Any

from extensor.autograd.functional import grad, hvp, value_and_grad, vjp
from extensor.autograd.mode import enable_grad, is_grad_enabled, no_grad
from extensor.autograd.tensor import ExTensor
from extensor.dtypes import (
    BLOCKED,
    DType,
    bfloat16,
    bool_,
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
from extensor.ops.activation import (
    elu,
    gelu,
    hard_sigmoid,
    hard_swish,
    hard_tanh,
    leaky_relu,
    log_softmax,
    mish,
    prelu,
    relu,
    relu6,
    selu,
    silu,
    softmax,
    softplus,
    swiglu,
)
from extensor.ops.arithmetic import (
    add,
    astype,
    bitwise_and,
    bitwise_or,
    bitwise_xor,
    clip,
    clone,
    divide,
    equal,
    floor_divide,
    greater,
    greater_equal,
    less,
    less_equal,
    logical_and,
    logical_not,
    logical_or,
    logical_xor,
    maximum,
    minimum,
    multiply,
    negative,
    not_equal,
    power,
    remainder,
    subtract,
    where,
)
from extensor.ops.attention import scaled_dot_product_attention
from extensor.ops.conv import conv2d
from extensor.ops.creation import (
    arange,
    empty,
    empty_like,
    eye,
    from_dlpack,
    from_numpy,
    full,
    full_like,
    linspace,
    meshgrid,
    ones,
    ones_like,
    rand,
    rand_like,
    randn,
    randn_like,
    tril,
    triu,
    zeros,
    zeros_like,
)
from extensor.ops.einsum import einsum
from extensor.ops.elementwise import (
    abs,
    ceil,
    cos,
    erf,
    exp,
    expm1,
    floor,
    isfinite,
    isinf,
    isnan,
    log,
    log1p,
    log2,
    log10,
    round,
    rsqrt,
    sigmoid,
    sign,
    sin,
    sqrt,
    square,
    tan,
    tanh,
    trunc,
)
from extensor.ops.indexing import gather, scatter_add, take
from extensor.ops.linalg import dot, inner, matmul, outer, tensordot
from extensor.ops.loss import (
    binary_cross_entropy,
    binary_cross_entropy_with_logits,
    cross_entropy,
    focal,
    hinge,
    huber,
    kl_div,
    l1,
    mse,
    nll,
    smooth_l1,
)
from extensor.ops.pool import avg_pool2d, global_avg_pool2d, max_pool2d
from extensor.ops.reduce import (
    all,
    any,
    argmax,
    argmin,
    cumsum,
    logsumexp,
    max,
    mean,
    min,
    prod,
    std,
    sum,
    var,
)
from extensor.ops.shape import (
    broadcast_to,
    concatenate,
    expand_dims,
    flatten,
    flip,
    pad,
    permute,
    ravel,
    repeat,
    reshape,
    roll,
    split,
    squeeze,
    stack,
    swapaxes,
    tile,
    transpose,
    unsqueeze,
)
from extensor.ops.sort import argsort, median, percentile, sort, topk

if TYPE_CHECKING:
    from extensor import inspect, io, nn, optim, testing
    from extensor.inspect import compare_layers
    from extensor.ops.quantized import layer_context, quantized_conv2d, quantized_matmul
    from extensor.quant.recipe import Recipe
    from extensor.quant.recipes import RECIPES
    from extensor.quant.reference import RunningAmax
    from extensor.quant.spec import Hadamard, QuantSpec

__all__ = [
    "BLOCKED", "DIALECTS", "ELEMENTS", "FORMATS", "RECIPES", "DType", "ExTensor", "Hadamard",
    "QuantSpec", "Recipe", "RunningAmax", "__version__", "abs", "add", "all", "any", "arange",
    "argmax", "argmin", "argsort", "astype", "avg_pool2d", "bfloat16", "binary_cross_entropy",
    "binary_cross_entropy_with_logits", "bitwise_and", "bitwise_or", "bitwise_xor", "bool", "bool_",
    "broadcast_to", "ceil", "clip", "clone", "compare_layers", "concatenate", "conv2d", "cos",
    "cross_entropy", "cumsum", "divide", "dot", "einsum", "elu", "empty", "empty_like",
    "enable_grad", "equal", "erf", "exp", "expand_dims", "expm1", "eye", "flatten", "flip",
    "float16", "float32", "float64", "floor", "floor_divide", "focal", "from_dlpack", "from_numpy",
    "full", "full_like", "gather", "gelu", "global_avg_pool2d", "grad", "greater", "greater_equal",
    "hard_sigmoid", "hard_swish", "hard_tanh", "hinge", "huber", "hvp", "inner", "inspect", "int8",
    "int16", "int32", "int64", "io", "is_grad_enabled", "isfinite", "isinf", "isnan", "kl_div",
    "l1", "layer_context", "leaky_relu", "less", "less_equal", "linspace", "log", "log1p", "log2",
    "log10", "log_softmax", "logical_and", "logical_not", "logical_or", "logical_xor", "logsumexp",
    "matmul", "max", "max_pool2d", "maximum", "mean", "median", "meshgrid", "min", "minimum",
    "mish", "mse", "multiply", "negative", "nll", "nn", "no_grad", "not_equal", "ones", "ones_like",
    "optim", "outer", "pad", "percentile", "permute", "power", "prelu", "prod", "promote",
    "quantized_conv2d", "quantized_matmul", "rand", "rand_like", "randn", "randn_like", "ravel",
    "relu", "relu6", "remainder", "repeat", "reshape", "roll", "round", "rsqrt",
    "scaled_dot_product_attention", "scatter_add", "selu", "sigmoid", "sign", "silu", "sin",
    "smooth_l1", "softmax", "softplus", "sort", "split", "sqrt", "square", "squeeze", "stack",
    "std", "subtract", "sum", "swapaxes", "swiglu", "take", "tan", "tanh", "tensordot", "testing",
    "tile", "topk", "transpose", "tril", "triu", "trunc", "uint8", "uint16", "uint32", "uint64",
    "unsqueeze", "value_and_grad", "var", "vjp", "where", "zeros", "zeros_like",
]  # fmt: skip

__version__ = "0.1.0"

bool = bool_

_LAZY = {
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
