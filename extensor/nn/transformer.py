"""The transformer block and its feed-forward layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from extensor.autograd.creation import Seed
from extensor.autograd.tensor import ExTensor
from extensor.errors import unknown_name
from extensor.nn.attention import MultiheadAttention
from extensor.nn.checks import check_size
from extensor.nn.linear import Linear
from extensor.nn.module import Module
from extensor.nn.norm import LayerNorm, RMSNorm
from extensor.ops.activation import gelu
from extensor.ops.gated import swiglu

__all__ = ["FeedForward", "TransformerBlock"]

NORMS: Mapping[str, Callable[[int, bool], Module]] = MappingProxyType(
    {
        "layer": lambda width, bias: LayerNorm(width, bias=bias),
        "rms": lambda width, _: RMSNorm(width),
    }
)
ACTIVATIONS: Mapping[str, tuple[int, Callable[[ExTensor], ExTensor]]] = MappingProxyType(
    {"gelu": (1, gelu), "swiglu": (2, swiglu)}
)
"""By name: how many times the hidden width the function takes, and the function."""


class FeedForward(Module):
    """Two Linear layers around an activation, on each token by itself.

    Args:
        width: of input and output.
        hidden: width between them.
        activation: "gelu", or "swiglu": the first layer then gives gate and value side by side, and
            the hidden values are silu(gate) value (arXiv 2002.05202, eq. 6).
        bias: whether the layers have biases.
        rng: draws the initial weights.

    Raises:
        ValueError: for sizes below 1 or an unknown activation; when called, for an input that is
            not (..., width).

    >>> et.nn.FeedForward(64, 256, "swiglu", rng=0)(et.zeros((2, 10, 64))).shape
    (2, 10, 64)
    """

    def __init__(
        self, width: int, hidden: int, activation: str = "gelu", bias: bool = True, rng: Seed = None
    ) -> None:
        if activation not in ACTIVATIONS:
            raise ValueError(unknown_name("activation", activation, ACTIVATIONS))
        self.activation = activation
        times, self._function = ACTIVATIONS[activation]
        self.up = Linear(width, times * check_size("hidden", hidden), bias, rng)
        self.down = Linear(hidden, width, bias, rng)

    def forward(self, x: ExTensor) -> ExTensor:
        """See :meth:`extensor.nn.Module.forward`: (..., width) -> the same."""
        return self.down(self._function(self.up(x)))

    def extra_repr(self) -> str:
        """See :meth:`extensor.nn.Module.extra_repr`."""
        return f"activation={self.activation!r}"


class TransformerBlock(Module):
    """x + attention(norm(x)), then x + feed_forward(norm(x)): the pre-norm block.

    Args:
        attention: mixes tokens; its width is the block's.
        feed_forward: maps each token by itself, of the same width.
        norm: "layer" (LayerNorm) or "rms" (RMSNorm).
        bias: whether LayerNorm has a bias.

    Raises:
        ValueError: for two widths or an unknown norm; when called, for an input that is not
            (..., T, width).

    Source: GPT-2 (Radford et al. 2019, section 2.3); arXiv 2002.04745 on where the norm stands.

    >>> attention = et.nn.MultiheadAttention(64, heads=4, causal=True, rotary=10000.0, rng=0)
    >>> block = et.nn.TransformerBlock(attention, et.nn.FeedForward(64, 256, rng=1), norm="rms")
    >>> block(et.zeros((2, 10, 64))).shape
    (2, 10, 64)
    """

    feeds_layers = ("norm1", "norm2")

    def __init__(
        self,
        attention: MultiheadAttention,
        feed_forward: FeedForward,
        norm: str = "layer",
        bias: bool = True,
    ) -> None:
        if norm not in NORMS:
            raise ValueError(unknown_name("norm", norm, NORMS))
        width = attention.width
        if feed_forward.up.in_features != width:
            raise ValueError(
                "TransformerBlock: expected attention and feed_forward of one width, got "
                f"{width} and {feed_forward.up.in_features}"
            )
        self.norm1 = NORMS[norm](width, bias)
        self.attention = attention
        self.norm2 = NORMS[norm](width, bias)
        self.feed_forward = feed_forward

    def forward(self, x: ExTensor) -> ExTensor:
        """See :meth:`extensor.nn.Module.forward`: (..., T, width) -> the same."""
        x = x + self.attention(self.norm1(x))
        out: ExTensor = x + self.feed_forward(self.norm2(x))
        return out
