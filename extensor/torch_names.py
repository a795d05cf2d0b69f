"""What PyTorch's names are called here: for error messages and docs/from-pytorch.md.

A name whose meaning is the same is simply there. This table has the others: each is one that people
type, does not exist here, and has something in its place.
"""

from __future__ import annotations

from types import ModuleType

__all__ = ["TORCH_NAMES", "attribute_error"]

_FUNCTIONAL = "et.relu, et.cross_entropy and the other functions of extensor"

TORCH_NAMES: dict[str, dict[str, str]] = {
    "extensor": {
        "tensor": "et.ExTensor(data)",
        "Tensor": "et.ExTensor",
        "array": "et.ExTensor(data)",
        "as_tensor": "et.asarray(data)",
        "manual_seed": "rng= in layers, seed= in et.randn and nn.apply_recipe; no seed is global",
        "half": "et.float16",
        "float": "et.float32",
        "double": "et.float64",
        "int": "et.int32",
        "long": "et.int64",
        "cuda": 'x.to("cuda") and model.to("cuda")',
        "device": '"cpu" or "cuda", a string',
        "set_grad_enabled": "et.no_grad() or et.enable_grad()",
        "inference_mode": "et.no_grad()",
        "func": "et.grad, et.vjp and et.hvp",
        "compile": "et.capture(step), for a step on a GPU",
        "amp": "nn.apply_recipe(model, recipe) and et.optim.MXGradScaler",
        "clamp": "et.clip(x, min, max)",
        "mm": "et.matmul(a, b)",
        "bmm": "et.matmul(a, b)",
        "chunk": "et.split(x, sections, axis)",
        "index_select": "et.take(x, indices, axis)",
        "masked_select": "x[mask]",
        "masked_fill": "et.where(mask, value, x)",
        "amax": "et.max(x, axis)",
        "amin": "et.min(x, axis)",
        "norm": "et.linalg.vector_norm(x)",
        "randint": "et.ExTensor of numpy's Generator.integers",
        "randperm": "et.ExTensor of numpy's Generator.permutation",
        "allclose": "numpy.allclose(x.numpy(), y.numpy())",
        "is_tensor": "isinstance(x, et.ExTensor)",
        "mse_loss": "et.mse(x, target)",
        "gradcheck": "et.testing.gradcheck(f, inputs)",
    },
    "ExTensor": {
        "dim": "x.ndim",
        "numel": "x.size",
        "nelement": "x.size",
        "t": "x.T",
        "type": "x.to(dtype) or x.dtype",
        "long": "x.to(et.int64)",
        "int": "x.to(et.int32)",
        "bool": "x.to(et.bool)",
        "contiguous": "x itself, as kernels take any strides; or x.clone(), a copy",
        "copy": "x.clone()",
        "clamp": "x.clip(low, high)",
        "clamp_": "x = x.clip(low, high)",
        "amax": "x.max(axis)",
        "amin": "x.min(axis)",
        "mm": "x @ y",
        "bmm": "x @ y",
        "pow": "x ** y",
        "add": "x + y",
        "sub": "x - y",
        "mul": "x * y",
        "div": "x / y",
        "add_": "x = x + y; in place are x[i] = v and x.copy_(y)",
        "sub_": "x = x - y; in place are x[i] = v and x.copy_(y)",
        "mul_": "x = x * y; in place are x[i] = v and x.copy_(y)",
        "div_": "x = x / y; in place are x[i] = v and x.copy_(y)",
        "fill_": "x[...] = value",
        "zero_": "x[...] = 0",
        "normal_": "et.randn(shape, seed=0)",
        "detach_": "x.detach()",
        "expand": "x.broadcast_to(shape)",
        "repeat": "et.tile(x, repeats)",
        "chunk": "x.split(sections, axis)",
        "index_select": "x.take(indices, axis)",
        "masked_fill": "et.where(mask, value, x)",
        "norm": "et.linalg.vector_norm(x)",
        "argsort": "et.argsort(x)",
        "sort": "et.sort(x)",
        "topk": "et.topk(x, k)",
        "tril": "et.tril(x)",
        "triu": "et.triu(x)",
        "is_cuda": 'x.device == "cuda"',
        "is_leaf": "x.node is None",
        "grad_fn": "x.node",
        "retain_grad": "et.grad(f), which takes a function",
        "register_hook": "et.vjp, or module.register_forward_hook",
    },
    "Module": {
        "register_buffer": "self.name = nn.Buffer(values)",
        "register_parameter": "self.name = nn.Parameter(values)",
        "add_module": "self.name = module",
        "register_module": "self.name = module",
        "children": "module.named_children()",
        "apply": "[f(m) for m in module.modules()]",
        "get_parameter": "dict(module.named_parameters())[path]",
        "get_submodule": "dict(module.named_modules())[path]",
        "float": "nothing: the weights are float32 already",
        "half": 'nn.apply_recipe(model, "bf16"), which keeps float32 weights',
        "bfloat16": 'nn.apply_recipe(model, "bf16"), which keeps float32 weights',
        "register_full_backward_hook": "module.register_forward_hook, or et.vjp",
        "register_backward_hook": "module.register_forward_hook, or et.vjp",
        "compile": "et.capture(step), for a step on a GPU",
    },
    "extensor.nn": {
        "functional": _FUNCTIONAL,
        "utils": "et.optim.clip_grad_norm and et.optim.clip_grad_value",
        "CrossEntropyLoss": "et.cross_entropy(scores, labels)",
        "MSELoss": "et.mse(x, target)",
        "L1Loss": "et.l1(x, target)",
        "NLLLoss": "et.nll(log_probabilities, labels)",
        "BCELoss": "et.binary_cross_entropy(p, target)",
        "BCEWithLogitsLoss": "et.binary_cross_entropy_with_logits(x, target)",
        "KLDivLoss": "et.kl_div",
        "AdaptiveAvgPool2d": "nn.GlobalAvgPool2d(), for one value per channel",
        "Hardswish": "nn.HardSwish",
        "Hardsigmoid": "nn.HardSigmoid",
        "Hardtanh": "nn.HardTanh",
        "InstanceNorm2d": "nn.InstanceNorm",
        "TransformerEncoderLayer": "nn.TransformerBlock",
    },
    "extensor.autograd": {
        "Function": "a primitive with its gradient: docs/how-to/add-an-op.md",
        "grad": "et.grad(f), which takes a function",
        "no_grad": "et.no_grad()",
        "gradcheck": "et.testing.gradcheck(f, inputs)",
        "gradgradcheck": "et.testing.gradgradcheck(f, inputs)",
    },
    "extensor.optim": {
        "lr_scheduler": "et.optim.Cosine, et.optim.OneCycle and other functions of the step",
    },
}
"""PyTorch's name, and what to write instead, by where it is looked for."""


def attribute_error(owner: str, obj: object, name: str) -> AttributeError:
    """The error for a name that does not exist.

    Args:
        owner: a key of `TORCH_NAMES`.
        obj: what was asked for the name.
        name: the name.

    Returns:
        The error; for a name of PyTorch's its message says what to write.

    >>> from extensor.torch_names import attribute_error
    >>> attribute_error("ExTensor", et.zeros(2), "numel")
    AttributeError("'ExTensor' object has no attribute 'numel'; write x.size")
    """
    is_module = isinstance(obj, ModuleType)
    asked = f"module {owner!r}" if is_module else f"{type(obj).__name__!r} object"
    instead = TORCH_NAMES[owner].get(name)
    hint = "" if instead is None else f"; write {instead}"
    return AttributeError(f"{asked} has no attribute {name!r}{hint}", name=name, obj=obj)
