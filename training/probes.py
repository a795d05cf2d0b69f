"""What flows through a model's layers in one pass: inputs, outputs, gradients of the outputs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import extensor as et
from extensor import ExTensor
from extensor.backends.generic import conv_pool
from extensor.backends.protocol import Array, Window
from extensor.nn import Conv2d, Module

__all__ = ["Probes", "gradient_rows", "input_rows", "probed"]


@dataclass
class Probes:
    """Tensors of each layer's last use, by path, in the order of the forward pass.

    Attributes:
        inputs: as the layer got them, detached.
        outputs: as the layer gave them, detached.
        zeros: added to the outputs, so that their gradients are the outputs'.
    """

    inputs: dict[str, ExTensor] = field(default_factory=dict)
    outputs: dict[str, ExTensor] = field(default_factory=dict)
    zeros: dict[str, ExTensor] = field(default_factory=dict)

    def gradient(self, path: str) -> ExTensor | None:
        """The gradient of a layer's output; None before backward, or where it got none."""
        return self.zeros[path].grad if path in self.zeros else None


@contextmanager
def probed(layers: Mapping[str, Module]) -> Iterator[Probes]:
    """Watch layers while passes run inside."""
    found = Probes()

    def wrapped(path: str, forward: Any) -> Any:
        def run(x: ExTensor, *rest: Any, **named: Any) -> ExTensor:
            y = forward(x, *rest, **named)
            probe = et.zeros(*y.shape, device=y.device, requires_grad=True)
            for kept, tensor in (
                (found.inputs, x.detach()),
                (found.outputs, y.detach()),
                (found.zeros, probe),
            ):
                kept.pop(path, None)  # a layer used twice stands where it was used last
                kept[path] = tensor
            out: ExTensor = y + probe
            return out

        return run

    try:
        for path, layer in layers.items():
            object.__setattr__(layer, "forward", wrapped(path, layer.forward))
        yield found
    finally:
        for layer in layers.values():
            vars(layer).pop("forward", None)


def input_rows(layer: Module, x: Array, xp: Any) -> Array:
    """The input as the product sees it: (M, K), patches for a convolution (of its first group)."""
    if not isinstance(layer, Conv2d):
        return x.reshape(-1, x.shape[-1])
    window = Window(layer.kernel_size, layer.stride, layer.padding, layer.dilation)
    return conv_pool.patch_matrix(x[:, : x.shape[1] // layer.groups], window, 1, xp)[0].T


def gradient_rows(g: Array) -> Array:
    """The gradient of an output, of channels last: (M, N)."""
    last = g.transpose(0, 2, 3, 1) if g.ndim == 4 else g
    return last.reshape(-1, last.shape[-1])
